"""What the book of leases consists of: steps that are open, their ranges, and who has which."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from shoal.core.atoms import StepSpan
from shoal.core.pace import Estimate
from shoal.syncs.server.messages import Lease


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
    usual: tuple[int, int] = (0, 0)
    """The samples of its last new range, of a step of so many."""


class OpenStep:
    def __init__(self, span: StepSpan, grain: int):
        self.number = span.step
        self.samples = span.samples
        self.grain = grain
        """By so many samples pace moves the edges of ranges."""
        self.cut = 0
        """Positions 0 … cut−1 are in ranges."""
        self.ranges: dict[Lease, Range] = {}
        self.takers: set[int] = set()
        self.finished: float | None = None

    @property
    def left(self) -> int:
        """Samples that are in nobody's range."""
        return self.samples - self.cut

    def enough(self, samples: int, least: int) -> int:
        """So many of the samples that are left, or more, so that neither these nor those left then are too few."""
        samples = max(samples, least)
        return samples if self.left - samples >= least else self.left

    def take(self, worker: int, samples: int) -> Range:
        self.takers.add(worker)
        return self.add(samples)

    def add(self, samples: int) -> Range:
        """A range of so many of the samples that are left. Nobody has it yet."""
        lease = Lease(self.number, self.cut, self.cut + samples)
        self.cut = lease.stop
        self.ranges[lease] = Range(lease, samples)
        return self.ranges[lease]

    @property
    def done(self) -> bool:
        return not self.left and all(part.done for part in self.ranges.values())
