"""The thread of a worker that speaks with the coordinator: beats, sends, repeats, listens, and finds it again."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from shoal.cluster.access import Access
from shoal.cluster.board import WAITING, Place, Sight
from shoal.cluster.member.pace import Pace
from shoal.cluster.member.writing import Writing
from shoal.cluster.messages import (
    MOST_BYTES,
    Beat,
    Done,
    Down,
    Formed,
    Gathered,
    Heard,
    Held,
    Hello,
    Lasting,
    Ready,
    Refused,
    Unreached,
    Up,
    Welcome,
    decode_down,
)
from shoal.core.errors import ConfigError
from shoal.core.traces import stack_of
from shoal.wire.curve import Client

BEAT_SECONDS = 0.1
REPEAT_SECONDS = 0.5
_CLAIMS = 3
"""How often what is not answered is said again, with the beats that follow."""
_SILENT_SECONDS = 1.5
"""Without a word from the coordinator: it may be elsewhere."""
_LOST_SECONDS = 2.5
"""And beyond this the connection is made anew: one that was cut and healed may take long to find out itself."""
_ABSENT_SECONDS = 0.5
"""Between two turns of this thread: it was this process that did not listen."""
_FLUSH_SECONDS = 0.03
"""For the last words before the connection is closed."""
_STACK_SECONDS = 1.0
_STACK_CHARACTERS = 12_000
_MOST_KEYS = 10_000

Standing = Hello | Ready
Claim = Formed | Unreached | Done


class Dispatch:
    """Owns the thread. `hear` is called on it with what the coordinator says, `wake` when it ends.

    All other methods are for the main thread, and never wait, except for `close`.
    """

    def __init__(
        self,
        access: Access,
        writing: Writing,
        place: Place,
        lifeline: int,
        hear: Callable[[Down], None],
        wake: Callable[[], None],
    ) -> None:
        self.pid = os.getpid()
        self.endpoint = ""
        self.trouble: str | None = None
        """Why the thread has ended by itself."""
        self._access, self._writing, self._place = access, writing, place
        self._hear, self._wake = hear, wake
        self._main = threading.get_ident()
        self._lock = threading.RLock()  # a handler of a signal may come in between
        self._standing: dict[type[Standing], tuple[Standing, float]] = {}
        """What is said until it is answered, and when next."""
        self._claims: dict[type[Claim], tuple[Claim, int]] = {}
        """What is said a few times, and how often still; kept for the next coordinator."""
        self._again: list[Lasting] = []
        self._hello: Hello | None = None
        self._keys: deque[Lasting] = deque(maxlen=_MOST_KEYS)
        self._ending = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._hangup = select.epoll()
        if lifeline >= 0:
            self._hangup.register(lifeline, select.EPOLLRDHUP)  # not EPOLLIN: messages there are not for this thread
        self._orphaned_at: float | None = None
        self._pace = Pace()
        self._next_beat = self._said_at = 0.0
        self._heard_at = self._turned_at = time.monotonic()
        self._coordinator: int | None = None
        self._stack: tuple[float, float, str] = (0.0, 0.0, "")
        self._thread = threading.Thread(target=self._run, name="shoal-control", daemon=True)

    # -- main thread ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def begin(self, hello: Hello) -> None:
        """Say hello until there is an answer, and beat from now on."""
        with self._lock:
            self._hello = hello
            self._standing[Hello] = (hello, 0.0)
        self._ring()

    def stand(self, ready: Ready) -> None:
        """Say this until `settle`. What was claimed of the term before is not repeated any longer."""
        with self._lock:
            self._claims.clear()
            self._standing[Ready] = (ready, 0.0)
        self._ring()

    def settle(self, kind: type[Standing]) -> None:
        """There is an answer. Any thread."""
        with self._lock:
            self._standing.pop(kind, None)

    def claim(self, body: Claim) -> None:
        """Say this a few times, and again to every new coordinator."""
        with self._lock:
            self._claims[type(body)] = (body, 1 + _CLAIMS)
        self._ring()

    def remember_key(self, body: Lasting) -> None:
        """What this worker has put into the store of the term: a new coordinator must be told of it."""
        with self._lock:
            self._keys.append(body)

    def forget_keys(self) -> None:
        with self._lock:
            self._keys.clear()

    def orphaned_for(self) -> float | None:
        """Seconds since the supervisor has gone; None if it is there."""
        return None if self._orphaned_at is None else time.monotonic() - self._orphaned_at

    def close(self, seconds: float) -> None:
        """End the thread; waits for it up to so many seconds."""
        if self._bell < 0:
            return
        self._ending = True
        self._ring()
        self._thread.join(seconds)
        if not self._thread.is_alive():
            self._hangup.close()
            os.close(self._bell)
            self._bell = -1

    def _ring(self) -> None:
        if self._bell >= 0:
            os.eventfd_write(self._bell, 1)

    # -- control thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        client: Client | None = None
        try:
            while client is None and not self._ending:
                client = self._connected()
            while client is not None and not self._ending:
                self._turn(client)
            if client is not None:
                self._say_what_is_due(client, time.monotonic())
                time.sleep(max(0.0, self._said_at + _FLUSH_SECONDS - time.monotonic()))
        except BaseException as error:
            self.trouble = f"{type(error).__name__}: {error}"
            raise
        finally:
            if client is not None:
                client.close()
            self._wake()

    def _connected(self) -> Client | None:
        """A connection, once it is known where to; None after a short wait."""
        self._place.tick()
        endpoint = self._published()
        if endpoint is not None:
            self.endpoint = endpoint
            return Client(endpoint, self._access.keys, limit=MOST_BYTES)
        descriptors = self._descriptors()
        ready, _, _ = select.select(descriptors, [], [], 0.02)
        self._attend(ready)
        return None

    def _published(self) -> str | None:
        with suppress(ConfigError):
            return self._access.endpoint()
        return None

    def _turn(self, client: Client) -> None:
        now = time.monotonic()
        if now - self._turned_at > _ABSENT_SECONDS:
            self._heard_at = now
        self._turned_at = now
        self._place.tick()
        self._say_what_is_due(client, now)
        found = client.wait(self._until_next(now), *self._descriptors())
        self._attend(found)
        if client.fileno() in found:
            while (payload := client.receive(0)) is not None:
                self._take(payload)
        self._find_again(client)

    def _descriptors(self) -> list[int]:
        # what has hung up stays readable
        return [self._bell] if self._orphaned_at is not None else [self._bell, self._hangup.fileno()]

    def _attend(self, ready: Sequence[int]) -> None:
        if self._bell in ready:
            with suppress(BlockingIOError):
                os.eventfd_read(self._bell)
        if self._hangup.fileno() in ready:
            self._orphaned_at = time.monotonic()
            self._wake()

    def _until_next(self, now: float) -> float:
        with self._lock:
            times = [due for _, due in self._standing.values()]
        if self._hello is not None:
            times.append(self._next_beat)
        return max(0.0, min([*times, now + BEAT_SECONDS]) - now)

    def _say_what_is_due(self, client: Client, now: float) -> None:
        beating = self._hello is not None and now >= self._next_beat
        with self._lock:
            bodies: list[Up] = [*self._standing_due(now), *self._again, *self._claims_due(beating)]
            self._again = []
        for body in bodies:
            client.send(self._writing.letter(body))
            self._said_at = now
        if beating:
            self._next_beat = max(self._next_beat + BEAT_SECONDS, now + BEAT_SECONDS / 2)
            client.send(self._writing.letter(self._beat(now)))

    def _standing_due(self, now: float) -> list[Standing]:
        due = {kind: standing for kind, (standing, when) in self._standing.items() if when <= now}
        self._standing.update({kind: (standing, now + REPEAT_SECONDS) for kind, standing in due.items()})
        return list(due.values())

    def _claims_due(self, beating: bool) -> list[Claim]:
        due = {kind: claim for kind, claim in self._claims.items() if claim[1] > (0 if beating else _CLAIMS)}
        self._claims.update({kind: (body, left - 1) for kind, (body, left) in due.items()})
        return [body for body, _ in due.values()]

    def _beat(self, now: float) -> Beat:
        sight = self._place.sight()
        self._pace.look(sight, now)
        seconds, patience = max(0.0, now - sight.since), self._pace.patience
        stack = self._stack_of_main(sight, now) if sight.phase in WAITING and seconds > patience / 2 else ""
        return Beat(max(0, sight.term), max(0, sight.step), sight.phase, seconds, patience, stack)

    def _stack_of_main(self, sight: Sight, now: float) -> str:
        since, taken_at, text = self._stack
        if since != sight.since or now - taken_at > _STACK_SECONDS:
            frame = sys._current_frames().get(self._main)
            text = stack_of(frame)[-_STACK_CHARACTERS:] if frame else ""
            self._stack = (sight.since, now, text)
        return text

    def _take(self, payload: bytes) -> None:
        try:
            body = decode_down(payload)
        except (msgspec.MsgspecError, ValueError):
            return  # a coordinator of another version; the Hello is what tells people of it
        self._heard_at = time.monotonic()
        if isinstance(body, Heard):
            self._know_coordinator(body.life)
        elif isinstance(body, Welcome | Refused):
            self.settle(Hello)
            self._hear(body)
        elif not isinstance(body, Held | Gathered):  # answers to keys that were said again
            self._hear(body)

    def _know_coordinator(self, life: int) -> None:
        before, self._coordinator = self._coordinator, life
        if before is not None and before != life:
            self._say_all_again()

    def _say_all_again(self) -> None:
        """What was said, and not kept by a coordinator that has ended, must be said to the next one."""
        with self._lock:
            if self._hello is not None:
                self._standing.setdefault(Hello, (self._hello, 0.0))
            self._standing = {kind: (standing, 0.0) for kind, (standing, _) in self._standing.items()}
            self._claims = {kind: (body, 1 + _CLAIMS) for kind, (body, _) in self._claims.items()}
            self._again = list(self._keys)

    def _find_again(self, client: Client) -> None:
        silent = time.monotonic() - self._heard_at
        if silent < _SILENT_SECONDS or self._hello is None:
            return
        endpoint = self._published() or self.endpoint
        if endpoint != self.endpoint or silent > _LOST_SECONDS:
            self.endpoint = endpoint
            self._heard_at = time.monotonic() - _SILENT_SECONDS / 2
            client.reconnect(endpoint)
            self._say_all_again()
