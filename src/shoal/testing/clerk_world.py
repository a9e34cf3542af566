"""A world for the clerk of a run with servers: workers, servers and messages without processes, in a random order.

Messages between two of them stay in order; everything else happens in whatever order a seed says. Servers know of a
shard only which leases count and which version it has: enough to see that each step is applied exactly once.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from shoal.core.events import AnyEvent
from shoal.data.parcel import seal, unseal
from shoal.syncs.server import messages as said
from shoal.syncs.server import optimizers
from shoal.syncs.server.clerk.clerk import Clerk
from shoal.syncs.server.messages import FIRST_SERVER, Lease
from shoal.syncs.server.setup import Setup


@dataclass
class Shard:
    """One shard on one server. `weights` say how often it was applied."""

    version: int
    weights: Tensor
    open: dict[int, set[Lease]] = field(default_factory=dict)
    closed: dict[int, set[Lease]] = field(default_factory=dict)

    def has(self, lease: Lease) -> bool:
        return (
            lease.step < self.version
            or lease in self.open.get(lease.step, set())
            or lease in self.closed.get(lease.step, set())
        )

    def clone(self, *, arrival: bool = False) -> Shard:
        """What a copy has of it: with apply=arrival, all that was applied."""
        closed = {step: set(leases) for step, leases in self.closed.items()}
        opened = {step: set(leases) for step, leases in self.open.items()} if arrival else {}
        return Shard(self.version, self.weights.clone(), opened, closed)


class SimServer:
    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.shards: dict[int, Shard] = {}
        self.placement: said.Placement | None = None
        self.closing: tuple[int, set[int]] | None = None
        """A step, and the shards whose mirrors have not acknowledged it."""
        self.kept: dict[int, dict[int, dict[str, Any]]] = {}
        self.copying: set[int] = set()
        """Shards whose mirrors have not acknowledged the copy."""
        self.letters: deque[tuple[str, int, int, Any]] = deque()
        self.say(said.Serving(f"tcp://10.0.0.{number + 1}:{world.ports()}", 100 + number))

    def say(self, message: msgspec.Struct, buffers: Sequence[Any] = ()) -> None:
        self.world.say(FIRST_SERVER + self.number, message, buffers)

    @property
    def term(self) -> int:
        return -1 if self.placement is None else self.placement.term

    def held(self) -> list[int]:
        if self.placement is None:
            return []
        return [shard for shard, holder in enumerate(self.placement.holders) if holder.server == self.number]

    def mirror(self, shard: int) -> int | None:
        return None if self.placement is None else self.placement.holders[shard].mirror

    def report(self) -> None:
        held = {shard: self.shards[shard].version for shard in self.held()}
        rest = {number: shard.version for number, shard in self.shards.items() if number not in held}
        self.say(said.Holds(0 if self.placement is None else self.placement.term, held, rest))

    def hear(self, message: msgspec.Struct) -> None:
        setup = self.world.setup
        if isinstance(message, said.Begin):
            sizes = {shard.number: shard.stop - shard.start for shard in setup.cut.shards}
            if message.source == "start":
                self.shards = {
                    each: Shard(message.version, torch.zeros(sizes[each], dtype=torch.uint8)) for each in message.shards
                }
                self.world.disk.update({each: shard.clone() for each, shard in self.shards.items()})
            elif message.source == "journal":
                self.shards = {each: self.world.disk[each].clone() for each in message.shards}
                self.kept = self.world.kept.get(self.number, {})
            self.report()
        elif isinstance(message, said.Placement):
            self.place(message)
        elif isinstance(message, said.Close):
            self.close(message.step)
        elif isinstance(message, said.Apply):
            self.apply(message)
        elif isinstance(message, said.Send):
            kept = self.kept.get(message.version, {})
            tree = {shard: kept[shard] for shard in self.held() if shard in kept}
            header, buffers = seal(tree)
            self.say(said.Kept(message.version, list(tree)), [header, *[bytearray(each) for each in buffers]])
        elif isinstance(message, said.LetGo):
            self.kept.pop(message.version, None)
        elif isinstance(message, said.End):
            self.world.kill(FIRST_SERVER + self.number)

    def place(self, placement: said.Placement) -> None:
        before, self.placement = self.placement, placement
        assert before is None or placement.term > before.term
        arrival = self.world.setup.spec.apply == "arrival"
        for shard in list(self.shards):
            holder, old = placement.holders[shard], None if before is None else before.holders[shard]
            # with arrival, who held it may have what others lack, and a spare lacks what came since
            behind = arrival and old is not None and self.number in (old.server, old.spare)
            if (behind and holder.mirror == self.number) or self.number not in (
                holder.server,
                holder.mirror,
                holder.spare,
            ):
                del self.shards[shard]
        self.copying = {shard for shard in self.copying if self.mirror(shard) is not None and shard in self.held()}
        for shard in self.held():
            assert shard in self.shards, f"server {self.number} is to hold shard {shard} and does not have it"
            mirror = self.mirror(shard)
            if mirror is None or before is None:
                continue
            known = before.holders[shard]
            had = {known.mirror} if arrival else {known.server, known.mirror, known.spare}
            if mirror not in had or before.endpoints.get(mirror) != placement.endpoints[mirror]:
                self.copying.add(shard)
        for shard in sorted(self.copying):
            copy = self.shards[shard].clone(arrival=arrival)
            self.send(placement.holders[shard].mirror, "copy", shard, placement.term, (self.number, copy))
        if self.closing is not None:
            step, waits = self.closing
            self.closing = step, {shard for shard in waits if self.mirror(shard) is not None}
            self.answer()
        self.report()

    def send(self, server: int | None, kind: str, shard: int, step: int, body: Any) -> None:
        other = None if server is None else self.world.servers.get(server)
        if other is not None:
            other.letters.append((kind, shard, step, body))

    def read(self) -> None:
        kind, shard, step, body = self.letters[0]
        term = self.term
        if kind == "copy" and term < step:
            return  # its placement is still on its way
        self.letters.popleft()
        if kind == "copy":
            if term == step:
                if shard not in self.shards or self.shards[shard].version <= body[1].version:
                    self.shards[shard] = body[1]
                self.send(body[0], "copied", shard, term, None)
                self.report()
        elif kind == "copied":
            if term == step:
                self.copying.discard(shard)
        elif kind == "record":
            if shard in self.shards:
                self.shards[shard].closed[step] = body[1]
                self.send(body[0], "acknowledged", shard, step, None)
        elif self.closing is not None and self.closing[0] == step:
            self.closing[1].discard(shard)
            self.answer()

    def whole(self, step: int, leases: set[Lease]) -> bool:
        edges = sorted((lease.start, lease.stop) for lease in leases)
        samples = self.world.setup.course.step(step).samples
        return [start for start, _ in edges] == [0, *(stop for _, stop in edges)][:-1] and edges[-1][1] == samples

    def seal_step(self, shard: int, step: int) -> None:
        mine = self.shards[shard]
        if step not in mine.closed:
            leases = mine.open.pop(step, set())
            assert leases and self.whole(step, leases), f"shard {shard}, step {step}: {sorted(leases, key=repr)}"
            mine.closed[step] = leases

    def close(self, step: int) -> None:
        waits = set()
        for shard in self.held():
            self.seal_step(shard, step)
            mirror = self.mirror(shard)
            if mirror is not None:
                waits.add(shard)
                self.send(mirror, "record", shard, step, (self.number, set(self.shards[shard].closed[step])))
            if self.world.setup.spec.durability == "disk":
                self.world.disk[shard] = self.shards[shard].clone()
        self.closing = step, waits
        self.answer()

    def answer(self) -> None:
        if self.closing is not None and not self.closing[1]:
            if any(self.closing[0] not in self.shards[shard].closed for shard in self.held()):
                self.closing = None  # shards of another server have come to this one since
                return
            self.say(said.Closed(self.closing[0], float(len(self.held()))))
            self.closing = None

    def apply(self, order: said.Apply) -> None:
        for number, shard in self.shards.items():
            if order.step < shard.version:
                continue
            assert order.step == shard.version, f"server {self.number}: step {order.step} on version {shard.version}"
            self.seal_step(number, order.step)
            del shard.closed[order.step]
            shard.version += 1
            shard.weights += 1
            if self.world.setup.spec.durability == "disk":
                self.world.disk[number] = shard.clone()
        version = order.step + 1
        if order.keep:
            self.kept[version] = {number: self.keep(number, shard) for number, shard in self.shards.items()}
            if self.world.setup.spec.durability == "disk":
                self.world.kept[self.number] = self.kept
        self.world.orders.setdefault(order.step, order)
        self.say(said.Applied(version, [0.5], self.world.applies(self.number, len(self.shards)), 0, 0, 0, 0))

    def keep(self, number: int, shard: Shard) -> dict[str, Any]:
        setup = self.world.setup
        weights = shard.weights.clone()
        optimizer = optimizers.make(setup, number, weights)
        schedule = None if setup.make_schedule is None else setup.make_schedule(optimizer).state_dict()
        tree = optimizers.state(optimizer, setup, number)
        return {"weights": weights, "optimizer": tree, "schedule": schedule}


class SimWorker:
    def __init__(self, world: World, seat: int) -> None:
        self.world, self.seat = world, seat
        self.placement: said.Placement | None = None
        self.work: said.Work | None = None
        self.read: int | None = None
        self.acknowledged: dict[int, int] = {}
        """By shard, the server that has it."""
        self.pending: tuple[said.Work, Sequence[Any]] | None = None
        self.evaluates: int | None = None
        self.buffers: dict[int, Tensor] = {}
        world.say(seat, said.Ready(200 + seat))

    def hear(self, message: msgspec.Struct, buffers: Sequence[Any]) -> None:
        if isinstance(message, said.Placement):
            assert self.placement is None or message.term > self.placement.term
            self.placement = message
        elif isinstance(message, said.Work):
            assert self.evaluates is None
            if self.work is not None and self.read is not None:
                self.pending = message, buffers  # it began before it could be told to do something else
            else:
                self.begin(message, buffers)
        elif isinstance(message, said.Evaluate):
            self.evaluates = message.version
        elif isinstance(message, said.Depart):
            self.world.departed.append(self.seat)
            del self.world.workers[self.seat]

    def begin(self, work: said.Work, buffers: Sequence[Any]) -> None:
        self.work, self.read, self.acknowledged, self.pending = work, None, {}, None
        self.buffers = unseal(bytes(buffers[0]), buffers[1:]) if buffers else {}

    def live(self, shard: int) -> Shard | None:
        assert self.placement is not None
        server = self.world.servers.get(self.placement.holders[shard].server)
        if server is None or server.placement is None or server.placement.term != self.placement.term:
            return None
        return server.shards.get(shard) if shard in server.held() else None

    def act(self) -> None:
        """Do a little."""
        if self.placement is None:
            return
        if self.evaluates is not None:
            version, self.evaluates = self.evaluates, None
            for shard, holder in enumerate(self.placement.holders):
                server = self.world.servers.get(holder.server)
                if server is None or shard not in server.kept.get(version, {}):
                    self.evaluates = version
                    return
            self.world.say(self.seat, said.Evaluated(version, {"loss": self.world.metric(version)}))
        elif self.work is not None:
            self.compute(self.work)
        elif self.pending is not None:
            self.begin(*self.pending)

    def compute(self, work: said.Work) -> None:
        assert self.placement is not None
        shards = [self.live(shard) for shard in range(len(self.placement.holders))]
        if self.read is None:
            versions = [-1 if shard is None else shard.version for shard in shards]
            if min(versions) >= work.version:
                self.read = min(versions)
            return
        left = [shard for shard in range(len(shards)) if shard not in self.acknowledged]
        if left:
            number = self.world.random.choice(left)
            shard = shards[number]
            if shard is not None:
                if not shard.has(work.lease):
                    if not self.world.mirrored(number, self.placement.holders[number], work.lease):
                        return
                    shard.open.setdefault(work.lease.step, set()).add(work.lease)
                self.acknowledged[number] = self.placement.holders[number].server
            return
        lease, self.work = work.lease, None
        samples = lease.stop - lease.start
        done = said.Done(lease, self.read, 0.01, self.world.loss(lease) * samples, samples, {"log": (samples, samples)})
        self.world.say(self.seat, done, self.world.made(self, samples))


class World:
    """Runs a clerk. `watch` sees each message that the clerk sends before it arrives; it may `kill`."""

    def __init__(self, setup: Setup, seed: int = 0) -> None:
        self.setup = setup
        self.random = random.Random(seed)
        self.clerk: Clerk
        self.now = 0.0
        self.events: list[AnyEvent] = []
        self.servers: dict[int, SimServer] = {}
        self.workers: dict[int, SimWorker] = {}
        self.disk: dict[int, Shard] = {}
        self.kept: dict[int, dict[int, dict[int, dict[str, Any]]]] = {}
        """What a journal says that servers kept."""
        self.orders: dict[int, said.Apply] = {}
        self.departed: list[int] = []
        self.down: dict[int, deque[tuple[msgspec.Struct, list[Any]]]] = {}
        self.up: dict[int, deque[tuple[msgspec.Struct | str, list[Any]]]] = {}
        self.watch: Callable[[int, msgspec.Struct], None] = lambda seat, message: None
        self.heard: Callable[[AnyEvent], None] = lambda event: None
        self.loss: Callable[[Lease], float] = lambda lease: 1.0
        self.applies: Callable[[int, int], float] = lambda server, shards: 0.0
        """How long a server takes to apply a step on so many shards."""
        self.metric: Callable[[int], float] = lambda version: 1.0
        self.made: Callable[[SimWorker, int], Sequence[Any]] = lambda worker, samples: ()
        self._ports = 5000

    def ports(self) -> int:
        self._ports += 1
        return self._ports

    # -- hands ---------------------------------------------------------------------------------------------------------

    def send(self, seat: int, message: msgspec.Struct, buffers: Sequence[Any] = ()) -> None:
        self.down.setdefault(seat, deque()).append((message, [bytearray(each) for each in buffers]))
        self.watch(seat, message)

    def start_server(self, number: int) -> None:
        assert number not in self.servers
        self.down[FIRST_SERVER + number] = deque()
        self.servers[number] = SimServer(self, number)

    def tell(self, event: AnyEvent) -> None:
        self.events.append(event)
        self.heard(event)

    # -- what happens --------------------------------------------------------------------------------------------------

    def say(self, seat: int, message: msgspec.Struct | str, buffers: Sequence[Any] = ()) -> None:
        self.up.setdefault(seat, deque()).append((message, list(buffers)))

    def start_worker(self, seat: int) -> None:
        self.down[seat] = deque()
        self.workers[seat] = SimWorker(self, seat)

    def kill(self, seat: int) -> None:
        """The clerk hears of it after all that the process has said."""
        gone = self.servers.pop(seat - FIRST_SERVER, None) if seat >= FIRST_SERVER else self.workers.pop(seat, None)
        if gone is not None:
            self.down[seat] = deque()
            self.say(seat, "died")

    def mirrored(self, shard: int, holder: said.Holder, lease: Lease) -> bool:
        """With apply=arrival, mirrors have each lease before it is acknowledged. False if one cannot have it yet."""
        if self.setup.spec.apply != "arrival" or holder.mirror is None:
            return True
        other, sender = self.servers.get(holder.mirror), self.servers[holder.server]
        if other is None or shard not in other.shards or shard in sender.copying or other.term != sender.term:
            return False
        other.shards[shard].open.setdefault(lease.step, set()).add(lease)
        return True

    def step(self) -> None:
        """One thing happens."""
        self.now += 0.001
        choices: list[Callable[[], None]] = []
        for seat, waiting in self.up.items():
            if waiting:
                choices.append(lambda seat=seat: self._to_clerk(seat))  # type: ignore[misc]
        for seat, orders in self.down.items():
            if orders and (seat in self.workers or seat - FIRST_SERVER in self.servers):
                choices.append(lambda seat=seat: self._to_process(seat))  # type: ignore[misc]
        choices += [server.read for server in self.servers.values() if server.letters]
        choices += [worker.act for worker in self.workers.values()]
        choices.append(lambda: self.clerk.tick(self.now))
        self.random.choice(choices)()

    def run(self, most: int = 200_000) -> None:
        for _ in range(most):
            if self.clerk.finished:
                return
            self.step()
        raise AssertionError(f"the run does not end: version {self.clerk.version}; {self.clerk._waits_for()}")

    def _to_clerk(self, seat: int) -> None:
        message, buffers = self.up[seat].popleft()
        if isinstance(message, str):
            self.clerk.ended(seat, message, self.now)
        else:
            self.clerk.hear(seat, message, buffers, self.now)

    def _to_process(self, seat: int) -> None:
        message, buffers = self.down[seat].popleft()
        if seat >= FIRST_SERVER:
            self.servers[seat - FIRST_SERVER].hear(message)
        else:
            self.workers[seat].hear(message, buffers)
