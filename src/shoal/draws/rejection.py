"""Distributions that take an unknown number of tries: each element has its own, by its position and coordinates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.draws import numbers
from shoal.draws.forward import Draw

Doubles = NDArray[np.float64]
_MOST_TRIES = 100
"""No element needs so many: at least three of four tries are taken, for gamma 19 of 20."""
_LARGE = 10.0
"""From this rate on, Poisson numbers are found by rejection."""


def _uniform(draw: Draw, number: int) -> Doubles:
    made: Doubles = numbers.uniform(lambda each: draw.grid(number + each), torch.float64).numpy()
    return made


def _normal(draw: Draw, number: int) -> Doubles:
    made: Doubles = numbers.normal(lambda each: draw.grid(number + each), torch.float64).numpy()
    return made


def _until_taken(size: int, some: NDArray[np.bool_], attempt: Callable[[int, Any], tuple[Doubles, Any]]) -> Doubles:
    """`attempt(number, places)` gives numbers for the elements at these places, and which of them are taken."""
    out: Doubles = np.zeros(size)
    left = np.flatnonzero(some)
    for number in range(_MOST_TRIES):
        if not left.size:
            break
        found, taken = attempt(number, left)
        out[left[taken]] = found[taken]
        left = left[~taken]
    return out


def gamma(draw: Draw, shape: Doubles) -> Doubles:
    """Marsaglia and Tsang's; for shapes below 1 by way of the next larger one."""
    small = shape < 1.0
    d = np.where(small, shape + 1.0, shape) - 1.0 / 3.0
    c = 1.0 / np.sqrt(9.0 * d)

    def attempt(number: int, at: Any) -> tuple[Doubles, Any]:
        x, u = _normal(draw, 4 * number + 4)[at], _uniform(draw, 4 * number + 6)[at]
        v = (1.0 + c[at] * x) ** 3
        inside = v > 0.0
        log_v = np.log(v, where=inside, out=np.zeros_like(v))
        return d[at] * v, inside & (np.log(u) < 0.5 * x * x + d[at] * (1.0 - v + log_v))

    out = _until_taken(shape.size, np.ones(shape.size, np.bool_), attempt)
    if small.any():
        out[small] *= _uniform(draw, 0)[small] ** (1.0 / shape[small])
    return out


def poisson(draw: Draw, rate: Doubles) -> Doubles:
    """By inversion, and for large rates by Hörmann's transformed rejection."""
    large = rate >= _LARGE
    out = _until_taken(rate.size, large, lambda number, at: _transformed(draw, number, rate[at], at))
    small = np.flatnonzero(~large)
    if small.size:
        out[small] = _inverted(_uniform(draw, 0)[small], rate[small])
    return out


def _inverted(u: Doubles, rate: Doubles) -> Doubles:
    count: Doubles = np.zeros_like(rate)
    term = np.exp(-rate)
    total = term.copy()
    for number in range(1, 64):  # at a rate of 10 the chance of more is below what a double can tell from 0
        more = u > total
        if not more.any():
            break
        count += more
        term *= rate / number
        total += term
    return count


def _transformed(draw: Draw, number: int, rate: Doubles, at: Any) -> tuple[Doubles, Any]:
    b = 0.931 + 2.53 * np.sqrt(rate)
    a = -0.059 + 0.02483 * b
    u, v = _uniform(draw, 4 * number + 4)[at] - 0.5, _uniform(draw, 4 * number + 6)[at]
    us = 0.5 - np.abs(u)
    k = np.floor((2.0 * a / us + b) * u + rate + 0.43)
    quick = (us >= 0.07) & (v <= 0.9277 - 3.6224 / (b - 2.0))
    never = (k < 0.0) | ((us < 0.013) & (v > us))
    log_v = np.log(v * (1.1239 + 1.1328 / (b - 3.4)) / (a / (us * us) + b))
    k_safe = np.maximum(k, 0.0)
    slow = log_v <= k_safe * np.log(rate) - rate - torch.from_numpy(k_safe + 1.0).lgamma().numpy()
    return k, quick | (~never & slow)


class Gamma(torch.autograd.Function):
    """Standard gamma numbers, whose derivative by the shape is torch's."""

    @staticmethod
    def forward(ctx: Any, shape: Tensor, draw: Draw) -> Tensor:
        made = torch.from_numpy(gamma(draw, _flat(shape))).view(shape.shape).to(shape.dtype)
        made.clamp_(min=torch.finfo(shape.dtype).tiny)
        ctx.save_for_backward(shape, made)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        shape, made = ctx.saved_tensors
        return gradient * torch._standard_gamma_grad(shape, made), None


def standard_gamma(draw: Draw, shape: Tensor) -> Tensor:
    return Gamma.apply(shape, draw)  # type: ignore[no-any-return, no-untyped-call]


def sample_dirichlet(draw: Draw, shape: Tensor) -> Tensor:
    made = torch.from_numpy(gamma(draw, _flat(shape))).view(shape.shape)
    made.clamp_(min=torch.finfo(torch.float64).tiny)
    return made.div_(made.sum(-1, keepdim=True)).to(shape.dtype)


def sample_poisson(draw: Draw, rate: Tensor) -> Tensor:
    if not bool((rate >= 0).all()):
        raise RuntimeError("invalid Poisson rate, expected rate to be non-negative")
    return torch.from_numpy(poisson(draw, _flat(rate))).view(rate.shape).to(rate.dtype)


def _flat(tensor: Tensor) -> Doubles:
    flat: Doubles = tensor.detach().double().reshape(-1).numpy()
    return flat
