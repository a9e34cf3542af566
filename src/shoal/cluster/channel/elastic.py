"""A worker's channel in a run whose workers come and go."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.cluster.channel.channel import PREEMPTED
from shoal.cluster.channel.messages import (
    Decided,
    Departed,
    Failed,
    Happened,
    Over,
    Returned,
    StopAsked,
    decode_down,
    encode,
)
from shoal.core.events import AnyEvent, Notice, Preparing, RunStarted, StepDone, WorkerSeen
from shoal.wire.link import Link, LinkClosed

if TYPE_CHECKING:
    from typing_extensions import Buffer

_FLUSH_SECONDS = 0.1
_LOOK_SECONDS = 0.02
_KEPT = 1000
_SURE_SECONDS = 0.2
"""A step that was applied here so long ago is told, whether or not the next one has confirmed it. By then all members
have its sums as well; and who had to do it again would tell the same."""


class ElasticChannel:
    """Over the link to the supervisor, for a worker whose rank changes.

    Every worker builds all events of the run. The one that speaks, rank 0, sends them once they are confirmed: before
    that, a death could still take back what it has done. (Of steps that take long, each is told without waiting for the
    next one.) The others keep the last thousand, and one that begins to
    speak sends them all; the supervisor knows which it has had.

    Nothing raises when the supervisor is gone: the worker is orphaned then, which is a reason to stop, checkpointed.
    Called on the worker's main thread; `emit` and `flush` on any.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._speaks: bool | None = None  # None: nobody has said yet
        self._confirmed = 0
        self._loop = 0
        self._kept: deque[AnyEvent] = deque(maxlen=_KEPT)
        self._pending: list[AnyEvent] = []  # to be sent once they are confirmed
        self._pending_since = 0.0
        self._going: list[AnyEvent] = []  # with the next message
        self._early: deque[AnyEvent] = deque(maxlen=_KEPT)  # for people, from before anybody spoke
        self._unsaid: list[Notice] = []  # of the step under way: who speaks may die before it has said the same
        self._flushed = time.monotonic()
        self._looked = 0.0
        self._stop: str | None = None
        self.orphaned = False
        """Whether the supervisor was found gone."""

    def emit(self, event: AnyEvent) -> None:
        """Tell, once it is confirmed; of itself (`WorkerSeen`) every worker tells at once."""
        with self._lock:
            self._sort(event)
            self._release()
        if isinstance(event, Notice) or time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def decide(self, event: AnyEvent) -> None:
        """Tell, which confirms all steps until this one; who speaks waits for what those who watch decide."""
        self.confirm(event.step)
        with self._lock:
            self._sort(event)
            self._release()
        if self._speaks:
            self._send(ask=True)
            self._await_decision()

    def stop_asked(self) -> str | None:
        """One of `REASONS`, once somebody has asked, or once the supervisor is gone."""
        now = time.monotonic()
        if self._stop is None and now - self._looked > _LOOK_SECONDS:
            self._looked = now
            self._look()
        return self._stop

    def urge(self, text: str) -> None:
        """Tell a person something at once, for any worker and from any thread."""
        with self._lock:
            self._going.append(Notice(step=0, text=text))
        self.flush()

    def flush(self) -> None:
        """Send what is confirmed, and steps that were applied a while ago."""
        if self._pending and time.monotonic() - self._pending_since > _SURE_SECONDS:
            with self._lock:
                self._going += [event for event in self._pending if isinstance(event, StepDone)]
                self._pending = [event for event in self._pending if not isinstance(event, StepDone)]
        if self._going:
            self._send(ask=False)

    def speak(self, on: bool) -> None:
        """Whether this worker tells for all from now on."""
        with self._lock:
            if on and not self._speaks:
                self._pending, self._pending_since = list(self._kept), time.monotonic()
                self._going += [*self._early, *self._unsaid]
                self._unsaid = []
            elif not on:
                self._pending = []
            self._speaks = on
            self._early.clear()
            self._release()

    def confirm(self, step: int) -> None:
        """All members have applied the steps until this one: nothing takes them back."""
        with self._lock:
            self._confirmed = max(self._confirmed, step)
            self._unsaid = [notice for notice in self._unsaid if notice.step >= self._confirmed]
            self._release()

    def begins_loop(self, number: int) -> None:
        """Steps are counted from the beginning again: what was told of those before is sure."""
        if number > self._loop:
            self.complete()
            with self._lock:
                self._loop, self._confirmed = number, 0
                self._kept.clear()

    def kept(self) -> list[AnyEvent]:
        """What was emitted here last. One that copies this worker's state needs it too: perhaps nobody has told it yet,
        and that one is the only one left who could."""
        with self._lock:
            return list(self._kept)

    def adopt(self, events: Sequence[AnyEvent]) -> None:
        """Take over what is `kept` on the worker whose state this one has copied, in place of its own."""
        with self._lock:
            self._kept = deque(events, maxlen=_KEPT)
            if self._speaks:
                self._pending = [event for event in self._kept if event.step > self._confirmed]

    def complete(self) -> None:
        """The run is complete on all members: everything is confirmed, and sent."""
        with self._lock:
            self._going += self._pending
            self._pending = []
        self.flush()

    def last_words(self) -> None:
        """The run ends, for all or because this worker fails: what it knows it tells itself, others may not come to it.

        Not notices: who speaks has said the same.
        """
        with self._lock:
            self._going += self._pending if self._speaks else self._kept
            self._pending = []
            self._unsaid = []
        self.flush()

    def give(self, message: Returned | Failed | Departed, buffers: Sequence[Buffer] = ()) -> None:
        """Send this worker's last word."""
        try:
            self._link.send(encode(message), buffers)
        except LinkClosed:
            self._orphan()

    def await_end(self) -> bool:
        """Wait until the supervisor says that the run is over: True. Or closes the link, or is gone: False."""
        try:
            while not isinstance(decode_down(self._link.recv()[0]), Over):
                pass
            return True
        except LinkClosed:
            self._orphan()
            return False

    def _sort(self, event: AnyEvent) -> None:
        if isinstance(event, WorkerSeen):
            self._going.append(event)
        elif isinstance(event, Notice | Preparing):
            if self._speaks is None:
                self._early.append(event)
            elif self._speaks:
                self._going.append(event)
            elif isinstance(event, Notice):
                self._unsaid.append(event)
        else:
            self._kept.append(event)
            if self._speaks:
                if not self._pending:
                    self._pending_since = time.monotonic()
                self._pending.append(event)

    def _release(self) -> None:
        if not self._pending:
            return
        waiting: list[AnyEvent] = []
        for event in self._pending:
            # not in order of the list: a checkpoint of an earlier step is told later, by another thread
            go = event.step <= self._confirmed or isinstance(event, RunStarted)
            (self._going if go else waiting).append(event)
        self._pending = waiting

    def _send(self, *, ask: bool) -> None:
        with self._lock:
            going, self._going = self._going, []
            self._flushed = time.monotonic()
            try:
                self._link.send(encode(Happened(going, ask, self._loop)))
            except LinkClosed:
                self._orphan()

    def _await_decision(self) -> None:
        try:
            while not self.orphaned and not self._take():
                pass
        except LinkClosed:
            self._orphan()

    def _look(self) -> None:
        try:
            while self._link.poll(0):
                self._take()
        except LinkClosed:
            self._orphan()

    def _take(self) -> bool:
        """Take in one message; whether it was a decision."""
        message = decode_down(self._link.recv()[0])
        if isinstance(message, Decided):
            self._stop = self._stop or message.stop
            return True
        if isinstance(message, StopAsked):
            self._stop = self._stop or message.reason
        return False

    def _orphan(self) -> None:
        self.orphaned = True
        self._stop = self._stop or PREEMPTED
