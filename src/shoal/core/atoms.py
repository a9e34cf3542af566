"""The way of a run through its data, and the atoms of a step: pure functions over small values.

A step is one optimizer update over a global batch. Where the order of additions must not depend on who computes what
(`deterministic=True`), its positions are cut into *atoms*, numbered groups of consecutive positions, whose sums are
added in a fixed tree. The cut depends on the number of samples in the step alone, never on the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

MOST_ATOMS = 24
"""Divisible by 1, 2, 3, 4, 6, 8 and 12 workers. More would balance finer, but deterministic runs have
one forward per atom."""
LEAST_ATOMS = 8
SMALL_ATOM = 4
"""Samples in an atom, where a step is too small for `MOST_ATOMS` of them and large enough for `LEAST_ATOMS`."""

Value = TypeVar("Value")


class Span(NamedTuple):
    """Positions start … stop−1 of an epoch; `atom` is the number of the atom within its step."""

    atom: int
    start: int
    stop: int

    @property
    def samples(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class StepSpan:
    """Where one step lies: step number `step` of the run covers positions start … stop−1 of `epoch`."""

    step: int
    epoch: int
    start: int
    stop: int

    @property
    def samples(self) -> int:
        return self.stop - self.start

    def atoms(self) -> list[Span]:
        return [Span(number, self.start + start, self.start + stop) for number, start, stop in cut(self.samples)]


@dataclass(frozen=True, slots=True)
class Course:
    """The way of a run through its data: `size` samples an epoch, `batch` samples a step, a short last step."""

    size: int
    batch: int

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.size // self.batch)

    def step(self, number: int) -> StepSpan:
        epoch, index = divmod(number, self.steps_per_epoch)
        start = index * self.batch
        return StepSpan(number, epoch, start, min(start + self.batch, self.size))

    def samples_before(self, number: int) -> int:
        """Samples in the steps 0 … number−1."""
        epochs, index = divmod(number, self.steps_per_epoch)
        return epochs * self.size + min(index * self.batch, self.size)


@lru_cache(maxsize=64)
def cut(samples: int) -> tuple[Span, ...]:
    """The atoms of a step of so many samples, counted from its first one."""
    count = atom_count(samples)
    edges = [number * samples // count for number in range(count + 1)]
    return tuple(Span(number, edges[number], edges[number + 1]) for number in range(count))


def atom_count(samples: int) -> int:
    """How many atoms a step of so many samples has."""
    wanted = max(LEAST_ATOMS, min(MOST_ATOMS, -(-samples // SMALL_ATOM)))
    return min(wanted, samples)


class Node(NamedTuple):
    """A node of the binary tree over a step's atoms: it covers the atoms place·2^level … (place+1)·2^level − 1."""

    level: int
    place: int


def tree_nodes(atoms: range) -> list[Node]:
    """The largest nodes that together cover exactly these atoms, in order."""
    nodes = []
    position = atoms.start
    while position < atoms.stop:
        level = (position & -position).bit_length() - 1 if position else atoms.stop.bit_length()
        while position + (1 << level) > atoms.stop:
            level -= 1
        nodes.append(Node(level, position >> level))
        position += 1 << level
    return nodes


def tree_sum(values: Mapping[Node, Value], atoms: int, add: Callable[[Value, Value], Value]) -> Value:
    """Sum over the tree in its one order, from any set of nodes that covers atoms 0 … atoms−1."""

    def at(node: Node) -> Value:
        if node in values:
            return values[node]
        left, right = Node(node.level - 1, 2 * node.place), Node(node.level - 1, 2 * node.place + 1)
        if right.place << right.level >= atoms:
            return at(left)
        return add(at(left), at(right))

    root = Node((atoms - 1).bit_length(), 0)
    return at(root)
