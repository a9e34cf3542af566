from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.comm.buckets import TRIED_STEPS, WATCHED_STEPS, Buckets
from shoal.comm.group import Group, SoloGroup, Work
from shoal.comm.plan import UNDIVIDED, Choice, Settled
from shoal.comm.watch import Trial
from shoal.core.errors import ConfigError, GroupError
from shoal.core.traffic import GRADIENT
from shoal.testing.ranks import run_ranks

SMALL = 300
"""A cap in bytes that gives each of the small layers here (72 numbers) a bucket of its own."""
STEPS = WATCHED_STEPS + 2
STEPS_TO_SETTLE = WATCHED_STEPS + TRIED_STEPS
"""Steps at most before the buckets stay as they are."""
TINY = 100
"""A cap in bytes that gives each parameter a bucket of its own, and sums weights in several parts."""


def deep(layers: int = 5, width: int = 8, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))
    return net.to(dtype)


def batch(seed: int, width: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def grads(net: nn.Module) -> list[Tensor | None]:
    return [None if param.grad is None else param.grad.detach().clone() for param in net.parameters()]


def hooked(net: nn.Module) -> bool:
    return any(getattr(param, "_post_accumulate_grad_hooks", None) for param in net.parameters())


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
    """A group that writes down when a sum of gradients is launched."""

    def __init__(self, group: Group, log: list[str]) -> None:
        self.rank, self.size = group.rank, group.size
        self._group = group
        self._log = log

    def sum(self, buffer: Tensor, kind: str = GRADIENT) -> Work:
        if kind == GRADIENT:
            self._log.append(f"sum of {buffer.numel()}")
        return self._group.sum(buffer, kind)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("cap", [TINY, SMALL, None])
def test_gradients_and_tail_are_the_plain_sums(ranks: int, cap: int | None) -> None:
    def fn(group: Group) -> list[Any]:
        net = deep()
        buckets = Buckets(group, list(net.named_parameters()), tail=2, cap=cap)
        steps = []
        for step in range(STEPS):
            inputs = [batch(100 * step + 10 * group.rank + part) for part in range(2)]
            tail = one_step(
                buckets,
                [lambda x=x: net(x).square().sum().backward() for x in inputs],
                torch.tensor([1.0, group.rank]),
            )
            steps.append({"tail": tail, "grads": grads(net)})
        return steps

    values = run_ranks(ranks, fn)
    for step in range(STEPS):
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
        for _ in range(WATCHED_STEPS + 2):
            log.clear()
            one_step(buckets, [lambda: net(batch(1)).sum().backward()], torch.zeros(1))
            steps.append(list(log))
        return steps

    for steps in run_ranks(2, fn):
        for log in steps[:WATCHED_STEPS]:
            assert log == ["layer 4", "layer 3", "layer 2", "layer 1", "layer 0", "sum of 361"]
        for log in steps[WATCHED_STEPS:]:
            assert log.index("sum of 72") < log.index("layer 3"), log
            assert sum(entry.startswith("sum") for entry in log[: log.index("layer 0")]) >= 3, log
            # the last bucket carries the tail, which is known only at the end
            assert log[-1].startswith("sum"), log


def test_only_the_last_backward_of_a_step_lets_buckets_leave() -> None:
    log: list[str] = []
    net = deep()
    buckets = Buckets(Watched(SoloGroup(), log), list(net.named_parameters()), tail=1, cap=SMALL)
    for _ in range(WATCHED_STEPS):
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
    """Declared in one order and used in another: after the watched steps buckets follow the use."""

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
        for _ in range(WATCHED_STEPS + 1):
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


@pytest.mark.parametrize("cap", [TINY, None])
def test_parameters_that_some_or_all_members_do_not_use(cap: int | None) -> None:
    # per step and rank: the branches used; once branch 2 by nobody, once nothing at all on rank 0
    plan = [[[0, 1, 2], [0]]] * (WATCHED_STEPS - 1) + [[[1], [0, 2]], [[0], [1]], [[], [2]], [[2], [1, 0]]]

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


@pytest.mark.parametrize("cap", [TINY, SMALL, None])
@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
def test_mixed_dtypes(cap: int | None, first: torch.dtype) -> None:
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
        for step in range(STEPS):
            exact = torch.tensor([2.0**24 - 1 if group.rank else 1.0, 0.0, 0.1])
            tail = one_step(buckets, [lambda step=step: loss(net, 10 * step + group.rank).backward()], exact)
            steps.append({"tail": tail, "grads": grads(net)})
        return steps

    values = run_ranks(2, fn)
    for step in range(STEPS):
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


@pytest.mark.parametrize("times", [(2, 2), (1, 2), (2, 1)])
def test_a_gradient_that_arrives_in_parts_is_whole(times: tuple[int, int]) -> None:
    """On all members, or only on one: member 0, which decides on the order, may not have seen it."""

    def fn(group: Group) -> list[Any]:
        net = Rechecked()
        buckets = Buckets(group, list(net.named_parameters()), tail=1, cap=TINY)
        steps = []
        for step in range(STEPS):
            inputs = batch(2 * step + group.rank)
            one_step(buckets, [lambda x=inputs: net.loss(x, times[group.rank]).backward()], torch.zeros(1))
            steps.append(grads(net))
        return steps

    values = run_ranks(2, fn)
    for step in range(STEPS):
        losses = [
            lambda net, seed=2 * step + rank, uses=uses: net.plain(batch(seed), uses) for rank, uses in enumerate(times)
        ]
        expected = plain_sum(Rechecked, losses)
        for value in values:
            assert_close(value[step], expected)


def test_a_gradient_that_begins_to_arrive_in_parts_is_refused() -> None:
    """It has been sent by then: to go on would lose a part of it."""

    def fn(group: Group) -> str:
        net = Rechecked()
        buckets = Buckets(group, list(net.named_parameters()), tail=1, cap=TINY)
        try:
            for times in [1] * WATCHED_STEPS + [1, 2]:
                one_step(buckets, [lambda times=times: net.loss(batch(group.rank), times).backward()], torch.zeros(1))
        except ConfigError as error:
            return str(error)
        return "no error"

    for said in run_ranks(2, fn):
        assert "'shared." in said and "arrived again" in said and "use_reentrant=False" in said


@pytest.mark.parametrize("cap", [TINY, None])
def test_a_sparse_gradient_is_refused(cap: int | None) -> None:
    net = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Linear(8, 8))
    buckets = Buckets(SoloGroup(), list(net.named_parameters()), tail=1, cap=cap)
    with pytest.raises(ConfigError, match=r"'0.weight' has a sparse gradient; .*sparse=False"):
        one_step(buckets, [lambda: net(torch.tensor([1, 2])).sum().backward()], torch.zeros(1))


