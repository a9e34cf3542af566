"""A worker's side of sparse tables: rows that it has fetched, and the gradients of those that a lease has touched.

Rows are fetched for a *version*: what is there of it already is not fetched again, and with the next version (where
others may be ahead, with the next lease) all of it is forgotten. What is fetched ahead is waited for when a row of it
is used first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.syncs.server.frames import as_frame, as_tensor
from shoal.syncs.server.messages import Fetch, Rows
from shoal.syncs.server.tables import Table, pack, summed

if TYPE_CHECKING:
    from shoal.syncs.server.lines import Lines
    from shoal.syncs.server.setup import Setup

_AT_ONCE = 4 << 20
"""Bytes of rows that one message is for, if they are of several shards."""
_MOST_CACHED = 64 << 20
"""Bytes of rows of a table that are kept for what comes next."""


def in_groups(shards: Sequence[int], size: Callable[[int], int]) -> Iterator[list[int]]:
    """These shards, in groups for one message each."""
    group: list[int] = []
    total = 0
    for shard in shards:
        if group and total + size(shard) > _AT_ONCE:
            yield group
            group, total = [], 0
        group.append(shard)
        total += size(shard)
    if group:
        yield group


@dataclass
class _Fetching:
    """Rows of a table that are asked for."""

    table: Table
    ids: Tensor
    places: dict[int, Tensor]
    """By shard: where in `ids` its rows are."""
    rows: dict[int, Tensor]
    """By shard: their numbers there."""
    asked: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By shard: the number of the question, and the server."""
    answers: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class _Cache:
    """Rows of a table that are there: their numbers, rising, and values."""

    ids: Tensor
    values: Tensor


