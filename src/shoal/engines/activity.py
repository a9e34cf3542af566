"""Which of the user's functions a process is in: a few numbers, in memory that others may share and look at.

They are written for every item that is fetched, so no clock is read for them: whoever looks sees when they change.
"""

from __future__ import annotations

import enum
import mmap
from typing import NamedTuple

WORDS = 5
_PID, _CALL, _SOURCE, _ITEM, _TURN = range(WORDS)
_SOURCES = ("data", "eval_data")


class Call(enum.IntEnum):
    """What is called to make a batch."""

    NONE = 0
    ITEM = 1
    ITEMS = 2
    """All of a batch at once: `__getitems__`."""
    COLLATE = 3


class Doing(NamedTuple):
    """What one look sees. As long as two looks see the same, nothing has gone on."""

    pid: int
    """The process that does it, where that is a child of the worker; else 0."""
    call: Call
    source: str
    item: int
    """The index of the item, or of the first one."""
    turn: int
    """Grows when something was done."""


NOTHING = Doing(0, Call.NONE, _SOURCES[0], 0, 0)


class Activity:
    """Written by one thread. Any process that has the memory may look."""

    def __init__(self, words: memoryview | None = None) -> None:
        """In `words`, so many 64-bit numbers that are zero; without, nobody else sees it."""
        self._words = memoryview(bytearray(8 * WORDS)).cast("q") if words is None else words

    @classmethod
    def shared(cls) -> Activity:
        """Seen by processes that are forked from now on, and by this one what they write."""
        return cls(memoryview(mmap.mmap(-1, 8 * WORDS)).cast("q"))

    def enter(self, call: Call, source: str, item: int = 0) -> None:
        words = self._words
        words[_ITEM] = item
        words[_SOURCE] = int(source == _SOURCES[1])
        words[_CALL] = call

    def at(self, item: int) -> None:
        """The next item of those that were entered."""
        self._words[_ITEM] = item

    def done(self) -> None:
        words = self._words
        words[_CALL] = Call.NONE
        words[_TURN] += 1

    def leave_to(self, pid: int) -> None:
        """From now on, this process does it; 0 for the worker itself."""
        self._words[_PID] = pid

    def show(self, pid: int, other: Activity) -> None:
        """This one waits for another process, which does what its own activity says."""
        words, theirs = self._words, other._words
        for word in (_CALL, _SOURCE, _ITEM):
            words[word] = theirs[word]
        words[_PID] = pid

    def see(self) -> Doing:
        words = self._words
        return Doing(words[_PID], Call(words[_CALL]), _SOURCES[words[_SOURCE]], words[_ITEM], words[_TURN])
