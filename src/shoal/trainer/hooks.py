"""Hooks on parameters. They get the gradient of one forward, a part of the step's: only what is linear adds up right.

Hooks on modules and on what a forward computes get gradients of samples, which are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Params = Iterable[tuple[str, nn.Parameter]]

_FACTOR = -1e6
"""Clamping, taking absolute values, norms, or adding something is not the same before and after it."""
_TOLERANCE = 1e-4


def find_bent(params: Params, tried: set[int]) -> str | None:
    """The first parameter with a hook that is not linear, or that cannot be judged; `tried` are left out, and grow.

    A hook is called twice, with copies of random gradients. One that runs when a gradient was added to `.grad` gets no
    gradient to judge it by: it is taken for one that changes what it finds there.
    """
    for name, param in params:
        for hook in _new(param._backward_hooks, tried):
            if not is_linear(hook, param):
                return name
        for hook in _new(getattr(param, "_post_accumulate_grad_hooks", None), tried):
            if not str(getattr(hook, "__module__", "")).startswith("shoal."):
                return name
    return None


def _new(hooks: Any, tried: set[int]) -> Iterator[Callable[..., Any]]:
    for hook in list((hooks or {}).values()):
        if id(hook) not in tried:
            tried.add(id(hook))
            yield hook


def is_linear(hook: Callable[[Tensor], Any], param: Tensor) -> bool:
    """Whether it makes of a multiple of a gradient that multiple of what it makes of the gradient."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        gradient = torch.randn(param.shape, dtype=param.dtype, device=param.device)
        try:
            once, much = _result(hook, gradient), _result(hook, gradient * _FACTOR)
        except Exception:  # whatever it wants of a gradient, this is none
            return False
    if once.shape != much.shape or not once.numel():
        return once.shape == much.shape
    expected = once * _FACTOR
    return float((expected - much).abs().max()) <= _TOLERANCE * max(float(expected.abs().max()), 1e-30)


def _result(hook: Callable[[Tensor], Any], gradient: Tensor) -> Tensor:
    given = gradient.clone()
    made = hook(given)
    return made if isinstance(made, Tensor) else given
