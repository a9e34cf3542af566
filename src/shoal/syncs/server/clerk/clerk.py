"""The clerk of a run with servers: who leases work, orders that steps are applied, and has the last word on both.

It is a part of the supervisor, has no thread and no clock of its own, and is told all that happens: `hear` what
processes say, `ended` when one is gone, `tick` now and then. What it wants done it does by its `Hands`. Steps have
their way in `clerk_steps`, servers their places in `clerk_places`; here are workers, and how all of it goes together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from torch import nn

from shoal.core.errors import WorkerError
from shoal.core.events import Notice, RunEnded
from shoal.core.progress import figures_of
from shoal.core.spec import MOST_SERVERS
from shoal.data.parcel import unseal
from shoal.layouts.single import Change, least_samples
from shoal.monitor.wording import counted
from shoal.syncs.server import messages as said
from shoal.syncs.server.clerk.places import Places
from shoal.syncs.server.clerk.saving import Keeping, Resumed, Story, parcel, replanned
from shoal.syncs.server.clerk.steps import BooksDiffer, Hands, Part, Steps
from shoal.syncs.server.leases import Book
from shoal.syncs.server.messages import FIRST_SERVER, Lease
from shoal.syncs.telling import run_started

if TYPE_CHECKING:
    from shoal.checkpoint.saving import Saving
    from shoal.syncs.recipe import Recipe
    from shoal.syncs.server.setup import Setup

__all__ = ["BooksDiffer", "Clerk", "Facts", "Hands"]

LONG_SECONDS = 30.0
"""Without any progress; then people are told who waits for whom."""
CALM_STEPS = 10
"""No gradient is stale in the first steps: nobody's speed is known, and weights change more than they ever will."""
GATHER_SECONDS = 10.0
"""How long those workers that are there first wait for the others, to share the first step with them."""


class Facts(NamedTuple):
    """Of the run, for people."""

    run_id: str
    run_dir: str | None
    workers: int


@dataclass
class _Worker:
    pid: int
    lease: Lease | None = None
    evaluates: int | None = None
    """The version that it evaluates."""
    void: bool = False
    """Whether a server that may have acknowledged its gradient was lost: then it does not count when it is done."""
    departs: str | None = None
    """Why it is to leave after its lease."""

    @property
    def free(self) -> bool:
        return self.lease is None and self.evaluates is None


