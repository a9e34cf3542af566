"""Planning the exchange: how large should buckets be? Pure: figures in, decision out.

Two things pull in opposite directions. Each sum has a latency, so few are better; and what leaves early is under way
while backward still runs, so small ones are better. How much better depends on the group: where sums run in the
background waiting for them is hidden; where they run in the calling thread they delay it, but a part that was just
copied is still in the processor's cache. None of this is assumed: costs are measured, and the end of the exchange is
predicted for every size in question.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from math import inf
from typing import NamedTuple

SMALLEST = 256 << 10
"""Gradients of fewer bytes than this are never split: no link gains by it."""
UNDIVIDED = 1 << 62
"""The cap of one bucket for everything (of one kind)."""
CAPS = (*(SMALLEST << doubling for doubling in range(9)), UNDIVIDED)
"""The caps in question, in bytes: 256 KB, 512 KB, … 64 MB, and no cap."""

_HOOK_SECONDS = 2e-6
"""What the hook of a parameter costs in backward; there are none if there is one bucket."""
_RELATIVE_SLACK = 0.02
_SLACK_SECONDS = 20e-6
"""Differences below these are noise; of equal plans the one with the fewest operations is best."""
_MANY = 4
"""With so many buckets most leave early."""
_CLOSE = 1.25
"""Predictions whose quotient is less than this do not decide between one bucket and several."""


class Gradient(NamedTuple):
    """One parameter's gradient."""

    size: int
    """In bytes."""
    kind: Hashable = None
    """Only gradients of one kind (dtype, device) fit in one bucket."""
    ready: float = 0.0
    """Seconds since backward began when it is complete."""


class Costs(NamedTuple):
    """What sums cost, as measured."""

    points: Sequence[tuple[int, float]]
    """Sizes in bytes, rising, and seconds that one sum of this size takes."""
    overlap: float = 0.0
    """How much of a sum's time the calling thread can compute in, from 0 to 1."""

    @property
    def latency(self) -> float:
        """Seconds that the smallest sum takes."""
        return self.of(0)

    def of(self, size: int) -> float:
        """Seconds for one sum of so many bytes: on lines through the points, and never more than for more bytes.

        Where a point says otherwise it was measured while the machine did something else.
        """
        after = bisect_left(self.points, (size, 0.0))
        seconds = min((seconds for _, seconds in self.points[after:]), default=inf)
        if after == 0:
            return seconds
        if after == len(self.points):
            return self._beyond(size)
        before = self.points[after - 1][0], min(self.points[after - 1][1], seconds)
        return _on_line(before, (self.points[after][0], seconds), size)

    def _beyond(self, size: int) -> float:
        last, most = self.points[-1]
        if len(self.points) == 1:
            return most * size / max(1, last)
        # From the first point, not the one before: noise in a short line would be multiplied.
        return _on_line((self.points[0][0], self.latency), self.points[-1], size)


class Choice(NamedTuple):
    """A cap, and whether it is about as good as having one bucket, as far as can be predicted."""

    cap: int
    close: bool


class Settled(NamedTuple):
    """How gradients are summed from now on; equal on all members."""

    latency: float
    """Seconds that the smallest sum takes."""
    bandwidth: float
    """Bytes of gradient summed per second in buckets of these sizes."""
    buckets: list[int]
    """Bytes of each bucket, in the order in which they leave."""
    codec: str = "none"
    encoding: float = 0.0
    """Seconds a step that encoding and decoding take."""
    saved: float = 0.0
    """Seconds a step that a sum as it is would take longer than the encoded one."""
    note: str = ""
    """What people should know of it."""


def lay(gradients: Sequence[Gradient], cap: int) -> list[list[int]]:
    """Places in `gradients` (which are in the order of arrival), put into buckets of one kind and at most `cap` bytes.

    A gradient larger than that has a bucket of its own. Buckets are in the order in which they become complete.
    """
    buckets: list[list[int]] = []
    open_ones: dict[Hashable, tuple[list[int], int]] = {}
    for place, gradient in enumerate(gradients):
        bucket, filled = open_ones.get(gradient.kind, ([], 0))
        if not bucket or filled + gradient.size > cap:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(place)
        open_ones[gradient.kind] = bucket, filled + gradient.size
    return sorted(buckets, key=lambda bucket: bucket[-1])


