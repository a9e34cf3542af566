"""Steps, atoms and who computes them: pure functions over small values.

A step is one optimizer update over a global batch. Its positions are cut into *atoms*, numbered groups of consecutive
positions. The cut depends on the number of samples in the step alone, never on the workers: whoever computes an atom,
the atom is the same, and so is the gradient of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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


def share(count: int, members: int) -> list[range]:
    """`count` things in order, dealt to `members` as contiguous ranges whose lengths differ by at most one."""
    edges = [number * count // members for number in range(members + 1)]
    return [range(edges[number], edges[number + 1]) for number in range(members)]


def share_atoms(atoms: Sequence[Span], members: int, least: int = 1) -> list[range]:
    """The atoms of a step, dealt to `members` as `share` does it; to the first few alone where others would have some,
    but less than `least` samples."""
    for count in range(members, 0, -1):
        dealt = share(len(atoms), count)
        if least == 1 or all(samples_of(atoms[part.start : part.stop]) >= least for part in dealt if part):
            break
    return dealt + [range(len(atoms), len(atoms))] * (members - count)


def samples_of(spans: Sequence[Span]) -> int:
    return sum(span.samples for span in spans)


def forwards(atoms: Sequence[Span], limit: int | None, *, alone: bool, least: int = 1) -> list[list[Span]]:
    """Group a worker's adjacent atoms into forwards of at most `limit` samples; `alone` keeps atoms apart.

    An atom larger than the limit is cut into parts that keep its number. A forward that would have less than `least`
    samples gets atoms of the one before, or joins it if that has none to spare: then it is beyond the limit by less
    than `least`.
    """
    groups: list[list[Span]] = []
    room = 0
    for atom in atoms:
        parts = list(_parts(atom, limit))
        for part in parts:
            fits = limit is None or part.samples <= room
            if groups and not alone and len(parts) == 1 and fits:
                groups[-1].append(part)
            else:
                groups.append([part])
                room = limit if limit is not None else 0
            room -= part.samples
    return groups if alone or least == 1 or (limit or least) < least else _filled(groups, least)


def _filled(groups: list[list[Span]], least: int) -> list[list[Span]]:
    """No forward has less than `least` samples, unless it is the only one."""
    for place in range(len(groups) - 1, 0, -1):
        here, before = groups[place], groups[place - 1]
        while samples_of(here) < least <= samples_of(before[:-1]):
            here.insert(0, before.pop())
        if samples_of(here) < least:
            before += groups.pop(place)
    if len(groups) > 1 and samples_of(groups[0]) < least:
        groups[0] += groups.pop(1)
    return groups


def _parts(atom: Span, limit: int | None) -> Iterator[Span]:
    size = atom.samples if limit is None else limit
    for start in range(atom.start, atom.stop, max(1, size)):
        yield Span(atom.atom, start, min(start + size, atom.stop))


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
