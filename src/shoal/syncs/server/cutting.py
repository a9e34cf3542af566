"""How the trained parameters of a model lie in memory, and how that is cut into shards.

All parameters lie one after the other in the *area*, each at a multiple of 64 bytes. A *shard* is a range of the area,
and the part of a parameter that lies in a shard is a *piece*, or several, one after the other. Weights, gradients and
sums all have this layout, so a parameter is one contiguous view of the area, and what belongs to a shard can be sent or
added as one range of bytes.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.core.errors import ConfigError

ALIGNMENT = 64
"""Parameters and shards start at multiples of this: a line of the processor's cache, and of any element's size."""
SMALLEST = 1024
"""Bytes; models that would have smaller shards have fewer."""
LARGEST = 4 << 20
"""Bytes of a piece. Optimizers make memory of a piece's size in each step and let go of it: of small ones the allocator
keeps it, and it stays in the cache; for each large one the system clears new pages, and AdamW takes twice the time."""


class Piece(NamedTuple):
    """Elements start … stop−1 of a flattened parameter."""

    param: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Shard:
    """Bytes start … stop−1 of the area, and what lies there, in order."""

    number: int
    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def portions(self) -> list[Piece]:
        """All of each parameter that lies here, as one."""
        found: list[Piece] = []
        for piece in self.pieces:
            if found and found[-1].param == piece.param:
                found[-1] = found[-1]._replace(stop=piece.stop)
            else:
                found.append(piece)
        return found


@dataclass(frozen=True)
class Cut:
    """The layout of the area, equal in all processes of a run (compare `digest`)."""

    size: int
    """Bytes of the area."""
    shards: tuple[Shard, ...]
    offsets: tuple[int, ...]
    """For each parameter, its first byte in the area."""
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    names: tuple[str, ...]

    def view(self, area: Tensor, param: int) -> Tensor:
        """The parameter in an area of `size` bytes, in its shape."""
        start, shape, dtype = self.offsets[param], self.shapes[param], self.dtypes[param]
        return area[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def pieces(self, area_of_shard: Tensor, shard: int | Shard) -> list[Tensor]:
        """The shard's pieces, flat, in the order of `Shard.pieces`; of the bytes of this shard alone."""
        whole = self.shards[shard] if isinstance(shard, int) else shard
        if area_of_shard.numel() != whole.size:
            raise ValueError(f"shard {whole.number} has {whole.size} bytes, and these are {area_of_shard.numel()}")
        views = []
        for piece in whole.pieces:
            dtype = self.dtypes[piece.param]
            start = self.offsets[piece.param] + piece.start * dtype.itemsize - whole.start
            views.append(area_of_shard[start : start + (piece.stop - piece.start) * dtype.itemsize].view(dtype))
        return views

    def digest(self) -> str:
        """Equal for equal layouts of equal parameters."""
        bounds = [(shard.start, shard.stop) for shard in self.shards]
        told = repr((self.size, bounds, self.offsets, self.shapes, [str(dtype) for dtype in self.dtypes], self.names))
        return hashlib.sha256(told.encode()).hexdigest()


def cut(params: Sequence[tuple[str, Tensor]], *, whole: bool = False, shards: int = 12, largest: int = LARGEST) -> Cut:
    """Cut these parameters into shards of about equal bytes; with `whole`, only between parameters.

    A shard is never empty: small models, and those of few parameters that stay whole, have fewer shards. Pieces have at
    most `largest` bytes, but for those of `whole` parameters.
    """
    if shards < 1:
        raise ValueError(f"shards={shards}; there must be at least 1")
    offsets, size = _lay(params)
    if not size:
        raise ConfigError("the model has no parameter with elements that is trained: sync='server' has nothing to hold")
    count = max(1, min(shards, size // SMALLEST))
    ideal = [size * number / count for number in range(1, count)]
    inner = {_nearest(offsets, place) if whole else round(place / ALIGNMENT) * ALIGNMENT for place in ideal}
    bounds = [0, *sorted(inner - {0, size}), size]
    return Cut(
        size=size,
        shards=tuple(_shards(params, offsets, bounds, size if whole else largest)),
        offsets=tuple(offsets),
        shapes=tuple(tuple(param.shape) for _, param in params),
        dtypes=tuple(param.dtype for _, param in params),
        names=tuple(name for name, _ in params),
    )


def _lay(params: Sequence[tuple[str, Tensor]]) -> tuple[list[int], int]:
    """Where each parameter starts, and the bytes of all."""
    offsets, size = [], 0
    for _, param in params:
        offsets.append(size)
        size += -(-param.numel() * param.dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return offsets, size


def _nearest(offsets: Sequence[int], place: float) -> int:
    after = bisect_right(offsets, place)
    return min(offsets[after - 1 : after + 1], key=lambda offset: abs(offset - place))


def _shards(
    params: Sequence[tuple[str, Tensor]], offsets: Sequence[int], bounds: Sequence[int], largest: int
) -> list[Shard]:
    pieces: list[list[Piece]] = [[] for _ in bounds[1:]]
    for number, (offset, (_, param)) in enumerate(zip(offsets, params, strict=True)):
        item, elements = param.dtype.itemsize, param.numel()
        shard = min(bisect_right(bounds, offset) - 1, len(pieces) - 1)
        start = 0
        # At least one piece, even of a parameter without elements: an optimizer has a state for that too.
        while True:
            end = (bounds[shard + 1] - offset) // item
            stop = min(elements, end, start + largest // item)
            pieces[shard].append(Piece(number, start, stop))
            if stop == elements:
                break
            start, shard = stop, shard + (stop == end)
    return [
        Shard(number, start, stop, tuple(inside))
        for number, (start, stop, inside) in enumerate(zip(bounds[:-1], bounds[1:], pieces, strict=True))
    ]
