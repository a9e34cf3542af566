"""Computing a lease: some positions of one step, whose gradient goes to servers.

A worker that is led by a clerk has no group and applies nothing. All that a step does up to its exchange is the same,
so that a step cut into leases has the gradient that `Step` computes: the same samples, seeds, forwards and scaling.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import isfinite
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shoal.cluster.board import Place
from shoal.cluster.channel.elastic import ElasticChannel
from shoal.comm.group import SoloGroup
from shoal.core.atoms import Course, StepSpan
from shoal.core.errors import ConfigError
from shoal.core.progress import Sums, summed
from shoal.core.slices import Forward, Slices
from shoal.data.fetch import Fetcher
from shoal.data.loader import Loader
from shoal.layouts.single import Change, least_samples
from shoal.syncs.applying import OwnGradients, clipping
from shoal.syncs.recipe import Recipe
from shoal.syncs.server.embeddings import Embeddings
from shoal.syncs.server.messages import Lease
from shoal.syncs.server.setup import Setup
from shoal.trainer.session import Session
from shoal.trainer.step import Loop, Step, room
from shoal.trainer.workers.fixed import Fixed
from shoal.trainer.workers.start import Start


class Servers(Protocol):
    """What computing needs of `shoal.syncs.server.client.Client`."""

    sent: int

    def open(self, lease: Lease, read: int) -> None:
        """Every parameter has a gradient of zeros from now on."""

    def arm(self) -> None:
        """The next backward is the lease's last."""

    def push(self, *, scale: float = 1.0, used: list[bool]) -> None:
        """Returns when all servers have taken the gradient."""


Params = Sequence[tuple[str, nn.Parameter]]


class LeasedSession(Session):
    """The session of a worker that computes leases."""

    channel: ElasticChannel

    def __init__(
        self,
        seat: int,
        channel: ElasticChannel,
        start: Start,
        model: nn.Module,
        setup: Setup,
        *,
        workers: int = 1,
        place: Place | None = None,
    ) -> None:
        """`workers` is how many there are about; `place` is this one's on the board."""
        super().__init__(
            SoloGroup(),
            channel,
            device=torch.device("cpu"),
            seed=start.seed,
            strict=start.strict,
            spare_cores=max(0.0, len(os.sched_getaffinity(0)) - workers) / workers,
            run_id=start.run_id,
            run_dir=None if start.run_dir is None else str(start.run_dir),
            standing=Fixed(seat, place),
        )
        self.seat = seat
        self.course = setup.course
        self.lease: Lease | None = None
        self.read = 0
        """The version of the weights that the lease is computed with."""
        self.servers: Servers | None = None
        self.tables: Embeddings | None = None
        """If the model has sparse tables."""
        self.overlaps = setup.spec.apply == "step"
        """Whether gradients may leave during the last backward. Those that are made means and clipped first may not."""
        self.params = params_of(model, setup)
        self.track(model=model)
        mine = {id(param) for _, param in self.params}
        self._others = [param for param in model.parameters() if id(param) not in mine]
        self.overlap_backward()
        self._used = [False] * len(self.params)
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._marker(number))
            for number, (_, param) in enumerate(self.params)
        ]

    def _marker(self, number: int) -> Callable[[Tensor], None]:
        def mark(_: Tensor) -> None:
            self._used[number] = True

        return mark

    @property
    def number(self) -> int:
        return self.seat

    @property
    def alone(self) -> bool:
        return False  # leases cut steps as they will

    def own_of(self, step: StepSpan) -> range:
        return range(step.samples) if self.lease is None else range(self.lease.start, self.lease.stop)

    def at(self, step: StepSpan | None) -> None:
        """Which step it is in, for messages."""
        self._at = step

    def used(self) -> list[bool]:
        """For each parameter: has the lease a gradient for it?"""
        return list(self._used)

    def open_exchanges(self, atoms: int) -> None:
        assert self.servers is not None and self.lease is not None
        self._used = [False] * len(self.params)
        for param in self._others:
            param.grad = None
        self.servers.open(self.lease, self.read)

    def arm(self, *, weighted: bool) -> None:
        if self.overlaps and self.servers is not None:
            self.servers.arm()

    def all_params(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.params)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        super().close()


