"""What the members of one host share: tokens that they pass, notes that they compare, memory that they all see."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from shoal.comm.group import REVOKED
from shoal.comm.shm.notes import said
from shoal.comm.shm.segment import Segment
from shoal.comm.shm.semaphores import SLICE, SLOT, create, poster, sleep_for, taker
from shoal.core.errors import SAME_ORDER, GroupError

STAGE = 1 << 20
"""Bytes of each member through which tensors travel that do not lie in a segment; small enough for a core's cache."""
NOTES = 64
"""Sums that may be under way at once."""
CHANNELS = 4
"""Kinds of tokens."""
HUBS = 16
"""So many members, the first ones, pass tokens to and from every other; the rest only to and from them. So tokens grow
with the members and not with their pairs. More than these would not add up memory faster: it is its speed that bounds.
"""

_NOTE_WORDS = 3
_PAGE = 4096
_SPINS = 2000
_SPINS_CROWDED = 100
_TURN = 0.0005
"""Seconds to sleep where there may be other things to do."""
_LOOK_SECONDS = 0.02
"""How often a wait looks whether the others are alive."""
_GRACE_SECONDS = 0.2
"""How long a wait goes on after a member has left that it does not wait for itself: that one may have been done."""
_STRAY_SECONDS = 1.0
"""How long a wait goes on before it looks whether the others are in another operation, where none would hear of it."""


class Layout:
    """Where things lie in a control segment of so many members: tokens, notes, stages."""

    def __init__(self, members: int) -> None:
        self.hubs = min(members, HUBS)
        self._members = members
        self._tokens = self.hubs * (2 * members - self.hubs)
        """Of each kind: those that hubs give, and those that others give to hubs."""
        self.notes = _pages(CHANNELS * self._tokens * SLOT)
        self.stage = self.notes + _pages(members * (NOTES * _NOTE_WORDS + 1) * 8)
        self.size = self.stage + members * STAGE

    def token(self, channel: int, giver: int, taker: int) -> int:
        """One of the two is a hub."""
        at = giver * self._members + taker
        if giver >= self.hubs:
            at = self.hubs * self._members + (giver - self.hubs) * self.hubs + taker
        return (channel * self._tokens + at) * SLOT

    def prepare(self, segment: Segment) -> None:
        """Make the semaphores: by the member that has created the segment, before others use it."""
        for at in range(CHANNELS * self._tokens):
            create(segment.address + at * SLOT)


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


class Area:
    """Memory of every member, as this one sees it: `rows[m]` is member m's. Offsets mean the same to all members."""

    def __init__(self, segment: Segment, members: int, each: int, begin: int = 0) -> None:
        self.each = each
        self.rows: list[Tensor] = [segment.bytes[begin + at * each : begin + (at + 1) * each] for at in range(members)]

    def offset_of(self, address: int, size: int, member: int) -> int | None:
        """Where in this member's row the memory at `address` lies; None if it does not."""
        offset = address - self.rows[member].data_ptr()
        return offset if offset >= 0 and offset + size <= self.each else None


