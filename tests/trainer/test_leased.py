"""The gradients of a step's leases add up to what a step computes, also with dropout, BatchNorm and weights."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import get_context
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from shoal.cluster.board import Board, Place
from shoal.cluster.channel.channel import DirectChannel
from shoal.cluster.channel.elastic import ElasticChannel
from shoal.cluster.channel.messages import Departed, Failed, Happened
from shoal.cluster.elasticity import Elasticity
from shoal.comm.group import SoloGroup
from shoal.core.atoms import Course
from shoal.core.errors import DataError, NotFiniteError
from shoal.core.events import WorkerSeen
from shoal.core.spec import NoCodec, Server
from shoal.data.parcel import seal, unseal
from shoal.layouts.single import Buffers, Change
from shoal.syncs.recipe import Recipe
from shoal.syncs.server import messages as served
from shoal.syncs.server.messages import Depart, Done, Evaluate, Evaluated, Lease, Placement, Ready, Work
from shoal.syncs.server.setup import Setup
from shoal.trainer.evaluate import Evaluator, Part
from shoal.trainer.served.leased import LeasedSession, Leases
from shoal.trainer.served.worker import ServedTask, serve_leases
from shoal.trainer.session import Session
from shoal.trainer.workers import worker as elastic_worker
from shoal.trainer.workers.start import Start
from shoal.trainer.workers.worker import Task, be_worker
from shoal.wire.link import Link, LinkClosed

SEED = 3
BATCH = 48
SIZE = 100
DEADLINE = 30.0


class FakeClient:
    """Servers that take everything at once."""

    def __init__(self, params: list[tuple[str, nn.Parameter]]) -> None:
        self._params = [param for _, param in params]
        self.sent = 0
        self.armed = 0
        self.opened: list[tuple[Lease, int]] = []
        self.pushed: list[tuple[list[Tensor], list[bool], float]] = []

    def open(self, lease: Lease, read: int) -> None:
        self.opened.append((lease, read))
        for param in self._params:
            param.grad = torch.zeros_like(param)

    def arm(self) -> None:
        self.armed += 1

    def push(self, *, scale: float = 1.0, used: list[bool]) -> None:
        grads = [param.grad.clone() for param in self._params if param.grad is not None]
        self.pushed.append((grads, used, scale))
        self.sent += 10


def classes() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SIZE, 12, generator=generator)
    return TensorDataset(inputs, (inputs[:, :3].sum(1) > 0).long())


class Noisy(Dataset[Any]):
    """Draws random numbers for each item."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return torch.randn(12) + index / SIZE, index % 2


def entropy(model: nn.Module, batch: Any) -> Any:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def weighted(model: nn.Module, batch: Any) -> Any:
    inputs, labels = batch
    weights = labels.float() + 0.5
    each = F.cross_entropy(model(inputs), labels, reduction="none")
    return {"loss": ((each * weights).sum(), weights.sum()), "share": labels.float().mean()}


def mlp(*between: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 16), *between, nn.Tanh(), nn.Linear(16, 2))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = mlp()
        self.unused = nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.used(inputs)
        return result


@dataclass
class Case:
    model: Callable[[], nn.Module] = mlp
    loss: Callable[[nn.Module, Any], Any] = entropy
    data: Callable[[], Any] = classes
    micro_batch: int | None = None
    cuts: list[int] = field(default_factory=lambda: [20, 29])


CASES = {
    "plain": Case(),
    "dropout": Case(model=lambda: mlp(nn.Dropout(0.4))),
    "batch norm": Case(model=lambda: mlp(nn.BatchNorm1d(16)), micro_batch=16, cuts=[16, 32]),
    "weights and logs": Case(loss=weighted),
    "small forwards": Case(model=lambda: mlp(nn.Dropout(0.4)), micro_batch=3),
    "data that draws": Case(data=Noisy),
    "unused": Case(model=Unused),
}


def make_recipe(case: Case, **options: Any) -> Recipe:
    given: dict[str, Any] = {
        "loss": case.loss,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "schedule": None,
        "data": case.data(),
        "eval_data": None,
        "collate": None,
        "data_workers": None,
        "predict": None,
        "metrics": [],
        "batch_size": BATCH,
        "exact_steps": None,
        "total_steps": 6,
        "steps_per_epoch": 3,
        "clip": None,
        "micro_batch": case.micro_batch,
        "ema": None,
        "eval_every": None,
    }
    return Recipe(**given | options)


def make_setup(model: nn.Module, spec: Server | None = None, clip: float | None = None) -> Setup:
    params: list[tuple[str, Tensor]] = [(name, param.detach()) for name, param in model.named_parameters()]
    return Setup(
        run="run",
        keys=None,  # type: ignore[arg-type]
        spec=spec or Server(),
        course=Course(SIZE, BATCH),
        total=6,
        version=0,
        cut=None,  # type: ignore[arg-type]
        params=params,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        make_schedule=None,
        schedule_state=None,
        clip=clip,
        codec=NoCodec(),
        memory={},
        seed=SEED,
    )


