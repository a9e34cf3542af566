"""A worker's side: weights come, gradients count on all shards, whatever happens to servers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.core.atoms import Course
from shoal.core.errors import ConfigError, ShoalError
from shoal.core.spec import AnyCodec, Int8, NoCodec, Server
from shoal.core.traffic import GRADIENT, LINKS, LOOPBACK, MEMORY, NETWORK
from shoal.syncs.leaving import WATCHED
from shoal.syncs.server import lines, pushcodec
from shoal.syncs.server.client import Client
from shoal.syncs.server.cutting import cut
from shoal.syncs.server.messages import Holder, Lease, Part, Placement, Pull, Push
from shoal.syncs.server.setup import Memory, Setup
from shoal.wire.curve import Keys

from .fake_server import SECONDS, FakeServer

HERE, THERE = "10.0.0.1", "10.0.0.2"
LEASE = Lease(0, 0, 4)


class Left(Exception):
    pass


class Run:
    """A worker and its servers; whatever the control link brings is called in the worker's thread."""

    def __init__(self, hosts: list[str], codec: AnyCodec, params: dict[str, Tensor]) -> None:
        self.params = [(name, nn.Parameter(value)) for name, value in params.items()]
        layout = cut(self.params, shards=4)
        self.memory = Memory(layout.size, len(layout.shards), seats=2, steps=2)
        self.setup = Setup(
            run="run",
            keys=Keys.make(),
            spec=Server(),
            course=Course(64, 8),
            total=8,
            version=0,
            cut=layout,
            params=[(name, param.detach().clone()) for name, param in self.params],
            optimizer=torch.optim.SGD([param for _, param in self.params], lr=0.1),
            make_schedule=None,
            schedule_state=None,
            clip=None,
            codec=codec,
            memory={HERE: self.memory},
        )
        self.hosts = dict(enumerate(hosts))
        self.shards = range(len(layout.shards))
        self.servers = [self.start(number) for number in self.hosts]
        self.placement = self.placed(1, [shard % len(hosts) for shard in self.shards])
        for server in self.servers:
            server.set(held=[shard for shard in self.shards if self.placement.holders[shard].server == server.number])
        self._read, self._write = os.pipe()
        self._heard: list[Callable[[], object]] = []
        self.waits: list[str] = []
        self.client = Client(
            self.setup, 0, HERE, self.params, fd=self._read, hear=self._hear, on_wait=self.waits.append
        )

    def start(self, number: int) -> FakeServer:
        near = self.hosts[number] == HERE
        return FakeServer(self.setup, number, [], memory=self.memory if near else None)

    def placed(self, term: int, holders: list[int]) -> Placement:
        endpoints = {server.number: server.endpoint for server in self.servers}
        return Placement(term, [Holder(server) for server in holders], endpoints, dict(self.hosts))

    def tell(self, order: Callable[[], object]) -> None:
        """Over the control link; from any thread."""
        self._heard.append(order)
        os.write(self._write, b"x")

    def _hear(self) -> None:
        os.read(self._read, 1)
        self._heard.pop(0)()

    def area(self, seed: int) -> Tensor:
        """Other weights."""
        torch.manual_seed(seed)
        area = torch.zeros(self.setup.cut.size, dtype=torch.uint8)
        for number in range(len(self.params)):
            view = self.setup.cut.view(area, number)
            view.copy_(torch.randn(view.shape, dtype=view.dtype))
        return area

    def advance(self, version: int) -> None:
        for server in self.servers:
            server.advance(version, self.area(version))

    def has(self, version: int) -> bool:
        area = self.area(version)
        return all(torch.equal(param, self.setup.cut.view(area, n)) for n, (_, param) in enumerate(self.params))

    def counted(self, lease: Lease) -> list[Tensor]:
        """The gradient that servers have, by parameter."""
        area = torch.zeros(self.setup.cut.size, dtype=torch.uint8)
        for server in self.servers:
            area |= server.gradient(lease)
        return [self.setup.cut.view(area, number) for number in range(len(self.params))]

    def end(self) -> None:
        self.client.close()
        for server in self.servers:
            server.end()
        os.close(self._read)
        os.close(self._write)


SHAPES = {"one": (24, 17), "two": (5,), "three": (30, 20), "four": (16,), "spare": (9, 9)}
USED = [True, True, True, True, False]


