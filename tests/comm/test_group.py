"""What is particular to a group; what holds for all of them is in test_conformance."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from shoal.comm.account import Account
from shoal.comm.group import Group, SoloGroup
from shoal.comm.strings import HEAD
from shoal.core.errors import GroupError
from shoal.core.traffic import CONTROL, GRADIENT, LOOPBACK, PARAMETER, STATE, Flow, Traffic
from shoal.testing.ranks import die, run_ranks


def told(traffic: Traffic) -> list[list[object]]:
    """Flows as values that travel."""
    return [[flow.kind, flow.codec, flow.link, flow.bytes, flow.messages] for flow in traffic.flows]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_gloo_sends_follows_the_arithmetic_of_its_algorithms(size: int) -> None:
    def fn(group: Group) -> list[list[list[object]]]:
        operations: list[Callable[[], object]] = [
            lambda: group.sum(torch.zeros(1000)).wait(),
            lambda: group.scatter_sum(torch.zeros(size, 10), PARAMETER),
            lambda: group.gather(torch.zeros(10, dtype=torch.float64), STATE),
            lambda: group.broadcast(torch.zeros(7, dtype=torch.int32)),
            lambda: group.gather_bytes(b"x" * group.rank, STATE),
            lambda: group.swap(torch.zeros(size, 3, dtype=torch.int16)),
        ]
        accounts = [group.account.now()]
        for operation in operations:
            operation()
            accounts.append(group.account.now())
        return [told(after.since(before)) for before, after in pairwise(accounts)]

    children = {2: [1, 0], 3: [2, 0, 0], 4: [2, 0, 1, 0]}[size]
    others = size - 1
    for rank, grown in enumerate(run_ranks(size, fn, collective="gloo")):
        flows = [[Flow(*flow) for flow in each] for each in grown]
        summed, scattered, gathered, passed_on, lengths_and_bytes, swapped = flows
        assert summed == [Flow(GRADIENT, "none", LOOPBACK, 2 * others * 4000 // size, 2 * others)]
        assert scattered == [Flow(PARAMETER, "none", LOOPBACK, 2 * others * 40, 2 * others)]
        assert gathered == [Flow(STATE, "none", LOOPBACK, others * 80, others)]
        assert passed_on == [Flow(CONTROL, "none", LOOPBACK, 28 * children[rank], children[rank])] * bool(
            children[rank]
        )
        assert swapped == [Flow(GRADIENT, "none", LOOPBACK, others * 6, others)]
        assert lengths_and_bytes == [Flow(STATE, "none", LOOPBACK, others * (HEAD + others), 2 * others)]


def test_what_is_sent_counts_for_the_codec_that_is_named_or_set() -> None:
    account = Account()
    account.sent(GRADIENT, LOOPBACK, 10, 1)
    account.codec = "int8"
    account.sent(GRADIENT, LOOPBACK, 5, 1)
    account.sent(GRADIENT, LOOPBACK, 3, 1, "none")
    assert account.now().flows == [Flow(GRADIENT, "none", LOOPBACK, 13, 2), Flow(GRADIENT, "int8", LOOPBACK, 5, 1)]


def test_a_group_of_one_sends_nothing() -> None:
    group = SoloGroup()
    group.sum(torch.ones(10)).wait()
    group.gather_bytes(b"abc")
    group.barrier()
    assert group.account.now() == Traffic() and list(group.descriptors()) == []
    group.close()


@pytest.mark.parametrize("collective", ["gloo", "shm"])
def test_a_forked_child_can_let_go_of_the_group(collective: str) -> None:
    """A child that keeps what the group has open could keep a dead member alive in the eyes of its peers."""

    held, until_all_are_gone = os.pipe()

    def fn(group: Group) -> str:
        group.sum(torch.ones(1)).wait()
        if group.rank == 1:
            descriptors = list(group.descriptors())
            assert descriptors or collective != "gloo"
            ready, done = os.pipe()
            if os.fork() == 0:
                for descriptor in [*descriptors, until_all_are_gone]:
                    os.close(descriptor)
                os.write(done, b"x")
                os.read(held, 1)
                os._exit(0)
            os.read(ready, 1)
            die()
        begun = time.monotonic()
        try:
            group.sum(torch.ones(1)).wait()
        except GroupError:
            assert time.monotonic() - begun < 2.0
            return "noticed"
        return "did not notice"

    try:
        assert run_ranks(2, fn, mortal=[1], collective=collective)[0] == "noticed"
    finally:
        os.close(until_all_are_gone)
        os.close(held)
