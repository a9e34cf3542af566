"""Tensors of random numbers from the hash: uniform, normal, exponential, whole numbers, masks."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.draws.hashing import Array, Grid, Words

Grids = Callable[[int], Grid]
"""The same elements under several salts, by number: 0, and 1 for numbers of more than 32 bits."""

_ONE, _MANTISSA, _SIGN = np.uint32(0x3F80_0000), np.uint32(0x007F_FFFF), np.uint32(0x8000_0000)
_9 = np.uint32(9)
_ALMOST_ONE, _ROOT_2 = np.float32(1.0 - 2.0**-24), np.float32(math.sqrt(2.0))
_CUT = {torch.bfloat16: np.uint32(0xFFFF_0000), torch.float16: np.uint32(0xFFFF_E000)}
"""The bits of a single that a shorter type has too."""


def filled(grid: Grid, dtype: np.dtype[np.generic] | type, make: Callable[[Words, Array], None]) -> Array:
    """A flat array; `make(numbers, place)` puts what it makes of a block's numbers into its place."""
    out: Array = np.empty(grid.size, dtype)
    for where, numbers in grid.blocks():
        make(numbers, out[where])
    return out


def uniform(grids: Grids, dtype: torch.dtype) -> Tensor:
    """Strictly between 0 and 1, flat: 23 bits and a half for single precision and less, 52 and a half for double.

    For shorter types the singles are such that they fit in: none becomes 1 by rounding.
    """
    if dtype == torch.float64:
        return torch.from_numpy(_doubles(grids))
    out: NDArray[np.float32] = filled(grids(0), np.float32, _to_floats)
    if dtype in _CUT:
        bits = out.view(np.uint32)
        bits &= _CUT[dtype]
    return torch.from_numpy(out)


def _to_floats(numbers: Words, place: NDArray[np.float32]) -> None:
    np.right_shift(numbers, _9, out=numbers)
    np.bitwise_or(numbers, _ONE, out=numbers)
    np.subtract(numbers.view(np.float32), _ALMOST_ONE, out=place)  # from 1 … 2; exact


def _doubles(grids: Grids) -> NDArray[np.float64]:
    grid = grids(0)
    out: NDArray[np.float64] = np.empty(grid.size, np.float64)
    for where, numbers in grid.blocks():
        out[where] = numbers  # the next grid uses the same memory
    for where, numbers in grids(1).blocks():
        place = out[where]
        np.right_shift(numbers, 12, out=numbers)
        place *= 2.0**20
        place += numbers
        place += 0.5
        place *= 2.0**-52
    return out


def words(grids: Grids) -> NDArray[np.uint64]:
    """64 bits each."""
    grid = grids(0)
    out: NDArray[np.uint64] = np.empty(grid.size, np.uint64)
    for where, numbers in grid.blocks():
        out[where] = numbers
    out <<= np.uint64(32)
    for where, numbers in grids(1).blocks():
        out[where] |= numbers
    return out


def whole(grids: Grids, low: int, high: int) -> NDArray[np.int64]:
    """Whole numbers from low to high − 1."""
    span = high - low
    if span <= 1 << 32:
        out = filled(grids(0), np.uint64, lambda numbers, place: np.copyto(place, numbers))
        out *= np.uint64(span)
        out >>= np.uint64(32)
        return out.astype(np.int64) + low
    drawn = words(grids)
    drawn %= np.uint64(span)
    return drawn.astype(np.int64) + low


def normal(grids: Grids, dtype: torch.dtype) -> Tensor:
    """Standard normal, flat, by the inverse of its distribution; single precision reaches 5.4, double 8.1."""
    if dtype == torch.float64:
        return torch.from_numpy(_doubles(grids)).mul_(2.0).sub_(1.0).erfinv_().mul_(math.sqrt(2.0))
    return torch.from_numpy(filled(grids(0), np.float32, _to_normal))


def _to_normal(numbers: Words, place: NDArray[np.float32]) -> None:
    """One bit for the sign, 23 and a half for how far from 0."""
    bits = place.view(np.uint32)
    np.bitwise_and(numbers, _SIGN, out=bits)
    np.bitwise_and(numbers, _MANTISSA, out=numbers)
    np.bitwise_or(numbers, _ONE, out=numbers)
    far = numbers.view(np.float32)
    np.subtract(far, _ALMOST_ONE, out=far)
    np.bitwise_or(bits, numbers, out=bits)
    torch.from_numpy(place).erfinv_()
    np.multiply(place, _ROOT_2, out=place)


def exponential(grids: Grids, dtype: torch.dtype) -> Tensor:
    """Of rate 1, flat; finite and above 0."""
    return uniform(grids, torch.float32 if dtype in _CUT else dtype).log_().neg_()


def limit(p: float) -> int:
    """Numbers of 32 bits below this make a share p of them; as near as these come to it."""
    return round(p * 4294967296.0)


def mask(grid: Grid, keep: float) -> NDArray[np.bool_]:
    """Flat: true with probability `keep`."""
    below = limit(keep)
    if below > 0xFFFF_FFFF:
        return np.ones(grid.size, np.bool_)
    bound = np.uint32(below)
    return filled(grid, np.bool_, lambda numbers, place: np.copyto(place, np.less(numbers, bound)))
