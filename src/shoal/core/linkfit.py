"""How long a message of a given size takes: the α–β model, fitted to measurements, in a few pieces.

On a link without surprises a message of n bytes takes α + β·n seconds: latency, and the inverse of bandwidth. Real
links have a few ranges of sizes (what fits a cache, what an algorithm treats as small), each with its own α and β.
`fit` finds them: which ranges there are is decided by the data, by dynamic programming over all ways to cut it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import msgspec

from shoal.core.errors import ConfigError

MOST_SEGMENTS = 4
MOST_POINTS = 200
"""The search takes time in proportion to the square of it, and more: a second for so many."""
_LEAST_POINTS = 4
"""Sizes in a segment: through fewer, a line passes whatever they are."""
_LEAST_NOISE = 0.03
"""Relative. A fit that is closer than this does not become more useful by another segment."""
_MOST_NOISE = 0.3
_CAP = 5.0
"""In units of noise: a point further off than this is an outlier, and no worse for being still further off."""
_ROUNDS = 8


class Point(msgspec.Struct, frozen=True):
    """One measured size: the median time, the quartiles `low` and `high`, and how many repetitions there were."""

    bytes: int
    seconds: float
    low: float = 0.0
    high: float = 0.0
    repetitions: int = 1


class Segment(msgspec.Struct, frozen=True):
    """From `from_bytes` on, up to the next segment: `latency` + bytes × `seconds_per_byte`.

    The latency of a segment other than the first is where its line meets zero bytes, and may be negative.
    """

    from_bytes: int
    latency: float
    seconds_per_byte: float

    def at(self, size: float) -> float:
        return self.latency + size * self.seconds_per_byte


class LinkModel(msgspec.Struct, frozen=True):
    """The time of an operation by the size of its message."""

    segments: list[Segment]

    def __post_init__(self) -> None:
        """Raises ValueError, which msgspec turns into its ValidationError where the model is read from a file."""
        starts = [segment.from_bytes for segment in self.segments]
        if not starts or starts[0] != 0 or any(before >= after for before, after in pairwise(starts)):
            raise ValueError(f"segments begin at {starts}; they must begin at 0 and ascend")
        for segment in self.segments:
            if not (math.isfinite(segment.latency) and 0 <= segment.seconds_per_byte < math.inf):
                raise ValueError(f"{segment} must have a latency and seconds_per_byte >= 0 that are finite")

    def seconds(self, size: float) -> float:
        """Of a message of `size` bytes. Never negative, and never less for a larger message."""
        longest = 0.0
        for segment, after in zip(self.segments, [*self.segments[1:], None], strict=True):
            if segment.from_bytes > size and segment.from_bytes > 0:
                break
            # Slopes are not negative, so the end of a segment is its maximum. Where one jumps down to the next, the
            # higher end holds until the line has come up to it.
            end = size if after is None else min(size, after.from_bytes)
            longest = max(longest, segment.at(end))
        return longest

    @property
    def latency(self) -> float:
        """Seconds that the smallest message takes."""
        return self.seconds(0)

    @property
    def bandwidth(self) -> float:
        """Bytes per second that large messages come near to; infinite if the time does not depend on the size."""
        slope = self.segments[-1].seconds_per_byte
        return 1 / slope if slope > 0 else math.inf


def fit(points: Sequence[Point]) -> LinkModel:
    """The model of 1 to 4 segments that fits `points` best, in relative error, so that small sizes count as much as
    large ones.

    Sizes should be spread evenly on a logarithmic scale. One measurement that is far off does not matter. With one size
    alone the whole time counts as latency. Raises ConfigError for what cannot be fitted: no points, more than
    `MOST_POINTS`, sizes below 0, times that are not above 0.
    """
    data = _Data(*_by_size(points))
    lines = [(cut, data.line(cut)) for cut in data.cuts()]
    segments = [Segment(0, *lines[0][1])]
    for (_, before), ((start, _), after) in pairwise(lines):
        left, right = data.sizes[start - 1], data.sizes[start]
        segments.append(Segment(_meeting(left, right, before, after), *after))
    return LinkModel(segments)


def merged(rounds: Sequence[Sequence[Point]]) -> list[Point]:
    """Several measurements of the same sizes as one: medians of medians, and the widest of the quartiles.

    A size that not every round has come to is as good as the rounds that have.
    """
    by_size: dict[int, list[Point]] = {}
    for point in (point for points in rounds for point in points):
        by_size.setdefault(point.bytes, []).append(point)
    return [
        Point(
            size,
            median(point.seconds for point in found),
            min(point.low for point in found),
            max(point.high for point in found),
            sum(point.repetitions for point in found),
        )
        for size, found in sorted(by_size.items())
    ]


def _by_size(points: Sequence[Point]) -> tuple[list[int], list[float]]:
    if not 0 < len(points) <= MOST_POINTS:
        raise ConfigError(f"{len(points)} measurements to fit; there must be 1 to {MOST_POINTS}")
    for point in points:
        if point.bytes < 0 or not 0 < point.seconds < math.inf:
            raise ConfigError(
                f"a measurement of {point.seconds} s for {point.bytes} bytes cannot be fitted; sizes must not be "
                "negative, and times must be above 0"
            )
    once = merged([points])
    return [point.bytes for point in once], [point.seconds for point in once]


_Cut = tuple[int, int]
"""The numbers of the first point and of the first one that is not in it."""
_Line = tuple[float, float]
"""Latency and seconds per byte."""


class _Data:
    """Sizes that ascend, and their times."""

    def __init__(self, sizes: list[int], times: list[float]) -> None:
        self.sizes = sizes
        self.times = times
        self._scales = _scales(times)
        self._noise = _noise(sizes, times)
        self._least_latency = _least_latency(sizes, times)

    def cuts(self) -> list[_Cut]:
        """The best way to cut the points: a line costs what it misses, and a price that keeps out accidental ones."""
        count = len(self.sizes)
        price = 4 * math.log(max(count, 2))
        least = min(_LEAST_POINTS, count)
        costs = {
            (start, stop): price + self._cost((start, stop))
            for stop in range(least, count + 1)
            for start in range(stop - least + 1)
        }
        ways: list[dict[int, tuple[float, list[_Cut]]]] = [{0: (0.0, [])}]
        for _ in range(MOST_SEGMENTS):
            longer: dict[int, tuple[float, list[_Cut]]] = {}
            for (start, stop), cost in costs.items():
                if start in ways[-1]:
                    before, cuts = ways[-1][start]
                    if stop not in longer or before + cost < longer[stop][0]:
                        longer[stop] = before + cost, [*cuts, (start, stop)]
            ways.append(longer)
        return min((way[count] for way in ways if count in way), key=lambda way: way[0])[1]

    def line(self, cut: _Cut) -> _Line:
        """The line through the points of a cut: least absolute error, then least squares without the outliers."""
        line = self._weighted(cut, [1.0] * (cut[1] - cut[0]))
        errors = self._errors(cut, line)
        if max(errors) <= 1:
            return line
        for _ in range(_ROUNDS):
            line = self._weighted(cut, [1 / max(error, 0.1) for error in errors])
            errors = self._errors(cut, line)
        kept = [1.0 if error <= _CAP else 0.0 for error in errors]
        return self._weighted(cut, kept) if sum(kept) >= 2 else line

    def _cost(self, cut: _Cut) -> float:
        return sum(min(_CAP, error) ** 2 for error in self._errors(cut, self.line(cut)))

    def _errors(self, cut: _Cut, line: _Line) -> list[float]:
        """How far each point is off the line, in units of noise."""
        latency, slope = line
        points = zip(*(of[slice(*cut)] for of in (self.sizes, self.times, self._scales)), strict=True)
        return [abs(latency + slope * size - time) / (scale * self._noise) for size, time, scale in points]

    def _weighted(self, cut: _Cut, weights: list[float]) -> _Line:
        """Least squares in relative error; no slope is below 0, and the latency of the first line is possible."""
        xs, ys, scales = (of[slice(*cut)] for of in (self.sizes, self.times, self._scales))
        shares = [weight / (scale * scale) for weight, scale in zip(weights, scales, strict=True)]
        total = sum(shares)
        mean_x = sum(map(operator.mul, shares, xs)) / total
        mean_y = sum(map(operator.mul, shares, ys)) / total
        apart = [x - mean_x for x in xs]
        pulls = list(map(operator.mul, shares, apart))
        spread = sum(map(operator.mul, pulls, apart))
        if spread <= 0:
            return mean_y, 0.0
        slope = max(0.0, sum(pull * (y - mean_y) for pull, y in zip(pulls, ys, strict=True)) / spread)
        latency = mean_y - slope * mean_x
        if cut[0] == 0 and latency < self._least_latency:
            latency = self._least_latency
            by_x = list(map(operator.mul, shares, xs))
            above = [y - latency for y in ys]
            return latency, max(0.0, sum(map(operator.mul, by_x, above)) / sum(map(operator.mul, by_x, xs)))
        return latency, slope


def _scales(times: list[float]) -> list[float]:
    """What errors are relative to: the time itself, unless it is out of line with those beside it."""
    if len(times) < 3:
        return times
    inside = [median(times[at - 1 : at + 2]) for at in range(1, len(times) - 1)]
    first = min(max(times[0], times[1] / 4), times[1])
    last = min(max(times[-1], times[-2]), 4 * times[-2])
    return [first, *inside, last]


def _least_latency(sizes: list[int], times: list[float]) -> float:
    """What the first line must begin with: half of the smallest size's time, less what its bytes take.

    A byte of the smallest message takes no longer than one of the largest. Where small sizes are measured badly, a line
    through them may begin at nothing, and a plan made with it would send as many small messages as it can.
    """
    return max(0.0, min(times[:2]) / 2 - sizes[0] * times[-1] / max(1, sizes[-1]))


def _noise(sizes: list[int], times: list[float]) -> float:
    """How far measurements are off as a rule, relative: each compared to the line through its neighbours."""
    off = []
    for at in range(1, len(sizes) - 1):
        share = (sizes[at] - sizes[at - 1]) / (sizes[at + 1] - sizes[at - 1])
        expected = times[at - 1] + share * (times[at + 1] - times[at - 1])
        off.append(abs(math.log(times[at] / expected)))
    # 1.48: from the median to the standard deviation, for errors that are normal
    return min(_MOST_NOISE, max(_LEAST_NOISE, 1.48 * median(off))) if off else _LEAST_NOISE


def _meeting(left: int, right: int, before: _Line, after: _Line) -> int:
    """Where one segment gives way to the next: where their lines cross, or in the middle if that is elsewhere."""
    if before[1] != after[1]:
        crossing = (before[0] - after[0]) / (after[1] - before[1])
        if left <= crossing <= right:
            return max(left + 1, math.ceil(crossing))
    return max(left + 1, math.ceil(math.sqrt(left * right)))
