"""Workers that run the script, each in an interpreter of its own: where memory cannot be shared by fork (CUDA).

    first process ──fork──▶ zygote ──fork──▶ what is forked for one run: its coordinator
          ▲                         ──fork, exec──▶ the script, once per worker
          └───────────────── one link for each ──────────┘

The process that the user started trains nothing. It has the same command run anew for each worker; when the script
comes to the call that its first process is in, that process is a worker (`shoal.engines.here`). Such processes live on
from run to run, each in its seat, until the script ends.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from shoal.core.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, ConfigError, WorkerError
from shoal.engines.crew import Crew, Ended, Message
from shoal.engines.here import VARIABLE
from shoal.engines.local import LocalEngine
from shoal.engines.program import script
from shoal.engines.zygote import Body
from shoal.wire.link import Link

if TYPE_CHECKING:
    from typing_extensions import Buffer

_FAREWELL_SECONDS = 60.0
_KILLED_SECONDS = 10.0


def command() -> list[str]:
    """What starts this script again. Raises ConfigError where there is no script."""
    if script() is None or not os.path.exists(sys.argv[0]):
        raise ConfigError(
            "engine: start=script runs the script once per worker, but this process was not started from a file "
            "(a notebook, python -c, or a prompt); put the code into a file, or use engine='local:start=fork'"
        )
    return [sys.executable, *sys.orig_argv[1:]]


def become(again: Sequence[str], seat: int, link: Link, scratch: Path) -> NoReturn:
    """In a process just forked: run the script from its beginning, in its place.

    `RANK` is the number of the process among all that run the script: what a script does once, where it is 0 or not
    set, is left to the first one.
    """
    os.set_inheritable(link.fileno(), True)
    place = {
        VARIABLE: f"{seat}:{link.fileno()}:{os.getppid()}:{scratch}",
        "RANK": str(seat + 1),
        "LOCAL_RANK": str(seat),
    }
    os.execve(again[0], list(again), {**os.environ, **place})


class ScriptCrew:
    """The processes that run the script, seen from its first one. What `Crew` is to forked workers, run after run.

    For one thread at a time. Between `begin` and `finish` it is the crew of one run, whose processes are those that
    were added since; others wait for a run that has their seat, or are on the way to it.
    """

    def __init__(self, forked: int, body: Body, warm: Callable[[], None] | None = None) -> None:
        """In the seat `forked` is no script but `body`, forked as usual. Raises ConfigError if there is no script."""
        again = command()

        def main(seat: int, link: Link, scratch: Path) -> None:
            if seat == forked:
                body(seat, link, scratch)
            else:
                become(again, seat, link, scratch)

        self._crew: Crew = LocalEngine().open(main, warm=warm, lasting=True)
        self.scratch = self._crew.scratch
        self._forked = forked
        self._working: set[int] = set()
        self._waiting: set[int] = set()
        self._order = b""
        self._has_come: Callable[[int, int], bool] = lambda seat, pid: True

    # -- a run ---------------------------------------------------------------------------------------------------------

    def begin(self, order: bytes, has_come: Callable[[int, int], bool]) -> None:
        """From now on each process that is added is told `order`, which it finds when it comes to this run.

        `has_come(seat, pid)`: whether that process has come to it.
        """
        self._order, self._has_come = order, has_come

    def finish(self, returned: Collection[int], word: bytes) -> None:
        """The run is over: those who have returned, and those who had no part in it, are told `word` and go on.

        The rest is ended.
        """
        staying = (self._working & set(returned)) | self._waiting
        ending = self._working - staying
        for seat in ending:
            self._crew.kill(seat)
        for seat in staying:
            self._crew.send(seat, word)
        self._waiting, self._working = staying, ending
        self._await_ends(self._working, _KILLED_SECONDS)
        self._working.clear()

    def add(self, seat: int) -> None:
        """As `Crew.add`; a process that has this seat from a run before takes part."""
        if seat in self._waiting:
            self._waiting.discard(seat)
        else:
            self._crew.add(seat)
        self._working.add(seat)
        if seat != self._forked:
            self._crew.send(seat, self._order)

    def next(self, timeout: float | None) -> Message | Ended | None:
        """As `Crew.next`, of those that were added.

        Raises WorkerError if the script of one has ended, by itself, before it came to this run: so would another.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            arrival = self._crew.next(left)
            if arrival is None or arrival.worker in self._working:
                break
            if isinstance(arrival, Ended):
                self._waiting.discard(arrival.worker)
        if isinstance(arrival, Ended):
            self._working.discard(arrival.worker)
            self._refuse_other_way(arrival)
        return arrival

    def send(self, worker: int, header: bytes, buffers: Sequence[Buffer] = ()) -> None:
        self._crew.send(worker, header, buffers)

    def kill(self, worker: int) -> None:
        self._crew.kill(worker)

    def pids(self) -> dict[int, int]:
        return {seat: pid for seat, pid in self._crew.pids().items() if seat in self._working}

    # -- the end of the script -----------------------------------------------------------------------------------------

    def farewell(self, word: bytes) -> None:
        """The first process is at its end. The others may be busy with what the script does after training."""
        for seat in self._waiting:
            self._crew.send(seat, word)
        for end in self._await_ends(self._waiting, _FAREWELL_SECONDS):
            if end.code not in (0, EXIT_PREEMPTED, EXIT_INTERRUPTED):
                print(f"shoal: worker {end.worker} {_how(end)}", file=sys.stderr)
        for seat in sorted(self._waiting):
            told = f"goes on {_FAREWELL_SECONDS:g} s after the process that started it; ending it"
            print(f"shoal: worker {seat} {told}", file=sys.stderr)
        self.close()

    def close(self) -> None:
        self._crew.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _refuse_other_way(self, end: Ended) -> None:
        if end.worker == self._forked or end.code is None or self._has_come(end.worker, end.pid):
            return
        raise WorkerError(
            f"the script of worker {end.worker} {_how(end)} before it came to this call, which the process that you "
            "started is in: every process of the script must make the same calls of fit(), evaluate(), predict() and "
            "launch(), in the same order. What it said is printed above",
            worker=end.worker,
        )

    def _await_ends(self, seats: set[int], seconds: float) -> list[Ended]:
        """Wait for the ends of these, which are taken out of `seats`."""
        ends = []
        deadline = time.monotonic() + seconds
        while seats and (left := deadline - time.monotonic()) > 0:
            arrival = self._crew.next(left)
            if isinstance(arrival, Ended):
                for known in (self._waiting, self._working):
                    known.discard(arrival.worker)
                ends.append(arrival)
        return ends


def _how(end: Ended) -> str:
    if end.signal is not None:
        return f"was killed by {signal.Signals(end.signal).name}"
    return f"left with exit code {end.code}" if end.code is not None else f"was not started: {end.why}"
