"""Code of the user's that does not return: which worker is in it, since when, and where, for people.

The supervisor looks at the board, and asks for a stack. Neither needs a thread of the worker to have its turn.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from shoal.cluster.board import Board, Sight
from shoal.cluster.roster.waits import call_in_words
from shoal.cluster.supervisor.calling import CALL_SECONDS, STOPPING_SECONDS
from shoal.engines.activity import Call
from shoal.engines.look import is_halted, sample

FETCH_SECONDS = 20.0
MOST_SECONDS = 600.0
_FACTOR = 10.0
"""Nothing is said of what takes less than so many times as long as the same did before."""
_LOOK_SECONDS = 0.5
_AWAY_SECONDS = 5.0
"""Between two looks: the supervisor was kept from looking, and perhaps workers from being heard."""
_MOST_STACKS = 3
_UNINTERRUPTIBLE = "D"
_LOCK = re.compile(r"(?<![a-z])r?lock|acquire", re.IGNORECASE)


class Asking(Protocol):
    """`shoal.engines.stacks.Stacks`, as far as it is needed."""

    def ask(self, pid: int) -> str:
        """The stack of a process, or "" if it cannot be had."""


@dataclass
class _Seen:
    """A worker, and what it has been seen in since."""

    worker: int
    sight: Sight
    since: float
    told: bool = False

    @property
    def call(self) -> str | None:
        return call_in_words(self.sight)

    @property
    def fetches(self) -> bool:
        return self.sight.doing.call is not Call.NONE

    @property
    def pid(self) -> int:
        return self.sight.doing.pid or self.sight.pid

    def words(self, now: float) -> str:
        where = f" (process {self.pid})" if self.sight.doing.pid else ""
        return f"{self.call}{where} for {now - self.since:.0f} s"


class Stuck:
    """Looks at the workers in `seats()`. `tell` is called from `look`, with what a person should know."""

    def __init__(
        self, board: Board, stacks: Asking, seats: Callable[[], Iterable[int]], tell: Callable[[str], None]
    ) -> None:
        self._board = board
        self._stacks = stacks
        self._seats = seats
        self._tell = tell
        self._seen: dict[int, _Seen] = {}
        self._longest = {True: 0.0, False: 0.0}  # by whether it fetches
        self._looked: float | None = None
        self._stopping: str | None = None

    def look(self, now: float) -> None:
        """To be called often. Says once of each call that it does not return."""
        if self._looked is not None and now - self._looked < _LOOK_SECONDS:
            return
        self._see_all(now)
        late = [seen for seen in self._seen.values() if not seen.told and now - seen.since > self._patience(seen)]
        if late:
            self._tell_of(late, now)
        if self._stopping == "" and (text := self._waits(now, 2 * STOPPING_SECONDS)):
            self._stopping = text
            self._tell(text)

    def stopping(self, now: float) -> str:
        """Somebody wants the run to end: what it waits for; "" if that is not known yet, and it is told later."""
        if self._stopping is None:
            self._see_all(now)
            self._stopping = self._waits(now, STOPPING_SECONDS)
        return self._stopping

    def where(self, now: float) -> str:
        """What the workers are in, with stacks: the last words of a run that is ended at once. "" if in nothing."""
        lasting = self._lasting(now, STOPPING_SECONDS)
        lines = [f"worker {seen.worker} was {seen.words(now)}:\n{self._stack(seen)}" for seen in lasting[:_MOST_STACKS]]
        lines += [f"worker {seen.worker} was {seen.words(now)}" for seen in lasting[_MOST_STACKS:]]
        return "\n".join(lines)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Within: a `KeyboardInterrupt` is given a note of where the workers were."""
        try:
            yield
        except KeyboardInterrupt as error:
            # a callback that was interrupted is what the run waited for, and has said so
            text = "" if getattr(error, "__notes__", None) else self.where(time.monotonic())
            if text:
                error.add_note(text)
            raise

    # -- inside --------------------------------------------------------------------------------------------------------

    def _see_all(self, now: float) -> None:
        away = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        before, self._seen = self._seen, {}
        for seat in self._seats():
            sight = replace(self._board.see(seat), ticks=0)  # which grow, whatever the main thread does
            if not sight.pid:
                continue
            known = before.get(seat)
            if known is not None and known.sight == sight:
                known.since += away if away > _AWAY_SECONDS else 0.0
                self._seen[seat] = known
                continue
            if known is not None and known.call is not None and away <= _AWAY_SECONDS:
                self._longest[known.fetches] = max(self._longest[known.fetches], now - known.since)
            self._seen[seat] = _Seen(seat, sight, now)

    def _patience(self, seen: _Seen) -> float:
        if seen.call is None:
            return float("inf")
        least = FETCH_SECONDS if seen.fetches else CALL_SECONDS
        return min(MOST_SECONDS, max(least, _FACTOR * self._longest[seen.fetches]))

    def _tell_of(self, late: list[_Seen], now: float) -> None:
        """All of them at once: what holds one worker up often holds all."""
        for seen in self._seen.values():
            if seen not in late and seen.call is not None and now - seen.since > self._patience(seen) / 2:
                late.append(seen)
        for seen in late:
            seen.told = True
        late = [seen for seen in late if not is_halted(seen.sight.pid)]  # of these, those who wait for them tell
        if not late:
            return
        first, *others = late
        text = f"worker {first.worker} has been {first.words(now)}"
        text += "".join(f", worker {seen.worker} {seen.words(now)}" for seen in others)
        self._tell(f"{text}. Worker {first.worker} is here:\n{self._stack(first)}")

    def _lasting(self, now: float, seconds: float) -> list[_Seen]:
        """Those that are in a call for so long, the longest first."""
        lasting = [seen for seen in self._seen.values() if seen.call is not None and now - seen.since >= seconds]
        return sorted(lasting, key=lambda seen: seen.since)

    def _waits(self, now: float, seconds: float) -> str:
        lasting = self._lasting(now, seconds)
        if not lasting:
            return ""
        return "it waits for " + ", ".join(f"worker {seen.worker}, {seen.words(now)}" for seen in lasting)

    def _stack(self, seen: _Seen) -> str:
        stack = self._stacks.ask(seen.pid)
        if stack:
            return stack + _lock_hint(stack.splitlines())
        disk = sample(seen.pid).state == _UNINTERRUPTIBLE
        why = "it waits for a disk or a network drive (state D)" if disk else "it does not answer"
        return f"  (the stack of process {seen.pid} cannot be had: {why})"


def _lock_hint(lines: Sequence[str]) -> str:
    if not any(map(_LOCK.search, lines[-2:])):
        return ""
    return (
        "\nIf that is a lock: one that another thread of your process held when workers were forked is never released "
        "in them. Make it, or start that thread, where workers run; or stop the thread before fit()."
    )