@pytest.fixture
def make() -> Iterator[Callable[..., Run]]:
    runs = []

    def make(*hosts: str, codec: AnyCodec | None = None) -> Run:
        torch.manual_seed(1)
        params = {name: torch.randn(shape) for name, shape in SHAPES.items()}
        runs.append(Run(list(hosts), codec or NoCodec(), params))
        return runs[-1]

    yield make
    for run in runs:
        run.end()


@pytest.fixture(params=[(HERE, HERE), (THERE, THERE), (HERE, THERE)], ids=["near", "far", "mixed"])
def run(make: Callable[..., Run], request: pytest.FixtureRequest) -> Run:
    run = make(*request.param)
    run.client.place(run.placement)
    return run


def backward(run: Run, seed: int, *, last: bool = True) -> list[Tensor]:
    """One over all parameters but the last; their gradients."""
    torch.manual_seed(seed)
    factors = [torch.randn(param.shape) for _, param in run.params]
    if last:
        run.client.arm()
    loss = torch.zeros(())
    for (_, param), factor, used in zip(run.params, factors, USED, strict=True):
        if used:
            loss = loss + (param * factor).sum()
    loss.backward()
    return [factor if used else torch.zeros_like(factor) for factor, used in zip(factors, USED, strict=True)]


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def is_equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


# ---- weights


def test_weights_come_and_are_waited_for(run: Run) -> None:
    run.advance(1)
    assert run.client.pull(0) == 1
    assert run.has(1)

    def advance() -> None:
        for server in run.servers:
            server.wait_for(Pull)
            server.wait_for(Pull)
        run.advance(2)

    thread = in_thread(advance)
    assert run.client.pull(2) == 2
    thread.join(SECONDS)
    assert run.has(2)


def test_what_is_prefetched_does_not_touch_the_parameters_before_it_is_pulled(run: Run) -> None:
    run.advance(1)
    run.client.pull(1)
    run.client.prefetch(2)
    run.advance(2)
    for server in run.servers:
        server.wait_for(Pull)
        server.wait_for(Pull)
    run.client.open(LEASE, 1)
    backward(run, 1)
    run.client.push()
    assert run.has(1)
    assert run.client.pull(2) == 2
    assert run.has(2)
    assert all(len(server.pulls) == 2 for server in run.servers)


def test_an_earlier_version_is_not_waited_for_with_a_later_one(run: Run) -> None:
    """A worker that waits for the weights of its next lease may be given one of an older step instead."""
    run.advance(1)
    run.client.prefetch(7)
    assert run.client.pull(1) == 1
    assert run.has(1)


def test_an_exact_version_comes_though_there_are_later_ones(run: Run) -> None:
    for server in run.servers:
        server.set(kept={3: run.area(3)})
    run.advance(5)
    assert run.client.pull(5) == 5
    run.client.pull_exact(3)
    assert run.has(3)
    assert run.client.pull(5) == 5
    assert run.has(5)


def test_weights_that_are_there_are_not_copied_again(make: Callable[..., Run]) -> None:
    run = make(HERE)
    run.client.place(run.placement)
    run.advance(1)
    run.client.pull(1)
    with torch.no_grad():
        run.params[0][1].fill_(9)
    run.client.pull(1)
    assert bool((run.params[0][1] == 9).all())
    run.advance(1)  # as with apply=arrival: other weights of the same version
    run.client.pull(1)
    assert run.has(1)


def test_weights_that_change_are_not_read_before_that_is_over(make: Callable[..., Run]) -> None:
    run = make(HERE)
    run.client.place(run.placement)
    run.advance(1)
    run.memory.state[0, 0] += 1
    rest: list[int] = []

    def finish() -> None:
        rest.append(1)
        run.memory.state[0, 0] += 1

    def step_aside() -> None:
        run.servers[0].wait_for(Pull)
        run.tell(finish)

    thread = in_thread(step_aside)
    assert run.client.pull(1) == 1
    assert rest, "the odd count was waited for, and the control link was heard meanwhile"
    thread.join(SECONDS)


def test_versions_never_go_back(make: Callable[..., Run]) -> None:
    run = make(HERE, HERE)
    run.client.place(run.placement)
    run.advance(4)
    assert run.client.pull(0) == 4
    other = run.servers[1]
    other.set(term=2, held=list(run.shards), version=3)
    run.client.place(run.placed(2, [1 for _ in run.shards]))

    def advance() -> None:
        other.wait_for(Pull)
        other.wait_for(Pull)
        other.advance(5, run.area(5))

    thread = in_thread(advance)
    assert run.client.pull(0) == 5
    thread.join(SECONDS)
    assert other.pulls[-1].version == 4


