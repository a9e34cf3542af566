"""Where membership is fixed: a thread in each worker says so when the worker has waited for others for too long.

One that waits for a worker which has finished would wait in vain: its wait is ended.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal.comm.strings import SAME_ORDER
from shoal.core.traces import stack_of
from shoal.elastic.board import WAITING, Board, Phase, Sight
from shoal.elastic.pace import Pace
from shoal.elastic.waits import call_in_words, doing
from shoal.engines.activity import Call
from shoal.engines.look import is_halted

_LOOK_SECONDS = 0.5
_CLOSE_SECONDS = 2.0
_SURE_LOOKS = 3
"""In all of which a worker is in the same wait before it is ended. Looks, not seconds: in a process that was stopped,
this thread has its turn before what has arrived meanwhile is seen."""


class Vigil:
    """Watches the board from one worker. `tell` is called from the thread, with what a person should know.

    So is `end`, with a reason, to end a wait in vain. `within` says in words what the worker waits in, if it can.
    """

    def __init__(
        self,
        board: Board,
        worker: int,
        workers: int,
        limit: float,
        tell: Callable[[str], None],
        end: Callable[[str], None],
        within: Callable[[], str] = str,
    ) -> None:
        self._board = board
        self._worker = worker
        self._workers = workers
        self._limit = limit
        self._tell = tell
        self._end = end
        self._within = within
        self._vain = 0, 0
        self._pace = Pace()
        self._told = -1
        self._main = threading.get_ident()
        self._ended = threading.Event()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within: the thread looks. For the thread that waits."""
        thread = threading.Thread(target=self._keep, name="shoal-vigil", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join(_CLOSE_SECONDS)

    def _keep(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """See whether this worker has waited for too long, and say so, once per step; and whether in vain."""
        mine = self._board.see(self._worker)
        self._pace.look(mine, now)
        finished = self._finished_before(mine)
        if finished:
            self._look_at_vain(mine, finished)
            return
        waited = now - mine.since
        if mine.phase not in WAITING or waited <= self._pace.patience or mine.step == self._told:
            return
        others = {other: self._board.see(other) for other in range(self._workers) if other != self._worker}
        late = {other: sight for other, sight in others.items() if sight.phase not in WAITING}
        if any(other < self._worker for other in others.keys() - late.keys()):
            return  # one that waits as well tells it
        self._told = mine.step
        self._tell(self._text(mine, late, waited, now))

    def _finished_before(self, mine: Sight) -> list[int]:
        """The workers that this one waits for, and that have finished without having begun the same."""
        if mine.phase is not Phase.EXCHANGE:
            return []
        sights = {other: self._board.see(other) for other in range(self._workers) if other != self._worker}
        return [
            other for other, sight in sights.items() if sight.phase is Phase.DONE and sight.exchanges < mine.exchanges
        ]

    def _look_at_vain(self, mine: Sight, finished: list[int]) -> None:
        exchange, looks = self._vain
        looks = looks + 1 if exchange == mine.exchanges else 1
        self._vain = mine.exchanges, looks
        if looks == _SURE_LOOKS:
            where = self._within() or f"the exchange of step {mine.step + 1}"
            whom = " and ".join(f"worker {other}" for other in finished)
            have = "has" if len(finished) == 1 else "have"
            self._end(f"worker {self._worker} waits in {where} for {whom}, which {have} finished; {SAME_ORDER}")

    def _text(self, mine: Sight, late: dict[int, Sight], waited: float, now: float) -> str:
        whom = ", ".join(f"worker {other}" for other in late) or "the others, which all wait as well"
        places = "; ".join(_place(other, sight, now) for other, sight in late.items())
        frame = sys._current_frames().get(self._main)
        stack = f"\nworker {self._worker} waits here:\n{stack_of(frame)}" if frame is not None else ""
        if any(sight.doing.call is not Call.NONE for sight in late.values()):
            stack = ""  # what it waits for is known better than by that
        return (
            f"worker {self._worker} has waited {waited:.1f} s for {whom} in step {mine.step + 1} (this run usually "
            f"waits less than {self._pace.patience:.1f} s){': ' if places else ''}{places}. It waits for up to "
            f"{self._limit / 60:.0f} minutes: the number of workers is fixed. With min_workers=, one that stands still "
            f"would be replaced.{stack}"
        )


def _place(worker: int, sight: Sight, now: float) -> str:
    if sight.pid and is_halted(sight.pid):
        return f"worker {worker} is stopped (process {sight.pid}; kill -CONT {sight.pid} lets it go on)"
    if sight.doing.call is not Call.NONE:
        return f"worker {worker} is {call_in_words(sight)}"
    return f"worker {worker} {doing(sight.phase, sight.step)} (for {now - sight.since:.1f} s)"
