"""Schedules that are resumed in a run of another length."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

from shoal.checkpoint.replan import new_length, refuse_longer_cycle
from shoal.core.errors import CheckpointMismatch
from shoal.syncs.server.clerk.saving import replanned

Make = Callable[[torch.optim.Optimizer, int], Any]

OLD, NEW, DONE = 20, 40, 12


class Curve:
    """A function with something of its own, which torch keeps in a checkpoint."""

    def __init__(self, total: int) -> None:
        self.total = total

    def __call__(self, step: int) -> float:
        return max(0.0, 1 - step / self.total)


def decay(step: int, total: int) -> float:
    return max(0.0, 1 - step / total)


def warm_up(optimizer: Any, total: int) -> Any:
    parts = [schedules.LinearLR(optimizer, total_iters=5), schedules.CosineAnnealingLR(optimizer, total - 5)]
    return schedules.SequentialLR(optimizer, parts, milestones=[5])


MAKERS: dict[str, Make] = {
    "cosine": lambda o, total: schedules.CosineAnnealingLR(o, total),
    "linear": lambda o, total: schedules.LinearLR(o, total_iters=total),
    "polynomial": lambda o, total: schedules.PolynomialLR(o, total),
    "exponential": lambda o, total: schedules.ExponentialLR(o, 0.01 ** (1 / total)),
    "milestones": lambda o, total: schedules.MultiStepLR(o, [total // 2, total * 3 // 4]),
    "steps": lambda o, total: schedules.StepLR(o, total // 4),
    "restarts": lambda o, total: schedules.CosineAnnealingWarmRestarts(o, total // 4),
    "cycles": lambda o, total: schedules.CyclicLR(o, 0.01, 0.1, step_size_up=total // 4),
    "one cycle": lambda o, total: schedules.OneCycleLR(o, 0.1, total_steps=total),
    "sequence": warm_up,
    "chain": lambda o, total: schedules.ChainedScheduler([schedules.LinearLR(o, total_iters=total)]),
    "object": lambda o, total: schedules.LambdaLR(o, Curve(total)),
    "function": lambda o, total: schedules.LambdaLR(o, lambda step: 1 - step / total),
    "partial": lambda o, total: schedules.LambdaLR(o, partial(decay, total=total)),
    "factor": lambda o, total: schedules.MultiplicativeLR(o, lambda step: 1 - 1 / total),
    "constant": lambda o, total: schedules.StepLR(o, 7),
    "plateau": lambda o, total: schedules.ReduceLROnPlateau(o, patience=2),
}
FUNCTIONS, FREE = ("function", "partial", "factor"), ("constant", "plateau")


def made(make: Make, total: int, steps: int = 0) -> Any:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1, momentum=0.9)
    schedule = make(optimizer, total)
    for _ in range(steps):
        optimizer.step()
        schedule.step(*([1.0] if isinstance(schedule, schedules.ReduceLROnPlateau) else []))
    return schedule


def said(name: str, new: int) -> str | None:
    fresh = made(MAKERS[name], new)
    return new_length(fresh, fresh.state_dict(), made(MAKERS[name], OLD, DONE).state_dict(), OLD, new)


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_said_of_a_longer_run(name: str) -> None:
    told = said(name, NEW)
    if name in FREE:
        assert told is None
        return
    assert told is not None and told.startswith("the schedule was made for 20 steps and the run now has 40; ")
    assert ("functions are not in a checkpoint" in told) == (name in FUNCTIONS)
    assert ("it keeps its former shape: " in told) == (name not in FUNCTIONS)


@pytest.mark.parametrize("name", MAKERS)
def test_steps_are_no_change_of_shape(name: str) -> None:
    """What torch's schedules change while they are stepped is known."""
    fresh, stepped = made(MAKERS[name], OLD), made(MAKERS[name], OLD, DONE)
    told = new_length(fresh, fresh.state_dict(), stepped.state_dict(), OLD + 1, OLD)
    assert told is None or "functions" in told
    assert new_length(fresh, fresh.state_dict(), stepped.state_dict(), OLD, OLD) is None


def test_the_words_name_what_stays_and_what_follows() -> None:
    cosine, sequence, curve = said("cosine", NEW) or "", said("sequence", NEW) or "", said("object", NEW) or ""
    assert "T_max is 20, not 40; after its end the rate of CosineAnnealingLR rises again" in cosine
    assert "T_max is 15, not 35" in sequence and "rises again" in sequence
    assert "total is 20, not 40" in curve
    assert "total_iters is 20, not 40; after its end the rate of PolynomialLR is 0" in (said("polynomial", NEW) or "")
    assert "milestones is [10, 15], not [20, 30]" in (said("milestones", NEW) or "")
    assert "rises again" not in (said("cosine", 15) or "")
    # 0.1 × (1 − 12/20) before, and 0.1 × (1 − 12/40) by the function of now
    assert (said("partial", NEW) or "").endswith("what they say now (0.07 at step 12, where it was 0.04)")


def test_a_schedule_of_ones_own_is_told_of() -> None:
    class Own(schedules.LRScheduler):
        def get_lr(self) -> list[float | torch.Tensor]:
            return [0.1 * math.exp(-self.last_epoch)]

    fresh = made(lambda o, total: Own(o), NEW)
    assert "stays as it was" in (new_length(fresh, fresh.state_dict(), fresh.state_dict(), OLD, NEW) or "")


@pytest.mark.parametrize("wrap", [lambda o, part: part, lambda o, part: schedules.SequentialLR(o, [part], [])])
def test_a_longer_one_cycle_is_refused_and_a_shorter_one_is_not(wrap: Callable[[Any, Any], Any]) -> None:
    def make(optimizer: Any, total: int) -> Any:
        return wrap(optimizer, schedules.OneCycleLR(optimizer, 0.1, total_steps=total))

    state = made(make, OLD, DONE).state_dict()
    with pytest.raises(CheckpointMismatch, match=r"OneCycleLR of 20 steps, and this run gives it 40.*new run"):
        refuse_longer_cycle(made(make, NEW), state, "here")
    refuse_longer_cycle(made(make, OLD), state, "here")
    refuse_longer_cycle(made(make, DONE), state, "here")


def test_it_is_said_of_a_schedule_that_servers_step() -> None:
    optimizer, state = made(MAKERS["cosine"], NEW).optimizer, made(MAKERS["cosine"], OLD, DONE).state_dict()
    setup: Any = SimpleNamespace(
        make_schedule=lambda o: MAKERS["cosine"](o, NEW), schedule_state=state, total=NEW, optimizer=optimizer
    )
    assert "T_max is 20, not 40" in (replanned(setup, OLD) or "")
    assert replanned(setup, NEW) is None and replanned(setup, None) is None
