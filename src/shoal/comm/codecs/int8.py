"""int8: each number as a multiple, −127 … 127, of a scale that its block shares."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.codecs.blocks import Layout, give, keep, keep_old, piece_numbers, pieces, taken
from shoal.comm.codecs.contract import State
from shoal.comm.codecs.payload import seal

_LARGEST = 127
_PART = float.fromhex("0x1.020406p-7")
"""1/127 rounded down: 127 × scale must not overflow where a block has the largest number there is."""
_TINY = 2.0**-126
"""A smaller scale has no reciprocal: its block is sent as zeros."""
_ODD = 0x0001_0001_0001_0001


class Int8Codec:
    """Loses at most half a scale of each number, or a whole one with stochastic rounding, which is unbiased."""

    name = "int8"
    fixed = True

    def __init__(self, block: int = 256, rounding: str = "nearest") -> None:
        self.block = block
        self.rounding = rounding

    def encode(self, tensor: Tensor, state: State) -> Tensor:
        count, device = tensor.numel(), tensor.device
        payload, scales, codes = self._layout(count).empty(device)
        size = piece_numbers(count, self.block, device)
        scratch, work = torch.empty(2, size, device=device)
        dither = _Dither(size, state.key, device) if self.rounding == "stochastic" else None
        for piece in pieces(count, self.block, device):
            numbers = taken(tensor, state, piece, scratch)
            by_block, multiples = numbers.view(-1, self.block), work[: piece.padded]
            factors = scales[piece.first : piece.last]
            torch.amax(torch.abs(by_block, out=multiples.view(-1, self.block)), 1, out=factors).mul_(_PART)
            torch.mul(by_block, _reciprocals(factors).unsqueeze(1), out=multiples.view(-1, self.block))
            if dither is not None:
                dither.add_to(multiples)
            multiples.round_()
            codes.view(torch.int8)[piece.start : piece.stop].copy_(multiples[: piece.count])
            if state.shadow is not None:
                multiples.view(-1, self.block).mul_(factors.unsqueeze(1))
                keep(state, piece, numbers, multiples)
        keep_old(state, scales, self.block)
        return seal(payload, self.name, count)

    def decode(self, payload: Tensor, out: Tensor, *, gauge: Tensor | None = None, add: bool = False) -> None:
        scales, codes = self._layout(out.numel()).opened(payload, self.name)
        scratch = torch.empty(piece_numbers(out.numel(), self.block, out.device), device=out.device)
        for piece in pieces(out.numel(), self.block, out.device):
            give(codes.view(torch.int8)[piece.start : piece.stop], scales, piece, scratch, out, gauge, add)

    def most_bytes(self, count: int) -> int:
        return self._layout(count).payload_bytes

    def _layout(self, count: int) -> Layout:
        return Layout(count, self.block, bits=8)


class _Dither:
    """Random numbers between −½ and ½ whose mean is zero: what is rounded after adding them is right on average."""

    def __init__(self, size: int, key: int, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(key)
        self._words = torch.empty(-(-size // 4), dtype=torch.int64, device=device)
        self._noise = torch.empty(4 * self._words.numel(), device=device)

    def add_to(self, multiples: Tensor) -> None:
        """Also keep within ±127 what would be rounded beyond."""
        # 16 bits for each number; odd ones lie evenly around zero
        self._words.random_(-(1 << 63), None, generator=self._generator).bitwise_or_(_ODD)
        self._noise.copy_(self._words.view(torch.int16))
        multiples.add_(self._noise[: multiples.numel()], alpha=2**-16).clamp_(-_LARGEST, _LARGEST)


def _reciprocals(scales: Tensor) -> Tensor:
    """Zero where a scale is too small, so that its multiples are, or where it is not finite: whatever its multiples
    are, they decode to what is not finite."""
    return torch.where(scales >= _TINY, scales.reciprocal(), 0.0)
