"""The way of a step from its last lease to what people are told of it, and what servers keep on the way.

Its leases are `Done`; `Close` (where its norm is wanted, or copies are kept), `Closed` by all; `Apply`, `Applied` by
all. Only then is it told, and only then does it count for leases. If a server is lost between `Close` and `Closed`, the
step is open again; after that, those that have copies just apply it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite, nan, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from shoal.cluster.elasticity import EverythingLost
from shoal.core.errors import ConfigError, NotFiniteError, ShoalError
from shoal.core.events import AnyEvent, Notice
from shoal.core.following import Following, follows
from shoal.core.ordering import positions_in_words
from shoal.core.progress import Update, evaluated, summed
from shoal.layouts.single import Change
from shoal.syncs.applying import clipping
from shoal.syncs.server import messages as said
from shoal.syncs.server.clerk.places import Places
from shoal.syncs.server.clerk.saving import Keeping, Snapshot, Story
from shoal.syncs.server.clerk.seen import Seen
from shoal.syncs.server.leases import Book
from shoal.syncs.server.messages import FIRST_SERVER, MOST_KEPT, Lease

if TYPE_CHECKING:
    from shoal.syncs.recipe import Recipe
    from shoal.syncs.server.setup import Setup


class Hands(Protocol):
    """What the clerk has done by the supervisor."""

    def send(self, seat: int, message: msgspec.Struct, buffers: Sequence[Any] = ()) -> None:
        """To the process in this seat; nothing if it has ended."""

    def start_server(self, number: int) -> None: ...

    def tell(self, event: AnyEvent) -> None:
        """May call `Clerk.stop` before it returns."""


class BooksDiffer(ShoalError):
    """The clerk and the servers or workers differ about what was done: the run must not go on."""


class Part(NamedTuple):
    """What a lease came to."""

    worker: int
    done: said.Done
    buffers: list[Change]


@dataclass
class Passage:
    """The step that is being closed or applied."""

    step: int
    loss: float
    weight: float
    factor: float
    waits: set[int] = field(default_factory=set)
    """Servers that have not answered."""
    norm: float | None = None
    norms: dict[int, float] = field(default_factory=dict)
    order: said.Apply | None = None
    """Once it is given."""
    rates: list[float] = field(default_factory=list)


class Steps:
    """The steps of a run that are open, and the one that is being applied."""

    def __init__(
        self,
        setup: Setup,
        recipe: Recipe,
        hands: Hands,
        book: Book,
        places: Places,
        story: Story,
        keeping: Keeping,
    ) -> None:
        self._setup, self._recipe, self._hands = setup, recipe, hands
        self._book, self._places, self._story, self._keeping = book, places, story, keeping
        self._parts: dict[int, dict[Lease, Part]] = {}
        self._metric: float | None = None
        self.passage: Passage | None = None
        self.final = setup.total
        """The version that the run ends with."""
        self.stopping: str | None = None
        self.applied: dict[int, said.Applied] = {}
        """The last that each server has said."""
        self.seen = Seen()
        self._noticed: set[str] = set()

    @property
    def applies(self) -> bool:
        """Whether servers have been told to apply a step, and not all have said that they did."""
        return self.passage is not None and self.passage.order is not None

    # -- leases --------------------------------------------------------------------------------------------------------

    def take(self, part: Part) -> None:
        self._parts.setdefault(part.done.lease.step, {})[part.done.lease] = part

    def notice(self, texts: Sequence[str]) -> None:
        """Tell a person, once: several workers may find the same."""
        for text in texts:
            if text not in self._noticed:
                self._noticed.add(text)
                self._hands.tell(Notice(step=self._book.version, text=text))

    def undo(self, step: int) -> None:
        """Gradients of this step and later ones are not on all servers any longer."""
        self._book.undo(step)
        for number in [number for number in self._parts if number >= step]:
            del self._parts[number]

    def stop(self, reason: str) -> None:
        """End after the step in progress. The first reason counts."""
        if self.stopping is not None:
            return
        self.stopping = reason
        order = None if self.passage is None else self.passage.order
        # a step that servers were told to apply without keeping it cannot be the last
        more = order is not None and not order.keep
        self.final = min(self.final, self._book.version + 1 + more)
        self._book.total = self.final

    # -- closing and applying ------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin to apply the lowest step, if all of it is there and nothing is in the way."""
        step = self._book.complete()
        if self.passage is not None or step is None or step >= self.final or not self._places.settled:
            return
        evaluating = self._keeping.evaluating() is not None
        if evaluating and (self._story.steps_on_eval or self._follows(step + 1).evaluate):
            return
        most = 1 if self._places.waits_to_move else MOST_KEPT
        if self._follows(step + 1).kept and len(self._keeping.kept) >= most:
            return
        loss, weight = self._weigh(step, self._in_order(step))
        arrival = self._setup.spec.apply == "arrival"
        factor = 1.0 if arrival else self._setup.course.step(step).samples / weight
        passage = self.passage = Passage(step, loss, weight, factor)
        if not arrival and (self._setup.clip is not None or self._places.durability != "none"):
            passage.waits = self._places.holding()
            self.to_servers(said.Close(step, norm=self._setup.clip is not None), self._places.having())
        else:
            self._apply(passage, factor)

    def _in_order(self, step: int) -> list[Part]:
        return [part for _, part in sorted(self._parts[step].items(), key=lambda pair: pair[0].start)]

    def _weigh(self, step: int, parts: Sequence[Part]) -> tuple[float, float]:
        """Mean loss and weight of a step. Raises if they are no numbers to go on with."""
        ranges = [(part.done.lease.start, part.done.lease.stop) for part in parts]
        ends = [0, *(stop for _, stop in ranges)]
        if [start for start, _ in ranges] != ends[:-1] or ends[-1] != self._setup.course.step(step).samples:
            raise BooksDiffer(
                f"the leases of step {step + 1} are {ranges}, which is not the whole step once; please report it"
            )
        weight = sum(part.done.weight for part in parts)
        if not weight > 0.0:
            raise ConfigError(
                f"the weight of step {step + 1} is {weight:g} over all workers; a step must have some weight"
            )
        loss = sum(part.done.loss for part in parts) / weight
        if not isfinite(loss):
            raise self._not_finite(step, f"the loss is {loss}", parts)
        return loss, weight

    def _not_finite(self, step: int, what: str, parts: Sequence[Part]) -> NotFiniteError:
        culprit = next((part for part in parts if not isfinite(part.done.loss)), None)
        where, positions = "", None
        if culprit is not None:
            span, lease = self._setup.course.step(step), culprit.done.lease
            positions = span.start + lease.start, span.start + lease.stop - 1
            samples = positions_in_words(self._setup.course, self._setup.seed, span.epoch, *positions)
            where = f" on worker {culprit.worker} ({samples})"
        return NotFiniteError(
            f"{what} in step {step + 1}{where}. Lower the learning rate, set clip=, or look for bad values in these "
            "samples",
            worker=None if culprit is None else culprit.worker,
            step=step,
            positions=positions,
        )

    def closed(self, number: int, message: said.Closed) -> None:
        passage = self.passage
        if passage is None or passage.order is not None or message.step != passage.step or number not in passage.waits:
            return
        passage.norms[number] = message.norm
        passage.waits.discard(number)
        if passage.waits:
            return
        norm = sqrt(sum(passage.norms.values())) * abs(passage.factor)
        if not isfinite(norm):
            what = f"the loss is {passage.loss:g}, but the norm of its gradient is {norm}"
            raise self._not_finite(passage.step, what, self._in_order(passage.step))
        scale = passage.factor
        if self._setup.clip is not None:
            passage.norm = norm
            scale *= clipping(norm, self._setup.clip)
        self._apply(passage, scale)

    def _follows(self, version: int) -> Following:
        stopping = self.stopping if version >= self.final else None
        facts = self._recipe.facts(version, self._story.record.evaluated, stopping)
        save_every, overdue = self._keeping.wish()
        return follows(facts._replace(save_every=save_every, overdue=overdue))

    def _apply(self, passage: Passage, scale: float) -> None:
        keep = self._follows(passage.step + 1).kept
        passage.order = said.Apply(
            passage.step,
            scale,
            # a schedule that goes by evaluations must not take a step's loss for one
            nan if self._story.steps_on_eval else passage.loss,
            metric=self._metric,
            keep=keep,
            state=keep and self._keeping.saves,
        )
        self._metric = None
        passage.waits = self._places.having()
        self.to_servers(passage.order, passage.waits)

    def hear_applied(self, number: int, message: said.Applied, now: float) -> None:
        self.applied[number] = message
        self.seen.applied(number, message.seconds)
        self._places.applied(number, message.seconds)
        passage = self.passage
        if passage is None or passage.order is None or message.version != passage.step + 1:
            return
        passage.rates = passage.rates or list(message.rates)
        passage.waits.discard(number)
        if not passage.waits:
            self._pass(passage, now)

    def again(self, number: int) -> None:
        """A server is back with what was on its disk: what it was told last may be new to it."""
        passage = self.passage
        if passage is not None and passage.order is not None and number in passage.waits:
            self.to_servers(passage.order, {number})

    def lost(self, number: int, now: float) -> int:
        """A server is lost. Returns the first step whose gradients are lost with it."""
        self.applied.pop(number, None)
        passage = self.passage
        if passage is None or passage.order is None:
            self.passage = None
            first = self._book.version
        else:
            # closed everywhere: those that have copies apply it, or it does so itself, with its journal
            first = passage.step + 1
            if self._places.durability != "disk":
                passage.waits.discard(number)
        if self._places.durability != "disk":
            for snapshot in list(self._keeping.kept.values()):
                snapshot.keepers.discard(number)
                self._need(snapshot)
        self.undo(first)
        if self.passage is not None and not self.passage.waits:
            self._pass(self.passage, now)
        return first

    def _pass(self, passage: Passage, now: float) -> None:
        """A step is applied by all."""
        assert passage.order is not None
        version, span = passage.step + 1, self._setup.course.step(passage.step)
        self.passage = None
        self._book.applied(version, now)
        parts = self._in_order(passage.step)
        del self._parts[passage.step]
        self._story.learn(span.samples, [change for part in parts for change in part.buffers])
        self.notice(self._story.buffers.notices())
        progress = self._story.progress
        logs = summed((name, *sums) for part in parts for name, sums in part.done.logs.items())
        update = Update(passage.loss, passage.weight, passage.norm, progress.means(logs))
        events = progress.committed(self._setup.course, span, update, passage.rates)
        if passage.order.keep:
            after = self._follows(version)
            save = self._keeping.saves and after.save
            snapshot = self._keeping.kept[version] = self._story.snapshot(version, save=save, evaluate=after.evaluate)
            snapshot.keepers = self._places.having()
        for part in parts:
            self.seen.pushed(part.done.lease.step - part.done.read)
        for event in events:
            self._hands.tell(event)

    # -- evaluations and checkpoints -----------------------------------------------------------------------------------

    def evaluated(self, snapshot: Snapshot, metrics: dict[str, float]) -> None:
        self._story.evaluated(snapshot, metrics)
        self._metric = snapshot.metric
        self._hands.tell(evaluated(self._setup.course, snapshot.version, metrics))

    def fetch(self) -> None:
        """Ask servers for what they keep, or let them forget it."""
        while self._places.settled and (snapshot := self._keeping.ready()) is not None:
            wanted = self._keeping.saves and (snapshot.save or snapshot.best)
            if wanted or snapshot.version == self.final:
                snapshot.sent_for = True
                self.to_servers(said.Send(snapshot.version), self._places.holding())
                return
            self._let_go(snapshot)

    def fetch_again(self) -> None:
        """Others hold some shards now: ask them for what has not come."""
        for snapshot in self._keeping.kept.values():
            if snapshot.sent_for:
                missing = [each for shard, each in enumerate(self._places.holders) if shard not in snapshot.parts]
                self.to_servers(said.Send(snapshot.version), {each.server for each in missing})

    def have(self, number: int, version: int, parts: dict[int, dict[str, Any]], *, more: bool = False) -> bool:
        """A server has sent what it has of a version, or some. True if it was the rest of the run's last one."""
        snapshot = self._keeping.take(version, parts)
        if snapshot is None:
            there = None if more else self._keeping.kept.get(version)
            if there is not None and not self._places.held_by(number) <= there.parts.keys():
                if self._places.durability == "disk":
                    there.keepers.discard(number)  # its journal does not have it
                self._need(there)
            return False
        self._keeping.load(snapshot)
        if self._keeping.saves:
            self._keeping.save(snapshot)
        self._let_go(snapshot)
        return snapshot.version == self.final

    def _need(self, snapshot: Snapshot) -> None:
        """Whoever holds a shard now must have kept what has not come of it yet; else go on without this version."""
        holders = {each.server for shard, each in enumerate(self._places.holders) if shard not in snapshot.parts}
        if holders <= snapshot.keepers:
            return
        if snapshot.version == self.final or snapshot.evaluating:
            raise EverythingLost(
                f"the servers that kept the weights of step {snapshot.version} for an evaluation or the end of the run "
                "are lost, one after the other"
            )
        text = f"step {snapshot.version} is not {'evaluated' if snapshot.evaluate else 'checkpointed'}: the servers "
        self._hands.tell(Notice(step=self._book.version, text=text + "that kept its weights are lost"))
        self._let_go(snapshot)

    def _let_go(self, snapshot: Snapshot) -> None:
        del self._keeping.kept[snapshot.version]
        self.to_servers(said.LetGo(snapshot.version), self._places.having())

    def audit(self) -> None:
        """What servers say they have applied must be what was ordered, each step once."""
        there = {number: told.version for number, told in self.applied.items() if number in self._places.having()}
        wrong = {number: version for number, version in there.items() if version != self.final}
        if wrong or self._book.version != self.final:
            raise BooksDiffer(
                f"the run ends with step {self.final}; the clerk is at {self._book.version}, and servers say "
                f"{wrong}. The result is not to be trusted; please report it"
            )

    def only(self, numbers: Sequence[int]) -> None:
        """Others than these servers have left."""
        self.applied = {number: told for number, told in self.applied.items() if number in numbers}
        self.seen.only(numbers)

    def to_servers(self, message: msgspec.Struct, numbers: set[int]) -> None:
        for number in sorted(numbers):
            self._hands.send(FIRST_SERVER + number, message)
