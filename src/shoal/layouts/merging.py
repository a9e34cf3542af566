"""How what the forwards of a step made of one buffer becomes its value: what each adds to a sum, and what that means.

All of it is in the buffer's own type or a wider one: whole numbers and float64 are added up in float64, in which whole
numbers are exact up to 2⁵³, everything else in float32. Whole numbers are merged by how far they moved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.layouts.words import CONCAT, FIRST, MEAN, SUM, Word


@dataclass(frozen=True)
class Merge:
    """How one buffer is merged."""

    word: Word
    whole: bool
    """Whether it is of whole numbers."""
    double: bool
    """Whether its sums are in double precision."""

    def size(self, numel: int) -> int:
        """Elements of its sum."""
        if self.word.kind == CONCAT:
            return 0
        return numel + 1 if self.word.decay else numel

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32

    @property
    def plain(self) -> bool:
        """Whether it is a mean of values, as most are."""
        return self.word.kind == MEAN and not self.whole

    def amount(self, value: Tensor, start: Tensor | None, samples: int, *, first: bool) -> Tensor:
        """What a forward of so many samples adds to the sum, flat; it shares no memory with the buffer.

        `first`: it is the first forward of the step.
        """
        found = moved(value, start) if self.whole else value.to(self.dtype)
        if self.word.kind == MEAN:
            return found.to(self.dtype).flatten() * samples
        if self.word.kind == FIRST:
            return (found.clone() if first else torch.zeros_like(found)).to(self.dtype).flatten()
        if not self.whole and start is not None:
            found = found - start.to(self.dtype)
        found = found.to(self.dtype).flatten()
        # who leaves it alone does not let it decay either
        return torch.cat([found, found.any().to(self.dtype).view(1)]) if self.word.decay else found

    def merged(self, total: Tensor, start: Tensor | None, samples: float) -> Tensor:
        """The value, flat, from the sum over all forwards of a step of so many samples."""
        return self.valued(total / samples if self.word.kind == MEAN else total, start)

    def valued(self, total: Tensor, start: Tensor | None) -> Tensor:
        """The same, where the sum has been made a mean already, if it is to be one."""
        if self.whole:
            steps = total.round().to(torch.int64)
            value = steps if start is None else start.flatten().to(torch.int64) + steps
            return value % self.word.modulo if self.word.modulo else value
        if self.word.kind != SUM or start is None:
            return total
        begun = start.flatten().to(self.dtype)
        if not self.word.decay:
            return begun + total
        # each forward began with decay·start, and all of them together do so once
        again = (total[-1] - 1.0).clamp_min(0.0) * (1.0 - self.word.decay)
        return begun + total[:-1] + again * begun


def moved(value: Tensor, start: Tensor | None) -> Tensor:
    """How far whole numbers moved; where the start is gone, what they are."""
    now = value.to(torch.int64)
    return now.clone() if start is None else now - start.to(torch.int64)
