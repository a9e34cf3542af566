"""Writing one run into the store: what the recorder's thread does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, Table, delete, func, insert, select, update

from shoal.core.errors import StoreError
from shoal.core.events import (
    AnyEvent,
    CheckpointSaved,
    EvalDone,
    Notice,
    Preparing,
    RunEnded,
    RunFailed,
    RunStarted,
    ServersSeen,
    StepDone,
    WorkerSeen,
)
from shoal.core.traffic import Traffic, together
from shoal.store import schema
from shoal.store.steps import Breakdowns, add_steps
from shoal.store.store import Store
from shoal.store.values import RUNNING, NewRun, RunEnd

LONGEST_TEXT = 100_000
"""Of an error or a traceback, in characters; the end of it is kept."""

_MEASURED = ("EpochDone", "EvalDone")
"""Kinds of events that come again, as steps do, when a run goes on from an earlier step."""


class RunWriter:
    """One start of one run. Every method is one transaction: after an exception nothing of it is in the store, and it
    may be called again with the same arguments. Used by one thread."""

    def __init__(self, store: Store, new: NewRun) -> None:
        self._store = store
        self._new = new
        self._key: int | None = None
        self._resumed = False
        self._before = _Sums()
        self._now = _Progress()
        self._breakdowns = Breakdowns()

    @property
    def key(self) -> int:
        """The run's, in the store. Not before `begin`."""
        assert self._key is not None, "begin() comes first"
        return self._key

    def begin(self) -> None:
        """Insert the run, or count a resume of it."""
        runs = schema.runs.c
        with self._store.writing() as connection:
            query = select(runs.key, runs.seconds, runs.bytes_sent, runs.traffic).where(runs.id == self._new.id)
            there = connection.execute(query).one_or_none()
            if there is None:
                key, before = _insert(connection, self._new), _Sums()
            else:
                traffic = msgspec.convert(there.traffic or {}, Traffic)
                key, before = there.key, _Sums(there.seconds, there.bytes_sent, traffic)
                _resume(connection, key, self._new)
        self._key, self._before, self._resumed = key, before, there is not None

    def describe(self, git_commit: str | None, git_dirty: bool | None) -> None:
        """Add what takes a while to find out."""
        with self._store.writing() as connection:
            self._update(connection, {"git_commit": git_commit, "git_dirty": git_dirty})

    def write(self, happened: Sequence[AnyEvent], end: RunEnd | None = None) -> None:
        """Add what happened, in order; say that the run is alive, or with `end` how it ended."""
        progress = msgspec.structs.replace(self._now, traffic=dict(self._now.traffic))
        breakdowns = msgspec.structs.replace(self._breakdowns)
        for event in happened:
            progress.follow(event)
        values = progress.values(self._before)
        if end is not None:
            values |= _ending(end, values["bytes_sent"], self._before)
        with self._store.writing() as connection:
            key = self._update(connection, values)
            for part in _parts(happened):
                _add(connection, key, part, breakdowns, resumed=self._resumed)
        self._now, self._breakdowns = progress, breakdowns

    def _update(self, connection: Connection, values: dict[str, Any]) -> int:
        changed = connection.execute(update(schema.runs).where(schema.runs.c.key == self.key).values(**values))
        if changed.rowcount == 0:
            raise StoreError(f"Run {self._new.id} was removed from the run store {self._store.where} meanwhile.")
        return self.key


class _Sums(NamedTuple):
    """Over the starts before this one."""

    seconds: float = 0.0
    bytes_sent: int = 0
    traffic: Traffic = Traffic()


