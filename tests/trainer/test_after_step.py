"""`after_step=fn(model)`: once per applied step on every worker, whoever dies, and as in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal
from shoal.core.atoms import Course
from shoal.core.errors import ConfigError
from shoal.testing import FaultPlan
from shoal.testing.reference import batches_of, drawing, relative_difference

BATCH, STEPS = 32, 12
INPUTS = torch.randn(160, 6, generator=torch.Generator().manual_seed(2))
DATA = TensorDataset(INPUTS, INPUTS.sin().sum(1, keepdim=True))


class Taught(nn.Module):
    """A student, a teacher that follows it, and a count of steps."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(drop), nn.Linear(16, 1))
        self.teacher = nn.Linear(6, 16).requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def make(drop: float) -> Callable[[], Taught]:
    def build() -> Taught:
        torch.manual_seed(0)
        return Taught(drop)

    return build


def loss(model: Any, batch: Any) -> Tensor:
    x, y = batch
    hint = model.teacher(x).mean(1, keepdim=True)
    return nn.functional.mse_loss(model.student(x), y + 0.1 * hint * (model.steps / STEPS))


def follow(model: Any) -> None:
    assert not torch.is_grad_enabled()
    model.teacher.weight.lerp_(model.student[0].weight, 0.1)
    model.student[3].bias.clamp_(-0.05, 0.05)
    model.steps += 1


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def in_one_process(drop: float, steps: int = STEPS) -> Taught:
    model = make(drop)()
    optimizer = sgd([param for param in model.parameters() if param.requires_grad])
    course = Course(len(DATA), BATCH)
    for step in range(steps):
        optimizer.zero_grad()
        for part, indices in batches_of(course, step, seed=0, by_atom=False):
            with drawing(range(part.samples), [model], step=step):
                loss(model, DATA[indices]).backward()
        optimizer.step()
        with torch.no_grad():
            follow(model)
    return model


def fit(drop: float, **options: Any) -> shoal.Trainer:
    options = {"workers": 2, "steps": STEPS, "after_step": follow} | options
    trainer = shoal.Trainer(make(drop), loss, sgd, DATA, batch_size=BATCH, **options)
    trainer.fit()
    return trainer


@pytest.mark.parametrize("drop", [0.0, 0.2])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_as_in_one_process(workers: int, drop: float) -> None:
    trainer = fit(drop, workers=workers)
    assert trainer.model.get_buffer("steps") == STEPS
    assert relative_difference(trainer.model, in_one_process(drop)) < 1e-5


def test_a_death_does_not_repeat_it() -> None:
    plan = FaultPlan().kill("worker-1", step=3, at="exchange").kill("worker-0", step=7, at="decide")
    trainer = fit(0.2, workers=3, min_workers=1, faults=plan)
    assert len(plan.fired()) == 2
    assert trainer.model.get_buffer("steps") == STEPS
    assert relative_difference(trainer.model, in_one_process(0.2)) < 1e-5


def test_a_resumed_run_goes_on_with_it(tmp_path: Path) -> None:
    fit(0.2, steps=5, run_dir=tmp_path)
    trainer = fit(0.2, workers=3, resume="last", run_dir=tmp_path)
    assert trainer.model.get_buffer("steps") == STEPS
    assert relative_difference(trainer.model, in_one_process(0.2)) < 1e-5


def test_what_it_changes_is_averaged_and_evaluated() -> None:
    def zero(model: Any) -> None:
        model.student[0].weight.zero_()

    trainer = fit(0.0, after_step=zero, ema=0.5, steps=60, eval_data=DATA)
    assert trainer.average is not None
    assert float(trainer.average["student.0.weight"].abs().max()) < 1e-6


def test_what_it_draws_is_the_same_on_every_worker() -> None:
    def shake(model: Any) -> None:
        model.teacher.weight.add_(torch.randn_like(model.teacher.weight))

    one, three = fit(0.2, after_step=shake, workers=1), fit(0.2, after_step=shake, workers=3, deterministic=True)
    assert torch.equal(one.model.get_submodule("teacher").weight, three.model.get_submodule("teacher").weight)


@pytest.mark.parametrize("members", [{}, {"min_workers": 1}], ids=["fixed", "elastic"])
def test_workers_that_do_something_else_are_refused(members: dict[str, int]) -> None:
    def differ(model: Any) -> None:
        with open("/proc/self/stat") as about:
            model.teacher.weight.add_(float(about.read().split()[0]))

    with pytest.raises(ConfigError, match=r"'teacher.weight' differs between workers.*after_step="):
        fit(0.0, after_step=differ, **members)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="after_step=1 is of type int; it must be a function"):
        fit(0.0, after_step=1)
    with pytest.raises(ConfigError, match=r"sync='server': after_step= changes the whole model.*use sync='allreduce'"):
        fit(0.0, sync="server")
