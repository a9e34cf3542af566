"""The coordinator's process: hears workers and engine, lets the membership decide, and tells what it decided.

One thread, one loop. What was decided is in the journal before anybody is told of it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from shoal.cluster.access import Access, port_of
from shoal.cluster.coordinator.journal import Journal
from shoal.cluster.coordinator.post import Post
from shoal.cluster.coordinator.shelf import Answer, Shelf
from shoal.cluster.messages import (
    MOST_ANSWER,
    MOST_BYTES,
    OPERATOR,
    Alive,
    Beat,
    Closing,
    Done,
    Down,
    Heard,
    Hello,
    Letter,
    Question,
    Regroup,
    Say,
    Serving,
    Term,
    ToEngine,
    Up,
    decode_from_engine,
    decode_letter,
    encode,
    seat_of,
)
from shoal.cluster.roster.membership import Membership, Order, Plan, Tell
from shoal.core.errors import ConfigError
from shoal.wire.curve import Server
from shoal.wire.link import FrameError, Link, LinkClosed

TICK_SECONDS = 0.05
_LATE_SECONDS = 0.2
"""A tick that comes so much later than it should: this process did not have its turn, or has more letters than time."""
_LETTERS_AT_ONCE = 256
_BUSY_SECONDS = 0.5
"""Since the last thing but a beat: then times are calm."""
_MOST_UNTOLD = 4
_ALIVE_SECONDS = 1.0
_HEARD_SECONDS = 0.9
"""Between two answers to a worker's beats."""
_MOST_SAID = 1000
"""Messages to an engine that does not read; what is only for people is dropped beyond."""
_SILENT_SECONDS = 30.0
"""Without the engine: a worker that was not heard for so long does not need a coordinator."""
_ALONE_SECONDS = 5.0
"""Without the engine, and if there was no worker at all yet."""


