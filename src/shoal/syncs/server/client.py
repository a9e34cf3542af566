"""A worker's side of a run with servers: it pulls weights, and pushes the gradients of its leases.

What is asked is kept until it is answered: which server each shard was asked of, and which parts it was sent. When the
placement changes, or a server was started again, all that is not answered by a shard's present holder is sent to it.
Servers count a gradient once, however often it comes, and a part that is sent again has the same bytes.

All of it belongs to one thread, the one that made the client and calls backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shoal.comm.account import Account
from shoal.core.errors import ShoalError
from shoal.core.traffic import GRADIENT, MEMORY, PARAMETER
from shoal.syncs.server.frames import as_frame
from shoal.syncs.server.lines import Lines
from shoal.syncs.server.messages import (
    Lease,
    Part,
    Placement,
    Pull,
    Push,
    Rows,
    Took,
    Touched,
    Weights,
)
from shoal.syncs.server.pulling import Copying
from shoal.syncs.server.pushcodec import PushCodec, stretches
from shoal.syncs.server.pushing import Gradient
from shoal.syncs.server.table_client import TableClient, in_groups
from shoal.syncs.server.used import pack_used

if TYPE_CHECKING:
    from shoal.syncs.server.setup import Setup

_RETRY = 0.001
"""Seconds until weights are looked at again that change right now."""


@dataclass
class _Pulling:
    """Weights that are asked for."""

    number: int
    version: int
    exact: bool
    asked: dict[int, int] = field(default_factory=dict)
    """By shard: the server."""
    answers: dict[int, tuple[int, memoryview | None]] = field(default_factory=dict)
    """By shard: the version, and its bytes if they have travelled."""


@dataclass
class _Pushing:
    """The gradient of a lease on its way."""

    lease: Lease
    read: int
    area: Tensor
    slot: int | None
    left: set[int] = field(default_factory=set)
    """Stretches that are complete."""
    parts: dict[int, int] = field(default_factory=dict)
    """By stretch: the server that it was sent to."""
    told: dict[int, int] = field(default_factory=dict)
    """By shard: the server that got the `Push`."""
    took: set[int] = field(default_factory=set)
    payloads: dict[int, Tensor] = field(default_factory=dict)
    """By stretch: what it is encoded to."""
    used: list[bool] = field(default_factory=list)
    scale: float = 1.0
    whole: bool = False
    """All of it lies in the area."""
    rows: dict[int, Tensor] = field(default_factory=dict)
    """By shard: what goes to parts of tables that were used, packed."""


class Client:
    """One worker's. See the module."""

    def __init__(
        self,
        setup: Setup,
        seat: int,
        host: str,
        params: Sequence[tuple[str, nn.Parameter]],
        *,
        fd: int,
        hear: Callable[[], None],
        on_wait: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        account: Account | None = None,
    ) -> None:
        """`fd` is the descriptor of the control link and `hear` handles what came there, whatever is waited for.

        It may call `place`, and raise to leave. `on_wait` is told once of each wait that takes long. `account` gets
        what leaves, and what goes through shared memory either way.
        """
        self._setup, self._seat = setup, seat
        self.account = account or Account()
        self._memory = setup.memory.get(host)
        self._shards = range(len(setup.cut.shards))
        self._lines = Lines(setup, seat, host, fd=fd, hear=hear, on_wait=on_wait, clock=clock, keeper=self)
        self._stretches = stretches(setup.cut, setup.codec)
        self._of_shard: list[list[int]] = [[] for _ in self._shards]
        for number, stretch in enumerate(self._stretches):
            self._of_shard[stretch.shard].append(number)
        self.codec = PushCodec(setup.codec, setup.cut, seat=seat, seed=setup.seed)
        """Has a `note` of what is not done as the codec says."""
        self._gradient = Gradient(setup.cut, params, self._stretches, self._leave)
        self._copying = Copying(setup.cut, params, self._memory)
        self._floor = [0] * len(setup.cut.shards)
        """By shard: the highest version that was read."""
        self.tables = TableClient(setup, self._lines)
        self._count = 0
        self._pulling: _Pulling | None = None
        self._pushing: _Pushing | None = None
        self._slot = 1
        self._owed: list[dict[int, tuple[Lease, int]]] = [{}, {}]
        """For each slot, by shard: the server that may still read it, and what for."""
        self._private: Tensor | None = None
        self.sent = 0
        """Bytes that were sent over sockets so far."""

    # -- who holds what ------------------------------------------------------------------------------------------------

    def place(self, placement: Placement) -> None:
        """From now on servers hold what this says. What is not answered is sent to those who are new."""
        before = self._lines.placement
        if self._lines.place(placement):
            if before is not None:
                self._take_back(before, placement)
            self.send_again()

    def _take_back(self, before: Placement, now: Placement) -> None:
        """Of shards that have another holder now it is not known whether that one has what the old one took."""
        if self._pushing is None:
            return
        for shard, (old, new) in enumerate(zip(before.holders, now.holders, strict=True)):
            if old.server != new.server or before.endpoints.get(old.server) != now.endpoints.get(new.server):
                self._pushing.took.discard(shard)

    def forget(self, server: int) -> None:
        """What this server has not answered is not sent."""
        held = [self._pulling.asked] if self._pulling is not None else []
        if self._pushing is not None:
            held += [self._pushing.parts, self._pushing.told]
        for sent in held:
            for key in [key for key, to in sent.items() if to == server]:
                del sent[key]
        self.tables.forget(server)
        for owed in self._owed:
            for shard in [shard for shard, (_, reader) in owed.items() if reader == server]:
                del owed[shard]

    def send_again(self) -> None:
        """Send all that holders have not been sent."""
        self._ask()
        self.tables.ask()
        if self._pushing is not None:
            self._flush(self._pushing)

    def answered(self, server: int, body: Took | Weights | Rows, frames: list[memoryview]) -> None:
        if isinstance(body, Took):
            self._took(body)
        elif isinstance(body, Rows):
            self.tables.answered(server, body, frames)
        else:
            self._weights(server, body, frames)

    # -- weights -------------------------------------------------------------------------------------------------------

    def prefetch(self, version: int) -> None:
        """Ask for weights of at least this version, which the next `pull` will want."""
        if not self._fits(version):
            self._new_pull(version, exact=False)

    def pull(self, version: int) -> int:
        """Have weights of at least this version in the parameters; the version of the oldest of them.

        No shard is ever older than it was at an earlier pull.
        """
        if not self._fits(version):
            self._new_pull(version, exact=False)
        versions = self._pull()
        self._floor = [max(old, new) for old, new in zip(self._floor, versions, strict=True)]
        return min(versions)

    def pull_exact(self, version: int) -> None:
        """Have the weights of exactly this version, which servers keep, in the parameters."""
        self._new_pull(version, exact=True)
        versions = self._pull()
        if set(versions) != {version}:
            raise ShoalError(f"weights of version {version} were asked for, and those of {sorted(set(versions))} came")

    def _fits(self, version: int) -> bool:
        # not one for a later version either: that may come only when what this one is for is done
        pulling = self._pulling
        return pulling is not None and not pulling.exact and pulling.version == version

    def _new_pull(self, version: int, *, exact: bool) -> None:
        self._count += 1
        self._pulling = _Pulling(self._count, version, exact)
        self._ask()

    def _ask(self) -> None:
        """Ask holders for all shards that have not been asked of them."""
        pulling = self._pulling
        if pulling is None or self._lines.placement is None:
            return
        missing: dict[int, list[int]] = {}
        for shard in self._shards:
            if shard not in pulling.answers and pulling.asked.get(shard) != self._lines.holder(shard):
                missing.setdefault(self._lines.holder(shard), []).append(shard)
        for server, shards in missing.items():
            near = self._lines.near(server) and not pulling.exact
            version = pulling.version
            if not pulling.exact:
                version = max(version, *(self._floor[shard] for shard in shards))
            if self._lines.send(server, Pull(pulling.number, version, near, pulling.exact)):
                pulling.asked.update(dict.fromkeys(shards, server))

    def _weights(self, server: int, weights: Weights, frames: list[memoryview]) -> None:
        pulling = self._pulling
        if pulling is None or weights.number != pulling.number:
            return
        near = self._lines.near(server) and not pulling.exact
        sound = all(shard in self._shards for shard in weights.shards) and (
            near or [len(frame) for frame in frames] == [self._copying.size(shard) for shard in weights.shards]
        )
        if not sound:
            raise ShoalError(
                f"server {server} answered with {[len(frame) for frame in frames]} bytes for the shards "
                f"{weights.shards}, which have {[self._copying.size(s) for s in weights.shards if s in self._shards]}"
            )
        for number, shard in enumerate(weights.shards):
            if pulling.asked.get(shard) == server and weights.version >= self._least(pulling, shard):
                pulling.answers[shard] = (weights.version, None if near else frames[number])

    def _least(self, pulling: _Pulling, shard: int) -> int:
        return pulling.version if pulling.exact else max(pulling.version, self._floor[shard])

    def _pull(self) -> list[int]:
        """Copy each shard when its answer has come: servers may still apply a step to the others."""
        pulling = self._pulling
        assert pulling is not None
        versions: dict[int, int] = {}

        def missing() -> list[int]:
            return [shard for shard in self._shards if shard not in versions and shard not in pulling.answers]

        def come() -> list[int]:
            return [shard for shard in self._shards if shard not in versions and shard in pulling.answers]

        while len(versions) < len(self._shards):
            self._lines.wait(
                lambda: bool(come()),
                lambda: f"weights of version {pulling.version} of {self._lines.holders(missing())}",
            )
            changing = False
            for shard in come():
                version = self._read(pulling, shard)
                if version is not None:
                    versions[shard] = version
                changing = changing or (version is None and shard in pulling.answers)
            if changing:
                self._lines.turn(_RETRY)
        self._pulling = None
        self._copying.finish()
        return [versions[shard] for shard in self._shards]

    def _read(self, pulling: _Pulling, shard: int) -> int | None:
        """Copy a shard whose answer has come. None: it changes right now, or has to be asked for again."""
        version, frame = pulling.answers[shard]
        if frame is not None:
            self._copying.frame(shard, frame)
            return version
        holder = self._lines.holder(shard)
        before = self._copying.copied
        found = self._copying.near(shard, holder) if self._lines.near(holder) else -1
        if self._copying.copied > before:
            self.account.sent(PARAMETER, MEMORY, self._copying.copied - before, 1)
        if found is None or found >= self._least(pulling, shard):
            return found
        # another server has it now, and is not here, or not so far yet
        del pulling.answers[shard]
        pulling.asked.pop(shard, None)
        self._ask()
        return None

    # -- gradients -----------------------------------------------------------------------------------------------------

    def open(self, lease: Lease, read: int) -> None:
        """Begin a lease, computed with weights of version `read`: no parameter has a gradient yet."""
        slot: int | None = None
        if self._memory is not None and self._any_near():
            slot = self._slot = 1 - self._slot
            owed = self._owed[slot]
            self._lines.wait(
                lambda: not owed, lambda: f"{self._lines.holders(list(owed))} to have read an earlier gradient"
            )
            area = self._memory.gradient(self._seat, slot)
        else:
            if self._private is None:
                self._private = torch.zeros(self._setup.cut.size, dtype=torch.uint8)
            area = self._private
        self._pushing = _Pushing(lease, read, area, slot)
        self.codec.open()
        self._gradient.open(area)
        self.tables.open()

    def _any_near(self) -> bool:
        return self._lines.placement is None or any(
            self._lines.near(holder.server) for holder in self._lines.placement.holders
        )

    def arm(self) -> None:
        """The next backward is the last of the lease: what is complete may leave during it."""
        self._gradient.arm()

    def push(self, *, scale: float = 1.0, used: Sequence[bool] | None = None) -> None:
        """Send what has not left; returns when the gradient counts on all shards, whatever happens to servers.

        There is a gradient for parameters that a backward has come to; `used` may leave out some of them.
        """
        pushing = self._pushing
        if pushing is None:
            raise ShoalError("push() without open(): there is no lease whose gradient could be sent")
        found = self._gradient.finish()
        pushing.used = found if used is None else [a and b for a, b in zip(found, used, strict=True)]
        touched, pushing.rows = self.tables.finish()
        pushing.used += touched
        pushing.scale = scale
        pushing.whole = True
        pushing.left.update(range(len(self._stretches)))
        self._flush(pushing)
        shards = self._shards

        def missing() -> list[int]:
            return [shard for shard in shards if shard not in pushing.took]

        self._lines.wait(
            lambda: len(pushing.took) == len(shards),
            lambda: f"{self._lines.holders(missing())} to count its gradient of step {pushing.lease.step}",
        )
        self._pushing = None

    def _leave(self, number: int) -> None:
        """A stretch is complete during the last backward."""
        pushing = self._pushing
        if pushing is not None and self._lines.placement is not None:
            pushing.left.add(number)
            self._send_part(pushing, number)

    def _send_part(self, pushing: _Pushing, number: int) -> None:
        stretch = self._stretches[number]
        server = self._lines.holder(stretch.shard)
        if pushing.parts.get(number) == server or stretch.shard in pushing.took or self._by_slot(pushing, server):
            return
        if stretch.encoded:
            payload = pushing.payloads.get(number)
            if payload is None:
                used = pushing.used or [True] * len(self._setup.cut.offsets)
                payload = self.codec.encode(pushing.lease, stretch, pushing.area, used)
                pushing.payloads[number] = payload
        else:
            payload = pushing.area[stretch.start : stretch.stop]
        part = Part(pushing.lease, stretch.shard, stretch.start, stretch.stop, stretch.encoded)
        if self._lines.send(server, part, [payload.numpy().data]):
            pushing.parts[number] = server

    def _by_slot(self, pushing: _Pushing, server: int) -> bool:
        return pushing.slot is not None and self._lines.near(server)

    def _flush(self, pushing: _Pushing) -> None:
        """Send holders what they have not been sent: all parts that are complete, and then that these were all."""
        if self._lines.placement is None:
            return
        for number in sorted(pushing.left):
            self._send_part(pushing, number)
        if not pushing.whole:
            return
        self._send_rows(pushing)
        waiting: dict[int, list[int]] = {}
        for shard in self._shards:
            if shard not in pushing.took and pushing.told.get(shard) != self._lines.holder(shard):
                waiting.setdefault(self._lines.holder(shard), []).append(shard)
        for server, shards in waiting.items():
            slot = pushing.slot if self._by_slot(pushing, server) else None
            parts = 0 if slot is not None else sum(len(self._of_shard[shard]) for shard in shards)
            push = Push(pushing.lease, shards, pushing.read, pack_used(pushing.used), slot, parts, pushing.scale)
            if self._lines.send(server, push):
                pushing.told.update(dict.fromkeys(shards, server))
                if slot is not None:
                    self._owed[slot].update(dict.fromkeys(shards, (pushing.lease, server)))

    def _send_rows(self, pushing: _Pushing) -> None:
        waiting: dict[int, list[int]] = {}
        for shard in pushing.rows:
            server = self._lines.holder(shard)
            if shard not in pushing.took and pushing.parts.get(-1 - shard) != server:
                waiting.setdefault(server, []).append(shard)
        for server, shards in waiting.items():
            for some in in_groups(shards, lambda shard: pushing.rows[shard].numel()):
                frames = [as_frame(pushing.rows[shard]) for shard in some]
                if self._lines.send(server, Touched(pushing.lease, some), frames):
                    pushing.parts.update({-1 - shard: server for shard in some})

    def _took(self, took: Took) -> None:
        for owed in self._owed:
            for shard in took.shards:
                if shard in owed and owed[shard][0] == took.lease:
                    del owed[shard]
        pushing = self._pushing
        if pushing is None or pushing.lease != took.lease or not pushing.whole:
            return
        for shard in took.shards:
            if shard in self._shards and shard not in pushing.took:
                pushing.took.add(shard)
                if self._by_slot(pushing, self._lines.holder(shard)):
                    self.account.sent(GRADIENT, MEMORY, self._copying.size(shard), 1)
                if any(number in pushing.payloads for number in self._of_shard[shard]):
                    self.codec.commit(shard)

    def close(self) -> None:
        """Leave all servers, and let go of the parameters."""
        self._gradient.close()
        self._pulling = self._pushing = None
        self._lines.close()
