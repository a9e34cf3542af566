"""Reading the run store, and what a person changes in it. `recorder` writes what runs tell.

    with Store.open() as store:
        for run in store.runs(limit=10): ...

One connection at a time, made when needed. A Store is used by the process that opened it, never by a child of it.
Every method raises StoreError if the database fails, and RunNotFound for a run that is not there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection, Engine, Row, Select, delete, func, insert, select
from sqlalchemy.exc import DBAPIError

from shoal.core.errors import ConfigError, RunNotFound, StoreError
from shoal.core.settings import Setting
from shoal.core.traffic import Traffic
from shoal.store import references, schema
from shoal.store.connect import (
    Address,
    engine_of,
    look_for_room,
    make_room,
    memory_engine,
    parse,
    reading_engine,
    writing,
)
from shoal.store.faults import is_unopenable, told_clearly
from shoal.store.home import store_url
from shoal.store.liveness import Process, status_now
from shoal.store.migrations import VERSION, migrate, refuse_newer, use_wal, version_of
from shoal.store.values import KILLED, LOST, RUNNING, CheckpointRow, EventRow, FlowRow, RunInfo, StepRow, WorkerRow

LONGEST_TAG = 64
_FEW = 500
"""Up to so many runs are asked for by key; for more, all tags are read."""
_MOST_NAMED = 10_000
"""Steps in one query; databases take some 30,000 values."""

_Value = TypeVar("_Value")


class Store:
    """See the module. Made by `open`."""

    def __init__(self, engine: Engine, address: Address) -> None:
        self._engine = engine
        self._address = address

    @classmethod
    def open(cls, url: str | None = None, *, create: bool = True) -> Store:
        """The store at `url` (None: see `store_url`), brought to the present version.

        Without `create`, a store that is not there is an empty one, and nothing is made. Raises StoreError for one that
        is corrupt, of a newer version, out of reach, or cannot be made, and ConfigError where there is no home.
        """
        address = parse(store_url() if url is None else url)
        if address.file is not None and not _exists(address.file):
            if not create:
                look_for_room(address.file)
                return cls(_empty(), address)
            make_room(address.file)
        engine = engine_of(address)
        with told_clearly(address.where, password=address.password), _disposed_on_error(engine):
            engine, version = _look(engine, address)
            refuse_newer(version, address.where)
            if version == 0 and not create:
                engine.dispose()
                return cls(_empty(), address)
            if version < VERSION:
                if address.file is not None:
                    use_wal(engine)
                migrate(engine, address.where)
        return cls(engine, address)

    @property
    def where(self) -> str:
        """The file or the server, without a password."""
        return self._address.where

    def close(self) -> None:
        self._engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Lists

    def runs(
        self, *, limit: int | None = None, name: str | None = None, tag: str | None = None, status: str | None = None
    ) -> list[RunInfo]:
        """Newest first. `status` is as shown: also killed and lost, which are found out here."""
        query = select(schema.runs).order_by(schema.runs.c.created.desc(), schema.runs.c.key.desc())
        if name is not None:
            query = query.where(schema.runs.c.name == name)
        if tag is not None:
            query = query.where(schema.runs.c.key.in_(select(schema.tags.c.run).where(schema.tags.c.tag == tag)))
        if status is not None:
            query = query.where(schema.runs.c.status == (RUNNING if status in (KILLED, LOST) else status))
        found_out_later = status in (RUNNING, KILLED, LOST)
        with self._reading() as connection:
            infos = _infos(connection, query if found_out_later else query.limit(limit))
        if found_out_later:
            infos = [info for info in infos if info.status == status][:limit]
        return infos

    def find(self, ref: str) -> RunInfo:
        """The run with id `ref`; else the newest for "last"; else the only one that is so named or tagged, or whose id
        begins so. RunNotFound says which ones it could be, and why each."""
        with self._reading() as connection:
            key = references.resolve(connection, ref, self.where)
            return _infos(connection, select(schema.runs).where(schema.runs.c.key == key))[0]

    # One run

    def steps(self, run_id: str, *, most: int | None = None) -> list[StepRow]:
        """In order. With `most`, about so many, evenly from the first to the last, both of them kept."""
        with self._reading() as connection:
            key = _key(connection, run_id)
            every = _of_run(schema.steps, key).order_by(schema.steps.c.step)
            wanted = None if most is None else _evenly(connection, key, most)
            rows = connection.execute(every.where(schema.steps.c.step.in_(wanted))).all() if wanted else []
            if not wanted or 2 * len(rows) < len(wanted):  # all are wanted, or many are missing in between
                rows = _thinned(connection.execute(every).all(), most)
        return [_step(row) for row in rows]

    def events(self, run_id: str) -> list[EventRow]:
        """In the order in which they came."""
        return self._rows(
            run_id,
            schema.events,
            [schema.events.c.key],
            lambda row: EventRow(row.time, row.step, row.kind, row.data),
        )

    def checkpoints(self, run_id: str) -> list[CheckpointRow]:
        """By step. Those that were deleted since are among them."""
        return self._rows(
            run_id,
            schema.checkpoints,
            [schema.checkpoints.c.step],
            lambda row: CheckpointRow(row.step, row.time, row.path, bool(row.best)),
        )

    def workers(self, run_id: str) -> list[WorkerRow]:
        return self._rows(
            run_id,
            schema.workers,
            [schema.workers.c.worker],
            lambda row: WorkerRow(
                row.worker,
                row.samples,
                row.seconds,
                row.bytes_sent,
                row.memory,
                row.pid,
                row.host,
                _traffic(row.traffic),
            ),
        )

    def traffic(self, run_id: str) -> Traffic:
        """What all workers have sent, all starts together. Empty where nothing is known."""
        with self._reading() as connection:
            key = _key(connection, run_id)
            return _traffic(connection.scalar(select(schema.runs.c.traffic).where(schema.runs.c.key == key)))

    def flows(self, run_id: str) -> list[FlowRow]:
        """What worker 0 sent in a step, by kind, codec and link: by step, for the steps in which it changed."""
        _, *order = schema.flows.primary_key
        return self._rows(
            run_id,
            schema.flows,
            order,
            lambda row: FlowRow(row.step, row.kind, row.codec, row.link, row.bytes, row.messages),
        )

    # Changes

    def tag(self, run_id: str, add: Sequence[str] = (), remove: Sequence[str] = ()) -> list[str]:
        """The run's tags afterwards. Raises ConfigError for a tag that cannot be one."""
        wanted = {_checked(tag) for tag in add}
        with self.writing() as connection:
            key = _key(connection, run_id)
            connection.execute(delete(schema.tags).where(schema.tags.c.run == key, schema.tags.c.tag.in_(list(remove))))
            there = _tags(connection, [key]).get(key, [])
            missing = wanted - set(there)
            if missing:
                connection.execute(insert(schema.tags), [{"run": key, "tag": tag} for tag in sorted(missing)])
        return sorted(wanted | set(there))

    def remove(self, run_id: str) -> None:
        """Forget the run: its rows, not its folder."""
        with self.removing(run_id):
            pass

    @contextmanager
    def removing(self, run_id: str) -> Iterator[None]:
        """Within: what else has to go with the run. It is forgotten if that ends well, and stays if it raises.

        A store that cannot be written raises before. Others cannot write meanwhile, so it is not to take long.
        """
        with self.writing() as connection:
            connection.execute(delete(schema.runs).where(schema.runs.c.key == _key(connection, run_id)))
            yield

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """One transaction, for what in this room writes into the store."""
        with self._told(), writing(self._engine) as connection:
            yield connection

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with self._told(), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def _told(self) -> Iterator[None]:
        with told_clearly(self.where, password=self._address.password):
            yield

    def _rows(self, run_id: str, table: Any, order: Sequence[Any], make: Callable[[Row[Any]], _Value]) -> list[_Value]:
        with self._reading() as connection:
            key = _key(connection, run_id)
            return [make(row) for row in connection.execute(_of_run(table, key).order_by(*order))]


