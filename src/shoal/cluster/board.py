"""The board: a little shared memory on which every worker of this machine writes where it is.

It is read by others after a worker's death, and while one is silent. Made before the fork, and then the kernel frees it
with the last process; or in a file that others open. Each number is
written by one thread of one process; a reader may see some of them before others.
"""

from __future__ import annotations

import enum
import mmap
import time
from dataclasses import dataclass
from pathlib import Path

from shoal.engines.activity import NOTHING, Activity, Doing
from shoal.engines.activity import WORDS as _ACTIVITY_WORDS


class Phase(enum.IntEnum):
    """What a worker's main thread does."""

    STARTING = 0
    COMPUTE = 1
    EXCHANGE = 2
    APPLY = 3
    RECOVER = 4
    COPY = 5
    EVALUATE = 6
    CHECKPOINT = 7
    DONE = 8


WAITING = frozenset({Phase.EXCHANGE, Phase.COPY})
"""Phases in which a worker waits for other members."""

_WORDS = 16
_PID, _TERM, _STEP, _PHASE, _SINCE, _START, _STOP, _TICK = range(8)
_ACTIVITY = slice(8, 8 + _ACTIVITY_WORDS)
_EXCHANGES = 8 + _ACTIVITY_WORDS
_REDOABLE = _EXCHANGES + 1


@dataclass(frozen=True)
class Sight:
    """What the board says of one seat."""

    pid: int
    term: int
    step: int
    phase: Phase
    since: float
    """When that phase began, by `time.monotonic`."""
    positions: tuple[int, int] | None
    """The first and last position of the step that it computes."""
    ticks: int
    """Grows while the thread that beats has its turns."""
    doing: Doing = NOTHING
    """Which of the user's functions it is in, where that is known better than by the phase."""
    exchanges: int = 0
    """How often it has begun to exchange something with all others in this term: those that have done the same have the
    same."""
    redoable: bool = False
    """Whether what it does can be done again, by others or by another process in its place."""


class Board:
    """Places for so many seats. That of a seat is also that of the seat so many later."""

    def __init__(self, seats: int, path: Path | None = None) -> None:
        """With `path`, in that file: made by the first who opens it, and emptied by nobody."""
        self.seats = seats
        size = max(1, seats) * _WORDS * 8
        if path is None:
            self._memory = mmap.mmap(-1, size)
        else:
            with open(path, "ab") as file:
                file.truncate(size)
            with open(path, "r+b") as file:
                self._memory = mmap.mmap(file.fileno(), size)
        self._words = memoryview(self._memory).cast("q")

    def place(self, seat: int) -> Place:
        """For the worker in this seat to write."""
        return Place(self._of(seat))

    def see(self, seat: int) -> Sight:
        return _sight(self._of(seat))

    def _of(self, seat: int) -> memoryview:
        at = seat % self.seats * _WORDS
        return self._words[at : at + _WORDS]


class Place:
    """One worker's place on the board. `tick` is for the thread that beats, the rest for the main thread."""

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self.activity = Activity(words[_ACTIVITY])

    def begin(self, pid: int) -> None:
        """A new process has this place."""
        for at in range(_WORDS):
            self._words[at] = 0
        self._words[_SINCE] = time.monotonic_ns()
        self._words[_PID] = pid

    def term(self, number: int) -> None:
        self._words[_TERM] = number
        self._words[_EXCHANGES] = 0

    def redoable(self, on: bool) -> None:
        """Whether this worker's death is survived, from now on."""
        self._words[_REDOABLE] = on

    def enter(self, phase: Phase, step: int) -> None:
        words = self._words
        if phase is Phase.EXCHANGE:
            # before the phase: who sees that it waits knows in which of them
            words[_EXCHANGES] += 1
        words[_STEP] = step
        words[_PHASE] = phase
        words[_SINCE] = time.monotonic_ns()

    def done(self) -> None:
        """There is nothing left to do but to end."""
        self.enter(Phase.DONE, self._words[_STEP])

    def computes(self, start: int, stop: int) -> None:
        """The positions of the step that this worker computes: start … stop−1."""
        self._words[_START] = start
        self._words[_STOP] = stop

    def tick(self) -> None:
        self._words[_TICK] += 1

    def sight(self) -> Sight:
        """What others see here. Any thread."""
        return _sight(self._words)


def _sight(words: memoryview) -> Sight:
    start, stop = words[_START], words[_STOP]
    return Sight(
        pid=words[_PID],
        term=words[_TERM],
        step=words[_STEP],
        phase=Phase(words[_PHASE]),
        since=words[_SINCE] * 1e-9,
        positions=(start, stop - 1) if stop > start else None,
        ticks=words[_TICK],
        doing=Activity(words[_ACTIVITY]).see(),
        exchanges=words[_EXCHANGES],
        redoable=bool(words[_REDOABLE]),
    )
