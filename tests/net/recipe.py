"""One small training that has everything in it, and what plain PyTorch makes of the same samples.

Dropout, weight decay, clipping, a schedule, an average of the weights, a batch that three workers cannot share equally,
a short last batch, evaluation. Scripts that run once per worker import this file, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal
from shoal.testing import FaultPlan
from shoal.testing.reference import reference_fit

SAMPLES, BATCH, EPOCHS = 110, 50, 3
STEPS = 9
"""Of 50, 50 and 10 samples in each epoch."""
TOLERANCE = 1e-5
DECAY, CLIP = 0.8, 0.5

State = dict[str, Tensor]


def points(size: int = SAMPLES, seed: int = 1) -> TensorDataset:
    inputs = torch.randn(size, 24, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs[:, :3].sum(1) > 0).long())


def net() -> nn.Module:
    """Its first matrix is just large enough for codecs, which leave those below 1,024 elements as they are."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Dropout(0.2), nn.Linear(48, 2))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def slowly(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The same loss. It takes all workers equally long, also on a busy machine, and leaves time for what is decided
    while they train."""
    time.sleep(0.03)
    return loss(model, batch)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def sgd(params: Any) -> torch.optim.Optimizer:
    """For codecs: with Adam most of them begin with a warm-up in which they are int8."""
    return torch.optim.SGD(params, lr=0.2, momentum=0.5, weight_decay=0.01)


def one_cycle(optimizer: torch.optim.Optimizer, total: int) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=total)


def falling(optimizer: torch.optim.Optimizer, total: int) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=total)


@dataclass
class Seen:
    """What the watchers of a run were told."""

    events: list[Any] = field(default_factory=list)

    def __call__(self, event: Any) -> None:
        self.events.append(event)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def losses(self) -> list[float]:
        return [event.loss for event in self.of(shoal.StepDone)]


@dataclass
class Run:
    """What came of one training."""

    weights: State
    average: State | None
    result: shoal.Result
    seen: Seen


def train(**options: Any) -> Run:
    """Train by Shoal, with the recipe's arguments where no others are given."""
    seen = Seen()
    callbacks = [seen, *options.pop("callbacks", ())]
    chosen: dict[str, Any] = {
        "optimizer": adamw,
        "schedule": one_cycle,
        "loss": loss,
        "data": points(),
        "eval_data": points(40, seed=2),
        "batch_size": BATCH,
        "epochs": EPOCHS,
        "clip": CLIP,
        "seed": 7,
        "keep": STEPS,
        **options,
    }
    trainer = shoal.Trainer(net(), **chosen, callbacks=callbacks)
    result = trainer.fit()
    return Run(dict(trainer.model.state_dict()), trainer.average, result, seen)


def killed(sync: str = "allreduce", **options: Any) -> Run:
    """A run of which worker 1 is killed in its fifth step.

    With servers a worker that is slow has no part in some steps. There it is killed in the first in which it has one;
    the worker that replaces it has another name.
    """
    plan = FaultPlan().kill("worker-1", step=4)
    if sync != "allreduce":
        for step in (2, 3, 5, 6, 7, 8):
            plan.kill("worker-1", step=step)
        options.setdefault("loss", slowly)
    run = train(sync=sync, faults=plan, **options)
    assert len(plan.fired()) == 1, "nobody was killed"
    return run


def own_loop(session: shoal.Session) -> dict[str, Any]:
    """The same training as a loop of one's own."""
    model = net()
    optimizer = adamw(list(model.named_parameters()))
    scheduler = one_cycle(optimizer, STEPS)
    session.track(model=model, optimizer=optimizer, scheduler=scheduler)
    losses = []
    for step in session.steps(points(), BATCH, epochs=EPOCHS):
        for batch in step:
            step.backward(loss(model, batch))
        losses.append(step.apply(optimizer, clip=CLIP).loss)
        scheduler.step()
    return {"weights": dict(model.state_dict()), "losses": losses}


@dataclass(frozen=True)
class Plain:
    """What one process has in the end, without Shoal."""

    weights: State
    average: State
    losses: list[float]
    evaluated: float
    """The loss on the evaluation data, with the weights."""
    average_evaluated: float
    """The same with the average."""


@cache
def plain(optimizer: Callable[[Any], torch.optim.Optimizer] = adamw, schedule: Callable[..., Any] = one_cycle) -> Plain:
    model = net()
    average = {name: value.detach().clone() for name, value in model.named_parameters()}

    @torch.no_grad()
    def follow(*_: Any) -> None:
        for name, value in model.named_parameters():
            average[name].mul_(DECAY).add_(value, alpha=1 - DECAY)

    def watched(params: Any) -> torch.optim.Optimizer:
        made = optimizer(params)
        made.register_step_post_hook(follow)
        return made

    losses = reference_fit(
        model, loss, watched, points(), batch_size=BATCH, steps=STEPS, schedule=schedule, clip=CLIP, seed=7
    )
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return Plain(weights, average, losses, evaluated(weights), evaluated(average))


@torch.no_grad()
def evaluated(state: Mapping[str, Tensor]) -> float:
    model = net().eval()
    model.load_state_dict(state)
    return float(loss(model, points(40, seed=2).tensors))


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The largest, relative to the largest value of each tensor."""
    assert one.keys() == other.keys()
    return max(float((value - other[name]).abs().max() / other[name].abs().max()) for name, value in one.items())


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())
