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

_HALF, _STEP_32 = np.float32(0.5), np.float32(2.0**-23)


def filled(grid: Grid, dtype: np.dtype[np.generic] | type, make: Callable[[Words, Array], None]) -> Array:
    """A flat array; `make(numbers, place)` puts what it makes of a block's numbers into its place."""
    out: Array = np.empty(grid.size, dtype)
    for where, numbers in grid.blocks():
        make(numbers, out[where])
    return out


def uniform(grids: Grids, dtype: torch.dtype) -> Tensor:
    """Strictly between 0 and 1, flat: 23 bits and a half for single precision and less, 52 and a half for double."""
    if dtype == torch.float64:
        return torch.from_numpy(_doubles(grids))
    return torch.from_numpy(filled(grids(0), np.float32, _to_floats))


def _to_floats(numbers: Words, place: NDArray[np.float32]) -> None:
    np.right_shift(numbers, 9, out=numbers)
    np.add(numbers, _HALF, out=place, casting="unsafe", dtype=np.float32)
    np.multiply(place, _STEP_32, out=place)


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
    """Standard normal, flat, by the inverse of its distribution; single precision reaches 5.3, double 8.1."""
    value = uniform(grids, dtype)
    return value.mul_(2.0).sub_(1.0).erfinv_().mul_(math.sqrt(2.0))


def exponential(grids: Grids, dtype: torch.dtype) -> Tensor:
    """Of rate 1, flat; finite and above 0."""
    return uniform(grids, dtype).log_().neg_()


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
