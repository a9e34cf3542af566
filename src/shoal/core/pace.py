"""How fast a worker is, and how work is dealt so that all end together: pure arithmetic."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import inf

FAR = 2.0
"""A measurement this many times above or below what was expected is believed only if the next one says the same."""


@dataclass(slots=True)
class Estimate:
    """A running mean (half of it is the newest measurement) that one odd measurement does not move.

    Two odd ones in a row, on the same side, replace it. The first measurement has no such protection from the second:
    it contains what a process does only once.
    """

    value: float | None = None
    count: int = 0
    odd: float | None = None

    def add(self, measured: float) -> None:
        self.count += 1
        value, odd, self.odd = self.value, self.odd, None
        if value is None:
            self.value = measured
        elif value / FAR <= measured <= value * FAR:
            self.value = (value + measured) / 2
        elif self.count == 2:
            self.value = measured
        elif odd is not None and (odd > value) == (measured > value):
            self.value = (odd + measured) / 2
        else:
            self.odd = measured


class Lately:
    """The middle one of the latest measurements, once there are enough: a busy moment does not move it."""

    ENOUGH = 16

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=self.ENOUGH)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    @property
    def full(self) -> bool:
        return len(self._seconds) == self.ENOUGH

    @property
    def median(self) -> float:
        return sorted(self._seconds)[len(self._seconds) // 2]


def level(amount: float, hands: Sequence[tuple[float, float]]) -> tuple[float, list[float]]:
    """Deal `amount` to hands of (start, speed) so that all end at the same time: that time, and each one's part.

    A hand that starts later than that gets nothing. A start may be infinite, if not all are.
    """
    begun = 0.0
    """The sum of start × speed over those that take part."""
    speeds = 0.0
    end = inf
    for start, speed in sorted(hands):
        if start >= end:
            break
        begun += start * speed
        speeds += speed
        end = (amount + begun) / speeds
    return end, [max(0.0, end - start) * speed for start, speed in hands]


def deal(amount: int, hands: Sequence[tuple[float, float]]) -> tuple[float, list[int]]:
    """Deal whole things to hands of (start, speed), each to the one that ends soonest with it: when the last is done,
    and how many each hand has. No other way ends earlier."""
    counts = [0] * len(hands)
    end = min(start for start, _ in hands)
    heap = [(start + 1 / speed, number) for number, (start, speed) in enumerate(hands)]
    heapify(heap)
    for _ in range(amount):
        end, number = heap[0]
        counts[number] += 1
        heapreplace(heap, (end + 1 / hands[number][1], number))
    return end, counts


def last(size: float, amount: float, hands: Sequence[tuple[float, float]]) -> float:
    """When the last of all hands is done, if the first one has so much of the amount, and the others share the rest."""
    start, speed = hands[0]
    return max(start + size / speed if size else start, level(amount - size, hands[1:])[0])


def nearest(part: float, amount: int, hands: Sequence[tuple[float, float]]) -> int:
    """The first hand's part in whole things: up or down, whichever has the last of all hands end earlier."""
    close, other = sorted((int(part), min(amount, int(part) + 1)), key=lambda size: abs(size - part))
    return other if last(other, amount, hands) < last(close, amount, hands) - 1e-9 else close