@dataclass
class Bench:
    """A worker's computing, with servers that are not there."""

    model: nn.Module
    client: FakeClient
    leases: Leases
    session: LeasedSession


@contextmanager
def bench(
    case: Case, spec: Server | None = None, clip: float | None = None, seat: int = 0, data_workers: int | None = None
) -> Iterator[Bench]:
    model = case.model()
    setup = make_setup(model, spec, clip)
    session = LeasedSession(seat, DirectChannel(None, None), Start(seed=SEED), model, setup, workers=2)
    client = FakeClient(session.params)
    leases = Leases(session, client, model, make_recipe(case, data_workers=data_workers), setup, 2)
    try:
        yield Bench(model, client, leases, session)
    finally:
        leases.close()
        session.close()


def leases_of(step: int, cuts: list[int]) -> list[Lease]:
    samples = Course(SIZE, BATCH).step(step).samples
    edges = sorted({0, samples, *(edge for edge in cuts if edge < samples)})
    return [Lease(step, start, stop) for start, stop in pairwise(edges)]


def alike(got: Tensor, wanted: Tensor) -> bool:
    return bool(torch.allclose(got, wanted, rtol=1e-5, atol=1e-6))


@pytest.mark.parametrize("name", CASES)
def test_leases_add_up_to_the_step(name: str) -> None:
    case = CASES[name]
    model = case.model()
    session = Session(SoloGroup(), DirectChannel(None, None), device=torch.device("cpu"), seed=SEED)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    session.track(model=model, optimizer=optimizer)
    with bench(case) as here:
        merged = Buffers([here.model])
        steps = session.steps(case.data(), BATCH, steps=6, micro_batch=case.micro_batch)
        for step in steps:
            before = copy.deepcopy(model.state_dict())
            for batch in step:
                step.backward(case.loss(model, batch))
            update = step.apply(optimizer)

            here.model.load_state_dict(before)
            merged.open(step.samples)
            here.client.pushed.clear()
            outcomes = [here.leases.compute(lease, step.number) for lease in leases_of(step.number, case.cuts)]
            loss = sum(outcome.loss for outcome in outcomes)
            weight = sum(outcome.weight for outcome in outcomes)
            assert loss / weight == pytest.approx(update.loss, rel=1e-5)
            assert weight == pytest.approx(update.weight)
            for log, value in update.logs.items():
                shares = [outcome.logs[log] for outcome in outcomes]
                assert sum(share[0] for share in shares) / sum(share[1] for share in shares) == pytest.approx(value)
            for number, param in enumerate(model.parameters()):
                used = any(push[1][number] for push in here.client.pushed)
                assert used == (param.grad is not None)
                total = torch.stack([push[0][number] for push in here.client.pushed]).sum(0)
                wanted = torch.zeros_like(param) if param.grad is None else param.grad
                assert alike(total * (step.samples / weight), wanted)
            changes = [change for outcome in outcomes for change in outcome.buffers]
            assert bool(changes) == (name == "batch norm")
            merged.learn(changes)
            for got, wanted in zip(here.model.buffers(), model.buffers(), strict=True):
                assert alike(got.float(), wanted.float())
        assert here.session.keyed.draws == ("dropout" in name or name == "small forwards")
        assert here.session.samples == 2 * SIZE


def test_batches_are_loaded_ahead_only_where_the_next_lease_is_as_expected() -> None:
    with bench(CASES["plain"]) as here:
        first = [here.leases.compute(Lease(0, 12, 36), 0), here.leases.compute(Lease(1, 12, 36), 1)]
        assert len(first) == 2
        assert here.leases.look_ahead()
        assert not here.leases.look_ahead()
        # of the short step, a part that is about as long
        here.leases.compute(Lease(2, 1, 3), 2)
        assert here.leases.look_ahead()
        here.leases.compute(Lease(4, 0, 8), 2)
        assert not here.leases.look_ahead()
    with bench(CASES["plain"]) as there:
        for lease in [Lease(4, 0, 8), Lease(2, 1, 3)]:
            there.leases.compute(lease, 2)
    expected = [here.client.pushed[3][0], here.client.pushed[2][0]]
    for push, wanted in zip(there.client.pushed, expected, strict=True):
        assert all(map(torch.equal, push[0], wanted))


def test_processes_load_what_is_leased_also_where_that_changes() -> None:
    given = [Lease(0, 12, 36), Lease(1, 12, 36), Lease(2, 1, 3), Lease(3, 12, 36), Lease(3, 36, 48), Lease(5, 0, 4)]
    pushed = []
    for processes in (0, 2):
        with bench(CASES["data that draws"], data_workers=processes) as here:
            for lease in given:
                here.leases.compute(lease, lease.step)
                here.leases.look_ahead()
        pushed.append([push[0] for push in here.client.pushed])
    for inline, loaded in zip(*pushed, strict=True):
        assert all(map(torch.equal, inline, loaded))