class _Progress(msgspec.Struct):
    """How far this start has come."""

    started: float | None = None
    seconds: float = 0.0
    step: int | None = None
    loss: float | None = None
    metrics: dict[str, float] | None = None
    traffic: dict[int, Traffic] = {}

    def follow(self, event: AnyEvent) -> None:
        match event:
            case RunStarted():
                self.started = event.time
                self.step = event.step
            case StepDone():
                self.step, self.loss = event.step, float(event.loss)
            case EvalDone():
                self.metrics = event.metrics
            case WorkerSeen():
                self.traffic[event.worker] = event.traffic
            case RunEnded():
                self.step, self.loss = event.step, float(event.loss)
                self.metrics = event.metrics or self.metrics
        if self.started is not None:
            self.seconds = max(self.seconds, event.time - self.started)

    def values(self, before: _Sums) -> dict[str, Any]:
        """For the run's row; what is not known is left as it is."""
        since = together(list(self.traffic.values()))
        known: dict[str, Any] = {"step": self.step, "loss": self.loss, "metrics": self.metrics}
        if since.flows:
            known["traffic"] = together([before.traffic, since])
        return {name: value for name, value in known.items() if value is not None} | {
            "updated": time.time(),
            "seconds": before.seconds + self.seconds,
            "bytes_sent": before.bytes_sent + since.bytes,
        }


def _add(connection: Connection, key: int, part: Sequence[AnyEvent], breakdowns: Breakdowns, *, resumed: bool) -> None:
    """`part` has a RunStarted at its beginning or nowhere."""
    if isinstance(part[0], RunStarted):
        _start(connection, key, part[0])
        breakdowns.begin()
        if resumed:
            part = [part[0], *_notice_of_gap(connection, key, part[0]), *part[1:]]
    add_steps(connection, key, part, breakdowns)
    _add_events(connection, key, part)
    _add_checkpoints(connection, key, part)
    _add_workers(connection, key, part)


def _parts(happened: Sequence[AnyEvent]) -> list[Sequence[AnyEvent]]:
    """Cut before each RunStarted, which takes back steps that came before it."""
    cuts = [place for place, event in enumerate(happened) if isinstance(event, RunStarted)]
    edges = sorted({0, *cuts, len(happened)})
    return [happened[low:high] for low, high in pairwise(edges)]


def _of_process(new: NewRun) -> dict[str, Any]:
    """What a resumed run has anew."""
    return {
        "name": _clean(new.name),
        "status": RUNNING,
        "updated": time.time(),
        "workers": new.workers,
        "run_dir": _clean(new.run_dir),
        "script": _clean(new.script),
        "command": new.command,
        "host": _clean(new.host),
        "username": _clean(new.user),
        "pid": new.pid,
        "pid_started": new.pid_started,
        "boot": new.boot,
        "config": new.config,
        "environment": new.environment,
        "git_commit": _clean(new.git_commit),
        "git_dirty": new.git_dirty,
        "version": _clean(new.version),
    }


def _insert(connection: Connection, new: NewRun) -> int:
    nothing = dict.fromkeys(
        ("batch_size", "total_steps", "steps_per_epoch", "samples_per_epoch", "step", "resumes", "bytes_sent"), 0
    )
    values = nothing | {"id": new.id, "created": new.created, "metrics": {}, "seconds": 0.0} | _of_process(new)
    key = connection.execute(insert(schema.runs).values(**values).returning(schema.runs.c.key)).scalar_one()
    return int(key)


def _resume(connection: Connection, key: int, new: NewRun) -> None:
    values = _of_process(new) | {"ended": None, "error": None, "traceback": None}
    connection.execute(
        update(schema.runs).where(schema.runs.c.key == key).values(**values, resumes=schema.runs.c.resumes + 1)
    )


def _start(connection: Connection, key: int, event: RunStarted) -> None:
    """Take back what the run does again, and what workers and servers told of themselves before."""
    events, workers = schema.events.c, schema.workers.c
    for table in (schema.steps, schema.flows):
        connection.execute(delete(table).where(table.c.run == key, table.c.step > event.step))
    again = (events.run == key, events.kind.in_(_MEASURED), events.step > event.step)
    connection.execute(delete(schema.events).where(*again))
    connection.execute(delete(schema.workers).where(workers.run == key))
    _forget_servers(connection, key)
    connection.execute(
        update(schema.runs)
        .where(schema.runs.c.key == key)
        .values(
            workers=event.workers,
            batch_size=event.batch_size,
            total_steps=event.total_steps,
            steps_per_epoch=event.steps_per_epoch,
            samples_per_epoch=event.samples_per_epoch,
        )
    )


