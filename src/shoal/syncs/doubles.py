"""Double precision in a vector of single precision that is summed.

What is only exact in double precision (weights and losses of a step, a count of samples) has a place of each member's
own in the step's tail: a double is three whole numbers of 22 bits, which single precision holds exactly, and the other
members have zeros there. The sum is then a gather, and each member adds the doubles up itself, in order of rank. Where
that would be too long, they are summed by an operation of their own.
"""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from shoal.comm.group import Group, Work
from shoal.core.traffic import STATE

_BITS = 22
_MASK = numpy.uint64((1 << _BITS) - 1)
_SHIFT = numpy.uint64(_BITS)
_PARTS = 3
LONGEST = 4096
"""Elements of a tail that may be spent on it: about what costs as much as one more operation."""


def places(count: int, members: int) -> int:
    """Elements of a tail that so many doubles take; 0 where they are summed by an operation of their own."""
    needed = _PARTS * count * members
    return needed if needed <= LONGEST else 0


def spread(doubles: Tensor, rank: int, members: int) -> Tensor:
    """What this member has in the places of all: its own doubles, and zeros."""
    count = doubles.numel()
    laid = numpy.zeros((members, _PARTS, count), dtype=numpy.float32)
    bits = doubles.numpy().view(numpy.uint64)
    mine = laid[rank]
    mine[0] = bits & _MASK
    mine[1] = (bits >> _SHIFT) & _MASK
    mine[2] = bits >> (_SHIFT + _SHIFT)
    return torch.from_numpy(laid).view(-1)


def add_up(summed: Tensor, members: int) -> Tensor:
    """The sum of all members' doubles, from the summed places; the same bits on every member."""
    parts = summed.cpu().numpy().reshape(members, _PARTS, -1).astype(numpy.uint64)
    bits = parts[:, 0] | (parts[:, 1] << _SHIFT) | (parts[:, 2] << (_SHIFT + _SHIFT))
    values = bits.view(numpy.float64)
    total = values[0].copy()
    for other in values[1:]:
        total += other
    return torch.from_numpy(total)


class Riding:
    """The doubles of one step over a group: in the tail, or by an operation of their own."""

    def __init__(self, group: Group, doubles: Tensor | None) -> None:
        self._group, self._doubles = group, doubles
        self.size = 0 if doubles is None else places(doubles.numel(), group.size)
        """Elements of the tail that they take."""
        self._work: Work | None = None

    def parts(self, device: torch.device) -> list[Tensor]:
        """What this member puts into the tail."""
        if not self.size or self._doubles is None:
            return []
        return [spread(self._doubles, self._group.rank, self._group.size).to(device)]

    def start(self) -> None:
        """The tail has left: so do they, where it does not carry them. All members call it, in the same order."""
        if self._doubles is not None and self._doubles.numel() and not self.size:
            self._work = self._group.sum(self._doubles, STATE)

    def finish(self, summed: Tensor) -> None:
        """The tail is summed, and this is their part of it: replace the doubles by their sum."""
        if self._work is not None:
            self._work.wait()
        elif self._doubles is not None and self.size:
            self._doubles.copy_(add_up(summed, self._group.size))
