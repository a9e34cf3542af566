"""What members bring to an operation, and what must come of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from shoal.comm.group import Group

SUMMED = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int8, torch.uint8),
)
"""What every group can sum. Everything else that has a dtype can still be gathered and broadcast."""
MOVED = (*SUMMED, torch.bool, torch.int16)


def drawn(rank: int, shape: int | tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """What member `rank` brings: any member can work out what the others have. Whole numbers are 0 … 9."""
    generator = torch.Generator().manual_seed(1009 * seed + rank)
    shape = (shape,) if isinstance(shape, int) else shape
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 10, shape, generator=generator).to(dtype)


def digest(values: Iterable[Tensor]) -> str:
    """Of bits and shapes."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in values:
        found.update(repr((tuple(tensor.shape), str(tensor.dtype))).encode())
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def assert_sum(found: Tensor, parts: list[Tensor], what: object = "") -> None:
    """`found` is the sum of `parts` but for the rounding of one addition per member, exact for whole numbers."""
    assert found.shape == parts[0].shape and found.dtype == parts[0].dtype, (what, found.shape, found.dtype)
    wide = torch.complex128 if found.is_complex() else torch.float64
    stacked = torch.stack([part.to(wide) for part in parts])
    slack = torch.zeros(())
    if found.is_complex() or found.is_floating_point():
        finest = torch.finfo(found.dtype)
        slack = len(parts) * (finest.eps * stacked.abs().sum(0) + finest.tiny)
    wrong = ((found.to(wide) - stacked.sum(0)).abs() > slack).view(-1)
    if wrong.any():
        at = int(wrong.nonzero()[0])
        raise AssertionError(
            f"sum {what}: {int(wrong.sum())} of {found.numel()} elements are wrong; the first is element {at}: "
            f"{found.view(-1)[at].item()!r} where {[part.view(-1)[at].item() for part in parts]} are added"
        )


def all_drawn(group: Group, shape: int | tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    return [drawn(rank, shape, dtype, seed) for rank in range(group.size)]


def in_buffer(group: Group, values: Tensor) -> Tensor:
    buffer = group.buffer(values.numel(), values.dtype)
    buffer.copy_(values.view(-1))
    return buffer