class Clerk:
    """For one thread. Raises what ends the run, from any of its methods."""

    def __init__(
        self,
        setup: Setup,
        recipe: Recipe,
        hands: Hands,
        *,
        model: nn.Module,
        facts: Facts,
        saving: Saving | None = None,
        resumed: Resumed | None = None,
        hosts: dict[int, str] | None = None,
    ) -> None:
        """`model` is the supervisor's own, with what the run starts from. `hosts` are addresses by server number;
        without, those of their endpoints."""
        self._setup, self._recipe, self._hands, self._model, self._facts = setup, recipe, hands, model, facts
        self._saving = saving
        self._book = Book(
            setup.course,
            bound=setup.spec.bound,
            version=setup.version,
            total=setup.total,
            open_steps=min((memory.steps for memory in setup.memory.values()), default=1),
            # a lease comes with the model's buffers as they are at the beginning of its step
            ahead=next(model.buffers(), None) is None,
            calm=CALM_STEPS,
            least=least_samples(model),
        )
        # where workers are in step, who is fast must not change what comes out; else it does anyway, and that is said
        self._timed = setup.spec.bound != 0
        self._seen = False
        self._book.paced = self._timed
        self._places = Places(setup, hands.send, hands.start_server, hosts)
        self._story = Story(setup, recipe, model, resumed)
        self._keeping = Keeping(setup, model, self._story, saving)
        self._steps = Steps(setup, recipe, hands, self._book, self._places, self._story, self._keeping)
        self._workers: dict[int, _Worker] = {}
        self._gathered = self._warned = self._busy = False
        self._began = self._moved = 0.0
        self._gone = 0
        self.finished = False
        self.waits = False
        """Whether there are fewer workers than the run needs at least: then nobody is given anything to do."""

    @property
    def version(self) -> int:
        """Steps that are applied."""
        return self._book.version

    @property
    def workers(self) -> list[int]:
        """Seats of the workers that take part."""
        return sorted(self._workers)

    @property
    def applied(self) -> dict[int, said.Applied]:
        """What each server has said last of itself: bytes, pushes."""
        return dict(self._steps.applied)

    def computing(self, seat: int) -> tuple[Lease, tuple[int, int]] | None:
        """The lease that a worker computes, and its first and last position in the epoch; None if it only waits."""
        worker = self._workers.get(seat)
        if worker is None or worker.lease is None or self._book.idle(seat):
            return None
        lease, start = worker.lease, self._setup.course.step(worker.lease.step).start
        return lease, (start + lease.start, start + lease.stop - 1)

    # -- what the supervisor calls -------------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """Start the servers. A run with nothing left to train is finished when this returns."""
        self._moved = now
        record, total = self._story.record, self._setup.total
        if (text := replanned(self._setup, record.planned)) is not None:
            self._notice(text)
        record.planned = total
        if over := self.version >= total:
            text = f"there is nothing left to train: the checkpoint is at step {self.version} of {total}; for more, "
            self._notice(text + "raise epochs= or steps=")
        parts = [self._model], [self._setup.optimizer]
        self._hands.tell(run_started(self.version, *self._facts, self._setup.course, total, *parts))
        if over:
            self._leave()
        else:
            self._places.begin()

    def hear(self, seat: int, message: msgspec.Struct, buffers: Sequence[Any], now: float) -> None:
        """What the process in this seat says."""
        if self.finished:
            return
        if isinstance(message, said.Complaint):
            if message.fatal:
                raise WorkerError(message.text, step=self.version)
            self._notice(message.text)
            return
        if seat >= FIRST_SERVER:
            self._hear_server(seat - FIRST_SERVER, message, buffers, now)
        else:
            self._hear_worker(seat, message, buffers, now)
        self._moved, self._warned = now, False
        self._advance(now)

    def ended(self, seat: int, why: str, now: float) -> None:
        """The process in this seat is gone; `why` goes on a sentence that begins with who it was.

        Raises `EverythingLost` if nobody has the model any longer.
        """
        if self.finished:
            return
        if seat >= FIRST_SERVER:
            if not self._places.buried(seat - FIRST_SERVER):
                self._lose(seat - FIRST_SERVER, why, now)
        else:
            self._gone += 1
            self._workers.pop(seat, None)
            self._book.left(seat)
        self._advance(now)

    def tick(self, now: float) -> None:
        if self.finished:
            return
        if self._saving is not None:
            self._saving.tell()
        self._places.weigh(now)
        self._advance(now)
        if self._places.placed and self._steps.seen.due(now):
            self._tell_seen()
        if now - self._moved > LONG_SECONDS and not self._warned and not self.finished:
            self._warned = True
            self._notice(f"nothing has moved for {LONG_SECONDS:.0f} s: {self._waits_for()}")

    def next_look(self, now: float) -> float | None:
        """When to call `tick` at the latest, for the sake of leases; None if they do not ask for it."""
        return None if self.finished else self._book.next_look(now)

    def stop(self, reason: str) -> None:
        """End the run after the step in progress, checkpointed. `reason` is one of `following.REASONS`."""
        self._steps.stop(reason)

    def depart(self, seat: int, now: float, why: str = "this worker is not needed any longer") -> None:
        """Let a worker leave, after the lease that it has."""
        worker = self._workers.get(seat)
        if worker is not None:
            worker.departs = why
            self._advance(now)

    def scale_servers(self, servers: int, now: float) -> str | None:
        """So many servers from now on. Returns why not, if that cannot be."""
        if not 1 <= servers <= MOST_SERVERS:
            return f"a run has 1 to {MOST_SERVERS} servers, not {servers}"
        if not self._places.placed:
            return "its servers are just being started; try again when its first step is done"
        if self.finished or self._steps.stopping is not None:
            return "the run is about to end"
        if servers != self._places.wanted:
            self._places.scale(servers)
            self._advance(now)
        return None

    def outcome(self) -> dict[str, Any]:
        """As `fit.train` returns it."""
        return figures_of(self._ended())

    def _ended(self) -> RunEnded:
        record = self._story.record
        facts = self._recipe.facts(self.version, record.evaluated, self._steps.stopping)
        return self._story.progress.ended(facts, record.metrics)

    def state(self) -> nn.Module:
        """The model that the clerk was given, as it was trained, once the run is finished."""
        return self._model

    # -- workers -------------------------------------------------------------------------------------------------------

    def _hear_worker(self, seat: int, message: msgspec.Struct, buffers: Sequence[Any], now: float) -> None:
        if isinstance(message, said.Ready):
            self._workers[seat] = _Worker(message.pid)
            self._book.joined(seat)
            if self._places.placed:
                self._hands.send(seat, self._places.placement())
            return
        worker = self._workers.get(seat)
        if worker is None:
            return
        if isinstance(message, said.Done):
            self._take(seat, worker, message, buffers, now)
        elif isinstance(message, said.Evaluated):
            worker.evaluates = None
            snapshot = self._keeping.kept.get(message.version)
            if snapshot is not None and snapshot.evaluate:
                self._steps.evaluated(snapshot, message.metrics)
        else:
            raise BooksDiffer(f"worker {seat} says {type(message).__name__}, which is not for it to say")

    def _take(self, seat: int, worker: _Worker, done: said.Done, buffers: Sequence[Any], now: float) -> None:
        if worker.lease != done.lease:
            return  # it was given another one instead
        worker.lease = None
        self._seen |= not done.unseen
        self._book.paced = self._timed or not self._seen
        if worker.void:
            worker.void = False
            self._book.left(seat)
            self._book.joined(seat)
        elif self._book.done(seat, done.lease, done.seconds, now, done.aside):
            changes, notices = unseal(bytes(buffers[0]), buffers[1:]) if buffers else ([], [])
            self._steps.take(Part(seat, done, [Change(*change) for change in changes]))
            self._steps.notice(notices)

    def _give(self, seat: int, worker: _Worker, now: float) -> None:
        """Something to do for a worker that has nothing."""
        if worker.departs is not None:
            self._hands.send(seat, said.Depart(worker.departs))
            del self._workers[seat]
            self._book.left(seat)
            return
        snapshot = self._keeping.evaluating()
        if snapshot is not None and all(other.evaluates is None for other in self._workers.values()):
            worker.evaluates, snapshot.evaluating = snapshot.version, True
            self._hands.send(seat, said.Evaluate(snapshot.version), parcel(snapshot.values))
            return
        grant = self._book.ask(seat, now)
        if grant is not None:
            self._order(seat, worker, grant.lease, grant.version)

    def _order(self, seat: int, worker: _Worker, lease: Lease, version: int) -> None:
        worker.lease, worker.void = lease, False
        self._hands.send(seat, said.Work(lease, version), self._story.parcel())

    def _give_all(self, now: float) -> None:
        self._gathered |= len(self._workers) + self._gone >= self._facts.workers
        self._gathered |= bool(self._workers) and now - self._began > GATHER_SECONDS
        if not self._gathered or self.waits:
            return
        for seat, worker in sorted(self._workers.items()):
            # One that only waits for the weights of its lease can do something else first. While a step is being
            # applied nobody knows whether it still waits.
            waits = worker.lease is not None and self._book.idle(seat) and not self._steps.applies
            if worker.free or (waits and worker.departs is not None):
                self._give(seat, worker, now)
            elif waits:
                grant = self._book.reassign(seat, now) or self._book.refresh(seat, now)
                if grant is not None:
                    self._order(seat, worker, grant.lease, grant.version)

    # -- servers -------------------------------------------------------------------------------------------------------

    def _hear_server(self, number: int, message: msgspec.Struct, buffers: Sequence[Any], now: float) -> None:
        if number not in self._places.numbers:
            return  # it has left
        if isinstance(message, said.Serving):
            self._places.serving(number, message, self.version)
        elif isinstance(message, said.Holds):
            first = not self._places.placed
            if self._places.holds(number, message, self.version):
                self._began = now if first else self._began
                self._replaced()
                self._steps.again(number)
        elif isinstance(message, said.Closed):
            self._steps.closed(number, message)
        elif isinstance(message, said.Applied):
            self._steps.hear_applied(number, message, now)
        elif isinstance(message, said.Kept):
            parts = unseal(bytes(buffers[0]), buffers[1:]) if buffers else {}
            if self._steps.have(number, message.version, parts, more=message.more):
                self._steps.audit()
                if self._saving is not None:
                    self._saving.finish()
                self._leave()
        else:
            raise BooksDiffer(f"server {number} says {type(message).__name__}, which is not for it to say")

    def _lose(self, number: int, why: str, now: float) -> None:
        began = self._places.placed
        self._steps.seen.replaced += 1
        had = number in self._places.having()
        replaced = self._places.lost(number, why, now)
        what = "another process takes its place"
        if number not in self._places.numbers:
            what = "it was to leave anyway"
        elif had and self._places.durability != "disk":
            what = f"the servers that have copies of its shards go on with them, and {what}"
        self._notice(f"server {number} {why}; {what}")
        if began and (replaced or self._places.durability == "disk"):
            applies = self._steps.applies
            self._doubt(self._steps.lost(number, now), applies)
        if replaced:
            self._replaced()

    def _doubt(self, step: int, applies: bool) -> None:
        """What workers compute of this step and later ones may be acknowledged by a server that lost it.

        Not what they still wait for weights for; but while a step is applied nobody knows who has them.
        """
        for seat, worker in self._workers.items():
            if worker.lease is not None and worker.lease.step >= step and (applies or not self._book.idle(seat)):
                worker.void = True

    def _replaced(self) -> None:
        """Tell all of the new placement."""
        self._places.tell_servers()
        told = self._places.placement()
        for seat in sorted(self._workers):
            self._hands.send(seat, told)
        self._steps.fetch_again()

    # -- all together --------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Do whatever can be done now."""
        if self._busy or self.finished or not self._places.placed:
            return
        self._busy = True
        try:
            if self._steps.passage is None:
                self._tend()
            self._steps.open()
            self._steps.fetch()
            self._give_all(now)
        finally:
            self._busy = False

    def _tend(self) -> None:
        """No step is being closed or applied: a moment to change who has what.

        But not who holds what, while something is kept: a new mirror does not have that.
        """
        if self._places.tend(self.version):
            self._replaced()
        elif not self._keeping.kept and (changed := self._places.move()) is not None:
            if changed:
                self._steps.undo(self.version)
                self._doubt(self.version, applies=False)
            self._steps.only(self._places.numbers)
            self._replaced()
        elif not self._keeping.kept and self._places.level():
            self._steps.undo(self.version)
            self._doubt(self.version, applies=False)
            self._replaced()

        if self._places.arrived():
            self._notice(f"the run goes on with {counted(self._places.wanted, 'server')}")
            self._tell_seen()

    def _leave(self) -> None:
        """The run is over: tell everybody."""
        self.finished = True
        if self._places.placed:
            self._tell_seen()
        for number in self._places.numbers:
            self._hands.send(FIRST_SERVER + number, said.End())
        for seat in sorted(self._workers):
            self._hands.send(seat, said.Depart("the run is over"))
        self._hands.tell(self._ended())

    def _tell_seen(self) -> None:
        self._hands.tell(self._steps.seen.event(self.version, self._places, self._steps.applied))

    # -- for people ----------------------------------------------------------------------------------------------------

    def _notice(self, text: str) -> None:
        self._hands.tell(Notice(step=self.version, text=text))

    def _waits_for(self) -> str:
        passage = self._steps.passage
        if not self._places.settled:
            return f"server{_are(self._places.missing())} not ready"
        if passage is not None:
            what = "closed" if passage.order is None else "applied"
            return f"step {passage.step + 1} is not {what} yet: server{_are(sorted(passage.waits))} at it"
        if any(snapshot.sent_for for snapshot in self._keeping.kept.values()):
            return "servers have not sent all that a checkpoint is made of"
        if not self._workers:
            return "there is no worker"
        if self.waits:
            return "there are fewer workers than the run needs (min_workers)"
        evaluate = [seat for seat, worker in self._workers.items() if worker.evaluates is not None]
        parts = [f"worker{_are(evaluate)} evaluating"] if evaluate else []
        leases = {seat: worker.lease for seat, worker in sorted(self._workers.items())}
        parts += [f"worker {seat} is in step {lease.step + 1}" for seat, lease in leases.items() if lease is not None]
        return "; ".join(parts) or "nobody has anything to do; please report it"


def _are(numbers: Sequence[int]) -> str:
    return f"s {', '.join(map(str, numbers))} are" if len(numbers) != 1 else f" {numbers[0]} is"
