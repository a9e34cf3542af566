"""A small world in which membership can be tested: workers, engine, messages and time are all simulated.

A worker of this world goes through the protocol of a real one: it says hello and ready, meets the others of its term,
copies what it lacks from rank 0, and then moves from position to position in collectives, which may complete on some
members only. What must hold at all times is asserted where it happens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from shoal.cluster import messages as ms
from shoal.cluster.board import Phase
from shoal.cluster.roster.membership import Membership, Order, Plan, Tell

END = 400
"""The position at which the run of this world is complete."""
PATIENCE = 1.0
REACH = 2.0
"""Seconds after which a worker gives up meeting another."""
TICK = 0.1


def following(position: int) -> int:
    """The next position: every third step is evaluated, which is a move of its own."""
    evaluates = position % 6 == 0 and position > 0
    return position + 1 if evaluates else position // 2 * 2 + 2


@dataclass(eq=False)
class Group:
    """What the members of one term share, while they are connected."""

    names: list[str]
    met: dict[str, Worker] = field(default_factory=dict)
    arrived: dict[int, dict[str, bool]] = field(default_factory=dict)
    released: dict[int, bool] = field(default_factory=dict)
    """Positions whose collective is under way to completion; whether all members had seen the soft regroup by then."""
    agreed: int | None = None


@dataclass(eq=False)
class Worker:
    seat: int
    life: int
    version: str
    alive: bool = True
    stopped: bool = False
    deaf: bool = False
    """Cut off from the coordinator."""
    state: str = "hello"
    told: int = 0
    taken: int = 0
    broken: int = 0
    soft: int = 0
    offered: ms.Term | None = None
    position: int = 0
    holds: bool = False
    copying: bool = False
    computing: bool = False
    since: float = 0.0
    history: tuple[tuple[int, int], ...] = ()
    """Each move of its state: from which position, in which term."""
    proven: int = 0
    """So many of them are known to be made by all."""
    standing: ms.Ready | None = None
    """Repeated until it is told of a term."""
    claims: dict[str, Any] = field(default_factory=dict)
    up: deque[Any] = field(default_factory=deque)
    down: deque[Any] = field(default_factory=deque)

    @property
    def name(self) -> str:
        return ms.name_of(self.seat)

    def say(self, body: Any) -> None:
        self.up.append(body)

    def enter(self, state: str, now: float) -> None:
        self.state, self.since, self.copying, self.computing = state, now, False, state == "training"
        if state == "ready":
            self.claims.clear()
            self.stand()

    def stand(self) -> None:
        self.standing = ms.Ready(self.told, self.position, self.holds)
        self.say(self.standing)


class World:
    def __init__(self, workers: int, least: int, most: int) -> None:
        self.plan = Plan(workers, least, most, "1.0", "run")
        self.now = 100.0
        self.lives = 0
        self.workers: list[Worker] = []
        self.cuts: set[frozenset[int]] = set()
        self.groups: dict[int, Group] = {}
        self.declared: dict[int, list[str]] = {}
        self.highest_formed = 0
        self.committed: dict[int, int] = {}
        self.to_engine: deque[Any] = deque()
        self.from_engine: deque[Any] = deque()
        self.failed: ms.Fail | None = None
        self.completed = False
        self.wrong_versions = 0
        self.crash_next = False
        self.changed = 0
        self.membership = Membership(self.plan)
        self.record = self.membership.record()
        self.act(self.membership.begin(self.now))

    # -- the coordinator -----------------------------------------------------------------------------------------------

    def act(self, orders: list[Order]) -> None:
        self.record = self.membership.record()
        if self.crash_next:
            self.crash_next = False
            self.crash(letters_too=False)
            return
        for order in orders:
            if isinstance(order, Tell):
                self.check_term(order.body)
                for worker in self.living(order.name):
                    worker.down.append(order.body)
            else:
                self.note(order)
                self.to_engine.append(order)

    def note(self, order: Any) -> None:
        if isinstance(order, ms.Fail):
            assert order.text and self.failed is None
            self.failed = order
        assert not isinstance(order, ms.Start) or not self.over, "started after the end"
        if isinstance(order, ms.Changed):
            assert order.term >= self.changed, "a term that stands is followed by higher ones"
            self.changed = order.term

    def check_term(self, body: Any) -> None:
        if not isinstance(body, ms.Term):
            return
        number, names = body.number, body.members
        if number in self.declared:
            assert self.declared[number] == names, "one number, two memberships"
            return
        assert number > max(self.declared, default=0), "numbers of terms only grow"
        assert self.plan.least <= len(names) <= self.plan.most and len(set(names)) == len(names)
        self.declared[number] = names
        present = {worker.name: worker for worker in self.workers if worker.alive and worker.name in names}
        first = present.get(names[0])
        for worker in present.values():
            assert worker.state in ("ready", "over"), f"{worker.name} was still {worker.state}"
            assert first is None or first.position >= worker.position or not worker.holds, "rank 0 is behind"
            assert first is None or first.holds or not worker.holds, "rank 0 has no state, and another has"

    def crash(self, *, letters_too: bool) -> None:
        """The coordinator dies and is started again from what its journal has."""
        self.membership = Membership.restored(self.plan, self.record, self.now)
        self.from_engine.clear()
        while self.to_engine:
            self.serve_engine()
        self.from_engine.clear()
        self.from_engine.append(ms.Present(sorted(worker.seat for worker in self.workers if worker.alive)))
        for worker in self.workers:
            worker.down.clear()
            if letters_too:
                worker.up.clear()
            for claim in worker.claims.values():
                worker.say(claim)

    def deliver_up(self, worker: Worker) -> None:
        if worker.up and not worker.deaf:
            body = worker.up.popleft()
            orders = self.membership.hear(worker.name, worker.life, body, self.now)
            self.completed = self.completed or self.membership.complete
            self.act(orders)

    def deliver_report(self) -> None:
        if self.from_engine:
            self.act(self.membership.engine(self.from_engine.popleft(), self.now))

    # -- the engine ----------------------------------------------------------------------------------------------------

    def living(self, name: str) -> list[Worker]:
        return [worker for worker in self.workers if worker.alive and worker.name == name]

    def serve_engine(self) -> None:
        if not self.to_engine:
            return
        order = self.to_engine.popleft()
        if isinstance(order, ms.Start) and not self.living(ms.name_of(order.seat)):
            self.lives += 1
            version = "0.9" if self.wrong_versions > 0 else "1.0"
            self.wrong_versions = max(0, self.wrong_versions - 1)
            self.workers.append(Worker(order.seat, self.lives, version, since=self.now))
        elif isinstance(order, ms.Kill):
            for worker in self.living(ms.name_of(order.seat)):
                self.end(worker)
        elif isinstance(order, ms.Look):
            for worker in self.living(ms.name_of(order.seat)):
                verdict = ms.STOPPED if worker.stopped else ms.CUT if worker.deaf else ms.SLOW
                self.from_engine.append(ms.Looked(order.seat, verdict))

    def end(self, worker: Worker, computing: bool = False) -> None:
        worker.alive = False
        share: tuple[int, int] | None = None
        if computing and worker.computing and worker.taken in self.groups:
            names = self.groups[worker.taken].names
            rank = names.index(worker.name)
            share = rank * 60 // len(names), (rank + 1) * 60 // len(names) - 1
        self.from_engine.append(
            ms.Ended(worker.seat, "was killed by SIGKILL", share is not None, worker.position // 2, share)
        )

    # -- a worker ------------------------------------------------------------------------------------------------------

    def deliver_down(self, worker: Worker) -> None:
        if not worker.down or worker.deaf or worker.stopped or not worker.alive:
            return
        body = worker.down.popleft()
        if isinstance(body, ms.Welcome) and worker.state == "hello":
            worker.enter("ready", self.now)
        elif isinstance(body, ms.Refused | ms.Leave | ms.Finish):
            worker.enter("over", self.now)
        elif isinstance(body, ms.Term) and body.number > worker.told:
            worker.told, worker.offered, worker.standing = body.number, body, None
        elif isinstance(body, ms.Regroup) and body.now:
            worker.broken, worker.told = max(worker.broken, body.term), max(worker.told, body.term)
        elif isinstance(body, ms.Regroup):
            worker.soft = max(worker.soft, body.term)

    def progress(self, worker: Worker) -> None:
        if worker.stopped or not worker.alive:
            return
        if worker.state == "over":
            self.end(worker)
        elif worker.state == "ready":
            self.take_term(worker)
        elif worker.state in ("meeting", "training") and max(worker.broken, worker.told - 1) >= worker.taken:
            worker.enter("ready", self.now)
        elif worker.state == "meeting":
            self.meet(worker)
        elif worker.state == "training":
            self.train(worker)

    def take_term(self, worker: Worker) -> None:
        term, worker.offered = worker.offered, None
        if term is None:
            return
        if term.number <= worker.broken:
            worker.stand()
            return
        worker.taken = term.number
        worker.enter("meeting", self.now)
        group = self.groups.setdefault(term.number, Group(term.members))
        assert worker.name not in group.met, "two processes under one name in one term"
        group.met[worker.name] = worker

    def apart(self, one: Worker, other: Worker) -> bool:
        return frozenset((one.life, other.life)) in self.cuts

    def connected(self, group: Group) -> bool:
        there = [group.met[name] for name in group.names if name in group.met]
        return len(there) == len(group.names) and not any(self.apart(a, b) for a in there for b in there)

    def in_group(self, worker: Worker, number: int) -> bool:
        return worker.alive and worker.taken == number and worker.state in ("meeting", "training")

    def meet(self, worker: Worker) -> None:
        group = self.groups[worker.taken]
        all_there = all(self.in_group(member, worker.taken) for member in group.met.values())
        if group.agreed is None and all_there and self.connected(group):
            group.agreed = group.met[group.names[0]].position
        if (group.agreed is None or worker.copying) and self.now - worker.since > REACH:
            self.give_up(worker, group)
            return
        if group.agreed is None:
            return
        first = group.met[group.names[0]]
        if worker is not first and (worker.position < group.agreed or (first.holds and not worker.holds)):
            self.copy(worker, first, group)
        else:
            assert worker.position == group.agreed, "a member is ahead of rank 0"
            self.form(worker, group)

    def copy(self, worker: Worker, first: Worker, group: Group) -> None:
        if not worker.copying:
            worker.copying, worker.since = True, self.now
        elif self.in_group(first, worker.taken) and not first.stopped and not self.apart(worker, first):
            assert first.position == group.agreed, "rank 0 moved while others copied from it"
            worker.position, worker.history = first.position, first.history
            self.form(worker, group)

    def form(self, worker: Worker, group: Group) -> None:
        worker.holds = True
        worker.enter("training", self.now)
        worker.claims["formed"] = ms.Formed(worker.taken)
        worker.say(ms.Formed(worker.taken))
        if all(member.taken == worker.taken and member.state == "training" for member in group.met.values()):
            self.highest_formed = max(self.highest_formed, worker.taken)

    def give_up(self, worker: Worker, group: Group) -> None:
        missing = [name for name in group.names if name not in group.met or self.apart(worker, group.met[name])]
        worker.say(ms.Unreached(worker.taken, missing))
        worker.enter("ready", self.now)

    def train(self, worker: Worker) -> None:
        group, position = self.groups[worker.taken], worker.position
        arrived = group.arrived.setdefault(position, {})
        if worker.computing:
            worker.computing, worker.since = False, self.now
            arrived[worker.name] = worker.soft >= worker.taken
        there = [group.met[name] for name in arrived]
        complete = len(there) == len(group.names) and all(
            self.in_group(member, worker.taken) and member.position == position for member in there
        )
        if position not in group.released and complete and self.connected(group):
            assert self.highest_formed <= worker.taken, "an old term goes on beside a newer one"
            group.released[position] = all(arrived.values())
        if position in group.released:
            self.move(worker, leave=group.released[position])

    def move(self, worker: Worker, *, leave: bool) -> None:
        """A collective has completed here: all members have made every move before it."""
        for position, term in worker.history[worker.proven :]:
            assert self.committed.setdefault(position, term) == term, "a step was committed twice, in two partitions"
        worker.proven = len(worker.history)
        if worker.position >= END:
            worker.claims["done"] = ms.Done()
            worker.say(ms.Done())
            worker.enter("over", self.now)
            return
        worker.history += ((worker.position, worker.taken),)
        worker.position = following(worker.position)
        worker.enter("training", self.now)
        if leave:
            worker.enter("ready", self.now)

    def notice(self, worker: Worker) -> None:
        """A broken connection to a peer is seen by the worker itself."""
        if self.in_group(worker, worker.taken) and not worker.stopped:
            group = self.groups[worker.taken]
            if any(not self.in_group(member, worker.taken) for member in group.met.values()):
                worker.enter("ready", self.now)

    def beat(self, worker: Worker) -> None:
        if worker.stopped or not worker.alive or worker.state == "over":
            return
        if worker.state == "hello":
            worker.say(ms.Hello(worker.version, b"model", worker.life))
            return
        phase = Phase.COPY if worker.copying else Phase.RECOVER
        if worker.state == "training":
            phase = Phase.COMPUTE if worker.computing else Phase.EXCHANGE
        seconds = self.now - worker.since
        worker.say(ms.Beat(worker.taken, worker.position // 2, int(phase), seconds, PATIENCE))
        if worker.state == "ready" and worker.standing is not None:
            worker.say(worker.standing)

    # -- time ----------------------------------------------------------------------------------------------------------

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for worker in self.workers:
            self.beat(worker)
        self.act(self.membership.tick(self.now))

    def run(self, seconds: float, enough: int = 1 << 30) -> bool:
        """Everything goes on, evenly. Whether the furthest worker came so far."""
        until = self.now + seconds
        while self.now < until and not self.over and self.furthest < enough:
            self.pass_time(TICK)
            for worker in list(self.workers):
                while worker.up and not worker.deaf:
                    self.deliver_up(worker)
            while self.to_engine or self.from_engine:
                self.serve_engine()
                self.deliver_report()
            for worker in list(self.workers):
                while worker.down and not worker.deaf and not worker.stopped and worker.alive:
                    self.deliver_down(worker)
                for _ in range(2):
                    self.progress(worker)
            self.workers = [worker for worker in self.workers if worker.alive or worker.up]
        return self.over or self.furthest >= enough

    @property
    def over(self) -> bool:
        return self.failed is not None or self.completed

    @property
    def furthest(self) -> int:
        return max(self.committed, default=0)

    def heal(self) -> None:
        self.cuts.clear()
        self.wrong_versions = 0
        for worker in self.workers:
            worker.stopped = worker.deaf = False
