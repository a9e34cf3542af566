"""How long a process may be silent before it is looked at: from the intervals of its own beats."""

from __future__ import annotations

import math
from collections import deque

_WINDOW = 100
"""Intervals remembered."""
_ENOUGH = 8
"""Intervals needed before the bound follows them; until then it is the ceiling."""
_PHI = 8.0
"""Suspicion at which a process is overdue: a healthy one is that late once in 10**_PHI beats."""
_SPREAD_OF_MEDIAN = 1.4826
"""The standard deviation of a normal law, over its median distance from the median."""
_LEAST_SPREAD = 0.25
"""Of the usual interval: a clock that beats evenly says little about how late it can be."""


def _deviations(phi: float) -> float:
    """How many standard deviations beyond the mean a normal law leaves 10**-phi (its tail as a logistic one)."""
    low, high = 0.0, 40.0
    for _ in range(60):
        y = (low + high) / 2
        # -log10 of 1 / (1 + exp(a)), without overflow
        exponent = y * (1.5976 + 0.070566 * y * y)
        reached = math.log1p(math.exp(min(exponent, 700.0))) / math.log(10)
        low, high = (y, high) if reached < phi else (low, y)
    return high


_DEVIATIONS = _deviations(_PHI)


class Suspicion:
    """An accrual failure detector for one process. Pure: the time is passed in.

    It takes the median and the spread around it, not the mean: a few late beats do not stretch the bound, and many do.
    """

    def __init__(self, floor: float = 0.5, ceiling: float = 2.0) -> None:
        self._floor = floor
        self._ceiling = ceiling
        self._last: float | None = None
        self._intervals: deque[float] = deque(maxlen=_WINDOW)
        self._bound: float | None = None

    @property
    def last(self) -> float | None:
        """When it beat last; None if it never did."""
        return self._last

    def beat(self, now: float) -> None:
        if self._last is not None and now > self._last:
            self._intervals.append(now - self._last)
            self._bound = None
        self._last = now if self._last is None else max(now, self._last)

    def bound(self) -> float:
        """Seconds of silence beyond which the process is suspect."""
        if self._bound is None:
            self._bound = min(max(self._measured(), self._floor), self._ceiling)
        return self._bound

    def overdue(self, now: float, listening_since: float = -math.inf) -> bool:
        """Whether it has been silent for too long, to one who has listened since then.

        Never before its first beat: a start may take long.
        """
        if self._last is None:
            return False
        silent = now - max(self._last, listening_since)
        # the bound is only worked out for those that are late enough for any
        return silent > self._floor and silent > self.bound()

    def _measured(self) -> float:
        if len(self._intervals) < _ENOUGH:
            return self._ceiling
        middle = _median(sorted(self._intervals))
        apart = _median(sorted(abs(interval - middle) for interval in self._intervals))
        return middle + _DEVIATIONS * max(apart * _SPREAD_OF_MEDIAN, middle * _LEAST_SPREAD)


def _median(ordered: list[float]) -> float:
    return ordered[len(ordered) // 2]
