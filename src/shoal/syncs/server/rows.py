"""A server's part in sparse tables: gradients of rows until they count, and who has asked for rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.syncs.server.frames import as_frame, as_tensor
from shoal.syncs.server.intake import Unsound, check_lease, seat_of
from shoal.syncs.server.messages import Fetch, Lease, Push, Rows, Said, Touched
from shoal.syncs.server.table_shard import TableHolding
from shoal.syncs.server.tables import packed_rows, part_of
from shoal.syncs.server.used import is_used

if TYPE_CHECKING:
    from shoal.syncs.server.setup import Setup
    from shoal.syncs.server.shard import Holding

_MOST_WAITING = 4096
"""Of one worker's questions; it has one for each table, or a few."""


@dataclass
class _Coming:
    peer: bytes
    lease: Lease
    packed: dict[int, Tensor] = field(default_factory=dict)


class RowsIntake:
    """Keeps what workers send of rows, until the `Push` says that it counts."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._coming: dict[str, _Coming] = {}

    def take(self, peer: bytes, sender: str, body: Touched, frames: list[memoryview]) -> None:
        """Raises `Unsound`."""
        seat_of(sender)
        check_lease(self._setup, body.lease)
        _check_shards(self._setup, body.shards, frames)
        coming = self._coming.get(sender)
        if coming is None or coming.lease != body.lease or coming.peer != peer:
            coming = self._coming[sender] = _Coming(peer, body.lease)
        for shard, frame in zip(body.shards, frames, strict=True):
            here = part_of(self._setup, shard)
            assert here is not None
            packed = as_tensor(frame)
            try:
                packed_rows(here, packed)
            except ValueError as error:
                raise Unsound(f"rows of shard {shard}: {error}") from None
            coming.packed[shard] = packed

    def gradient(self, peer: bytes, sender: str, push: Push, shard: int) -> Tensor:
        """What came for a part, packed; nothing, if its table was not used. Raises `Unsound` if it is missing."""
        here = part_of(self._setup, shard)
        assert here is not None
        if not is_used(push.used, len(self._setup.params) + here.table.number):
            return torch.empty(0, dtype=torch.uint8)
        coming = self._coming.get(sender)
        if coming is None or coming.lease != push.lease or coming.peer != peer or shard not in coming.packed:
            raise Unsound(f"the rows of shard {shard} for {push.lease} have not come")
        return coming.packed[shard]

    def drop(self, sender: str) -> None:
        self._coming.pop(sender, None)


class RowAnswers:
    """Answers who asks for rows, as soon as these have the version."""

    def __init__(
        self,
        setup: Setup,
        say: Callable[[bytes, Said, list[memoryview]], None],
        refuse: Callable[[bytes, str], None],
    ) -> None:
        self._setup, self._say, self._refuse = setup, say, refuse
        self._waiting: dict[bytes, list[tuple[Fetch, list[memoryview]]]] = {}

    def ask(self, peer: bytes, fetch: Fetch, frames: list[memoryview], held: Mapping[int, Holding]) -> None:
        """Answer now, or when the version is there. Raises `Unsound`, or `Unfit`, for what cannot be."""
        _check_shards(self._setup, fetch.shards, frames)
        for shard, frame in zip(fetch.shards, frames, strict=True):
            here = part_of(self._setup, shard)
            assert here is not None
            if frame.nbytes % 8 or frame.nbytes // 8 > here.rows:
                raise Unsound(f"{frame.nbytes} bytes ask for rows of shard {shard}, which has {here.rows}")
        if missing := [shard for shard in fetch.shards if shard not in held]:
            raise Unsound(f"the shards {missing[:20]} are not held here")
        if self._answer(peer, fetch, frames, held):
            return
        waiting = self._waiting.setdefault(peer, [])
        if len(waiting) >= _MOST_WAITING:
            raise Unsound(f"{len(waiting)} questions of one worker wait here already")
        waiting.append((fetch, frames))

    def answer(self, held: Mapping[int, Holding]) -> None:
        """Versions have changed."""
        waiting, self._waiting = self._waiting, {}
        for peer, asked in waiting.items():
            left = [(fetch, frames) for fetch, frames in asked if not self._answer(peer, fetch, frames, held)]
            if left:
                self._waiting[peer] = left

    def placed(self) -> None:
        """Who waits must ask again, under the new placement."""
        waiting, self._waiting = self._waiting, {}
        for peer, asked in waiting.items():
            for _ in asked:
                self._refuse(peer, "there is a new placement")

    def _answer(self, peer: bytes, fetch: Fetch, frames: list[memoryview], held: Mapping[int, Holding]) -> bool:
        holdings = [held[shard] for shard in fetch.shards]
        version = min(holding.version for holding in holdings)
        if version < fetch.version:
            return False
        if fetch.exact and not all(holding.keeps(fetch.version) for holding in holdings):
            self._refuse(peer, f"version {fetch.version} is not kept")
            return True
        answers = []
        for holding, frame in zip(holdings, frames, strict=True):
            assert isinstance(holding, TableHolding)
            numbers = as_tensor(frame).view(torch.int64)
            rows = holding.rows(numbers, fetch.version if fetch.exact else None)
            answers.append(as_frame(rows.view(-1).view(torch.uint8)) if rows.numel() else memoryview(b""))
        self._say(peer, Rows(fetch.number, fetch.version if fetch.exact else version, fetch.shards), answers)
        return True


def _check_shards(setup: Setup, shards: list[int], frames: list[memoryview]) -> None:
    if not shards or len(set(shards)) != len(shards) or any(part_of(setup, shard) is None for shard in shards):
        raise Unsound(f"rows of the shards {shards[:20]}, which are not all parts of tables")
    if len(frames) != len(shards):
        raise Unsound(f"rows of {len(shards)} shards came with {len(frames)} frames; each has one")
