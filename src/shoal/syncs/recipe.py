"""How to train: what the user gave, checked, and what is made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.core import settings
from shoal.core.errors import ConfigError
from shoal.core.following import Facts, is_best
from shoal.layouts.single import uses_batch_statistics
from shoal.metrics.metrics import Metric

LossFn = Callable[[nn.Module, Any], Any]
PredictFn = Callable[[nn.Module, Any], Any]
AfterStep = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Recipe:
    """How to train: the Trainer's arguments, checked."""

    loss: LossFn
    optimizer: Callable[[Any], torch.optim.Optimizer]
    schedule: Callable[[torch.optim.Optimizer, int], Any] | None
    data: Any
    eval_data: Any
    collate: Any
    data_workers: int | None
    predict: PredictFn | None
    metrics: Sequence[str | Metric]
    batch_size: int
    exact_steps: int | None
    """What `steps=` said; None if the length of the run is a number of epochs."""
    total_steps: int
    steps_per_epoch: int
    clip: float | None
    micro_batch: int | None
    ema: float | None
    eval_every: int | None
    after_step: AfterStep | None = None
    doubts: tuple[str, ...] = ()
    """What was seen before the start, and would not be as in one process."""
    buffers: Mapping[str, str] | None = None
    """How buffers are merged, by name."""
    most_workers: int = 1
    """As many as there may ever be."""

    def facts(self, step: int, evaluated: int, stopping: str | None) -> Facts:
        """Of a run with this recipe, for what follows a step; nothing of its checkpoints."""
        every = None if self.eval_data is None else self.eval_every or self.steps_per_epoch
        return Facts(step, self.total_steps, every, evaluated, stopping=stopping)


MOST_BESTS = 20
"""Evaluations that were the best at their time, and are remembered."""


class Record:
    """What the loop remembers across a resume."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.best: float | None = None
        self.bests: list[list[float]] = []
        """Steps and losses of those that were the best at their time, the last ones."""
        self.evaluated = 0
        """The step of the last evaluation."""
        self.planned: int | None = None
        """Steps that the schedule was made for."""

    def take(self, step: int, metrics: dict[str, float]) -> bool:
        """A step was evaluated. Whether it is the best so far."""
        loss, best = metrics["loss"], is_best(metrics["loss"], self.best)
        self.metrics, self.evaluated = metrics, step
        if best:
            self.best = loss if loss == loss else None
            self.bests = [*self.bests[-MOST_BESTS:], [step, loss]]
        return best

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def first_words(model: nn.Module, recipe: Recipe, *, workers: int, deterministic: bool) -> list[str]:
    """What people should know of before their model is trained."""
    words = []
    if workers > 1 and uses_batch_statistics(model) and not deterministic:
        words.append(
            "BatchNorm is in train mode: each worker normalises over its own part of the batch, as with DDP, so the "
            "result depends on the number of workers (docs/limits.md)"
        )
    if recipe.metrics and recipe.eval_data is None and settings.current().report:  # not within cross-validation
        words.append(
            "metrics= are computed in evaluations, and there is no eval_data=: there will be none during training"
        )
    if not model.training:
        words.append(
            "the model is in eval mode, so dropout and BatchNorm do not train; call model.train() before fit()"
        )
    return words


def make_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = recipe.optimizer(list(model.named_parameters()))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer= returned {type(optimizer).__name__}; it must return a torch optimizer, as lambda "
            "params: torch.optim.SGD(params, lr=0.1) does"
        )
    given = {id(param) for group in optimizer.param_groups for param in group["params"]}
    strange = given - {id(param) for param in model.parameters()}
    if strange:
        raise ConfigError(
            f"optimizer= returned {type(optimizer).__name__} over {len(given)} parameters, {len(strange)} of "
            "them not the "
            "model's: these would not be checkpointed, nor start equal on all workers. Build it from what it is given, "
            "as lambda params: torch.optim.SGD(params, lr=0.1) does, and make further parameters part of the model"
        )
    return optimizer


def make_schedule(recipe: Recipe, optimizer: torch.optim.Optimizer) -> Any:
    if recipe.schedule is None:
        return None
    schedule = recipe.schedule(optimizer, recipe.total_steps)
    if not all(callable(getattr(schedule, method, None)) for method in ("step", "state_dict", "load_state_dict")):
        raise ConfigError(
            f"schedule= returned {type(schedule).__name__}; it must return a learning-rate scheduler, as lambda "
            "optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) does"
        )
    return schedule
