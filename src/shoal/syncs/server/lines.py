"""A worker's connections to the servers of its run, and how it waits for them.

A connection whose letters were refused is left, and a new one made: what is still on its way on the old one, and would
be refused as well, is not taken for an answer to what was sent anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import zmq

from shoal.comm.account import Account
from shoal.core.errors import ShoalError
from shoal.core.traffic import CONTROL, GRADIENT, LOOPBACK, NETWORK
from shoal.syncs.server.messages import (
    Letter,
    Part,
    Placement,
    Refused,
    Rows,
    Said,
    Took,
    Touched,
    Weights,
    decode_letter,
    encode,
)
from shoal.syncs.server.post import Line
from shoal.syncs.server.tables import held_bytes

if TYPE_CHECKING:
    from shoal.syncs.server.setup import Setup

LONG_WAIT = 10.0
"""Seconds without an answer, after which somebody is told."""
AGAIN = 60.0
"""Seconds without an answer, after which all is sent again over new connections, in case it was lost with an old one;
the next time it is twice as long, because perhaps there is just much to send."""
_BEHIND = 0.05
"""Seconds after which a server is asked again that did not know the placement yet."""
_SLACK = 1 << 20
"""Bytes of a message besides weights."""


class Keeper(Protocol):
    """Who knows what has been sent and not answered."""

    sent: int
    """Bytes so far."""
    account: Account

    def answered(self, server: int, body: Took | Weights | Rows, frames: list[memoryview]) -> None:
        """This has come."""

    def forget(self, server: int) -> None:
        """The connection is left: what this server has not answered counts as not sent."""

    def send_again(self) -> None:
        """Send all that holders have not been sent."""


class Lines:
    """Belongs to the thread that made it."""

    def __init__(
        self,
        setup: Setup,
        seat: int,
        host: str,
        keeper: Keeper,
        *,
        fd: int,
        hear: Callable[[], None],
        on_wait: Callable[[str], None] | None,
        clock: Callable[[], float],
    ) -> None:
        self._setup, self._seat, self._host, self._keeper = setup, seat, host, keeper
        self._fd, self._hear, self._on_wait, self._clock = fd, hear, on_wait, clock
        self._shares = host in setup.memory
        self._shards = len(setup.cut.shards)
        self._limit = sum(held_bytes(setup)) + _SLACK
        self.placement: Placement | None = None
        self._lines: dict[int, Line] = {}
        self._terms: dict[int, int] = {}
        """By server: that of the placement when its line was made; the oldest that a letter on it can have."""
        self._refused: dict[int, int] = {}
        """Servers that know a placement of this term, which this worker has not heard of yet."""
        self._behind: dict[int, float] = {}
        """Servers that do not know the placement yet, and when they are asked again."""

    # -- who holds what ------------------------------------------------------------------------------------------------

    def place(self, placement: Placement) -> bool:
        """Leave servers that went away or were started again. False: this placement is no news."""
        before = self.placement
        if before is not None and placement.term <= before.term:
            return False
        if len(placement.holders) != self._shards:
            raise ShoalError(
                f"a placement of {len(placement.holders)} shards came, and this worker's model has {self._shards}; "
                "build the same model in all processes"
            )
        self.placement = placement
        self._refused = {server: term for server, term in self._refused.items() if term > placement.term}
        if before is not None:
            for server in list(self._lines):
                if placement.endpoints.get(server) != before.endpoints.get(server):
                    self._drop(server)
        return True

    def holder(self, shard: int) -> int:
        assert self.placement is not None
        return self.placement.holders[shard].server

    def near(self, server: int) -> bool:
        assert self.placement is not None
        return self._shares and self.placement.hosts.get(server) == self._host

    def holders(self, shards: Sequence[int]) -> str:
        """In words."""
        if self.placement is None:
            return "the first placement"
        return ", ".join(f"server {server}" for server in sorted({self.holder(shard) for shard in shards}))

    def _drop(self, server: int) -> None:
        line = self._lines.pop(server, None)
        if line is not None:
            line.close()
        for waiting in (self._terms, self._refused, self._behind):
            waiting.pop(server, None)
        self._keeper.forget(server)

    def close(self) -> None:
        for server in list(self._lines):
            self._drop(server)

    # -- letters -------------------------------------------------------------------------------------------------------

    def send(self, server: int, body: Said, frames: Sequence[memoryview] = ()) -> bool:
        """False if there is no such server at present: another placement will say who has its shards."""
        assert self.placement is not None
        line = self._lines.get(server)
        if line is None:
            endpoint = self.placement.endpoints.get(server)
            if endpoint is None or server in self._refused:
                return False
            line = self._lines[server] = Line(endpoint, self._setup.keys, limit=self._limit)
            self._terms[server] = self.placement.term
        letter = encode(Letter(self._setup.run, self.placement.term, f"worker-{self._seat}", body))
        line.send(letter, frames)
        self._count(server, body, len(letter), frames)
        return True

    def _count(self, server: int, body: Said, letter: int, frames: Sequence[memoryview]) -> None:
        assert self.placement is not None
        link = LOOPBACK if self.placement.hosts.get(server) == self._host else NETWORK
        size = sum(frame.nbytes for frame in frames)
        self._keeper.sent += letter + size
        self._keeper.account.sent(CONTROL, link, letter, 1)
        if frames:
            encoded = isinstance(body, Part) and body.encoded
            kind = GRADIENT if isinstance(body, Part | Touched) else CONTROL
            self._keeper.account.sent(kind, link, size, len(frames), self._setup.codec.name if encoded else "none")

    def _drain(self) -> None:
        """Handle all that has come."""
        now = self._clock()
        for server in [server for server, due in self._behind.items() if now >= due]:
            self._drop(server)
            self._keeper.send_again()
        more = True
        while more:
            more = False
            for server, line in list(self._lines.items()):
                while self._lines.get(server) is line and (message := line.receive()) is not None:
                    more = True
                    self._handle(server, message.letter, message.frames)

    def _handle(self, server: int, data: bytes, frames: list[memoryview]) -> None:
        try:
            letter = decode_letter(data)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ShoalError(f"server {server} sent what is not a letter: {error}") from error
        if letter.run != self._setup.run:
            return
        match letter.body:
            case Took() | Weights() | Rows() as answer:
                self._keeper.answered(server, answer, frames)
            case Refused() as refused:
                self._was_refused(server, refused)
            case other:
                raise ShoalError(f"server {server} sent a worker {type(other).__name__}, which is not for workers")

    def _was_refused(self, server: int, refused: Refused) -> None:
        assert self.placement is not None
        sent = self._terms[server]
        if refused.term > self.placement.term:
            self._drop(server)
            self._refused[server] = refused.term
        elif refused.term > sent:  # what was sent before the placement that both know by now
            self._drop(server)
            self._keeper.send_again()
        elif refused.term < sent:
            self._behind.setdefault(server, self._clock() + _BEHIND)
        else:
            raise ShoalError(f"server {server} refused what worker {self._seat} asked of it: {refused.why}")

    # -- waiting -------------------------------------------------------------------------------------------------------

    def wait(self, done: Callable[[], bool], what: Callable[[], str]) -> None:
        """Until `done`, whatever servers or the control link bring; `what` it is for, in words."""
        since = heard = self._clock()
        told, patience, counted = False, AGAIN, -1
        while True:
            self._drain()
            if done():
                return
            now = self._clock()
            received = sum(line.received for line in self._lines.values())
            if received != counted:
                heard, counted = now, received
            if not told and now - since >= LONG_WAIT and self._on_wait is not None:
                told = True
                self._on_wait(f"worker {self._seat} has waited {now - since:.0f} s for {what()}")
            if now - heard >= patience:
                patience, heard = 2 * patience, now
                for server in list(self._lines):
                    self._drop(server)
                self._keeper.send_again()
            self.turn(min(_BEHIND, 1.0) if self._behind else 1.0)

    def turn(self, timeout: float) -> None:
        """Wait until something comes from a server or on the control link, which is heard."""
        poller = zmq.Poller()
        poller.register(self._fd, zmq.POLLIN)
        for line in self._lines.values():
            poller.register(line.fileno(), zmq.POLLIN)
        if self._has_come():
            timeout = 0.0
        ready = dict(poller.poll(round(timeout * 1000)))
        if self._fd in ready:
            self._hear()

    def _has_come(self) -> bool:
        """ZeroMQ's descriptors tell of what comes once, and not again what came before."""
        return any(line.wait(0.0) for line in self._lines.values())
