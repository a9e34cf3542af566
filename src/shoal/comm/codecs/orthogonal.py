"""Thin matrices for low-rank approximation. They are kept as their transposes: a row is one direction."""

from __future__ import annotations

import torch
from torch import Tensor

_SEEDS = (1 << 63) - 1


def orthonormal(directions: Tensor) -> Tensor:
    """Orthonormal rows that span at least what the rows of each matrix in (…, rank, length) span; rank ≤ length.

    Where rows depend on each other or are zero, others of unit length come in their place, so that there are always
    `rank` of them. Depends on the numbers only: the same bits on all processors of one kind. They must be finite.
    """
    # By reflections: products of sums, as in Cholesky-QR or Gram-Schmidt, would lose directions that are nearly equal.
    # What it returns is laid out by columns, so that this transpose is contiguous and costs nothing.
    columns: Tensor = torch.linalg.qr(directions.mT).Q
    return columns.mT.contiguous()


def random_directions(seed: int, rank: int, length: int, device: torch.device) -> Tensor:
    """Rows of normally distributed numbers, equal for equal seeds on all devices."""
    generator = torch.Generator().manual_seed(seed & _SEEDS)
    return torch.randn(rank, length, generator=generator).to(device)


def rescaled(directions: Tensor, instead: Tensor) -> Tensor:
    """Each row divided by its largest number, so that products of it neither vanish nor overflow.

    Rows of zeros are those of `instead`.
    """
    largest = directions.abs().amax(dim=-1, keepdim=True)
    return torch.where(largest > 0, directions / largest, instead)
