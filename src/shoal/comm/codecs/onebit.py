"""onebit: the sign of each number, and a scale that its block shares, the mean of their magnitudes."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.codecs.blocks import Layout, Piece, give, keep, keep_old, piece_numbers, pieces, taken
from shoal.comm.codecs.contract import State
from shoal.comm.codecs.payload import seal

_SIGN = -(1 << 31)
_LOWEST_BITS = 0x0101_0101_0101_0101
_TO_TOP_BYTE = 0x0102_0408_1020_4080
"""Times a word whose bytes are 0 or 1: the top byte of the product has byte i in bit i. No two terms meet in a bit."""
_TOP = 7


class OneBitCodec:
    """Of all numbers with these signs, equal in each block, sends the nearest. Only of use with a residual."""

    name = "onebit"
    fixed = True

    def __init__(self, block: int = 1024) -> None:
        self.block = block

    def encode(self, tensor: Tensor, state: State) -> Tensor:
        count, device = tensor.numel(), tensor.device
        payload, scales, codes = self._layout(count).empty(device)
        size = piece_numbers(count, self.block, device)
        scratch, work = torch.empty(2, size, device=device)
        bits = torch.empty(size, dtype=torch.int8, device=device)
        for piece in pieces(count, self.block, device):
            numbers = taken(tensor, state, piece, scratch)
            values = work[: piece.padded]
            factors = scales[piece.first : piece.last]
            _mean_magnitudes(numbers, piece, values, factors)
            signs = torch.bitwise_and(numbers.view(torch.int32), _SIGN, out=values.view(torch.int32))
            if state.shadow is not None:
                signed = signs.view(-1, self.block).bitwise_or_(factors.view(torch.int32).unsqueeze(1))
                keep(state, piece, numbers, signed.view(-1).view(torch.float32))
            _pack(signs, bits[: piece.padded], codes[piece.start // 8 : -(-piece.stop // 8)])
        keep_old(state, scales, self.block)
        return seal(payload, self.name, count)

    def decode(self, payload: Tensor, out: Tensor, *, gauge: Tensor | None = None, add: bool = False) -> None:
        scales, codes = self._layout(out.numel()).opened(payload, self.name)
        size = piece_numbers(out.numel(), self.block, out.device)
        scratch = torch.empty(size, device=out.device)
        signs = torch.empty(size // 8, dtype=torch.int64, device=out.device)
        table = _signs_of_bytes(out.device)
        for piece in pieces(out.numel(), self.block, out.device):
            here = codes[piece.start // 8 : -(-piece.stop // 8)]
            torch.index_select(table, 0, here.to(torch.int32), out=signs[: here.numel()])
            give(signs.view(torch.int8), scales, piece, scratch, out, gauge, add)

    def most_bytes(self, count: int) -> int:
        return self._layout(count).payload_bytes

    def _layout(self, count: int) -> Layout:
        return Layout(count, self.block, bits=1)


def _mean_magnitudes(numbers: Tensor, piece: Piece, work: Tensor, means: Tensor) -> None:
    """The scales of a piece; not finite where one of the block's numbers is not."""
    by_block = torch.abs(numbers, out=work).view(-1, piece.block)
    torch.sum(by_block, 1, out=means)
    short = piece.block - (piece.padded - piece.count)
    means[:-1].div_(piece.block)
    means[-1:].div_(short)
    if not bool(torch.isfinite(means).all()):  # perhaps only the sum was too large
        wide = by_block.sum(1, dtype=torch.float64)
        wide[:-1].div_(piece.block)
        wide[-1:].div_(short)
        means.copy_(wide)


def _pack(signs: Tensor, bits: Tensor, codes: Tensor) -> None:
    """Eight numbers a byte, the first in the lowest bit. `signs` are words of 32 bits, of which the highest counts."""
    bits.copy_(signs.bitwise_right_shift_(31))
    words = bits.view(torch.int64).bitwise_and_(_LOWEST_BITS).mul_(_TO_TOP_BYTE)
    codes.copy_(words.view(torch.uint8).view(-1, 8)[: codes.numel(), _TOP])


def _signs_of_bytes(device: torch.device) -> Tensor:
    """For each byte a word of eight bytes that are 1 or −1, the first for its lowest bit."""
    every = torch.arange(256, device=device).unsqueeze(1)
    bits = every.bitwise_right_shift(torch.arange(8, device=device)).bitwise_and_(1)
    return bits.mul_(-2).add_(1).to(torch.int8).view(torch.int64).view(-1)
