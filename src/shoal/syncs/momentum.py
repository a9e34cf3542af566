"""Momentum that acts before numbers are chosen to be sent, instead of in the optimizer.

A codec that sends few numbers at a time sends what many steps have added up. If momentum is applied to that, it comes
late, and with the weight of a single step. So each worker has a momentum of its own, adds that up, and sends the
largest sums; the optimizer then applies them as they are ("momentum correction" of deep gradient compression). This is
for SGD; of Adam's moments see `variance`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.spec import AnyCodec, TopK

Params = Sequence[tuple[str, nn.Parameter]]


def factors(optimizer: torch.optim.Optimizer, codec: AnyCodec) -> tuple[float, float]:
    """How much of a worker's momentum stays in a step, and how much of its gradient comes in; 0 and 1 without."""
    if not (isinstance(codec, TopK) and codec.correction and isinstance(optimizer, torch.optim.SGD)):
        return 0.0, 1.0
    groups = optimizer.param_groups
    found = {(float(group["momentum"]), 1.0 - float(group["dampening"])) for group in groups}
    # one vector has one momentum, and one that looks ahead is another matter
    return (0.0, 1.0) if len(found) > 1 or any(group["nesterov"] for group in groups) else found.pop()


@torch.no_grad()
def add_decay(
    optimizer: torch.optim.Optimizer, codec: AnyCodec, params: Params, grads: Sequence[Tensor], members: int
) -> None:
    """Where momentum is the workers', so is the decay that it acts on: an equal part is each one's."""
    if factors(optimizer, codec)[0] == 0.0:
        return
    groups = _groups(optimizer)
    for (_, param), grad in zip(params, grads, strict=True):
        group = groups[id(param)]
        if group["weight_decay"]:
            grad.add_(param, alpha=(-1 if group["maximize"] else 1) * group["weight_decay"] / members)


@contextmanager
def left_to_workers(optimizer: torch.optim.Optimizer, codec: AnyCodec, others: Params) -> Iterator[None]:
    """Within: the optimizer has no momentum and no decay, if the workers have both. Those of `others`, which are not
    encoded, are in their gradients then.
    """
    if factors(optimizer, codec)[0] == 0.0:
        yield
        return
    _move(optimizer, others)
    kept = [(group["momentum"], group["weight_decay"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["momentum"] = group["weight_decay"] = 0.0
    try:
        yield
    finally:
        for group, (momentum, decay) in zip(optimizer.param_groups, kept, strict=True):
            group["momentum"], group["weight_decay"] = momentum, decay


@torch.no_grad()
def _move(optimizer: torch.optim.Optimizer, params: Params) -> None:
    """Make of gradients what the optimizer would with its momentum and decay."""
    groups = _groups(optimizer)
    for _, param in params:
        if param.grad is None:
            continue
        group, state = groups[id(param)], optimizer.state[param]
        turned = -1.0 if group["maximize"] else 1.0
        moved = (turned * param.grad).add_(param, alpha=group["weight_decay"])
        buffer = state.get("momentum_buffer")
        if buffer is None:
            buffer = state["momentum_buffer"] = moved.clone()
        else:
            buffer.mul_(group["momentum"]).add_(moved, alpha=1 - group["dampening"])
        param.grad.copy_(buffer).mul_(turned)


def _groups(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    return {id(param): group for group in optimizer.param_groups for param in group["params"]}
