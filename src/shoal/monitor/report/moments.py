"""What happened in a run that is worth a line in its report, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec


class Moment(msgspec.Struct):
    """Something worth listing."""

    time: float
    step: int
    kind: str
    """start, resume, exchange, notice, evaluation, checkpoint, best, end or failure."""
    text: str
    times: int = 1
    order: int = 0
    """Of arrival."""


class Kept:
    """The first and the last moments of many; those between are counted."""

    def __init__(self, most: int) -> None:
        self._early: list[Moment] = []
        self._late: deque[Moment] = deque(maxlen=most // 2)
        self._most_early = most - most // 2
        self.left_out = 0

    def add(self, moment: Moment) -> None:
        if len(self._early) < self._most_early:
            self._early.append(moment)
            return
        self.left_out += len(self._late) == self._late.maxlen
        self._late.append(moment)

    def __iter__(self) -> Iterator[Moment]:
        yield from self._early
        yield from self._late
