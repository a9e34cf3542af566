"""Plain single-process PyTorch over the samples that a run would use: what every strategy is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import default_collate

from shoal.core.atoms import Course, Span
from shoal.core.ordering import order_key
from shoal.core.permutation import Permutation
from shoal.draws import here
from shoal.draws.forward import Forward, Keying, seed_of
from shoal.draws.sites import Names
from shoal.draws.stand import standing
from shoal.proof.examine import Ask, Taken, examine
from shoal.proof.rehearse import MOST_SAMPLES


def sample_order(size: int, *, seed: int = 0, epoch: int = 0) -> list[int]:
    """The samples of an epoch in the order in which a run with this seed uses them."""
    order: list[int] = Permutation(size, order_key(seed, epoch)).span(0, size).tolist()
    return order


def batches_of(course: Course, step: int, *, seed: int, by_atom: bool) -> Iterator[tuple[Span, list[int]]]:
    """The step's samples, as one batch or atom by atom."""
    span = course.step(step)
    order = Permutation(course.size, order_key(seed, span.epoch))
    parts = span.atoms() if by_atom else [Span(0, span.start, span.stop)]
    for part in parts:
        yield part, order.span(part.start, part.stop).tolist()


@contextmanager
def drawing(
    positions: range,
    modules: Sequence[nn.Module] = (),
    *,
    seed: int = 0,
    step: int = 0,
    phase: int = 0,
    keying: Keying | None = None,
) -> Iterator[Forward]:
    """Within, what is drawn is what a run that tracks these modules draws in a forward of samples at these positions.

    `keying` is what the run has learnt; without it the dimension of samples is guessed.
    """
    if keying is None:
        keying = Keying()
        keying.names = Names(modules)
    forward = Forward(keying, positions, seed_of(seed, step, phase))
    with standing():
        forward.begin()
        here.enter(forward)
        try:
            yield forward
        finally:
            here.enter(None)


def reference_fit(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Any],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    data: Any,
    *,
    batch_size: int,
    steps: int,
    schedule: Callable[[torch.optim.Optimizer, int], Any] | None = None,
    collate: Callable[[list[Any]], Any] = default_collate,
    clip: float | None = None,
    seed: int = 0,
    by_atom: bool = False,
) -> list[float]:
    """Train `model` here and now, a batch as a whole or `by_atom`; returns the loss of each step.

    What it draws is what a run draws: by position.
    """
    course = Course(len(data), batch_size)
    made = optimizer(list(model.named_parameters()))
    scheduler = schedule(made, steps) if schedule is not None else None
    losses = []
    keying = _learnt(model, loss, data, next(batches_of(course, 0, seed=seed, by_atom=False))[1], collate, seed)
    for step in range(steps):
        made.zero_grad()
        total: Tensor | float = 0.0
        weights = 0.0
        for part, indices in batches_of(course, step, seed=seed, by_atom=by_atom):
            start = course.step(step).start
            batch = collate([data[index] for index in indices])
            with drawing(range(part.start - start, part.stop - start), seed=seed, step=step, keying=keying):
                value, weight = _sum_and_weight(loss(model, batch), len(indices))
                value.backward()
            total = total + value.detach()
            weights += weight
        for param in model.parameters():
            if param.grad is not None:
                param.grad = param.grad / weights  # sparse ones may share their memory
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        made.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(total) / weights)
    return losses


def _learnt(
    model: nn.Module, loss: Callable[[nn.Module, Any], Any], data: Any, indices: list[int], collate: Any, seed: int
) -> Keying:
    """What a run learns of the loss's draws on its first samples, found out with a copy of the model."""
    keying, twin = Keying(), deepcopy(model)
    for part in twin.modules():
        if isinstance(part, _BatchNorm):
            part.training = False
    keying.names = Names([twin])
    examination = examine(min(MOST_SAMPLES, len(indices)), {})
    answer: Taken | None = None
    # a part that cannot be computed teaches nothing, in a run either
    with standing(), suppress(Exception):
        while True:
            try:
                ask = examination.send(answer)  # type: ignore[arg-type]
            except StopIteration as end:
                keying.rules = end.value.rules
                break
            answer = Taken(0, 0.0, 0.0) if ask.double else _taken(twin, loss, data, indices, collate, seed, keying, ask)
    keying.fresh, keying.names = {}, Names([model])
    return keying


def _taken(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Any],
    data: Any,
    indices: list[int],
    collate: Any,
    seed: int,
    keying: Keying,
    ask: Ask,
) -> Taken:
    keying.fresh = dict(ask.rules)
    batch = collate([data[index] for index in indices[ask.start : ask.stop]])
    forward = Forward(keying, range(ask.start, ask.stop), seed_of(seed, 0, 0), recording=True)
    forward.begin()
    here.enter(forward)
    try:
        returned = loss(model, batch)
    finally:
        here.enter(None)
    value, weight = _sum_and_weight(returned, ask.stop - ask.start)
    given = isinstance(returned["loss"] if isinstance(returned, dict) else returned, tuple)
    return Taken(ask.stop - ask.start, float(value.detach()), weight, given=given, seen=tuple(forward.seen))


def _sum_and_weight(returned: Any, samples: int) -> tuple[Tensor, float]:
    if isinstance(returned, dict):
        returned = returned["loss"]
    if isinstance(returned, tuple):
        return returned[0], float(returned[1])
    return returned * samples, float(samples)


def relative_difference(one: nn.Module, other: nn.Module) -> float:
    """The largest difference of two models' states, relative to the largest value of each tensor."""
    worst = 0.0
    state = other.state_dict()
    for name, value in one.state_dict().items():
        if not value.is_floating_point():
            worst = worst if torch.equal(value, state[name]) else float("inf")
            continue
        scale = max(float(state[name].abs().max()), 1e-12) if value.numel() else 1.0
        worst = max(worst, float((value - state[name]).abs().max()) / scale if value.numel() else 0.0)
    return worst
