"""Rows of the run store as the events that they were made from."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shoal.core import events as ev
from shoal.store.values import CheckpointRow, EventRow, RunInfo, StepRow


def replayed(
    info: RunInfo, steps: Iterable[StepRow], rows: Iterable[EventRow], checkpoints: Iterable[CheckpointRow]
) -> list[tuple[float, ev.AnyEvent]]:
    """In order of time, with a `RunStarted` first."""
    found: list[tuple[float, ev.AnyEvent]] = []
    for row in rows:
        if row.kind != "WorkerSeen" and (event := _event(row)) is not None:
            found.append((row.time, event))
    told = {(event.step, event.path) for _, event in found if isinstance(event, ev.CheckpointSaved)}
    found += [
        (row.time, ev.CheckpointSaved(step=row.step, path=row.path, best=row.best))
        for row in checkpoints
        if (row.step, row.path) not in told
    ]
    found += [(row.time, _step(row)) for row in steps]
    found.sort(key=lambda timed: timed[0])
    return _started_first(info, found)


def _started_first(info: RunInfo, found: list[tuple[float, ev.AnyEvent]]) -> list[tuple[float, ev.AnyEvent]]:
    """Steps are timed by a worker and the rest where the run was recorded: their clocks may differ."""
    starts = [at for at, (_, event) in enumerate(found) if isinstance(event, ev.RunStarted)]
    when, start = found.pop(starts[0]) if starts else (info.created, _start(info))
    earliest = min([when, *(timed[0] for timed in found[:1])])
    return [(earliest, start), *found]


def _event(row: EventRow) -> ev.AnyEvent | None:
    try:
        event: ev.AnyEvent = msgspec.convert({**row.data, "type": row.kind, "step": row.step}, ev.AnyEvent)
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
    )


def _start(info: RunInfo) -> ev.RunStarted:
    return ev.RunStarted(
        step=0,
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
