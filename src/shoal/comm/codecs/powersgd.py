"""PowerSGD as a codec of one stretch of numbers, for exchanges that do not sum as they go (`lowrank` does)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.comm.codecs import payload as payloads
from shoal.comm.codecs.contract import State
from shoal.comm.codecs.orthogonal import orthonormal, random_directions
from shoal.core.errors import ConfigError, PayloadError

_ITERATIONS = 2
"""Nothing is known of a stretch's directions at first, and a first look finds them only roughly."""
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_LARGEST = torch.finfo(torch.float32).max


class PowerSGDCodec:
    """Numbers as a matrix of so many rows, and that as a product of two thin ones, by power iteration.

    What does not fill a last column travels as it is, and so does everything where factors would not be shorter. What
    is decoded is a projection: the error has at most the size of the numbers themselves.

    Body: a scale (single precision, and 4 bytes of zeros), `rank` directions of length `rows`, `rank` of length `cols`
    with the scale taken out, the rest.
    """

    name = "powersgd"
    fixed = True

    def __init__(self, rank: int, rows: int) -> None:
        if rank < 1 or rows < 1:
            raise ConfigError(f"codec powersgd: rank={rank} and rows={rows} must be at least 1")
        self._rank = rank
        self._rows = rows

    def most_bytes(self, count: int) -> int:
        return payloads.HEADER_BYTES + self._body_bytes(count)

    def encode(self, tensor: Tensor, state: State) -> Tensor:
        target = tensor if state.residual is None else tensor + state.residual
        if state.gauge is not None:
            target = target / state.gauge
        payload = payloads.room(self._body_bytes(target.numel()), target.device)
        body = payload[payloads.HEADER_BYTES :].view(torch.float32)
        finite = bool(torch.isfinite(target).all())
        if finite:
            self._factorise(target, body, state.key)
        else:
            body.fill_(torch.nan)
        if state.shadow is not None and state.residual is not None:
            if finite:
                torch.sub(target, self._numbers(body, target.numel()), out=state.shadow)
                if state.gauge is not None:
                    state.shadow.mul_(state.gauge)
                finite = bool(torch.isfinite(state.shadow).all())
            if not finite:
                body.fill_(torch.nan)
                state.shadow.copy_(state.residual)
        return payloads.seal(payload, self.name, target.numel())

    def decode(self, payload: Tensor, out: Tensor, *, gauge: Tensor | None = None, add: bool = False) -> None:
        body, flags = payloads.opened(payload, self.name, out.numel())
        if body.numel() != self._body_bytes(out.numel()) or flags:
            raise PayloadError(
                f"a payload of powersgd has {body.numel()} bytes and flags {flags}, and {out.numel()} numbers at rank "
                f"{self._rank} with {self._rows} rows take {self._body_bytes(out.numel())} and none"
            )
        numbers = self._numbers(body.view(torch.float32), out.numel())
        if gauge is not None:
            numbers.mul_(gauge)
        if add:
            out.add_(numbers)
        else:
            out.copy_(numbers)

    # -- the body ------------------------------------------------------------------------------------------------------

    def _columns(self, count: int) -> int:
        """0 if factors would not be shorter."""
        cols = count // self._rows
        return cols if self._rank * (self._rows + cols) < self._rows * cols else 0

    def _body_bytes(self, count: int) -> int:
        cols = self._columns(count)
        numbers = 2 + count if not cols else 2 + self._rank * (self._rows + cols) + count - self._rows * cols
        return (4 * numbers + 7) // 8 * 8

    def _parts(self, body: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Left and right directions, and the rest."""
        cols = self._columns(count)
        if not cols:
            return body[:0].view(0, 0), body[:0].view(0, 0), body[2 : 2 + count]
        middle = 2 + self._rank * self._rows
        end = middle + self._rank * cols
        rest = body[end : end + count - self._rows * cols]
        return body[2:middle].view(self._rank, self._rows), body[middle:end].view(self._rank, cols), rest

    def _factorise(self, target: Tensor, body: Tensor, key: int) -> None:
        body[:2].zero_()
        body[-1:].zero_()  # where the last word of 8 bytes is not full
        left, right, rest = self._parts(body, target.numel())
        cols = right.shape[-1]
        rest.copy_(target[self._rows * cols :])
        if not cols:
            return
        scale = _scale(target[: self._rows * cols])
        body[0] = scale
        matrix = (target[: self._rows * cols] / scale).view(self._rows, cols)
        right.copy_(random_directions(key, self._rank, cols, target.device))
        for _ in range(_ITERATIONS):
            left.copy_(orthonormal(right @ matrix.t()))
            torch.mm(left, matrix, out=right)

    def _numbers(self, body: Tensor, count: int) -> Tensor:
        left, right, rest = self._parts(body, count)
        numbers = torch.empty(count, device=body.device)
        size = count - rest.numel()
        numbers[size:] = rest
        if size:
            product = torch.mm(left.t(), right, out=numbers[:size].view(self._rows, -1))
            # numbers near the largest ones could come out beyond them by rounding
            product.mul_(body[0]).clamp_(-_LARGEST, _LARGEST)
        return numbers


def _scale(numbers: Tensor) -> float:
    """A power of two near the largest number: with it taken out, products neither vanish nor overflow."""
    largest = float(numbers.abs().amax())
    return max(2.0 ** math.floor(math.log2(largest)), _SMALLEST_SCALE) if largest else 1.0
