from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.comm.buckets import Buckets
from shoal.comm.group import Group, SoloGroup, Work
from shoal.core.errors import ConfigError
from shoal.testing.ranks import run_ranks

SMALL = 300
"""A cap in bytes that gives each of the small layers here (72 numbers) a bucket of its own."""


def deep(layers: int = 5, width: int = 8, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))
    return net.to(dtype)


def batch(seed: int, width: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def grads(net: nn.Module) -> list[Tensor | None]:
    return [None if param.grad is None else param.grad.detach().clone() for param in net.parameters()]


def one_step(buckets: Buckets, backwards: list[Callable[[], Any]], tail: Tensor) -> Tensor:
    buckets.open()
    for number, backward in enumerate(backwards):
        if number + 1 == len(backwards):
            buckets.arm()
        backward()
    return buckets.finish(tail)


def plain_sum(make: Callable[[], nn.Module], losses: list[Callable[[nn.Module], Tensor]]) -> list[Tensor]:
    """What one process gets when it runs every loss itself."""
    net = make()
    for loss in losses:
        loss(net).backward()
    return [torch.zeros_like(param) if param.grad is None else param.grad for param in net.parameters()]


def assert_close(found: list[Any], expected: list[Tensor]) -> None:
    for own, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-5, atol=1e-6)


