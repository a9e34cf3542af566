"""32-bit numbers from (salt, position of the sample, coordinates of the element), by a hash without state.

A row has a key of 64 bits: half of it is added to the words of its elements, half is xored to the sums, so that two
rows never run into each other, and both go through all rounds of the hash. An element is known by its coordinates: a
row that is padded to another length has the same numbers. The work is done in numpy, in blocks that stay in the cache:
per element it costs about a fifth of torch's generator.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
Array = NDArray[Any]

BLOCK = 1 << 16
"""Elements made at once."""
_KEPT = 1 << 20
"""Words of elements that are kept for the next draws of the same shapes."""
_LEAST, _MOST = 1 << 8, 1 << 18
"""How many words the inner dimensions of a long row have."""

_GOLDEN = 0x9E3779B97F4A7C15
_U64 = 0xFFFF_FFFF_FFFF_FFFF
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)
_ODD_1, _ODD_2, _ODD_3 = np.uint32(2654435769), np.uint32(2146121005), np.uint32(2221713035)
_LOW = 0 if sys.byteorder == "little" else 1
"""Where the lower half of a word of 64 bits lies."""
_15, _16 = np.uint32(15), np.uint32(16)
_NONE: Words = np.empty(0, np.uint32)


class Keys(NamedTuple):
    """For each row two words."""

    first: Words
    second: Words


def spread(positions: Array) -> NDArray[np.uint64]:
    """What `keys` wants of positions: done once for all draws of a forward."""
    return (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)


def keys(spread_positions: NDArray[np.uint64], salt: int) -> Keys:
    """The rows' keys under a salt of 64 bits: the finaliser of splitmix64."""
    key = spread_positions + np.uint64(salt & _U64)
    shifted = key >> _30
    key ^= shifted
    key *= _MIX_1
    np.right_shift(key, _27, out=shifted)
    key ^= shifted
    key *= _MIX_2
    np.right_shift(key, _31, out=shifted)
    key ^= shifted
    halves = key.view(np.uint32)
    return Keys(halves[_LOW::2], halves[1 - _LOW :: 2])


def _mixed(words: Words) -> Words:
    words ^= words >> _16
    words *= _ODD_2
    words ^= words >> _15
    words *= _ODD_3
    words ^= words >> _16
    return words


