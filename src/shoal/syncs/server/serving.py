"""A server's process: sums what workers push, applies what the clerk orders, answers who asks for weights.

One thread, one loop, over the port that workers and other servers write to, the lines to mirrors, and the link to the
clerk. All that is decided by numbers is in `shard.Holding`; here is who gets told what, and when.

A letter of an older placement than ours is refused, and one of a newer waits until that placement has come: they
travel on another way than letters.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

from shoal.core.errors import AuditError
from shoal.data.parcel import seal
from shoal.syncs.server.answering import Answering
from shoal.syncs.server.frames import message_limit
from shoal.syncs.server.holdings import Holdings
from shoal.syncs.server.intake import Unsound
from shoal.syncs.server.journal import Journal
from shoal.syncs.server.messages import (
    Applied,
    Apply,
    Begin,
    Close,
    Closed,
    Complaint,
    Copy,
    End,
    Fetch,
    Kept,
    LetGo,
    Letter,
    Mirror,
    Part,
    Placement,
    Pull,
    Push,
    Refused,
    Said,
    Send,
    Serving,
    Touched,
    decode_letter,
    encode,
)
from shoal.syncs.server.mirroring import Mirroring
from shoal.syncs.server.post import Arrival, Port
from shoal.syncs.server.reflecting import Reflecting
from shoal.syncs.server.rows import RowAnswers
from shoal.syncs.server.setup import Memory, Setup
from shoal.syncs.server.shard import Unfit
from shoal.syncs.server.summing import Fault, Summing
from shoal.syncs.server.tables import part_of
from shoal.wire.link import Frame, FrameError, Link, LinkClosed

_LETTERS_AT_ONCE = 64
_MOST_EARLY = 1024
"""Letters that wait for a placement."""
_LOOK_SECONDS = 0.5
"""How long the loop sleeps at most."""
_SOON_SECONDS = 0.001
_down = msgspec.msgpack.Decoder(Placement | Begin | Close | Apply | Send | LetGo | End)


def serve(setup: Setup, number: int, link: Link, host: str) -> None:
    """Be server `number` until the clerk says that the run is over, or is gone. The process's main.

    Raises what the user's optimizer or schedule raise, and `AuditError` if the gradients of a step are not exactly its
    positions: the caller reports it.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the supervisor, which says what follows
    limit = message_limit(setup)
    with contextlib.ExitStack() as stack:
        journal: Journal | None = None
        if setup.spec.durability == "disk" and setup.journals is not None:
            journal = stack.enter_context(contextlib.closing(Journal(setup.journals / f"server-{number}")))
        port = stack.enter_context(contextlib.closing(Port(setup.keys, host, limit=limit)))
        mirroring = stack.enter_context(contextlib.closing(Mirroring(setup, number, limit)))
        with contextlib.suppress(LinkClosed):  # without the clerk there is nothing to serve
            ServerLoop(setup, number, link, host, port, mirroring, journal).run()


def _no_fault(point: str, *, server: int, step: int) -> None:
    pass


