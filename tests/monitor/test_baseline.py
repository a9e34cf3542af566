"""Which run on one worker a run is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.core.events import AnyEvent, RunStarted, StepDone
from shoal.monitor.report.baseline import find_baseline
from shoal.store.store import Store
from shoal.store.values import COMPLETE, FAILED, NewRun, RunEnd, RunInfo
from shoal.store.writing import RunWriter


def at(time: float, event: AnyEvent) -> AnyEvent:
    """The event as it happened at that time."""
    return msgspec.structs.replace(event, time=time)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store.open(f"sqlite:///{tmp_path / 'shoal.db'}") as opened:
        yield opened


def add(store: Store, run_id: str, workers: int, seconds: float, **changed: Any) -> RunInfo:
    """A run of 100 steps of 8 samples that took so long."""
    status, batch = changed.pop("status", COMPLETE), changed.pop("batch", 8)
    parameters = changed.pop("parameters", 1000)
    values: dict[str, Any] = {"id": run_id, "name": "tide", "created": 1000.0, "workers": workers} | changed
    writer = RunWriter(store, NewRun(**values))
    writer.begin()
    started = RunStarted(
        step=0,
        run_id=run_id,
        run_dir=None,
        workers=workers,
        total_steps=100,
        steps_per_epoch=10,
        samples_per_epoch=80,
        batch_size=batch,
        parameters=parameters,
    )
    last = StepDone(step=100, epoch=9, loss=0.5, samples=batch, rates=[0.1])
    happened = [at(1000.0, started), at(1000.0 + seconds, last)]
    writer.write(happened, RunEnd(status=status, step=100, loss=0.5))
    return store.find(run_id)


def test_the_run_on_one_worker_of_the_same_name_is_found(store: Store) -> None:
    add(store, "one", 1, 20.0)
    found = find_baseline(store, add(store, "four", 4, 6.0))
    assert found is not None
    assert (found.run_id, found.workers) == ("one", 1)
    assert found.samples_per_second == pytest.approx(800 / 20.0)


def test_the_newest_of_several_counts(store: Store) -> None:
    add(store, "old", 1, 40.0, created=900.0)
    add(store, "new", 1, 20.0, created=950.0)
    found = find_baseline(store, add(store, "four", 4, 6.0))
    assert found is not None and found.run_id == "new"


@pytest.mark.parametrize(
    "changed",
    [{"name": "ebb"}, {"batch": 16}, {"host": "elsewhere"}, {"status": FAILED}, {"parameters": 1001}],
    ids=lambda change: next(iter(change)),
)
def test_what_cannot_be_compared_is_not(store: Store, changed: dict[str, Any]) -> None:
    add(store, "other", 1, 20.0, **changed)
    assert find_baseline(store, add(store, "four", 4, 6.0)) is None


def test_a_run_on_one_worker_has_none(store: Store) -> None:
    add(store, "one", 1, 20.0)
    assert find_baseline(store, add(store, "two", 1, 20.0)) is None