class Watched:
    """A group that writes down when a sum is launched."""

    def __init__(self, group: Group, log: list[str]) -> None:
        self.rank, self.size, self.bytes_sent = group.rank, group.size, 0
        self._group = group
        self._log = log

    def sum(self, buffer: Tensor) -> Work:
        self._log.append(f"sum of {buffer.numel()}")
        return self._group.sum(buffer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("cap", [1, SMALL, 25 << 20])
def test_gradients_and_tail_are_the_plain_sums(ranks: int, cap: int) -> None:
    def fn(group: Group) -> list[Any]:
        net = deep()
        buckets = Buckets(group, list(net.named_parameters()), tail=2, cap=cap)
        steps = []
        for step in range(4):
            inputs = [batch(100 * step + 10 * group.rank + part) for part in range(2)]
            tail = one_step(
                buckets,
                [lambda x=x: net(x).square().sum().backward() for x in inputs],
                torch.tensor([1.0, group.rank]),
            )
            steps.append({"tail": tail, "grads": grads(net)})
        return steps

    values = run_ranks(ranks, fn)
    for step in range(4):
        losses = [
            lambda net, seed=100 * step + 10 * rank + part: net(batch(seed)).square().sum()
            for rank in range(ranks)
            for part in range(2)
        ]
        expected = plain_sum(deep, losses)
        for value in values:
            assert value[step]["tail"].tolist() == [ranks, sum(range(ranks))]
            assert_close(value[step]["grads"], expected)
            assert all(
                torch.equal(own, first)
                for own, first in zip(value[step]["grads"], values[0][step]["grads"], strict=True)
            )


def test_buckets_leave_while_backward_still_runs() -> None:
    def fn(group: Group) -> list[list[str]]:
        log: list[str] = []
        net = deep()
        buckets = Buckets(Watched(group, log), list(net.named_parameters()), tail=1, cap=SMALL)
        for number, layer in enumerate(net):
            layer[0].weight.register_hook(lambda grad, number=number: log.append(f"layer {number}"))
        steps = []
        for _ in range(3):
            log.clear()
            one_step(buckets, [lambda: net(batch(1)).sum().backward()], torch.zeros(1))
            steps.append(list(log))
        return steps

    for first, *later in run_ranks(2, fn):
        # the first step only watches in what order gradients arrive
        assert first[:5] == ["layer 4", "layer 3", "layer 2", "layer 1", "layer 0"]
        for log in later:
            assert log.index("sum of 72") < log.index("layer 3"), log
            assert sum(entry.startswith("sum") for entry in log[: log.index("layer 0")]) >= 3, log
            # the last bucket carries the tail, which is known only at the end
            assert log[-1].startswith("sum"), log


def test_only_the_last_backward_of_a_step_lets_buckets_leave() -> None:
    log: list[str] = []
    net = deep()
    buckets = Buckets(Watched(SoloGroup(), log), list(net.named_parameters()), tail=1, cap=SMALL)
    one_step(buckets, [lambda: net(batch(0)).sum().backward()], torch.zeros(1))
    log.clear()
    buckets.open()
    net(batch(0)).sum().backward()
    assert log == []
    buckets.arm()
    net(batch(1)).sum().backward()
    assert log != []
    buckets.finish(torch.zeros(1))


def test_buckets_are_laid_anew_in_the_order_of_arrival() -> None:
    """Declared in one order and used in another: after the first step buckets follow the use."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            for at in (3, 0, 4, 1, 2):
                x = self.layers[at](x)
            return x

    def fn(group: Group) -> dict[str, Any]:
        net = Odd()
        log: list[str] = []
        buckets = Buckets(Watched(group, log), list(net.named_parameters()), tail=1, cap=SMALL)
        before = buckets.digest
        for number, layer in enumerate(net.layers):
            layer.weight.register_hook(lambda grad, number=number: log.append(f"layer {number}"))
        for _ in range(2):
            log.clear()
            one_step(buckets, [lambda: net(batch(group.rank)).sum().backward()], torch.zeros(1))
        return {"log": log, "moved": before != buckets.digest, "digest": buckets.digest, "grads": grads(net)}

    values = run_ranks(2, fn)
    expected = plain_sum(Odd, [lambda net, seed=seed: net(batch(seed)).sum() for seed in range(2)])
    for value in values:
        assert value["moved"] and value["digest"] == values[0]["digest"]
        # layer 2 is the first whose gradient is complete; its bucket leaves before layer 1 has one
        assert value["log"].index("sum of 72") < value["log"].index("layer 1")
        assert_close(value["grads"], expected)


class Branches(nn.Module):
    """Three branches, of which a forward uses some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def loss(self, x: Tensor, used: list[int]) -> Tensor:
        return torch.stack([self.branches[at](x).square().sum() for at in used]).sum()


@pytest.mark.parametrize("cap", [1, 25 << 20])
def test_parameters_that_some_or_all_members_do_not_use(cap: int) -> None:
    # per step and rank: the branches used; branch 2 by nobody in step 2, nothing at all on rank 0 in step 3
    plan = [[[0, 1, 2], [0]], [[1], [0, 2]], [[0], [1]], [[], [2]]]

    def fn(group: Group) -> list[Any]:
        net = Branches()
        buckets = Buckets(group, list(net.named_parameters()), tail=1, cap=cap)
        steps = []
        for step, uses in enumerate(plan):
            used = uses[group.rank]
            backwards = [lambda used=used, step=step: net.loss(batch(step), used).backward()] if used else []
            one_step(buckets, backwards, torch.ones(1))
            steps.append(grads(net))
        return steps

    values = run_ranks(2, fn)
    for step, uses in enumerate(plan):
        losses = [lambda net, used=used, step=step: net.loss(batch(step), used) for used in uses if used]
        expected = plain_sum(Branches, losses)
        for value in values:
            assert_close(value[step], expected)


@pytest.mark.parametrize("cap", [1, SMALL, 25 << 20])
@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
def test_mixed_dtypes(cap: int, first: torch.dtype) -> None:
    """The tail rides in the last bucket if that is of single precision, else in an operation of its own."""

    def make() -> nn.Module:
        torch.manual_seed(3)
        kinds = [first, torch.float64, torch.bfloat16, torch.float32]
        return nn.ModuleList(nn.Linear(8, 8, dtype=kind) for kind in kinds)

    def loss(net: Any, seed: int) -> Tensor:
        x = batch(seed)
        parts = [layer(x.to(layer.weight.dtype)).square().mean().double() for layer in net]
        return torch.stack(parts).sum()

    def fn(group: Group) -> list[Any]:
        net = make()
        buckets = Buckets(group, list(net.named_parameters()), tail=3, cap=cap)
        steps = []
        for step in range(3):
            exact = torch.tensor([2.0**24 - 1 if group.rank else 1.0, 0.0, 0.1])
            tail = one_step(buckets, [lambda step=step: loss(net, 10 * step + group.rank).backward()], exact)
            steps.append({"tail": tail, "grads": grads(net)})
        return steps

    values = run_ranks(2, fn)
    for step in range(3):
        expected = plain_sum(make, [lambda net, seed=10 * step + rank: loss(net, seed) for rank in range(2)])
        for value in values:
            assert value[step]["tail"].dtype == torch.float32
            assert value[step]["tail"].tolist() == torch.tensor([2.0**24, 0.0, 0.2]).tolist()
            for own, plain in zip(value[step]["grads"], expected, strict=True):
                assert own.dtype == plain.dtype
                torch.testing.assert_close(own, plain)


def test_the_tail_changes_its_length_between_steps() -> None:
    def fn(group: Group) -> list[Any]:
        net = deep()
        buckets = Buckets(group, list(net.named_parameters()), tail=0, cap=SMALL)
        steps = []
        for step, length in enumerate([0, 3, 3, 1, 40, 0]):
            buckets.resize_tail(length)
            tail = one_step(
                buckets, [lambda step=step: net(batch(step + group.rank)).sum().backward()], torch.ones(length)
            )
            steps.append({"tail": tail.tolist(), "grads": grads(net)})
        return steps

    values = run_ranks(2, fn)
    for step, length in enumerate([0, 3, 3, 1, 40, 0]):
        expected = plain_sum(deep, [lambda net, seed=step + rank: net(batch(seed)).sum() for rank in range(2)])
        for value in values:
            assert value[step]["tail"] == [2.0] * length
            assert_close(value[step]["grads"], expected)


class Rechecked(nn.Module):
    """One layer used in several reentrant checkpoints: its gradient arrives in parts, with another's in between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.head, self.shared, self.middle, self.tail = (nn.Linear(8, 8) for _ in range(4))

    def loss(self, x: Tensor, times: int) -> Tensor:
        return self._loss(x, times, lambda y: checkpoint(self.shared, y, use_reentrant=True))

    def plain(self, x: Tensor, times: int) -> Tensor:
        return self._loss(x, times, self.shared)

    def _loss(self, x: Tensor, times: int, shared: Callable[[Tensor], Tensor]) -> Tensor:
        x = self.middle(shared(self.head(x)))
        for _ in range(times - 1):
            x = shared(x)
        return self.tail(x).square().sum()


def test_a_gradient_that_arrives_in_parts_is_whole() -> None:
    def fn(group: Group) -> list[Any]:
        net = Rechecked()
        buckets = Buckets(group, list(net.named_parameters()), tail=1, cap=1)
        steps = []
        for step in range(4):
            one_step(buckets, [lambda step=step: net.loss(batch(2 * step + group.rank), 2).backward()], torch.zeros(1))
            steps.append(grads(net))
        return steps

    values = run_ranks(2, fn)
    for step in range(4):
        losses = [lambda net, seed=2 * step + rank: net.plain(batch(seed), 2) for rank in range(2)]
        expected = plain_sum(Rechecked, losses)
        for value in values:
            assert_close(value[step], expected)


def test_a_gradient_that_begins_to_arrive_in_parts_is_refused() -> None:
    """It has been sent by then: to go on would lose a part of it."""

    def fn(group: Group) -> str:
        net = Rechecked()
        buckets = Buckets(group, list(net.named_parameters()), tail=1, cap=1)
        try:
            for times in (1, 1, 2):
                one_step(buckets, [lambda times=times: net.loss(batch(group.rank), times).backward()], torch.zeros(1))
        except ConfigError as error:
            return str(error)
        return "no error"

    for said in run_ranks(2, fn):
        assert "'shared." in said and "arrived again" in said and "use_reentrant=False" in said


@pytest.mark.parametrize("cap", [1, 25 << 20])
def test_a_sparse_gradient_is_refused(cap: int) -> None:
    net = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Linear(8, 8))
    buckets = Buckets(SoloGroup(), list(net.named_parameters()), tail=1, cap=cap)
    with pytest.raises(ConfigError, match=r"'0.weight' has a sparse gradient; .*sparse=False"):
        one_step(buckets, [lambda: net(torch.tensor([1, 2])).sum().backward()], torch.zeros(1))


def test_digests_tell_layouts_apart() -> None:
    def digest(net: nn.Module, tail: int = 0, cap: int = SMALL) -> bytes:
        return Buckets(SoloGroup(), list(net.named_parameters()), tail=tail, cap=cap).digest

    assert digest(deep()) == digest(deep())
    others = [
        digest(deep(4)),
        digest(deep(width=4)),
        digest(deep(dtype=torch.float64)),
        digest(deep(), tail=1),
        digest(deep(), cap=1),
        digest(nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))),
    ]
    assert len({digest(deep()), *others}) == 1 + len(others)


def test_closed_buckets_leave_gradients_alone() -> None:
    net = deep()
    buckets = Buckets(SoloGroup(), list(net.named_parameters()), tail=1, cap=1)
    one_step(buckets, [lambda: net(batch(0)).sum().backward()], torch.zeros(1))
    buckets.open()
    buckets.arm()
    buckets.close()
    log: list[str] = []
    buckets._group = Watched(SoloGroup(), log)
    net(batch(0)).sum().backward()
    assert log == []
