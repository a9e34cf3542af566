"""Dropout by position, in all its forms. `make_…(original)` gives what stands in for torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.draws.forward import Draw, Forward
from shoal.draws.hashing import BLOCK
from shoal.draws.here import forward_for
from shoal.draws.numbers import limit, mask

_ALPHA = 1.7580993408473766
_SMALL = 1 << 15
"""Elements up to which a mask of floats is quicker than one of bytes, and its memory does not matter."""
_NUMPY: dict[torch.dtype, type[np.floating[Any]]] = {torch.float32: np.float32, torch.float64: np.float64}


def make_dropout(original: Any) -> Callable[[Tensor, float, bool], Tensor]:
    def dropout(input: Tensor, p: float, train: bool) -> Tensor:
        forward = _forward(input, p, train)
        return original(input, p, train) if forward is None else dropped(forward, input, p)

    return dropout


def make_dropout_(original: Any) -> Callable[[Tensor, float, bool], Tensor]:
    def dropout_(input: Tensor, p: float, train: bool) -> Tensor:
        forward = _forward(input, p, train)
        if forward is None:
            return original(input, p, train)  # type: ignore[no-any-return]
        return input.mul_(noise(forward.draw("dropout", input.shape), p, input.dtype).view(input.shape))

    return dropout_


def make_feature_dropout(original: Any, *, alpha: bool, inplace: bool) -> Callable[[Tensor, float, bool], Tensor]:
    def feature_dropout(input: Tensor, p: float, train: bool) -> Tensor:
        forward = _forward(input, p, train)
        if forward is None or input.dim() < 2:
            return original(input, p, train)  # type: ignore[no-any-return]
        shape = (*input.shape[:2], *([1] * (input.dim() - 2)))
        draw = forward.draw("feature dropout", shape[:2])
        if alpha:
            return _alpha(input, draw, p, shape, inplace=inplace)
        factor = noise(draw, p, input.dtype).view(shape)
        return input.mul_(factor) if inplace else input * factor

    return feature_dropout


def make_alpha_dropout(original: Any, *, inplace: bool) -> Callable[[Tensor, float, bool], Tensor]:
    def alpha_dropout(input: Tensor, p: float, train: bool) -> Tensor:
        forward = _forward(input, p, train)
        if forward is None:
            return original(input, p, train)  # type: ignore[no-any-return]
        return _alpha(input, forward.draw("alpha dropout", input.shape), p, tuple(input.shape), inplace=inplace)

    return alpha_dropout


def make_native_dropout(original: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def native_dropout(input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        forward = _forward(input, p, train is not False)
        if forward is None:
            return original(input, p, train)  # type: ignore[no-any-return]
        kept = torch.from_numpy(mask(forward.draw("dropout", input.shape).grid(), 1.0 - p)).view(input.shape)
        return input * kept.to(input.dtype).mul_(1.0 / (1.0 - p)), kept

    return native_dropout


def _forward(input: Any, p: float, train: bool) -> Forward | None:
    """None where torch's own does not draw, or has to do it."""
    if not train or not 0.0 < p < 1.0 or not isinstance(input, Tensor):
        return None
    forward = forward_for(input)
    if forward is None or not input.numel():
        return None
    # torch refuses the rest with words of its own
    return forward if input.is_floating_point() or input.is_complex() else None


def dropped(forward: Forward, input: Tensor, p: float) -> Tensor:
    """Dropout of a tensor that is to be kept as it is."""
    draw = forward.draw("dropout", input.shape)
    if input.numel() <= _SMALL or input.dtype not in _NUMPY:
        return input * noise(draw, p, input.dtype).view(input.shape)
    return _Dropout.apply(input, draw, p)  # type: ignore[no-any-return, no-untyped-call]


def noise(draw: Draw, p: float, dtype: torch.dtype) -> Tensor:
    """What to multiply with, flat: 0 with probability p, else 1 / (1 − p)."""
    kind = _NUMPY.get(dtype, np.float32)
    grid, bound, scale = draw.grid(), limit(1.0 - p), kind(1.0 / (1.0 - p))
    out: NDArray[Any] = np.empty(grid.size, kind)
    for where, numbers in grid.blocks():
        np.multiply(np.less(numbers, bound), scale, out=out[where])
    values = torch.from_numpy(out)
    return values if dtype in _NUMPY else values.to(dtype)


def _alpha(input: Tensor, draw: Draw, p: float, shape: tuple[int, ...], *, inplace: bool) -> Tensor:
    kept = torch.from_numpy(mask(draw.grid(), 1.0 - p)).view(shape).to(input.dtype)
    a = 1.0 / math.sqrt((_ALPHA * _ALPHA * p + 1.0) * (1.0 - p))
    shift = (kept - 1.0).mul_(_ALPHA * a).add_(_ALPHA * a * p)
    kept.mul_(a)
    return input.mul_(kept).add_(shift) if inplace else input * kept + shift


class _Dropout(torch.autograd.Function):
    """Makes mask and product block by block. What is kept for backward is a byte per element."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, draw: Draw, p: float) -> Tensor:
        bound, scale = limit(1.0 - p), 1.0 / (1.0 - p)
        if input.is_contiguous():
            kept, out = _made(input, draw, bound, scale)
        else:
            # not in blocks: the result lies in memory as the input does, the mask in logical order
            kept = torch.from_numpy(mask(draw.grid(), 1.0 - p)).view(input.shape)
            out = (input * kept).mul_(scale)
        ctx.scale = scale
        ctx.save_for_backward(kept)
        ctx.save_for_forward(kept)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Masked.apply(gradient, ctx.saved_tensors[0], ctx.scale), None, None  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        kept: Tensor = ctx.saved_tensors[0]
        return (tangent * kept).mul_(ctx.scale)


def _made(input: Tensor, draw: Draw, bound: int, scale: float) -> tuple[Tensor, Tensor]:
    flat = input.detach().view(-1).numpy()
    kept: NDArray[np.bool_] = np.empty(flat.size, np.bool_)
    out, factors = np.empty_like(flat), np.empty(BLOCK, flat.dtype)
    factor_of = flat.dtype.type(scale)
    for where, numbers in draw.grid().blocks():
        place, factor = kept[where], factors[: numbers.size]
        np.less(numbers, bound, out=place)
        np.multiply(place, factor_of, out=factor)
        np.multiply(flat[where], factor, out=out[where])
    return torch.from_numpy(kept).view(input.shape), torch.from_numpy(out).view(input.shape)


class _Masked(torch.autograd.Function):
    """Times a mask and a number; its own derivative."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, kept: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(kept)
        if not input.is_contiguous() or input.dtype not in _NUMPY:
            return (input * kept).mul_(scale)
        flat, mask = input.detach().view(-1).numpy(), kept.view(-1).numpy()
        out, factors = np.empty_like(flat), np.empty(BLOCK, flat.dtype)
        factor_of = flat.dtype.type(scale)
        for start in range(0, flat.size, BLOCK):
            where = slice(start, min(flat.size, start + BLOCK))
            factor = factors[: where.stop - start]
            np.multiply(mask[where], factor_of, out=factor)
            np.multiply(flat[where], factor, out=out[where])
        return torch.from_numpy(out).view(input.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Masked.apply(gradient, ctx.saved_tensors[0], ctx.scale), None, None  # type: ignore[no-untyped-call]
