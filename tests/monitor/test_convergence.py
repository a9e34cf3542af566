"""What stale gradients cost in samples, against an earlier run without staleness."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.core.events import AnyEvent, RunStarted, StepDone
from shoal.core.settings import Setting
from shoal.monitor.report import convergence
from shoal.monitor.report.advice import advice
from shoal.monitor.report.convergence import Cost, find_cost, steps_needed
from shoal.monitor.report.summary import Summary
from shoal.store.store import Store
from shoal.store.values import NewRun, RunEnd, RunInfo
from shoal.store.writing import RunWriter

SSP = "server:mode=ssp,staleness=4"


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store.open(f"sqlite:///{tmp_path / 'shoal.db'}") as opened:
        yield opened


def falling(pace: float, *, noise: float = 0.0, seed: int = 0) -> Callable[[int], float]:
    """A loss from 3 towards 1, slower with a larger pace."""
    dice = random.Random(seed)
    return lambda step: 1 + 2 * math.exp(-step / pace) + dice.gauss(0, noise)


def add(store: Store, run_id: str, sync: str, pace: float = 100.0, **changed: Any) -> RunInfo:
    """A run of 400 steps of 8 samples, with a loss that falls the slower the larger `pace` is."""
    steps, batch, name = changed.pop("steps", 400), changed.pop("batch", 8), changed.pop("name", "tide")
    rate, optimizer = changed.pop("rate", 0.1), changed.pop("optimizer", "AdamW")
    loss = changed.pop("loss", falling(pace))
    config = {"sync": Setting(sync, "flag")}
    new = NewRun(id=run_id, name=name, created=changed.pop("created", 1000.0), workers=2, config=config)
    assert not changed
    writer = RunWriter(store, new)
    writer.begin()
    shape: dict[str, Any] = {"total_steps": steps, "steps_per_epoch": 10, "samples_per_epoch": 80, "batch_size": batch}
    start = RunStarted(step=0, run_id=run_id, run_dir=None, workers=2, parameters=9, optimizers=[optimizer], **shape)
    happened: list[AnyEvent] = [start]
    happened += [
        StepDone(step=step, epoch=0, loss=loss(step), samples=batch, rates=[rate]) for step in range(1, steps + 1)
    ]
    writer.write(happened, RunEnd(status="complete", step=steps, loss=1.0))
    return store.find(run_id)


@pytest.mark.parametrize(("sync", "name"), [("allreduce", "allreduce"), ("server", "bsp"), ("server:mode=bsp", "bsp")])
def test_twice_the_samples_are_found(store: Store, sync: str, name: str) -> None:
    add(store, "before", sync, 50.0)
    cost = find_cost(store, add(store, "stale", SSP, 100.0))
    assert cost is not None and (cost.run_id, cost.sync) == ("before", name)
    assert cost.ratio == pytest.approx(2.0, rel=0.05) and 1.0 < cost.loss < 1.2
    assert cost.is_large and "lower staleness=, or use mode=bsp" in cost.words


@pytest.mark.parametrize("seed", range(8))
def test_noise_is_no_cost(store: Store, seed: int) -> None:
    add(store, "before", "allreduce", loss=falling(60.0, noise=0.1, seed=seed))
    cost = find_cost(store, add(store, "stale", SSP, loss=falling(60.0, noise=0.1, seed=seed + 100)))
    assert cost is not None and 1 / 1.3 < cost.ratio < 1.3
    assert not cost.is_large and "lower" not in cost.words


def test_a_run_that_fell_less_far_is_compared_where_both_were(store: Store) -> None:
    """A shorter one, too: only up to what it reached."""
    add(store, "before", "allreduce", 50.0, steps=100)
    cost = find_cost(store, add(store, "stale", SSP, 100.0))
    assert cost is not None and cost.ratio == pytest.approx(2.0, rel=0.06)
    assert cost.loss > falling(50.0)(100)


def test_thinned_curves_say_the_same(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convergence, "_MOST_ROWS", 200)
    add(store, "before", "allreduce", 100.0, steps=700)
    cost = find_cost(store, add(store, "stale", SSP, 150.0, steps=1000))
    assert cost is not None and cost.ratio == pytest.approx(1.5, rel=0.06)


def test_async_is_told_of_a_bound(store: Store) -> None:
    add(store, "before", "allreduce", 50.0)
    cost = find_cost(store, add(store, "stale", "server:mode=async", 100.0))
    assert cost is not None and "use mode=ssp" in cost.words


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "ebb"},
        {"batch": 16},
        {"created": 2000.0},
        {"steps": 30},
        {"rate": 0.2},
        {"optimizer": "SGD"},
        {"sync": "server:mode=async"},
        {"sync": "server:apply=arrival"},
        {"loss": lambda step: 5.0},
        {"loss": lambda step: math.nan},
    ],
    ids=lambda change: "-".join(change),
)
def test_what_cannot_be_compared_is_not(store: Store, changed: dict[str, Any]) -> None:
    add(store, "before", **{"sync": "allreduce", **changed})
    assert find_cost(store, add(store, "stale", SSP)) is None


@pytest.mark.parametrize("sync", ["allreduce", "server", "server:mode=ssp,staleness=0"])
def test_a_run_without_staleness_has_no_cost(store: Store, sync: str) -> None:
    add(store, "before", "allreduce", 50.0)
    assert find_cost(store, add(store, "fresh", sync, 100.0)) is None


def test_the_newest_that_says_something_counts(store: Store) -> None:
    add(store, "old", "allreduce", 50.0, created=800.0)
    add(store, "new", "allreduce", 25.0, created=900.0)
    add(store, "short", "allreduce", 25.0, created=950.0, steps=10)
    cost = find_cost(store, add(store, "stale", SSP, 100.0))
    assert cost is not None and cost.run_id == "new"


def test_a_curve_that_rises_has_no_answer() -> None:
    up = [(step, float(step)) for step in range(1, 101)]
    down = [(step, 100.0 - step) for step in range(1, 101)]
    assert steps_needed(up, down) is None and steps_needed(down, up) is None
    assert steps_needed([], down) is None


def test_the_advice_says_it_plainly() -> None:
    summary = Summary()
    summary.cost = Cost("tide-1\x1b[2J", "bsp", 2.1, 1.42, "lower staleness=, or use mode=bsp")
    assert advice(summary) == (
        "It needed 1.42 times the samples of run tide-1 (bsp) to reach loss 2.1: lower staleness=, or use mode=bsp."
    )
    summary.cost = Cost("tide-1", "bsp", 2.1, 1.1, "lower staleness=, or use mode=bsp")
    assert advice(summary) == ""
