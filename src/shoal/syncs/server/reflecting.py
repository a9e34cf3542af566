"""A mirror's side of mirroring: it has what the holder sends before it says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from shoal.data.parcel import from_bytes
from shoal.syncs.server.frames import as_tensor
from shoal.syncs.server.holdings import Holdings
from shoal.syncs.server.intake import Unsound
from shoal.syncs.server.messages import Copy, Mirror, Mirrored, Said
from shoal.syncs.server.table_shard import TableHolding

if TYPE_CHECKING:
    from shoal.syncs.server.setup import Memory


class Reflecting:
    """Takes what holders send for shards that are mirrored here. Raises `Unsound` for what cannot be right."""

    def __init__(self, holdings: Holdings, memory: Memory, say: Callable[[bytes, Said], None]) -> None:
        self._holdings, self._memory, self._say = holdings, memory, say

    def record(self, peer: bytes, body: Mirror, frames: list[memoryview]) -> None:
        """What will be applied next."""
        self._check(body.shard)
        if body.shard not in self._holdings:
            raise Unsound(f"a record of shard {body.shard} came before the copy of it")
        size = self._holdings[body.shard].weights.numel()
        table = isinstance(self._holdings[body.shard], TableHolding)
        if body.near and not table:
            total = self._holdings.slice(self._memory.sum(body.record.step), body.shard)
        elif len(frames) == 1 and (table or frames[0].nbytes == size):
            total = as_tensor(frames[0])
        else:
            raise Unsound(f"a record of shard {body.shard} came with {len(frames)} frames, not one of {size} bytes")
        self._holdings.receive(body.shard, body.record, total)
        self._say(peer, Mirrored(body.shard, body.record.step, body.record.ranges))

    def copy(self, peer: bytes, body: Copy, frames: list[memoryview]) -> None:
        """All there is of a shard."""
        self._check(body.shard)
        if len(frames) != 1:
            raise Unsound(f"a copy of shard {body.shard} came with {len(frames)} frames; it has one")
        try:
            state = from_bytes(bytes(frames[0]))
        except (msgspec.MsgspecError, ValueError, KeyError, RuntimeError) as error:
            raise Unsound(f"the copy of shard {body.shard} cannot be read ({error})") from error
        # one that was sent again may come when the first is here, and a step is applied since that was closed in it
        if body.shard not in self._holdings or self._holdings[body.shard].version <= body.version:
            self._holdings.load(body.shard, state)
        self._say(peer, Mirrored(body.shard, self._holdings[body.shard].version, []))

    def _check(self, shard: int) -> None:
        if not self._holdings.mirrors(shard):
            raise Unsound(f"shard {shard} is not mirrored here")
