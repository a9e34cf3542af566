"""Parts of the gradients that leave while backward goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.comm.codecs.memory import RESIDUAL
from shoal.core.errors import ConfigError, GroupError
from shoal.core.spec import AnyCodec, Int8, OneBit
from shoal.syncs import encoded
from shoal.syncs.allreduce import Weighing
from shoal.syncs.encoded import EncodedExchange
from shoal.syncs.encoding import Encoding
from shoal.syncs.leaving import WATCHED, Leaving
from shoal.testing.fake_group import FakeGroup, run_members

LAYERS, WIDTH = 6, 40


# ---- when


class Steps:
    """A chain of layers, two of them in each part, and what left in each step."""

    def __init__(self) -> None:
        self.params = [nn.Parameter(torch.ones(1)) for _ in range(6)]
        named = [(f"layer {number}", param) for number, param in enumerate(self.params)]
        self.log: list[int] = []
        self.leaving = Leaving([named[:2], named[2:4], named[4:]], self.leave)

    def leave(self, number: int) -> None:
        self.log.append(number)
        self.leaving.left = number + 1

    def step(self, order: Sequence[int]) -> list[int]:
        """The parts that leave in a step in which gradients arrive in this order."""
        self.log.clear()
        self.leaving.open()
        self.leaving.arm()
        for number in order:
            self.params[number].sum().backward()  # type: ignore[no-untyped-call]
        self.leaving.stop()
        return list(self.log)

    def watched(self, order: Sequence[int] = range(6)) -> Steps:
        for _ in range(WATCHED):
            assert self.step(order) == []
        return self


@pytest.mark.parametrize(
    ("order", "wanted"),
    [
        (range(6), [0, 1]),
        ([5, 4, 1, 0, 3, 2], [0, 1]),
        # what is complete before those ahead of it waits for them
        ([2, 3, 0, 1], [0, 1]),
        ([2, 3, 0], []),
        ([0, 1, 2], [0]),
        ([], []),
    ],
    ids=str,
)
def test_parts_leave_in_their_order_once_they_are_complete(order: Sequence[int], wanted: list[int]) -> None:
    steps = Steps().watched()
    assert steps.step(order) == wanted
    assert steps.step(range(6)) == [0, 1], "a step has nothing from the one before"


def test_nothing_leaves_in_a_backward_that_is_not_the_last() -> None:
    steps = Steps().watched()
    assert steps.step(range(6)) == [0, 1]
    steps.log.clear()
    steps.leaving.open()
    for param in steps.params:
        param.sum().backward()  # type: ignore[no-untyped-call]
    assert not steps.log and steps.leaving.left == 0


def test_a_part_with_a_gradient_that_arrives_in_parts_itself_waits_for_the_end() -> None:
    steps = Steps().watched([0, 1, 2, 3, 2, 4, 5])
    assert steps.step([0, 1, 2, 3, 2, 4, 5]) == [0]


def test_one_that_arrives_again_after_it_was_sent_is_an_error() -> None:
    steps = Steps().watched()
    with pytest.raises(ConfigError, match="'layer 1' arrived again after it had been sent"):
        steps.step([0, 1, 1])


def test_what_is_frozen_when_hooks_are_made_is_missing_and_nothing_is_left_behind() -> None:
    steps = Steps()
    steps.params[2].requires_grad_(False)
    for _ in range(WATCHED):
        assert steps.step([0, 1, 3, 4, 5]) == []
    assert steps.step([0, 1, 3, 4, 5]) == [0]
    steps.leaving.close()
    assert not any(param._post_accumulate_grad_hooks for param in steps.params)


def test_no_hook_is_left_behind() -> None:
    steps = Steps().watched()
    steps.leaving.close()
    assert steps.step([]) == []
    for param in steps.params:
        assert param._post_accumulate_grad_hooks is None or len(param._post_accumulate_grad_hooks) <= 1
    steps.leaving.close()
    assert not any(param._post_accumulate_grad_hooks for param in steps.params)


# ---- the exchange


class Member:
    """A worker with a chain of linear layers, whose exchange has three parts."""

    def __init__(self, group: FakeGroup, codec: AnyCodec, make: Any = torch.optim.SGD) -> None:
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        random = torch.Generator().manual_seed(3)  # members are threads, which share torch's own
        for param in self.net.parameters():
            nn.init.normal_(param, std=0.2, generator=random)
        self.optimizer = make(self.net.parameters(), lr=1e-2)
        self.encoding = Encoding(codec, self.optimizer, list(self.net.named_parameters()))
        self.group = group
        self.exchange = EncodedExchange(group, self.encoding, seed=5, judged=False)
        self.calls: list[str] = []
        self.passed: Callable[[], None] = lambda: self.calls.append("part" if self.backwards else "end")
        self.backwards = False
        self.given = [torch.zeros_like(param) for param in self.net.parameters()]

    def step(self, step: int, *, arm: bool = True, weighted: bool = False, unused: int | None = None) -> list[Tensor]:
        self.group.account.departing.passed = self.passed  # type: ignore[method-assign]
        self.exchange.open(1, len(self.given), 1)
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + self.group.rank))
        for number, layer in enumerate(self.net):
            x = x if number == unused else layer(x).tanh()
        self.backwards = True
        if arm:
            self.exchange.arm(weighted=weighted)
        (x.square().sum() * (8.0 if weighted else 1.0)).backward()
        self.backwards = False
        for total, param in zip(self.given, self.net.parameters(), strict=True):
            if param.grad is not None:
                total += param.grad / (8.0 if weighted else 1.0)
        flags = torch.tensor([float(used) for used in self.exchange.used()])
        doubles = torch.tensor([64.0 / self.group.size], dtype=torch.float64)
        self.exchange.finish(torch.zeros(0), flags, Weighing(8, None) if weighted else None, doubles)
        found = [param.grad.clone() for param in self.net.parameters() if param.grad is not None]
        with self.exchange.applying():
            self.optimizer.step()
        return found


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoded, "LEAST_PART", 1000)


CODECS: list[AnyCodec] = [Int8(), Int8(rounding="stochastic"), OneBit(block=64)]


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_it_makes_no_difference_whether_parts_leave_early(codec: AnyCodec, make: Any) -> None:
    """Also not if they do on one member only, because it has no batch, or because a parameter is not used there."""

    def member(group: FakeGroup) -> tuple[list[list[Tensor]], list[list[Tensor]], list[str]]:
        early, late = Member(group, codec, make), Member(group, codec, make)
        results = ([], [])
        steps = 70 if make is torch.optim.AdamW and isinstance(codec, OneBit) else 12
        for step in range(steps):
            unused = 3 if group.rank == 1 and step % 3 == 1 else None
            results[0].append(early.step(step, arm=group.rank == 0 or step % 2 == 0, unused=unused))
            results[1].append(late.step(step, arm=False, unused=unused))
        variance = early.encoding.variance
        assert variance is None or variance.held
        assert set(late.calls) == {"end"}
        return *results, early.calls

    found = run_members(2, member)
    for early, late, calls in found:
        assert calls.count("part") > 4
        for one, two, first in zip(early, late, found[0][0], strict=True):
            assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(one, two, first, strict=True))


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_what_left_early_and_what_is_kept_are_all_there_was(codec: AnyCodec) -> None:
    def member(group: FakeGroup) -> tuple[Tensor, Tensor, Tensor]:
        one = Member(group, codec)
        applied = torch.zeros(one.encoding.count)
        for step in range(8):
            found = one.step(step)
            applied += torch.cat([grad.flatten() for grad in found if grad.dim() == 2])
        given = torch.cat([total.flatten() for total in one.given if total.dim() == 2])
        assert "part" in one.calls
        return given, applied, one.encoding.memory.parts()[RESIDUAL]

    found = run_members(3, member)
    given, kept = (sum((one[place] for one in found), torch.zeros(found[0][0].shape)) for place in (0, 2))
    torch.testing.assert_close(found[0][1] + kept, given, rtol=1e-4, atol=1e-4)


def test_encoding_during_backward_is_part_of_what_a_codec_costs() -> None:
    pause = 0.02

    def member(group: FakeGroup) -> tuple[int, list[float]]:
        one, costs = Member(group, Int8()), []
        left = 0

        def encode_for_long() -> None:
            nonlocal left
            if one.backwards:
                left += 1
                time.sleep(pause)  # stands for encoding

        one.passed = encode_for_long
        one.exchange._worth.end = lambda encoding, waiting: costs.append(encoding)  # type: ignore[method-assign]
        for step in range(5):
            one.step(step)
        return left, costs

    for left, costs in run_members(2, member):
        assert left > 2 and sum(costs) >= left * pause


def test_where_steps_weigh_nothing_leaves_early() -> None:
    """Also not on a member that has no batch, and so no loss with a weight, in any step."""

    def member(group: FakeGroup) -> list[str]:
        one = Member(group, Int8())
        for step in range(5):
            one.step(step, weighted=group.rank == 0 and step != 3, arm=group.rank == 0)
        return one.calls

    assert all(set(calls) == {"end"} for calls in run_members(2, member))


def test_a_loss_that_has_a_weight_all_of_a_sudden_is_refused() -> None:
    def member(group: FakeGroup) -> None:
        one = Member(group, Int8())
        for step in range(4):
            one.step(step)
        with pytest.raises(
            ConfigError, match=r"the loss is \(sum, weight\) in this step and was a mean in those before"
        ):
            one.step(4, weighted=True)

    run_members(2, member)


def test_small_vectors_groups_that_stand_still_and_other_sums_go_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def calls(codec: AnyCodec, *, progresses: bool = True) -> list[str]:
        def member(group: FakeGroup) -> list[str]:
            group.progresses = progresses
            one = Member(group, codec)
            for step in range(5):
                one.step(step)
            return one.calls

        return run_members(2, member)[0]

    assert "part" in calls(Int8())
    assert "part" not in calls(Int8(lossless="zstd"))
    assert "part" not in calls(Int8(), progresses=False)
    monkeypatch.setattr(encoded, "LEAST_PART", 1 << 19)
    assert "part" not in calls(Int8())


def test_a_step_that_broke_in_the_middle_is_done_again_as_if_it_had_not_begun() -> None:
    """The group breaks when a part has left and another one is about to; then the same step over a new one."""

    def member(group: FakeGroup) -> tuple[list[Tensor], list[Tensor]]:
        calm, one = Member(group, OneBit(block=64)), Member(group, OneBit(block=64))
        for step in range(4):
            calm.step(step)
            one.step(step)
        before = len(one.calls)

        def break_later() -> None:
            one.calls.append("part")
            if len(one.calls) == before + 2:
                raise GroupError("on purpose")

        one.passed = break_later
        with pytest.raises(GroupError):
            one.step(4)
        for each in (calm, one):
            each.exchange.close()
            each.exchange = EncodedExchange(group, each.encoding, seed=5, judged=False)
        return calm.step(4), one.step(4)

    for wanted, found in run_members(2, member):
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_layers_that_backward_enters_several_times_are_summed_whole() -> None:
    """Reentrant checkpointing of a layer that is used twice: its gradient arrives in two parts."""

    class Twice(Member):
        def step(self, step: int, **_: Any) -> list[Tensor]:
            self.exchange.open(1, 1 + len(self.given))
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).requires_grad_()
            for layer in [*self.net, self.net[-1]]:
                x = checkpoint(layer, x, use_reentrant=True).tanh()
            self.exchange.arm()
            x.square().sum().backward()
            wanted = [param.grad.clone() * self.group.size for param in self.net.parameters() if param.grad is not None]
            flags = torch.tensor([float(used) for used in self.exchange.used()])
            self.exchange.finish(torch.ones(1), flags)
            for param, grad in zip(self.net.parameters(), wanted, strict=True):
                assert param.grad is not None
                torch.testing.assert_close(param.grad, grad, rtol=0, atol=0.02 * float(grad.abs().max()) + 1e-6)
            return wanted

    def member(group: FakeGroup) -> None:
        one = Twice(group, Int8(feedback=False))
        for step in range(5):
            one.step(step)

    run_members(2, member)