# ---- gradients


def test_gradients_count_on_all_shards(run: Run) -> None:
    for step in range(4):
        lease = Lease(step, 0, 4)
        run.client.open(lease, step)
        first = backward(run, 2 * step, last=False)
        second = backward(run, 2 * step + 1)
        run.client.push(scale=0.5)
        assert is_equal(run.counted(lease), [one + other for one, other in zip(first, second, strict=True)])
    for server in run.servers:
        near = run.hosts[server.number] == HERE
        assert [push.slot for push in server.pushes] == ([0, 1, 0, 1] if near else [None] * 4)
        assert {(push.scale, push.used) for push in server.pushes} == {(0.5, b"\x0f")}
        assert [push.read for push in server.pushes] == [0, 1, 2, 3]
        assert bool(server.parts) != near
    assert (run.client.sent > 4 * run.setup.cut.size) == (
        THERE in run.hosts.values() and HERE not in run.hosts.values()
    )
    sizes = {server.number: 0 for server in run.servers}
    for shard, holder in enumerate(run.placement.holders):
        sizes[holder.server] += run.setup.cut.shards[shard].stop - run.setup.cut.shards[shard].start
    near = sum(size for number, size in sizes.items() if run.hosts[number] == HERE)
    flows = {link: 0 for link in LINKS}
    for flow in run.client.account.now().flows:
        flows[flow.link] += flow.bytes if flow.kind == GRADIENT else 0
    far = sum(len(data) for server in run.servers for _, data in server.parts)
    assert flows == {MEMORY: 4 * near, LOOPBACK: 0, NETWORK: far}


def test_parts_leave_during_the_last_backward(make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushcodec, "PART_BYTES", 512)
    run = make(THERE)
    run.client.place(run.placement)
    for step in range(WATCHED):
        run.client.open(Lease(step, 0, 4), 0)
        backward(run, step)
        run.client.push()
    server = run.servers[0]
    before = len(server.parts)
    lease = Lease(WATCHED, 0, 4)
    run.client.open(lease, 0)
    gradient = backward(run, 7)
    while not (isinstance(part := server.wait_for(Part), Part) and part.lease == lease):
        pass
    assert not any(push.lease == lease for push in server.pushes)
    run.client.push()
    assert is_equal(run.counted(lease), gradient)
    assert len(server.parts) == 3 * before // 2, "none twice"
    assert server.pushes[-1].parts == before // 2


def test_gradients_that_others_put_elsewhere_are_found(run: Run) -> None:
    run.client.open(LEASE, 0)
    gradient = backward(run, 1)
    one, two, three = (param for _, param in run.params[:3])
    assert one.grad is not None
    one.grad = one.grad * 2
    two.grad = None
    three.grad = torch.ones(20, 30).t()
    run.client.push()
    expected = [gradient[0] * 2, torch.zeros(5), torch.ones(30, 20), gradient[3], gradient[4]]
    assert is_equal(run.counted(LEASE), expected)
    assert run.servers[0].pushes[-1].used == b"\x0d"


def test_used_may_leave_out_some(run: Run) -> None:
    run.client.open(LEASE, 0)
    backward(run, 1)
    run.client.push(used=[True, False, True, False, True])
    assert run.servers[0].pushes[-1].used == b"\x05"


