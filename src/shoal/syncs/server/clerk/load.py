"""How fast servers apply what they have, measured: a busy or slow host shows in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shoal.syncs.server.messages import Holder

PAUSE_SECONDS = 30.0
"""Between two times that shards may move because of what was measured. Infinite: never."""
GAIN = 0.2
"""The part of the slowest server's time that a move has to save."""
LEAST_SHARE = 0.05
"""Of the time. If no server is busy with applying for so much of it, it is not worth a move."""
LEAST_STEPS = 20


class Load:
    """What servers took to apply steps since it was last looked at."""

    def __init__(self, bytes_by_shard: Sequence[int]) -> None:
        self._sizes = bytes_by_shard
        self._seconds: dict[int, float] = {}
        self._bytes: Counter[int] = Counter()
        self._steps: Counter[int] = Counter()
        self._began: float | None = None
        self._window = 0.0
        self.speeds: dict[int, float] | None = None
        """By which shards are placed; None: servers count as equal."""

    def applied(self, number: int, seconds: float, holders: Sequence[Holder]) -> None:
        self._steps[number] += 1
        self._seconds[number] = self._seconds.get(number, 0.0) + seconds
        self._bytes[number] += sum(
            size for holder, size in zip(holders, self._sizes, strict=True) if number in (holder.server, holder.mirror)
        )

    def due(self, now: float) -> bool:
        if self._began is None:
            self._began = now
        self._window = now - self._began
        if self._window < PAUSE_SECONDS:
            return False
        self._began = now
        return True

    def measure(self, numbers: Sequence[int]) -> dict[int, float] | None:
        """Bytes a second of each server, over their mean, since the last time; None if that says too little."""
        seconds, amounts, steps = self._seconds, self._bytes, self._steps
        self._seconds, self._bytes, self._steps = {}, Counter(), Counter()
        there = [number for number in numbers if steps[number] >= LEAST_STEPS and amounts[number]]
        busiest = max((seconds[number] for number in there), default=0.0)
        if len(there) < 2 or busiest < LEAST_SHARE * self._window:
            return None
        speeds = {number: amounts[number] / max(seconds[number], 1e-9) for number in there}
        mean = sum(speeds.values()) / len(speeds)
        return {number: speed / mean for number, speed in speeds.items()}
