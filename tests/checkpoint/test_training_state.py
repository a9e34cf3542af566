"""Optimizers and schedules of torch go on after a checkpoint exactly as without one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from shoal.checkpoint import Checkpoints, load

Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizers] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda params: torch.optim.AdamW(
        [{"params": params[:1], "lr": 0.01}, {"params": params[1:], "betas": (0.8, 0.99)}], amsgrad=True
    ),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3, history_size=3),
}

Schedules = Callable[[torch.optim.Optimizer], Any]

SCHEDULES: dict[str, Schedules] = {
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)],
        milestones=[3],
    ),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=3, T_mult=2),
    "multi step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 2, 6], gamma=0.5),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
}


class Training:
    """A model, its optimizer and its schedule."""

    def __init__(self, optimizer: Optimizers, schedule: Schedules) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = optimizer(list(self.model.parameters()))
        self.schedule = schedule(self.optimizer)

    def step(self, number: int) -> None:
        data = torch.randn(16, 4, generator=torch.Generator().manual_seed(number))

        def closure() -> float:
            self.optimizer.zero_grad()
            loss = self.model(data).square().mean()
            loss.backward()
            return loss.item()

        loss = self.optimizer.step(closure)
        if isinstance(self.schedule, lr_scheduler.ReduceLROnPlateau):
            self.schedule.step(loss)
        else:
            self.schedule.step()

    def trees(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }

    def restore(self, trees: dict[str, Any]) -> None:
        self.model.load_state_dict(trees["model"])
        self.optimizer.load_state_dict(trees["optimizer"])
        self.schedule.load_state_dict(trees["schedule"])


def assert_same(left: Any, right: Any, place: str) -> None:
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype, place
        assert left.equal(right), place
    elif isinstance(left, dict):
        assert list(left) == list(right), place
        for key in left:
            assert_same(left[key], right[key], f"{place}[{key!r}]")
    elif isinstance(left, (list, tuple)):
        assert type(left) is type(right), place
        assert len(left) == len(right), place
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(one, other, f"{place}[{index}]")
    else:
        assert type(left) is type(right), place
        assert left == right, place


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [
        *((name, "one cycle") for name in ("sgd", "adamw", "rmsprop", "nadam")),
        ("adafactor", "lambda"),
        ("lbfgs", "lambda"),
    ]
    + [("sgd", name) for name in SCHEDULES if name != "one cycle"],
)
def test_training_goes_on_exactly(tmp_path: Path, optimizer: str, schedule: str) -> None:
    straight = Training(OPTIMIZERS[optimizer], SCHEDULES[schedule])
    checkpoints = Checkpoints(tmp_path, warn=pytest.fail)
    for number in range(4):
        straight.step(number)
    expected = copy.deepcopy(straight.trees())
    checkpoints.begin(4, straight.trees(), {}, volatile=list(straight.model.buffers()))
    checkpoints.wait_copied()
    for number in range(4, 8):
        straight.step(number)
    checkpoints.finish()

    loaded = load(tmp_path / "step-000000004")
    assert_same(expected, loaded.trees, "trees")
    resumed = Training(OPTIMIZERS[optimizer], SCHEDULES[schedule])
    resumed.restore(loaded.trees)
    for number in range(4, 8):
        resumed.step(number)
    assert_same(straight.trees(), resumed.trees(), "trees")


def test_saving_during_forward_and_backward_changes_nothing(tmp_path: Path) -> None:
    """The thread reads the live tensors while the next step's gradients are computed."""
    training = Training(OPTIMIZERS["adamw"], SCHEDULES["lambda"])
    training.step(0)
    checkpoints = Checkpoints(tmp_path, keep=20, warn=pytest.fail)
    expected = []
    for number in range(1, 20):
        expected.append(copy.deepcopy(training.trees()))
        checkpoints.begin(number, training.trees(), {}, volatile=list(training.model.buffers()))
        data = torch.randn(16, 4)
        training.optimizer.zero_grad()
        training.model(data).square().mean().backward()
        checkpoints.wait_copied()
        training.optimizer.step()
        training.schedule.step()
    checkpoints.close()
    for number, trees in enumerate(expected, start=1):
        assert_same(trees, load(tmp_path / f"step-{number:09d}").trees, f"step {number}")