class Elements:
    """The words of a row's elements, in order: sums of a word for each coordinate.

    Those of a long row are put together piece by piece, from words for its inner and for its outer dimensions.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self.size = math.prod(shape)
        at, length = len(shape), 1
        while at and (length < _LEAST or self.size <= BLOCK):
            at -= 1
            length *= shape[at]
        # too long to keep: its pieces are made from the numbers of the elements
        self._long = length > _MOST
        self._length = length
        self._inner = _NONE if self._long else _sums(shape, at, len(shape))
        self._outer = _NONE if self._long else _sums(shape, 0, at)

    def piece(self, start: int, stop: int) -> Words:
        """From one element up to another."""
        if self._long:
            return self._of(np.arange(start, stop))
        first, last = start // self._length, (stop - 1) // self._length
        where = slice(start - first * self._length, stop - first * self._length)
        if not self._outer.size > 1:
            return self._inner[where]
        outer = self._outer[first : last + 1]
        return (outer + self._inner[where]) if first == last else (outer[:, None] + self._inner).reshape(-1)[where]

    def _of(self, numbers: NDArray[np.int64]) -> Words:
        words = np.zeros(numbers.size, np.uint32)
        for dimension in reversed(range(len(self._shape))):
            numbers, coordinates = np.divmod(numbers, self._shape[dimension])
            words += _along(dimension, coordinates.astype(np.uint32))
        return words

    @property
    def kept(self) -> int:
        """How many words this keeps."""
        return self._outer.size + self._inner.size


def _along(dimension: int, coordinates: Words) -> Words:
    # far apart, so that no two dimensions have a word in common
    start = np.uint32((dimension + 1) * int(_ODD_1) & 0xFFFF_FFFF)
    return _mixed((coordinates + start) * _ODD_1)


def _sums(shape: tuple[int, ...], start: int, stop: int) -> Words:
    """Over these dimensions, in order."""
    words: Words = np.zeros((), np.uint32)
    for dimension in range(start, stop):
        words = words[..., None] + _along(dimension, np.arange(shape[dimension], dtype=np.uint32))
    return words.reshape(-1)


class _Kept:
    """Words of elements by shape, the least recently used ones forgotten."""

    def __init__(self) -> None:
        self._all: OrderedDict[tuple[int, ...], Elements] = OrderedDict()
        self._size = 0

    def of(self, shape: tuple[int, ...]) -> Elements:
        elements = self._all.get(shape)
        if elements is not None:
            self._all.move_to_end(shape)
            return elements
        elements = self._all[shape] = Elements(shape)
        self._size += elements.kept
        while self._size > _KEPT and len(self._all) > 1:
            self._size -= self._all.popitem(last=False)[1].kept
        return elements


_kept = _Kept()
_numbers, _shifted = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.uint32)


class Grid(NamedTuple):
    """The elements of a tensor in its own order, as `before` × rows × `after`: the rows' keys, the elements' words."""

    keys: Keys
    elements: Elements
    before: int
    after: int

    @classmethod
    def of(cls, keys: Keys, shape: tuple[int, ...], before: int) -> Grid:
        """`shape` is that of one row's elements; `before` is how many of them lie outside of the rows' dimension."""
        elements = _kept.of(shape)
        return cls(keys, elements, before, elements.size // before if before else 0)

    @property
    def size(self) -> int:
        return self.elements.size * len(self.keys.first)

    def blocks(self) -> Iterator[tuple[slice, Words]]:
        """Where in the flat tensor, and the numbers that belong there. They are gone with the next block."""
        if not self.size:
            return
        slab = len(self.keys.first) * self.after
        if self.before == 1 or slab > BLOCK:
            for place in range(self.before):
                yield from self._slab(place, place * slab)
            return
        first, second = self.keys.first[None, :, None], self.keys.second[None, :, None]
        most = BLOCK // slab
        for start in range(0, self.before, most):
            stop = min(self.before, start + most)
            words = self.elements.piece(start * self.after, stop * self.after).reshape(-1, 1, self.after)
            yield slice(start * slab, stop * slab), _hash(first, second, words, (len(words), first.size, self.after))

    def _slab(self, place: int, begin: int) -> Iterator[tuple[slice, Words]]:
        """All rows, of each the elements at this place outside of the rows' dimension."""
        rows, after = len(self.keys.first), self.after
        if after > BLOCK:
            for row in range(rows):
                for start in range(0, after, BLOCK):
                    stop = min(after, start + BLOCK)
                    words = self.elements.piece(place * after + start, place * after + stop)
                    at = begin + row * after
                    numbers = _hash(self.keys.first[row], self.keys.second[row], words, (len(words),))
                    yield slice(at + start, at + stop), numbers
            return
        words = self.elements.piece(place * after, (place + 1) * after)
        most = BLOCK // after
        for start in range(0, rows, most):
            stop = min(rows, start + most)
            first, second = self.keys.first[start:stop, None], self.keys.second[start:stop, None]
            where = slice(begin + start * after, begin + stop * after)
            yield where, _hash(first, second, words, (stop - start, after))


def _hash(first: Any, second: Any, words: Words, shape: tuple[int, ...]) -> Words:
    size = 1
    for length in shape:
        size *= length
    flat = _numbers[:size]
    x, t = flat.reshape(shape), _shifted[:size].reshape(shape)
    np.add(first, words, out=x)
    np.bitwise_xor(x, second, out=x)
    np.right_shift(x, _16, out=t)
    np.bitwise_xor(x, t, out=x)
    np.multiply(x, _ODD_2, out=x)
    np.right_shift(x, _15, out=t)
    np.bitwise_xor(x, t, out=x)
    np.multiply(x, _ODD_3, out=x)
    np.right_shift(x, _16, out=t)
    np.bitwise_xor(x, t, out=x)
    return flat