def _exists(file: Path) -> bool:
    try:
        return file.exists()
    except OSError as error:
        raise StoreError(f"The run store {file} cannot be looked at: {error.strerror}.") from error


@contextmanager
def _disposed_on_error(engine: Engine) -> Iterator[None]:
    try:
        yield
    except BaseException:
        engine.dispose()
        raise


def _look(engine: Engine, address: Address) -> tuple[Engine, int]:
    """An engine that can read the store, and its version."""
    try:
        with engine.connect() as connection:
            return engine, version_of(connection)
    except DBAPIError as error:
        file = address.file
        if file is None or not is_unopenable(error) or not _is_settled(file):
            raise
        # On a read-only medium SQLite cannot make the files by which it shares a store in WAL mode.
        engine.dispose()
        alone = reading_engine(file)
        with _disposed_on_error(alone), alone.connect() as connection:
            return alone, version_of(connection)


def _is_settled(file: Path) -> bool:
    """Whether all of the store is in the file itself, nothing waiting in the log beside it."""
    try:
        log = file.with_name(file.name + "-wal")
        return file.is_file() and (not log.exists() or log.stat().st_size == 0)
    except OSError:
        return False


def _empty() -> Engine:
    engine = memory_engine()
    migrate(engine, "in memory")
    return engine