def test_digests_tell_layouts_apart() -> None:
    def digest(net: nn.Module, tail: int = 0, cap: int | None = SMALL) -> bytes:
        return Buckets(SoloGroup(), list(net.named_parameters()), tail=tail, cap=cap).digest

    assert digest(deep()) == digest(deep())
    others = [
        digest(deep(4)),
        digest(deep(width=4)),
        digest(deep(dtype=torch.float64)),
        digest(deep(), tail=1),
        digest(deep(), cap=TINY),
        digest(nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))),
    ]
    assert len({digest(deep()), *others}) == 1 + len(others)


def test_closed_buckets_leave_gradients_alone() -> None:
    net = deep()
    buckets = Buckets(SoloGroup(), list(net.named_parameters()), tail=1, cap=TINY)
    for _ in range(WATCHED_STEPS):
        one_step(buckets, [lambda: net(batch(0)).sum().backward()], torch.zeros(1))
    buckets.open()
    buckets.arm()
    assert hooked(net)
    buckets.close()
    assert not hooked(net)
    log: list[str] = []
    buckets._group = Watched(SoloGroup(), log)
    net(batch(0)).sum().backward()
    assert log == []


# -- measured ----------------------------------------------------------------------------------------------------------


def large(layers: int = 4, width: int = 384) -> nn.Sequential:
    """Layers of 0.56 MB, more than the smallest cap."""
    return deep(layers, width)


