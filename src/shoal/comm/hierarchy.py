"""The group of workers on several hosts: shared memory inside a host, a ring between the hosts' first members.

A sum has four stages. The members of a host add up their parts into the first member's buffer; that one sums over the
hosts; the others copy the result from it; and it waits until they have. Between hosts go the bytes of one worker each.

`relay` leaves the second of these stages to its caller, who may send something smaller than the sum between hosts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.backend import BackendGroup, BackendWork
from shoal.comm.group import CPU, AtOnce, Done, Group, Work, numbers_of
from shoal.comm.shm.group import ShmGroup
from shoal.comm.shm.notes import RELAY, other
from shoal.comm.shm.plan import Plan
from shoal.comm.shm.shared import Area, Channel, Shared, Wait, whole
from shoal.comm.shm.work import Sum, whole_or_broken
from shoal.comm.strings import gather_bytes_by_rows
from shoal.core.errors import GroupError
from shoal.core.traffic import CONTROL, GRADIENT, MEMORY

_BACK, _COPIED = 2, 3
_POLL_SECONDS = 0.0001
_LOOK_SECONDS = 0.05
_PIECE = 1 << 20
"""Bytes that cross at a time, about."""


def _pieces(numbers: Tensor) -> Sequence[Tensor]:
    """What crosses at a time. The same cuts wherever a tensor lies: a ring's order of adding depends on them."""
    count = max(1, round(numbers.nbytes / _PIECE))
    cut: tuple[Tensor, ...] = numbers.split(-(-numbers.numel() // count))
    return cut


def _sum_in_pieces(across: BackendGroup, numbers: Tensor, kind: str) -> None:
    for work in [across.sum(piece, kind) for piece in _pieces(numbers)]:
        work.wait()


class _HostPlan(Plan):
    """How a part of an area is summed inside a host, into the first member's memory, and copied back from there."""

    def __init__(self, shared: Shared, area: Area, offset: int, count: int, dtype: torch.dtype) -> None:
        super().__init__(shared, area, offset, count, dtype)
        rows = whole(area, offset, count, dtype)
        self.first, self.mine = rows[0], rows[shared.rank]
        part = sum(block[0].nbytes for block in self.blocks)
        self.moved = (shared.size - 1 + (shared.rank != 0)) * part

    def add_to_first(self) -> None:
        shared = self._shared
        for first, *others in self.blocks:
            if shared.revoked:
                shared.refuse_broken()
            for added in others:
                first.add_(added)

    def copy_from_first(self) -> None:
        shared = self._shared
        for mine, first in zip(_pieces(self.mine), _pieces(self.first), strict=True):
            if shared.revoked:
                shared.refuse_broken()
            mine.copy_(first)


class _HostGroup(ShmGroup):
    """The members of one host, as a part of all hosts' members. `across` is the first member's ring to other hosts."""

    def __init__(self, shared: Shared, across: BackendGroup | None, run: str, warn: Callable[[str], None]) -> None:
        super().__init__(shared, run, warn)
        self.across = across
        self._back, self._copied = Channel(shared, _BACK), Channel(shared, _COPIED)
        self._stages = [self._add, self._cross, self._arrive, self._leave]
        self._queues = [deque() for _ in self._stages]
        self._crossing: dict[int, BackendWork] = {}

    def _plan(self, area: Area, offset: int, count: int, dtype: torch.dtype) -> Plan:
        return _HostPlan(self._shared, area, offset, count, dtype)

    def in_place(self, buffer: Tensor) -> bool:
        return buffer.numel() > 0 and self._place(numbers_of(buffer)) is not None

    def _start(self, numbers: Tensor, kind: str) -> Work:
        """In pieces: while one crosses, the next is added, and the one before copied."""
        works = []
        for number, piece in enumerate(_pieces(numbers)):
            if number:
                self.account.begun(0)
            works.append(super()._start(piece, kind))
        return _Pieces(works)

    def _add(self, work: Sum, wait: bool) -> bool:
        """Add this member's part once all of the host are ready."""
        plan = work.plan
        if not isinstance(plan, _HostPlan):
            return super()._add(work, wait)
        if plan.owns:
            if not self._hear(work, self._ready, self._peers, wait):
                return False
            self._check(work.number)
            plan.add_to_first()
            self.account.sent(work.kind, MEMORY, plan.moved, len(self._peers) + (self.rank != 0))
            if self.rank:
                self._done.tell(0)
        return True

    def _cross(self, work: Sum, wait: bool) -> bool:
        """On the first member: start the sum over hosts, once all parts of this host have been added."""
        if self.across is not None:
            if not self._hear(work, self._done, work.plan.other_owners, wait):
                return False
            assert isinstance(work.plan, _HostPlan)
            across, plan = self.across, work.plan
            self._crossing[work.number] = self._of_hosts(lambda: across.sum(plan.first, work.kind))
        return True

    def _arrive(self, work: Sum, wait: bool) -> bool:
        """The sum over hosts is there: pass it on, or take it over."""
        if self.across is not None:
            if not wait and not self._crossing[work.number].is_complete():
                return False
            self._of_hosts(self._crossing.pop(work.number).wait)
            self._back.tell_all(self._peers)
            return True
        if wait:
            # others of this host may need this member's part of the sums behind this one
            self._back.hear(0, meanwhile=lambda: self._advance(2))
        elif not self._back.heard(0):
            return False
        assert isinstance(work.plan, _HostPlan)
        self._take_over(work.plan, work.kind)
        return True

    def _take_over(self, plan: _HostPlan, kind: str) -> None:
        plan.copy_from_first()
        self._copied.tell(0)
        self.account.sent(kind, MEMORY, plan.mine.nbytes, 1)

    @whole_or_broken
    def sum_to_first(self, numbers: Tensor, kind: str) -> _HostPlan:
        """Add up a buffer that lies in place into the first member's memory, there to be used until `pass_on`."""
        self._begin()
        self.drain()
        found = self._place(numbers)
        assert found is not None
        where, plan = found
        assert isinstance(plan, _HostPlan)
        work = Sum(self, self._number, plan, kind)
        self._announce(plan, other(RELAY, numbers.nbytes), where)
        self._add(work, True)
        if self.rank == 0:
            self._done.hear_all(plan.other_owners)
        self._end()
        return plan

    @whole_or_broken
    def pass_on(self, plan: _HostPlan, kind: str) -> None:
        """All members copy what the first one has now; it may change its memory again when this returns."""
        self._begin()
        if self.rank == 0:
            self._back.tell_all(self._peers)
            self._copied.hear_all(self._peers)
        else:
            self._back.hear(0)
            self._take_over(plan, kind)
        self._end()

    def _of_hosts(self, call: Callable[[], Any]) -> Any:
        """What breaks between hosts breaks the host as well, whoever called."""
        try:
            return call()
        except GroupError as error:
            trouble = str(error)
        self._shared.break_up(trouble)

    def _hear(self, work: Sum, channel: Channel, members: list[int], wait: bool) -> bool:
        if not wait:
            return super()._hear(work, channel, members, wait)
        # members that have not started this sum may be waiting for one ahead of it, in a later stage
        later = 1 if channel is self._ready else 2 if channel is self._done else 4
        while work.heard < len(members):
            channel.hear(members[work.heard], meanwhile=lambda: self._advance(4, later))
            work.heard += 1
        return True

    def _leave(self, work: Sum, wait: bool) -> bool:
        return self.across is None or self._hear(work, self._copied, self._peers, wait)

    def await_hosts(self, work: Any) -> None:
        """Wait for an operation between hosts, and go on with what is behind it; the host's members must be alive."""
        assert self.across is not None
        wait, looked, gone = Wait(self._shared), time.monotonic(), 0
        while not work.is_completed():
            if self._advance(2):
                continue
            if wait.lost():
                self._shared.break_up(wait.text, wait.culprit)
            if time.monotonic() - looked > _LOOK_SECONDS:
                looked = time.monotonic()
                self.across.refuse_strayed()
                gone = gone + 1 if self.across.lost_peer() else 0
                if gone > 1:
                    self.across.abandon()
            time.sleep(_POLL_SECONDS)
        work.wait()


class HierarchicalGroup(AtOnce):
    """Members on several hosts. Made by `make_group`."""

    collective = "hierarchical"

    def __init__(
        self,
        rank: int,
        hosts: Sequence[int],
        shared: Shared,
        across: BackendGroup | None,
        *,
        run: str,
        warn: Callable[[str], None],
        reason: str = "",
    ) -> None:
        self.rank = rank
        self.size = len(hosts)
        self.hosts = tuple(hosts)
        self.reason = reason
        self._shared = shared
        self._host = _HostGroup(shared, across, run, warn)
        self._across = across
        self._members = [[at for at, host in enumerate(hosts) if host == number] for number in range(max(hosts) + 1)]
        self.account = self._host.account
        self._host.counts = 0
        if across is not None:
            across.account, across.counts = self.account, 0
            across.patience = self._host.await_hosts
            shared.on_break.append(lambda: across.give_up("the host broke"))

    @property
    def across(self) -> Group | None:
        """The group of the hosts' first members, on these; None on others. Its bytes are in this group's account.

        Used inside of `relay` only: the host's members wait for its first one there.
        """
        return self._across

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        return self._host.buffer(numel, dtype, device)

    def release(self, buffer: Tensor) -> None:
        self._host.release(buffer)

    def sum(self, buffer: Tensor, kind: str = GRADIENT) -> Work:
        self.account.counted()
        if self._host.in_place(buffer):
            return self._host.sum(buffer, kind)
        self._host.sum(buffer, kind).wait()
        if buffer.numel():
            self._between(lambda across: _sum_in_pieces(across, numbers_of(buffer), kind))
            self._host.broadcast(buffer, kind)
        return Done()

    def scatter_sum(self, buffer: Tensor, kind: str = GRADIENT) -> Tensor:
        total = buffer.clone()
        self.sum(total, kind).wait()
        return total[self.rank].clone()

    def swap(self, rows: Tensor, kind: str = GRADIENT) -> Tensor:
        return self.gather(rows, kind)[:, self.rank].clone()

    def relay(self, buffer: Tensor, cross: Callable[[Group], None], kind: str = GRADIENT) -> None:
        """Sum `buffer` inside each host, have `cross` change it between hosts, and give the result to all members.

        `cross` is called on each host's first member with the group of them (`across`), when the host's sum is in
        `buffer` there; it uses nothing but that group, and leaves in `buffer` what its host shall have. An exception
        out of it breaks the group, on all hosts, and goes on to the caller. On other members `buffer` may be neither
        read nor written by other threads meanwhile. Where `buffer` lies in place nothing is copied on the way.
        """
        self.account.counted()
        if self._host.in_place(buffer):
            plan = self._host.sum_to_first(numbers_of(buffer), kind)
            self._between(cross)
            self._host.pass_on(plan, kind)
            return
        self._host.sum(buffer, kind).wait()
        self._host.drain()
        self._between(cross)
        self._host.broadcast(buffer, kind)

    def gather(self, buffer: Tensor, kind: str = CONTROL) -> Tensor:
        self.account.counted()
        rows = self._host.gather(buffer, kind)
        stacked = buffer.new_empty((self.size, *buffer.shape))

        def collect(across: BackendGroup) -> None:
            padded = rows.new_zeros((max(map(len, self._members)), *buffer.shape))
            padded[: len(rows)] = rows
            for members, theirs in zip(self._members, across.gather(padded, kind), strict=True):
                stacked[members] = theirs[: len(members)]

        self._between(collect)
        self._host.broadcast(stacked, kind)
        return stacked

    def gather_bytes(self, data: bytes, kind: str = CONTROL, purpose: str = "gather_bytes") -> list[bytes]:
        return gather_bytes_by_rows(self, data, kind, purpose)

    def broadcast(self, buffer: Tensor, kind: str = CONTROL) -> None:
        self.account.counted()
        self._host.drain()
        self._between(lambda across: across.broadcast(buffer, kind))
        self._host.broadcast(buffer, kind)

    def barrier(self) -> None:
        self.account.counted()
        self._host.barrier()
        self._between(lambda across: across.barrier())
        self._host.barrier()

    def descriptors(self) -> Iterable[int]:
        return () if self._across is None else self._across.descriptors()

    def revoke(self, why: str) -> None:
        self._shared.revoke(why)
        if self._across is not None:
            self._across.revoke(why)

    def close(self) -> None:
        self._host.close()
        if self._across is not None:
            self._across.close()

    def _between(self, do: Callable[[BackendGroup], None]) -> None:
        """On the host's first member, do something with those of other hosts; if that breaks, so does this host."""
        self._shared.refuse_broken()
        if self._across is not None:
            trouble = ""
            try:
                do(self._across)
            except GroupError as error:
                trouble = str(error)
            except BaseException as error:
                self._shared.give_up(f"{type(error).__name__} interrupted an operation between hosts")
                raise
            if trouble:
                self._shared.break_up(trouble)


class _Pieces:
    """The pieces of a sum in place."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
