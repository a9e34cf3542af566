"""What a run whose workers come and go tells those who watch it: each thing once, and changes in words."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable

import msgspec

from shoal.cluster.board import Phase, Sight
from shoal.core.events import (
    AnyEvent,
    CheckpointSaved,
    ExchangeSettled,
    Notice,
    Preparing,
    RunEnded,
    RunStarted,
    StepDone,
    WorkerSeen,
)
from shoal.engines.local import Ended

_ONCE = (RunStarted, RunEnded)
_ALWAYS = (Notice, Preparing, WorkerSeen)
_encode = msgspec.msgpack.Encoder().encode


class Told:
    """Which events the watchers have had. A worker that begins to speak for all repeats what it knows."""

    def __init__(self) -> None:
        self._loop = 0
        self._step = -1
        self._had: set[bytes] = set()

    def begins_loop(self, number: int) -> bool:
        """What comes next is of this loop; whether that is a new one."""
        if number <= self._loop:
            return False
        self._loop, self._step, self._had = number, -1, set()
        return True

    def is_new(self, event: AnyEvent) -> bool:
        """Whether this was not told before; from now on it was."""
        if isinstance(event, _ALWAYS):
            return True
        if isinstance(event, StepDone):
            new = event.step > self._step
            self._step = max(self._step, event.step)
            return new
        if isinstance(event, ExchangeSettled) and event.step < self._step:
            return False  # of a membership that is over by now
        key = self._key(event)
        new = key not in self._had
        self._had.add(key)
        return new

    @staticmethod
    def _key(event: AnyEvent) -> bytes:
        kind = type(event).__name__
        if isinstance(event, _ONCE):
            return kind.encode()
        if isinstance(event, ExchangeSettled):
            # whoever comes to speak tells it, at the step where it does
            return _encode(msgspec.structs.replace(event, time=0.0, step=0))
        # repeated by others, its figures may differ in rounding
        return f"{kind} {event.step} {isinstance(event, CheckpointSaved) and event.best}".encode()


def how_it_ended(end: Ended) -> str:
    """In words that follow the worker's name."""
    if end.signal is not None:
        return f"was killed by {_signal_name(end.signal)}"
    if end.code is not None:
        return f"left with exit code {end.code}"
    return f"was not started ({end.why})"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def where_it_was(sight: Sight | None) -> str:
    """In words that follow how it ended, with a space in front; empty if that is not known."""
    if sight is None or sight.term == 0:
        return ""
    if sight.phase is Phase.EVALUATE:
        return f" in the evaluation after step {sight.step}"
    if sight.phase is Phase.CHECKPOINT:
        return f" while it saved the checkpoint of step {sight.step}"
    if sight.phase in (Phase.STARTING, Phase.DONE):
        return ""
    return f" in step {sight.step + 1}"


def change_in_words(
    members: int, joined: Iterable[int], lost: Iterable[int], known: set[int], why_lost: Callable[[int], str | None]
) -> str:
    """What a person should know of a new membership.

    `known` are the seats that took part at any time before. `why_lost` says of a seat how its process ended, None if
    it left as it was told to.
    """
    parts, died = [], False
    for seat in sorted(lost):
        why = why_lost(seat)
        died = died or why is not None
        parts.append(f"worker {seat} {why or 'has left, as it was told to'}")
    parts += [f"worker {seat} {'is back' if seat in known else 'has joined'}" for seat in sorted(joined)]
    count = "1 worker" if members == 1 else f"{members} workers"
    if died:
        return "; ".join([*parts, f"{count} {'goes' if members == 1 else 'go'} on"])
    return f"{'; '.join(parts) or 'the workers have met anew'} ({count})"
