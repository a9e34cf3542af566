"""Whether a draw is to be made by position: one question that all that stands in for torch's draws asks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shoal.draws.forward import Forward

_current: Forward | None = None
_PLAIN = (Tensor, nn.Parameter)
_FAKE = torch._C._TorchDispatchModeKey.FAKE


def enter(forward: Forward | None) -> Forward | None:
    """From now on draws belong to this forward; with None they are torch's own again. Returns the one before."""
    global _current
    before, _current = _current, forward
    return before


def forward_now() -> Forward | None:
    """The forward under way; none while a graph is traced, in which nothing else may stand in."""
    # this first: while a graph is traced it is a constant, and nothing of ours becomes part of the graph
    if torch.compiler.is_dynamo_compiling() or torch._C._get_tracing_state() is not None:
        return None
    return _current


def forward_for(tensor: Tensor) -> Forward | None:
    """The same for a draw that goes into or along with this tensor, if it is one that can be made here."""
    forward = forward_now()
    if forward is None:
        return None
    plain = type(tensor) in _PLAIN and tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested
    if not plain or torch._C._functorch.peek_interpreter_stack() is not None:
        if not isinstance(tensor, FakeTensor):  # of a graph that is made; nothing is drawn
            forward.past = _what(tensor)
        return None
    return forward


def forward_on(device: Any) -> Forward | None:
    """The same for a tensor that is to be made on this device (None: the default one)."""
    forward = forward_now()
    if forward is None:
        return None
    if torch._C._get_dispatch_mode(_FAKE) is not None:
        return None  # nothing is drawn: a graph is made
    kind = _device(device)
    if kind != "cpu" or torch._C._functorch.peek_interpreter_stack() is not None:
        forward.past = f"on {kind}" if kind != "cpu" else "inside torch.func"
        return None
    return forward


def _device(device: Any) -> str:
    if device is not None:
        return torch.device(device).type
    # a default other than the CPU is a mode
    return torch.get_default_device().type if torch._C._len_torch_function_stack() else "cpu"


def _what(tensor: Tensor) -> str:
    if type(tensor) not in _PLAIN:
        traced = type(tensor).__name__ in ("FunctionalTensor", "FakeTensor")
        return "in a compiled graph" if traced else f"for a {type(tensor).__name__}"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return "for a nested tensor" if tensor.is_nested else f"for a tensor of layout {tensor.layout}"
    return f"on {tensor.device.type}" if not tensor.is_cpu else "inside torch.func"
