"""A crowd: thousands of simulated members and a real coordinator, over a transport in memory that counts messages.

A member of the crowd says what a worker says from its start until its term stands: `QUESTIONS` are those that
`shoal.comm` asks of the store of a term where members share memory on several hosts. It computes nothing and does not
beat. Letters and answers are encoded and decoded as they are between processes.
"""

from __future__ import annotations

import select
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from shoal.cluster import messages as ms
from shoal.cluster.coordinator.coordinator import Coordinator
from shoal.cluster.coordinator.journal import Journal
from shoal.cluster.member.writing import Writing
from shoal.cluster.roster.membership import Plan
from shoal.wire.link import Link

PER_HOST = 8
QUESTIONS = 5
"""Of each member, to meet: where it is, the segment of its host, two agreements, who can be reached."""
_RUN, _VERSION, _SIGNATURE = "a-crowd", "1.0", b"the model"
_DECODED = 64


@dataclass
class MemoryServer:
    """In the place of `shoal.wire.curve.Server`: what members send is in `letters`, what they are sent in `answers`."""

    endpoint: str = "memory://"
    letters: deque[tuple[bytes, bytes]] = field(default_factory=deque)
    answers: deque[tuple[bytes, bytes]] = field(default_factory=deque)
    messages: int = 0
    """Both ways, so far."""

    def receive(self) -> tuple[bytes, bytes] | None:
        return self.letters.popleft() if self.letters else None

    def send(self, peer: bytes, payload: bytes) -> None:
        self.messages += 1
        self.answers.append((peer, payload))

    def say(self, peer: bytes, payload: bytes) -> None:
        self.messages += 1
        self.letters.append((peer, payload))


class Member:
    """One simulated worker."""

    def __init__(self, seat: int, server: MemoryServer) -> None:
        self.name = ms.name_of(seat)
        self.standing = 0
        """The last term of which it said that it is formed."""
        self._peer = self.name.encode()
        self._server = server
        self._writing = Writing(_RUN, self.name)
        self._told = 0
        self._meeting: Iterator[ms.Question] = iter(())
        self.say(ms.Hello(_VERSION, _SIGNATURE, 0))

    def hear(self, body: ms.Down) -> None:
        match body:
            case ms.Welcome() | ms.Regroup():
                self.say(ms.Ready(self._told, 0, self.standing > 0))
            case ms.Term() if body.number > self._told:
                self._told = body.number
                self._meeting = self._questions(body)
                self._go_on()
            case ms.Held(gone=False) | ms.Gathered():
                self._go_on()

    def _go_on(self) -> None:
        question = next(self._meeting, None)
        if question is not None:
            self.say(question)
        elif self.standing < self._told:
            self.standing = self._told
            self.say(ms.Formed(self._told))

    def _questions(self, term: ms.Term) -> Iterator[ms.Question]:
        rank, size = term.members.index(self.name), len(term.members)
        host, number = rank // PER_HOST, self._writing.question
        is_first, segment = rank % PER_HOST == 0, f"segment/{host * PER_HOST}"
        place = f"a-boot-id-of-36-characters-{host:08d}/25:1\nhost-{host}\n10.0.0.1"
        yield ms.Gather(number(), term.number, "place", rank, size, place.encode())
        if is_first:
            yield ms.Put(number(), term.number, segment, b"shoal-a-crowd-0123456789abcdef")
        else:
            yield ms.Get(number(), term.number, segment)
        for word in ("there", "proven"):
            yield ms.Gather(number(), term.number, word, rank, size, b"-")
        if is_first:
            yield ms.Gather(number(), term.number, "door", host, -(-size // PER_HOST), b"40000")
        yield ms.Gather(number(), term.number, "reach", rank, size, b'[[],""]')

    def say(self, body: ms.Up) -> None:
        self._server.say(self._peer, self._writing.letter(body))


class Crowd:
    """A run of so many members. `close` when done."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.server = MemoryServer()
        self.members: dict[int, Member] = {}
        self.changes: list[ms.Changed] = []
        self.said: Counter[type[ms.ToEngine]] = Counter()
        self.starts: deque[int] = deque()
        """Seats for which the coordinator has ordered a process that does not exist yet."""
        self._by_peer: dict[bytes, Member] = {}
        self._decoded: dict[bytes, ms.Down] = {}
        self._journal = Journal(folder)
        self._link, its = Link.pair()
        plan = Plan(workers, 1, workers, _VERSION, _RUN)
        self._its = its
        self._coordinator = Coordinator(_RUN, plan, self.server, its, self._journal)  # type: ignore[arg-type]
        self._link.send(ms.encode(ms.Present([])))

    def start_all(self) -> None:
        """Start what the coordinator has asked for."""
        while self.starts:
            seat = self.starts.popleft()
            member = self.members[seat] = Member(seat, self.server)
            self._by_peer[member.name.encode()] = member

    def kill(self, seat: int) -> None:
        member = self.members.pop(seat)
        del self._by_peer[member.name.encode()]
        self._link.send(ms.encode(ms.Ended(seat, "was killed")))

    def turn(self) -> None:
        """One of the coordinator, and then one of every member and of the engine."""
        if not self._coordinator.turn():
            select.select([self._link.fileno()], [], [], 0.001)
        answers, self.server.answers = self.server.answers, deque()
        for peer, payload in answers:
            member = self._by_peer.get(peer)
            if member is not None:
                member.hear(self._decode(payload))
        while (frame := self._link.try_recv()) is not None:
            self._hear_order(ms.decode_to_engine(frame[0]))

    def close(self) -> None:
        with closing(self._journal):
            self._link.close()
            self._its.close()

    def _decode(self, payload: bytes) -> ms.Down:
        """Terms are the same for all: thousands of processes decode theirs side by side, and this is one."""
        found = self._decoded.get(payload)
        if found is None:
            if len(self._decoded) >= _DECODED:
                self._decoded.clear()
            found = self._decoded[payload] = ms.decode_down(payload)
        return found

    def _hear_order(self, order: ms.ToEngine) -> None:
        self.said[type(order)] += 1
        if isinstance(order, ms.Start):
            self.starts.append(order.seat)
        elif isinstance(order, ms.Changed):
            self.changes.append(order)