def test_with_arrival_a_lease_is_a_mean_and_clipped() -> None:
    lease = Lease(1, 8, 28)
    with bench(CASES["weights and logs"]) as here:
        outcome = here.leases.compute(lease, 1)
        assert here.client.armed == 1
    with bench(CASES["weights and logs"], Server(apply="arrival")) as there:
        there.leases.compute(lease, 1)
        assert there.client.armed == 0
    for got, total in zip(there.client.pushed[0][0], here.client.pushed[0][0], strict=True):
        assert alike(got, total * (BATCH / outcome.weight))
    with bench(CASES["weights and logs"], Server(apply="arrival"), clip=0.01) as clipped:
        clipped.leases.compute(lease, 1)
    norm = torch.stack([grad.norm() for grad in clipped.client.pushed[0][0]]).norm()
    assert float(norm) == pytest.approx(0.01, rel=1e-3)


def test_stale_gradients_are_damped_where_that_is_asked_for() -> None:
    with bench(CASES["plain"], Server(mode="ssp", damp=True)) as here:
        here.leases.compute(Lease(3, 0, 8), 1)
        here.leases.compute(Lease(3, 8, 16), 3)
        # newer weights than were needed
        here.leases.compute(Lease(2, 2, 4), 3)
    assert [push[2] for push in here.client.pushed] == [pytest.approx(1 / 3), 1.0, 1.0]
    assert here.client.opened == [(Lease(3, 0, 8), 1), (Lease(3, 8, 16), 3), (Lease(2, 2, 4), 3)]


def test_a_loss_that_is_not_finite_is_not_pushed() -> None:
    case = Case(loss=lambda model, batch: entropy(model, batch) * float("nan"))
    with bench(case, seat=4) as here:
        with pytest.raises(NotFiniteError, match=r"the loss is nan in step 2 on worker 4 \(positions 56–67") as caught:
            here.leases.compute(Lease(1, 8, 20), 1)
        assert here.client.pushed == []
    assert caught.value.worker == 4
    assert caught.value.positions == (56, 67)


# -- the process -------------------------------------------------------------------------------------------------------


class PipedClient(FakeClient):
    """Has every version below 100 at once; for higher ones it waits for the link."""

    def __init__(
        self,
        setup: Setup,
        seat: int,
        host: str,
        params: Any,
        *,
        fd: int,
        hear: Callable[[], None],
        on_wait: Any,
        account: Any,
    ) -> None:
        super().__init__(params)
        self._setup = setup
        self._hear = hear
        self._fd = fd
        self.terms: list[int] = []
        self.closed = False

    def place(self, placement: Placement) -> None:
        self.terms.append(placement.term)

    def prefetch(self, version: int) -> None:
        return None

    def pull(self, version: int) -> int:
        assert self.terms, "no placement has come"
        while version >= 100:
            self._hear()
        return version

    def pull_exact(self, version: int) -> None:
        return None

    def close(self) -> None:
        self.closed = True


class Alone:
    """A worker's connection to a coordinator that there is not."""

    def __init__(self, *given: Any) -> None: ...

    def enter(self, version: str, signature: bytes) -> bool:
        return False

    def attend(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class Led:
    model: nn.Module
    setup: Setup
    task: ServedTask

    def session(self, seat: int, channel: ElasticChannel, on_board: Place) -> LeasedSession:
        return LeasedSession(seat, channel, Start(seed=SEED), self.model, self.setup, workers=2, place=on_board)

    def work(self, session: LeasedSession, link: Link, place: None, attend: Callable[[], None]) -> None:
        serve_leases(session, link, "127.0.0.1", self.setup, self.task, attend, PipedClient)


class Worker:
    """A worker's process, seen from the clerk."""

    def __init__(self, case: Case, recipe: Recipe | None = None) -> None:
        self.link, far = Link.pair()
        self.model = case.model()
        setup = make_setup(self.model)
        led: Any = Led(self.model, setup, ServedTask(self.model, recipe or make_recipe(case), workers=2))
        task = Task(None, Start(seed=SEED), Elasticity(2, 1, 2), led=led)

        def main() -> None:
            self.link.close()
            elastic_worker.Control = Alone  # type: ignore[misc,assignment]
            access: Any = None
            be_worker(1, far, access, Board(2), task)

        self.process = get_context("fork").Process(target=main)
        self.process.start()
        far.close()

    def say(self, message: msgspec.Struct, tree: Any = None) -> None:
        parcel = [] if tree is None else [seal(tree)[0], *seal(tree)[1]]
        self.link.send(served.encode(message), parcel)

    def hear(self) -> tuple[Any, Any]:
        """The next message that is not of the worker's well-being."""
        decode = msgspec.msgpack.Decoder(Ready | Done | Evaluated | Happened | Failed | Departed).decode
        while True:
            assert self.link.poll(DEADLINE)
            header, buffers = self.link.recv()
            message = decode(header)
            if not isinstance(message, Happened):
                return message, unseal(bytes(buffers[0]), buffers[1:]) if buffers else None
            assert all(isinstance(event, WorkerSeen) and event.worker == 1 for event in message.events)

    def end(self) -> int | None:
        self.link.close()
        self.process.join(DEADLINE)
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGKILL)
            raise AssertionError("the worker does not end")
        return self.process.exitcode


