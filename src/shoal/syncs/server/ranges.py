"""What the book of leases consists of: steps that are open, their ranges, and who has which."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from shoal.core.atoms import StepSpan
from shoal.syncs.server.messages import Lease
from shoal.syncs.server.pace import Estimate


class Grant(NamedTuple):
    """Compute this lease with weights of at least this version; wait for them if they are not there."""

    lease: Lease
    version: int


@dataclass(slots=True, eq=False)
class Range:
    lease: Lease
    samples: int
    done: bool = False
    holders: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Hold:
    """A lease in a worker's hands."""

    grant: Grant
    range: Range
    start: float | None
    """When computing could begin; None while the version is not there."""
    patience: float = inf
    """When to stop waiting for a fresher version than is necessary."""


@dataclass(slots=True)
class Member:
    pace: Estimate = field(default_factory=Estimate)
    """Seconds per sample."""
    overhead: Estimate = field(default_factory=Estimate)
    """Seconds per lease."""
    hold: Hold | None = None
    seen: float | None = None
    """When it joined or was done, if it has not asked since: perhaps it does something else."""
    waiting: bool = False
    """It has asked and got nothing."""
    last: int | None = None
    """The step of its last lease."""
    ended: float | None = None
    """When it was done with it."""


class OpenStep:
    def __init__(self, span: StepSpan):
        spans = span.atoms()
        self.number = span.step
        self.atoms = len(spans)
        self.samples = span.samples
        self.edges = [spans[0].start, *(atom.stop for atom in spans)]
        self.cut = 0
        """Atoms 0 … cut−1 are in ranges."""
        self.ranges: dict[Lease, Range] = {}
        self.takers: set[int] = set()
        self.finished: float | None = None

    def enough(self, atoms: int, least: int) -> int:
        """So many of the atoms that are left, or more, so that both these and what is left then have enough samples."""
        while self.cut + atoms < self.atoms and self.edges[self.cut + atoms] - self.edges[self.cut] < least:
            atoms += 1
        over = self.edges[-1] - self.edges[self.cut + atoms]
        return atoms if over >= least or not over else self.atoms - self.cut

    def take(self, worker: int, atoms: int) -> Range:
        lease = Lease(self.number, self.cut, self.cut + atoms)
        self.cut = lease.stop
        self.takers.add(worker)
        self.ranges[lease] = Range(lease, self.edges[lease.stop] - self.edges[lease.start])
        return self.ranges[lease]

    @property
    def done(self) -> bool:
        return self.cut == self.atoms and all(part.done for part in self.ranges.values())
