"""What people are told of a run's servers, and of how stale gradients were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.core.events import ServerFacts, ServersSeen
from shoal.syncs.server.clerk.places import Places
from shoal.syncs.server.messages import Applied

MOST_STALE = 16
"""Gradients that lacked so many steps, or more, are counted together."""
_FIRST_SECONDS, _MOST_SECONDS = 1.0, 60.0
"""Between two times that it is told: ever longer, since each is kept."""


class Seen:
    """Counts, and says when it is time to tell."""

    def __init__(self) -> None:
        self._stale = [0] * (MOST_STALE + 1)
        self._seconds: dict[int, float] = {}
        self._pause = _FIRST_SECONDS
        self._next = 0.0
        self.replaced = 0

    def pushed(self, lacked: int) -> None:
        """A gradient counted that was computed without so many steps before its own."""
        self._stale[min(max(lacked, 0), MOST_STALE)] += 1

    def applied(self, number: int, seconds: float) -> None:
        self._seconds[number] = self._seconds.get(number, 0.0) + seconds

    def only(self, numbers: Sequence[int]) -> None:
        """Others than these servers have left."""
        self._seconds = {number: seconds for number, seconds in self._seconds.items() if number in numbers}

    def due(self, now: float) -> bool:
        if now < self._next:
            return False
        if self._next:
            self._pause = min(1.5 * self._pause, _MOST_SECONDS)
        self._next = now + self._pause
        return True

    def event(self, step: int, places: Places, applied: Mapping[int, Applied]) -> ServersSeen:
        last = max((lacked for lacked, count in enumerate(self._stale) if count), default=-1)
        facts = [self._facts(number, places, applied.get(number)) for number in places.numbers if number in places.pids]
        return ServersSeen(step=step, servers=facts, staleness=self._stale[: last + 1], replaced=self.replaced)

    def _facts(self, number: int, places: Places, told: Applied | None) -> ServerFacts:
        held = places.held_by(number)
        return ServerFacts(
            number,
            shards=len(held),
            bytes=sum(places.sizes[shard] for shard in held),
            mirrored=sum(holder.mirror == number for holder in places.holders),
            pushes=0 if told is None else told.pushes,
            repeated=0 if told is None else told.repeated,
            received=0 if told is None else told.received,
            sent=0 if told is None else told.sent,
            seconds=self._seconds.get(number, 0.0),
            pid=places.pids.get(number, 0),
            host=places.hosts.get(number, ""),
        )
