"""SGD's momentum, where gradients travel encoded. Of Adam's moments see `variance`.

**topk** sends few numbers at a time: what many steps have added up. If momentum is applied to that, it comes late, and
with the weight of a single step. So each worker has a momentum of its own, adds that up, and sends the largest sums;
the optimizer then applies them as they are ("momentum correction" of deep gradient compression).

**onebit** has one size for the numbers of a block. With gradients, which differ by orders of magnitude and change their
signs from step to step, what it loses is much, and momentum makes ten times as much of it. So the new momentum travels:
each worker adds to its gradient an equal part of the momentum that all have, and the sum is the new one. What is lost
of it is less, as it is made of what was decoded before. From the sum the optimizer gets back the gradient that leads
there: momentum stays its own, and so does its state, which is equal on all workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.spec import AnyCodec, OneBit, TopK

Params = Sequence[tuple[str, nn.Parameter]]


# -- topk --------------------------------------------------------------------------------------------------------------


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


# -- onebit ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def add_momentum(
    optimizer: torch.optim.Optimizer, codec: AnyCodec, params: Params, grads: Sequence[Tensor], members: int
) -> None:
    """Make of gradients what travels: with an equal part of the momentum that all members have."""
    for group, momentum, grad in _carried(optimizer, codec, params, grads):
        if momentum is not None:
            grad.add_(momentum.to(grad.dtype), alpha=_stays(group) / members)


@torch.no_grad()
def show_means(optimizer: torch.optim.Optimizer, codec: AnyCodec, params: Params, sums: Sequence[Tensor]) -> None:
    """Make of sums what people see, and clip: the gradient that would lead to this momentum if it were always there."""
    for group, _, total in _carried(optimizer, codec, params, sums):
        total.mul_(1.0 - group["momentum"])


@torch.no_grad()
def leave_to_optimizer(optimizer: torch.optim.Optimizer, codec: AnyCodec, params: Params) -> None:
    """Make of what is shown the gradient with which the optimizer comes to this momentum."""
    used = [(name, param) for name, param in params if param.grad is not None]
    grads = [param.grad for _, param in used if param.grad is not None]
    for group, momentum, grad in _carried(optimizer, codec, used, grads):
        grad.div_(1.0 - group["momentum"])
        if momentum is not None:
            grad.sub_(momentum, alpha=_stays(group))


def _carried(
    optimizer: torch.optim.Optimizer, codec: AnyCodec, params: Params, tensors: Sequence[Tensor]
) -> Iterator[tuple[dict[str, Any], Tensor | None, Tensor]]:
    """Of each parameter whose momentum travels: its group, the momentum, if there is any yet, and its tensor."""
    if not (isinstance(codec, OneBit) and isinstance(optimizer, torch.optim.SGD)):
        return
    groups = _groups(optimizer)
    for (_, param), tensor in zip(params, tensors, strict=True):
        group = groups[id(param)]
        if 0.0 < group["momentum"] < 1.0 and group["dampening"] < 1.0:
            yield group, optimizer.state.get(param, _NONE).get("momentum_buffer"), tensor


_NONE: dict[str, Tensor] = {}


def _stays(group: dict[str, Any]) -> float:
    """How much of a momentum is in the next one, in units of the gradient."""
    stays = float(group["momentum"]) / (1.0 - float(group["dampening"]))
    return -stays if group["maximize"] else stays


# -- for both ----------------------------------------------------------------------------------------------------------


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
