"""Values of a run against step and time, in bounded memory."""

from __future__ import annotations

import math

MOST_POINTS = 2_000


class Point:
    """One value, or the mean of a few that came after each other. `step` and `elapsed` are of the last of them."""

    __slots__ = ("elapsed", "high", "low", "step", "total", "weight")

    def __init__(self, step: int, elapsed: float, total: float, weight: float, low: float, high: float) -> None:
        self.step, self.elapsed = step, elapsed
        self.total, self.weight, self.low, self.high = total, weight, low, high

    @property
    def value(self) -> float:
        """NaN where none of the values was finite."""
        return self.total / self.weight if self.weight else math.nan

    def absorb(self, later: Point) -> None:
        """Become the mean of both."""
        self.step, self.elapsed = later.step, later.elapsed
        self.total += later.total
        self.weight += later.weight
        if later.low < self.low:
            self.low = later.low
        if later.high > self.high:
            self.high = later.high

    def copy(self) -> Point:
        return Point(self.step, self.elapsed, self.total, self.weight, self.low, self.high)


class Series:
    """Values against step and time. Beyond `most` points, neighbours are averaged in pairs, again and again; the first
    and the last value are kept as they came. Values that are not finite are counted and left out of the means."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        self._width = 1
        self._filled = 0
        self._points: list[Point] = []
        self.first: Point | None = None
        self.last: Point | None = None
        self.count = 0
        self.not_finite = 0
        self.first_not_finite: int | None = None

    def add(self, step: int, elapsed: float, value: float, weight: float = 1.0) -> None:
        """`value / weight` is what is drawn: for a rate, an amount and the seconds it took."""
        if math.isfinite(value):
            mean = value / weight
            point = Point(step, elapsed, value, weight, mean, mean)
        else:
            point = Point(step, elapsed, 0.0, 0.0, math.inf, -math.inf)
            self.not_finite += 1
            self.first_not_finite = step if self.first_not_finite is None else self.first_not_finite
        self.count += 1
        self.first, self.last = self.first or point, point
        if not self._points or self._filled >= self._width:
            # A bucket of one value is the value; a wider one takes in others, and must not be the first or the last.
            self._points.append(point if self._width == 1 else point.copy())
            self._filled = 1
        else:
            self._points[-1].absorb(point)
            self._filled += 1
        if len(self._points) > self._most:
            self._halve()

    def _halve(self) -> None:
        alone = len(self._points) % 2
        self._points = _in_groups(self._points, 2)
        self._filled += 0 if alone else self._width
        self._width *= 2

    def cut(self, after: int) -> None:
        """Forget what came after that step: it is done again."""
        self._points = [point for point in self._points if point.step <= after]
        self._filled = self._width
        self.last = self._points[-1] if self._points else None
        self.first = self.first if self._points else None
        if self.first_not_finite is not None and self.first_not_finite > after:
            self.not_finite, self.first_not_finite = 0, None

    def points(self, most: int = MOST_POINTS, *, ends: bool = True) -> list[Point]:
        """At most about so many, averaged evenly; with `ends`, the first and the last as they came."""
        first, last = self.first, self.last
        if first is None or last is None or (len(self._points) <= most and self._width == 1):
            return list(self._points)
        group = math.ceil(len(self._points) / most)
        middle = _in_groups(self._points, group)
        if not ends:
            return middle
        inner = [point for point in middle if first.step < point.step < last.step]
        return [first, *inner, last]

    @property
    def least(self) -> float:
        return min((point.low for point in self._points), default=math.nan)

    @property
    def largest(self) -> float:
        return max((point.high for point in self._points), default=math.nan)


def _in_groups(points: list[Point], size: int) -> list[Point]:
    """New points, each the mean of `size` neighbours; the last of fewer."""
    found = []
    for at in range(0, len(points), size):
        merged = points[at].copy()
        for later in points[at + 1 : at + size]:
            merged.absorb(later)
        found.append(merged)
    return found
