"""How a worker tells what happened and learns that it should stop."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, Self

from shoal.core.events import AnyEvent, Scale, Stop
from shoal.core.following import INTERRUPTED as INTERRUPTED
from shoal.core.following import PREEMPTED as PREEMPTED
from shoal.core.following import STOPPED as STOPPED
from shoal.wire.link import LinkClosed

_HELD_SECONDS = 0.25
"""What was told is not held back for longer, whatever the main thread waits for."""
_CLEANING_SECONDS = 2.0


class Channel(Protocol):
    """A worker's way to whoever watches the run. Called on the worker's main thread."""

    def emit(self, event: AnyEvent) -> None:
        """Tell; does not wait. Worker 0 tells for all; of itself (`WorkerSeen`) every worker tells."""

    def decide(self, event: AnyEvent) -> None:
        """Tell, and wait until all who watch have had a chance to ask for a stop."""

    def stop_asked(self) -> str | None:
        """One of `following.REASONS`, once somebody has asked."""

    def flush(self) -> None:
        """Send what `emit` has held back. Any thread, where that is over a link."""


@contextmanager
def flushing(channel: Channel) -> Iterator[None]:
    """Within: a thread sends what the channel holds back, for one whose `flush` any thread may call."""
    ended = threading.Event()

    def flush() -> None:
        with suppress(LinkClosed):  # the main thread will see it, too
            while not ended.wait(_HELD_SECONDS):
                channel.flush()

    thread = threading.Thread(target=flush, name="shoal-flush", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_CLEANING_SECONDS)


class DirectChannel:
    """In a script that runs once per worker: signals come to each worker, and worker 0 calls the listeners itself."""

    def __init__(
        self, listeners: Callable[[AnyEvent], Stop | Scale | None] | None, signals: StopSignals | None
    ) -> None:
        self._listeners = listeners
        self._signals = signals
        self._stop: str | None = None

    def emit(self, event: AnyEvent) -> None:
        if self._listeners is not None and isinstance(self._listeners(event), Stop):
            self._stop = self._stop or STOPPED

    def decide(self, event: AnyEvent) -> None:
        self.emit(event)

    def stop_asked(self) -> str | None:
        return self._stop if self._signals is None else self._signals.asked or self._stop

    def flush(self) -> None:
        return None


class StopSignals:
    """Within: SIGTERM and the first SIGINT are noted in `asked`; a second SIGINT raises `KeyboardInterrupt` at once.

    What is cleaned up then is left in peace for a moment, however often the key is hit.
    Signals are the main thread's: entered from another one, this does nothing.
    """

    def __init__(self) -> None:
        self.asked: str | None = None
        """`PREEMPTED` or `INTERRUPTED`, once a signal has come."""
        self._interrupts = 0
        self._raised = -_CLEANING_SECONDS
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number, handler in ((signal.SIGTERM, self._on_term), (signal.SIGINT, self._on_interrupt)):
                self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *error: object) -> None:
        for number, old in self._before.items():
            # None: a handler that was not set from Python, and cannot be set again from here
            handler = signal.SIG_DFL if old is None else old
            signal.signal(number, self._in_peace(handler) if number == signal.SIGINT else handler)

    def _in_peace(self, handler: Any) -> Any:
        """What handles Ctrl-C again, once what is cleaned up after a second one has had its moment.

        Python itself is not disturbed either, while it ends.
        """
        over = self._raised + _CLEANING_SECONDS
        if time.monotonic() > over:
            return handler

        def wait(number: int, frame: object) -> None:
            if time.monotonic() > over:
                signal.signal(number, handler)
                os.kill(os.getpid(), number)

        return wait

    def _on_term(self, number: int, frame: object) -> None:
        self.asked = self.asked or PREEMPTED

    def _on_interrupt(self, number: int, frame: object) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            if time.monotonic() - self._raised > _CLEANING_SECONDS:
                self._raised = time.monotonic()
                # Python would look for cycles among all that torch has imported, for a second and more, to free memory
                # that goes with the process
                atexit.register(gc.freeze)
                raise KeyboardInterrupt
            return
        self.asked = self.asked or INTERRUPTED


def leave_sigterm_to_the_supervisor() -> None:
    """In a worker: a SIGTERM to all processes of a job (Slurm, systemd) must not end the one that is to checkpoint.

    Programs that this process starts, and processes that it forks, die of it as usual.
    """
    here = os.getpid()

    def on_term(number: int, frame: object) -> None:
        if os.getpid() != here:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, on_term)