class Channel:
    """Tokens of one kind between this member and others: all of them if it is a hub, the hubs if it is none.

    What is written before `tell` is seen after `hear`.
    """

    def __init__(self, shared: Shared, number: int) -> None:
        self._shared = shared
        me, base, token = shared.rank, shared.control.address, shared.layout.token
        members = range(shared.size if me < shared.layout.hubs else shared.layout.hubs)
        self._to = [base + token(number, me, member) for member in members]
        self._from = [base + token(number, member, me) for member in members]
        self._post, self._take = poster(), taker()

    def tell(self, member: int) -> None:
        self._post(self._to[member])

    def tell_all(self, members: Sequence[int]) -> None:
        for member in members:
            self._post(self._to[member])

    def heard(self, member: int) -> bool:
        """Take a token of `member`, if one is there."""
        return self._take(self._from[member]) == 0

    def hear(self, member: int, meanwhile: Callable[[], bool] | None = None) -> None:
        """Take a token of `member`, waiting for it. Raises `GroupError` if it, or another member, is gone.

        `meanwhile` is called again and again while there is none; it says whether it found something to do.
        """
        address, take, give_way, shared = self._from[member], self._take, os.sched_yield, self._shared
        for _ in range(shared.spins):
            if take(address) == 0:
                return
            if shared.revoked:
                break
            give_way()
        wait = Wait(shared, member)
        while not sleep_for(address, SLICE if meanwhile is None else _TURN):
            if meanwhile is not None and meanwhile():
                continue
            if wait.lost():
                if take(address) == 0:
                    return
                shared.break_up(wait.text, wait.culprit)

    def hear_all(self, members: Sequence[int]) -> None:
        for member in members:
            self.hear(member)

    def meet(self) -> None:
        """Return once all members have come here; what each wrote before is seen by all."""
        shared = self._shared
        if shared.layout.hubs == shared.size:
            self.tell_all(shared.peers)
            self.hear_all(shared.peers)
        elif shared.rank == 0:
            self.hear_all(shared.peers)
            self.tell_all(shared.peers)
        else:
            self.tell(0)
            self.hear(0)


class Wait:
    """A wait that has become long: looks whether it still makes sense."""

    def __init__(self, shared: Shared, member: int | None = None) -> None:
        self._shared = shared
        self._member = member
        self._began = self._looked = time.monotonic()
        self._missed: float | None = None
        self._strayed = ""
        self.text = ""
        self.culprit: int | None = None

    def lost(self) -> bool:
        """Whether there is nothing to wait for any longer; `text` says why. Raises if the group was revoked."""
        shared, now = self._shared, time.monotonic()
        shared.refuse_broken()
        if now - self._looked < _LOOK_SECONDS:
            return False
        self._looked = now
        gone = shared.gone()
        strayed, before = shared.strayed(gone) if gone else self._stray(now), self._strayed
        self._strayed = strayed
        if gone:
            self.culprit = shared.first_gone(gone)
        if strayed and (gone or strayed == before):
            # twice, where others may be writing at this moment
            self.text = strayed
        elif self._member is not None and self._member in gone and self._member == self.culprit:
            self.text = f"{shared.name(self._member)} has ended or left while {shared.name(shared.rank)} waited for it"
        elif self.culprit is not None:
            self._missed = now if self._missed is None else self._missed
            if self._member in gone or now - self._missed > _GRACE_SECONDS:
                self.text = f"{shared.name(self.culprit)} has ended or left"
        elif now - self._began > shared.timeout:
            awaited = "another host" if self._member is None else f"{shared.name(self._member)}, which is alive"
            self.text = f"{shared.name(shared.rank)} waited {shared.timeout:.0f} s for {awaited}"
        return bool(self.text)

    def _stray(self, now: float) -> str:
        return self._shared.strayed(self._shared.peers) if now - self._began > _STRAY_SECONDS else ""


