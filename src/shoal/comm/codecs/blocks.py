"""Stretches cut into pieces that stay in the cache, and payloads whose numbers come in blocks with a scale each.

Every torch operation is a pass over its tensors: done piece by piece, all but the first and the last run in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.codecs.contract import State
from shoal.comm.codecs.payload import HEADER_BYTES, opened, room
from shoal.core.errors import PayloadError

CPU_PIECE = 1 << 17
"""Numbers: 512 KB of them and two scratches fit in a second-level cache, and a call's cost is spread over enough."""
DEVICE_PIECE = 1 << 24
"""Numbers: where each operation is a launch, pieces only bound the scratch."""
SCALE_BYTES = 4
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


@dataclass(frozen=True)
class Piece:
    """Numbers `start` … `stop` of a stretch, which are blocks `first` … `last` of it; the last one may be short."""

    start: int
    stop: int
    first: int
    last: int
    block: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def padded(self) -> int:
        """The count if the last block were whole."""
        return (self.last - self.first) * self.block


def pieces(count: int, block: int, device: torch.device) -> Iterator[Piece]:
    """A stretch in pieces of whole blocks."""
    blocks = piece_numbers(count, block, device) // block
    for first in range(0, -(-count // block), max(1, blocks)):
        start = first * block
        stop = min(start + blocks * block, count)
        yield Piece(start, stop, first, first + -(-(stop - start) // block), block)


def piece_numbers(count: int, block: int, device: torch.device) -> int:
    """The count of numbers in the largest piece, its last block made whole: so much scratch is needed."""
    most = CPU_PIECE if device.type == "cpu" else DEVICE_PIECE
    return min(max(1, most // block), -(-count // block)) * block


def taken(tensor: Tensor, state: State, piece: Piece, scratch: Tensor) -> Tensor:
    """What is to be encoded of a piece: (tensor + residual) / gauge, and zeros up to the end of its last block.

    Only to be read: it may be the tensor's own memory. It is not in `scratch` where it can be in the shadow, of which
    it leaves nothing but what `keep` puts there: the fewer tensors a piece has, the more of them stay in the cache.
    """
    here = tensor[piece.start : piece.stop]
    if state.residual is None and state.gauge is None and piece.padded == piece.count:
        return here
    if state.shadow is not None and piece.padded == piece.count:
        numbers = state.shadow[piece.start : piece.stop]
    else:
        numbers = scratch[: piece.padded]
    inside = numbers[: piece.count]
    if state.residual is not None:
        torch.add(here, state.residual[piece.start : piece.stop], out=inside)
    else:
        inside.copy_(here)
    if state.gauge is not None:
        inside.div_(state.gauge[piece.start : piece.stop])
    numbers[piece.count :].zero_()
    return numbers


def keep(state: State, piece: Piece, numbers: Tensor, sent: Tensor) -> None:
    """Write to the shadow what a piece loses: what was `taken` of it, less what its payload decodes to."""
    if state.shadow is not None:
        shadow = state.shadow[piece.start : piece.stop]
        torch.sub(numbers[: piece.count], sent[: piece.count], out=shadow)
        if state.gauge is not None:
            shadow.mul_(state.gauge[piece.start : piece.stop])


def is_finite(numbers: Tensor) -> bool:
    """Whether all of them are. Mostly one pass: only if their sum is not finite each of them is looked at."""
    return bool(torch.isfinite(numbers.sum())) or bool(torch.isfinite(numbers).all())


def keep_old(state: State, scales: Tensor, block: int) -> None:
    """Have the old residual in the shadow of every block whose scale is not finite."""
    if state.shadow is None or state.residual is None:
        return
    bad = torch.isfinite(scales).logical_not_()
    for index in bad.nonzero().view(-1).tolist():
        here = slice(index * block, (index + 1) * block)
        state.shadow[here] = state.residual[here]


def give(
    codes: Tensor, scales: Tensor | None, piece: Piece, scratch: Tensor, out: Tensor, gauge: Tensor | None, add: bool
) -> None:
    """Write, or add, codes × the scales of their blocks × gauge to a piece of `out`.

    `codes` are numbers of any type, as many as the piece has, or more.
    """
    here = out[piece.start : piece.stop]
    in_place = not add and piece.padded == piece.count
    numbers = here if in_place else scratch[: piece.padded]
    inside = numbers[: piece.count]
    inside.copy_(codes[: piece.count])
    if scales is not None:
        numbers.view(-1, piece.block).mul_(scales[piece.first : piece.last].unsqueeze(1))
    if gauge is not None:
        inside.mul_(gauge[piece.start : piece.stop])
    if add:
        here.add_(inside)
    elif not in_place:
        here.copy_(inside)


@dataclass(frozen=True)
class Layout:
    """A body: a scale for each block, if any, then the codes of so many bits; both end at a multiple of 8 bytes."""

    count: int
    block: int
    bits: int
    scaled: bool = True

    @property
    def blocks(self) -> int:
        """Those with a scale."""
        return -(-self.count // self.block) if self.scaled else 0

    @property
    def scale_bytes(self) -> int:
        return _whole_words(self.blocks * SCALE_BYTES)

    @property
    def code_bytes(self) -> int:
        return _whole_words(-(-self.count * self.bits // 8))

    @property
    def payload_bytes(self) -> int:
        return HEADER_BYTES + self.scale_bytes + self.code_bytes

    def empty(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Room for a payload, and in it the scales and the codes; what will not be written is zero."""
        payload = room(self.scale_bytes + self.code_bytes, device)
        scales, codes = self._parts(payload[HEADER_BYTES:])
        payload[HEADER_BYTES + self.blocks * SCALE_BYTES : HEADER_BYTES + self.scale_bytes].zero_()
        codes[-8:].zero_()
        return payload, scales, codes

    def opened(self, payload: Tensor, codec: str) -> tuple[Tensor, Tensor]:
        """The scales and the codes of a payload. Raises `PayloadError`."""
        return self._parts(opened_exactly(payload, codec, self.count, self.scale_bytes + self.code_bytes))

    def _parts(self, body: Tensor) -> tuple[Tensor, Tensor]:
        scales = body[: self.blocks * SCALE_BYTES].view(torch.float32)
        return scales, body[self.scale_bytes : self.scale_bytes + self.code_bytes]


def opened_exactly(payload: Tensor, codec: str, count: int, size: int) -> Tensor:
    """The body of a payload, which must have `size` bytes, and no flags. Raises `PayloadError`."""
    body, flags = opened(payload, codec, count)
    if flags:
        raise PayloadError(f"a payload of {codec} has flags {flags:#x}; this codec knows none")
    if body.numel() != size:
        raise PayloadError(
            f"a payload of {codec} for {count} numbers has a body of {body.numel()} bytes; it must have {size}: "
            "all workers need the same codec with the same options"
        )
    return body


def mixed(*parts: int) -> int:
    """One key of several, below 2⁶³: keys that differ in any part give unrelated ones."""
    key = 0
    for part in parts:
        key = (key + part + _MIX[0]) & (1 << 64) - 1
        key = (key ^ key >> 30) * _MIX[1] & (1 << 64) - 1
        key = (key ^ key >> 27) * _MIX[2] & (1 << 64) - 1
        key ^= key >> 31
    return key >> 1


def _whole_words(size: int) -> int:
    return -(-size // 8) * 8
