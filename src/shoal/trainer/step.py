"""One step: its batches, its backward passes, its exchange, its update.

What a step exchanges besides gradients rides in short vectors. *Sums* are of samples: weight and loss in double
precision, logs and buffers. *Flags* are of workers: who was asked to stop, who met something that all have to agree on,
who used which parameter.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from shoal.cluster.board import Phase
from shoal.core.atoms import Course, StepSpan, atom_count
from shoal.core.errors import ConfigError, GroupError, NotFiniteError
from shoal.core.events import Notice
from shoal.core.following import REASONS
from shoal.core.keys import derive
from shoal.core.ordering import items_in_words, order_key, positions_in_words
from shoal.core.pace import Lately
from shoal.core.permutation import Permutation
from shoal.core.progress import Sums, Update, summed
from shoal.core.slices import Forward, Pace, Slices, better, deal, forwards, forwards_by_atom
from shoal.data.device import moved
from shoal.data.fetch import Fetcher, Positions, Request
from shoal.data.loader import Loader, Stream
from shoal.data.tree import leaves
from shoal.layouts.single import Change
from shoal.layouts.totals import Totals
from shoal.proof.keyed import Judgement
from shoal.proof.loss import read_loss
from shoal.proof.rehearse import MOST_SAMPLES, Rehearsal
from shoal.syncs.allreduce import Exchange, Weighing
from shoal.syncs.applying import Applier, OwnGradients, clipping
from shoal.trainer.configure import spelt

if TYPE_CHECKING:
    from shoal.syncs.trained import Trained
    from shoal.trainer.session import Session

_AGREE = len(REASONS)
_LEAVE = _AGREE + 1
_SAVE = _LEAVE + 1
FLAGS = _SAVE + 1
"""Flags before those of the parameters: one for each reason to stop, one that asks all workers to agree on something
new in this step, one that asks all to leave the group after it, because members are to change, and one that asks all
for their part of a checkpoint. Behind them each worker has a place for its pace."""
ENOUGH_SAMPLES = 8
"""Samples that are examined, where a forward has so many."""
ROOM = 1.5
"""A forward has at most so many times the samples of an equal share of a full step, if `micro_batch` does not say it: a
fast worker may have more than the others, and one that does the work of those who died must not run out of memory."""
HEAD = 2
"""Sums in double precision before those of buffers: weight, loss."""


def room(full: int, workers: int) -> int:
    """Samples in one forward at most, of full steps of so many."""
    return min(full, int(ROOM * -(-full // workers)))


class Loop:
    """What all steps of one loop share: the course through the data, and its loading."""

    def __init__(
        self,
        session: Session,
        course: Course,
        fetcher: Fetcher,
        loader: Loader,
        *,
        limit: int | None,
        start: int,
        total: int,
        least: int = 1,
    ) -> None:
        self.session = session
        self.course = course
        self.least = least
        """Samples in one forward at least, where a step has enough."""
        self.fetcher = fetcher
        self._given = limit
        self.total = total
        """Steps of the loop."""
        self._permutation: tuple[int, Permutation] | None = None
        self._slices: dict[int, Slices] = {}
        self._pace: Pace = ()
        self.lately = Lately()
        """Seconds that this worker took for a sample, in the latest steps."""
        self._asked: dict[int, tuple[Forward, ...]] = {}
        full = min(course.batch, course.size)
        self.limit = limit or room(full, session.workers)
        """And at most."""
        self._stream: Stream = loader.open("data", self._request, start)

    def slices(self, samples: int) -> Slices:
        """Who computes which positions of a step of so many samples, in order of rank."""
        if samples not in self._slices:
            session = self.session
            by_atom = session.deterministic
            self._slices[samples] = deal(samples, session.workers, self._pace, least=self.least, by_atom=by_atom)
        return self._slices[samples]

    def own(self, samples: int) -> range:
        """The positions of a step of so many samples that this worker computes."""
        return self.slices(samples)[self.session.rank]

    def take(self, step: StepSpan) -> list[tuple[Forward, Any]]:
        """This worker's forwards in a step, and their batches. Steps must be taken in order."""
        batches = self._stream.take()
        assert batches is not None
        return list(zip(self._asked.pop(step.step), batches, strict=True))

    @property
    def whole(self) -> bool:
        """Whether nothing but the workers cuts a step."""
        return not self.session.deterministic and (self._given is None or self._given >= self.course.batch)

    def again(self, step: StepSpan, forward: Forward) -> Any:
        """The batch of a forward, made anew."""
        (batch,) = self.fetcher.fetch(self._asking(step, [forward]))
        return batch

    def parts(self, step: StepSpan, start: int, samples: int) -> Callable[[int, int], Any]:
        """For trials: makes batches of samples of a step, counted from the one at `start`."""
        (wanted,) = self._asking(step, [Forward(start, start + samples)])
        return self.fetcher.parts(wanted)

    def rehearsed(self, step: StepSpan) -> int:
        """How many samples of a step are examined before it: not more than a forward has, the same on all workers."""
        share = max(2, step.samples // self.session.workers)
        if self._given is not None:
            share = self._given
        if not self.session.proof.strict:
            # half of it is enough where there are many, and costs half: whole and parts are two forwards over them
            share = max(min(share, ENOUGH_SAMPLES), share // 2)
        return min(MOST_SAMPLES, step.samples, share)

    def from_now_on(self, number: int) -> None:
        """What was asked ahead, from this step on, is to be asked again."""
        self._asked.clear()
        self._stream.reset(number)

    def heard(self, pace: Pace, number: int) -> None:
        """All have told their pace, in step `number` − 1: deal by it from this step on, if that is worth it."""
        full = min(self.course.batch, self.course.size)
        pace = better(self._pace, pace, full, least=self.least)
        if pace != self._pace:
            self._pace = pace
            self._deal_anew(number)

    def regrouped(self, number: int) -> None:
        """Members have changed: this worker has other positions from this step on."""
        self._pace, self.lately = (), Lately()
        self._deal_anew(number)

    def _deal_anew(self, number: int) -> None:
        self._slices.clear()
        self.from_now_on(number)

    def close(self) -> None:
        self._stream.close()

    def _request(self, number: int) -> Request | None:
        if number >= self.total:
            return None
        step = self.course.step(number)
        own = self.own(step.samples)
        if self.session.deterministic:
            self._asked[number] = forwards_by_atom(own, self.limit, step.samples)
        else:
            self._asked[number] = forwards(own, self.limit, least=self.least)
        return self._asking(step, self._asked[number])

    def _asking(self, step: StepSpan, parts: Sequence[Forward]) -> Request:
        if self._permutation is None or self._permutation[0] != step.epoch:
            self._permutation = step.epoch, Permutation(self.course.size, order_key(self.session.seed, step.epoch))
        key = derive(self.session.seed, "data", step.step)
        return tuple(self._positions(step, part, key) for part in parts)

    def _positions(self, step: StepSpan, part: Forward, key: int) -> Positions:
        assert self._permutation is not None
        indices = self._permutation[1].span(step.start + part.start, step.start + part.stop).tolist()
        return Positions(indices, key, part.start)


class Step:
    """One update over one global batch. Iterate it for this worker's batches, call `backward` for each, then `apply`.

    Iterate again for another phase (another loss, another optimizer) on the same batches.
    """

    def __init__(self, session: Session, loop: Loop, span: StepSpan) -> None:
        self._session = session
        self._loop = loop
        self._be(span)
        self._batches: list[tuple[Forward, Any]] | None = None
        self._in_phase = False
        self._complete = True
        self._phases = 0
        self._update: Update | None = None
        self._rates: dict[int, list[float]] = {}
        """By optimizer: the learning rates that it was applied with."""
        self._committed = False
        self._broken = False
        self._rehearsal: Rehearsal | None = None
        self.rehearsed = 0.0
        """Seconds that examining the loss took."""
        self.overtaken = False
        """Whether this worker has the result of the step from another one: there is nothing left to apply."""
        self._reset()

    def _be(self, span: StepSpan) -> None:
        self.number = span.step
        self.epoch = span.epoch
        self.samples = span.samples
        self.span = span

    def _reset(self) -> None:
        self._update = None
        self._weight = 0.0
        self._loss = 0.0
        self._own_loss = 0.0
        self._logs: dict[str, list[float]] = {}
        self._new_logs: list[tuple[int, str, float, float]] = []
        self._weighted = False
        """Whether what is summed has a weight of its own."""
        self._form: bool | None = None
        """Whether the loss is a mean."""
        self._applied: set[int] = set()
        self._per = 1.0
        """By which weights are divided from the next step on."""
        self._told: list[float] | None = None
        """The summed flags, where the exchange is part of the iteration, and what was exchanged there."""
        self._exchanged: Trained | None = None
        self._pace: Pace = ()
        """Samples per second, of all workers, where all have told it in this phase. If members change in it, others
        compute it again, and this counts no longer."""

    # -- a phase -------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        if self._phases:
            self._session.cannot_redo()
        if self._session.standing.redoes:
            yield from self._until_exchanged()
        else:
            yield from self._phase()

    def _until_exchanged(self) -> Iterator[Any]:
        """Where steps can be done again, the exchange is a part of iterating: if it breaks, there are more batches."""
        session = self._session
        while True:
            self._broken = session.parts_wanted = False
            try:
                yield from self._phase()
                if not self._broken:
                    self._exchange()
            except GroupError as error:
                session.standing.refuse_other_order(error)
                self._broken = True
            if not self._broken:
                return
            # outside the except block, where nothing holds on to the broken group
            self._batches = None
            # the same randomness again
            self._in_phase, self._phases = False, 0
            session.standing.regroup(session)
            if session.step > self.number and (session.standing.whole or session.step >= self._loop.total):
                self.overtaken = self._complete = True
                return
            if session.step > self.number:
                # what follows this iteration has been done in the state that was copied, and what comes before the next
                # one: the one it was copied from is in that, and here it goes on there
                self._be(self._loop.course.step(session.step))

    def _exchange(self) -> None:
        session = self._session
        (trained,) = session.all_trained()
        self._exchanged = trained
        session.standing.fault("exchange", self.number)
        with session.waiting(Phase.APPLY):
            sums, doubles = self._sums()
            sums, flags = trained.exchange.finish(
                sums, self._flags(trained.exchange, first=True), self._weighing(), doubles
            )
            session.compare_replicas(self.number)
        self._told = flags.tolist()
        self._obey(self._told)
        self._update = self._settle(sums, doubles, agree=self._told[_AGREE] > 0)
        if not session.overlapped:
            # an own loop may look at them, and finds what one process has there
            self._gradients(trained, self._told).place(self._per_weight(trained))
        session.confirm(self.number)
        session.exchanged_in = session.standing.term
        session.private.stands()
        session.standing.fault("decide", self.number)

    def _phase(self) -> Iterator[Any]:
        self._open_phase()
        place = 0
        while place < len(self._load()):
            self._part, batch = self._load()[place]
            self._count = self._part.samples
            self._last = place + 1 == len(self._load())
            if place == 0 and self._session.proof.due(self.number, again=self._may_look_again):
                yield from self._rehearse(0, self._loop.rehearsed(self.span), counts=True)
            self._calls, self._judged = 0, Judgement.FINE
            self._session.asked_others = False
            self._session.buffers.before_forward()
            self._session.inspection.forward(self._count, self.samples)
            logs, new = {name: list(entry) for name, entry in self._logs.items()}, len(self._new_logs)
            yield from self._forward(batch)
            if self._broken:
                return
            if self._judged is not Judgement.FINE:
                self._logs, self._new_logs = logs, self._new_logs[:new]
                if self._judged is Judgement.LEARN:
                    samples = min(MOST_SAMPLES, self._count)
                    yield from self._rehearse(self._part.start, samples, counts=False)
                self._load_again(place)
                continue
            if not self._calls:
                raise ConfigError("a batch of the step was used without step.backward(loss); call it for each batch")
            self._end_batch()
            place += 1
        self._session.inspection.close()
        self._complete = True
        self._note_pace()

    def _note_pace(self) -> None:
        """How long this worker took for a sample, without waiting for others."""
        own = len(self._loop.own(self.samples))
        if own and self._phases == 1 and self._session.workers > 1:
            begun, exposed, rehearsed = self._began
            waited = self._session.group.account.exposed - exposed + self.rehearsed - rehearsed
            self._loop.lately.add((time.perf_counter() - begun - waited) / own)

    @property
    def _may_look_again(self) -> bool:
        return self._session.rank == 0 and self._phases == 1

    def _open_phase(self) -> None:
        self._refuse_unapplied()
        self._phases += 1
        self._reset()
        self._in_phase, self._complete = True, False
        self._session.buffers.open(self.samples)
        self._sums_size = self._session.sums_size
        self._exposed = self._session.group.account.exposed
        self._began = time.perf_counter(), self._exposed, self.rehearsed
        self._session.inspection.open(self.number)
        self._session.open_exchanges(atom_count(self.samples))
        self._session.enter(Phase.COMPUTE)
        own, start, standing = self._loop.own(self.samples), self.span.start, self._session.standing
        standing.computes(*((start + own.start, start + own.stop) if own else (0, 0)))
        standing.fault("compute", self.number)

    def _count_exchange(self) -> None:
        """What this phase has waited for the exchange so far, in the hooks of backward too."""
        before, self._exposed = self._exposed, self._session.group.account.exposed
        self._session.times.exchange += self._exposed - before

    def _load(self) -> list[tuple[Forward, Any]]:
        if self._batches is None:
            begun = time.perf_counter()
            self._batches = self._to_device(self._loop.take(self.span))
            self._session.times.data += time.perf_counter() - begun
        return self._batches

    def _load_again(self, place: int) -> None:
        """A batch anew: the loss may have changed the one that it got."""
        assert self._batches is not None
        part, _ = self._batches[place]
        self._batches[place : place + 1] = self._to_device([(part, self._loop.again(self.span, part))])

    def _to_device(self, batches: list[tuple[Forward, Any]]) -> list[tuple[Forward, Any]]:
        device = self._session.device
        return batches if device.type == "cpu" else [(part, moved(batch, device)) for part, batch in batches]

    def _forward(self, batch: Any) -> Iterator[Any]:
        """Within the yield: the forward of this batch, and its backward, in which activations may be computed again."""
        session = self._session
        positions = range(self._part.start, self._part.stop)
        session.keyed.enter(self.number, self._phases - 1, positions, session.device)
        session.activity.done()  # with what came before: this forward is watched by itself
        try:
            yield batch
        finally:
            session.keyed.leave()

    def _rehearse(self, first: int, samples: int, *, counts: bool) -> Iterator[Any]:
        """Examine the loss on these samples: in a fork, which does not come back from here."""
        session = self._session
        parts: list[Callable[[int, int], Any]] = []

        def fetch(start: int, stop: int) -> Any:
            if not parts:  # in the fork: what is read there is of no account here
                session.activity.leave_to(os.getpid())
                parts.append(self._loop.parts(self.span, first, samples))
            batch = moved(parts[0](start, stop), session.device)
            session.activity.done()
            return batch

        begun = time.perf_counter()
        at = self.number, self._phases - 1
        self._rehearsal = session.rehearsal(fetch, at=at, first=first, samples=samples)
        yield from self._rehearsal.play()
        session.activity.leave_to(0)
        session.activity.done()
        self.rehearsed += time.perf_counter() - begun
        finding, left, self._rehearsal = self._rehearsal.finding, self._rehearsal.left, None
        assert finding is not None
        session.proof.say_what_is_left(left, self.number)
        session.proof.examined(finding, self.number, counts=counts, alone=session.alone)

    def compute(self, loss: Callable[[Any, Any], Any], model: Any, batch: Any) -> None:
        """The forward and the backward of a batch."""
        if self._rehearsal is None:
            self.backward(loss(model, batch))
            return
        try:
            self.backward(loss(model, batch))
        except Exception as error:
            self._rehearsal.fell(error)

    def backward(self, loss: Any, **options: Any) -> None:
        """Add the gradient of this batch's loss: a mean over its samples, or (sum, weight), or a dict with these.

        A step uses one of the two forms throughout. `options` go to `torch.Tensor.backward`.
        """
        if not self._in_phase or self._complete:
            raise ConfigError("step.backward(loss) belongs inside `for batch in step:`")
        read = read_loss(loss, training=True)
        if self._rehearsal is not None:
            self._rehearsal.take(read)
            return
        value, weight, logs, mean = read
        if self._form is not None and self._form != mean:
            raise ConfigError(
                "the loss is a mean in one batch and (sum, weight) in another; return the same form throughout"
            )
        self._form = mean
        session = self._session
        session.inspection.loss_done()
        redo = self._calls == 0 and session.proof.possible and not session.asked_others
        self._judged = session.keyed.judge(redo=redo)
        if self._judged is not Judgement.FINE:
            return
        self._weighted = weight is not None
        weight = self._weight_of(weight, mean)
        if not weight:
            # Nothing in it counts: its mean is not a number, and it has no gradient.
            self._calls += 1
            self._add_logs(logs)
            return
        if self._last:
            session.arm(weighted=self._weighted)
        factor = weight if mean else 1.0
        scale = factor / self.samples
        if session.standing.redoes:
            self._broken = session.standing.broken or not self._survives(value, scale, options)
            if self._broken:
                return
        else:
            _go_back(value, scale, options)
        session.inspection.backward_done()
        self._calls += 1
        total = value.item() * factor
        self._loss += total
        self._own_loss += total
        if self._calls == 1 or not mean:
            self._weight += weight
        self._add_logs(logs)

    def _weight_of(self, weight: float | None, mean: bool) -> float:
        """Of this forward: as the loss gives it, or in samples, or in targets where they were counted."""
        if weight is None:
            return float(self._count)
        return weight / self._session.keyed.unit if mean else weight

    def _survives(self, value: Tensor, scale: float, options: Mapping[str, Any]) -> bool:
        """Do the backward; whether the group, to which gradients may leave meanwhile, was still whole after it."""
        try:
            _go_back(value, scale, options)
        except GroupError as error:
            self._session.standing.refuse_other_order(error)
            return False
        return True

    def log(self, **values: float) -> None:
        """Log numbers for this batch; their mean over the global batch is reported with the step."""
        self._add_logs({name: float(value) for name, value in values.items()})

    def _add_logs(self, logs: Mapping[str, float]) -> None:
        for name, value in logs.items():
            if name in self._session.progress.log_names:
                entry = self._logs.setdefault(name, [0.0, 0.0])
                entry[0] += value * self._count
                entry[1] += self._count
            else:
                self._new_logs.append((self._part.start, name, value * self._count, float(self._count)))

    def _end_batch(self) -> None:
        session, atom = self._session, self._part.atom
        session.buffers.after_forward(self._part.start, self._count)
        if atom is not None:
            session.atom_done(atom, *self._sums())
            self._weight, self._loss, self._logs = 0.0, 0.0, {}

    def _sums(self) -> tuple[Tensor, Tensor]:
        """In single precision, and in double precision."""
        session = self._session
        values = [part for name in session.progress.log_names for part in self._logs.get(name, (0.0, 0.0))]
        # by numpy, which takes a fifth of the time of torch.tensor
        sums = torch.from_numpy(np.array(values, np.float32)).to(session.device)
        doubles = torch.from_numpy(np.array([self._weight, self._loss], np.float64))
        buffers = session.buffers.take_sums()
        return (
            sums if buffers.single is None else torch.cat([sums, buffers.single]),
            doubles if buffers.double is None else torch.cat([doubles, buffers.double]),
        )

    def _flags(self, exchange: Exchange, *, first: bool) -> Tensor:
        session = self._session
        asked = session.channel.stop_asked()
        values = [float(reason == asked) for reason in REASONS]
        news = self._new_logs or session.buffers.news or session.keyed.pending
        values.append(float(first and bool(news)))
        values.append(float(session.standing.redoes and session.standing.leaving))
        values.append(float(first and session.wants_parts(self.number + 1)))
        values += self._own_pace(first=first)
        values += exchange.used()
        return torch.from_numpy(np.array(values, np.float32)).to(session.device)

    def _own_pace(self, *, first: bool) -> list[float]:
        """Samples per second, at this worker's place. Only where nobody sees how a step is split: times change from run
        to run, and must have no say in what comes out."""
        session, lately = self._session, self._loop.lately
        paces = [0.0] * session.workers
        # all at the same steps: nobody deals by it before all have told theirs
        due = first and (self.number + 1) % Lately.ENOUGH == 0
        if due and lately.full and session.split_is_unseen:
            paces[session.rank] = 1.0 / max(1e-9, lately.median)
        return paces

    # -- the update ----------------------------------------------------------------------------------------------------

    @spelt
    def apply(self, optimizer: torch.optim.Optimizer | Applier, *, clip: float | None = None) -> Update:
        """Sum the gradients over all workers and let `optimizer` apply them to its parameters.

        After the backward passes of a phase, each of several optimizers may be applied once.
        """
        if not self._in_phase or not self._complete:
            raise ConfigError("step.apply(optimizer) belongs after `for batch in step:` has gone through all batches")
        applier = optimizer if isinstance(optimizer, Applier) else Applier(optimizer)
        optimizer = applier.optimizer
        if id(optimizer) in self._applied:
            raise ConfigError(
                "step.apply: this optimizer was applied already; iterate the step again for another phase"
            )
        session = self._session
        trained = session.trained(optimizer) or self._adopted(optimizer)
        told = self._told if self._exchanged is trained else None
        first = not self._applied and self._told is None
        self._applied.add(id(optimizer))
        if told is None:
            session.inspection.apply(trained.params, partial=session.workers > 1 or bool(self._weighted))
            # What belongs to the phase is told once, with the first optimizer.
            sums, doubles = self._sums() if first else self._nothing()
            session.enter(Phase.EXCHANGE)
            flags = self._flags(trained.exchange, first=first)
            sums, flags = trained.exchange.finish(sums, flags, self._weighing(), doubles)
            session.enter(Phase.APPLY)
            told = flags.tolist()
            self._obey(told)
            if first:
                self._update = self._settle(sums, doubles, agree=told[_AGREE] > 0)
        assert self._update is not None
        gradients = self._gradients(trained, told)
        for param in trained.frozen:
            param.grad = None  # thawed while the step was computed: it takes part from the next one on
        placed = self._exchanged is trained and not session.overlapped
        scale = 1.0 if placed else self._per_weight(trained)
        norm, clipped = None, 1.0
        if clip is not None:
            gradients.place(scale)
            norm = self._norm(gradients, self._update.loss)
            scale = clipped = clipping(norm, clip, gradients.precision)
        self._count_exchange()
        session.before_change()
        # now: a schedule may be stepped before the step is told
        self._rates[id(optimizer)] = applier.rates()
        applier.apply(gradients, scale, within=trained.exchange.applying(clipped))
        self._update = self._update._replace(norm=norm)
        return self._update

    def _nothing(self) -> tuple[Tensor, Tensor]:
        sums, doubles = self._sums_size
        return torch.zeros(sums, device=self._session.device), torch.zeros(doubles, dtype=torch.float64)

    def _weighing(self) -> Weighing | None:
        """None where sums of gradients are means already, as all samples weigh the same."""
        if not self._weighted:
            return None
        return Weighing(self.samples, None if self._update is None else self._update.weight)

    def _adopted(self, optimizer: torch.optim.Optimizer) -> Trained:
        if self._phases > 1 or self._session.deterministic:
            # Its parameters may hold gradients of an earlier phase, or of several atoms together.
            raise ConfigError(
                "step.apply: this optimizer was not tracked; where a step has several phases, and in "
                "deterministic runs, "
                "name every optimizer before the loop: session.track(optimizer=optimizer)"
            )
        return self._session.adopt(optimizer, atom_count(self.samples))

    def _refuse_unapplied(self) -> None:
        if self._in_phase and self._complete and not self._applied:
            raise ConfigError(
                f"step {self.number + 1} has gradients that were never applied; call step.apply(optimizer) after "
                "`for batch in step:`"
            )

    def _obey(self, flags: list[float]) -> None:
        for reason, flag in zip(REASONS, flags, strict=False):
            if flag > 0 and self._session.stopping is None:
                self._session.stopping = reason
        if flags[_LEAVE] > 0:
            self._session.standing.due = True
        if flags[_SAVE] > 0:
            self._session.parts_wanted = True
        pace = tuple(flags[FLAGS : FLAGS + self._session.workers])
        if len(pace) > 1 and all(pace):
            self._pace = pace

    def _settle(self, sums: Tensor, doubles: Tensor, *, agree: bool) -> Update:
        """Read the summed vectors; where workers met something new in this step, agree on it."""
        session = self._session
        weight, loss = doubles.tolist()[:HEAD]
        names = session.progress.log_names
        values, rest = sums[: 2 * len(names)].tolist() if names else [], sums[2 * len(names) :]
        logs = dict(zip(names, zip(values[::2], values[1::2], strict=True), strict=True))
        if not weight > 0.0:
            raise ConfigError(
                f"the weight of step {self.number + 1} is {weight:g} over all workers; a step must have some weight"
            )
        loss /= weight
        if loss - loss != 0.0:
            raise self._not_finite(f"the loss is {loss}")
        session.buffers.set_known(Totals(rest, doubles[HEAD:]))
        if agree:
            logs.update(self._agree())
        session.buffers.settle()
        for text in session.buffers.notices():
            session.channel.emit(Notice(step=self.number + 1, text=text))
        return Update(loss, weight, None, session.progress.means(logs))

    def _agree(self) -> Sums:
        """Some worker has a new name in its logs or a buffer that never changed before: tell all, once."""
        session = self._session
        mine = {
            "logs": self._new_logs,
            "buffers": [tuple(change) for change in session.buffers.changes],
            "draws": session.keyed.news(),
        }
        # in order of rank, hence of positions: the sums do not depend on the number of workers
        all_told = session.gather_for(f"what step {self.number + 1} has to agree on", mine)
        unit = session.keyed.unit
        session.proof.agree([told["draws"] for told in all_told], self.number)
        self._per = session.keyed.unit / unit
        session.progress.weigh_in(self._per)
        session.buffers.learn([Change(*change) for told in all_told for change in told["buffers"]])
        return summed(entry[1:] for told in all_told for entry in told["logs"])

    def _gradients(self, trained: Trained, flags: list[float]) -> OwnGradients:
        """A parameter that no worker used has none, as in one process."""
        for (_, param), on in zip(trained.params, flags[FLAGS + self._session.workers :], strict=True):
            if not on:
                param.grad = None
        return OwnGradients([param.grad for _, param in trained.params])

    def _per_weight(self, trained: Trained) -> float:
        """By which sums are made means."""
        assert self._update is not None
        return 1.0 if trained.exchange.weighs else self.samples / self._update.weight

    def _norm(self, gradients: OwnGradients, loss: float) -> float:
        """Raises `NotFiniteError` if it is no number to go on with."""
        measured = Applier.measure(gradients)
        if not measured.finite:
            raise self._not_finite(f"the loss is {loss:g}, but the norm of its gradient is {measured.norm}")
        return measured.norm

    def _not_finite(self, what: str) -> NotFiniteError:
        """Which worker, which parameter. Every worker comes here, from the same summed values."""
        worker, computed, strange = self._culprit()
        where, positions = "", None
        if worker is not None:
            positions = self.span.start + computed.start, self.span.start + computed.stop - 1
            order = self._loop.course, self._session.seed, self.epoch
            where = f" on worker {worker} ({positions_in_words(*order, *positions)}"
            if strange:
                items = items_in_words(*order, [self.span.start + place for place in strange])
                where += f"; values that are not finite came with {items}"
            where += ")"
        return NotFiniteError(
            f"{what} in step {self.number + 1}{where}; {self._first_not_finite()}. "
            "Lower the learning rate, set clip=, or look for bad values in these samples",
            worker=worker,
            step=self.number,
            positions=positions,
        )

    def _culprit(self) -> tuple[int | None, range, list[int]]:
        """The first worker whose loss is not finite (None if there is none), what it computes, its strange samples."""
        own = self._own_loss
        strange = None if own - own == 0.0 else self._strange_samples()
        told = self._session.gather_for(f"the end of step {self.number + 1}, which is not finite", strange)
        culprit = next((rank for rank, strange in enumerate(told) if strange is not None), None)
        if culprit is None:
            return None, range(0), []
        return culprit, self._loop.slices(self.samples)[culprit], told[culprit]

    def _strange_samples(self) -> list[int]:
        """Places in the step of this worker's samples that came with values that are not finite.

        Empty where the user collates: rows may be in another order then.
        """
        if self._loop.fetcher.collate is not None:
            return []
        found: set[int] = set()
        for part, batch in self._batches or ():
            found.update(part.start + row for row in _strange_rows(batch, part.samples))
        return sorted(found)

    def _first_not_finite(self) -> str:
        trained = self._session.all_params()
        for name, param in trained:
            if not torch.isfinite(param).all():
                return f"the first parameter that is not finite is {name!r}"
        for name, param in trained:
            if param.grad is not None and not torch.isfinite(param.grad).all():
                return f"all parameters are finite; the first whose gradient is not is {name!r}"
        return (
            "all parameters and gradients are finite: perhaps nothing counts in what this worker computes, so that its "
            "loss is 0 / 0, and (sum, weight) should be returned"
        )

    def _shares(self) -> list[list[tuple[int, int]]]:
        """For each rank the positions of the epoch that it computes."""
        start = self.span.start
        return [[(start + own.start, start + own.stop)] if own else [] for own in self._loop.slices(self.samples)]

    def commit(self) -> Update | None:
        """The step is done; what was applied is what counts. Called by the loop if the body does not."""
        if self._committed:
            return self._update
        if not self.overtaken:
            self._refuse_unapplied()
        self._committed = True
        session, update = self._session, self._update
        if self.overtaken:
            return None
        if self._batches is None:
            self._loop.take(self.span)
        session.samples += len(self._loop.own(self.samples))
        if session.workers == 1 or not session.standing.redoes:
            session.confirm(self.number + 1)  # no other worker could take it back
        events = session.committed(self.span, update, self._rates, self._per)
        session.inspection.before_telling()
        for event in events:
            session.channel.emit(event)
        session.inspection.after_telling()
        session.standing.committed(self.number, self._shares, session.digest)
        session.standing.fault("commit", self.number)
        if self._pace:
            self._loop.heard(self._pace, self.number + 1)
        return update


def _go_back(value: Tensor, scale: float, options: Mapping[str, Any]) -> None:
    if scale == 1.0:
        value.backward(**options)
    else:
        value.backward(torch.full((), scale, dtype=value.dtype, device=value.device), **options)


def _strange_rows(batch: Any, samples: int) -> set[int]:
    """Which of so many samples have something that is not finite in a batch."""
    found: set[int] = set()
    for leaf in leaves(batch):
        plain = isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested
        if plain and leaf.is_floating_point() and leaf.dim() and len(leaf) == samples:
            rows = (~torch.isfinite(leaf.detach().reshape(samples, -1)).all(1)).nonzero().flatten().tolist()
            if len(rows) < samples or samples == 1:  # what all have is meant, as in a mask that is added to scores
                found.update(rows)
    return found
