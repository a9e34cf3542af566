"""Rows of the run store as the events that they were made from."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shoal.core import events as ev
from shoal.core.traffic import Traffic
from shoal.store.values import CheckpointRow, EventRow, RunInfo, StepRow


def replayed(
    info: RunInfo, steps: Iterable[StepRow], rows: Iterable[EventRow], checkpoints: Iterable[CheckpointRow]
) -> list[ev.AnyEvent]:
    """In order of time, with a `RunStarted` first."""
    found: list[ev.AnyEvent] = []
    for row in rows:
        if row.kind != "WorkerSeen" and (event := _event(row)) is not None:
            found.append(event)
    told = {(event.step, event.path) for event in found if isinstance(event, ev.CheckpointSaved)}
    found += [
        ev.CheckpointSaved(step=row.step, time=row.time, path=row.path, best=row.best)
        for row in checkpoints
        if (row.step, row.path) not in told
    ]
    found += [_step(row) for row in steps]
    found.sort(key=lambda event: event.time)
    return _started_first(info, found)


def _started_first(info: RunInfo, found: list[ev.AnyEvent]) -> list[ev.AnyEvent]:
    """Events are timed where they happen, on workers and where the run was started: their clocks may differ."""
    starts = [at for at, event in enumerate(found) if isinstance(event, ev.RunStarted)]
    start = found.pop(starts[0]) if starts else _start(info)
    earliest = min(event.time for event in (start, *found[:1]))
    return [msgspec.structs.replace(start, time=earliest), *found]


def _event(row: EventRow) -> ev.AnyEvent | None:
    fields = {**row.data, "type": row.kind, "step": row.step, "time": row.time}
    try:
        event: ev.AnyEvent = msgspec.convert(fields, ev.AnyEvent)
    except msgspec.ValidationError:
        return None
    return event


def _step(row: StepRow) -> ev.StepDone:
    return ev.StepDone(
        step=row.step,
        time=row.time,
        epoch=row.epoch,
        loss=row.loss,
        samples=row.samples,
        rates=[] if row.rate is None else [row.rate],
        norm=row.norm,
        logs=row.logs,
        traffic=_traffic(row),
    )


def _traffic(row: StepRow) -> Traffic | None:
    """Of a step, without its flows, which the store keeps apart."""
    if row.exchange is None:
        return None
    return Traffic(operations=row.operations or 0, exchange=row.exchange, exposed=row.exposed or 0.0)


def _start(info: RunInfo) -> ev.RunStarted:
    return ev.RunStarted(
        step=0,
        time=info.created,
        run_id=info.id,
        name=info.name,
        config=dict(info.config),
        run_dir=info.run_dir,
        workers=info.workers,
        total_steps=info.total_steps,
        steps_per_epoch=info.steps_per_epoch,
        samples_per_epoch=info.samples_per_epoch,
        batch_size=info.batch_size,
    )
