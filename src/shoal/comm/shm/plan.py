"""Who adds which part of a buffer."""

from __future__ import annotations

import torch

from shoal.comm.shm.shared import Area, Shared, whole

_BLOCK = 256 << 10
"""Bytes that are added and written to all before the next ones are: they are still in the core's cache then."""
_ALONE = 32 << 10
"""Up to so many bytes, member 0 adds up the whole buffer: there is less to say, and nothing to gain by sharing it."""


class Plan:
    """How a certain part of an area is summed: prepared once, used in every step."""

    def __init__(self, shared: Shared, area: Area, offset: int, count: int, dtype: torch.dtype) -> None:
        me, members = shared.rank, shared.size
        self._shared = shared
        size = count * dtype.itemsize
        self.owners = [0] if size <= _ALONE else list(range(shared.layout.hubs))
        self.owns = me in self.owners
        self.other_owners = [owner for owner in self.owners if owner != me]
        share = -(-count // len(self.owners))
        share = -(-share // 16) * 16
        begin = min(count, me * share) if self.owns else count
        end = min(count, begin + share)
        step = _BLOCK // dtype.itemsize
        rows = whole(area, offset, count, dtype)
        self.blocks = [[row[at : min(end, at + step)] for row in rows] for at in range(begin, end, step)]
        """For each block of this member's part: that block of every member, in order of rank."""
        self.moved = 2 * (members - 1) * (end - begin) * dtype.itemsize
        """Bytes that this member reads from others' memory and writes to it."""

    def add_to_all(self) -> None:
        shared = self._shared
        for first, *others in self.blocks:
            if shared.revoked:
                shared.refuse_broken()
            for other in others:
                first.add_(other)
            for other in others:
                other.copy_(first)
