"""The learning rates that are told are those that the step was applied with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal import StepDone, Trainer

DATA = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


def loss(model: nn.Module, batch: Any) -> Any:
    return model(batch).pow(2).mean()


def groups(params: Any) -> torch.optim.Optimizer:
    (weight, bias) = (param for _, param in params)
    return torch.optim.SGD([{"params": [weight]}, {"params": [bias], "lr": 0.02}], lr=0.01)


def rising(optimizer: torch.optim.Optimizer, total: int) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step + 1.0)


def told(run: Any) -> list[list[float]]:
    rates: list[list[float]] = []

    def note(event: Any) -> None:
        if isinstance(event, StepDone):
            rates.append(event.rates)

    run(note)
    return rates


def expected(steps: range) -> list[list[float]]:
    return [pytest.approx([0.01 * (step + 1), 0.02 * (step + 1)]) for step in steps]


def fit(note: Any, **options: Any) -> None:
    Trainer(
        nn.Linear(4, 1), loss, groups, DATA, **{"batch_size": 16, "workers": 1, "callbacks": [note], **options}
    ).fit()


def test_of_each_group_also_after_a_resume(tmp_path: Path) -> None:
    def go(steps: int, resume: str | None) -> list[list[float]]:
        return told(lambda note: fit(note, steps=steps, schedule=rising, run_dir=tmp_path, resume=resume))

    assert go(3, None) == expected(range(3))
    assert go(5, "last") == expected(range(3, 5))


def test_of_servers_that_step_when_gradients_arrive() -> None:
    sync = "server:servers=1,durability=none,apply=arrival"
    assert told(lambda note: fit(note, steps=3, schedule=rising, workers=2, sync=sync)) == expected(range(3))


def test_with_a_plateau_of_the_loss_of_each_step() -> None:
    def halving(optimizer: torch.optim.Optimizer, total: int) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.99)

    rates = told(lambda note: fit(note, steps=4, schedule=halving))
    # the first loss is the best so far; none after it is better by so much
    assert rates == [[0.01, 0.02], [0.01, 0.02], [0.005, 0.01], [0.0025, 0.005]]


def test_in_an_own_loop_of_optimizers_that_are_applied_in_turn() -> None:
    """The one that a step leaves out has the rate that it has."""

    def train(session: shoal.Session) -> None:
        net = nn.Linear(4, 1)
        first, second = (torch.optim.SGD([param], lr=1e-3) for param in (net.weight, net.bias))
        session.track(net=net, first=first, second=second)
        for step in session.steps(DATA, batch_size=16, steps=4):
            for batch in step:
                step.backward(loss(net, batch))
            first.param_groups[0]["lr"] = 0.1 * (step.number + 1)
            step.apply(first)
            if step.number % 2:
                step.apply(second)
            first.param_groups[0]["lr"] = second.param_groups[0]["lr"] = 1e-3 * (step.number + 2)

    rates = told(lambda note: shoal.launch(train, workers=1, callbacks=[note]))
    assert rates == [pytest.approx(each) for each in ([0.1, 2e-3], [0.2, 2e-3], [0.3, 4e-3], [0.4, 4e-3])]
