"""The servers of a run as its clerk sees them: which of them live, what they hold, and what a death changes.

Servers may be added and drained: they are placed anew by `moving`, one placement after the other, at moments when no
step is being closed or applied, and until that is done none is.

With durability `peer`, mirrors take over at once, and the process that replaces the dead one gets copies of what has no
mirror, at a moment when no step is being closed or applied. Once it has them, it and others change places so that the
load is even again. With `disk`, the process that replaces it reads its journal. With `none` everything is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import msgspec

from shoal.cluster.elasticity import EverythingLost
from shoal.core.errors import WorkerError
from shoal.syncs.server.clerk.load import GAIN, Load
from shoal.syncs.server.messages import FIRST_SERVER, Begin, End, Holder, Holds, Placement, Serving
from shoal.syncs.server.moving import aim, back, lacks, slowest, toward
from shoal.syncs.server.placing import even, fill, lost_for_good, place, replace
from shoal.syncs.server.setup import Setup
from shoal.syncs.server.tables import held_bytes

MOST_DEATHS, WITHIN_SECONDS = 10, 20.0
"""More deaths of servers in this time end the run: there must be something wrong with all of them."""


class Places:
    """Who holds what. `send` is for one process, by seat; `start` starts the process of a server, by number."""

    def __init__(
        self,
        setup: Setup,
        send: Callable[[int, msgspec.Struct], None],
        start: Callable[[int], None],
        hosts: Mapping[int, str] | None,
    ) -> None:
        self._setup, self._send, self._start = setup, send, start
        self.hosts = hosts or {}
        spec = setup.spec
        self.durability = spec.durability
        self._peers = spec.durability == "peer"
        self.sizes = held_bytes(setup)
        self.wanted = self._announced = spec.servers
        self.numbers = list(range(self._processes(spec.servers)))
        if self._idle_mirror:
            self.holders = [Holder(0, 1) for _ in self.sizes]
        else:
            self.holders = place(self.sizes, self.numbers, mirrors=self._peers)
        self.term = 0
        self._endpoints: dict[int, str] = {}
        """Of those that listen."""
        self.pids: dict[int, int] = {}
        self._begun: set[int] = set()
        """Those that have what they were told to have."""
        self._back: set[int] = set()
        """Those that listen again after a death, and have nothing yet."""
        self._copying: dict[int, set[int]] = {}
        """Shards that a server is getting copies of."""
        self._acknowledged: dict[int, int] = {}
        """The term of the last placement that each server has said it follows."""
        self._uneven = False
        self._leaving: set[int] = set()
        """Those that are being drained."""
        self._ending: set[int] = set()
        """Those that were told to leave, and whose processes are not known to be gone."""
        self._replan = False
        """Whether shards should be placed anew, when there is a moment for it."""
        self._goal: list[Holder] | None = None
        """Of the move that is being made."""
        self._load = Load(self.sizes)
        self._deaths: deque[float] = deque(maxlen=MOST_DEATHS + 1)

    # -- what is there -------------------------------------------------------------------------------------------------

    @property
    def placed(self) -> bool:
        """Whether the run has begun: every shard is on its servers."""
        return self.term > 0

    @property
    def settled(self) -> bool:
        """Whether steps can be closed and applied now: all that should be there is, and nothing is being copied.

        All have acknowledged the placement too, so what they said under an earlier one has been heard.
        """
        return self._calm and self._goal is None

    @property
    def _calm(self) -> bool:
        there = self.placed and not self._copying and self.holding() <= self._begun
        return there and all(self._acknowledged.get(number) == self.term for number in self.having())

    @property
    def waits_to_move(self) -> bool:
        """Whether shards should be placed anew: what servers keep for a checkpoint is in the way of it."""
        return self._replan

    @property
    def _idle_mirror(self) -> bool:
        """A single server's mirror is a process that holds nothing."""
        return self._peers and self.wanted == 1

    @property
    def _arrival(self) -> bool:
        return self._setup.spec.apply == "arrival"

    def _processes(self, servers: int) -> int:
        return servers + (self._peers and servers == 1)

    def holding(self) -> set[int]:
        return {holder.server for holder in self.holders}

    def held_by(self, number: int) -> set[int]:
        """The shards that this server holds."""
        return {shard for shard, holder in enumerate(self.holders) if holder.server == number}

    def having(self) -> set[int]:
        """Those that hold or mirror a shard."""
        others = {one for holder in self.holders for one in (holder.mirror, holder.spare)}
        return self.holding() | {one for one in others if one is not None}

    def missing(self) -> list[int]:
        """Those that are waited for."""
        late = {number for number in self._begun if self._acknowledged.get(number, 0) < self.term}
        return sorted((set(self.numbers) - self._begun) | self._copying.keys() | late)

    def placement(self) -> Placement:
        hosts = {number: self._host(number) for number in self._endpoints}
        return Placement(self.term, list(self.holders), dict(self._endpoints), hosts)

    def _host(self, number: int) -> str:
        return self.hosts.get(number) or urlsplit(self._endpoints[number]).hostname or self._endpoints[number]

    def _shards_of(self, number: int) -> list[int]:
        return [shard for shard, holder in enumerate(self.holders) if number in (holder.server, holder.mirror)]

    # -- what happens --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        for number in self.numbers:
            self._start(number)

    def serving(self, number: int, message: Serving, version: int) -> None:
        """A server listens."""
        self._endpoints[number] = message.endpoint
        self.pids[number] = message.pid
        if not self.placed:
            self._tell(number, Begin(self._shards_of(number), "start", self._setup.version))
        elif self.durability == "disk" and self._shards_of(number):
            self._tell(number, Begin(self._shards_of(number), "journal", version))
        else:
            self._back.add(number)

    def holds(self, number: int, message: Holds, version: int) -> bool:
        """What a server has. True if there is a new placement now, which all have to be told of."""
        self._acknowledged[number] = message.term
        if number in self._copying:
            have = {shard for shard, at in message.mirrored.items() if at >= version}
            if message.term == self.term and self._copying[number] <= have:
                del self._copying[number]
            return False
        if number in self._begun or number not in self._endpoints or number in self._back:
            return False
        versions = {**message.mirrored, **message.held}
        wanted = self._shards_of(number)
        if self.placed:
            behind = [shard for shard in wanted if versions.get(shard, -1) < version]
            if behind:
                raise EverythingLost(
                    f"the journal of server {number} has shard {behind[0]} at step {versions.get(behind[0])}, and the "
                    f"run is at step {version}"
                )
        elif any(versions.get(shard) != self._setup.version for shard in wanted):
            return False  # it has not read all of them yet
        self._begun.add(number)
        if not self.placed and self._begun != set(self.numbers):
            return False
        self.term += 1
        return True

    def lost(self, number: int, why: str, now: float) -> bool:
        """A server's process is gone; another one is started. True if there is a new placement now.

        Raises `EverythingLost` if nobody has what it had.
        """
        self._deaths.append(now)
        if len(self._deaths) > MOST_DEATHS and now - self._deaths[0] < WITHIN_SECONDS:
            raise WorkerError(
                f"servers of the run ended {len(self._deaths)} times within {WITHIN_SECONDS:.0f} s; the last one, "
                f"server {number}, {why}. What they said is in the run's logs"
            )
        self._endpoints.pop(number, None)
        self._acknowledged.pop(number, None)
        self._begun.discard(number)
        self._back.discard(number)
        if not self.placed:
            self._start(number)
            return False
        moved = self._give_up(number)
        if self.durability == "disk":
            self._start_again(number)
            self.term += moved
            return moved
        # what a server was still getting copies of, it does not have
        empty = {shard for shards in self._copying.values() for shard in shards}
        self._copying.pop(number, None)
        gone = lost_for_good(self.holders, number)
        gone += [shard for shard, holder in enumerate(self.holders) if holder.server == number and shard in empty]
        if gone:
            copies = "there were no copies of it (durability=none)"
            if self._peers:
                copies = "its copy was lost before, or not complete yet"
            shards = f"shard {gone[0]}" if len(gone) == 1 else f"{len(gone)} shards"
            raise EverythingLost(f"server {number} {why} and had {shards} of the model; {copies}")
        if self._shards_of(number):
            self._uneven = moved = True
            self.holders = replace(self.holders, number)
        self._start_again(number)
        self.term += moved
        return moved

    def tend(self, version: int) -> bool:
        """At a moment when no step is being closed or applied: see that each shard has a mirror. True: a new placement.

        It takes away nobody's gradients: only mirrors are added.
        """
        if not self.placed or not self._back or self._copying:
            return False
        living = sorted(self._begun | self._back)
        filled = list(self.holders)
        if self._peers:
            added = fill(self.holders, self.sizes, [number for number in living if number not in self._leaving])
            filled = [old if old.mirror is not None else new for old, new in zip(filled, added, strict=True)]
        for number in living:
            pairs = enumerate(zip(self.holders, filled, strict=True))
            shards = {shard for shard, (old, new) in pairs if new.mirror == number and old.mirror != number}
            if number in self._back:
                self._tell(number, Begin(sorted(shards), "copy", version))
                self._begun.add(number)
            if shards:
                self._copying[number] = shards
        self._back.clear()
        self.holders = filled
        self.term += 1
        return True

    def level(self) -> bool:
        """At such a moment: let holders and mirrors change places where the load is uneven. True: a new placement.

        Gradients of steps that are open are lost to shards that change places.
        """
        if not self._uneven or not self.settled or self._begun != set(self.numbers) or self._idle_mirror:
            return False
        self._uneven = False
        evened = even(self.holders, self.sizes, self.numbers, self._load.speeds, mirrors=False)
        if evened == self.holders:
            return False
        if self._arrival:
            # one that held a shard may have applied what its mirror has not heard of: it gets a copy of its own
            for shard, (old, new) in enumerate(zip(self.holders, evened, strict=True)):
                if old.server != new.server:
                    self._copying.setdefault(old.server, set()).add(shard)
        self.holders = evened
        self.term += 1
        return True

    # -- more and fewer of them ----------------------------------------------------------------------------------------

    def scale(self, servers: int) -> None:
        """So many servers from now on: start those that lack, and let those that are too many be drained."""
        self.wanted = servers
        count = self._processes(servers)
        staying = [number for number in self.numbers if number not in self._leaving]
        while len(staying) < count and self._leaving:  # those that have shards first
            staying.append(max(self._leaving, key=lambda number: (len(self._shards_of(number)), -number)))
            self._leaving.discard(staying[-1])
        self._leaving |= set(sorted(staying)[count:])
        for _ in range(count - len(staying)):
            taken = {*self.numbers, *self._ending}
            number = next(one for one in range(len(taken) + 1) if one not in taken)
            self.numbers = sorted([*self.numbers, number])
            self._start(number)
        self._replan = True

    def move(self) -> list[int] | None:
        """At a moment when no step is being closed or applied, and nothing is kept: the next placement of a move.

        None if there is none; else the shards that have another holder now, whose gradients of open steps are lost.
        """
        if not self._calm or self._back or not (self._goal or self._replan):
            return None
        if self._goal is None:
            if self._begun != set(self.numbers):
                return None
            self._replan = False
            self._goal = self._aim()
        after = [toward(now, goal) for now, goal in zip(self.holders, self._goal, strict=True)]
        if after == self.holders:
            self._goal = None
            return self._dismiss()
        changed = []
        for shard, (now, then) in enumerate(zip(self.holders, after, strict=True)):
            if now.server != then.server:
                changed.append(shard)
            if then.mirror is not None and lacks(now, then, arrival=self._arrival):
                self._copying.setdefault(then.mirror, set()).add(shard)
        self.holders = after
        self.term += 1
        return changed

    def applied(self, number: int, seconds: float) -> None:
        """A server has applied a step, which took it so long."""
        self._load.applied(number, seconds, self.holders)

    def weigh(self, now: float) -> None:
        """Now and then: if a server is slower than others, have shards placed by what was measured."""
        if not self.settled or self._replan or self._begun != set(self.numbers) or not self._load.due(now):
            return
        measured = self._load.measure(self.numbers)
        if measured is None or self._idle_mirror:
            return
        better = aim(self.holders, self.sizes, self.numbers, mirrors=self._peers, speeds=measured)
        if slowest(better, self.sizes, measured) < (1 - GAIN) * slowest(self.holders, self.sizes, measured):
            self._load.speeds = measured
            self._replan = True

    def _aim(self) -> list[Holder]:
        staying = [number for number in self.numbers if number not in self._leaving]
        if self._idle_mirror:
            first = max(staying, key=lambda number: (len(self.held_by(number)), -number))
            return [Holder(first, next(number for number in staying if number != first)) for _ in self.sizes]
        return aim(self.holders, self.sizes, staying, mirrors=self._peers, speeds=self._load.speeds)

    def _dismiss(self) -> list[int] | None:
        """Let those leave that are drained: they have nothing any longer."""
        drained = sorted(number for number in self._leaving if not self._shards_of(number))
        for number in drained:
            self._tell(number, End())
            self._ending.add(number)
            self._forget(number)
        self.term += bool(drained)
        return [] if drained else None

    def _forget(self, number: int) -> None:
        self._leaving.discard(number)
        self._begun.discard(number)
        self.numbers = [other for other in self.numbers if other != number]
        self._endpoints.pop(number, None)
        self._acknowledged.pop(number, None)
        self.pids.pop(number, None)

    def buried(self, number: int) -> bool:
        """The process of a server is gone. True if that was to be: it was drained before."""
        was_to = number in self._ending
        self._ending.discard(number)
        return was_to

    def arrived(self) -> bool:
        """Whether there are as many servers as were asked for, for the first time."""
        if self._replan or self._goal is not None or self._announced == self.wanted:
            return False
        self._announced = self.wanted
        return True

    def _give_up(self, lost: int) -> bool:
        """A server is lost in the middle of a move: back to where shards are, and begin anew later."""
        if self._goal is None:
            return False
        self._goal, self._replan = None, True
        before, self.holders = self.holders, [back(holder, mirrors=self._peers) for holder in self.holders]
        for shard, (old, new) in enumerate(zip(before, self.holders, strict=True)):
            if old.mirror is not None and old.mirror != new.mirror:
                self._copying.get(old.mirror, set()).discard(shard)
            if new.mirror is not None and new.server != lost and lacks(old, new, arrival=self._arrival):
                self._copying.setdefault(new.mirror, set()).add(shard)
        self._copying = {number: shards for number, shards in self._copying.items() if shards}
        return True

    def _start_again(self, number: int) -> None:
        """Replace a process that is gone, unless it was to leave anyway and has nothing."""
        if number in self._leaving and not self._shards_of(number):
            self._forget(number)
        else:
            self._start(number)

    def tell_servers(self) -> None:
        """Tell those that live of the placement, and first those that copies will be sent to."""
        told = self.placement()
        for number in [*self._copying, *sorted(self._endpoints.keys() - self._copying.keys())]:
            self._tell(number, told)

    def _tell(self, number: int, message: msgspec.Struct) -> None:
        self._send(FIRST_SERVER + number, message)
