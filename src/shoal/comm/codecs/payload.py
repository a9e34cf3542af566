"""Payloads: a header and a body, in one tensor of bytes. What is damaged is refused before anything is made of it."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from shoal.core.errors import PayloadError

_HEADER = struct.Struct("<4sBBHQQQ")
"""magic, codec, flags, reserved, count of numbers, bytes of the body, sum over the body."""
HEADER_BYTES = _HEADER.size
_MAGIC = b"SHC1"
CODECS = {"fp16": 1, "bf16": 2, "int8": 3, "topk": 4, "powersgd": 5, "onebit": 6, "none": 7, "lossless": 8}
"""Codes on the wire: never given to another codec."""
MOST_NUMBERS = 1 << 40
_ROW = 64
"""Words."""
_ODD, _OTHER = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9
"""Odd numbers whose multiples differ in all their bits."""


def room(body: int, device: torch.device) -> Tensor:
    """Uninitialised memory for a payload with a body of so many bytes, a multiple of 8."""
    return torch.empty(HEADER_BYTES + body, dtype=torch.uint8, device=device)


def seal(payload: Tensor, codec: str, count: int, flags: int = 0) -> Tensor:
    """Write the header of a payload whose body is complete."""
    body = payload[HEADER_BYTES:]
    header = _HEADER.pack(_MAGIC, CODECS[codec], flags, 0, count, body.numel(), _sum(body, flags))
    payload[:HEADER_BYTES].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
    return payload


def opened(payload: Tensor, codec: str, count: int) -> tuple[Tensor, int]:
    """Body and flags of a payload, which must be one of `codec` for `count` numbers. Raises `PayloadError`.

    What follows the body is ignored: payloads travel in rows of equal length.
    """
    if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.numel() < HEADER_BYTES:
        raise PayloadError(f"a payload of {payload.numel()} elements of {payload.dtype} is shorter than its header")
    magic, code, flags, reserved, numbers, length, total = _HEADER.unpack(
        payload[:HEADER_BYTES].cpu().numpy().tobytes()
    )
    if magic != _MAGIC or reserved:
        raise PayloadError("what came is not a payload of this version")
    if code != CODECS[codec]:
        name = next((name for name, known in CODECS.items() if known == code), f"codec {code}")
        raise PayloadError(f"a payload of {name} came where one of {codec} was expected")
    if numbers != count or numbers > MOST_NUMBERS:
        raise PayloadError(f"a payload of {numbers} numbers came where {count} were expected")
    if length % 8 or length > payload.numel() - HEADER_BYTES:
        raise PayloadError(f"a payload says that it has {length} bytes, and {payload.numel() - HEADER_BYTES} came")
    body = payload[HEADER_BYTES : HEADER_BYTES + length]
    if _sum(body, flags) != total:
        raise PayloadError("a payload was damaged on its way: the sum over its bytes is not the one in its header")
    return body, flags


def _sum(body: Tensor, flags: int) -> int:
    """Modulo 2⁶⁴: of words of 8 bytes in rows, the sums of rows and of columns, each times another odd number.

    Any word that is damaged shows, and so do words, and stretches, that have changed places.
    """
    words = body.view(torch.int64)
    whole, rest = words[: words.numel() // _ROW * _ROW].view(-1, _ROW), words[words.numel() // _ROW * _ROW :]
    columns, rows = whole.sum(0), whole.sum(1)
    columns[: rest.numel()] += rest
    total = int((columns * _odd(_ROW, body)).sum()) + int((rows * _odd(rows.numel(), body)).sum()) * _OTHER
    return (total + _ODD * (flags + (body.numel() << 8))) & (1 << 64) - 1


def _odd(count: int, body: Tensor) -> Tensor:
    return torch.arange(1, 2 * count + 1, 2, device=body.device) * _ODD