PLACEMENT = Placement(term=1, holders=[], endpoints={}, hosts={})


def test_a_worker_computes_what_it_is_given() -> None:
    worker = Worker(CASES["batch norm"])
    assert isinstance(worker.hear()[0], Ready)
    worker.say(PLACEMENT)
    worker.say(Work(Lease(0, 0, 16), 0))
    done, first = worker.hear()
    assert (done.lease, done.read, done.weight, done.sent) == (Lease(0, 0, 16), 0, 16.0, 10)
    worker.say(Work(Lease(0, 0, 16), 0))
    again, second = worker.hear()
    assert again.loss == done.loss
    found, repeated = ([Change(*change) for change in told[0]] for told in (first, second))
    assert [change.amount.tolist() for change in found] == [change.amount.tolist() for change in repeated]
    # from other buffers
    start = torch.full((16,), 5.0)
    worker.say(Work(Lease(0, 0, 16), 0), {0: start})
    _, third = worker.hear()
    assert alike(Change(*third[0][0]).amount - found[0].amount, 16 * 0.9 * start)
    worker.say(Depart("enough"))
    assert worker.hear()[0] == Departed("enough")
    assert worker.end() == 0


def test_work_that_waits_for_weights_is_replaced() -> None:
    worker = Worker(CASES["plain"])
    worker.hear()
    worker.say(PLACEMENT)
    worker.say(Work(Lease(5, 0, 2), 100))
    worker.say(Work(Lease(4, 8, 24), 4))
    done, _ = worker.hear()
    assert (done.lease, done.read) == (Lease(4, 8, 24), 4)
    worker.say(Work(Lease(5, 0, 2), 100))
    worker.say(Depart("now"))
    assert worker.hear()[0] == Departed("now")
    worker.end()


def test_evaluation_is_over_all_data_and_comes_before_work_that_waits() -> None:
    case = CASES["plain"]
    recipe = make_recipe(case, eval_data=classes())
    session = Session(SoloGroup(), DirectChannel(None, None), device=torch.device("cpu"), seed=SEED)
    part = Part(session, classes(), None, batch=24, data_workers=0, name="eval_data")
    wanted = Evaluator(session, part, entropy, None, []).run(case.model())
    worker = Worker(case, recipe)
    worker.hear()
    worker.say(PLACEMENT)
    worker.say(Work(Lease(5, 0, 2), 100))
    worker.say(Evaluate(3))
    evaluated, _ = worker.hear()
    assert evaluated.version == 3
    assert evaluated.metrics == pytest.approx(wanted)
    worker.say(Work(Lease(5, 0, 2), 3))
    done, _ = worker.hear()
    assert done.lease == Lease(5, 0, 2)
    worker.end()


def test_an_error_of_the_users_code_is_told_with_its_place() -> None:
    def broken(model: nn.Module, batch: Any) -> Any:
        raise KeyError("gone")

    worker = Worker(Case(loss=broken))
    worker.hear()
    worker.say(PLACEMENT)
    worker.say(Work(Lease(1, 8, 20), 1))
    failed, _ = worker.hear()
    assert (failed.kind, failed.step, failed.positions) == ("KeyError", 1, (56, 67))
    assert "broken" in failed.traceback
    assert worker.end() == 1


def test_data_that_cannot_be_fetched_ends_the_worker_when_it_is_leased() -> None:
    class Holes(Dataset[Any]):
        def __len__(self) -> int:
            return SIZE

        def __getitem__(self, index: int) -> Any:
            raise ValueError(f"no {index}")

    worker = Worker(Case(data=Holes))
    worker.hear()
    worker.say(PLACEMENT)
    worker.say(Work(Lease(0, 0, 8), 0))
    failed, _ = worker.hear()
    assert failed.kind == DataError.__name__
    worker.end()


def test_the_end_of_the_link_ends_the_worker() -> None:
    worker = Worker(CASES["plain"])
    worker.hear()
    assert worker.end() == 1
    with pytest.raises(LinkClosed):
        worker.say(PLACEMENT)
