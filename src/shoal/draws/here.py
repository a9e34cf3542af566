"""Whether a draw is to be made by position: one question that all that stands in for torch's draws asks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal.draws.forward import Forward

_current: Forward | None = None
_PLAIN = (Tensor, nn.Parameter)


def enter(forward: Forward | None) -> None:
    """From now on draws belong to this forward; with None they are torch's own again."""
    global _current
    _current = forward


def forward_now() -> Forward | None:
    """The forward under way; none while a graph is traced, in which nothing else may stand in."""
    # this first: while a graph is traced it is a constant, and nothing of ours becomes part of the graph
    if torch.compiler.is_dynamo_compiling():
        return None
    return _current


def forward_for(tensor: Tensor) -> Forward | None:
    """The same for a draw that goes into or along with this tensor, if it is one that can be made here."""
    forward = forward_now()
    if forward is None:
        return None
    if type(tensor) not in _PLAIN or not tensor.is_cpu or torch._C._functorch.peek_interpreter_stack() is not None:
        forward.past = _what(tensor)
        return None
    return forward


def forward_on(device: Any) -> Forward | None:
    """The same for a tensor that is to be made on this device (None: the default one)."""
    forward = forward_now()
    if forward is None:
        return None
    kind = torch.get_default_device() if device is None else torch.device(device)
    if kind.type != "cpu" or torch._C._functorch.peek_interpreter_stack() is not None:
        forward.past = f"on {kind.type}"
        return None
    return forward


def _what(tensor: Tensor) -> str:
    if type(tensor) not in _PLAIN:
        return f"for a {type(tensor).__name__}"
    return f"on {tensor.device.type}" if not tensor.is_cpu else "inside torch.func"
