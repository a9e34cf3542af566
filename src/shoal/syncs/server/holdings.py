"""All shards that one server has: which it holds, which it mirrors, and where their weights lie."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.core.errors import AuditError
from shoal.syncs.server.journal import Journal, recover
from shoal.syncs.server.messages import Apply, Begin, Holds, Lease, Placement, Record
from shoal.syncs.server.shard import Holding
from shoal.syncs.server.table_shard import TableHolding
from shoal.syncs.server.tables import first_weights, part_of

if TYPE_CHECKING:
    from shoal.syncs.server.setup import Memory, Setup

_TOLD_IN = 12
"""So many times while a step is applied, workers are told what they can read."""
LET_GO = -1
"""In place of a shard's version in shared memory: its holder has left it to the next one."""


class Holdings:
    """Of server `number`, on the host whose memory this is.

    The weights of shards that it holds lie in shared memory, of the others in its own.
    """

    def __init__(self, setup: Setup, number: int, memory: Memory, journal: Journal | None) -> None:
        self._setup, self._number, self._memory, self._journal = setup, number, memory, journal
        self._arrival = setup.spec.apply == "arrival"
        self._all: dict[int, Holding] = {}
        self._held: set[int] = set()
        self._mirrored: set[int] = set()
        """As the placement says: a copy may still be on its way."""
        self._spare: set[int] = set()
        """Kept while another server gets a copy."""
        self._placed = False

    def __getitem__(self, shard: int) -> Holding:
        return self._all[shard]

    def __contains__(self, shard: int) -> bool:
        return shard in self._all

    def held(self) -> dict[int, Holding]:
        """In the order of their numbers."""
        return {shard: self._all[shard] for shard in sorted(self._held)}

    def holds(self, shard: int) -> bool:
        return shard in self._held

    def mirrors(self, shard: int) -> bool:
        return shard in self._mirrored

    def told(self, term: int) -> Holds:
        versions = {shard: holding.version for shard, holding in sorted(self._all.items())}
        held = {shard: version for shard, version in versions.items() if shard in self._held}
        return Holds(term, held, {shard: version for shard, version in versions.items() if shard not in held})

    def slice(self, area: Tensor, shard: int) -> Tensor:
        """A shard's bytes of an area."""
        place = self._setup.cut.shards[shard]
        return area[place.start : place.stop]

    @contextlib.contextmanager
    def changing(self, shard: int) -> Iterator[None]:
        """Meanwhile the count of a shard that is held is odd: who reads its weights tries again.

        If this raises, it stays odd: nobody should read what is half changed. So it may be, from a holder that died.
        """
        state = self._memory.state[shard]
        state[0] = int(state[0]) // 2 * 2 + 1
        yield
        state[1] = self._all[shard].version
        state[0] += 1

    # -- beginning -----------------------------------------------------------------------------------------------------

    def begin(self, order: Begin) -> None:
        if order.source == "journal":
            self._replay()
            return
        for shard in order.shards if order.source == "start" else ():
            self._all[shard] = self._new(shard, order.version)
        if self._journal is not None:
            self._journal.begin(self.states())

    def states(self) -> dict[int, dict[str, Any]]:
        return {shard: holding.state() for shard, holding in sorted(self._all.items())}

    def _new(self, shard: int, version: int) -> Holding:
        """With the weights that the run starts from."""
        table = part_of(self._setup, shard)
        if table is not None:
            rows = first_weights(self._setup, table)
            return TableHolding(self._setup, shard, rows.view(-1).view(torch.uint8), version)
        place = self._setup.cut.shards[shard]
        weights = torch.zeros(place.stop - place.start, dtype=torch.uint8)
        with torch.no_grad():
            flat = {
                number: self._setup.params[number][1].detach().reshape(-1)
                for number in {piece.param for piece in place.pieces}
            }
            for piece, view in zip(place.pieces, self._setup.cut.pieces(weights, shard), strict=True):
                view.copy_(flat[piece.param][piece.start : piece.stop])
        return Holding(self._setup, shard, weights, version)

    def _replay(self) -> None:
        """All that the process before this one has written down."""
        if self._journal is None:
            raise AuditError(f"server {self._number} is to begin from its journal, and durability=disk is not set")
        replayed = self._journal.replay()
        if replayed is None:
            raise AuditError(f"server {self._number} is to begin from its journal, in which there is no whole snapshot")
        self._all = {shard: self._new(shard, self._setup.version) for shard in replayed.states}
        recover(replayed, self._all)

    # -- changing roles ------------------------------------------------------------------------------------------------

    def leave(self, placement: Placement) -> None:
        """Let go of what another server holds from now on: it waits for that (`must_wait`)."""
        mine = {shard for shard, holder in enumerate(placement.holders) if holder.server == self._number}
        for shard in sorted(self._held - mine):
            holding = self._all[shard]
            holding.move_to(torch.empty_like(holding.weights))
            holding.forget_open()
            if self._arrival:
                del self._all[shard]  # it may have what the next holder has not: that one sends a copy
            self._held.discard(shard)
            state = self._memory.state[shard]
            state[0] = int(state[0]) // 2 * 2 + 1
            state[1] = LET_GO

    def must_wait(self, before: Placement | None, placement: Placement, latest: Placement) -> bool:
        """Whether another server on this host lives, and still uses the memory of a shard that is to be held here."""
        if before is None:
            return False
        for shard, (old, new) in enumerate(zip(before.holders, placement.holders, strict=True)):
            if new.server != self._number or old.server == self._number:
                continue
            near = before.hosts.get(old.server) == placement.hosts.get(self._number)
            lives = latest.endpoints.get(old.server) == before.endpoints.get(old.server)
            if near and lives and int(self._memory.state[shard, 1]) != LET_GO:
                return True
        return False

    def place(self, placement: Placement) -> None:
        """Be what the placement says. Raises `AuditError` if this server is to hold what it does not have."""
        holders = placement.holders
        mine = {shard for shard, holder in enumerate(holders) if holder.server == self._number}
        self._mirrored = {shard for shard, holder in enumerate(holders) if holder.mirror == self._number}
        spare = {shard for shard, holder in enumerate(holders) if holder.spare == self._number}
        if self._arrival:
            for shard in self._spare & self._mirrored:
                self._all.pop(shard, None)  # it lacks what came since: the holder sends a copy
        self._spare = spare
        if lacking := sorted(mine - self._all.keys()):
            raise AuditError(f"server {self._number} is to hold the shards {lacking}, and has no copy of them")
        former = self._all.keys() - mine - self._mirrored - spare
        for shard in former:
            del self._all[shard]
        fresh = mine - self._held
        for shard in sorted(fresh):
            self._held.add(shard)
            with self.changing(shard):
                self._all[shard].move_to(self.slice(self._memory.weights, shard))
        if self._journal is not None and (former or (fresh and self._placed)):
            self._journal.compact(self.states())
        self._placed = True

    # -- being a mirror ------------------------------------------------------------------------------------------------

    def load(self, shard: int, state: dict[str, Any]) -> None:
        """Have a copy of a shard."""
        holding = self._new(shard, self._setup.version)
        holding.load(state)
        self._all[shard] = holding
        if self._journal is not None:
            self._journal.compact(self.states())  # it may be the only one soon

    def receive(self, shard: int, record: Record, total: Tensor) -> None:
        """Have a record, as mirror or from the journal; what is here already is left as it is."""
        holding = self._all[shard]
        if self._arrival:
            if not all(holding.has(Lease(record.step, start, stop)) for start, stop in record.ranges):
                holding.replay(record, total)
        elif not holding.is_closed(record.step):
            holding.give(record, total)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def can(self, step: int) -> bool:
        """Whether all that is needed to apply this step is here."""
        return all(self._can(shard, step) for shard in self._held | self._mirrored)

    def _can(self, shard: int, step: int) -> bool:
        holding = self._all.get(shard)
        if holding is None:
            return False
        return self._arrival or shard in self._held or holding.is_closed(step)

    def apply(
        self, order: Apply, ledger: Any = None, term: int = 0, some: Callable[[], None] = lambda: None
    ) -> list[float]:
        """Apply a step on all shards, those where it is applied already left out. Returns the learning rates.

        `some` is called now and then, when it is applied on more of those that are held. For tests: what was applied
        where is written into the ledger, if there is one.
        """
        rates: list[float] = []
        new = [(shard, holding) for shard, holding in self._all.items() if holding.version <= order.step]
        ranges = {} if ledger is None else {shard: holding.ranges(order.step) for shard, holding in new}
        often = max(1, -(-len(self._held) // _TOLD_IN))
        # workers wait for those that are held
        for count, shard in enumerate(sorted(self._all, key=lambda shard: (shard not in self._held, shard)), 1):
            holding = self._all[shard]
            if holding.version <= order.step:
                with self.changing(shard) if shard in self._held else contextlib.nullcontext():
                    holding.apply(order)
            rates = rates or holding.rates
            if count % often == 0 and count <= len(self._held):
                some()
        if ledger is not None:
            shards = {shard: (shard in self._held, self._digest(shard), own) for shard, own in ranges.items()}
            ledger.write(server=self._number, term=term, step=order.step, shards=shards)
        return rates

    def _digest(self, shard: int) -> str:
        return blake2b(self._all[shard].weights.numpy().data, digest_size=16).hexdigest()

    def keeps(self) -> bool:
        """Whether any version is kept."""
        return any(holding.keeping for holding in self._all.values())

    def let_go(self, version: int) -> None:
        for holding in self._all.values():
            holding.let_go(version)
