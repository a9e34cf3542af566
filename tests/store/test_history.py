"""What a run leaves for a learning curve."""

from __future__ import annotations

from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.core.events import EvalDone, RunStarted, StepDone
from shoal.store.history import History


def done(step: int, **more: Any) -> StepDone:
    given: dict[str, Any] = {"epoch": 0, "loss": 1.0 / step, "samples": 8, "rates": [0.1], "time": float(step)}
    return StepDone(step=step, **(given | more))


def evaluated(step: int, **metrics: float) -> EvalDone:
    return EvalDone(step=step, epoch=0, metrics=metrics, time=float(step))


def started(step: int) -> RunStarted:
    figures = dict.fromkeys(("workers", "total_steps", "steps_per_epoch", "samples_per_epoch"), 1)
    return RunStarted(step=step, run_id="tide", run_dir=None, **figures)


def test_columns_begin_late_and_have_gaps() -> None:
    history = History()
    for event in (started(0), done(1), done(2, rates=[0.1, 0.2], logs={"acc": 0.5, "loss": 3.0}), done(3, norm=2.0)):
        history(event)
    steps = history.steps
    assert list(steps) == ["step", "epoch", "time", "loss", "rate", "rate.1", "acc", "log.loss", "norm"]
    assert steps["step"] == [1, 2, 3] and steps["loss"] == [1.0, 0.5, 1 / 3]
    assert [isnan(value) for value in steps["rate.1"]] == [True, False, True]
    assert steps["norm"][2] == 2.0 and steps["log.loss"][1] == 3.0
    assert history.evaluations == {"step": [], "epoch": [], "time": [], "loss": []}
    assert repr(history) == "<History: 3 steps, 0 evaluations>"


def test_what_is_done_again_counts_once() -> None:
    history = History()
    told = [started(0), done(1), done(2), evaluated(2, loss=1.0), done(3), evaluated(3, loss=0.9)]
    for event in (*told, started(2), evaluated(2, loss=1.5), done(3, loss=7.0), done(3, loss=8.0)):
        history(event)
    assert history.steps["step"] == [1, 2, 3] and history.steps["loss"][2] == 8.0
    assert history.evaluations["step"] == [2] and history.evaluations["loss"] == [1.5]


def test_names_of_metrics_that_are_taken() -> None:
    history = History()
    history(evaluated(4, loss=1.0, epoch=2.0))
    assert history.evaluations == {"step": [4], "epoch": [0], "time": [4.0], "loss": [1.0], "metric.epoch": [2.0]}


def test_a_long_run_is_compact() -> None:
    history = History()
    for step in range(1, 20_001):
        history(done(step, logs={"acc": nan}))
    held = sum(column.itemsize * len(column) for column in (history._steps._step, *history._steps._figures.values()))
    assert held == 20_000 * 8 * 5


@pytest.mark.parametrize("store", ["none", "sqlite:////nowhere/shoal.db"])
def test_without_a_record_it_begins_where_the_run_was_resumed(store: str) -> None:
    history = History()
    history.goes_on("tide", store)
    for event in (started(5), done(6), done(7)):
        history(event)
    assert history.steps["step"] == [6, 7]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    return tmp_path


def fit(folder: Path, steps: int, **more: Any) -> shoal.Result:
    torch.manual_seed(0)
    inputs = torch.linspace(-1.0, 1.0, 40).unsqueeze(1)

    def loss(model: nn.Module, batch: Any) -> Any:
        found = nn.functional.mse_loss(model(batch), 2 * batch)
        return {"loss": found, "root": float(found.detach()) ** 0.5}

    def groups(params: Any) -> torch.optim.Optimizer:
        (weight, bias) = params
        return torch.optim.SGD([{"params": [weight], "lr": 0.1}, {"params": [bias], "lr": 0.2}], lr=0.1)

    return shoal.Trainer(
        nn.Linear(1, 1),
        loss,
        groups,
        inputs,
        eval_data=inputs[:8],
        batch_size=8,
        steps=steps,
        eval_every=3,
        clip=10.0,
        workers=2,
        data_workers=0,
        run_dir=folder / "run",
        **more,
    ).fit()


def test_a_run_has_its_history_also_from_before_a_resume(home: Path) -> None:
    heard: list[StepDone] = []
    first = fit(home, 6, callbacks=[lambda event: heard.append(event) if isinstance(event, StepDone) else None])
    steps, evaluations = first.history.steps, first.history.evaluations
    assert list(steps) == ["step", "epoch", "time", "loss", "rate", "rate.1", "norm", "root"]
    assert steps["step"] == [1, 2, 3, 4, 5, 6] and steps["epoch"] == [0, 0, 0, 0, 0, 1]
    assert steps["loss"] == [event.loss for event in heard] and steps["root"] == [event.logs["root"] for event in heard]
    assert [steps["rate"], steps["rate.1"]] == [list(rates) for rates in zip(*(e.rates for e in heard), strict=True)]
    assert evaluations["step"] == [3, 6] and evaluations["loss"][-1] == first.metrics["loss"]

    resumed = fit(home, 9, resume="last").history
    assert resumed.steps["step"] == list(range(1, 10)) and resumed.steps["loss"][:6] == steps["loss"]
    assert resumed.steps["root"][:6] == steps["root"]
    assert [isnan(rate) for rate in resumed.steps["rate.1"]] == [True] * 6 + [False] * 3
    assert resumed.evaluations["step"] == [3, 6, 9] and resumed.evaluations["loss"][:2] == evaluations["loss"]
