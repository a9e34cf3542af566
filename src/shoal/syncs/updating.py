"""An optimizer's step, by the quickest of the ways that torch itself has for it."""

from __future__ import annotations

from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW
from torch.optim import optimizer as every

_FUSED = (Adam, AdamW)
"""Those with much to gain. SGD has few passes; its fused form fails where a parameter's first gradient comes late."""
_DTYPES = (torch.float32, torch.float64)


def update(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()`; by torch's fused kernels where the user has not said which to use.

    On a CPU the usual way of Adam goes through memory about ten times, and makes tensors to do it; the fused one goes
    once, in a third to a tenth of the time. They differ in the last bit of a number now and then. On a GPU torch takes
    the quickest way by itself. Outside of the step the groups are as the user made them. An optimizer with hooks that
    run before its step steps as usual: they may put other gradients there.
    """
    if type(optimizer) not in _FUSED or _has_hooks_before(optimizer):
        optimizer.step()
        return
    groups = [group for group in optimizer.param_groups if _is_open(group, optimizer.state)]
    for group in groups:
        group["fused"] = True
    try:
        optimizer.step()
    finally:
        for group in groups:
            group["fused"] = None


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rates of its groups now; NaN for one that has none."""
    return [float(group.get("lr", nan)) for group in optimizer.param_groups]


def _has_hooks_before(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer._optimizer_step_pre_hooks or every._global_optimizer_pre_hooks)


def _is_open(group: dict[str, Any], state: dict[Tensor, Any]) -> bool:
    if group["fused"] is not None or group["foreach"] is not None or isinstance(group["lr"], Tensor):
        return False
    if group["differentiable"] or group["capturable"]:
        return False
    for param in group["params"]:
        grad = param.grad
        if grad is None:
            continue
        if not (_is_plain(param) and _is_plain(grad)):
            return False
        if not all(isinstance(value, Tensor) and value.is_contiguous() for value in state.get(param, _NONE).values()):
            return False
    return True


_NONE: dict[str, Tensor] = {}


def _is_plain(tensor: Tensor) -> bool:
    """The kernel goes through memory in order, and does not look how it lies."""
    in_order = tensor.layout is torch.strided and tensor.is_contiguous()
    return in_order and tensor.is_cpu and tensor.dtype in _DTYPES
