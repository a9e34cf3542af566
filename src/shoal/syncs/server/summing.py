"""Gradients that come to a server: each counts once on each shard, and its worker is told when it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from shoal.syncs.server.holdings import Holdings
from shoal.syncs.server.intake import Intake, Unsound, check_push, seat_of
from shoal.syncs.server.messages import Lease, Part, Push, Said, Took, Touched
from shoal.syncs.server.mirroring import Key, Mirroring, key_of
from shoal.syncs.server.rows import RowsIntake
from shoal.syncs.server.shard import Holding
from shoal.syncs.server.tables import part_of

if TYPE_CHECKING:
    from shoal.syncs.server.journal import Journal
    from shoal.syncs.server.setup import Memory, Setup


class Fault(Protocol):
    """For tests: called where a server may die."""

    def __call__(self, point: str, *, server: int, step: int) -> None: ...


class Summing:
    """Takes the pushes of workers. Raises `Unsound`, or `Unfit`, for what cannot be right: nothing was made of it."""

    def __init__(
        self,
        setup: Setup,
        number: int,
        holdings: Holdings,
        mirroring: Mirroring,
        memory: Memory,
        journal: Journal | None,
        say: Callable[[bytes, Said], None],
        at: Fault,
    ) -> None:
        self._setup, self._number = setup, number
        self._holdings, self._mirroring, self._memory, self._journal = holdings, mirroring, memory, journal
        self._say, self._at = say, at
        self._arrival = setup.spec.apply == "arrival"
        self._intake = Intake(setup)
        self._rows = RowsIntake(setup)
        self._owed: dict[Key, list[tuple[bytes, Lease]]] = {}
        """Who is told once the mirror has a lease (`apply=arrival`)."""
        self._lent: dict[int, list[tuple[int, int]]] = {}
        """Shards and steps whose sums are gradients that lie where the worker in this seat left them."""
        self.changed: set[int] = set()
        """Shards whose weights have changed since somebody emptied this (`apply=arrival`)."""
        self.pushes = 0
        self.repeated = 0
        """Of these, how many counted on no shard."""

    def part(self, peer: bytes, sender: str, part: Part, frames: list[memoryview]) -> None:
        push = self._intake.part(peer, sender, part, frames)
        if push is not None:
            self.push(peer, sender, push)

    def touched(self, peer: bytes, sender: str, touched: Touched, frames: list[memoryview]) -> None:
        self._rows.take(peer, sender, touched, frames)

    def push(self, peer: bytes, sender: str, push: Push) -> None:
        check_push(self._setup, push)
        seat_of(sender)
        if missing := [shard for shard in push.shards if not self._holdings.holds(shard)]:
            raise Unsound(f"the shards {missing[:20]} are not held here")
        room = min(self._holdings[shard].version for shard in push.shards) + self._memory.steps
        if push.lease.step >= room:
            raise Unsound(f"a gradient of step {push.lease.step}; there is room for those before step {room}")
        known = all(self._holdings[shard].has(push.lease) for shard in push.shards)
        if known or push.slot is not None or self._intake.whole(peer, sender, push):
            self._count(peer, sender, push)

    def mirrored(self, key: Key) -> None:
        """A mirror has this."""
        for peer, lease in self._owed.pop(key, ()):
            self._say(peer, Took(lease, [key[0]]))

    def placed(self) -> None:
        """Mirrors have changed: nobody waits for one that is gone. Other holders are pushed to again."""
        for key in [key for key in self._owed if not self._mirroring.is_open(key)]:
            if self._holdings.holds(key[0]):
                self.mirrored(key)
            else:
                del self._owed[key]

    def drop(self, sender: str) -> None:
        """Forget what has come of this worker's gradient."""
        self._intake.drop(sender)
        self._rows.drop(sender)

    def _count(self, peer: bytes, sender: str, push: Push) -> None:
        lease = push.lease
        self._at("push", server=self._number, step=lease.step)
        if push.slot is not None:
            self._settle(seat_of(sender))
            if not self._arrival and not self._setup.tables:
                self._count_near(peer, sender, push)
                return
        taken, fresh = [], False
        for shard in push.shards:
            holding = self._holdings[shard]
            if not holding.has(lease):
                fresh = True
                self._add(holding, shard, push, self._gradient(peer, sender, push, shard), seat_of(sender))
            key = key_of(shard, lease.step, [(lease.start, lease.stop)])
            if self._arrival and self._mirroring.is_open(key):
                self._owed.setdefault(key, []).append((peer, lease))
            else:
                taken.append(shard)
        self.pushes += 1
        self.repeated += not fresh
        self.drop(sender)
        self._at("pushed", server=self._number, step=lease.step)
        if taken:
            self._say(peer, Took(lease, taken))

    def _count_near(self, peer: bytes, sender: str, push: Push) -> None:
        """As `_count`, but the worker is told first: what follows is sure to be done before the next letter is read."""
        lease, seat = push.lease, seat_of(sender)
        new = {}
        for shard in push.shards:
            if not self._holdings[shard].has(lease):
                new[shard] = self._gradient(peer, sender, push, shard)
                self._holdings[shard].check(lease, new[shard], push.used)
        self._say(peer, Took(lease, push.shards))
        for shard, gradient in new.items():
            self._add(self._holdings[shard], shard, push, gradient, seat)
        self.pushes += 1
        self.repeated += not new
        self.drop(sender)
        self._at("pushed", server=self._number, step=lease.step)

    def _gradient(self, peer: bytes, sender: str, push: Push, shard: int) -> Tensor:
        if part_of(self._setup, shard) is not None:
            return self._rows.gradient(peer, sender, push, shard)
        if push.slot is None:
            return self._intake.gradient(sender, shard)
        return self._holdings.slice(self._memory.gradient(seat_of(sender), push.slot), shard)

    def _add(self, holding: Holding, shard: int, push: Push, gradient: Tensor, seat: int) -> None:
        if self._arrival:
            self._apply(holding, shard, push, gradient)
        else:
            into = self._holdings.slice(self._memory.sum(push.lease.step), shard)
            holding.take(push.lease, gradient, push.used, push.scale, into, lent=push.slot is not None)
            if push.slot is not None and holding.lends(push.lease.step):
                self._lent.setdefault(seat, []).append((shard, push.lease.step))

    def _settle(self, seat: int) -> None:
        """A worker that pushes again begins to write where its gradient before this one lies, once it is told."""
        for shard, step in self._lent.pop(seat, ()):
            if shard in self._holdings:
                self._holdings[shard].settle(step)

    def _apply(self, holding: Holding, shard: int, push: Push, gradient: Tensor) -> None:
        """At once (`apply=arrival`)."""
        lease = push.lease
        span = self._setup.course.step(lease.step)
        rate = (lease.stop - lease.start) / span.samples
        copied = self._journal is not None or self._mirroring.mirror_of(shard) is not None
        # memory of its own: the worker's may be another's before the mirror has it, if the worker dies
        scaled = torch.empty_like(gradient) if copied else None
        with self._holdings.changing(shard):
            record = holding.arrive(lease, gradient, push.used, push.scale, rate, scaled)
        self.changed.add(shard)
        if record is None or scaled is None:
            return
        if self._journal is not None:
            self._journal.closed(lease.step, [(shard, record, scaled)])
        self._mirroring.tell(shard, record, scaled, shared=False)
