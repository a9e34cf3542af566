"""Sums of matrices as products of two thin ones: PowerSGD.

A member's matrix M, which is gradient + residual, meets directions Q that are equal on all members. All members sum
P = M Q and make its columns orthonormal; then they sum Mᵀ P, which is the next Q, and P Qᵀ is what all of them take for
the sum of their matrices. Q is kept from step to step, so that the steps together are a power iteration.

*Residuals.* A member keeps M − P (Mᵀ P)ᵀ, with its own Mᵀ P from before the sum: what P does not reach in its own
matrix. To keep M − P Qᵀ / size, with the summed Q, would give the same results, since residuals enter them by their sum
only and the two have the same one. But it would keep in each member what distinguishes its gradients from the others',
which cancels in the sum and never shrinks; with the own part it never grows beyond M, so that less is lost by rounding,
and little with a member that dies.

*Operations.* Two sums a step, whatever the number of tensors. What would not become small is in the second as it is.
The first one is of bfloat16 unless another type is asked for: only the space that P spans matters. Rounding turns that
a little, and what is not reached for this reason is in the residuals like the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import prod

import torch
from torch import Tensor

from shoal.comm.codecs.memory import Memory
from shoal.comm.codecs.orthogonal import orthonormal, random_directions, rescaled
from shoal.comm.group import Group
from shoal.core.errors import CheckpointMismatch, ConfigError

_LEAST_SAVING = 2
"""By how much the factors of a tensor must be smaller than the tensor."""


@dataclass(frozen=True)
class Matrix:
    """A tensor that is summed by factors, and where its parts are."""

    number: int
    """Which of the tensors."""
    start: int
    """Of its numbers in the vector."""
    rows: int
    cols: int
    left: int = 0
    """Of its `rank` directions of length `rows` in the first sum."""
    right: int = 0
    """Of those of length `cols` in the second, and in what is kept."""

    def of(self, vector: Tensor) -> Tensor:
        return vector[self.start : self.start + self.rows * self.cols].view(self.rows, self.cols)

    def lefts(self, vector: Tensor, rank: int) -> Tensor:
        return vector[self.left : self.left + rank * self.rows].view(rank, self.rows)

    def rights(self, vector: Tensor, rank: int) -> Tensor:
        return vector[self.right : self.right + rank * self.cols].view(rank, self.cols)


@dataclass(frozen=True)
class Block:
    """Matrices of equal shape: their directions lie one after the other, and are treated together."""

    count: int
    rows: int
    cols: int
    left: int
    right: int

    def lefts(self, vector: Tensor, rank: int) -> Tensor:
        size = self.count * rank * self.rows
        return vector[self.left : self.left + size].view(self.count, rank, self.rows)

    def rights(self, vector: Tensor, rank: int) -> Tensor:
        size = self.count * rank * self.cols
        return vector[self.right : self.right + size].view(self.count, rank, self.cols)


@dataclass(frozen=True)
class Stretch:
    """Neighbouring tensors that travel as they are."""

    start: int
    stop: int
    place: int
    """In the second sum."""

    def of(self, vector: Tensor) -> Tensor:
        return vector[self.start : self.stop]

    def placed(self, second: Tensor) -> Tensor:
        return second[self.place : self.place + self.stop - self.start]


@dataclass(frozen=True)
class Plan:
    """What travels where, for tensors of some shapes that are laid flat. Equal on all members."""

    matrices: tuple[Matrix, ...]
    blocks: tuple[Block, ...]
    stretches: tuple[Stretch, ...]
    count: int
    """Of numbers in the vector."""
    first: int
    """In the first sum: the left directions of all matrices."""
    rights: int
    """In what is kept from step to step: their right directions."""
    second: int
    """In the second sum: right directions, and all stretches."""


def plan(shapes: Sequence[tuple[int, ...]], rank: int) -> Plan:
    """Which tensors become factors of this rank. Pure."""
    starts = list(accumulate((prod(shape) for shape in shapes), initial=0))
    cuts = [_cut(shape, rank) for shape in shapes]
    found = [Matrix(number, starts[number], *cut) for number, cut in enumerate(cuts) if cut is not None]
    matrices, left, right = [], 0, 0
    for matrix in sorted(found, key=_shape):
        matrices.append(Matrix(matrix.number, matrix.start, matrix.rows, matrix.cols, left, right))
        left, right = left + rank * matrix.rows, right + rank * matrix.cols
    whole = [(starts[number], starts[number + 1]) for number, cut in enumerate(cuts) if cut is None]
    stretches = tuple(_stretches(whole, right))
    second = right + sum(stretch.stop - stretch.start for stretch in stretches)
    return Plan(tuple(matrices), tuple(_blocks(matrices)), stretches, starts[-1], left, right, second)


def _cut(shape: tuple[int, ...], rank: int) -> tuple[int, int] | None:
    """Rows and columns of the matrix that a tensor is seen as: cut after the first dimension that saves enough."""
    sides = [(prod(shape[:dim]), prod(shape[dim:])) for dim in range(1, len(shape))]
    return next(((rows, cols) for rows, cols in sides if 0 < _LEAST_SAVING * rank * (rows + cols) <= rows * cols), None)


def _shape(matrix: Matrix) -> tuple[int, int]:
    return matrix.rows, matrix.cols


def _blocks(matrices: Sequence[Matrix]) -> Iterator[Block]:
    for (rows, cols), members in groupby(matrices, key=_shape):
        block = list(members)
        yield Block(len(block), rows, cols, block[0].left, block[0].right)


def _stretches(whole: Sequence[tuple[int, int]], place: int) -> Iterator[Stretch]:
    joined: list[list[int]] = []
    for start, stop in whole:
        if joined and joined[-1][1] == start:
            joined[-1][1] = stop
        elif stop > start:
            joined.append([start, stop])
    for start, stop in joined:
        yield Stretch(start, stop, place)
        place += stop - start


class Room:
    """What a step writes and the next one writes again."""

    def __init__(self, plan: Plan, first: torch.dtype, device: torch.device) -> None:
        self.lefts = torch.empty(plan.first, device=device)
        self.first = torch.empty(plan.first, device=device, dtype=first)
        self.second = torch.empty(plan.second, device=device)


class LowRankSum:
    """The `Summing` of PowerSGD, for a vector of tensors of `shapes`, one after the other.

    A tensor of two or more dimensions is a matrix, its first dimension by all others (or cut later, if that does not
    save enough and a later cut does). Those that would not become two times smaller are summed as they are, exactly.

    The result is the same bits on all members if they compute on processors of one kind. If it is not finite, or would
    overflow on the way, all of `flat` is NaN on all members and the shadows are what they shadow.
    """

    name = "powersgd"

    def __init__(
        self, group: Group, rank: int, shapes: Sequence[tuple[int, ...]], *, first: torch.dtype = torch.bfloat16
    ) -> None:
        """`first` is the type of the first sum's numbers: with float32 matrices of this rank come through exactly."""
        if rank < 1:
            raise ConfigError(f"codec powersgd: rank={rank} must be at least 1")
        self._group = group
        self._rank = rank
        self._first = first
        self._plan = plan(shapes, rank)
        self._largest = torch.finfo(torch.float32).max / (8 * rank)
        self._room: Room | None = None

    def sum(self, flat: Tensor, memory: Memory, *, key: int = 0, gauge: Tensor | None = None) -> None:
        """See `Summing`. Nothing is random here after the first step: `key` is not used."""
        if flat.numel() != self._plan.count:
            raise ConfigError(f"a vector of {flat.numel()} numbers came where the shapes have {self._plan.count}")
        account = self._group.account
        account.codec = self.name
        try:
            self._sum(flat, memory, gauge)
        finally:
            account.codec = "none"

    def _sum(self, flat: Tensor, memory: Memory, gauge: Tensor | None) -> None:
        memory.fold()
        residual, shadow = memory.private()
        factors, next_factors = self._factors(memory)
        room = self._room_on(flat.device)
        self._gather_targets(flat, residual, gauge, shadow, factors, room)
        # all members see the same sums, so that they decide alike
        if self._directions(room) and self._coefficients(shadow, gauge, room):
            self._expand(room, gauge, flat)
            self._keep(room.second, factors, next_factors)
        else:
            flat.fill_(torch.nan)
            shadow.copy_(residual)
            next_factors.copy_(factors)

    # -- the parts of a step -------------------------------------------------------------------------------------------

    def _gather_targets(
        self, flat: Tensor, residual: Tensor, gauge: Tensor | None, shadow: Tensor, factors: Tensor, room: Room
    ) -> None:
        """M into the shadow, M Q into the first sum; matrix by matrix, while it is in the processor's cache."""
        for matrix in self._plan.matrices:
            target = torch.add(matrix.of(flat), matrix.of(residual), out=matrix.of(shadow))
            if gauge is not None:
                target.div_(matrix.of(gauge))
            torch.mm(matrix.rights(factors, self._rank), target.t(), out=matrix.lefts(room.lefts, self._rank))
        for stretch in self._plan.stretches:
            torch.add(stretch.of(flat), stretch.of(residual), out=stretch.placed(room.second))
            stretch.of(shadow).zero_()

    def _directions(self, room: Room) -> bool:
        """Sum M Q and make it P; whether all is finite."""
        if not self._plan.matrices:
            return True
        room.first.copy_(room.lefts)
        self._group.sum(room.first).wait()
        if not torch.isfinite(room.first).all():
            return False
        room.lefts.copy_(room.first)
        for block in self._plan.blocks:
            lefts = block.lefts(room.lefts, self._rank)
            lefts.copy_(orthonormal(lefts))
        return True

    def _coefficients(self, shadow: Tensor, gauge: Tensor | None, room: Room) -> bool:
        """Sum Mᵀ P, and leave in the shadow what P does not reach of M; whether all is finite."""
        if not self._plan.second:
            return True
        for matrix in self._plan.matrices:
            left, right = matrix.lefts(room.lefts, self._rank), matrix.rights(room.second, self._rank)
            torch.mm(left, matrix.of(shadow), out=right)
        rights = room.second[: self._plan.rights]
        # a residual that may overflow is for all members to know
        rights.masked_fill_(rights.abs() > self._largest, torch.nan)
        # before the sum: if that breaks here, and not for others, what is left is what counts
        for matrix in self._plan.matrices:
            left, own = matrix.lefts(room.lefts, self._rank), matrix.rights(room.second, self._rank)
            matrix.of(shadow).addmm_(left.t(), own, alpha=-1)
            if gauge is not None:
                matrix.of(shadow).mul_(matrix.of(gauge))
        self._group.sum(room.second).wait()
        if not torch.isfinite(room.second).all():
            return False
        return not bool((rights.abs() > self._largest).any())

    def _expand(self, room: Room, gauge: Tensor | None, flat: Tensor) -> None:
        """The sum: P Qᵀ."""
        for matrix in self._plan.matrices:
            left, right = matrix.lefts(room.lefts, self._rank), matrix.rights(room.second, self._rank)
            result = torch.mm(left.t(), right, out=matrix.of(flat))
            if gauge is not None:
                result.mul_(matrix.of(gauge))
        for stretch in self._plan.stretches:
            stretch.of(flat).copy_(stretch.placed(room.second))

    def _keep(self, second: Tensor, factors: Tensor, next_factors: Tensor) -> None:
        """The directions for the next step; where nothing was seen, the same ones again."""
        for block in self._plan.blocks:
            rights, before = block.rights(second, self._rank), block.rights(factors, self._rank)
            block.rights(next_factors, self._rank).copy_(rescaled(rights, before))

    # -- what is kept --------------------------------------------------------------------------------------------------

    def _factors(self, memory: Memory) -> tuple[Tensor, Tensor]:
        """Q of all matrices, laid out as in the second sum, and its shadow."""
        factors = memory.shared(f"powersgd rank {self._rank}", self._begin(memory.device))
        if factors[0].numel() != self._plan.rights:
            raise CheckpointMismatch(
                f"codec powersgd: {factors[0].numel()} numbers are kept from earlier steps, and parameters of these "
                f"shapes need {self._plan.rights}: go on with the model that they are from"
            )
        return factors

    def _begin(self, device: torch.device) -> Callable[[], Tensor]:
        def make() -> Tensor:
            drawn = [
                random_directions(matrix.number, self._rank, matrix.cols, device).view(-1)
                for matrix in self._plan.matrices
            ]
            return torch.cat(drawn) if drawn else torch.empty(0, device=device)

        return make

    def _room_on(self, device: torch.device) -> Room:
        if self._room is None or self._room.first.device != device:
            self._room = Room(self._plan, self._first, device)
        return self._room