class Shared:
    """One member's view of a control segment in which every member holds its lock. One thread, but for `revoke`."""

    def __init__(self, rank: int, names: Sequence[str], control: Segment, timeout: float) -> None:
        self.rank = rank
        self.size = len(names)
        self.peers = [member for member in range(self.size) if member != rank]
        self.control = control
        self.layout = Layout(self.size)
        self.timeout = timeout
        self.broken = ""
        """Why nothing can be done together any longer."""
        self.revoked = ""
        """Why another thread has told this one to stop; it is looked at wherever this one may stay for long."""
        self.on_break: list[Callable[[], None]] = []
        """What to do when it breaks, or when this thread learns that it was revoked."""
        # With more members than cores, the one that is awaited may be waiting for this core.
        self.spins = _SPINS if self.size <= len(os.sched_getaffinity(0)) else _SPINS_CROWDED
        self.stage = Area(control, self.size, STAGE, self.layout.stage)
        self._names = list(names)
        self._words = control.words
        self._first_note = self.layout.notes // 8
        self._latest = -1
        self._blames = self._first_note + self.size * NOTES * _NOTE_WORDS

    def name(self, member: int) -> str:
        return self._names[member]

    def gone(self) -> list[int]:
        """The members whose processes have ended, or that have left."""
        return [peer for peer in self.peers if not self.control.is_held(peer)]

    def note(self, number: int, what: int, where: int) -> None:
        """Write down what this member does as operation `number`. Raises `GroupError` if the group was revoked."""
        if self.revoked:
            self.refuse_broken()
        at = self._note(self.rank, number)
        self._words[at] = what
        self._words[at + 1] = where
        self._words[at + 2] = number + 1  # nobody has noted 0
        self._latest = number

    def compare(self, number: int, members: Sequence[int]) -> int | None:
        """A member whose note of operation `number` differs from this one's; None if all agree."""
        at = self._note(self.rank, number)
        mine = self._words[at : at + _NOTE_WORDS]
        for member in members:
            theirs = self._note(member, number)
            if self._words[theirs : theirs + _NOTE_WORDS] != mine:
                return member
        return None

    def noted(self, number: int, member: int) -> int:
        return self._words[self._note(member, number)]

    def strayed(self, members: Sequence[int]) -> str:
        """In words, what this member and one of these do as the same operation, if that differs."""
        for number in range(max(0, self._latest - NOTES + 1), self._latest + 1):
            at = self._note(self.rank, number)
            mine = self._words[at : at + _NOTE_WORDS].tolist()
            for member in members:
                at = self._note(member, number)
                theirs = self._words[at : at + _NOTE_WORDS].tolist()
                if theirs[-1] == mine[-1] == number + 1 and theirs != mine:
                    return self.differing(number, member)
        return ""

    def differing(self, number: int, member: int) -> str:
        """In words, that this member and another one do different things as this operation."""
        mine, theirs = (self.noted(number, each) for each in (self.rank, member))
        at = "another operation" if mine == theirs else said(theirs)
        return (
            f"as operation {number} {self.name(self.rank)} has {said(mine)} and {self.name(member)} {at}; "
            f"{SAME_ORDER}, with the same buffers"
        )

    def _note(self, member: int, number: int) -> int:
        return self._first_note + (member * NOTES + number % NOTES) * _NOTE_WORDS

    def refuse_broken(self) -> None:
        if self.revoked:
            self.give_up(self.revoked)
        if self.broken:
            raise GroupError(self.broken)

    def revoke(self, why: str) -> None:
        """From any thread: this one is seen to have left, and its own thread raises as soon as it looks."""
        if not self.revoked and not self.broken:
            self.revoked = why or REVOKED
            self.control.let_go(self.rank)

    def break_up(self, why: str, culprit: int | None = None) -> NoReturn:
        """Nothing more can be done together, because `culprit` is gone. The others notice, as they would a death."""
        self.give_up(why, culprit)
        raise GroupError(self.broken)

    def give_up(self, why: str, culprit: int | None = None) -> None:
        if not self.broken:
            self.broken = self.revoked or f"the group broke: {why}"
            self._words[self._blames + self.rank] = 0 if culprit is None else culprit + 1
            self.control.let_go(self.rank)
            for do in self.on_break:
                do()

    def first_gone(self, gone: Sequence[int]) -> int:
        """Of those that are gone, one that did not leave because of another."""
        return next((member for member in gone if not self._words[self._blames + member]), gone[0])

    def close(self) -> None:
        self.broken = self.broken or self.revoked or "the group is closed"
        self.on_break = []
        self.control.close()


def whole(area: Area, offset: int, count: int, dtype: torch.dtype) -> list[Tensor]:
    """For each member `count` numbers at `offset` of its row."""
    size = count * dtype.itemsize
    return [row[offset : offset + size].view(dtype) for row in area.rows]
