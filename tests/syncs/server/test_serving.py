"""Servers: what is pushed counts once, what is told to count survives, and the weights are those of one process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.core.spec import Server
from shoal.data.parcel import unseal
from shoal.syncs.server.messages import (
    Applied,
    Apply,
    Begin,
    Close,
    Closed,
    Complaint,
    Fetch,
    Holds,
    Kept,
    Lease,
    Part,
    Pull,
    Push,
    Refused,
    Send,
    Took,
    Touched,
    Weights,
)
from shoal.syncs.server.setup import Setup

from .cluster import HALVES, HERE, THERE, Cluster, gradient, make_setup, reference, used

ALONE = Server(servers=1, durability="none")
PEER = Server(servers=2, durability="peer")
ONE = [(0, None)] * 4
TWO: list[tuple[int, int | None]] = [(0, 1), (0, 1), (1, 0), (1, 0)]


def same(setup: Setup, one: Tensor, other: Tensor) -> bool:
    """Whether the parameters in two areas are equal; what lies between them does not matter."""
    return all(
        torch.equal(setup.cut.view(one, number), setup.cut.view(other, number)) for number in range(len(setup.params))
    )


def alone(setup: Setup) -> Cluster:
    cluster = Cluster(setup)
    cluster.start(0)
    cluster.begin(ONE)
    return cluster


def two(setup: Setup, second: str = HERE) -> Cluster:
    cluster = Cluster(setup)
    cluster.start(0)
    cluster.start(1, second)
    cluster.begin(TWO)
    return cluster


class DieAt:
    """Server `server` leaves at once when it comes to this point of this step."""

    def __init__(self, wanted: str, server: int, step: int) -> None:
        self.wanted = (wanted, server, step)

    def __call__(self, point: str, *, server: int, step: int) -> None:
        if (point, server, step) == self.wanted:
            os._exit(9)


@pytest.mark.parametrize("near", [True, False])
def test_one_server_does_what_one_process_does(near: bool) -> None:
    setup = make_setup(ALONE)
    with alone(setup) as cluster:
        for step in range(4):
            cluster.step(step, near=near, closing=False)
        assert same(setup, cluster.weights(4), reference(setup, 4))
        assert same(setup, setup.memory[HERE].weights, reference(setup, 4))
        assert setup.memory[HERE].state[:, 1].tolist() == [4] * 4
        assert not (setup.memory[HERE].state[:, 0] % 2).any()
        cluster.end()


def test_the_sum_is_scaled_and_its_norm_told() -> None:
    setup = make_setup(ALONE)
    with alone(setup) as cluster:
        for half in HALVES:
            cluster.push(Lease(0, *half), near=True)
        both = [gradient(setup, Lease(0, *half)) for half in HALVES]
        total = sum(
            float((setup.cut.view(both[0], n) + setup.cut.view(both[1], n)).double().square().sum()) for n in range(4)
        )
        assert cluster.close(0) == pytest.approx(total, rel=1e-9)
        (applied,) = cluster.apply(0, scale=0.25)
        assert applied.rates == [0.01] and applied.pushes == 2 and applied.repeated == 0
        assert same(setup, cluster.weights(1), reference(setup, 1, scale=0.25))


def test_a_gradient_counts_once_however_often_it_comes() -> None:
    setup = make_setup(ALONE)
    with alone(setup) as cluster:
        cluster.push(Lease(0, 0, 4), near=True)
        cluster.push(Lease(0, 0, 4), near=False, sender="worker-1")
        cluster.push(Lease(0, 4, 8), near=False, sender="worker-1")
        cluster.push(Lease(0, 4, 8), near=True)
        (applied,) = cluster.apply(0)
        assert (applied.pushes, applied.repeated) == (4, 2)
        cluster.push(Lease(0, 4, 8), near=True)  # of a step that is applied
        assert same(setup, cluster.weights(1), reference(setup, 1))


def test_a_push_may_come_before_its_parts_and_a_part_twice() -> None:
    setup = make_setup(ALONE)
    lease = Lease(0, 0, 4)
    area = gradient(setup, lease)
    with alone(setup) as cluster:
        cluster.say(0, Part(Lease(0, 4, 8), 2, *bounds(setup, 2)), [area[slice(*bounds(setup, 2))] * 0])
        cluster.say(0, Push(lease, [0, 1, 2, 3], 0, used(setup), None, 4))
        for shard in (3, 1, 1, 0, 2):
            start, stop = bounds(setup, shard)
            cluster.say(0, Part(lease, shard, start, stop), [area[start:stop]])
        assert cluster.answer(0, Took)[0] == Took(lease, [0, 1, 2, 3])
        cluster.push(Lease(0, 4, 8), near=True)
        cluster.apply(0)
        assert same(setup, cluster.weights(1), reference(setup, 1))


def bounds(setup: Setup, shard: int) -> tuple[int, int]:
    return setup.cut.shards[shard].start, setup.cut.shards[shard].stop


def test_what_cannot_be_right_is_refused() -> None:
    setup = make_setup(ALONE)
    lease, bits = Lease(0, 0, 4), used(setup)
    start, stop = bounds(setup, 1)
    wrong: list[tuple[Any, list[Tensor]]] = [
        (Push(Lease(0, 0, 9), [0], 0, bits, 0), []),
        (Push(Lease(12, 0, 4), [0], 0, bits, 0), []),
        (Push(Lease(3, 0, 4), [0], 0, bits, 0), []),
        (Push(lease, [4], 0, bits, 0), []),
        (Push(lease, [0, 0], 0, bits, 0), []),
        (Push(lease, [0], 0, bits + b"\0", 0), []),
        (Push(lease, [0], 0, bits, 2), []),
        (Push(lease, [0], 0, bits, 0, scale=float("nan")), []),
        (Part(lease, 1, start, stop + 64), [torch.zeros(stop + 64 - start, dtype=torch.uint8)]),
        (Part(lease, 1, start, stop), [torch.zeros(3, dtype=torch.uint8)]),
        (Part(lease, 1, start, stop), []),
        (Part(lease, 1, start, stop, True), [torch.zeros(300, dtype=torch.uint8)]),
        (Fetch(1, 0, [0]), [torch.zeros(8, dtype=torch.uint8)]),
        (Touched(lease, [0]), [torch.zeros(8, dtype=torch.uint8)]),
        (Took(lease, [0]), []),
    ]
    with alone(setup) as cluster:
        for body, frames in wrong:
            cluster.say(0, body, frames)
            if isinstance(body, Part) and body.encoded:
                cluster.say(0, Push(lease, [1], 0, bits, None, 1))
            assert cluster.answer(0, Refused)[0].term == 1, body
        cluster.say(0, Push(lease, [0], 0, bits, 0), sender="nobody")
        cluster.answer(0, Refused, "nobody")
        assert not cluster.hear(0, Complaint).fatal
        cluster.step(0, closing=False)
        assert same(setup, cluster.weights(1), reference(setup, 1))


def test_letters_of_another_run_are_dropped_and_of_an_older_term_refused() -> None:
    setup = make_setup(ALONE)
    with alone(setup) as cluster:
        cluster.place(ONE)
        for _ in range(3):
            cluster.say(0, Pull(1, 0, True), run="another")
        cluster.say(0, Pull(2, 0, True), term=1)
        assert cluster.answer(0, Refused)[0].term == 2
        assert "another run" in cluster.hear(0, Complaint).text
        cluster.step(0, closing=False)
        cluster.tell(Send(9))
        cluster.hear(0, Kept)
        assert not any(isinstance(entry[0], Complaint) for entry in cluster._heard[0])


def test_a_letter_of_a_newer_term_waits_for_its_placement() -> None:
    setup = make_setup(ALONE)
    with alone(setup) as cluster:
        cluster.say(0, Pull(1, 0, True), term=2)
        cluster.say(0, Pull(2, 0, True))
        assert cluster.answer(0, Weights)[0].number == 2
        cluster.place(ONE)
        assert cluster.answer(0, Weights)[0] == Weights(1, 0, [0, 1, 2, 3])


def test_a_pull_is_answered_when_its_version_is_there() -> None:
    setup = make_setup(ALONE)
    with alone(setup) as cluster:
        cluster.say(0, Pull(7, 1, True))
        cluster.say(0, Pull(8, 0, True))
        assert cluster.answer(0, Weights)[0].number == 8
        for half in HALVES:
            cluster.push(Lease(0, *half), near=True, sender="worker-1")
        cluster.apply(0)
        told: list[int] = []
        while len(told) < 4:  # as they are applied
            body, frames = cluster.answer(0, Weights)
            assert (body.number, body.version) == (7, 1) and not frames
            told += body.shards
        assert told == [0, 1, 2, 3]


def test_versions_are_kept_until_let_go() -> None:
    setup = make_setup(ALONE)
    with alone(setup) as cluster:
        cluster.step(0, closing=False, keep=True, state=True)
        cluster.step(1, closing=False)
        assert same(setup, cluster.weights(1, exact=True), reference(setup, 1))
        cluster.tell(Send(1))
        kept, (parcel, *buffers) = cluster.hear_all(0, Kept)
        tree = unseal(bytes(parcel), buffers)
        assert kept == Kept(1, [0, 1, 2, 3]) and sorted(tree) == [0, 1, 2, 3]
        assert set(tree[0]) == {"weights", "optimizer", "schedule"}
        cluster.say(0, Pull(3, 2, False, True))
        assert "not kept" in cluster.answer(0, Refused)[0].why


@pytest.mark.parametrize("second", [HERE, THERE])
def test_mirrors_have_the_same_bits(second: str) -> None:
    setup = make_setup(PEER)
    with two(setup, second) as cluster:
        for step in range(3):
            cluster.step(step, near=second == HERE)
        before = cluster.weights(3)
        assert same(setup, before, reference(setup, 3))
        cluster.kill(0)
        cluster.place([(1, None)] * 4)
        assert same(setup, cluster.weights(3), before)
        cluster.step(3, near=second == HERE)
        assert same(setup, cluster.weights(4), reference(setup, 4))


@pytest.mark.parametrize("second", [HERE, THERE])
@pytest.mark.parametrize("point", ["closed", "apply", "applied"])
def test_a_step_that_is_closed_survives_its_holder(point: str, second: str) -> None:
    setup = make_setup(PEER, faults=DieAt(point, 0, 1))
    with two(setup, second) as cluster:
        near = second == HERE
        cluster.step(0, near=near)
        for half in HALVES:
            cluster.push(Lease(1, *half), near=near)
        cluster.tell(Close(1))
        cluster.hear(0, Closed)
        if point != "closed":
            cluster.hear(1, Closed)
            cluster.tell(Apply(1, 1.0, 0.0))
        assert cluster.wait(0) == 9
        cluster.place([(1, None)] * 4)
        if point == "closed":  # perhaps it still waited for its own mirror
            cluster.tell(Close(1))
        cluster.tell(Apply(1, 1.0, 0.0))
        cluster.hear(1, Applied, lambda done: done.version == 2)
        assert same(setup, cluster.weights(2), reference(setup, 2))


@pytest.mark.parametrize("point", ["push", "pushed", "close"])
def test_sums_that_were_lost_come_again(point: str) -> None:
    setup = make_setup(PEER, faults=DieAt(point, 0, 1))
    with two(setup) as cluster:
        cluster.step(0)
        if point == "close":
            for half in HALVES:
                cluster.push(Lease(1, *half), near=True)
            cluster.tell(Close(1))
        else:
            cluster.setup.memory[HERE].gradient(0, 1).copy_(gradient(setup, Lease(1, 0, 4)))
            for number, shards in cluster.held().items():
                cluster.say(number, Push(Lease(1, 0, 4), shards, 1, used(setup), 1))
        assert cluster.wait(0) == 9
        cluster.place([(1, None)] * 4)
        cluster.step(1)
        assert same(setup, cluster.weights(2), reference(setup, 2))


@pytest.mark.parametrize("second", [HERE, THERE])
def test_a_new_mirror_gets_a_copy_and_may_become_the_holder(second: str) -> None:
    setup = make_setup(PEER)
    near = second == HERE
    with two(setup, second) as cluster:
        cluster.step(0, near=near)
        cluster.kill(0)
        cluster.place([(1, None)] * 4)
        cluster.step(1, near=near)
        cluster.start(0)
        cluster.tell(Begin([], "copy", 2), 0)
        cluster.hear(0, Holds)
        cluster.place([(1, 0)] * 4)
        cluster.hear(0, Holds, lambda holds: holds.mirrored == dict.fromkeys(range(4), 2))
        cluster.step(2, near=near)
        cluster.place(TWO)  # roles are swapped, at a quiet boundary
        cluster.step(3, near=near)
        assert same(setup, cluster.weights(4), reference(setup, 4))
        cluster.kill(1)
        cluster.place([(0, None)] * 4)
        assert same(setup, cluster.weights(4), reference(setup, 4))


def test_a_mirror_that_comes_between_closed_and_applied_applies_too() -> None:
    setup = make_setup(PEER)
    with two(setup) as cluster:
        cluster.kill(0)
        cluster.place([(1, None)] * 4)
        cluster.start(0)
        cluster.tell(Begin([], "copy", 0), 0)
        for half in HALVES:
            cluster.push(Lease(0, *half), near=True)
        cluster.tell(Close(0), 1)
        cluster.place([(1, 0)] * 4)
        cluster.apply(0)
        cluster.kill(1)
        cluster.place([(0, None)] * 4)
        assert same(setup, cluster.weights(1), reference(setup, 1))


def test_a_journal_brings_back_what_was_closed(tmp_path: Path) -> None:
    setup = make_setup(Server(servers=1, durability="disk"), journals=tmp_path, faults=DieAt("closed", 0, 2))
    with alone(setup) as cluster:
        cluster.step(0)
        cluster.step(1)
        for half in HALVES:
            cluster.push(Lease(2, *half), near=True)
        cluster.tell(Close(2))
        assert cluster.wait(0) == 9
        setup.memory[HERE].weights.zero_()
        cluster.start(0)
        cluster.tell(Begin([0, 1, 2, 3], "journal", 2))
        assert cluster.hear(0, Holds).mirrored == dict.fromkeys(range(4), 2)
        cluster.place(ONE)
        cluster.apply(2)
        assert same(setup, cluster.weights(3), reference(setup, 3))


@pytest.mark.parametrize("near", [True, False])
def test_by_arrival_a_push_counts_when_the_mirror_has_it(near: bool) -> None:
    setup = make_setup(Server(servers=2, durability="peer", apply="arrival"), faults=DieAt("pushed", 0, 1))
    with two(setup) as cluster:
        cluster.step(0, near=near, closing=False)
        cluster.push(Lease(0, 0, 4), near=near)
        first = cluster.weights(1)
        assert not same(setup, first, reference(setup, 0))
        lease = Lease(1, 0, 4)
        area = gradient(setup, lease)
        cluster.setup.memory[HERE].gradient(0, 1).copy_(area)
        for number, shards in cluster.held().items():
            cluster.say(number, Push(lease, shards, 1, used(setup), 1))
        assert cluster.wait(0) == 9
        cluster.place([(1, None)] * 4)
        cluster.push(lease, near=near, sender="worker-1")
        cluster.push(Lease(1, 4, 8), near=near)
        cluster.apply(1)
        died = cluster.weights(2)
    calm = make_setup(Server(servers=1, durability="none", apply="arrival"))
    with alone(calm) as cluster:
        cluster.step(0, closing=False)
        assert same(setup, cluster.weights(1), first)
        cluster.step(1, closing=False)
        assert same(setup, cluster.weights(2), died)


def test_nothing_is_told_to_count_before_the_mirror_has_it() -> None:
    setup = make_setup(PEER)
    with two(setup) as cluster:
        for half in HALVES:
            cluster.push(Lease(0, *half), near=True)
        os.kill(cluster.pids[1], signal.SIGSTOP)
        cluster.tell(Close(0))
        assert not cluster.links[0].poll(0.3)
        os.kill(cluster.pids[1], signal.SIGCONT)
        cluster.hear(0, Closed)
    arrival = make_setup(Server(servers=2, durability="peer", apply="arrival"))
    with two(arrival) as cluster:
        os.kill(cluster.pids[1], signal.SIGSTOP)
        cluster.say(0, Push(Lease(0, 0, 4), [0, 1], 0, used(arrival), 0))
        cluster.say(0, Push(Lease(0, 0, 4), [0, 1], 0, used(arrival), 0), sender="worker-1")
        assert cluster.line(0).receive(0.3) is None
        assert cluster.line(0, "worker-1").receive() is None
        os.kill(cluster.pids[1], signal.SIGCONT)
        for sender in ("worker-0", "worker-1"):
            assert {cluster.answer(0, Took, sender)[0].shards[0] for _ in range(2)} == {0, 1}


@pytest.mark.parametrize("second", [HERE, THERE])
@pytest.mark.parametrize("apply", ["step", "arrival"])
def test_roles_are_swapped_without_a_trace(apply: str, second: str) -> None:
    near, closing = second == HERE, apply == "step"
    setup = make_setup(Server(servers=2, durability="peer", apply=apply))
    with two(setup, second) as cluster:
        for step in range(6):
            cluster.step(step, near=near, closing=closing)
            cluster.place([(1 - one, 1 - other) for one, other in TWO] if step % 2 == 0 else TWO)
        swapped = cluster.weights(6)
        cluster.kill(1)
        cluster.place([(0, None)] * 4)
        assert same(setup, cluster.weights(6), swapped)
    calm = make_setup(Server(servers=1, durability="none", apply=apply))
    with alone(calm) as cluster:
        for step in range(6):
            cluster.step(step, closing=False)
        assert same(setup, cluster.weights(6), swapped)


def test_what_a_former_holder_had_summed_does_not_count() -> None:
    setup = make_setup(PEER)
    with two(setup) as cluster:
        cluster.push(Lease(0, 0, 4), near=True)
        cluster.place([(1 - one, one) for one, _ in TWO])
        cluster.push(Lease(0, 4, 8), near=True)
        cluster.place(TWO)
        cluster.step(0)
        assert same(setup, cluster.weights(1), reference(setup, 1))


def test_a_former_holder_does_not_say_that_a_push_counts() -> None:
    setup = make_setup(Server(servers=2, durability="peer", apply="arrival"))
    lease = Lease(0, 0, 4)
    with two(setup) as cluster:
        setup.memory[HERE].gradient(0, 0).copy_(gradient(setup, lease))
        os.kill(cluster.pids[1], signal.SIGSTOP)
        cluster.say(0, Push(lease, [0, 1], 0, used(setup), 0))
        cluster.say(0, Pull(1, 0, True))
        cluster.answer(0, Weights)  # so the push has been heard
        cluster.tell(cluster.next_placement([(1, 0)] * 4))
        cluster.hear(0, Holds, lambda holds: holds.term == cluster.term)
        assert cluster.line(0).receive(0.3) is None
        os.kill(cluster.pids[1], signal.SIGCONT)
        cluster.step(0, closing=False)
        swapped = cluster.weights(1)
    calm = make_setup(Server(servers=1, durability="none", apply="arrival"))
    with alone(calm) as cluster:
        cluster.step(0, closing=False)
        assert same(setup, cluster.weights(1), swapped)


def test_a_holder_waits_until_the_one_before_has_let_go() -> None:
    setup = make_setup(PEER)
    swapped: list[tuple[int, int | None]] = [(1, 0), (1, 0), (1, 0), (1, 0)]
    with two(setup) as cluster:
        cluster.step(0)
        os.kill(cluster.pids[0], signal.SIGSTOP)
        cluster.tell(cluster.next_placement(swapped))
        for half in HALVES:
            lease = Lease(1, *half)
            setup.memory[HERE].gradient(half[0] // 4, 1).copy_(gradient(setup, lease))
            cluster.say(1, Push(lease, [0, 1, 2, 3], 1, used(setup), 1), sender=f"worker-{half[0] // 4}")
        assert cluster.line(1).receive(0.3) is None
        os.kill(cluster.pids[0], signal.SIGCONT)
        for seat in range(2):
            assert cluster.answer(1, Took, f"worker-{seat}")[0].shards == [0, 1, 2, 3]
        cluster.close(1)
        cluster.apply(1)
        assert same(setup, cluster.weights(2), reference(setup, 2))
        os.kill(cluster.pids[1], signal.SIGSTOP)
        cluster.tell(cluster.next_placement(TWO))
        cluster.kill(1)  # before it has let go: nobody waits for the dead
        cluster.place([(0, None)] * 4)
        assert same(setup, cluster.weights(2), reference(setup, 2))


def test_a_step_that_is_not_whole_is_never_applied() -> None:
    setup = make_setup(ALONE)
    with alone(setup) as cluster:
        cluster.push(Lease(0, 0, 4), near=True)
        cluster.tell(Apply(0, 1.0, 0.0))
        assert cluster.wait(0) == 3  # AuditError


def test_an_error_of_the_optimizer_leaves_serve() -> None:
    def at(point: str, **_: Any) -> None:
        if point == "apply":
            raise RuntimeError("the user's code")

    setup = make_setup(ALONE, faults=at)
    with alone(setup) as cluster:
        for half in HALVES:
            cluster.push(Lease(0, *half), near=True)
        cluster.tell(Apply(0, 1.0, 0.0))
        assert cluster.wait(0) == 4


def test_a_server_leaves_when_the_clerk_is_gone() -> None:
    with alone(make_setup(ALONE)) as cluster:
        cluster.links[0].close()
        assert cluster.wait(0) == 0
