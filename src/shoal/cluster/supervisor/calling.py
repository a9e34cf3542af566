"""Calls the user's callbacks. If one does not return, nothing is heard of the run: a thread says so."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shoal.core.events import AnyEvent, Callback, Scale, Stop
from shoal.core.traces import own_stack, own_traceback

CALL_SECONDS = 60.0
"""Of one call of the user's functions, where compilers and caches may warm up."""
STOPPING_SECONDS = 1.0
"""Once somebody waits for the end of the run."""

_LOOK_SECONDS = 0.5
_CLOSE_SECONDS = 2.0


class _Call(NamedTuple):
    """One that is under way."""

    number: int
    name: str
    event: AnyEvent
    since: float


class Calling:
    """Called with each event, on one thread. `warn` is called from another, while a callback keeps that one.

    `hurried`: whether somebody waits for the end of the run.
    """

    def __init__(
        self, callbacks: Sequence[Callback], warn: Callable[[str], None], hurried: Callable[[], bool] = lambda: False
    ) -> None:
        self._callbacks = [(getattr(each, "__qualname__", type(each).__qualname__), each) for each in callbacks]
        self._warn = warn
        self._hurried = hurried
        self._under_way: _Call | None = None
        self._told: _Call | None = None
        self._caller = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self, event: AnyEvent) -> tuple[Stop | None, Scale | None]:
        """What was decided: the last of each kind."""
        if self._callbacks and self._thread is None:
            self._caller = threading.get_ident()
            self._thread = threading.Thread(target=self._watch, name="shoal-callbacks", daemon=True)
            self._thread.start()
        stop: Stop | None = None
        scale: Scale | None = None
        for number, (name, callback) in enumerate(self._callbacks):
            call = self._under_way = _Call(number, name, event, time.monotonic())
            try:
                answer = callback(event)
            except KeyboardInterrupt as error:
                if self._hurried():  # the second Ctrl-C
                    error.add_note(f"{_in_words(call, time.monotonic())}:\n{own_traceback(error)}")
                raise
            except Exception as error:
                what = f"{type(event).__name__} of step {event.step}"
                error.add_note(f"\n  callbacks[{number}], {name}, raised it for {what}")
                raise
            finally:
                self._under_way = None
            stop = answer if isinstance(answer, Stop) else stop
            scale = answer if isinstance(answer, Scale) else scale
        return stop, scale

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """See whether a callback takes too long, and say so, once."""
        call = self._under_way
        if call is None or call is self._told:
            return
        if now - call.since > (STOPPING_SECONDS if self._hurried() else CALL_SECONDS):
            self._told = call
            frame = sys._current_frames().get(self._caller)
            stack = "" if frame is None else f" It is here:\n{own_stack(frame)}"
            self._warn(f"{_in_words(call, now)}, and the run waits for it.{stack}")


def _in_words(call: _Call, now: float) -> str:
    what = f"{type(call.event).__name__} of step {call.event.step}"
    return f"callbacks[{call.number}], {call.name}, has been at {what} for {now - call.since:.0f} s"
