"""What the listeners for tracking services share: a thread that waits for the service, so that training never does.

events ──▶ Figures ──▶ points that wait ──thread──▶ Record (one run at the service)
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Protocol, Self

import msgspec

from shoal.core.errors import ConfigError
from shoal.core.events import AnyEvent, CheckpointSaved, Notice, RunEnded, RunFailed, RunStarted
from shoal.monitor.figures import Figures, Point

SEND_SECONDS = 1.0
"""Between two deliveries to the service."""
MOST_WAITING = 10_000
"""Points and texts that wait for a slow service; more are dropped and counted."""
MOST_ERROR = 300
"""Characters of a service's error that are shown."""


class Text(msgspec.Struct, frozen=True):
    """Something to read, of one step. `name`: notice or checkpoint."""

    step: int
    time: float
    name: str
    text: str


class Ending(msgspec.Struct, frozen=True):
    """How a run ended: why in one word or line, and whether as it should."""

    step: int
    failed: bool
    reason: str
    time: float = msgspec.field(default_factory=time.time)


class Record(Protocol):
    """One run at a service. Everything is called from one thread, never from the one that trains; anything may raise.

    After an error only `finish` is called, once, to give back threads, files and processes. A record that has a `where`
    says in it, in one line, where the run is to be seen; it is printed once.
    """

    def log(self, points: Sequence[Point]) -> None: ...

    def write(self, text: Text) -> None: ...

    def finish(self, ending: Ending) -> None: ...


def require(module: str, extra: str) -> Any:
    """Import an optional package; ConfigError says how to install it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{extra} needs the package {error.name}, which is not installed; run: pip install 'shoal[{extra}]'"
        ) from error
    except ImportError as error:
        raise ConfigError(
            f"{extra} needs the package {module}, which does not load ({error}); run: pip install 'shoal[{extra}]'"
        ) from error


def _text_of(event: AnyEvent) -> Text | None:
    if isinstance(event, Notice):
        return Text(event.step, event.time, "notice", event.text)
    if isinstance(event, CheckpointSaved):
        return Text(event.step, event.time, "checkpoint", f"{event.path}{' (best)' if event.best else ''}")
    return None


class Outbox:
    """A thread that opens a record, hands it what was put, and finishes it.

    `put` and `finish` are for one thread; neither raises, and only `finish` waits. An error ends the thread after
    `complain(error)`, which is called in it.
    """

    def __init__(self, name: str, begin: Callable[[], Record], complain: Callable[[BaseException], None]) -> None:
        self.dropped = 0
        self.where = ""
        """What the record says of itself, once it is open."""
        self._begin = begin
        self._complain = complain
        self._waiting: deque[Point | Text] = deque()
        self._closing = threading.Event()
        self._ending = Ending(0, True, "the end of the run was not told")
        self._thread = threading.Thread(target=self._run, name=f"shoal-{name}", daemon=True)
        self._thread.start()

    def put(self, item: Point | Text) -> None:
        if not self._thread.is_alive():
            return
        if len(self._waiting) >= MOST_WAITING:
            self.dropped += 1
        else:
            self._waiting.append(item)

    def finish(self, ending: Ending | None, timeout: float) -> bool:
        """Deliver what waits and end the record; False if that takes longer than `timeout` seconds."""
        self._ending = ending or self._ending
        self._closing.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        record: Record | None = None
        try:
            record = self._begin()
            self.where = getattr(record, "where", "")
            ended = False
            while not ended:
                ended = self._closing.wait(SEND_SECONDS)
                self._deliver(record)
            record.finish(self._ending)
        # BaseException: no library may end this thread without a word
        except BaseException as error:
            self._waiting.clear()
            self._complain(error)
            self._abandon(record, error)

    def _deliver(self, record: Record) -> None:
        points: list[Point] = []
        while self._waiting:
            item = self._waiting.popleft()
            if isinstance(item, Point):
                points.append(item)
            else:
                record.write(item)
        if points:
            record.log(points)

    def _abandon(self, record: Record | None, error: BaseException) -> None:
        if record is None:
            return
        try:
            record.finish(Ending(self._ending.step, True, f"logging ended early: {one_line(error)}"))
        except Exception:
            return  # it was complained about once


def one_line(error: BaseException) -> str:
    """An error in one line of bounded length, without the password of an address in it."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = without_password(text)
    return text if len(text) <= MOST_ERROR else f"{text[: MOST_ERROR - 1]}…"


def without_password(address: str) -> str:
    return re.sub(r"://[^/@\s]+@", "://…@", address)


def print_line(text: str) -> None:
    """To standard error."""
    print(f"shoal: {text}", file=sys.stderr, flush=True)


class Tracker:
    """A listener that logs runs to a service, one after the other; its subclasses say how a record is begun.

    For one thread. Calling it does not raise and does not wait for the service, except at the end of a run: then up to
    `patience` seconds for what is left to be delivered. Between runs there is no thread and nothing open.
    """

    label = ""
    """The service's name in messages."""
    patience = 15.0

    def __init__(self) -> None:
        self.warn: Callable[[str], None] = print_line
        """Told in one line, once for each run, if the service fails; maybe from another thread."""
        self.say: Callable[[str], None] = print_line
        """Told in one line where a run is to be seen, with the first event after its record is open."""
        self._figures = Figures()
        self._outbox: Outbox | None = None

    def begin(self, started: RunStarted) -> Record:
        """Begin a record. Called in the thread of the run."""
        raise NotImplementedError

    def __call__(self, event: AnyEvent) -> None:
        if isinstance(event, RunStarted):
            self._end(None)
            self._figures = Figures()
            self._outbox = Outbox(self.label, lambda: self.begin(event), self._complain)
        elif isinstance(event, RunEnded):
            self._end(Ending(event.step, False, event.reason, event.time))
        elif isinstance(event, RunFailed):
            self._end(Ending(event.step, True, event.error, event.time))
        elif self._outbox is not None:
            self._tell_where(self._outbox)
            for point in self._figures.take(event):
                self._outbox.put(point)
            text = _text_of(event)
            if text is not None:
                self._outbox.put(text)

    def close(self) -> None:
        """Flush and end what is open, within `patience` seconds. A run whose end was not told counts as failed."""
        self._end(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _end(self, ending: Ending | None) -> None:
        outbox, self._outbox = self._outbox, None
        if outbox is None:
            return
        for point in self._figures.rest():
            outbox.put(point)
        if not outbox.finish(ending, self.patience):
            self.warn(
                f"{self.label}: not everything was delivered within {self.patience:g} s; the run goes on without it"
            )
        elif outbox.dropped:
            self.warn(f"{self.label}: it was too slow; {outbox.dropped} points were left out")
        self._tell_where(outbox)

    def _tell_where(self, outbox: Outbox) -> None:
        where, outbox.where = outbox.where, ""
        if where:
            self.say(where)

    def _complain(self, error: BaseException) -> None:
        self.warn(f"{self.label}: {one_line(error)}; the run goes on without it")