def params_of(model: nn.Module, setup: Setup) -> list[tuple[str, nn.Parameter]]:
    """The parameters of this worker's model that servers train, in the order of the cut."""
    named = dict(model.named_parameters())
    own = {id(param): param for param in named.values()}
    found = [(name, own.get(id(tensor), named.get(name))) for name, tensor in setup.params]
    params = [(name, param) for name, param in found if param is not None]
    if len(params) != len(found):
        missing = next(name for name, param in found if param is None)
        raise ConfigError(f"the model has no parameter {missing!r}, which servers train; build the same model anew")
    for (name, param), (_, tensor) in zip(params, setup.params, strict=True):
        if param.shape != tensor.shape or param.dtype != tensor.dtype:
            raise ConfigError(
                f"parameter {name!r} has shape {tuple(param.shape)} and {param.dtype} here, and servers have "
                f"{tuple(tensor.shape)} and {tensor.dtype}; build the same model on every worker"
            )
    return params


class LeaseLoop(Loop):
    """The batches of leases. The next one is expected to have the same positions in the next step, and loaded ahead."""

    def __init__(
        self, session: LeasedSession, course: Course, fetcher: Fetcher, loader: Loader, *, limit: int, total: int
    ) -> None:
        self._range = 0, 1, 1
        self._next = 0
        self._right = False
        self._ahead: tuple[int, list[tuple[Forward, Any]]] | None = None
        super().__init__(session, course, fetcher, loader, limit=limit, start=0, total=total)

    def slices(self, samples: int) -> Slices:
        start, stop = self._expected(samples)
        return (range(start, stop),)

    def _expected(self, samples: int) -> tuple[int, int]:
        """Which positions of a step of so many; a short one has less of them."""
        start, stop, of = self._range
        return start * samples // of, stop * samples // of

    def turn(self, lease: Lease) -> None:
        """This lease is taken next."""
        samples = self.course.step(lease.step).samples
        if not 0 <= lease.start < lease.stop <= samples:
            raise ConfigError(f"a lease of the positions {lease.start}…{lease.stop - 1} of a step that has {samples}")
        self._right = self._next == lease.step and self._expected(samples) == (lease.start, lease.stop)
        if not self._right:
            self._range = lease.start, lease.stop, samples
            self.regrouped(lease.step)

    def take(self, step: StepSpan) -> list[tuple[Forward, Any]]:
        self._next = step.step + 1
        if self._ahead is None:
            return super().take(step)
        number, batches = self._ahead
        assert number == step.step
        self._ahead = None
        return batches

    def from_now_on(self, number: int) -> None:
        self._ahead = None
        self._next = number
        super().from_now_on(number)

    def look_ahead(self) -> bool:
        """There is nothing to do: have the batches that will be wanted next. False if there is nothing to be had."""
        if not self._right or self._ahead is not None or self._next >= self.total:
            return False
        expected = self._next
        try:
            batches = self.take(self.course.step(expected))
        except Exception:
            # whoever computes these samples will say what is wrong with them
            self._right = False
            self.from_now_on(expected)
            return False
        # it stays the next one, until it is taken
        self._ahead = expected, batches
        self._next = expected
        return True


class LeaseStep(Step):
    """A lease, as the part of its step that this worker computes."""

    _session: LeasedSession

    def __init__(self, session: LeasedSession, loop: LeaseLoop, lease: Lease) -> None:
        super().__init__(session, loop, loop.course.step(lease.step))
        self.lease = lease
        self.own = range(lease.start, lease.stop)

    def load(self) -> None:
        """Have the batches. Else that is part of the first forward."""
        self._load()

    @property
    def loss(self) -> float:
        """Sum over its samples."""
        return self._loss

    @property
    def weight(self) -> float:
        return self._weight

    def logs(self) -> Sums:
        """Sums and weights by name."""
        return summed(entry[1:] for entry in self._new_logs)

    @property
    def _mean_loss(self) -> float:
        return self._loss / self._weight if self._weight > 0.0 else self._loss

    def refuse_not_finite(self) -> None:
        if not isfinite(self._mean_loss):
            raise self._not_finite(f"the loss is {self._mean_loss}")

    def normalise(self, clip: float | None) -> None:
        """Make the gradient the mean over these samples, and clip that."""
        used = [param for (_, param), on in zip(self._session.params, self._session.used(), strict=True) if on]
        grads = [param.grad for param in used if param.grad is not None]
        # nothing that weighs nothing has a say
        factor = self.samples / self._weight if self._weight > 0.0 else 0.0
        if self._session.tables is not None:
            grads += self._session.tables.gradients()
        gradients = OwnGradients(grads)
        gradients.place(factor)
        if clip is not None:
            norm = self._norm(gradients, self._mean_loss)
            gradients.place(clipping(norm, clip, gradients.precision))

    def _culprit(self) -> tuple[int | None, range, list[int]]:
        return self._session.seat, self.own, self._strange_samples()


