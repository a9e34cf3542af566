"""The group of workers that share memory.

A sum needs no copy where its buffer comes from `Group.buffer`: it lies in a segment that all members have mapped. Each
member owns a part of the buffer: it adds up that part of all members' buffers and writes the result into all of them.

    member 0   tell ready ─▶ hear all ready ─ add part 0, write it to all ─ tell done ─▶ hear all done
    member 1   tell ready ─▶ hear all ready ─ add part 1, write it to all ─ tell done ─▶ hear all done

Sums under way form a queue that every member works off in the same order. Nothing runs in the background: the sums
ahead make progress whenever another one is started, if the others are ready, and are finished by `wait`. What is not in
a segment travels through a stage, piece by piece.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from shoal.comm.account import Account
from shoal.comm.group import CPU, AtOnce, Done, Work, bytes_of, numbers_of
from shoal.comm.shm.memory import Memory
from shoal.comm.shm.notes import BARRIER, BROADCAST, GATHER, SCATTER, SWAP, other, what_of
from shoal.comm.shm.plan import Plan
from shoal.comm.shm.shared import NOTES, STAGE, Area, Channel, Shared, whole
from shoal.comm.shm.work import Stage, Sum, whole_or_broken
from shoal.comm.strings import gather_bytes_by_rows
from shoal.core.traffic import CONTROL, GRADIENT, MEMORY

_PLANS = 4096
_READY, _DONE = 0, 1


class ShmGroup(AtOnce):
    """Members of one host. Made by `meeting.meet`."""

    collective = "shm"

    def __init__(self, shared: Shared, run: str, warn: Callable[[str], None], reason: str = "") -> None:
        self.rank = shared.rank
        self.size = shared.size
        self.hosts: tuple[int, ...] = (0,) * shared.size
        self.reason = reason
        self.account = Account()
        self.counts = 1
        """What each call counts for in the account's operations."""
        self._shared = shared
        self._memory = Memory(shared, run, warn)
        self._peers = shared.peers
        self._ready, self._done = Channel(shared, _READY), Channel(shared, _DONE)
        self._areas: dict[int, Area] = {}
        self._allocated = 0
        self._plans: dict[tuple[int, int, torch.dtype], tuple[int, Plan]] = {}
        self._staged: dict[tuple[int, torch.dtype], Plan] = {}
        self._number = 0
        self._stages: list[Stage] = [self._add, self._close]
        self._queues: list[deque[Sum]] = [deque() for _ in self._stages]

    # -- operations ----------------------------------------------------------------------------------------------------

    @whole_or_broken
    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        if device.type != "cpu" or not numel:
            return torch.zeros(numel, dtype=dtype, device=device)
        area = self._memory.allocate(-(-numel * dtype.itemsize // 4096) * 4096, self.gather_bytes)
        if area is None:
            return torch.zeros(numel, dtype=dtype)
        self._areas[self._allocated] = area
        self._allocated += 1
        return area.rows[self.rank][: numel * dtype.itemsize].view(dtype)

    def release(self, buffer: Tensor) -> None:
        address = buffer.data_ptr()
        number = next((n for n, area in self._areas.items() if area.offset_of(address, 0, self.rank) == 0), None)
        if number is not None:
            area = self._areas.pop(number)
            self._memory.release(area)
            held = area.rows[self.rank].data_ptr()
            self._plans = {key: plan for key, plan in self._plans.items() if not 0 <= key[0] - held < area.each}

    @whole_or_broken
    def sum(self, buffer: Tensor, kind: str = GRADIENT) -> Work:
        numbers = numbers_of(buffer)
        what_of(numbers)
        self._begin()
        if not buffer.numel():
            self._end()
            return Done()
        if self._place(numbers) is None:
            self._sum_staged(numbers, kind)
            self._end()
            return Done()
        work = self._start(numbers, kind)
        self.account.leave()
        return work

    @whole_or_broken
    def scatter_sum(self, buffer: Tensor, kind: str = GRADIENT) -> Tensor:
        self._begin()
        self.drain()
        rows = numbers_of(buffer).view(self.size, -1)
        what = other(SCATTER, buffer.nbytes)
        total = torch.empty_like(buffer[self.rank])
        mine = numbers_of(total)
        step = max(1, STAGE // self.size // rows.itemsize)
        each = step * rows.itemsize
        for at in range(0, rows.shape[1], step):
            count = min(step, rows.shape[1] - at)
            for row in range(self.size):
                whole(self._shared.stage, row * each, count, rows.dtype)[self.rank].copy_(rows[row, at : at + count])
            self._together(what)
            parts = whole(self._shared.stage, self.rank * each, count, rows.dtype)
            piece = mine[at : at + count].copy_(parts[0])
            for part in parts[1:]:
                piece.add_(part)
            self._agree_done()
        self.account.sent(kind, MEMORY, len(self._peers) * mine.nbytes, len(self._peers))
        self._end()
        return total

    @whole_or_broken
    def swap(self, rows: Tensor, kind: str = GRADIENT) -> Tensor:
        self._begin()
        self.drain()
        swapped = torch.empty_like(rows)
        each = rows.nbytes // self.size
        given, taken = (bytes_of(tensor).view(self.size, each) for tensor in (rows, swapped))
        step = STAGE // self.size
        for at in range(0, each, step):
            count = min(step, each - at)
            for member, stretch in enumerate(self._shared.stage.rows[self.rank].split(step)[: self.size]):
                stretch[:count].copy_(given[member, at : at + count])
            self._together(other(SWAP, rows.nbytes))
            for member, stage in enumerate(self._shared.stage.rows):
                taken[member, at : at + count].copy_(stage[self.rank * step : self.rank * step + count])
            self._agree_done()
        self.account.sent(kind, MEMORY, len(self._peers) * each, len(self._peers) if each else 0)
        self._end()
        return swapped

    @whole_or_broken
    def gather(self, buffer: Tensor, kind: str = CONTROL) -> Tensor:
        self._begin()
        self.drain()
        stacked = buffer.new_empty((self.size, *buffer.shape))
        data = bytes_of(buffer)
        rows = [bytes_of(row) for row in stacked.unbind()] if buffer.numel() else []
        for at in range(0, data.numel(), STAGE):
            piece = data[at : at + STAGE]
            self._shared.stage.rows[self.rank][: piece.numel()].copy_(piece)
            self._together(other(GATHER, buffer.nbytes))
            for row, stage in zip(rows, self._shared.stage.rows, strict=True):
                row[at : at + STAGE].copy_(stage[: piece.numel()])
            self._agree_done()
        self.account.sent(kind, MEMORY, len(self._peers) * data.nbytes, len(self._peers) if data.nbytes else 0)
        self._end()
        return stacked

    def gather_bytes(self, data: bytes, kind: str = CONTROL, purpose: str = "gather_bytes") -> list[bytes]:
        return gather_bytes_by_rows(self, data, kind, purpose)

    @whole_or_broken
    def broadcast(self, buffer: Tensor, kind: str = CONTROL) -> None:
        self._begin()
        self.drain()
        data, stage = bytes_of(buffer), self._shared.stage.rows[0]
        for at in range(0, data.numel(), STAGE):
            piece = data[at : at + STAGE]
            number = self._note(other(BROADCAST, buffer.nbytes))
            if self.rank == 0:
                stage[: piece.numel()].copy_(piece)
                self._ready.tell_all(self._peers)
                self._done.hear_all(self._peers)
                self._check(number)
            else:
                self._ready.hear(0)
                self._check(number, [0])
                piece.copy_(stage[: piece.numel()])
                self._done.tell(0)
        if self.rank != 0 and data.nbytes:
            self.account.sent(kind, MEMORY, data.nbytes, 1)
        self._end()

    @whole_or_broken
    def barrier(self) -> None:
        self._begin()
        self.drain()
        self._together(other(BARRIER, 0))
        self._end()

    def descriptors(self) -> Iterable[int]:
        # The locks by which peers notice a death are the process's own: children do not have them.
        return ()

    def revoke(self, why: str) -> None:
        self._shared.revoke(why)

    def close(self) -> None:
        self._shared.close()
        self._areas.clear()
        self._plans.clear()
        self._staged.clear()
        # they refer to this group: without them its memory goes with the last reference from outside
        self._queues, self._stages = [], []
        self._memory.close()

    # -- sums in place -------------------------------------------------------------------------------------------------

    def _place(self, numbers: Tensor) -> tuple[int, Plan] | None:
        """Where a buffer lies in the segments, as a number that is the same on all members, and how it is summed."""
        key = numbers.data_ptr(), numbers.numel(), numbers.dtype
        found = self._plans.get(key)
        if found is None:
            for number, area in self._areas.items():
                offset = area.offset_of(key[0], numbers.nbytes, self.rank)
                if offset is not None:
                    if len(self._plans) >= _PLANS:
                        self._plans.clear()
                    plan = self._plan(area, offset, numbers.numel(), numbers.dtype)
                    found = self._plans[key] = (number << 48) + offset, plan
                    break
        return found

    def _plan(self, area: Area, offset: int, count: int, dtype: torch.dtype) -> Plan:
        return Plan(self._shared, area, offset, count, dtype)

    def _start(self, numbers: Tensor, kind: str) -> Work:
        """Enter the queue, and do what can be done without waiting."""
        found = self._place(numbers)
        assert found is not None
        where, plan = found
        if sum(map(len, self._queues)) >= NOTES - 1:
            self._finish(next(queue[0] for queue in reversed(self._queues) if queue))
        work = Sum(self, self._number, plan, kind)
        self._announce(plan, what_of(numbers), where)
        self._queues[0].append(work)
        self._advance(len(self._stages))
        return work

    def _announce(self, plan: Plan, what: int, where: int) -> None:
        self._note(what, where)
        self._ready.tell_all(plan.other_owners)

    def _note(self, what: int, where: int = -1) -> int:
        """Write down what this member does next, and its number."""
        number = self._number
        self._shared.note(number, what, where)
        self._number += 1
        return number

    def _advance(self, stages: int, first: int = 0) -> bool:
        """Take what is in the first stages further without waiting; whether anything could be done."""
        moved = False
        for at in range(first, stages):
            queue = self._queues[at]
            while queue and self._stages[at](queue[0], False):
                self._promote(at)
                moved = True
        return moved

    def _promote(self, at: int) -> None:
        work = self._queues[at].popleft()
        work.heard = 0
        if at + 1 < len(self._stages):
            self._queues[at + 1].append(work)
        else:
            work.complete = True
            self.account.done()

    @whole_or_broken
    def _finish(self, work: Sum) -> None:
        """Complete `work` and all that is ahead of it."""
        if work.complete:
            return
        self._shared.refuse_broken()
        self.account.enter()
        for at, queue in enumerate(self._queues):
            while queue and queue[0].number <= work.number:
                self._stages[at](queue[0], True)
                self._promote(at)
        self.account.leave()

    def _add(self, work: Sum, wait: bool) -> bool:
        """Add this member's part once all are ready, and write it to all."""
        plan = work.plan
        if plan.owns:
            if not self._hear(work, self._ready, self._peers, wait):
                return False
            self._check(work.number)
            plan.add_to_all()
            self._done.tell_all(self._peers)
            self.account.sent(work.kind, MEMORY, plan.moved, 2 * len(self._peers))
        return True

    def _close(self, work: Sum, wait: bool) -> bool:
        """Complete once all parts have been added."""
        return self._hear(work, self._done, work.plan.other_owners, wait)

    def _hear(self, work: Sum, channel: Channel, members: list[int], wait: bool) -> bool:
        while work.heard < len(members):
            if wait:
                channel.hear(members[work.heard])
            elif not channel.heard(members[work.heard]):
                return False
            work.heard += 1
        return True

    def _check(self, number: int, members: Sequence[int] | None = None) -> None:
        stranger = self._shared.compare(number, self._peers if members is None else members)
        if stranger is not None:
            self._shared.break_up(self._shared.differing(number, stranger))

    # -- through the stage ---------------------------------------------------------------------------------------------

    def _sum_staged(self, numbers: Tensor, kind: str) -> None:
        self.drain()
        step = STAGE // numbers.itemsize
        for at in range(0, numbers.numel(), step):
            piece = numbers[at : at + step]
            plan = self._staged_plan(piece.numel(), piece.dtype)
            mine = self._shared.stage.rows[self.rank][: piece.nbytes].view(piece.dtype)
            mine.copy_(piece)
            work = Sum(self, self._number, plan, kind)
            self._announce(plan, what_of(piece), -1)
            self._add(work, True)
            self._done.hear_all(plan.other_owners)
            piece.copy_(mine)

    def _staged_plan(self, count: int, dtype: torch.dtype) -> Plan:
        plan = self._staged.get((count, dtype))
        if plan is None:
            if len(self._staged) >= _PLANS:
                self._staged.clear()
            plan = self._staged[count, dtype] = Plan(self._shared, self._shared.stage, 0, count, dtype)
        return plan

    def _together(self, what: int) -> None:
        """Wait until all members have come to the same operation."""
        number = self._note(what)
        self._ready.meet()
        self._check(number)

    def _agree_done(self) -> None:
        self._done.meet()

    def drain(self) -> None:
        """Finish all sums: the stage, and the tokens, are free then."""
        last = next((queue[-1] for queue in self._queues if queue), None)
        if last is not None:
            self._finish(last)

    # -- the account ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._shared.refuse_broken()
        self.account.begun(self.counts)
        self.account.enter()

    def _end(self) -> None:
        self.account.leave()
        self.account.done()
