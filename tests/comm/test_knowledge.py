"""What buckets know of their parameters, and what buckets over another group make of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from shoal.comm.account import Departing
from shoal.comm.buckets import TRIED_STEPS, WATCHED_STEPS, Buckets
from shoal.comm.group import Group, SoloGroup
from shoal.comm.knowledge import Knowledge, digest_of, fitting
from shoal.core.errors import GroupError
from shoal.testing.ranks import run_ranks

CAP = 256 << 10
SETTLED_AFTER = WATCHED_STEPS + TRIED_STEPS + 1


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))


def step(buckets: Buckets, layers: nn.Sequential, seed: int) -> list[Tensor]:
    buckets.open()
    buckets.arm()
    layers(torch.randn(2, 300, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
    buckets.finish(torch.zeros(1))
    return [param.grad.clone() for param in layers.parameters() if param.grad is not None]


def learnt(group: Group, layers: nn.Sequential) -> bytes:
    """After some steps with buckets of a given size: the order is what was seen."""
    buckets = Buckets(group, list(layers.named_parameters()), tail=1, cap=CAP)
    assert buckets.knowledge() is None
    for seed in range(SETTLED_AFTER):
        step(buckets, layers, seed)
    knowledge = buckets.knowledge()
    assert knowledge is not None
    buckets.close()
    return knowledge


class Counted:
    """A group that counts what it is asked for."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size
        self._group = group
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        return getattr(self._group, name)


def test_buckets_that_know_measure_nothing_and_sum_the_same() -> None:
    def fn(group: Group) -> bytes:
        layers = net()
        params = list(layers.named_parameters())
        knowledge = group.gather_bytes(learnt(group, layers))[0]
        watched = Counted(group)
        new, old = Buckets(watched, params, 1, CAP, knowledge), Buckets(group, params, 1, CAP)
        assert new.settled is not None and len(new.settled.buckets) >= 4 and old.settled is None
        left: list[int] = []
        new._departing = Departing()
        new._departing.passed = lambda: left.append(watched.asked.count("sum"))  # type: ignore[method-assign]
        for seed in range(3):
            watched.asked.clear()
            left.clear()
            mine = step(new, layers, seed + 10 * group.rank)
            assert len(left) == len(new._buckets) and left[0] == 0 and left[1:] == sorted(set(left[1:]))
            assert set(watched.asked) - {"buffer"} == {"sum"}, "something was measured, or agreed on"
            assert new._hooks, "gradients do not leave during backward"
            for one, other in zip(mine, step(old, layers, seed + 10 * group.rank), strict=True):
                torch.testing.assert_close(one, other)
        assert new.knowledge() == knowledge
        return knowledge

    first, second = run_ranks(2, fn)
    assert first == second


def test_a_first_bucket_leaves_in_the_first_backward() -> None:
    layers = net()
    knowledge = learnt(SoloGroup(), layers)
    buckets = Buckets(SoloGroup(), list(layers.named_parameters()), 1, CAP, knowledge)
    log: list[str] = []
    buckets._departing.passed = lambda: log.append("bucket")  # type: ignore[method-assign]
    layers[0].weight.register_hook(lambda grad: log.append("first layer"))
    step(buckets, layers, 0)
    assert log.index("bucket") < log.index("first layer")


def fields(layers: nn.Module) -> dict[str, Any]:
    params = list(layers.named_parameters())
    numbers = list(range(len(params)))
    return dict(
        params=digest_of(params, None), cap=1000, order=numbers, often=[1], latency=1e-4, bandwidth=1e9, buckets=[9]
    )


def test_what_fits() -> None:
    layers = net()
    known = Knowledge(**fields(layers))
    data = msgspec.msgpack.encode(known)
    params = digest_of(list(layers.named_parameters()), None)
    assert fitting(data, params, 8) == known
    assert fitting(None, params, 8) is None
    assert fitting(data, digest_of(list(layers.named_parameters()), CAP), 8) is None
    assert fitting(data, digest_of(list(net().double().named_parameters()), None), 8) is None
    assert fitting(data + bytes(10_000), params, 8) is None


@pytest.mark.parametrize(
    "wrong",
    [{"order": [0] * 8}, {"order": list(range(7))}, {"often": [8]}, {"often": [-1]}, {"cap": 0}, {"params": b""}],
)
def test_what_makes_no_sense_is_as_good_as_nothing(wrong: dict[str, Any]) -> None:
    layers = net()
    right = fields(layers)
    data = msgspec.msgpack.encode(Knowledge(**(right | wrong)))
    assert fitting(data, right["params"], 8) is None
    assert Buckets(SoloGroup(), list(layers.named_parameters()), 1, None, data).settled is None
    assert Buckets(SoloGroup(), list(layers.named_parameters()), 1, None, b"\xc1").settled is None


def test_an_error_of_the_group_leaves_backward_as_it_is() -> None:
    def fn(group: Group) -> str:
        layers = net()
        buckets = Buckets(group, list(layers.named_parameters()), 1, CAP, learnt(group, layers))
        step(buckets, layers, 0)
        buckets.open()
        buckets.arm()
        loss = layers(torch.ones(1, 300)).sum()
        group.revoke("not wanted")
        try:
            loss.backward()
        except GroupError as error:
            assert type(error) is GroupError
            return str(error)
        return "nothing was raised"

    assert run_ranks(2, fn) == ["not wanted"] * 2
    assert run_ranks(2, fn, collective="gloo") == ["not wanted"] * 2