def test_gradients_that_arrive_in_parts_leave_at_the_end(
    make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(THERE)
    run.client.place(run.placement)
    shared = run.params[0][1]

    def again(value: Tensor) -> Tensor:
        return value * shared.sum()

    for step in range(WATCHED + 1):
        run.client.open(Lease(step, 0, 4), 0)
        run.client.arm()
        value: Any = torch.ones(3, requires_grad=True)
        for _ in range(3):
            value = checkpoint(again, value, use_reentrant=True)
        value.sum().backward()
        assert shared.grad is not None
        expected = shared.grad.clone()
        run.client.push()
        assert torch.equal(run.counted(Lease(step, 0, 4))[0], expected)


def test_a_sparse_gradient_is_refused_by_name(run: Run) -> None:
    run.client.open(LEASE, 0)
    table = run.params[0][1]
    with pytest.raises(ConfigError, match="'one' has a sparse gradient"):
        torch.nn.functional.embedding(torch.tensor([1, 2]), table, sparse=True).sum().backward()


def test_encoded_gradients_lose_nothing_over_time(make: Callable[..., Run]) -> None:
    run = make(THERE, HERE, codec=Int8(block=64))
    run.client.place(run.placement)
    total, counted = ([torch.zeros(shape) for shape in SHAPES.values()] for _ in range(2))
    for step in range(10):
        run.client.open(Lease(step, 0, 4), step)
        for whole, part in zip(total, backward(run, step), strict=True):
            whole += part
        run.client.push()
        for whole, part in zip(counted, run.counted(Lease(step, 0, 4)), strict=True):
            whole += part
    assert not is_equal(counted, total)
    assert all(torch.allclose(one, other, atol=0.1) for one, other in zip(counted, total, strict=True))
    assert all(part.encoded for part, _ in run.servers[0].parts)
    assert not run.servers[1].parts


# ---- servers come and go


@pytest.mark.parametrize("codec", [NoCodec(), Int8(block=64)], ids=["plain", "encoded"])
@pytest.mark.parametrize("hosts", [(HERE, HERE), (THERE, THERE), (HERE, THERE), (THERE, HERE)])
def test_what_was_not_acknowledged_goes_to_the_new_holder(
    make: Callable[..., Run], hosts: tuple[str, str], codec: AnyCodec
) -> None:
    run = make(*hosts, codec=codec)
    run.client.place(run.placement)
    lost, left = run.servers
    lost.set(answers=False)
    run.client.open(LEASE, 0)
    gradient = backward(run, 1)

    def fail() -> None:
        lost.wait_for(Push)
        left.wait_for(Push)
        left.set(term=2, held=list(run.shards))
        run.tell(lambda: run.client.place(run.placed(2, [1 for _ in run.shards])))

    thread = in_thread(fail)
    run.client.push()
    thread.join(SECONDS)
    assert {shard for _, shard in left.taken} == set(run.shards)
    found = [run.setup.cut.view(left.gradient(LEASE), number) for number in range(len(SHAPES))]
    if isinstance(codec, NoCodec) or hosts == (HERE, HERE):
        assert is_equal(found, gradient)
    first = {(part.start, part.stop): frame for part, frame in lost.parts}
    for part, frame in left.parts:
        assert first.get((part.start, part.stop), frame) == frame, "the same bytes again"


def test_a_server_that_is_started_again_gets_all_of_it(run: Run) -> None:
    old = run.servers[0]
    old.set(answers=False)
    run.client.open(LEASE, 0)
    gradient = backward(run, 1)

    def fail() -> None:
        old.wait_for(Push)
        run.servers[0] = run.start(0)
        run.servers[0].set(held=old.held, term=2)
        run.servers[1].set(term=2)
        run.tell(lambda: run.client.place(run.placed(2, [holder.server for holder in run.placement.holders])))

    thread = in_thread(fail)
    run.client.push()
    thread.join(SECONDS)
    old.end()
    assert is_equal(run.counted(LEASE), gradient)


def test_pulls_go_to_the_new_holder(run: Run) -> None:
    run.advance(1)
    lost, left = run.servers
    lost.set(version=0)

    def fail() -> None:
        lost.wait_for(Pull)
        left.set(term=2, held=list(run.shards))
        left.advance(1, run.area(1))
        run.tell(lambda: run.client.place(run.placed(2, [1 for _ in run.shards])))

    thread = in_thread(fail)
    assert run.client.pull(1) == 1
    thread.join(SECONDS)
    assert run.has(1)


def test_what_a_lost_server_took_goes_to_the_new_holder_too(run: Run) -> None:
    left = run.servers[1]
    left.set(answers=False)
    run.client.open(LEASE, 0)
    gradient = backward(run, 1)

    def fail() -> None:
        if not run.client._pushing.took:  # type: ignore[union-attr]
            run.tell(fail)  # not before the answer of the one that will be lost has come
            return
        left.set(answers=True, term=2, held=list(run.shards))
        left.do(left.answer_late)
        run.client.place(run.placed(2, [1 for _ in run.shards]))

    run.tell(fail)
    run.client.push()
    assert {shard for _, shard in left.taken} == set(run.shards)
    assert is_equal([run.setup.cut.view(left.gradient(LEASE), n) for n in range(len(SHAPES))], gradient)


def test_weights_whose_holder_was_here_and_is_lost_are_asked_for_elsewhere(make: Callable[..., Run]) -> None:
    run = make(HERE, THERE)
    run.client.place(run.placement)
    lost, left = run.servers
    lost.advance(1, run.area(1))
    run.memory.state[:, 0] += 1  # it changes them, and dies meanwhile

    def fail() -> None:
        if not run.client._pulling.answers:  # type: ignore[union-attr]
            run.tell(fail)
            return
        run.memory.weights.zero_()
        left.set(term=2, held=list(run.shards))
        left.advance(2, run.area(2))
        run.client.place(run.placed(2, [1 for _ in run.shards]))

    run.tell(fail)
    assert run.client.pull(1) == 2
    assert run.has(2)


def test_who_is_refused_for_an_old_term_waits_for_the_placement(run: Run) -> None:
    for server in run.servers:
        server.set(term=2)

    def heal() -> None:
        for server in run.servers:
            server.wait_for(Push)
        run.tell(lambda: run.client.place(run.placed(2, [holder.server for holder in run.placement.holders])))

    run.client.open(LEASE, 0)
    gradient = backward(run, 1)
    thread = in_thread(heal)
    run.client.push()
    thread.join(SECONDS)
    assert is_equal(run.counted(LEASE), gradient)


def test_a_server_that_does_not_know_the_placement_yet_is_asked_again(run: Run) -> None:
    behind = run.servers[0]
    run.servers[1].set(term=2)
    run.client.place(run.placed(2, [holder.server for holder in run.placement.holders]))
    run.client.open(LEASE, 0)
    gradient = backward(run, 1)

    def catch_up() -> None:
        behind.wait_for(Push)
        behind.set(term=2)

    thread = in_thread(catch_up)
    run.client.push()
    thread.join(SECONDS)
    assert is_equal(run.counted(LEASE), gradient)


def test_what_is_refused_for_another_reason_raises(run: Run) -> None:
    run.servers[0].set(refusing="there is no such step")
    run.client.open(LEASE, 0)
    backward(run, 1)
    with pytest.raises(ShoalError, match=r"server 0 refused .* there is no such step"):
        run.client.push()


def test_the_control_link_may_end_any_wait(run: Run) -> None:
    def leave() -> None:
        raise Left

    run.tell(leave)
    with pytest.raises(Left):
        run.client.pull(3)
    for server in run.servers:
        server.set(answers=False)
    run.client.open(LEASE, 0)
    backward(run, 1)
    run.tell(leave)
    with pytest.raises(Left):
        run.client.push()


def test_a_slot_is_not_used_again_before_it_was_read(make: Callable[..., Run]) -> None:
    run = make(HERE)
    run.client.place(run.placement)
    server = run.servers[0]
    server.set(answers=False)

    def leave() -> None:
        raise Left

    for step in range(2):
        run.client.open(Lease(step, 0, 4), 0)
        backward(run, step)
        run.tell(leave)
        with pytest.raises(Left):
            run.client.push()
    run.tell(leave)
    with pytest.raises(Left):
        run.client.open(Lease(2, 0, 4), 0)


def test_long_waits_are_told_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LONG_WAIT", 0.0)

    def advance() -> None:
        for server in run.servers:
            server.wait_for(Pull)
        run.advance(1)

    thread = in_thread(advance)
    assert run.client.pull(1) == 1
    thread.join(SECONDS)
    assert len(run.waits) == len(set(run.waits)) <= len(run.servers)  # anew where some of it has come
    assert "worker 0 has waited" in run.waits[0]
    assert "weights of version 1 of server 0" in run.waits[0]


def test_what_is_lost_is_sent_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "AGAIN", 0.2)
    for server in run.servers:
        server.set(answers=False)
    run.client.open(LEASE, 0)
    gradient = backward(run, 1)

    def hear_again() -> None:
        for server in run.servers:
            server.wait_for(Push)
            server.set(answers=True)

    thread = in_thread(hear_again)
    run.client.push()
    thread.join(SECONDS)
    assert is_equal(run.counted(LEASE), gradient)


def test_a_placement_of_another_model_is_refused(run: Run) -> None:
    with pytest.raises(ShoalError, match="build the same model"):
        run.client.place(run.placed(9, [0]))
    run.client.place(run.placed(1, [0]))  # an old one is not looked at


def test_closing_lets_go_of_the_parameters(run: Run) -> None:
    run.client.open(LEASE, 0)
    backward(run, 1)
    run.client.close()
    assert all(param.grad is None for _, param in run.params)
    run.params[0][1].sum().backward()
    assert torch.equal(run.params[0][1].grad, torch.ones(24, 17))  # type: ignore[arg-type]