def parts(count: int, most: int, line: int = 1) -> list[int]:
    """`count` elements in as few parts of at most `most` as possible, about equal, multiples of `line` but the last.

    (Where `most` is not a multiple of it, parts may be longer by less than a line.)
    """
    number = max(1, -(-count // max(1, most)))
    each = max(1, -(-count // (number * line)) * line)
    whole, rest = divmod(count, each)
    return [each] * whole + [rest] * (rest > 0 or whole == 0)


def predict(
    gradients: Sequence[Gradient], cap: int, costs: Costs, backward: float, *, during_backward: bool = True
) -> float:
    """Seconds from the beginning of backward, which takes `backward` alone, until all is summed.

    Buckets leave in their order, the last one when backward is over, and the link sums one after the other. What of a
    sum does not overlap delays backward. Unless `during_backward`, all leave when it is over.
    """
    buckets = lay(gradients, cap)
    delay = _HOOK_SECONDS * len(gradients) if during_backward and len(buckets) > 1 else 0.0
    complete = 0.0 if during_backward else backward
    free = 0.0
    for number, bucket in enumerate(buckets):
        last = number + 1 == len(buckets)
        complete = max([complete, *(gradients[place].ready for place in bucket), backward if last else 0.0])
        for seconds in _sums(gradients, bucket, cap, costs):
            free = max(free, complete + delay) + seconds
            delay += (1.0 - costs.overlap) * seconds
    return max(free, backward + delay)


def choose(gradients: Sequence[Gradient], costs: Costs, backward: float, *, during_backward: bool = True) -> Choice:
    """The cap with which all is predicted to be summed first; the largest of those that are as good.

    Leaving early has effects that no measurement of sums shows: memory of gradients that have left is used again while
    it is in the cache. So where one bucket and so many that most leave early are predicted to end at about the same
    time, many are chosen, and the call is close: steps have to tell.
    """
    total = sum(gradient.size for gradient in gradients)
    ends = {
        cap: predict(gradients, cap, costs, backward, during_backward=during_backward)
        for cap in CAPS
        if cap < total and total > SMALLEST
    }
    undivided = predict(gradients, UNDIVIDED, costs, backward, during_backward=during_backward)
    if not ends:
        return Choice(UNDIVIDED, close=False)
    cap = _largest_good({cap: end for cap, end in ends.items() if _MANY * cap <= total} or ends, backward)
    if during_backward and max(undivided, ends[cap]) < _CLOSE * min(undivided, ends[cap]):
        return Choice(cap, close=True)
    return Choice(_largest_good({**ends, UNDIVIDED: undivided}, backward), close=False)


def _largest_good(ends: Mapping[int, float], backward: float) -> int:
    best = min(ends.values())
    enough = best + _SLACK_SECONDS + _RELATIVE_SLACK * max(0.0, best - backward)
    return max(cap for cap, end in ends.items() if end <= enough)


def settle(gradients: Sequence[Gradient], cap: int, costs: Costs) -> Settled:
    """What buckets of this cap amount to."""
    buckets = lay(gradients, cap)
    sizes = [sum(gradients[place].size for place in bucket) for bucket in buckets]
    seconds = sum(second for bucket in buckets for second in _sums(gradients, bucket, cap, costs))
    return Settled(costs.latency, sum(sizes) / seconds if seconds > 0 else 0.0, sizes)


def _sums(gradients: Sequence[Gradient], bucket: Sequence[int], cap: int, costs: Costs) -> list[float]:
    size = sum(gradients[place].size for place in bucket)
    number = len(parts(size, cap))
    return [costs.of(size // number)] * number


def _on_line(one: tuple[int, float], other: tuple[int, float], size: int) -> float:
    slope = (other[1] - one[1]) / max(1, other[0] - one[0])
    return one[1] + slope * (size - one[0])
