"""What a rehearsal without a fork may change, kept to be put back."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_CONTAINERS = (list, dict, set, deque, bytearray)


def state_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def let_go_of_gradient(param: nn.Parameter) -> tuple[Tensor | None, Any]:
    """Whatever calls backward gets to nobody who waits for gradients. Returns what `give_gradient` takes."""
    hooks: Any = param._post_accumulate_grad_hooks
    kept = param.grad, None if hooks is None else dict(hooks)
    param.grad = None
    if hooks:
        hooks.clear()
    return kept


def give_gradient(param: nn.Parameter, kept: tuple[Tensor | None, Any]) -> None:
    param.grad, hooks = kept
    if hooks:
        param._post_accumulate_grad_hooks.update(hooks)


class Kept:
    """The state of modules and of all generators, as it is when this is made."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        tensors = {id(tensor): tensor for module in modules for tensor in state_of(module)}
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
        params = {id(param): param for module in modules for param in module.parameters()}
        self._gradients = [(param, let_go_of_gradient(param)) for param in params.values()]
        self._parts = [
            (f"{name}." if name else "", part, dict(vars(part)), dict(part._buffers))
            for module in modules
            for name, part in module.named_modules()
        ]
        self._sizes = {id(held): len(held) for _, _, plain, _ in self._parts for held in _containers(plain).values()}
        self._states = torch.get_rng_state(), random.getstate(), np.random.get_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def put_back(self) -> str:
        """Returns the name of something that has changed for good, if there is such a thing."""
        torch.set_rng_state(self._states[0])
        random.setstate(self._states[1])
        np.random.set_state(self._states[2])
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        changed = ""
        for name, part, plain, buffers in self._parts:
            vars(part).update(plain)
            for key in vars(part).keys() - plain.keys():
                del vars(part)[key]
            part._buffers.update(buffers)
            for key, held in _containers(plain).items():
                changed = changed or (f"{name}{key}" if len(held) != self._sizes[id(held)] else "")
        with torch.no_grad():
            for tensor, value in self._tensors:
                tensor.copy_(value)
        for param, kept in self._gradients:
            give_gradient(param, kept)
        return changed


def _containers(plain: dict[str, Any]) -> dict[str, Any]:
    """Those that are the user's."""
    return {key: held for key, held in plain.items() if not key.startswith("_") and isinstance(held, _CONTAINERS)}
