"""A supervisor on a thread of its own: whom it leads must not wait for callbacks, which run on the main thread."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from shoal.cluster.logs import Tail
from shoal.cluster.supervisor.stuck import Stuck
from shoal.cluster.supervisor.watch import Watcher
from shoal.core.events import AnyEvent, Scale, Stop

_TICK_SECONDS = 0.1


class Supervising(Protocol):
    """`elastic_supervisor.Supervisor`, as far as it is needed."""

    stuck: Stuck

    def watch(self) -> list[Any]: ...

    def leave(self) -> None: ...


class _Started(msgspec.Struct, frozen=True):
    """A process was started in this seat: there is a log to follow."""

    seat: int


class _Urgent(msgspec.Struct, frozen=True):
    text: str


class Relay:
    """Stands for the watcher and the tail on the supervisor's thread."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        """Of the logs."""
        self.told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.answers: deque[Stop | Scale] = deque()

    def __call__(self, event: AnyEvent) -> Stop | Scale | None:
        self.told.put(event)
        return self.answer()

    def answer(self) -> Stop | Scale | None:
        """What callbacks have decided since."""
        return self.answers.popleft() if self.answers else None

    def tick(self) -> None: ...

    def look(self) -> None: ...

    def output(self, worker: int, stream: str, text: str) -> None: ...

    def urge(self, text: str) -> None:
        self.told.put(_Urgent(text))

    def follow(self, seat: int) -> None:
        self.told.put(_Started(seat))


def watch_apart(make: Callable[[Relay], Supervising], watch: Watcher, tail: Tail) -> list[Any]:
    """What the supervisor's `watch` returns or raises. Until then, all that it tells is told here."""
    relay = Relay(tail.folder)
    supervisor = make(relay)

    def run() -> None:
        try:
            outcome: Any = supervisor.watch()
        except BaseException as error:
            outcome = error
        relay.told.put(outcome)

    thread = threading.Thread(target=run, name="shoal-supervisor", daemon=True)
    thread.start()
    try:
        with supervisor.stuck.explaining():
            return _told_until_over(relay, watch, tail)
    finally:
        supervisor.leave()
        thread.join()


def _told_until_over(relay: Relay, watch: Watcher, tail: Tail) -> list[Any]:
    ticked = 0.0
    while True:
        now = time.monotonic()
        if now - ticked > _TICK_SECONDS:
            ticked = now
            tail.look()
            watch.tick()
        try:
            thing = relay.told.get(timeout=_TICK_SECONDS)
        except queue.Empty:
            continue
        if isinstance(thing, BaseException):
            tail.look()
            raise thing
        if isinstance(thing, list):
            return thing
        if isinstance(thing, _Started):
            tail.follow(thing.seat)
        elif isinstance(thing, _Urgent):
            watch.urge(thing.text)
        elif (answer := watch(thing)) is not None:
            relay.answers.append(answer)
