"""How a worker tells what happened and learns that it should stop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from shoal.core.events import AnyEvent, Stop
from shoal.trainer.messages import Decided, Happened, StopAsked, decode_down, encode
from shoal.wire.link import Link

PREEMPTED = "preempted"
INTERRUPTED = "interrupted"
STOPPED = "stopped"
REASONS = (PREEMPTED, INTERRUPTED, STOPPED)
"""Why a run may end early. Each has a flag in every step's exchange, so that all workers stop after the same step."""

_FLUSH_SECONDS = 0.1


class Channel(Protocol):
    """A worker's way to whoever watches the run. Called on the worker's main thread."""

    def emit(self, event: AnyEvent) -> None:
        """Tell; does not wait."""

    def decide(self, event: AnyEvent) -> None:
        """Tell, and wait until all who watch have had a chance to ask for a stop."""

    def stop_asked(self) -> str | None:
        """One of `REASONS`, once somebody has asked."""

    def flush(self) -> None:
        """Send what `emit` has held back."""


class LinkChannel:
    """Over the link to the supervisor. Events go in batches: a message per step would cost both sides a wake-up."""

    def __init__(self, link: Link, *, speaks: bool) -> None:
        self._link = link
        self._speaks = speaks
        self._held: list[AnyEvent] = []
        self._flushed = time.monotonic()
        self._stop: str | None = None

    def emit(self, event: AnyEvent) -> None:
        if not self._speaks:
            return
        self._held.append(event)
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def decide(self, event: AnyEvent) -> None:
        if not self._speaks:
            return
        self._held.append(event)
        self._send(ask=True)
        while True:
            message = decode_down(self._link.recv()[0])
            if isinstance(message, Decided):
                self._stop = self._stop or message.stop
                return
            self._stop = self._stop or message.reason

    def stop_asked(self) -> str | None:
        if self._stop is None and self._speaks and self._link.poll(0):
            message = decode_down(self._link.recv()[0])
            if isinstance(message, StopAsked):
                self._stop = message.reason
        return self._stop

    def flush(self) -> None:
        if self._held:
            self._send(ask=False)

    def _send(self, *, ask: bool) -> None:
        self._link.send(encode(Happened(self._held, ask)))
        self._held = []
        self._flushed = time.monotonic()


class DirectChannel:
    """In a script that runs once per worker: signals come to each worker, and worker 0 calls the listeners itself."""

    def __init__(self, listeners: Callable[[AnyEvent], Stop | None] | None) -> None:
        self._listeners = listeners
        self._stop: str | None = None

    def emit(self, event: AnyEvent) -> None:
        if self._listeners is not None and self._listeners(event) is not None:
            self._stop = self._stop or STOPPED

    def decide(self, event: AnyEvent) -> None:
        self.emit(event)

    def stop_asked(self) -> str | None:
        return self._stop

    def ask(self, reason: str) -> None:
        self._stop = reason

    def flush(self) -> None:
        return None


@contextmanager
def stop_signals(ask: Callable[[str], None]) -> Iterator[None]:
    """Within: SIGTERM and the first SIGINT ask for a stop, a second SIGINT raises `KeyboardInterrupt` at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts = 0

    def on_term(number: int, frame: object) -> None:
        ask(PREEMPTED)

    def on_interrupt(number: int, frame: object) -> None:
        nonlocal interrupts
        interrupts += 1
        if interrupts > 1:
            raise KeyboardInterrupt
        ask(INTERRUPTED)

    before = {}
    try:
        for number, handler in ((signal.SIGTERM, on_term), (signal.SIGINT, on_interrupt)):
            before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
