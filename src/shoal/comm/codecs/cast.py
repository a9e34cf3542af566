"""fp16 and bf16: numbers of 16 bits, which can be added as they are; and plain ones, for what needs no codec.

Half precision reaches from 2⁻²⁴ to 2¹⁶ only. So its numbers travel multiplied by a scale, a power of two, which loses
nothing: one for each block in a payload, and one that all members share where numbers are summed in place.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.comm.codecs.blocks import (
    Layout,
    Piece,
    give,
    is_finite,
    keep,
    keep_old,
    opened_exactly,
    piece_numbers,
    pieces,
    taken,
)
from shoal.comm.codecs.contract import State
from shoal.comm.codecs.memory import Memory
from shoal.comm.codecs.payload import HEADER_BYTES, room, seal
from shoal.comm.group import Group

FP16_SCALE = "fp16 scale"
"""The shared vector of one number by which all members multiply; zero while it is not known."""
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_BLOCK = 1 << 16
_EXPONENT = 0x7F80_0000
"""Of single precision."""
_MAGNITUDE, _INFINITE = 0x7FFF, 0x7F80
"""Of bfloat16: all bits but the sign, and the least of those that is not finite."""
_TOP = 2.0**-14
"""Of the power of two at or below the largest number of a block, so that it comes to 2¹⁴ … 2¹⁵."""
_HIGHEST = 2.0**113
"""The scale of the largest numbers there are: rounded up to 2¹⁵ of it, they would overflow."""
_BELOW_TOP = 2.0**15 - 2.0**4
"""The largest number of half precision below 2¹⁵."""
_LEAST = 2.0**-100
"""Blocks of smaller numbers are scaled as if they had one of this size: scales must have a reciprocal."""
_SUM_TOP = 8
"""The largest number of the next sum is expected below 2⁸: what is 256 times larger still fits."""
_SAFE_TOP = 15
"""Where members know their largest numbers, not even the sum of those reaches 2¹⁵."""
_MOST_EXPONENT = 120


class CastCodec:
    """Rounds to the nearest number of 16 bits: fp16 relative to a scale for each 65536 numbers, bf16 as they are."""

    fixed = True

    def __init__(self, name: str) -> None:
        self.name = name
        self._dtype = _DTYPES[name]
        self._scaled = name == "fp16"

    def encode(self, tensor: Tensor, state: State) -> Tensor:
        count, device = tensor.numel(), tensor.device
        layout = self._layout(count)
        payload, scales, codes = layout.empty(device)
        finite = True
        scratch, work = torch.empty(2, piece_numbers(count, layout.block, device), device=device)
        for piece in pieces(count, layout.block, device):
            numbers, sent = taken(tensor, state, piece, scratch), work[: piece.padded]
            rounded = codes.view(self._dtype)[piece.start : piece.stop]
            if self._scaled:
                _round_scaled(numbers, scales[piece.first : piece.last], piece, rounded, sent)
            else:
                finite = _round_plain(numbers, rounded, sent) and finite
            if state.shadow is not None:
                sent[: piece.count].copy_(rounded)
                if self._scaled:
                    sent.view(-1, piece.block).mul_(scales[piece.first : piece.last].unsqueeze(1))
                keep(state, piece, numbers, sent)
        if self._scaled:
            keep_old(state, scales, layout.block)
        elif not finite:
            _keep_old_numbers(state)
        return seal(payload, self.name, count)

    def decode(self, payload: Tensor, out: Tensor, *, gauge: Tensor | None = None, add: bool = False) -> None:
        layout = self._layout(out.numel())
        scales, codes = layout.opened(payload, self.name)
        scratch = torch.empty(piece_numbers(out.numel(), layout.block, out.device), device=out.device)
        for piece in pieces(out.numel(), layout.block, out.device):
            rounded = codes.view(self._dtype)[piece.start : piece.stop]
            give(rounded, scales if self._scaled else None, piece, scratch, out, gauge, add)

    def most_bytes(self, count: int) -> int:
        return self._layout(count).payload_bytes

    def _layout(self, count: int) -> Layout:
        return Layout(count, min(_BLOCK, max(8, count)) if self._scaled else 1, bits=16, scaled=self._scaled)


def _round_scaled(numbers: Tensor, scales: Tensor, piece: Piece, rounded: Tensor, work: Tensor) -> None:
    by_block, scaled = numbers.view(-1, piece.block), work.view(-1, piece.block)
    torch.amax(torch.abs(by_block, out=scaled), 1, out=scales)
    _to_scales(scales)
    torch.mul(by_block, scales.reciprocal().unsqueeze(1), out=scaled)
    if float(scales.max()) >= _HIGHEST:
        scaled.clamp_(-_BELOW_TOP, _BELOW_TOP)
    rounded.copy_(work[: piece.count])


def _round_plain(numbers: Tensor, rounded: Tensor, work: Tensor) -> bool:
    """Whether all are surely finite."""
    rounded.copy_(numbers)
    bits = work.view(torch.int16)[: rounded.numel()]
    torch.bitwise_and(rounded.view(torch.int16), _MAGNITUDE, out=bits)
    if int(bits.amax()) < _INFINITE:
        return True
    most = torch.finfo(rounded.dtype).max  # perhaps the largest finite numbers were only rounded up
    rounded.copy_(torch.where(torch.isfinite(numbers), numbers.clamp(-most, most), numbers))
    return False


def _keep_old_numbers(state: State) -> None:
    """Have the old residual in the shadow wherever that is not finite."""
    if state.shadow is not None and state.residual is not None:
        state.shadow.copy_(torch.where(torch.isfinite(state.shadow), state.shadow, state.residual))


def _to_scales(largest: Tensor) -> None:
    """Make scales of the largest magnitudes of blocks: powers of two, not finite where those are not."""
    largest.view(torch.int32).bitwise_and_(_EXPONENT)
    largest.clamp_(min=_LEAST).mul_(_TOP)


class RawCodec:
    """Numbers as they are: nothing is lost, and a gauge changes nothing. For use under a lossless codec."""

    name = "none"
    fixed = True

    def encode(self, tensor: Tensor, state: State) -> Tensor:
        payload = room(self.most_bytes(tensor.numel()) - HEADER_BYTES, tensor.device)
        payload[HEADER_BYTES:][-8:].zero_()
        numbers = payload[HEADER_BYTES:].view(torch.float32)[: tensor.numel()]
        if state.residual is None or state.shadow is None:
            numbers.copy_(tensor)
        else:
            torch.add(tensor, state.residual, out=numbers)
            if is_finite(numbers):
                state.shadow.zero_()
            else:
                state.shadow.copy_(torch.where(torch.isfinite(numbers), 0.0, state.residual))
        return seal(payload, self.name, tensor.numel())

    def decode(self, payload: Tensor, out: Tensor, *, gauge: Tensor | None = None, add: bool = False) -> None:
        body = opened_exactly(payload, self.name, out.numel(), self.most_bytes(out.numel()) - HEADER_BYTES)
        numbers = body.view(torch.float32)[: out.numel()]
        if add:
            out.add_(numbers)
        else:
            out.copy_(numbers)

    def most_bytes(self, count: int) -> int:
        return HEADER_BYTES + -(-count // 2) * 8


class CastSum:
    """Sums in place, in 16 bits. What members lose by rounding what they send is theirs; what the sum loses is not.

    A gauge changes nothing: numbers with an exponent are rounded relative to themselves.
    """

    def __init__(self, group: Group, name: str, feedback: bool = False) -> None:
        self.name = name
        self._group = group
        self._feedback = feedback
        self._dtype = _DTYPES[name]
        self._buffer: Tensor | None = None

    def sum(self, flat: Tensor, memory: Memory, *, key: int = 0, gauge: Tensor | None = None) -> None:
        memory.fold()
        state = State(*memory.private()) if self._feedback or memory.has() else State()
        account = self._group.account
        account.codec = self.name
        try:
            finite = self._summed_scaled(flat, memory, state) if self.name == "fp16" else self._summed(flat, state)
        finally:
            account.codec = "none"
        if not finite and state.shadow is not None and state.residual is not None:
            state.shadow.copy_(state.residual)

    def _summed(self, flat: Tensor, state: State) -> bool:
        """Whether the sum is finite: then what each member sent was, and so is what it keeps."""
        largest = self._exchanged(flat, state, 1.0)
        self._receive(flat, 1.0)
        return math.isfinite(largest)

    def _summed_scaled(self, flat: Tensor, memory: Memory, state: State) -> bool:
        """As `_summed`. All members do the same: they decide by the scale and by results, which are equal on all."""
        now, after = memory.shared(FP16_SCALE, lambda: torch.zeros(1, device=flat.device))
        scale = float(now) or self._safe_scale(flat, state) or 1.0
        largest = self._exchanged(flat, state, scale)
        if not math.isfinite(largest) and (safe := self._safe_scale(flat, state)):
            scale = safe
            largest = self._exchanged(flat, state, scale)
        self._receive(flat, scale)
        if math.isfinite(largest):
            # zeros may be numbers that this scale made vanish: then the next step has to find one
            after.fill_(_power(_SUM_TOP, largest / scale) if largest > 0 else 0.0)
        else:
            after.copy_(now)
        return math.isfinite(largest)

    def _exchanged(self, flat: Tensor, state: State, scale: float) -> float:
        """Have the sum of all members' scaled numbers in the buffer; its largest magnitude, or what is not finite."""
        buffer = self._sized(flat)
        scratch, work = torch.empty(2, piece_numbers(flat.numel(), 1, flat.device), device=flat.device)
        for piece in pieces(flat.numel(), 1, flat.device):
            numbers = taken(flat, state, piece, scratch)
            sent = buffer[piece.start : piece.stop]
            sent.copy_(numbers if scale == 1.0 else torch.mul(numbers, scale, out=work[: piece.count]))
            if state.shadow is not None:
                keep(state, piece, numbers, work[: piece.count].copy_(sent).mul_(1 / scale))
        self._group.sum(buffer).wait()
        return _largest(buffer) if flat.numel() else 0.0

    def _receive(self, flat: Tensor, scale: float) -> None:
        buffer = self._sized(flat)
        for piece in pieces(flat.numel(), 1, flat.device):
            here = flat[piece.start : piece.stop].copy_(buffer[piece.start : piece.stop])
            if scale != 1.0:
                here.mul_(1 / scale)

    def _safe_scale(self, flat: Tensor, state: State) -> float:
        """A scale with which nothing overflows; 0 if there is none, since some member's numbers are not finite."""
        own = torch.zeros(1, device=flat.device)
        scratch = torch.empty(piece_numbers(flat.numel(), 1, flat.device), device=flat.device)
        for piece in pieces(flat.numel(), 1, flat.device):
            low, high = torch.aminmax(taken(flat, state, piece, scratch))
            torch.maximum(own, torch.maximum(-low, high), out=own)
        largest = float(self._group.gather(own).max()) * self._group.size
        if not math.isfinite(largest):
            return 0.0
        return _power(_SAFE_TOP, largest) if largest else 1.0

    def _sized(self, flat: Tensor) -> Tensor:
        if self._buffer is None or self._buffer.numel() != flat.numel():
            if self._buffer is not None:
                self._group.release(self._buffer)
            self._buffer = self._group.buffer(flat.numel(), self._dtype, flat.device)
        return self._buffer


def _largest(buffer: Tensor) -> float:
    low, high = (float(end) for end in torch.aminmax(buffer))
    return max(-low, high) if math.isfinite(low) and math.isfinite(high) else math.nan


def _power(top: int, largest: float) -> float:
    """The power of two that brings `largest` just below 2 to the power of `top`."""
    exponent = top - math.frexp(largest)[1]
    return math.ldexp(1.0, max(-_MOST_EXPONENT, min(_MOST_EXPONENT, exponent)))
