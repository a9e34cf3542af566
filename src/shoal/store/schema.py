"""The tables of the run store, as queries see them. `migrations` makes them; a test holds the two together."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
from sqlalchemy import BigInteger, Boolean, Column, Dialect, Integer, MetaData, Table, Text
from sqlalchemy.types import TypeDecorator, UserDefinedType

NOT_A_NUMBER = "nan"
"""How SQLite keeps NaN, which it would take for NULL. As text in a column of numbers it comes after all of them."""


class Real(UserDefinedType[float]):
    """A float of 64 bits, NaN and the infinities included, on every database."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "DOUBLE PRECISION"

    def bind_processor(self, dialect: Dialect) -> Callable[[float | None], Any] | None:
        return for_sqlite if dialect.name == "sqlite" else None

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], float | None]:
        return lambda value: None if value is None else float(value)


def for_sqlite(value: float | None) -> Any:
    return NOT_A_NUMBER if value is not None and value != value else value


class Plain(TypeDecorator[Any]):
    """Plain data (what msgspec makes builtins of) as JSON text; NaN and the infinities survive."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else to_json(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


def to_json(value: Any) -> str:
    """Never raises for what a run can hold: what is not plain data is kept as its text."""
    return json.dumps(msgspec.to_builtins(value, str_keys=True, enc_hook=repr))


tables = MetaData()

meta = Table(
    "shoal_meta",
    tables,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
)

runs = Table(
    "shoal_runs",
    tables,
    Column("key", Integer, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("name", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("created", Real, nullable=False),
    Column("updated", Real, nullable=False),
    Column("ended", Real),
    Column("workers", Integer, nullable=False),
    Column("batch_size", BigInteger, nullable=False),
    Column("total_steps", BigInteger, nullable=False),
    Column("steps_per_epoch", BigInteger, nullable=False),
    Column("samples_per_epoch", BigInteger, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("loss", Real),
    Column("metrics", Plain, nullable=False),
    Column("seconds", Real, nullable=False),
    Column("resumes", Integer, nullable=False),
    Column("run_dir", Text),
    Column("script", Text, nullable=False),
    Column("command", Plain, nullable=False),
    Column("host", Text, nullable=False),
    Column("username", Text, nullable=False),
    Column("pid", BigInteger, nullable=False),
    Column("pid_started", Real, nullable=False),
    Column("config", Plain, nullable=False),
    Column("environment", Plain, nullable=False),
    Column("git_commit", Text),
    Column("git_dirty", Boolean),
    Column("version", Text, nullable=False),
    Column("error", Text),
    Column("traceback", Text),
    Column("bytes_sent", BigInteger, nullable=False),
    Column("boot", Text, nullable=False),
    Column("traffic", Plain),
)

tags = Table(
    "shoal_tags",
    tables,
    Column("run", Integer, primary_key=True),
    Column("tag", Text, primary_key=True),
)

steps = Table(
    "shoal_steps",
    tables,
    Column("run", Integer, primary_key=True),
    Column("step", BigInteger, primary_key=True),
    Column("time", Real, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("loss", Real, nullable=False),
    Column("samples", BigInteger, nullable=False),
    Column("rate", Real),
    Column("norm", Real),
    Column("logs", Plain),
    Column("bytes_sent", BigInteger),
    Column("messages", BigInteger),
    Column("operations", BigInteger),
    Column("exchange", Real),
    Column("exposed", Real),
)

flows = Table(
    "shoal_flows",
    tables,
    Column("run", Integer, primary_key=True),
    Column("step", BigInteger, primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("codec", Text, primary_key=True),
    Column("link", Text, primary_key=True),
    Column("bytes", BigInteger, nullable=False),
    Column("messages", BigInteger, nullable=False),
)

events = Table(
    "shoal_events",
    tables,
    Column("key", BigInteger, primary_key=True),
    Column("run", Integer, nullable=False),
    Column("time", Real, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("kind", Text, nullable=False),
    Column("data", Plain, nullable=False),
)

checkpoints = Table(
    "shoal_checkpoints",
    tables,
    Column("run", Integer, primary_key=True),
    Column("path", Text, primary_key=True),
    Column("step", BigInteger, nullable=False),
    Column("time", Real, nullable=False),
    Column("best", Boolean, nullable=False),
)

workers = Table(
    "shoal_workers",
    tables,
    Column("run", Integer, primary_key=True),
    Column("worker", Integer, primary_key=True),
    Column("samples", BigInteger, nullable=False),
    Column("seconds", Plain, nullable=False),
    Column("bytes_sent", BigInteger, nullable=False),
    Column("memory", BigInteger, nullable=False),
    Column("pid", BigInteger, nullable=False),
    Column("host", Text, nullable=False),
    Column("traffic", Plain),
)