def test_buckets_are_settled_by_measurement_and_all_members_agree() -> None:
    def fn(group: Group) -> list[Any]:
        net = large()
        buckets = Buckets(group, list(net.named_parameters()), tail=2)
        seen = []
        for step in range(STEPS_TO_SETTLE + 1):
            inputs = batch(10 * step + group.rank, 384)
            one_step(buckets, [lambda x=inputs: net(x).square().sum().backward()], torch.ones(2))
            seen.append(None if buckets.settled is None else list(buckets.settled))
        return [seen, buckets.digest, grads(net)]

    values = run_ranks(2, fn)
    losses = [lambda net, seed=10 * STEPS_TO_SETTLE + rank: net(batch(seed, 384)).square().sum() for rank in (0, 1)]
    expected = plain_sum(large, losses)
    for seen, digest, found in values:
        assert seen[:WATCHED_STEPS] == [None] * WATCHED_STEPS
        settled = Settled(*seen[-1])
        assert 0.0 < settled.latency < 10.0 and settled.bandwidth > 1e4
        assert sum(settled.buckets) == sum(param.nbytes for param in large().parameters())
        assert (seen, digest) == (values[0][0], values[0][1])
        assert_close(found, expected)


@pytest.mark.parametrize("cap", [256 << 10, 1 << 20, UNDIVIDED])
def test_member_0_alone_decides(monkeypatch: pytest.MonkeyPatch, cap: int) -> None:
    def fn(group: Group) -> list[Any]:
        chosen = Choice(cap, close=False) if group.rank == 0 else Choice(512 << 10, close=True)
        monkeypatch.setattr("shoal.comm.buckets.choose", lambda *args, **named: chosen)
        log: list[str] = []
        net = large()
        buckets = Buckets(Watched(group, log), list(net.named_parameters()), tail=1)
        for _ in range(WATCHED_STEPS + 1):
            log.clear()
            one_step(buckets, [lambda: net(batch(group.rank, 384)).square().sum().backward()], torch.ones(1))
        assert buckets.settled is not None
        return [log, buckets.settled.buckets, hooked(net), grads(net)]

    weight, bias = 4 * 384 * 384, 4 * 384
    # at 256 KB a weight is summed in three parts; biases wait for what arrives beside them
    expected = plain_sum(large, [lambda net, seed=rank: net(batch(seed, 384)).square().sum() for rank in range(2)])
    for log, sizes, watched, found in run_ranks(2, fn):
        assert sum(sizes) == 4 * (weight + bias)
        if cap == UNDIVIDED:
            assert len(sizes) == 1 and len(log) == 1 and not watched
        elif cap == 1 << 20:
            assert len(sizes) == len(log) == 4 and watched
        else:
            assert sizes.count(weight) == 4 and len(log) == len(sizes) + 2 * 4 and watched
        assert_close(found, expected)


@pytest.mark.parametrize("better", [True, False])
def test_a_close_call_is_tried_and_member_0_judges(monkeypatch: pytest.MonkeyPatch, better: bool) -> None:
    def fn(group: Group) -> list[Any]:
        monkeypatch.setattr("shoal.comm.buckets.choose", lambda *args, **named: Choice(1 << 20, close=True))
        seconds = 0.0 if better == (group.rank == 0) else 1e9
        monkeypatch.setattr(Trial, "seconds", seconds)
        log: list[str] = []
        net = large()
        buckets = Buckets(Watched(group, log), list(net.named_parameters()), tail=1)
        seen = []
        for _ in range(STEPS_TO_SETTLE + 1):
            log.clear()
            one_step(buckets, [lambda: net(batch(group.rank, 384)).square().sum().backward()], torch.ones(1))
            seen.append([len(log), buckets.settled is not None])
        return [seen, hooked(net), grads(net)]

    expected = plain_sum(large, [lambda net, seed=rank: net(batch(seed, 384)).square().sum() for rank in range(2)])
    for seen, watched, found in run_ranks(2, fn):
        assert seen[:WATCHED_STEPS] == [[1, False]] * WATCHED_STEPS
        assert seen[WATCHED_STEPS:STEPS_TO_SETTLE] == [[4, False]] * TRIED_STEPS
        assert seen[-1] == [4 if better else 1, True] and watched == better
        assert_close(found, expected)


def test_a_small_model_has_one_bucket_and_no_hooks() -> None:
    net = deep()
    buckets = Buckets(SoloGroup(), list(net.named_parameters()), tail=1)
    for _ in range(WATCHED_STEPS + 2):
        buckets.open()
        buckets.arm()
        assert not hooked(net)
        net(batch(0)).sum().backward()
        buckets.finish(torch.zeros(1))
    assert buckets.settled is not None and buckets.settled.buckets == [5 * 72 * 4]


