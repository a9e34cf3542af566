"""The body of a payload of few numbers out of many, and where each belongs.

    scale      single precision, and 4 bytes that are zero
    counts     for each block of 65536 numbers how many of them are there, 4 bytes each
    offsets    of these numbers within their blocks, 2 bytes each, for blocks where that is shorter than
    bitmaps    a bit for each number of the block, in blocks of which more than a sixteenth is there
    numbers    half precision, to be multiplied by the scale

Each part is filled up with zeros to a multiple of 8 bytes.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm.codecs.payload import HEADER_BYTES, room
from shoal.core.errors import PayloadError

BLOCK = 1 << 16
_SHIFT = 16
_LARGEST = 32752.0
"""The largest half below 2¹⁵: times the largest scale it is finite."""
_LEAST_SCALE, _LARGEST_SCALE = 2.0**-125, 2.0**113
"""With the least one the smallest half is the smallest number of single precision."""
_HEAD = struct.Struct("<fI")
_GATHER_BITS = 0x0102040810204080
"""Times 8 bytes that are 0 or 1 this has their bits, the first lowest, in its upper byte."""
_EIGHT_TIMES = 0x0101010101010101
_BIT_IN_EACH_BYTE = 0x8040201008040201 - (1 << 64)
"""The lowest bit of the first byte, the next of the second, and so on."""


class Sparse(NamedTuple):
    """Some numbers of a vector: rising indices, and for each a half to be multiplied by the scale."""

    places: Tensor
    halves: Tensor
    scale: float

    def numbers(self) -> Tensor:
        """In single precision; all finite."""
        return self.halves.to(torch.float32).mul_(self.scale)


def halved(index: Tensor, numbers: Tensor) -> Sparse:
    """These finite numbers in half precision, with a scale, a power of two, at which the largest is below 2¹⁵."""
    largest = float(numbers.abs().max()) if numbers.numel() else 0.0
    scale = min(max(math.ldexp(1.0, math.frexp(largest)[1] - 15), _LEAST_SCALE), _LARGEST_SCALE) if largest else 1.0
    return Sparse(index, (numbers * (1 / scale)).clamp_(-_LARGEST, _LARGEST).to(torch.float16), scale)


class _Layout(NamedTuple):
    """Where the parts of a body begin, from how many numbers are in each block."""

    dense: Tensor
    """For each block whether it has a bitmap."""
    numbers: int
    bitmap_bytes: int
    offsets_at: int
    bitmaps_at: int
    numbers_at: int
    end: int


def _layout(counts: Tensor, count: int) -> _Layout:
    widths = _widths(count, counts.device)
    dense = counts * 2 > widths
    numbers = int(counts.sum())
    offsets = int(counts[~dense].sum())
    bitmap_bytes = int(widths[dense].sum())
    offsets_at = _HEAD.size + _padded(4 * counts.numel())
    bitmaps_at = offsets_at + _padded(2 * offsets)
    numbers_at = bitmaps_at + _padded(bitmap_bytes)
    return _Layout(dense, numbers, bitmap_bytes, offsets_at, bitmaps_at, numbers_at, numbers_at + _padded(2 * numbers))


def most_body_bytes(count: int, numbers: int) -> int:
    """The longest body of so many of `count` numbers, or fewer."""
    offsets = min(2 * numbers, (count + 7) // 8)
    return _HEAD.size + _padded(4 * _blocks(count)) + _padded(offsets) + 8 + _padded(2 * numbers)


def packed(sparse: Sparse, count: int) -> Tensor:
    """A payload, still without its header, of these of `count` numbers."""
    places = sparse.places
    counts = _counts(places, _blocks(count))
    at = _layout(counts, count)
    payload = room(at.end, places.device)
    body = payload[HEADER_BYTES:]
    _put(body[: _HEAD.size], torch.frombuffer(bytearray(_HEAD.pack(sparse.scale, 0)), dtype=torch.uint8))
    _put(body[_HEAD.size : at.offsets_at], counts.to(torch.int32).view(torch.uint8))
    if at.bitmap_bytes:
        is_dense = at.dense.repeat_interleave(counts, output_size=at.numbers)
        _put(body[at.bitmaps_at : at.numbers_at], _bitmaps(places[is_dense], counts, at))
        places = places[~is_dense]
    offsets = (places & BLOCK - 1).to(torch.int32).to(torch.int16)
    _put(body[at.offsets_at : at.bitmaps_at], offsets.view(torch.uint8))
    _put(body[at.numbers_at : at.end], sparse.halves.view(torch.uint8))
    return payload


def unpacked(body: Tensor, count: int) -> Sparse:
    """What `packed` was given. Raises `PayloadError` if it could not have made this body."""
    counts_end = _HEAD.size + 4 * _blocks(count)
    if body.numel() < _padded(counts_end):
        raise PayloadError(f"a sparse payload of {count} numbers has a body of {body.numel()} bytes, too few for any")
    scale, zero = _HEAD.unpack(body[: _HEAD.size].cpu().numpy().tobytes())
    if not _LEAST_SCALE <= scale <= _LARGEST_SCALE or zero:
        raise PayloadError(f"a sparse payload has a scale of {scale:g}, which none is made with")
    counts = body[_HEAD.size : counts_end].view(torch.int32).to(torch.int64)
    if bool((counts < 0).any()) or bool((counts > _lengths(count, body.device)).any()):
        raise PayloadError("a sparse payload tells a count for some block that is below 0, or above its length")
    at = _layout(counts, count)
    if at.end != body.numel():
        raise PayloadError(
            f"a sparse payload with {at.numbers} numbers must have {at.end} bytes, and has {body.numel()}"
        )
    index = _indices(body, counts, at)
    if bool((index[1:] <= index[:-1]).any()) or (index.numel() and int(index[-1]) >= count):
        raise PayloadError("the places in a sparse payload do not rise from number to number, or go beyond its end")
    halves = body[at.numbers_at : at.numbers_at + 2 * at.numbers].view(torch.float16)
    if halves.numel() and not float(halves.abs().max()) <= _LARGEST:
        raise PayloadError("a sparse payload has numbers that are not finite, or larger than its scale allows")
    return Sparse(index, halves, scale)


def _indices(body: Tensor, counts: Tensor, at: _Layout) -> Tensor:
    """The place of each number: not yet known to rise, nor to be within the vector."""
    starts = torch.arange(counts.numel(), device=body.device) << _SHIFT
    by_offset = torch.where(at.dense, 0, counts)
    total = int(by_offset.sum())
    offsets = body[at.offsets_at : at.offsets_at + 2 * total].view(torch.int16).to(torch.int64) & BLOCK - 1
    offsets += starts.repeat_interleave(by_offset, output_size=total)
    if not at.bitmap_bytes:
        return offsets
    in_bitmaps = _set_bits(body[at.bitmaps_at : at.bitmaps_at + at.bitmap_bytes])
    if not torch.equal(_counts(in_bitmaps, int(at.dense.sum())), counts[at.dense]):
        raise PayloadError("a bitmap in a sparse payload does not have as many bits as there are numbers")
    in_bitmaps += _left_out(counts, at)
    if not total:
        return in_bitmaps
    is_dense = at.dense.repeat_interleave(counts, output_size=at.numbers)
    places = offsets.new_empty(at.numbers)
    places[is_dense] = in_bitmaps
    places[~is_dense] = offsets
    return places


def _counts(places: Tensor, blocks: int) -> Tensor:
    """How many of these rising places are in each block."""
    bounds = torch.arange(blocks + 1, device=places.device) << _SHIFT
    return torch.searchsorted(places, bounds).diff()


def _left_out(counts: Tensor, at: _Layout) -> Tensor:
    """For each number in a bitmap how many of the places before it are in blocks that have none."""
    before = (~at.dense).cumsum(0) << _SHIFT
    return before[at.dense].repeat_interleave(counts[at.dense])


def _bitmaps(places: Tensor, counts: Tensor, at: _Layout) -> Tensor:
    """One after the other, for the blocks that have one; only the last of all blocks may be shorter than others."""
    bits = torch.zeros(int(at.dense.sum()) << _SHIFT, dtype=torch.uint8, device=places.device)
    bits.index_fill_(0, places - _left_out(counts, at), 1)
    return (bits.view(torch.int64) * _GATHER_BITS >> 56).to(torch.uint8)[: at.bitmap_bytes]


def _set_bits(bitmap: Tensor) -> Tensor:
    spread = bitmap.to(torch.int64) * _EIGHT_TIMES & _BIT_IN_EACH_BYTE
    return spread.view(torch.uint8).nonzero().view(-1)


def _put(part: Tensor, content: Tensor) -> None:
    part[: content.numel()] = content
    part[content.numel() :] = 0


def _padded(size: int) -> int:
    return -(-size // 8) * 8


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def _lengths(count: int, device: torch.device) -> Tensor:
    """How many numbers each block has."""
    lengths = torch.full((_blocks(count),), BLOCK, dtype=torch.int64, device=device)
    lengths[-1:] = count - (_blocks(count) - 1) * BLOCK
    return lengths


def _widths(count: int, device: torch.device) -> Tensor:
    """How many bytes a bitmap of each block has."""
    return (_lengths(count, device) + 7) >> 3
