"""A holder's side of mirrors: what they must have before anybody is told that it counts.

Each shard's mirror gets, over one line and so in this order: a copy of the shard if it has none, then the record of
each step (or, with `apply=arrival`, of each lease). What is not acknowledged is sent again under a new placement.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from torch import Tensor

from shoal.data.parcel import to_bytes
from shoal.syncs.server.frames import as_frame
from shoal.syncs.server.messages import (
    Copy,
    Letter,
    Mirror,
    Mirrored,
    Placement,
    Record,
    Refused,
    decode_letter,
    encode,
)
from shoal.syncs.server.post import Line

if TYPE_CHECKING:
    from shoal.syncs.server.setup import Setup

_OVERDUE_SECONDS = 5.0
"""The first time; then twice as long, because perhaps the mirror is only busy."""

Key: TypeAlias = tuple[int, int, tuple[tuple[int, int], ...]]
"""Shard, step, ranges."""


def key_of(shard: int, step: int, ranges: Iterable[tuple[int, int]]) -> Key:
    return shard, step, tuple((start, stop) for start, stop in ranges)


class Mirroring:
    """Lines to the servers that mirror what this one holds, and what they have not acknowledged yet."""

    def __init__(self, setup: Setup, number: int, limit: int) -> None:
        self._setup, self._number, self._limit = setup, number, limit
        self._placement: Placement | None = None
        self._lines: dict[str, Line] = {}
        """By endpoint."""
        self._open: dict[Key, tuple[Record, Tensor, bool]] = {}
        """In the order in which they were sent: record, bytes, and whether these lie in memory that is shared."""
        self._copying: set[int] = set()
        """Shards whose mirror has not acknowledged the copy."""
        self._progress = time.monotonic()
        self._patience = _OVERDUE_SECONDS
        self.refused = 0
        self._gone_received = self._gone_sent = 0

    @property
    def received(self) -> int:
        return self._gone_received + sum(line.received for line in self._lines.values())

    @property
    def sent(self) -> int:
        return self._gone_sent + sum(line.sent for line in self._lines.values())

    def descriptors(self) -> list[int]:
        return [line.fileno() for line in self._lines.values()]

    def mirror_of(self, shard: int) -> int | None:
        """The server that mirrors this shard, which this one holds."""
        if self._placement is None:
            return None
        holder = self._placement.holders[shard]
        return holder.mirror if holder.server == self._number else None

    def tell(self, shard: int, record: Record, total: Tensor, *, shared: bool) -> bool:
        """Send a record to the shard's mirror. Returns whether there is nothing to wait for: no mirror.

        `shared`: the bytes lie in `Memory.sum`, where a mirror on this host finds them. They must not change until
        they are acknowledged.
        """
        if self.mirror_of(shard) is None:
            return True
        if not self._open:
            self._progress = time.monotonic()
        self._open[key_of(shard, record.step, record.ranges)] = (record, total, shared)
        self._send_record(shard, record, total, shared)
        return False

    def waits(self, shard: int, step: int) -> bool:
        """Whether the mirror of this shard has not acknowledged all of a step's records."""
        return any(key[:2] == (shard, step) for key in self._open)

    def is_open(self, key: Key) -> bool:
        return key in self._open

    def place(self, placement: Placement) -> list[int]:
        """What is not acknowledged is given up for shards without mirror. Returns the shards whose mirror needs a copy.

        After the copies, `again` sends what was not acknowledged.
        """
        before, self._placement = self._placement, placement
        self._patience = _OVERDUE_SECONDS / 2  # `again` doubles it
        for key in [key for key in self._open if self.mirror_of(key[0]) is None]:
            del self._open[key]
        self._copying = {shard for shard in self._copying if self.mirror_of(shard) is not None}
        wanted = set()
        new = []
        for shard, holder in enumerate(placement.holders):
            if holder.server != self._number or holder.mirror is None:
                continue
            wanted.add(placement.endpoints[holder.mirror])
            known = before is None or self._had(before, placement, shard, holder.mirror)
            if not known or shard in self._copying:
                new.append(shard)
        for endpoint in self._lines.keys() - wanted:
            line = self._lines.pop(endpoint)
            self._gone_received += line.received
            self._gone_sent += line.sent
            line.close()
        return new

    def copy(self, shard: int, version: int, state: dict[str, Any]) -> None:
        """Send all there is of a shard to its mirror."""
        self._copying.add(shard)
        self._line(shard).send(self._letter(Copy(shard, version)), [memoryview(to_bytes(state))])

    def again(self) -> None:
        """Send all that is not acknowledged again."""
        self._progress = time.monotonic()
        self._patience *= 2
        for (shard, _, _), (record, total, shared) in self._open.items():
            self._send_record(shard, record, total, shared)

    def uncopied(self) -> list[int]:
        """Shards whose mirror has not acknowledged the copy that it needs."""
        return sorted(self._copying)

    def is_overdue(self) -> bool:
        """Whether something was not acknowledged for so long that a connection may have broken: send it again."""
        waiting = bool(self._open or self._copying)
        return waiting and time.monotonic() - self._progress > self._patience

    def hear(self) -> Iterator[Key]:
        """What mirrors have acknowledged since the last call; with no ranges, copies."""
        for line in list(self._lines.values()):
            while (arrival := line.receive()) is not None:
                try:
                    body = decode_letter(arrival[0]).body
                except (msgspec.MsgspecError, ValueError, RecursionError):
                    self.refused += 1
                    continue
                if isinstance(body, Mirrored):
                    key = key_of(body.shard, body.step, body.ranges)
                    self._open.pop(key, None)
                    self._progress, self._patience = time.monotonic(), _OVERDUE_SECONDS
                    if not body.ranges:
                        self._copying.discard(body.shard)
                    yield key
                elif isinstance(body, Refused):
                    self.refused += 1  # a placement is on its way, after which all is sent again

    def close(self) -> None:
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    def _send_record(self, shard: int, record: Record, total: Tensor, shared: bool) -> None:
        placement = self._placement
        mirror = self.mirror_of(shard)
        assert placement is not None and mirror is not None
        near = shared and placement.hosts[mirror] == placement.hosts[self._number]
        frames = [] if near else [as_frame(total)]
        self._line(shard).send(self._letter(Mirror(shard, record, near)), frames)

    def _line(self, shard: int) -> Line:
        placement = self._placement
        mirror = self.mirror_of(shard)
        assert placement is not None and mirror is not None
        endpoint = placement.endpoints[mirror]
        if endpoint not in self._lines:
            self._lines[endpoint] = Line(endpoint, self._setup.keys, limit=self._limit)
        return self._lines[endpoint]

    def _letter(self, body: Mirror | Copy) -> bytes:
        assert self._placement is not None
        return encode(Letter(self._setup.run, self._placement.term, f"server-{self._number}", body))

    def _had(self, before: Placement, now: Placement, shard: int, server: int) -> bool:
        """Whether the process that is this server now had the shard under the placement before, and has it still.

        With `apply=arrival` a former holder may have applied what nobody else knows of.
        """
        holder = before.holders[shard]
        if before.endpoints.get(server) != now.endpoints[server]:
            return False
        return server == holder.mirror or (server in (holder.server, holder.spare) and self._setup.spec.apply == "step")
