"""Medians with their interval, from the order of the values alone: no assumption about how noise is distributed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FEWEST = 6  # with five values even their whole range covers the median only 93.75% of the time


@dataclass(frozen=True)
class Interval:
    median: float
    low: float
    high: float


def median_interval(values: Sequence[float], coverage: float = 0.95) -> Interval:
    """The median and an interval that contains the true median with at least `coverage`; needs FEWEST values."""
    if len(values) < FEWEST:
        raise ValueError(f"got {len(values)} rounds; a 95% interval needs at least {FEWEST}: set --rounds")
    ordered = sorted(values)
    outside = _values_outside(len(ordered), (1 - coverage) / 2)
    return Interval(float(np.median(ordered)), ordered[outside], ordered[-1 - outside])


def _values_outside(count: int, tail: float) -> int:
    """How many of `count` values may be cut off at each end so that the median is beyond them with at most `tail`."""
    beyond, cut = 0.5**count, 0
    while beyond + math.comb(count, cut + 1) * 0.5**count <= tail:
        cut += 1
        beyond += math.comb(count, cut) * 0.5**count
    return cut
