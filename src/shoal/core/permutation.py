"""A keyed permutation of 0 … n−1 that needs no memory of size n.

Position p of an epoch is sample `permutation.at(p)`. A Feistel network over the grid Z_a × Z_b with a·b ≥ n is a
bijection on the grid; walking the cycle until the value falls below n makes it one on 0 … n−1. The grid is at most
√n larger than n, so a second walk is rare and a third almost never happens.
"""

from __future__ import annotations

from math import isqrt

import numpy as np
from numpy.typing import NDArray

from shoal.core.keys import derive

Indices = NDArray[np.int64]

_ROUNDS = 8
_BLOCK = 1024
"""Positions computed at once: a step asks for few of them, and numpy's cost is per call, not per element."""


class Permutation:
    """The order of `size` samples under `key`. Not thread-safe: it remembers the last block it computed."""

    def __init__(self, size: int, key: int) -> None:
        if size < 1:
            raise ValueError(f"a permutation needs at least one element, got size={size}")
        self.size = size
        self._a = isqrt(size - 1) + 1
        self._b = -(-size // self._a)
        self._keys = [np.uint64(derive(key, "round", number)) for number in range(_ROUNDS)]
        self._block_start = -1
        self._block: Indices = np.empty(0, np.int64)

    def span(self, start: int, stop: int) -> Indices:
        """Samples at positions start … stop−1, in order."""
        if not 0 <= start <= stop <= self.size:
            raise IndexError(f"positions {start}…{stop} are outside 0…{self.size}")
        first, last = start - start % _BLOCK, stop - 1
        if stop > start and last - last % _BLOCK == first:
            if self._block_start != first:
                self._block = self.at(np.arange(first, min(first + _BLOCK, self.size)))
                self._block_start = first
            return self._block[start - first : stop - first]
        return self.at(np.arange(start, stop))

    def at(self, positions: Indices) -> Indices:
        """Samples at the given positions, each of which must lie in 0 … size−1."""
        values = self._shuffle(positions.astype(np.uint64))
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            values[outside] = self._shuffle(values[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64)

    def _shuffle(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        a, b = np.uint64(self._a), np.uint64(self._b)
        left, right = values // b, values % b
        for number, key in enumerate(self._keys):
            if number % 2:
                right = (right + _mix(left, key) % b) % b
            else:
                left = (left + _mix(right, key) % a) % a
        return left * b + right


def _mix(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 over value and key; arithmetic is modulo 2⁶⁴."""
    mixed = (values ^ key) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