def _key(connection: Connection, run_id: str) -> int:
    key = connection.scalar(select(schema.runs.c.key).where(schema.runs.c.id == run_id))
    if key is None:
        raise RunNotFound(f"There is no run with the id {run_id!r} in the run store.")
    return int(key)


def _of_run(table: Any, key: int) -> Select[Any]:
    return select(table).where(table.c.run == key)


def _evenly(connection: Connection, key: int, most: int) -> list[int] | None:
    """The numbers of `most` steps, found by two look-ups in the primary key, however long the run is.

    None if there are not so many, or too many to name them.
    """
    if most < 1:
        raise ConfigError(f"most={most}: at least one step must be asked for")
    of_run = schema.steps.c.run == key
    first = select(func.min(schema.steps.c.step)).where(of_run).scalar_subquery()
    last = select(func.max(schema.steps.c.step)).where(of_run).scalar_subquery()
    low, high = connection.execute(select(first, last)).one()
    if low is None or high - low < most or most > _MOST_NAMED:
        return None
    return [low + place for place in _places(high - low + 1, most)]


def _thinned(rows: Sequence[Row[Any]], most: int | None) -> Sequence[Row[Any]]:
    return rows if most is None or len(rows) <= most else [rows[place] for place in _places(len(rows), most)]


def _places(count: int, most: int) -> list[int]:
    """`most` places among `count`, evenly, the last among them, and the first if there are two."""
    return [count - 1] if most == 1 else [(count - 1) * place // (most - 1) for place in range(most)]


def _infos(connection: Connection, query: Select[Any]) -> list[RunInfo]:
    rows = connection.execute(query).all()
    tags = _tags(connection, [row.key for row in rows])
    now = time.time()
    return [_info(row, tags.get(row.key, []), now) for row in rows]


def _tags(connection: Connection, keys: Sequence[int]) -> dict[int, list[str]]:
    query = select(schema.tags).order_by(schema.tags.c.run, schema.tags.c.tag)
    if len(keys) <= _FEW:
        query = query.where(schema.tags.c.run.in_(keys))
    found: dict[int, list[str]] = {}
    for row in connection.execute(query):
        found.setdefault(row.run, []).append(row.tag)
    return found


def _step(row: Row[Any]) -> StepRow:
    _, step, when, epoch, loss, samples, rate, norm, logs, *traffic = tuple(row)
    return StepRow(step, when, epoch, loss, samples, rate, norm, logs or {}, *traffic)


def _traffic(data: Any) -> Traffic:
    return Traffic() if data is None else msgspec.convert(data, Traffic)


_CHANGED = ("status", "user", "config", "tags", "git_dirty", "traffic")
_COPIED = tuple(name for name in RunInfo.__struct_fields__ if name not in _CHANGED)


def _info(row: Row[Any], tags: list[str], now: float) -> RunInfo:
    values = row._mapping
    process = Process(host=row.host, pid=row.pid, started=row.pid_started, boot=row.boot)
    return RunInfo(
        **{name: values[name] for name in _COPIED},
        status=status_now(row.status, process, row.updated, now),
        user=row.username,
        config=msgspec.convert(row.config, dict[str, Setting]),
        git_dirty=row.git_dirty,
        traffic=_traffic(row.traffic),
        tags=tags,
    )


def _checked(tag: str) -> str:
    tag = tag.strip()
    if not tag or len(tag) > LONGEST_TAG or "," in tag or not tag.isprintable():
        raise ConfigError(
            f"{tag[: LONGEST_TAG + 1]!r} cannot be a tag: "
            f"it must have 1 to {LONGEST_TAG} printable characters and no comma"
        )
    if tag == references.LAST:
        raise ConfigError(f"{tag!r} cannot be a tag: it always means the newest run. Give another word")
    return tag
