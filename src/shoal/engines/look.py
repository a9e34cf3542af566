"""A look at a process that has fallen silent: does it live, does it compute, is it stopped?

A look is several samples, a few hundredths of a second apart, which the caller takes when it has its turn: nothing
here waits.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

GONE = "gone"
STOPPED = "stopped"
CUT = "cut"
SLOW = "slow"

_NO_TICK_SECONDS = 0.35  # ticks come every 0.1 s from a thread that has its turns
_TICKING_SECONDS = 0.3  # what a thread sends with its ticks arrives within that, if at all
_SWAPPING_SECONDS = 5.0
_SLEEPING_SECONDS = 60.0
_STALE_SECONDS = 10.0
# Threads that wait for the interpreter's lock wake up 200 times a second each, which takes a hundredth of a core.
_IDLE_TICKS_PER_SECOND = 0.1 * os.sysconf("SC_CLK_TCK")
_IDLE_TICKS = 2
_MARK_SECONDS = 1.0
_JUST_NOW_SECONDS = 1.0
_ENDED = "ZXx"
_HALTED = "Tt"
_UNINTERRUPTIBLE = "D"
_RUNNABLE = "R"


@dataclass(frozen=True)
class Sample:
    """What /proc tells of a process at one moment."""

    state: str
    """Of its main thread: one letter, as in /proc/PID/stat; Z if there is no such process."""
    computed: int
    """CPU time of all of its threads, in clock ticks."""


def sample(pid: int) -> Sample:
    """Never raises: a process that is not there has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return Sample("Z", 0)
    fields = text[text.rfind(")") + 1 :].split()  # the name before may hold anything
    return Sample(fields[0], int(fields[11]) + int(fields[12]))


def is_halted(pid: int) -> bool:
    """Whether a signal or a debugger has stopped it."""
    return sample(pid).state in _HALTED


class Look:
    """Looks at one process, for one thread. Keep it while the process stays silent: some verdicts need a minute."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._mark: tuple[int, float] | None = None  # the CPU time of a moment within the last second
        self._ticks = 0
        self._new = True
        self._asked = 0.0
        self._first_tick: float | None = None
        self._seen = 0.0
        self._ticked = 0.0
        self._progressed = 0.0

    def again(self) -> None:
        """A new question: an answer needs samples of its own from here on."""
        self._new = True

    def take(self, ticks: int, now: float) -> tuple[str, str] | None:
        """Take a sample; the verdict and what it rests on, for people, or None if it is too early for one.

        `ticks` is a number that grows whenever a certain thread of the process has its turn, which it wants every
        tenth of a second. `now` is in seconds of a clock that only grows.
        """
        found = sample(self.pid)
        if found.state in _ENDED:
            return GONE, "there is no such process any more"
        if found.state in _HALTED:
            return STOPPED, "a signal or a debugger has stopped it (state T)"
        if self._mark is None or now - self._seen > _STALE_SECONDS or ticks != self._ticks:
            self._mark = found.computed, now
            self._ticked = self._progressed = now
        elif self._computes(found, *self._mark, now):
            self._mark = found.computed, now
            self._progressed = now
        elif now - self._mark[1] > _MARK_SECONDS:
            self._mark = found.computed, now
        ticked = ticks != self._ticks and not self._new
        self._seen, self._ticks = now, ticks
        if self._new:
            self._new, self._asked, self._first_tick = False, now, None
            return None
        if ticked and self._first_tick is None:
            self._first_tick = now
        if self._first_tick is None:
            return self._without_ticks(found.state, now)
        if now - self._first_tick >= _TICKING_SECONDS:
            return CUT, "it lives and its threads have their turns, but nothing of it arrives"
        return None

    def _computes(self, found: Sample, computed: int, then: float, now: float) -> bool:
        idle = _IDLE_TICKS + _IDLE_TICKS_PER_SECOND * (now - then)
        return found.state == _RUNNABLE or found.computed - computed > idle

    def _without_ticks(self, state: str, now: float) -> tuple[str, str] | None:
        if now - self._asked < _NO_TICK_SECONDS or now - self._ticked < _NO_TICK_SECONDS:
            return None
        idle = now - self._progressed
        if state == _UNINTERRUPTIBLE:
            if idle >= _SWAPPING_SECONDS:
                return STOPPED, f"it has waited for the disk for {idle:.1f} s without computing (state D): swapping?"
            return None
        if idle >= _SLEEPING_SECONDS:
            return STOPPED, f"it has neither computed nor given its other threads a turn for {idle:.0f} s"
        if idle < _NO_TICK_SECONDS:
            return SLOW, "it computes, and does not let its other threads have a turn"
        return SLOW, "some call in it sleeps and holds the interpreter's lock"


class OutOfMemory:
    """Whether the kernel has just ended a process because memory ran out, of the machine or of a cgroup."""

    def __init__(self) -> None:
        self._count = _oom_kills()
        self._at = float("-inf")

    def look(self, now: float) -> None:
        """To be called often."""
        count = _oom_kills()
        if count > self._count:
            self._count, self._at = count, now

    def just_now(self, now: float) -> bool:
        self.look(now)
        return now - self._at < _JUST_NOW_SECONDS


def _oom_kills() -> int:
    """As often as the kernel tells; 0 where it does not."""
    for path in ("/proc/vmstat", "/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            lines = Path(path).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.strip().isdigit():
                return int(count)
    return 0