def serve(access: Access, plan: Plan, link: Link, address: str) -> None:
    """Coordinate the run until the engine says that it is over, or is gone with all workers. The process's main.

    Raises `RunDirError` if another coordinator serves this run or its journal cannot be written, and `ConfigError` if
    nothing can listen at `address`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the supervisor, which says what follows
    with contextlib.closing(Journal(access.folder)) as journal:
        server = _listening(access, address)
        try:
            access.publish(server.endpoint)
            Coordinator(access.run, plan, server, link, journal).run()
        finally:
            server.close()


def _listening(access: Access, address: str) -> Server:
    """At the port of the coordinator before this one, if that is possible: its workers look for it there."""
    with contextlib.suppress(ConfigError):
        before = access.endpoint()
        if before is not None:
            return Server(access.keys, address, port=port_of(before), limit=MOST_BYTES, answers=MOST_ANSWER)
    return Server(access.keys, address, limit=MOST_BYTES, answers=MOST_ANSWER)


class Coordinator:
    """One run's coordinator, between its server and its link."""

    def __init__(self, run: str, plan: Plan, server: Server, link: Link, journal: Journal) -> None:
        self._run = run
        self._server, self._link, self._journal = server, link, journal
        self._life = secrets.randbits(47)
        self._post = Post()
        self._shelf = Shelf()
        self._saying: deque[ToEngine] = deque([Serving(server.endpoint)])
        self._outgoing: list[tuple[bytes, Down]] = []
        """What leaves at the end of a turn, once the journal has what it follows from."""
        self._decided = True
        self._busy_until = time.monotonic() + _BUSY_SECONDS
        self._bad = 0
        self._engine_gone_at: float | None = None
        self._closing = False
        self._workers: dict[str, tuple[int, float]] = {}
        """The process of each worker, and when it was heard last."""
        self._done: set[str] = set()
        self._alive_at = 0.0
        self._answered: dict[str, float] = {}
        self._untold: dict[str, deque[Down]] = {}
        """For workers that this process has not heard yet: the one before it may have."""
        self._next_tick = now = time.monotonic()
        record = journal.last()
        self._membership = Membership(plan) if record is None else Membership.restored(plan, record, now)
        self._record = record
        self._shelf.begin(self._membership.term)
        if record is None:
            self._obey(self._membership.begin(now))
        self._leave_word()

    def run(self) -> None:
        """Returns when the run is over."""
        while not self._over():
            if not self.turn():
                self._wait(self._next_tick)
        self._leave_word()

    def turn(self) -> bool:
        """Hear what has come, and tell what follows. Returns whether any worker was told something; never waits."""
        self._hear_engine()
        heard_all = self._hear_workers()
        now = time.monotonic()
        late = now - self._next_tick
        if late >= 0 and (heard_all or late > _LATE_SECONDS):
            if late > _LATE_SECONDS:
                self._membership.was_absent(now)
            self._obey(self._membership.tick(now))
            self._decided = True  # what nobody was told of may wait for a tick
            self._next_tick = now + TICK_SECONDS
            self._show_life(now)
        return self._leave_word()

    def _show_life(self, now: float) -> None:
        if now >= self._alive_at and not self._saying:
            self._alive_at = now + _ALIVE_SECONDS
            self._say(Alive())

    # -- hearing -------------------------------------------------------------------------------------------------------

    def _wait(self, until: float) -> None:
        """Until something has come. In calm times beats may wait for the next tick: each would cost a turn."""
        now = time.monotonic()
        descriptors = () if self._engine_gone_at is not None else (self._link.fileno(),)
        if now < self._busy_until or not descriptors:
            self._server.wait(max(0.0, until - now), *descriptors)
        elif until > now:
            self._link.poll(until - now)

    def _hear_engine(self) -> None:
        while self._engine_gone_at is None:
            try:
                frame = self._link.try_recv()
                if frame is None:
                    return
                report = decode_from_engine(frame[0])
            except (LinkClosed, FrameError):
                self._lose_engine()
                return
            except (msgspec.MsgspecError, ValueError):
                self._note_bad("from the engine")
                continue
            if isinstance(report, Closing):
                self._closing = True
            else:
                self._obey(self._membership.engine(report, time.monotonic()))

    def _lose_engine(self) -> None:
        self._engine_gone_at = time.monotonic()
        self._saying.clear()
        self._obey(self._membership.orphaned(self._engine_gone_at) or ())

    def _hear_workers(self) -> bool:
        """Whether that was all: more may wait, and whoever wrote them is not silent."""
        for _ in range(_LETTERS_AT_ONCE):
            arrival = self._server.receive()
            if arrival is None:
                return True
            peer, payload = arrival
            try:
                letter = decode_letter(payload)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                self._note_bad("that is not a letter")
                continue
            self._take(peer, letter)
        return False

    def _take(self, peer: bytes, letter: Letter) -> None:
        if letter.run != self._run:
            self._note_bad("for another run")
            return
        if seat_of(letter.name) is None and letter.name != OPERATOR:
            self._note_bad("of somebody who is no worker")
            return
        newcomer = not self._post.knows(letter.name, letter.life)
        if not self._post.fresh(letter.name, letter.life, letter.number):
            self._note_bad("that came before")
            return
        if isinstance(letter.body, Question):
            self._stir()
            self._answer(self._shelf.ask(peer, letter.life, letter.body))
            return
        if not isinstance(letter.body, Beat):
            self._stir()
        self._post.came(letter.name, letter.life, peer, newcomer)
        self._outgoing.extend((peer, body) for body in self._untold.pop(letter.name, ()))
        self._note_worker(peer, letter.name, letter.body)
        orders = self._membership.hear(letter.name, letter.life, letter.body, time.monotonic())
        self._obey(orders, letter.name, peer)

    def _note_worker(self, peer: bytes, name: str, body: Up) -> None:
        now = time.monotonic()
        if isinstance(body, Done):
            self._done.add(name)
        elif isinstance(body, Hello):
            self._workers[name] = (body.pid, now)
        elif name in self._workers:
            self._workers[name] = (self._workers[name][0], now)
        if isinstance(body, Beat):
            if name not in self._workers:
                self._workers[name] = (0, now)
            if now - self._answered.get(name, 0.0) >= _HEARD_SECONDS:
                self._answered[name] = now
                self._outgoing.append((peer, Heard(self._life)))

    def _note_bad(self, what: str) -> None:
        self._bad += 1
        if self._bad == 1:
            self._say(Say(f"the coordinator dropped a message {what}; further ones are dropped without a word"))

    # -- telling -------------------------------------------------------------------------------------------------------

    def _obey(self, orders: Sequence[Order], asker: str = "", peer: bytes | None = None) -> None:
        """Keep what is to be said for the end of the turn. What goes to the asker goes where it asked from."""
        if orders:
            self._decided = True
            self._stir()
        for order in orders:
            if not isinstance(order, Tell):
                self._say(order)
                continue
            self._note_told(order.body)
            to = peer if order.name == asker else self._post.route(order.name)
            if to is not None:
                self._outgoing.append((to, order.body))
            else:
                self._untold.setdefault(order.name, deque(maxlen=_MOST_UNTOLD)).append(order.body)

    def _note_told(self, body: Down) -> None:
        if isinstance(body, Term):
            self._answer(self._shelf.begin(body.number))
        elif isinstance(body, Regroup) and body.now:
            self._answer(self._shelf.end(body.term))

    def _answer(self, answers: Sequence[Answer]) -> None:
        self._outgoing.extend(answers)

    def _say(self, message: ToEngine) -> None:
        crowded = len(self._saying) >= _MOST_SAID and isinstance(message, Say)
        if self._engine_gone_at is None and not crowded:
            self._saying.append(message)

    def _leave_word(self) -> bool:
        """Write down what was decided, then tell it. Returns whether anybody was told."""
        if self._decided:
            self._write_down()
        outgoing, self._outgoing = self._outgoing, []
        last: Down | None = None
        payload = b""
        for peer, body in outgoing:
            if body is not last:  # a term is told to all of its members
                last, payload = body, encode(body)
            self._server.send(peer, payload)
        self._tell_engine()
        return bool(outgoing)

    def _write_down(self) -> None:
        self._decided = False
        record = self._membership.record()
        if record != self._record:
            self._journal.write(record)
            self._record = record

    def _stir(self) -> None:
        """Something happens: more may follow, and should not wait."""
        self._busy_until = time.monotonic() + _BUSY_SECONDS

    def _tell_engine(self) -> None:
        while self._saying and self._engine_gone_at is None and self._engine_takes_more():
            try:
                self._link.send(encode(self._saying.popleft()))
            except LinkClosed:
                self._lose_engine()

    def _engine_takes_more(self) -> bool:
        # a socket that is writable has room for far more than one of these messages
        poller = select.poll()
        poller.register(self._link.fileno(), select.POLLOUT)
        return bool(poller.poll(0))

    # -- the end -------------------------------------------------------------------------------------------------------

    def _over(self) -> bool:
        if self._closing:
            return True
        if self._engine_gone_at is None:
            return False
        now = time.monotonic()
        if not self._workers:
            return now - self._engine_gone_at > _ALONE_SECONDS
        return all(
            name in self._done or _gone(pid) or now - heard > _SILENT_SECONDS
            for name, (pid, heard) in self._workers.items()
        )


def _gone(pid: int) -> bool:
    """Whether there is no such process. 0 is a process that is not known: perhaps it is there."""
    if pid == 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
