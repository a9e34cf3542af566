"""A worker of a run with servers: it computes what the clerk leases to it, until it is told to leave."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from torch import nn

from shoal.cluster.board import Phase
from shoal.cluster.member.control import Left
from shoal.core.errors import ShoalError
from shoal.data.parcel import seal, unseal
from shoal.syncs.recipe import Recipe
from shoal.syncs.server.embeddings import Embeddings
from shoal.syncs.server.messages import Depart, Done, Evaluate, Evaluated, Placement, Ready, Work, encode
from shoal.syncs.server.setup import Setup
from shoal.syncs.server.table_client import TableClient
from shoal.trainer.evaluate import Evaluator, Part, part_of
from shoal.trainer.served.leased import LeasedSession, Leases, Servers
from shoal.trainer.session import TELL_SECONDS
from shoal.trainer.together import samples_together
from shoal.wire.link import Link

_decode = msgspec.msgpack.Decoder(Placement | Work | Evaluate | Depart).decode


class Faults(Protocol):
    """A plan of faults, as far as a worker has part in it."""

    def at(self, point: str, *, worker: int, step: int) -> None:
        """The worker is at this point of this step."""


class AClient(Servers, Protocol):
    """What a worker needs of `shoal.syncs.server.client.Client`."""

    tables: TableClient

    def place(self, placement: Placement) -> None: ...

    def prefetch(self, version: int) -> None: ...

    def pull(self, version: int) -> int: ...

    def pull_exact(self, version: int) -> Any: ...

    def close(self) -> None: ...


MakeClient = Callable[..., AClient]


@dataclass(frozen=True)
class ServedTask:
    """What a worker is there for."""

    model: nn.Module
    recipe: Recipe
    workers: int = 1
    """How many workers there are about: they share the cores and the batch."""
    faults: Faults | None = None


def serve_leases(
    session: LeasedSession,
    link: Link,
    host: str,
    setup: Setup,
    task: ServedTask,
    attend: Callable[[], None],
    make_client: MakeClient | None = None,
) -> None:
    """Compute what the clerk leases to this worker, until `Left` or `LinkClosed` is raised.

    `attend` is called once it can be given something to do. The end of the link ends it: what is applied is on the
    servers, and a worker has nothing that is worth keeping.
    """
    worker = _Worker(session, link, host, setup, task, make_client or _client)
    try:
        worker.serve(attend)
    finally:
        worker.close()


def _client(*given: Any, **options: Any) -> AClient:
    # here: it needs ZeroMQ
    from shoal.syncs.server.client import Client

    return Client(*given, **options)


class _Told(Exception):
    """While it waited for weights, a worker was told something that comes first."""


class _Worker:
    def __init__(
        self, session: LeasedSession, link: Link, host: str, setup: Setup, task: ServedTask, make_client: MakeClient
    ) -> None:
        self._session = session
        self._seat = session.seat
        self._link = link
        self._setup = setup
        self._task = task
        self._part: Part | None = None
        self._leases: Leases | None = None
        self._placement: Placement | None = None
        self._work: tuple[Work, Sequence[bytearray]] | None = None
        """What to compute next, or is waiting for its weights."""
        self._evaluations: deque[tuple[Evaluate, Sequence[bytearray]]] = deque()
        self._waiting = False
        self._told = time.monotonic()
        self._client: AClient = make_client(
            setup,
            self._seat,
            host,
            session.params,
            fd=link.fileno(),
            hear=self._hear,
            on_wait=session.channel.urge,
            account=session.group.account,
        )

    def close(self) -> None:
        for thing in (self._part, self._leases, self._client):
            if thing is not None:
                with suppress(ShoalError, OSError):  # there is something more important to say
                    thing.close()

    # -- what it does --------------------------------------------------------------------------------------------------

    def serve(self, attend: Callable[[], None]) -> None:
        task, setup, session, client = self._task, self._setup, self._session, self._client
        if setup.tables:
            session.tables = Embeddings(task.model, setup, client.tables)
        leases = self._leases = Leases(session, client, task.model, task.recipe, setup, task.workers)
        if self._seat == 0 and session.tables is None:
            samples_together(session, task.model, task.recipe, start=setup.version, least=leases.loop.least)
        if self._placement is not None:
            client.place(self._placement)
        attend()
        self._link.send(encode(Ready(os.getpid())))
        # what there is to say of the data
        session.channel.flush()
        while True:
            if time.monotonic() - self._told > TELL_SECONDS:
                self._tell()
            session.enter(Phase.EXCHANGE)
            self._hear()
            if self._evaluations:
                begun = time.perf_counter()
                self._evaluate(session, client, *self._evaluations[0])
                session.times.loop += time.perf_counter() - begun
            elif self._work is not None:
                begun = time.perf_counter()
                self._compute(session, client, leases, *self._work)
                session.times.loop += time.perf_counter() - begun
            elif not leases.look_ahead():
                self._link.poll(max(0.0, self._told + TELL_SECONDS - time.monotonic()))

    def _compute(
        self, session: LeasedSession, client: AClient, leases: Leases, work: Work, buffers: Sequence[bytearray]
    ) -> None:
        lease = work.lease
        session.enter(Phase.COMPUTE)
        client.prefetch(work.version)
        leases.load(lease)
        if session.tables is not None:
            session.tables.turn(work.version)
            session.tables.ahead(leases.batches())
        begun = time.perf_counter()
        try:
            with session.waiting(Phase.COMPUTE):
                read = self._wait(lambda: client.pull(work.version))
        except _Told:
            return
        finally:
            session.times.exchange += time.perf_counter() - begun
        self._work = None
        if session.tables is not None:
            read = session.tables.read(read)
        if buffers:
            leases.put(unseal(bytes(buffers[0]), buffers[1:]))
        self._fault("compute", lease.step)

        def before_push() -> None:
            session.enter(Phase.EXCHANGE)
            self._fault("exchange", lease.step)

        outcome = leases.compute(lease, read, before_push=before_push)
        self._send(
            Done(
                lease=lease,
                read=read,
                seconds=outcome.seconds,
                loss=outcome.loss,
                weight=outcome.weight,
                logs=outcome.logs,
                sent=outcome.sent,
                aside=outcome.aside,
                unseen=outcome.unseen,
            ),
            [outcome.buffers, outcome.notices] if outcome.buffers or outcome.notices else None,
        )
        self._fault("commit", lease.step)

    def _evaluate(self, session: LeasedSession, client: AClient, order: Evaluate, buffers: Sequence[bytearray]) -> None:
        task, recipe = self._task, self._task.recipe
        try:
            self._wait(lambda: client.pull_exact(order.version))
        except _Told:
            return
        self._evaluations.popleft()
        if session.tables is not None:
            session.tables.turn_exact(order.version)
        if buffers:
            assert self._leases is not None
            self._leases.put(unseal(bytes(buffers[0]), buffers[1:]))
        session.step, session.evaluating = order.version, True
        # for messages; there is one of each evaluation
        session.at(self._setup.course.step(max(0, order.version - 1)))
        self._fault("evaluate", order.version - 1)
        if self._part is None:
            self._part = part_of(session, recipe, recipe.eval_data, "eval_data", task.workers)
        session.enter(Phase.EVALUATE)
        metrics = Evaluator(session, self._part, recipe.loss, recipe.predict, recipe.metrics).run(task.model)
        session.evaluating = False
        self._send(Evaluated(order.version, metrics), None)

    # -- what it hears and says ----------------------------------------------------------------------------------------

    def _wait(self, pull: Callable[[], Any]) -> Any:
        """What `pull` returns; raises `_Told` if something else is to be done first."""
        self._waiting = True
        try:
            return pull()
        finally:
            self._waiting = False

    def _hear(self) -> None:
        """Take in what has come. While it waits for weights, what changes the order of things ends the waiting."""
        changed = False
        while (frame := self._link.try_recv()) is not None:
            header, buffers = frame
            message = _decode(header)
            if isinstance(message, Placement):
                self._placed(message)
            elif isinstance(message, Work):
                self._work = message, buffers
                changed = True
            elif isinstance(message, Evaluate):
                self._evaluations.append((message, buffers))
                changed = True
            else:
                raise Left(message.why)
        if changed and self._waiting:
            raise _Told

    def _placed(self, placement: Placement) -> None:
        self._placement = placement
        if self._leases is not None:
            self._client.place(placement)

    def _send(self, message: msgspec.Struct, tree: Any) -> None:
        if tree is None:
            self._link.send(encode(message))
            return
        parcel, buffers = seal(tree)
        self._link.send(encode(message), [parcel, *buffers])

    def _tell(self) -> None:
        self._told = time.monotonic()
        self._session.channel.emit(self._session.seen())

    def _fault(self, point: str, step: int) -> None:
        if self._task.faults is not None:
            self._task.faults.at(point, worker=self._seat, step=step)