class TableClient:
    """One worker's. Belongs to the thread of its `Lines`."""

    def __init__(self, setup: Setup, lines: Lines) -> None:
        self._setup, self._lines = setup, lines
        self._lasts = setup.spec.bound == 0 and setup.spec.apply == "step"
        """Whether rows of a version are what they are as long as it is computed with."""
        self._version = 0
        self._exact = False
        self._count = 0
        self._fetching: list[_Fetching] = []
        self._cached: dict[int, _Cache] = {}
        self._floor: dict[int, int] = {}
        """By shard: the highest version that was read."""
        self._oldest: int | None = None
        self._leaves: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._sums: dict[int, tuple[Tensor, Tensor]] | None = None
        self.fetched = 0
        """Rows so far."""

    # -- rows ----------------------------------------------------------------------------------------------------------

    def turn(self, version: int, *, exact: bool = False) -> None:
        """From now on rows are of this version at least; or exactly."""
        same = (version, exact) == (self._version, self._exact)
        if not same or not (exact or self._lasts):
            self._cached.clear()
            self._fetching.clear()
            self._oldest = None
        self._version, self._exact = version, exact

    @property
    def oldest(self) -> int | None:
        """The lowest version of rows that have come since the last turn to another version."""
        return self._oldest

    def ahead(self, table: int, ids: Tensor) -> None:
        """These rows will be wanted: ask for those that are not here. `ids` are rising, each once."""
        for each in self._fetching:
            if each.table.number == table:
                ids = ids[~torch.isin(ids, each.ids, assume_unique=True)]
        self._fetch(self._setup.tables[table], ids)

    def rows(self, table: int, ids: Tensor) -> Tensor:
        """These rows, in memory of their own. `ids` are rising, each once, and rows of the table."""
        self._settle()
        self._fetch(self._setup.tables[table], ids)
        self._settle()
        if not ids.numel():
            here = self._setup.tables[table]
            return torch.empty(0, here.width, dtype=here.param.dtype)
        cached = self._cached[table]
        return cached.values.index_select(0, torch.searchsorted(cached.ids, ids))

    def _fetch(self, table: Table, ids: Tensor) -> None:
        cached, missing = self._cached.get(table.number), ids
        if cached is not None:
            missing = ids[~torch.isin(ids, cached.ids, assume_unique=True)]
        if not missing.numel():
            return
        if cached is not None and cached.values.numel() * cached.values.element_size() > _MOST_CACHED:
            del self._cached[table.number]
        else:
            ids = missing
        part = ids % table.parts
        numbers = ids // table.parts
        places, rows = {}, {}
        for number in range(table.parts):
            place = (part == number).nonzero().view(-1)
            if place.numel():
                places[table.first + number] = place
                rows[table.first + number] = numbers[place]
        self._fetching.append(_Fetching(table, ids, places, rows))
        self.ask()

    def ask(self) -> None:
        """Ask holders for what they have not been asked."""
        if self._lines.placement is None:
            return
        for fetching in list(self._fetching):
            waiting: dict[int, list[int]] = {}
            for shard in fetching.rows:
                server = self._lines.holder(shard)
                if shard not in fetching.answers and fetching.asked.get(shard, (0, -1))[1] != server:
                    waiting.setdefault(server, []).append(shard)
            width = fetching.table.row_bytes + 8
            for server, shards in waiting.items():
                sizes = {shard: fetching.rows[shard].numel() * width for shard in shards}
                for some in in_groups(shards, sizes.__getitem__):
                    self._ask(fetching, server, some)

    def _ask(self, fetching: _Fetching, server: int, shards: list[int]) -> None:
        version = self._version
        if not self._exact:
            version = max(version, *(self._floor.get(shard, 0) for shard in shards))
        self._count += 1
        frames = [as_frame(fetching.rows[shard].view(torch.uint8)) for shard in shards]
        if self._lines.send(server, Fetch(self._count, version, shards, self._exact), frames):
            fetching.asked.update(dict.fromkeys(shards, (self._count, server)))

    def forget(self, server: int) -> None:
        """What this server has not answered is not asked."""
        for fetching in self._fetching:
            for shard in [shard for shard, (_, to) in fetching.asked.items() if to == server]:
                del fetching.asked[shard]

    def answered(self, server: int, body: Rows, frames: list[memoryview]) -> None:
        for fetching in self._fetching:
            # some may have been asked of others since, under another placement
            wanted = [shard for shard in body.shards if fetching.asked.get(shard) == (body.number, server)]
            if not wanted:
                continue
            table = fetching.table
            sizes = [fetching.rows[shard].numel() * table.row_bytes for shard in body.shards]
            if [len(frame) for frame in frames] != sizes:
                raise ShoalError(
                    f"server {server} answered with {[len(frame) for frame in frames]} bytes of rows, and {sizes} were "
                    "asked for"
                )
            for shard, frame in zip(body.shards, frames, strict=True):
                if shard not in wanted:
                    continue
                fetching.answers[shard] = as_tensor(frame).view(table.param.dtype).view(-1, table.width)
                if not self._exact:
                    self._floor[shard] = max(self._floor.get(shard, 0), body.version)
            self._oldest = body.version if self._oldest is None else min(self._oldest, body.version)
            return

    def _settle(self) -> None:
        """Have all that was asked for."""
        while self._fetching:
            fetching = self._fetching[0]

            def missing(fetching: _Fetching = fetching) -> list[int]:
                return [shard for shard in fetching.rows if shard not in fetching.answers]

            self._lines.wait(
                lambda missing=missing: not missing(),  # type: ignore[misc]
                lambda missing=missing: f"rows of {self._lines.holders(missing())}",  # type: ignore[misc]
            )
            self._fetching.remove(fetching)
            self._keep(fetching)

    def _keep(self, fetching: _Fetching) -> None:
        table = fetching.table
        values = torch.empty(fetching.ids.numel(), table.width, dtype=table.param.dtype)
        for shard, place in fetching.places.items():
            values[place] = fetching.answers[shard]
        self.fetched += fetching.ids.numel()
        ids, cached = fetching.ids, self._cached.get(table.number)
        if cached is not None:
            ids, order = torch.sort(torch.cat([cached.ids, ids]))
            values = torch.cat([cached.values, values])[order]
        self._cached[table.number] = _Cache(ids, values)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin a lease: no row has a gradient."""
        self._leaves.clear()
        self._sums = None

    def touch(self, table: int, ids: Tensor, leaf: Tensor) -> None:
        """A forward has used these rows: their gradients will be those of `leaf`."""
        self._leaves.setdefault(table, []).append((ids, leaf))

    def gradients(self) -> list[Tensor]:
        """The sums of gradients of the lease, of each table that has some: they may be changed in place."""
        return [values for _, values in self._summed().values()]

    def _summed(self) -> dict[int, tuple[Tensor, Tensor]]:
        if self._sums is None:
            self._sums = {}
            for number, leaves in sorted(self._leaves.items()):
                pairs = [(ids, leaf.grad) for ids, leaf in leaves if leaf.grad is not None]
                if pairs:
                    table = self._setup.tables[number]
                    ids, grads = [ids for ids, _ in pairs], [grad for _, grad in pairs]
                    self._sums[number] = summed(ids, grads, table.param, table.width)
            self._leaves.clear()
        return self._sums

    def finish(self) -> tuple[list[bool], dict[int, Tensor]]:
        """For each table whether it has a gradient, and for each part of those, what goes there, packed."""
        sums = self._summed()
        packed = {}
        for number, (ids, values) in sums.items():
            table = self._setup.tables[number]
            part, rows = ids % table.parts, ids // table.parts
            for each in range(table.parts):
                place = (part == each).nonzero().view(-1)
                packed[table.first + each] = pack(rows[place], values[place])
        self._sums = None
        return [table.number in sums for table in self._setup.tables], packed
