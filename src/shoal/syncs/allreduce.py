"""Sync `allreduce`: in every step the gradients of all workers are summed.

Three ways to the same sum, behind one contract: nothing to do for one worker; buckets that leave during backward;
and, for deterministic runs, a tree over the step's atoms whose shape does not depend on who computed them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shoal.comm.buckets import Buckets, refuse_sparse
from shoal.comm.group import Group
from shoal.comm.plan import Settled
from shoal.core.atoms import Node, tree_nodes, tree_sum
from shoal.core.slices import evenly
from shoal.core.traffic import GRADIENT
from shoal.syncs.doubles import Riding, places

Params = Sequence[tuple[str, nn.Parameter]]

_CHUNK = 4 << 20
"""Elements gathered at once for the tree: bounds memory to members × nodes × this."""


class Weighing(NamedTuple):
    """How sums of gradients become means, where samples weigh differently: they are times `samples` / `weight`."""

    samples: int
    weight: float | None
    """Over all workers; None if it is the first of the step's doubles."""


class Exchange(Protocol):
    """Sums the gradients of one set of parameters, and three short vectors, over all workers, step by step.

    In each step: `open`, any number of backward passes (`arm` before the last one; `atom_done` after each atom, with
    the vectors `sums` and `doubles` of that atom), then `finish`. One thread. `sums` and `flags` are in single
    precision; `doubles` is in double precision, on the CPU, and has the same length on all workers, as the others do.
    """

    by_atom: bool
    """Whether `atom_done` must be called, and every forward covers one atom at most."""

    @property
    def weighs(self) -> bool:
        """Whether `finish` makes means of sums. Else that is left to the caller."""

    def open(self, atoms: int, vectors: int, doubles: int = 0) -> None:
        """Begin a step of so many atoms; gradients are cleared.

        `vectors` are the elements of `sums` and `flags` together, and `doubles` those of the third vector.
        """

    def arm(self, *, weighted: bool = False) -> None:
        """The next backward is the last one on this worker. `weighted`: its loss has a weight of its own."""

    def atom_done(self, atom: int, sums: Tensor, doubles: Tensor | None = None) -> None:
        """All gradients of this atom are in `.grad`."""

    def used(self) -> list[bool]:
        """For each parameter: has this worker a gradient for it in this step?"""

    def finish(
        self, sums: Tensor, flags: Tensor, weighing: Weighing | None = None, doubles: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`sums` and `flags` over all workers; `doubles` is replaced by its sum over them.

        Afterwards `.grad` of every parameter is the sum over all workers.
        """

    def applying(self, scale: float = 1.0) -> AbstractContextManager[None]:
        """Within, the optimizer applies the gradients, scaled by this since `finish`; afterwards the step counts."""

    def digest(self) -> bytes:
        """Equal on all workers whose exchanges fit each other."""

    def settled(self) -> Settled | None:
        """How gradients are summed, once it has been measured and agreed; None before, and where there is no choice."""

    def knowledge(self) -> bytes | None:
        """What was settled, for `make_exchange` with another group; None before, and where there is no choice."""

    def close(self, *, with_group: bool = False) -> None:
        """Let go of everything. `with_group`: the group is closed next."""


class AloneExchange:
    """One worker: its sum is the sum."""

    by_atom = False
    weighs = False

    def __init__(self, params: Params) -> None:
        self._names = [name for name, _ in params]
        self._params = [param for _, param in params]

    def open(self, atoms: int, vectors: int, doubles: int = 0) -> None:
        for param in self._params:
            param.grad = None

    def arm(self, *, weighted: bool = False) -> None:
        return None

    def atom_done(self, atom: int, sums: Tensor, doubles: Tensor | None = None) -> None:
        return None

    def used(self) -> list[bool]:
        return [param.grad is not None for param in self._params]

    def finish(
        self, sums: Tensor, flags: Tensor, weighing: Weighing | None = None, doubles: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        for number, param in enumerate(self._params):
            if param.grad is not None and param.grad.is_sparse:
                raise refuse_sparse(self._names[number])
        return sums, flags

    def applying(self, scale: float = 1.0) -> AbstractContextManager[None]:
        return nullcontext()

    def digest(self) -> bytes:
        return b""

    def settled(self) -> Settled | None:
        return None

    def knowledge(self) -> bytes | None:
        return None

    def close(self, *, with_group: bool = False) -> None:
        return None


class BucketExchange:
    """Buckets over the group; the vectors ride in the last one."""

    by_atom = False
    weighs = False

    def __init__(self, group: Group, params: Params, knowledge: bytes | None = None) -> None:
        self._group = group
        self._params = [param for _, param in params]
        self._buckets = Buckets(group, params, tail=0, knowledge=knowledge)

    def open(self, atoms: int, vectors: int, doubles: int = 0) -> None:
        self._buckets.resize_tail(vectors + places(doubles, self._group.size))
        self._buckets.open()

    def arm(self, *, weighted: bool = False) -> None:
        self._buckets.arm()

    def atom_done(self, atom: int, sums: Tensor, doubles: Tensor | None = None) -> None:
        return None

    def used(self) -> list[bool]:
        return [param.grad is not None for param in self._params]

    def finish(
        self, sums: Tensor, flags: Tensor, weighing: Weighing | None = None, doubles: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        riding = Riding(self._group, doubles)
        tail = self._buckets.finish(torch.cat([sums, flags, *riding.parts(flags.device)]))
        summed_sums, summed_flags, summed = tail.split([sums.numel(), flags.numel(), riding.size])
        riding.start()
        riding.finish(summed)
        return summed_sums, summed_flags

    def applying(self, scale: float = 1.0) -> AbstractContextManager[None]:
        return nullcontext()

    def digest(self) -> bytes:
        return self._buckets.digest

    def settled(self) -> Settled | None:
        return self._buckets.settled

    def knowledge(self) -> bytes | None:
        return self._buckets.knowledge()

    def close(self, *, with_group: bool = False) -> None:
        self._buckets.close(with_group=with_group)


class TreeExchange:
    """Gradients of atoms, summed over the binary tree of the step's atoms: bitwise equal for any number of workers."""

    by_atom = True
    weighs = False

    def __init__(self, group: Group, params: Params) -> None:
        self._group = group
        self._names = [name for name, _ in params]
        self._params = [param for _, param in params]
        self._kinds: dict[torch.dtype, list[int]] = {}
        for number, param in enumerate(self._params):
            self._kinds.setdefault(param.dtype, []).append(number)
        self._used = [False] * len(self._params)
        self._atoms = 0
        self._values: dict[Node, list[Tensor]] = {}

    def open(self, atoms: int, vectors: int, doubles: int = 0) -> None:
        self._atoms = atoms
        self._values = {}
        self._used = [False] * len(self._params)
        for param in self._params:
            param.grad = None

    def arm(self, *, weighted: bool = False) -> None:
        return None

    def atom_done(self, atom: int, sums: Tensor, doubles: Tensor | None = None) -> None:
        value = [self._flat(numbers) for numbers in self._kinds.values()] + [_joined(sums, doubles)]
        for param in self._params:
            param.grad = None
        node = Node(0, atom)
        # like a binary counter: a right child meets its left sibling as soon as it is there
        while node.place % 2 and (left := Node(node.level, node.place - 1)) in self._values:
            value = _added(self._values.pop(left), value)
            node = Node(node.level + 1, node.place // 2)
        self._values[node] = value

    def _flat(self, numbers: list[int]) -> Tensor:
        parts = []
        for number in numbers:
            grad = self._params[number].grad
            if grad is None:
                parts.append(torch.zeros_like(self._params[number]).flatten())
                continue
            if grad.is_sparse:
                raise refuse_sparse(self._names[number])
            self._used[number] = True
            parts.append(grad.flatten())
        return torch.cat(parts)

    def used(self) -> list[bool]:
        return self._used

    def finish(
        self, sums: Tensor, flags: Tensor, weighing: Weighing | None = None, doubles: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        blank = torch.zeros_like(_joined(sums, doubles))
        empty = [self._zeros(numbers) for numbers in self._kinds.values()] + [blank]
        total = [self._tree(place, blank) for place, blank in enumerate(empty)]
        self._values = {}
        self._group.sum(flags).wait()
        for flat, numbers in zip(total, self._kinds.values(), strict=False):
            sizes = [self._params[number].numel() for number in numbers]
            for number, piece in zip(numbers, flat.split(sizes), strict=True):
                self._params[number].grad = piece.view_as(self._params[number])
        if doubles is not None:
            doubles.copy_(total[-1][sums.numel() :])
        return total[-1][: sums.numel()].to(sums.dtype), flags

    def _zeros(self, numbers: list[int]) -> Tensor:
        first = self._params[numbers[0]]
        return torch.zeros(
            sum(self._params[number].numel() for number in numbers), dtype=first.dtype, device=first.device
        )

    def _tree(self, place: int, blank: Tensor) -> Tensor:
        """The sum over all atoms of the value at `place`, the same on every member."""
        owned = [tree_nodes(atoms) for atoms in evenly(self._atoms, self._group.size)]
        rows = max(len(nodes) for nodes in owned)
        mine = [self._values[node][place] for node in owned[self._group.rank]]
        mine += [blank] * (rows - len(mine))
        pieces = []
        for start in range(0, max(1, blank.numel()), _CHUNK):
            self._group.account.departing.passed()
            gathered = self._group.gather(torch.stack([value[start : start + _CHUNK] for value in mine]), GRADIENT)
            values = {
                node: gathered[member, row] for member, nodes in enumerate(owned) for row, node in enumerate(nodes)
            }
            pieces.append(tree_sum(values, self._atoms, torch.add))
        return torch.cat(pieces)

    def applying(self, scale: float = 1.0) -> AbstractContextManager[None]:
        return nullcontext()

    def digest(self) -> bytes:
        return repr(
            [
                (name, tuple(param.shape), str(param.dtype))
                for name, param in zip(self._names, self._params, strict=True)
            ]
        ).encode()

    def settled(self) -> Settled | None:
        return None

    def knowledge(self) -> bytes | None:
        return None

    def close(self, *, with_group: bool = False) -> None:
        return None


def _joined(sums: Tensor, doubles: Tensor | None) -> Tensor:
    """Both vectors as one, which costs one operation."""
    return sums.clone() if doubles is None else torch.cat([sums.to(doubles.dtype), doubles.to(sums.device)])


def _added(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    return [torch.add(a, b) for a, b in zip(left, right, strict=True)]