class ServerLoop:
    """One server, between its port, its lines to mirrors and its link."""

    def __init__(
        self,
        setup: Setup,
        number: int,
        link: Link,
        host: str,
        port: Port,
        mirroring: Mirroring,
        journal: Journal | None,
    ) -> None:
        self._setup, self._number, self._link, self._port, self._mirroring = setup, number, link, port, mirroring
        self._memory: Memory = setup.memory[host]
        self._arrival = setup.spec.apply == "arrival"
        self._answering = Answering(self._say, self._refuse)
        self._rows = RowAnswers(setup, self._say, self._refuse)
        self._journal = journal
        self._holdings = Holdings(setup, number, self._memory, self._journal)
        self._at: Fault = setup.extra.get("faults") or _no_fault
        self._summing = Summing(
            setup, number, self._holdings, mirroring, self._memory, self._journal, self._say, self._at
        )
        self._reflecting = Reflecting(self._holdings, self._memory, self._say)
        self._begun = self._over = False
        self._placement: Placement | None = None
        self._closing: dict[int, bool] = {}
        """Steps that the clerk waits for, and whether for their norms."""
        self._told: deque[Any] = deque()
        """By the clerk, and not done: a placement that has to wait, and what came after it."""
        self._orders: deque[Apply] = deque()
        """To apply steps whose records are not all here."""
        self._early: deque[tuple[bytes, Letter, list[memoryview]]] = deque()
        self._early_bytes = 0
        self._complained: set[str] = set()

    def run(self) -> None:
        """Returns when the run is over. Raises `LinkClosed` if the clerk is gone."""
        self._tell(Serving(self._port.endpoint, os.getpid()))
        while True:
            busy = self._hear_clerk()
            if self._over:
                return
            if self._told:
                self._link.poll(_SOON_SECONDS)
                continue
            busy |= self._hear_letters()
            busy |= self._hear_mirrors()
            if not busy:  # lines tell of changes only: they must have been read empty
                self._port.wait(_LOOK_SECONDS, self._link.fileno(), *self._mirroring.descriptors())

    @property
    def _term(self) -> int:
        return -1 if self._placement is None else self._placement.term

    # -- hearing -------------------------------------------------------------------------------------------------------

    def _hear_clerk(self) -> bool:
        heard = False
        while (frame := self._receive()) is not None:
            heard = True
            self._told.append(_down.decode(frame[0]))
        while self._told and not self._over:
            order = self._told[0]
            if isinstance(order, Placement) and self._must_wait(order):
                break
            self._told.popleft()
            self._obey(order)
        return heard

    def _receive(self) -> Frame | None:
        try:
            return self._link.try_recv()
        except FrameError as error:
            raise LinkClosed(str(error)) from error

    def _must_wait(self, placement: Placement) -> bool:
        """Let go of what is not ours any longer; whether another server has yet to do so of what is ours from now on.

        Until then nothing is heard: what is of the placement before comes too late, and what is of this one too early.
        """
        if placement.term <= self._term or not self._begun:
            return False
        self._check(placement)
        latest = [order for order in self._told if isinstance(order, Placement)][-1]
        self._holdings.leave(placement)
        return self._holdings.must_wait(self._placement, placement, latest)

    def _check(self, placement: Placement) -> None:
        if len(placement.holders) != len(self._setup.cut.shards):
            raise AuditError(
                f"a placement of {len(placement.holders)} shards; the model is cut into {len(self._setup.cut.shards)}"
            )

    def _obey(self, order: Any) -> None:
        match order:
            case Begin():
                self._begin(order)
            case Placement():
                self._place(order)
            case Close():
                self._close(order.step, order.norm)
            case Apply():
                self._orders.append(order)
                self._advance()
            case Send():
                self._send_kept(order.version)
            case LetGo():
                self._holdings.let_go(order.version)
            case End():
                self._over = True

    def _hear_letters(self) -> bool:
        for count in range(_LETTERS_AT_ONCE):
            arrival = self._port.receive()
            if arrival is None:
                return count > 0
            self._open_letter(arrival)
        return True

    def _open_letter(self, arrival: Arrival) -> None:
        try:
            letter = decode_letter(arrival.letter)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            self._complain("a message that is not a letter")
            return
        if letter.run != self._setup.run:
            self._complain("a letter of another run")
            return
        self._sort(arrival.peer, letter, arrival.frames)

    def _sort(self, peer: bytes, letter: Letter, frames: list[memoryview]) -> None:
        if letter.term < self._term:
            self._refuse(peer, f"it is of term {letter.term}")
        elif letter.term > self._term or not self._begun:
            self._keep_early(peer, letter, frames)
        else:
            try:
                self._take(peer, letter.sender, letter.body, frames)
            except (Unsound, Unfit) as error:
                self._summing.drop(letter.sender)
                self._complain(f"a letter of {letter.sender[:40]} that cannot be right ({error})")
                self._refuse(peer, str(error))

    def _keep_early(self, peer: bytes, letter: Letter, frames: list[memoryview]) -> None:
        size = sum(frame.nbytes for frame in frames)
        if len(self._early) >= _MOST_EARLY or self._early_bytes + size > message_limit(self._setup):
            self._refuse(peer, "too much waits here for the next placement")
            return
        self._early.append((peer, letter, frames))
        self._early_bytes += size

    def _take(self, peer: bytes, sender: str, body: Said, frames: list[memoryview]) -> None:
        match body:
            case Part():
                self._summing.part(peer, sender, body, frames)
            case Push():
                self._summing.push(peer, sender, body)
            case Pull():
                self._answering.forget(self._summing.changed)
                self._answering.ask(peer, body, self._holdings.held())
            case Mirror():
                self._reflecting.record(peer, body, frames)
                self._advance()
            case Copy():
                self._reflecting.copy(peer, body, frames)
                self._tell_holds()
                self._advance()
            case Touched():
                self._summing.touched(peer, sender, body, frames)
            case Fetch():
                self._rows.ask(peer, body, frames, self._holdings.held())
            case _:
                raise Unsound(f"servers are not told {type(body).__name__}")

    def _hear_mirrors(self) -> bool:
        heard = False
        for key in self._mirroring.hear():
            heard = True
            self._summing.mirrored(key)
        if heard:
            self._tell_closed()
        elif self._mirroring.is_overdue():
            self._copy(self._mirroring.uncopied())
        return heard

    # -- the ends of steps ---------------------------------------------------------------------------------------------

    def _close(self, step: int, norm: bool) -> None:
        self._at("close", server=self._number, step=step)
        closed = []
        for shard, holding in self._holdings.held().items():
            if not self._arrival and not holding.is_closed(step):
                closed.append((shard, holding.close(step), holding.sum_of(step)))
        if self._journal is not None and closed:
            self._journal.closed(step, closed)
        for shard, record, total in closed:
            self._mirroring.tell(shard, record, total, shared=part_of(self._setup, shard) is None)
        self._closing[step] = norm
        self._tell_closed()

    def _tell_closed(self) -> None:
        held = self._holdings.held()
        for step in sorted(self._closing):
            if any(self._mirroring.waits(shard, step) for shard in held):
                continue
            norm = self._closing.pop(step)
            if not self._arrival and not all(holding.is_closed(step) for holding in held.values()):
                continue  # shards whose holder died came to this server: the clerk will have it closed again
            there = held.values() if norm and not self._arrival else ()
            self._tell(Closed(step, math.fsum(holding.norm(step) for holding in there if holding.version <= step)))
            self._at("closed", server=self._number, step=step)

    def _advance(self) -> None:
        """Carry out orders, as far as all that they need is here."""
        while self._orders and self._holdings.can(self._orders[0].step):
            self._apply(self._orders.popleft())

    def _apply(self, order: Apply) -> None:
        began = time.monotonic()
        self._at("apply", server=self._number, step=order.step)
        ledger = getattr(self._at, "ledger", None)
        rates = self._holdings.apply(order, ledger, self._term, some=self._answer)
        if self._journal is not None:
            self._journal.applied(order)
            if self._journal.grown and not self._holdings.keeps():  # what is kept is in the log only
                self._journal.compact(self._holdings.states())
        self._at("applied", server=self._number, step=order.step)
        self._tell(
            Applied(
                order.step + 1,
                rates,
                time.monotonic() - began,
                self._port.received + self._mirroring.received,
                self._port.sent + self._mirroring.sent,
                self._summing.pushes,
                self._summing.repeated,
            )
        )
        self._answer()
        self._rows.answer(self._holdings.held())

    def _answer(self) -> None:
        self._answering.forget(self._summing.changed)
        self._answering.answer(self._holdings.held())

    def _send_kept(self, version: int) -> None:
        kept: dict[int, Any] = {}
        for shard, holding in self._holdings.held().items():
            if holding.keeps(version):
                kept[shard] = holding.kept(version)
        # parts of tables may be large: each by itself
        alone = [shard for shard in kept if part_of(self._setup, shard) is not None]
        groups = [*([shard] for shard in alone), [shard for shard in kept if shard not in alone]]
        for number, shards in enumerate(groups, 1):
            parcel, buffers = seal({shard: kept[shard] for shard in shards})
            self._link.send(encode(Kept(version, shards, number < len(groups))), [parcel, *buffers])

    # -- who has what --------------------------------------------------------------------------------------------------

    def _begin(self, order: Begin) -> None:
        self._holdings.begin(order)
        self._begun = True
        self._settle()

    def _place(self, placement: Placement) -> None:
        if placement.term <= self._term:
            return
        self._check(placement)
        self._placement = placement
        self._settle()

    def _settle(self) -> None:
        """Be what the placement says, once there is one and there is something to hold."""
        placement = self._placement
        if placement is None or not self._begun:
            self._tell_holds()
            return
        self._holdings.place(placement)
        self._copy(self._mirroring.place(placement))
        self._summing.placed()
        self._tell_closed()
        self._answering.placed()
        self._rows.placed()
        self._tell_holds()
        self._advance()
        early, self._early, self._early_bytes = self._early, deque(), 0
        for peer, letter, frames in early:
            self._sort(peer, letter, frames)

    def _copy(self, shards: Iterable[int]) -> None:
        """Send these to their mirrors, and all that they have not acknowledged."""
        for shard in shards:
            holding = self._holdings[shard]
            self._mirroring.copy(shard, holding.version, holding.state())
        self._mirroring.again()

    def _tell_holds(self) -> None:
        self._tell(self._holdings.told(max(self._term, 0)))

    # -- telling -------------------------------------------------------------------------------------------------------

    def _say(self, peer: bytes, body: Said, frames: list[memoryview] | None = None) -> None:
        letter = Letter(self._setup.run, self._term, f"server-{self._number}", body)
        self._port.send(peer, encode(letter), frames or [], copy=False)

    def _refuse(self, peer: bytes, why: str) -> None:
        self._say(peer, Refused(max(self._term, 0), why))

    def _tell(self, message: msgspec.Struct) -> None:
        self._link.send(encode(message))

    def _complain(self, what: str) -> None:
        """Once of each kind: who sends one such letter may send many."""
        kind = what.partition(" (")[0]
        if kind not in self._complained and len(self._complained) < 20:
            self._complained.add(kind)
            self._tell(Complaint(f"server {self._number} dropped {what}; further ones are dropped without a word"))