def test_what_is_never_armed_is_never_hooked() -> None:
    net = large()
    buckets = Buckets(SoloGroup(), list(net.named_parameters()), tail=1, cap=256 << 10)
    for _ in range(WATCHED_STEPS + 2):
        buckets.open()
        net(batch(0, 384)).sum().backward()
        buckets.finish(torch.zeros(1))
        assert not hooked(net)
    assert buckets.settled is not None and len(buckets.settled.buckets) > 4


class Asked(Watched):
    """A group that writes down what else it is asked for."""

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._log.append(f"buffer of {dtype}")
        return self._group.buffer(numel, dtype, device)

    def broadcast(self, buffer: Tensor, kind: str) -> None:
        self._log.append(f"{kind} told")
        self._group.broadcast(buffer, kind)

    def gather(self, buffer: Tensor, kind: str) -> Tensor:
        self._log.append(f"{kind} gathered")
        return self._group.gather(buffer, kind)


def test_one_buffer_per_dtype_serves_all_layouts() -> None:
    log: list[str] = []
    net = nn.ModuleList(nn.Linear(8, 8, dtype=kind) for kind in (torch.float32, torch.float64, torch.float32))
    buckets = Buckets(Asked(SoloGroup(), log), list(net.named_parameters()), tail=0, cap=TINY)
    assert log == [], "members whose models differ must find out before they share memory"
    for tail in (0, 3, 900, 17):
        buckets.resize_tail(tail)
        loss = torch.stack([layer(batch(0, dtype=layer.weight.dtype)).sum().double() for layer in net])
        one_step(buckets, [lambda loss=loss: loss.sum().backward()], torch.zeros(tail))
    assert sorted(entry for entry in log if entry.startswith("buffer")) == [
        "buffer of torch.float32",
        "buffer of torch.float64",
    ]
    assert {entry for entry in log if "told" in entry or "gathered" in entry} == {"control told", "control gathered"}
    buckets.resize_tail(10_000)
    buckets.open()
    assert log.count("buffer of torch.float32") == 2


def test_parts_of_a_bucket_do_not_overlap_and_begin_at_lines() -> None:
    log: list[str] = []
    net = deep(width=13)
    buckets = Buckets(Watched(SoloGroup(), log), list(net.named_parameters()), tail=5, cap=TINY)
    for _ in range(WATCHED_STEPS + 1):
        one_step(buckets, [lambda: net(batch(0, 13)).sum().backward()], torch.arange(5.0))
    parts = sorted((part.data_ptr(), part.nbytes) for bucket in buckets._buckets for part in bucket.summed)
    assert len(parts) > 2 * 5 and sum(size for _, size in parts) == 4 * (5 * 13 * 14 + 5)
    assert all(start % 64 == parts[0][0] % 64 for start, _ in parts)
    assert all(start + size <= after for (start, size), (after, _) in pairwise(parts))


def test_a_gradient_in_another_order_of_memory_is_whole() -> None:
    def make() -> nn.Module:
        torch.manual_seed(5)
        return nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)

    x = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(6))
    net = make()
    buckets = Buckets(SoloGroup(), list(net.named_parameters()), tail=1, cap=TINY)
    for _ in range(WATCHED_STEPS + 1):
        one_step(buckets, [lambda: net(x).square().sum().backward()], torch.zeros(1))
        assert_close(grads(net), plain_sum(make, [lambda net: net(x).square().sum()]))


class Misheard(Watched):
    """A group whose member 1 hears the last thing that it is told wrongly."""

    def broadcast(self, buffer: Tensor, kind: str) -> None:
        self._group.broadcast(buffer, kind)
        if self.rank == 1 and buffer.numel() > 2:
            buffer[1:3] = buffer[1:3].flip(0)


def test_members_that_do_not_agree_raise() -> None:
    def fn(group: Group) -> str:
        net = deep()
        buckets = Buckets(Misheard(group, []), list(net.named_parameters()), tail=1, cap=TINY)
        try:
            for _ in range(WATCHED_STEPS + 1):
                one_step(buckets, [lambda: net(batch(0)).sum().backward()], torch.zeros(1))
        except GroupError as error:
            return str(error)
        return "no error"

    for said in run_ranks(2, fn):
        assert "the buckets of worker 1 are not those of worker 0" in said and "same model" in said
