"""How long a worker should wait for others before something is wrong: from what it has seen of its own times."""

from __future__ import annotations

from collections import deque
from statistics import median

from shoal.cluster.board import WAITING, Phase, Sight

LEAST_PATIENCE = 2.0
MOST_PATIENCE = 600.0
FIRST_PATIENCE = 60.0
"""Seconds, before a step was completed: compilers, caches and data sets warm up."""
_FACTOR = 10.0
_RECENT = 64

_OFF_COURSE = frozenset({Phase.STARTING, Phase.RECOVER, Phase.COPY, Phase.DONE})
"""In these the number of the step may jump."""


class Pace:
    """Looks at a place on the board, again and again, and knows the worker's patience. Of one thread."""

    def __init__(self) -> None:
        self._waits: deque[float] = deque(maxlen=_RECENT)
        self._steps: deque[float] = deque(maxlen=_RECENT)
        self._before: Sight | None = None
        self._step_since = 0.0

    @property
    def patience(self) -> float:
        """Seconds in a phase of waiting beyond which something is wrong."""
        if not self._steps:
            return FIRST_PATIENCE
        longest = max(self._waits, default=0.0)
        return min(MOST_PATIENCE, max(LEAST_PATIENCE, _FACTOR * longest, _FACTOR * median(self._steps)))

    def look(self, sight: Sight, now: float) -> None:
        """What the board says now. Times between two looks are known to the interval between looks."""
        before, self._before = self._before, sight
        if before is None or sight.term != before.term:
            self._step_since = now
            return
        if before.phase in WAITING and sight.since != before.since and sight.phase != Phase.RECOVER:
            self._waits.append(max(0.0, sight.since - before.since))
        if sight.step != before.step:
            if sight.step > before.step and before.phase not in _OFF_COURSE:
                self._steps.append((now - self._step_since) / (sight.step - before.step))
            self._step_since = now