def _notice_of_gap(connection: Connection, key: int, event: RunStarted) -> list[AnyEvent]:
    """A notice if the run goes on from a later step than the last one that was written, unless it was made before."""
    steps, events = schema.steps.c, schema.events.c
    first = 1 + (connection.scalar(select(func.max(steps.step)).where(steps.run == key)) or 0)
    if first > event.step:
        return []
    which = f"step {first} is" if first == event.step else f"steps {first}–{event.step} are"
    they = "it was" if first == event.step else "they were"
    text = f"{which} not in the store: the run was killed before {they} written"
    made = select(events.data).where(events.run == key, events.kind == "Notice", events.step == event.step)
    if any(data.get("text") == text for data in connection.scalars(made)):
        return []
    return [Notice(step=event.step, time=event.time, text=text)]


def _ending(end: RunEnd, bytes_sent: int, before: _Sums) -> dict[str, Any]:
    told: dict[str, Any] = {"step": end.step or None, "loss": end.loss, "metrics": end.metrics or None}
    return {name: value for name, value in told.items() if value is not None} | {
        "status": end.status,
        "ended": time.time(),
        "error": _clean(end.error),
        "traceback": _clean(end.traceback),
        "bytes_sent": max(bytes_sent, before.bytes_sent + end.bytes_sent),
    }


def _add_events(connection: Connection, key: int, part: Sequence[AnyEvent]) -> None:
    """What servers told takes the place of what they told before: a run has one such row."""
    newest = next((event for event in reversed(part) if isinstance(event, ServersSeen)), None)
    if newest is not None:
        _forget_servers(connection, key)
    rows = [
        {"run": key, "time": event.time, "step": event.step, "kind": type(event).__name__, "data": _data(event)}
        for event in part
        if not isinstance(event, StepDone | WorkerSeen | ServersSeen | Preparing) or event is newest
    ]
    if rows:
        connection.execute(insert(schema.events), rows)


def _forget_servers(connection: Connection, key: int) -> None:
    events = schema.events.c
    connection.execute(delete(schema.events).where(events.run == key, events.kind == ServersSeen.__name__))


def _data(event: AnyEvent) -> dict[str, Any]:
    """Its fields, but those that have a column, and what the run's own row has."""
    left_out = {"step", "time", "config"} if isinstance(event, RunStarted) else {"step", "time"}
    data = {name: value for name, value in msgspec.structs.asdict(event).items() if name not in left_out}
    if isinstance(event, RunFailed):
        data["traceback"] = event.traceback[-LONGEST_TEXT:]
    return data


def _add_checkpoints(connection: Connection, key: int, part: Iterable[AnyEvent]) -> None:
    rows = {
        event.path: {"run": key, "path": _clean(event.path), "step": event.step, "time": event.time, "best": event.best}
        for event in part
        if isinstance(event, CheckpointSaved)
    }
    _upsert(connection, schema.checkpoints, list(rows.values()))


def _add_workers(connection: Connection, key: int, part: Iterable[AnyEvent]) -> None:
    rows = {
        event.worker: {
            "run": key,
            "worker": event.worker,
            "samples": event.samples,
            "seconds": event.seconds,
            "bytes_sent": event.bytes_sent,
            "memory": event.memory,
            "pid": event.pid,
            "host": event.host,
            "traffic": event.traffic if event.traffic.flows else None,
        }
        for event in part
        if isinstance(event, WorkerSeen)
    }
    _upsert(connection, schema.workers, list(rows.values()))


def _upsert(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    """Insert rows, or replace those with the same primary key."""
    if not rows:
        return
    made = _insert_of(connection.dialect.name)(table)
    again = {column.name: made.excluded[column.name] for column in table.c if not column.primary_key}
    connection.execute(made.on_conflict_do_update(index_elements=list(table.primary_key), set_=again), rows)


def _insert_of(dialect: str) -> Callable[[Table], Any]:
    # The one that is not needed is not imported: that takes a while.
    if dialect == "sqlite":
        from sqlalchemy.dialects import sqlite

        return sqlite.insert
    from sqlalchemy.dialects import postgresql

    return postgresql.insert


def _clean(text: str | None) -> str | None:
    """What every database takes: no NUL, no half characters (paths may hold some), not too long."""
    if text is None:
        return None
    return text[-LONGEST_TEXT:].replace("\0", "\ufffd").encode(errors="replace").decode()