class Outcome(NamedTuple):
    """What a lease came to, besides its gradient."""

    seconds: float
    """From the first forward to the last backward, without rehearsals."""
    loss: float
    """Sum over samples."""
    weight: float
    logs: Sums
    """Sums and weights."""
    sent: int
    buffers: list[Change]
    """What forwards made of the model's buffers, as `Buffers.learn` wants it."""
    notices: list[str]
    """What a person should know."""
    aside: float = 0.0
    """Seconds that examining the loss took, besides."""
    unseen: bool = False
    """Whether nobody sees how a step is cut."""


class Leases:
    """Computes leases, one after the other."""

    def __init__(
        self, session: LeasedSession, servers: Servers, model: nn.Module, recipe: Recipe, setup: Setup, workers: int
    ) -> None:
        self._session = session
        session.buffers.use(recipe.buffers)
        session.servers = servers
        self._servers = servers
        self._model = model
        self._recipe = recipe
        self._spec = setup.spec
        self._clip = setup.clip
        self._names = dict(model.named_buffers())
        fetcher = Fetcher(recipe.data, recipe.collate)
        self._loader = session.loader({"data": fetcher}, recipe.data_workers)
        limit = recipe.micro_batch or room(min(setup.course.batch, setup.course.size), workers)
        self.loop = LeaseLoop(session, setup.course, fetcher, self._loader, limit=limit, total=setup.total)
        self.loop.least = least_samples(model)
        session.keyed.know([model])
        if session.tables is not None:
            session.proof.leave_out("its forward asks servers for rows of tables, which cannot be done in a fork")
        self._drawing = session.keyed.within()
        self._step: LeaseStep | None = None
        self._computed = False

    def load(self, lease: Lease) -> None:
        """Have the batches of a lease; of the one before, if it was not computed, they are forgotten."""
        session = self._session
        session.lease, session.step = lease, lease.step
        session.at(self.loop.course.step(lease.step))
        if self._step is not None and self._step.lease == lease:
            return
        self.loop.turn(lease)
        self._step = LeaseStep(session, self.loop, lease)
        self._step.load()

    def batches(self) -> list[Any]:
        """Of the lease that is loaded."""
        assert self._step is not None
        return [batch for _, batch in self._step._load()]

    def look_ahead(self) -> bool:
        """Load what will be wanted next, most likely. False if that is done already."""
        begun = time.perf_counter()
        loaded = self.loop.look_ahead()
        took = time.perf_counter() - begun
        self._session.times.data += took
        self._session.times.loop += took
        return loaded

    @torch.no_grad()
    def put(self, buffers: dict[int | str, Tensor]) -> None:
        """Give the model's buffers these values: by their number in `Buffers`, or by name."""
        self._session.buffers.put({key: value for key, value in buffers.items() if isinstance(key, int)})
        for key, value in buffers.items():
            if isinstance(key, str):
                self._names[key].copy_(value)

    def compute(self, lease: Lease, read: int, before_push: Callable[[], None] | None = None) -> Outcome:
        """Compute a lease, with weights of version `read`, which are there, and give its gradient to the servers.

        Afterwards the model's buffers are what they were.
        """
        self.load(lease)
        step, self._step = self._step, None
        assert step is not None
        session, sent = self._session, self._servers.sent
        session.read = read
        if not self._computed and session.seat == 0:
            session.proof.begin(lease.step, self.loop.course, older=False)
        self._computed = True
        begun = time.perf_counter()
        for batch in step:
            if session.tables is not None:
                session.tables.batch(batch)
            step.compute(self._recipe.loss, self._model, batch)
        seconds = time.perf_counter() - begun - step.rehearsed
        changed = session.buffers.summed_changes()
        session.buffers.rewind()
        step.refuse_not_finite()
        if self._spec.apply == "arrival":
            step.normalise(self._clip)
        scale = 1.0 / (1.0 + max(0, lease.step - read)) if self._spec.damp else 1.0
        if before_push is not None:
            before_push()
        begun = time.perf_counter()
        self._servers.push(scale=scale, used=session.used())
        session.times.exchange += time.perf_counter() - begun
        session.samples += len(step.own)
        sent = self._servers.sent - sent
        notices = session.buffers.notices()
        aside, unseen = step.rehearsed, session.split_is_unseen
        return Outcome(seconds, step.loss, step.weight, step.logs(), sent, changed, notices, aside, unseen)

    def close(self) -> None:
        with suppress(Exception):
            self.loop.close()
        self._drawing.__exit__(None, None, None)
        self._loader.close()
