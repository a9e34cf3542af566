"""Who computes which positions of a step, and in which forwards: pure functions over small values.

A step is one optimizer update over a global batch. `deal` is the one place that decides who computes what of it. It
depends on nothing but what all members know, so that all deal alike, and its result is a value that is passed along.
A *slice* may begin and end at any position: gradients are sums over positions, whoever adds them up.

Positions are counted from the first one of the step.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from shoal.core.atoms import MOST_ATOMS, cut

Slices = tuple[range, ...]
"""One for each member, in order of rank. Together they are the positions of a step, each once and in order."""
Pace = tuple[float, ...]
"""Samples per second of each member, in order of rank; empty where nobody has measured it."""

WORTH = 0.03
"""A step has to get shorter by so much of its time, or nobody's slice changes: who reads ahead has then read right."""


class Forward(NamedTuple):
    """Positions start … stop−1 of a step, computed together."""

    start: int
    stop: int
    atom: int | None = None
    """The atom that ends with it, where gradients are added by atoms; None if it ends inside of one."""

    @property
    def samples(self) -> int:
        return self.stop - self.start


def deal(samples: int, members: int, pace: Pace = (), *, least: int = 1, by_atom: bool = False) -> Slices:
    """Share the positions of a step out to its members, evenly or by their pace.

    A slice that is not empty has at least `least` samples, if the step has. `by_atom`: slices are of whole atoms.
    """
    if by_atom:
        atoms = cut(samples)
        edges = [0, *(atom.stop for atom in atoms)]
        return tuple(range(edges[part.start], edges[part.stop]) for part in evenly(len(atoms), members))
    size = grain(samples, least, members)
    if pace and samples >= members * size:
        return _by_pace(samples, pace, size)
    busy = max(1, min(members, samples // least))
    return evenly(samples, busy) + (range(samples, samples),) * (members - busy)


def evenly(count: int, members: int) -> Slices:
    """`count` things in order, in contiguous ranges whose lengths differ by at most one, longer ones first."""
    each, more = divmod(count, members)
    edges = [number * each + min(number, more) for number in range(members + 1)]
    return tuple(range(edges[number], edges[number + 1]) for number in range(members))


def grain(samples: int, least: int, members: int) -> int:
    """By how many samples the edges of slices move, where pace moves them."""
    return max(1, least, samples // max(MOST_ATOMS, 4 * members))


def _by_pace(samples: int, pace: Pace, size: int) -> Slices:
    """In proportion to pace, to the nearest grain, and one grain at least: who has nothing cannot be measured."""
    edges, reached, total = [0], 0.0, sum(pace)
    for number, speed in enumerate(pace[:-1]):
        reached += speed
        edge = size * round(samples * reached / total / size)
        behind = len(pace) - 1 - number
        edges.append(max(edges[-1] + size, min(edge, (samples // size - behind) * size)))
    edges.append(samples)
    return tuple(range(start, stop) for start, stop in pairwise(edges))


def better(used: Pace, measured: Pace, samples: int, *, least: int = 1) -> Pace:
    """The pace to deal by from now on: `measured`, if steps of so many samples are worth it, else what was `used`."""

    def seconds(pace: Pace) -> float:
        slices = deal(samples, len(measured), pace, least=least)
        return max(len(own) / speed for own, speed in zip(slices, measured, strict=True))

    return measured if seconds(measured) < (1.0 - WORTH) * seconds(used) else used


@lru_cache(maxsize=256)
def forwards(own: range, limit: int | None, *, least: int = 1) -> tuple[Forward, ...]:
    """A slice in as few forwards as `limit` samples in each allow, of equal length or nearly so.

    If some would have less than `least` samples there are fewer, and these are beyond the limit, unless that is less
    than `least` itself.
    """
    if not own:
        return ()
    if limit is not None and limit < least:
        least = 1
    count = 1 if limit is None else -(-len(own) // limit)
    count = max(1, min(count, len(own) // least))
    return tuple(Forward(own[part.start], own[part.stop - 1] + 1) for part in evenly(len(own), count))


def forwards_by_atom(own: range, limit: int | None, samples: int) -> tuple[Forward, ...]:
    """A slice of whole atoms of a step of so many samples, atom by atom: the same whoever has it."""
    return tuple(
        part._replace(atom=atom.atom if part.stop == atom.stop else None)
        for atom in cut(samples)
        if own.start <= atom.start < own.stop
        for part in forwards(range(atom.start, atom.stop), limit)
    )
