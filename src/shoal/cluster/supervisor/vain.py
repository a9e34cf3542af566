"""A worker that waits for one which has finished waits in vain: the supervisor sees both on the board."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.cluster.board import Board, Phase, Sight
from shoal.cluster.supervisor.stuck import Asking
from shoal.core.errors import SAME_ORDER, GroupError

_LOOK_SECONDS = 0.4
_SURE_LOOKS = 3
"""In all of which a worker is in the same wait. Looks, not seconds: in a process that was stopped, what has arrived
meanwhile is seen only after its threads have had their turns."""


class Vain:
    """Looks at the workers of a run, some of which have returned. For one thread."""

    def __init__(self, board: Board, stacks: Asking) -> None:
        self._board = board
        self._stacks = stacks
        self._looked = 0.0
        self._seen: dict[int, tuple[int, int]] = {}
        """Of workers that wait in vain: in which of their exchanges, and in how many looks."""

    def look(self, members: Sequence[int], now: float) -> None:
        """To be called often. Raises GroupError if a wait has no end."""
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        sights = {seat: self._board.see(seat) for seat in members}
        for seat, sight in sights.items():
            finished = [other for other, its in sights.items() if other != seat and _has_left(its, sight)]
            if sight.phase is not Phase.EXCHANGE or not finished:
                self._seen.pop(seat, None)
                continue
            exchange, looks = self._seen.get(seat, (sight.exchanges, 0))
            self._seen[seat] = sight.exchanges, looks + 1 if exchange == sight.exchanges else 1
            if self._seen[seat][1] >= _SURE_LOOKS:
                raise GroupError(self._text(seat, sight, finished))

    def _text(self, seat: int, sight: Sight, finished: Sequence[int]) -> str:
        whom = " and ".join(f"worker {other}" for other in finished)
        have = "has" if len(finished) == 1 else "have"
        stack = self._stacks.ask(sight.pid)
        where = f"\nworker {seat} is here:\n{stack}" if stack else ""
        return f"worker {seat} waits for {whom}, which {have} finished; {SAME_ORDER}{where}"


def _has_left(other: Sight, waiting: Sight) -> bool:
    """Whether one has finished in the same term without having begun what the other waits in."""
    return other.phase is Phase.DONE and other.term == waiting.term and other.exchanges < waiting.exchanges
