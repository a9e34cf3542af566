"""The figures behind a display: over the last seconds while a run goes on, over all of it at the end."""

from __future__ import annotations

import pytest

from shoal.core.events import RunEnded, RunStarted, StepDone, WorkerSeen
from shoal.monitor.display.tally import Tally


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def follow(
    tally: Tally, clock: Clock, first: int, last: int, *, seconds: float, kind: str, spent: dict[str, float]
) -> None:
    """Steps of 10 samples, `seconds` apart, all the time spent in `kind`."""
    for step in range(first, last):
        clock.now += seconds
        spent[kind] = spent.get(kind, 0.0) + seconds
        tally.see(StepDone(step=step, epoch=0, loss=1.0, samples=10, rates=[]))
        tally.see(WorkerSeen(step=step, worker=0, samples=10 * step, seconds=dict(spent)))


def test_the_last_seconds_then_the_whole_run() -> None:
    clock = Clock()
    tally = Tally(clock)
    tally.see(
        RunStarted(
            step=0, run_id="r", run_dir=None, workers=1, total_steps=200, steps_per_epoch=9, samples_per_epoch=90
        )
    )
    spent: dict[str, float] = {}
    follow(tally, clock, 1, 61, seconds=1.0, kind="compute", spent=spent)
    assert tally.rate == pytest.approx(10.0)
    follow(tally, clock, 61, 101, seconds=0.5, kind="exchange", spent=spent)
    assert tally.rate == pytest.approx(20.0)
    assert tally.workers[0].rate == pytest.approx(20.0)
    assert tally.seconds_left == pytest.approx(50.0)
    assert tally.shares is not None and tally.shares.exchange == pytest.approx(1.0)
    tally.see(RunEnded(step=100, loss=1.0, metrics={}, reason="complete"))
    clock.now += 1000
    assert tally.elapsed == pytest.approx(80.0)
    assert tally.rate == pytest.approx(1000 / 80)
    assert tally.workers[0].rate == pytest.approx(1000 / 80)
    assert tally.shares.compute == pytest.approx(0.75)


def test_a_worker_that_counts_anew_has_no_negative_pace() -> None:
    clock = Clock()
    tally = Tally(clock)
    for samples in (100, 200, 5, 15):
        clock.now += 1
        tally.see(WorkerSeen(step=1, worker=0, samples=samples, seconds={"compute": samples / 100}))
    assert tally.workers[0].rate == pytest.approx(10.0)
