"""What a person calls a run, and which one that is."""

from __future__ import annotations

import difflib
import time
from collections.abc import Container, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, func, select

from shoal.core.errors import RunNotFound
from shoal.store.liveness import Process, status_now
from shoal.store.schema import runs, tags

LAST = "last"
SHOWN = 10
"""How many runs a message lists."""


def resolve(connection: Connection, ref: str, where: str) -> int:
    """The key of the run that `ref` means. Raises RunNotFound, with those that it could be."""
    exact = _matching(connection, runs.c.id == ref)
    if exact:
        return _key(exact[0])
    if ref == LAST:
        return _last(connection, where)
    tagged = runs.c.key.in_(select(tags.c.run).where(tags.c.tag == ref))
    begins = func.substr(runs.c.id, 1, len(ref)) == ref
    # A name or tag does not win over the beginning of another run's id, nor the other way round: either may be meant.
    candidates = _matching(connection, (runs.c.name == ref) | tagged | begins) if ref else []
    if len(candidates) == 1:
        return _key(candidates[0])
    if not candidates:
        raise RunNotFound(_none(connection, ref, where))
    so_tagged = set(connection.scalars(select(tags.c.run).where(tags.c.tag == ref)))
    raise RunNotFound(_several(ref, sorted(candidates, key=lambda row: -row.created), so_tagged))


def _key(row: Row[Any]) -> int:
    return int(row.key)


def _last(connection: Connection, where: str) -> int:
    key = connection.scalar(select(runs.c.key).order_by(runs.c.created.desc(), runs.c.key.desc()).limit(1))
    if key is None:
        raise RunNotFound(_no_runs(where))
    return int(key)


def _matching(connection: Connection, condition: ColumnElement[bool]) -> list[Row[Any]]:
    """Only what a list of candidates shows."""
    columns = ("key", "id", "name", "created", "status", "updated", "host", "pid", "pid_started", "boot")
    return list(connection.execute(select(*(runs.c[name] for name in columns)).where(condition)))


def _several(ref: str, candidates: Sequence[Row[Any]], tagged: Container[int]) -> str:
    now = time.time()
    lines = [f"{ref!r} means {len(candidates)} runs. Give the id of one, or more of its first characters:"]
    for row in candidates[:SHOWN]:
        process = Process(host=row.host, pid=row.pid, started=row.pid_started, boot=row.boot)
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.created))
        status = status_now(row.status, process, row.updated, now)
        lines.append(f"  {row.id}  {when}  {status}  {_on_one_line(row.name)}  {_why(ref, row, tagged)}")
    if len(candidates) > SHOWN:
        lines.append(f"  and {len(candidates) - SHOWN} older ones")
    return "\n".join(lines)


def _on_one_line(name: str) -> str:
    return " ".join(name.split())


def _why(ref: str, row: Row[Any], tagged: Container[int]) -> str:
    """By what the run was found."""
    reasons = {
        "by name": row.name == ref,
        "by tag": _key(row) in tagged,
        "by the beginning of its id": row.id.startswith(ref),
    }
    return ", ".join(reason for reason, holds in reasons.items() if holds)


def _none(connection: Connection, ref: str, where: str) -> str:
    newest = select(runs.c.id, runs.c.name).order_by(runs.c.created.desc()).limit(1000)
    known = [text for row in connection.execute(newest) for text in (row.name, row.id) if text]
    if not known:
        return _no_runs(where)
    known += connection.scalars(select(tags.c.tag).distinct().limit(1000))
    near = difflib.get_close_matches(ref, dict.fromkeys(known), n=3)
    told = f"There is no run with the id, name or tag {ref!r} in the run store {where}."
    if near:
        return f"{told} Near it: {', '.join(near)}."
    return f"{told} `shoal runs` lists those that are there."


def _no_runs(where: str) -> str:
    return f"There are no runs yet in the run store {where}."
