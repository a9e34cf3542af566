"""The exchange of gradients that travel encoded, over groups inside one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.codecs.memory import RESIDUAL, Memory
from shoal.comm.group import Group, SoloGroup
from shoal.comm.plan import Settled
from shoal.core.errors import ConfigError, GroupError
from shoal.core.spec import AnyCodec, Bf16, Fp16, Int8, NoCodec, OneBit, PowerSGD, TopK
from shoal.core.traffic import GRADIENT
from shoal.syncs.allreduce import Weighing
from shoal.syncs.encoded import SQUARES, EncodedExchange, share_common
from shoal.syncs.encoding import Encoding, is_small
from shoal.testing.fake_group import FakeGroup, run_members

SHAPES = {"first": (48, 40), "bias": (40,), "second": (64, 33), "scale": ()}
LARGE = ("first", "second")
LOSSY: list[AnyCodec] = [
    Fp16(feedback=True),
    Bf16(feedback=True),
    Int8(),
    Int8(rounding="stochastic"),
    TopK(density=0.05),
    PowerSGD(rank=2),
    OneBit(block=64),
]
KEPT = [codec for codec in LOSSY if not isinstance(codec, Fp16 | Bf16)]


def drawn(step: int, member: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + 7 * member + len(shape)))


class Member:
    """One worker: its parameters, its optimizer, and an exchange over its group."""

    def __init__(
        self,
        group: Group,
        codec: AnyCodec,
        make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        dtypes: Mapping[str, torch.dtype] | None = None,
        **options: Any,
    ) -> None:
        dtypes = dtypes or {}
        self.params = {
            name: nn.Parameter(drawn(99, 0, shape).to(dtypes.get(name, torch.float32)))
            for name, shape in SHAPES.items()
        }
        self.optimizer = make(list(self.params.values()), **{"lr": 0.1, **options})
        self.encoding = Encoding(codec, self.optimizer, list(self.params.items()))
        self.meet(group)

    def meet(self, group: Group) -> None:
        """Have a new exchange, as after a change of members."""
        self.group = group
        self.exchange = EncodedExchange(group, self.encoding, seed=5)

    def gradients(self, step: int) -> dict[str, Tensor]:
        return {name: drawn(step, self.group.rank, shape) for name, shape in SHAPES.items()}

    def sum(self, step: int, unused: Sequence[str] = ()) -> dict[str, Tensor]:
        """An exchange of a step's gradients; what came of them."""
        self.exchange.open(1, 3)
        for name, grad in self.gradients(step).items():
            self.params[name].grad = None if name in unused else grad.to(self.params[name].dtype)
        sums, flags = self.exchange.finish(torch.tensor([1.0, float(self.group.rank)]), torch.tensor([2.0]))
        size = self.group.size
        assert sums.tolist() == [size, size * (size - 1) / 2] and flags.tolist() == [2.0 * size]
        found = {}
        for name, param in self.params.items():
            assert param.grad is not None
            found[name] = param.grad.clone()
        return found

    def commit(self, scale: float = 1.0) -> None:
        with self.exchange.applying(scale):
            self.optimizer.step()

    def step(self, step: int) -> dict[str, Tensor]:
        found = self.sum(step)
        self.commit()
        return found

    def kept(self) -> dict[str, Tensor]:
        """What is still to be sent, by parameter."""
        parts = self.encoding.memory.parts()
        found = self.encoding.keyed({RESIDUAL: parts.get(RESIDUAL, torch.zeros(self.encoding.count))})
        return {name: value.clone() for name, value in found[RESIDUAL].items()}


def total(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([part.double() for part in parts]).sum(0)


def equal(found: Sequence[Mapping[str, Tensor]]) -> bool:
    return all(torch.equal(one[name], found[0][name]) for one in found for name in SHAPES)


def test_what_is_small() -> None:
    assert [is_small(torch.empty(shape)) for shape in ((31, 33), (32, 32), (65535,), (65536,), ())] == [
        *(True, False, True, False, True)
    ]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_without_loss_the_sum_is_the_plain_sum(size: int) -> None:
    def member(group: FakeGroup) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        one = Member(group, NoCodec())
        return one.gradients(0), one.sum(0)

    given, found = zip(*run_members(size, member), strict=True)
    assert equal(found)
    for name in SHAPES:
        plain = given[0][name].clone()
        for other in given[1:]:
            plain += other[name]
        assert torch.equal(found[0][name], plain)


def test_int8_is_off_by_half_a_scale_of_each_time_it_encodes() -> None:
    def member(group: FakeGroup) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        one = Member(group, Int8())
        return one.gradients(0), one.sum(0)

    given, found = zip(*run_members(3, member), strict=True)
    assert equal(found)
    for name in LARGE:
        truth = total([one[name] for one in given])
        granted = sum(float(one[name].abs().max()) for one in given) / 254 + 1.05 * float(truth.abs().max()) / 254
        off = float((found[0][name] - truth).abs().max())
        assert 0 < off <= granted


@pytest.mark.parametrize("codec", LOSSY, ids=str)
def test_small_tensors_are_exact_and_members_have_the_same_bits(codec: AnyCodec) -> None:
    def member(group: FakeGroup) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        one = Member(group, codec)
        one.step(0)
        return one.gradients(1), one.sum(1)

    given, found = zip(*run_members(3, member), strict=True)
    assert equal(found)
    for name in ("bias", "scale"):
        torch.testing.assert_close(found[0][name].double(), total([one[name] for one in given]))


@pytest.mark.parametrize("codec", KEPT, ids=str)
def test_what_is_applied_and_what_is_kept_are_all_there_was(codec: AnyCodec) -> None:
    steps = 5

    def member(group: FakeGroup) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], dict[str, Tensor]]:
        one = Member(group, codec)
        found = [one.step(step) for step in range(steps)]
        return [one.gradients(step) for step in range(steps)], found, one.kept()

    given, found, kept = zip(*run_members(3, member), strict=True)
    for name in LARGE:
        there = total([grads[name] for one in given for grads in one])
        applied = total([sums[name] for sums in found[0]])
        rest = total([one[name] for one in kept])
        assert float(rest.norm()) > 1e-4 * float(there.norm())
        torch.testing.assert_close(applied + rest, there, rtol=1e-3, atol=1e-3)


def test_parameters_without_gradients() -> None:
    """On one member they count as zeros; it says which it has, in the order in which it was given them."""

    def member(group: FakeGroup) -> tuple[dict[str, Tensor], dict[str, Tensor], list[bool]]:
        one = Member(group, NoCodec())
        unused = ["second", "scale"] if group.rank else ["first"]
        one.exchange.open(1, 3)
        for name, grad in one.gradients(0).items():
            one.params[name].grad = None if name in unused else grad
        used = one.exchange.used()
        return one.gradients(0), one.sum(0, unused), used

    (zero, found, used), (first, again, other) = run_members(2, member)
    assert used == [False, True, True, True] and other == [True, True, False, False]
    assert torch.equal(found["second"], zero["second"]) and torch.equal(found["scale"], zero["scale"])
    assert torch.equal(found["first"], first["first"])
    assert torch.equal(found["bias"], zero["bias"] + first["bias"])
    assert equal([found, again])


@pytest.mark.parametrize("codec", [Int8(), OneBit(block=64), TopK(density=0.05), PowerSGD(rank=2)], ids=str)
def test_what_is_kept_of_a_parameter_that_nobody_uses_in_a_step_is_kept_on(codec: AnyCodec) -> None:
    """Its sum is not applied in such a step, so nothing of it has been sent."""

    def member(group: FakeGroup) -> tuple[Tensor, Tensor, Tensor]:
        one = Member(group, codec)
        one.step(0)
        before = one.kept()
        one.sum(1, ["second"])
        one.params["second"].grad = None  # as the step does if the flags say that nobody has one
        one.commit()
        return before["second"], one.kept()["second"], one.kept()["first"] - before["first"]

    before, after, other = (total(parts) for parts in zip(*run_members(2, member), strict=True))
    assert float(before.abs().max()) > 0 and float(other.abs().max()) > 0
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("codec", [NoCodec(), Int8(), PowerSGD(rank=2), OneBit(block=64)], ids=str)
def test_gradients_have_the_dtype_of_their_parameters(codec: AnyCodec) -> None:
    dtypes = {"first": torch.bfloat16, "bias": torch.float64, "second": torch.float64, "scale": torch.bfloat16}

    def member(group: FakeGroup) -> dict[str, Tensor]:
        one = Member(group, codec, dtypes=dtypes)
        one.step(0)
        return one.step(1)

    found = run_members(2, member)
    assert equal(found)
    assert {name: grad.dtype for name, grad in found[0].items()} == dtypes
    if codec == NoCodec():
        torch.testing.assert_close(
            found[0]["second"].float(), drawn(1, 0, SHAPES["second"]) + drawn(1, 1, SHAPES["second"])
        )


@pytest.mark.parametrize("codec", [NoCodec(), TopK(density=1.0, threshold="exact"), PowerSGD(rank=40)], ids=str)
def test_what_one_codec_has_kept_another_one_sends(codec: AnyCodec) -> None:
    """Also what the second of two phases has kept, which is of a part of the numbers only."""

    def member(group: FakeGroup) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        one = Member(group, Int8())
        first, second = one.exchange, EncodedExchange(group, one.encoding, codec=codec, judged=False)
        one.step(0)
        one.exchange = second
        before = one.kept()
        found = one.step(1)
        assert one.exchange is not first
        return one.gradients(1), before, found, one.kept()

    given, before, found, after = zip(*run_members(2, member), strict=True)
    for name in LARGE:
        assert all(float(one[name].abs().max()) > 0 for one in before)
        # topk sends numbers of 16 bits
        assert all(
            float(new[name].norm()) < 0.1 * float(old[name].norm()) for old, new in zip(before, after, strict=True)
        )
        truth = total([one[name] for one in (*given, *before)])
        rest = total([one[name] for one in after])
        torch.testing.assert_close(found[0][name] + rest, truth, rtol=1e-4, atol=1e-4)


def test_a_sparse_gradient_is_refused_by_name() -> None:
    one = Member(SoloGroup(), Int8())
    one.exchange.open(1, 1)
    one.params["second"].grad = torch.zeros(SHAPES["second"]).to_sparse()
    with pytest.raises(ConfigError, match="second"):
        one.exchange.finish(torch.zeros(1), torch.zeros(0))


# -- done again --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", LOSSY, ids=str)
def test_a_step_that_is_done_again_gives_the_same_bits(codec: AnyCodec) -> None:
    def member(group: FakeGroup) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], dict[str, Tensor]]:
        calm = Member(group, codec)
        once = [calm.step(step) for step in range(4)]
        one = Member(group, codec)
        found = []
        for step in range(4):
            found.append(one.sum(step))
            if step == 0:  # where chunks keep their owners nothing changes when members meet again
                assert equal([found[0], one.sum(step)])
            one.sum(step + 50)  # a step that is given up
            again = one.sum(step)
            assert equal([found[-1], again]), f"step {step}"
            one.commit()
        assert all(equal(pair) for pair in zip(once, found, strict=True))
        return found, calm.kept(), one.kept()

    for _, calm, again in run_members(3, member):
        assert all(torch.equal(calm[name], again[name]) for name in LARGE)


@pytest.mark.parametrize("codec", LOSSY, ids=str)
def test_a_new_exchange_does_a_step_that_did_not_count_again(codec: AnyCodec) -> None:
    def member(group: FakeGroup) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        one = Member(group, codec)
        one.step(0)
        one.meet(group)
        first = one.sum(1)
        one.meet(group)
        again = one.sum(1)
        before = {name: param.detach().clone() for name, param in one.params.items()}
        assert all(torch.equal(before[name], one.params[name]) for name in SHAPES)
        return first, again, one.kept()

    found = run_members(3, member)
    assert equal([one for first, again, _ in found for one in (first, again)])


def test_who_was_overtaken_counts_its_step_and_nothing_is_lost() -> None:
    """Others could apply it with all that this member gave; it takes their weights, and commits what it kept."""

    def member(group: FakeGroup) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        one = Member(group, Int8())
        one.step(0)
        found = one.sum(1)
        if group.rank == 1:
            one.encoding.memory.commit()
            one.encoding.memory.commit()  # twice is once
            one.encoding.steps += 1
        else:
            one.commit()
        kept = one.kept()
        one.meet(group)
        return found, kept, one.sum(2)

    def calm(group: FakeGroup) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        one = Member(group, Int8())
        one.step(0)
        one.step(1)
        kept = one.kept()
        one.meet(group)
        return kept, one.sum(2)

    for (_, kept, after), (calm_kept, calm_after) in zip(run_members(3, member), run_members(3, calm), strict=True):
        assert all(torch.equal(kept[name], calm_kept[name]) for name in LARGE)
        assert equal([after, calm_after])


class Breaking:
    """A group whose operation of a given number breaks on this member, when all others have its part."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.breaks_at = -1
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.group, name)
        if name not in ("sum", "gather", "swap", "start_swap", "start_gather"):
            return found

        def operation(*given: Any) -> Any:
            result = found(*given)
            self.count += 1
            if self.count == self.breaks_at:
                if name == "sum":
                    result.wait()
                elif name.startswith("start_"):
                    result[1].wait()
                raise GroupError("revoked on purpose")
            return result

        return operation


@pytest.mark.parametrize("before", [Int8(), PowerSGD(rank=2)], ids=str)
@pytest.mark.parametrize("codec", [NoCodec(), PowerSGD(rank=2), OneBit(block=64), Int8()], ids=str)
def test_what_is_kept_is_complete_before_the_last_operation_of_a_step(codec: AnyCodec, before: AnyCodec) -> None:
    """If that breaks on one member only, others apply the step; it is overtaken, and commits what it has."""

    def member(group: FakeGroup) -> tuple[dict[str, Tensor], dict[str, Tensor] | None, dict[str, Tensor], int]:
        one = Member(group, before)
        given = {name: torch.zeros(SHAPES[name]) for name in LARGE}
        breaking = Breaking(group)
        last = EncodedExchange(cast(Group, breaking), one.encoding, codec=codec, judged=False)
        applied = {name: torch.zeros(SHAPES[name]) for name in LARGE}
        for step in range(4):
            if step == 3:
                one.exchange, breaking.count = last, 0
                breaking.breaks_at = operations if group.rank else -1
            for name in LARGE:
                given[name] += one.gradients(step)[name]
            try:
                found = one.step(step)
            except GroupError:
                one.encoding.memory.commit()
                return given, None, one.kept(), breaking.count
            for name in LARGE:
                applied[name] += found[name]
        return given, applied, one.kept(), breaking.count

    operations = -1
    operations = run_members(2, member)[0][-1]
    assert operations > 1
    (given, applied, kept, _), (others, broken, rest, _) = run_members(2, member)
    assert applied is not None and broken is None
    for name in LARGE:
        there = given[name] + others[name]
        torch.testing.assert_close(applied[name] + kept[name] + rest[name], there, rtol=0, atol=1e-3)


# -- members that come and go ------------------------------------------------------------------------------------------


def test_a_group_of_one_sends_what_was_kept_as_it_is() -> None:
    for codec in KEPT:
        kept = run_members(2, lambda group, codec=codec: _stepped(group, codec))[0]
        rest = kept.kept()
        kept.meet(SoloGroup())
        found = kept.step(3)
        for name in LARGE:
            torch.testing.assert_close(found[name], kept.gradients(3)[name] + rest[name])
            assert float(kept.kept()[name].abs().max()) == 0.0
        assert torch.equal(kept.step(4)["first"], kept.gradients(4)["first"])


def _stepped(group: FakeGroup, codec: AnyCodec) -> Member:
    one = Member(group, codec)
    one.step(0)
    one.step(1)
    return one


def test_who_comes_late_gets_what_all_share() -> None:
    def member(group: FakeGroup) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        memory = Memory(10, torch.device("cpu"))
        if group.rank:  # of two that have some the first one's count
            for name, value in (("factors", torch.arange(6.0).view(2, 3)), ("step", torch.tensor([7]))):
                memory.shared(name, lambda value=value: value * group.rank)  # type: ignore[misc]
        mine = dict(memory.common())
        share_common(group, memory)
        return mine, memory.common()

    found = run_members(3, member)
    assert found[0][0] == {}
    for _, common in found:
        assert common["factors"].flatten().tolist() == list(range(6)) and common["factors"].dtype == torch.float32
        assert common["step"].tolist() == [7] and common["step"].dtype == torch.int64


def test_who_joins_powersgd_ends_with_the_same_bits() -> None:
    def member(group: FakeGroup) -> list[dict[str, Tensor]]:
        if group.rank == 2:
            one = Member(group, PowerSGD(rank=2))
        else:
            one = veterans[group.rank]
            one.meet(group)
        one.encoding.steps = 2
        return [one.step(step) for step in (2, 3)]

    veterans = run_members(2, lambda group: _stepped(group, PowerSGD(rank=2)))
    factors = veterans[0].encoding.memory.common()["powersgd rank 2"].clone()
    found = run_members(3, member)
    assert all(equal(steps) for steps in zip(*found, strict=True))
    assert not torch.equal(veterans[0].encoding.memory.common()["powersgd rank 2"], factors)


@pytest.mark.parametrize("late", [{0}, {1}, {0, 1}], ids=str)
def test_who_comes_late_measures_nothing_that_the_others_know(late: set[int]) -> None:
    """Members that differ in what they know must all do the same, or they wait for each other for ever."""

    def member(group: FakeGroup) -> Settled | None:
        one = Member(group, Int8())
        if group.rank not in late:
            one.encoding.settled = Settled(0.0, 0.0, [], note="known")
        one.meet(group)
        for step in range(8):
            one.step(step)
        return one.encoding.settled

    found = run_members(3, member, seconds=10.0)
    assert found[0] is not None and found[0].note == "known" and all(told == found[0] for told in found)


def test_who_comes_late_begins_to_measure_with_the_others() -> None:
    """They had timed some steps of their own before: those are of another group."""

    def member(group: FakeGroup) -> Settled | None:
        if group.rank == 2:
            one = Member(group, Int8())
        else:
            one = veterans[group.rank]
            one.meet(group)
        told = []
        for step in range(8):
            one.step(step)
            told.append(one.encoding.settled)
        assert told[3] is None and told[4] is not None
        return told[-1]

    def before(group: FakeGroup) -> Member:
        one = Member(group, Int8())
        for step in range(3):
            one.step(step)
        return one

    veterans = run_members(2, before)
    found = run_members(3, member, seconds=10.0)
    assert found[0] is not None and all(told == found[0] for told in found)


def test_steps_of_the_warm_up_are_not_those_that_are_judged() -> None:
    """They travel by another codec than the one that was asked for."""

    def member(group: FakeGroup) -> list[tuple[bool, Settled | None]]:
        one = SteadyMember(group, OneBit(block=64), torch.optim.AdamW)
        variance, told = one.encoding.variance, []
        assert variance is not None
        for step in range(24):
            held = variance.held
            one.step(step)
            told.append((held, one.encoding.settled))
        return told

    for told in run_members(2, member):
        held = [settled for held, settled in told if held]
        assert len(held) > 5 and len(told) - len(held) > 5
        assert all(settled is None for was, settled in told if not was)
        # four are timed, and the one after them begins with judging
        assert held[:4] == [None] * 4 and held[4] is not None and held[4].codec == "onebit"


# -- optimizers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("wd", [0.0, 0.1])
def test_momentum_before_numbers_are_chosen_is_sgds_where_all_are_sent(size: int, wd: float) -> None:
    """Also of small tensors, whose gradients are summed as they are."""

    def member(group: FakeGroup, codec: AnyCodec) -> dict[str, Tensor]:
        one = Member(group, codec, momentum=0.9, weight_decay=wd)
        for step in range(4):
            one.step(step)
        assert one.optimizer.param_groups[0]["momentum"] == 0.9
        return {name: param.detach().clone() for name, param in one.params.items()}

    everything = TopK(density=1.0, threshold="exact", mask=False)
    found = run_members(size, lambda group: member(group, everything))
    plain = run_members(size, lambda group: member(group, NoCodec()))
    for name in SHAPES if not wd else ("bias", "scale"):
        torch.testing.assert_close(found[0][name], plain[0][name], rtol=1e-2, atol=1e-3)


STEADY = {"first": 0.5, "second": 2.0, "bias": 1.0, "scale": 1.0}


class SteadyMember(Member):
    """Its gradients have sizes that stay, so that Adam's variance is steady soon."""

    def gradients(self, step: int) -> dict[str, Tensor]:
        found = super().gradients(step)
        shared = {name: drawn(step, 50, shape).sign() for name, shape in SHAPES.items()}
        return {name: STEADY[name] * (shared[name] + 0.05 * grad) for name, grad in found.items()}


def sent_by(group: FakeGroup) -> dict[str, int]:
    return {flow.codec: flow.bytes for flow in group.account.now().flows if flow.kind == GRADIENT}


@pytest.mark.parametrize("codec", [OneBit(block=64), TopK(density=0.05), PowerSGD(rank=2)], ids=str)
def test_adam_is_warmed_up_with_int8_and_held_alike_on_all_members(codec: AnyCodec) -> None:
    def member(group: FakeGroup) -> tuple[list[int], list[dict[str, Tensor]], set[str]]:
        one = SteadyMember(group, codec, torch.optim.AdamW)
        variance = one.encoding.variance
        assert variance is not None
        held, weights, warm = [], [], set()
        for step in range(30):
            if not variance.held:
                warm = set(sent_by(group))
            one.step(step)
            held.append(variance.held_at)
            weights.append({name: param.detach().clone() for name, param in one.params.items()})
        assert set(sent_by(group)) == warm | {codec.name}
        return held, weights, warm

    found = run_members(2, member)
    held, _, warm = found[0]
    assert held == found[1][0] and held[9] == 0 and held[-1] > 10
    assert "int8" in warm and codec.name not in warm
    assert all(equal(weights) for weights in zip(*(weights for _, weights, _ in found), strict=True))


def test_with_powersgd_gradients_travel_and_are_not_gauged() -> None:
    """A gradient of rank two comes through; divided element by element it would be of more."""

    class Ranked(SteadyMember):
        def gradients(self, step: int) -> dict[str, Tensor]:
            found = super().gradients(step)
            found["first"] = drawn(7, 7, (48, 2)) @ drawn(7, 8, (2, 40))
            return found

    def member(group: FakeGroup) -> None:
        one = Ranked(group, PowerSGD(rank=2), torch.optim.AdamW)
        variance = one.encoding.variance
        assert variance is not None
        for step in range(70):
            one.step(step)
        assert variance.held and variance.fresh == 1.0
        for step in range(70, 76):
            found, wanted = one.step(step)["first"], 2 * one.gradients(step)["first"]
            error = float((found - wanted).norm() / wanted.norm())
            assert error < 0.05

    run_members(2, member)


def test_a_new_exchange_counts_squares_from_there_on_and_renews_sooner() -> None:
    def member(group: FakeGroup) -> None:
        one = SteadyMember(group, OneBit(block=64), torch.optim.AdamW)
        variance = one.encoding.variance
        assert variance is not None
        for step in range(60):
            one.step(step)
        assert variance.held and one.encoding.memory.has(SQUARES)
        interval = variance.state()["interval"]
        one.meet(group)
        assert not one.encoding.memory.has(SQUARES)
        assert variance.state()["renewed"] == [60, 60] and variance.state()["interval"] == max(1, interval // 2)

    run_members(2, member)


def test_with_amsgrad_powersgd_leaves_the_variance_to_adam() -> None:
    param = nn.Parameter(torch.zeros(64, 32))
    optimizer = torch.optim.AdamW([param], amsgrad=True)
    assert Encoding(PowerSGD(), optimizer, [("weight", param)]).variance is None


def test_where_the_first_moment_travels_what_is_applied_and_kept_is_all_of_it() -> None:
    def member(group: FakeGroup) -> tuple[dict[str, Tensor], ...]:
        one = SteadyMember(group, OneBit(block=64), torch.optim.AdamW)
        variance = one.encoding.variance
        assert variance is not None
        for step in range(20):
            one.step(step)
        assert variance.held
        state = one.optimizer.state
        moments = {name: state[one.params[name]]["exp_avg"].clone() for name in LARGE}
        before = one.kept()
        one.step(20)
        after = {name: state[one.params[name]]["exp_avg"].clone() for name in LARGE}
        return one.gradients(20), moments, before, after, one.kept()

    given, moments, before, after, kept = zip(*run_members(2, member), strict=True)
    stays = 0.9 * (1 - 0.9**20) / (1 - 0.9**21)
    for name in LARGE:
        there = (1 - stays) * total([one[name] for one in given]) + stays * moments[0][name].double()
        there += total([one[name] for one in before])
        torch.testing.assert_close(after[0][name] + total([one[name] for one in kept]), there, rtol=1e-3, atol=1e-4)


def test_what_is_kept_is_in_units_of_the_first_moment_once_that_travels() -> None:
    def member(group: FakeGroup) -> None:
        one = SteadyMember(group, OneBit(block=64), torch.optim.AdamW)
        plain = SteadyMember(group, Int8(), torch.optim.AdamW)
        variance = one.encoding.variance
        assert variance is not None
        for step in range(40):
            assert equal([one.step(step), plain.step(step)])
            factor = variance.fresh if variance.held else 1.0
            for name in LARGE:
                torch.testing.assert_close(one.kept()[name], factor * plain.kept()[name])
            if variance.held:
                return
        raise AssertionError("it was not held")

    run_members(2, member)


def test_the_squares_of_own_gradients_are_counted_as_the_last_ones_were_applied_and_used_up_by_a_renewal() -> None:
    def member(group: FakeGroup) -> None:
        one = SteadyMember(group, OneBit(block=64), torch.optim.AdamW)
        variance = one.encoding.variance
        assert variance is not None
        step = 0
        while not variance.held:
            one.step(step)
            step += 1
        expected, renewals, scale = torch.zeros(one.encoding.count), 0, 1.0
        for later in range(step, step + 12):
            due = variance.due()
            renewals += due
            own = torch.cat([one.gradients(later)[name].flatten() for name in LARGE]).square()
            one.sum(later)
            one.sum(later)  # done again: it counts once
            one.commit(scale=0.5)
            expected = scale * own if due else expected + scale * own
            scale = 0.25
            torch.testing.assert_close(one.encoding.memory.parts()[SQUARES], expected)
        assert 0 < renewals < 12

    run_members(2, member)


# -- as a training does it ---------------------------------------------------------------------------------------------

WIDE = {"weight": (40, 32), "late": (36, 40)}
Gradients = Callable[[int, int, str], Tensor | None]


@cache
def noise(step: int, rank: int, name: str) -> Tensor:
    return torch.randn(WIDE[name], generator=torch.Generator().manual_seed(100 * step + 10 * rank + len(name)))


def trained(
    codec: AnyCodec,
    make: Callable[..., torch.optim.Optimizer],
    gradients: Gradients,
    steps: int,
    *,
    clip: float | None = None,
    weight: Callable[[int], float] | None = None,
    state: dict[str, dict[str, Tensor]] | None = None,
    **options: Any,
) -> list[dict[str, Tensor]]:
    """The weights after each step of two members, by name, which begin as zeros and have to be equal on both.

    `weight`: what all samples of a step weigh, of which there are 8. Into `state` goes what the first one's optimizer
    has at the end.
    """

    def member(group: FakeGroup) -> list[dict[str, Tensor]]:
        params = {name: nn.Parameter(torch.zeros(shape)) for name, shape in WIDE.items()}
        optimizer = make(list(params.values()), **options)
        exchange = EncodedExchange(group, Encoding(codec, optimizer, list(params.items())), seed=5, judged=False)
        log = []
        for step in range(steps):
            exchange.open(1, len(params), 1)
            own = 0.0 if weight is None else weight(step)
            for name, param in params.items():
                grad = gradients(step, group.rank, name)
                param.grad = grad if grad is None or weight is None else grad * (own / 8)
            weighing = None if weight is None else Weighing(8, None)
            flags = torch.tensor([float(used) for used in exchange.used()])
            doubles = torch.tensor([own / group.size], dtype=torch.float64)
            _, used = exchange.finish(torch.zeros(0), flags, weighing, doubles)
            for param, on in zip(params.values(), used.tolist(), strict=True):
                param.grad = param.grad if on else None
            scale = 1.0
            if clip is not None:
                norm = float(nn.utils.clip_grad_norm_(params.values(), clip))
                scale = min(1.0, clip / (norm + 1e-6))
            with exchange.applying(scale):
                optimizer.step()
            log.append({name: param.detach().clone() for name, param in params.items()})
        if state is not None and group.rank == 0:
            state.update((name, optimizer.state[param]) for name, param in params.items())
        return log

    first, second = run_members(2, member)
    assert all(torch.equal(one[name], two[name]) for one, two in zip(first, second, strict=True) for name in WIDE)
    return first


def moved(log: list[dict[str, Tensor]], name: str, start: int, stop: int) -> float:
    """How far its elements have moved between two steps, on average."""
    return float((log[stop][name] - log[start][name]).abs().mean())


@pytest.mark.parametrize(
    ("codec", "make"),
    [
        (OneBit(block=64), torch.optim.AdamW),
        (TopK(density=0.05, threshold="exact"), torch.optim.AdamW),
        (TopK(density=0.05, threshold="exact"), torch.optim.SGD),
        (Int8(), torch.optim.SGD),
        (PowerSGD(rank=2), torch.optim.SGD),
        (PowerSGD(rank=2), torch.optim.AdamW),
    ],
    ids=str,
)
def test_what_steps_weigh_changes_nothing(codec: AnyCodec, make: Any) -> None:
    """Gradients are sums over samples: those of a step that weighs 128 times more are as much larger."""

    def gradients(step: int, rank: int, name: str) -> Tensor:
        return 1 + 0.1 * noise(step, rank, name)

    steady = trained(codec, make, gradients, 24, weight=lambda step: 8.0, lr=1e-3)
    varying = trained(codec, make, gradients, 24, weight=lambda step: 1024.0 if step % 8 else 8.0, lr=1e-3)
    for one, two in zip(steady, varying, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in WIDE)


ALONG = noise(0, 0, "weight") / noise(0, 0, "weight").norm()


@cache
def along_a_spike(codec: AnyCodec, make: Any) -> Tensor:
    """How far a clipped gradient that is 10⁴ times larger than others moves the weights along it, after each step."""

    def towards(size: float) -> Tensor:
        def gradients(step: int, rank: int, name: str) -> Tensor:
            grad = noise(step, rank, name) / 64
            return grad + size * ALONG if step == 20 and name == "weight" else grad

        log = trained(codec, make, gradients, 55, clip=1.0, lr=1e-3 if make is torch.optim.Adam else 1e-2)
        return torch.stack([(weights["weight"] * ALONG).sum() for weights in log])

    return (towards(1e4) - towards(0.0)).abs()


@pytest.mark.parametrize(
    ("codec", "make", "most"),
    [
        (Int8(), torch.optim.Adam, 1.1),
        (OneBit(block=64), torch.optim.SGD, 2.0),
        (PowerSGD(rank=8), torch.optim.SGD, 2.0),
        (PowerSGD(rank=8), torch.optim.Adam, 2.0),
        (TopK(density=0.1, threshold="exact"), torch.optim.SGD, 2.0),
        (TopK(density=0.1, threshold="exact"), torch.optim.Adam, 2.0),
        (TopK(density=0.1, threshold="exact"), partial(torch.optim.SGD, momentum=0.9), 2.0),
        # here it is the first moment that is clipped, of which a clipped gradient is a tenth
        (OneBit(block=64), torch.optim.Adam, 10.0),
    ],
    ids=str,
)
def test_a_spike_that_is_clipped_does_not_live_on(codec: AnyCodec, make: Any, most: float) -> None:
    """What is not sent of it at once is clipped as what is."""
    plain, found = along_a_spike(NoCodec(), make), along_a_spike(codec, make)
    assert float(plain[:20].max()) == float(found[:20].max()) == 0.0 < float(plain[-1])
    assert float(found.max()) < most * float(plain.max())
    # by then a moment has forgotten it
    assert float((found[-1] - found[45]).abs()) < 0.5 * float(plain.max())


def test_with_powersgd_adams_variance_is_that_of_the_whole_gradients() -> None:
    """Two directions of a matrix of noise have a small part of its squares, or after a while those of many steps."""
    plain: dict[str, dict[str, Tensor]] = {}
    found: dict[str, dict[str, Tensor]] = {}
    for codec, state in ((NoCodec(), plain), (PowerSGD(rank=2), found)):
        trained(codec, torch.optim.Adam, noise, 120, state=state, lr=1e-3)
    for name in WIDE:
        mean, held = (float(state[name]["exp_avg_sq"].mean()) for state in (plain, found))
        assert held == pytest.approx(mean, rel=0.1)


@cache
def begins_late(codec: AnyCodec, begins: str, start: int) -> list[dict[str, Tensor]]:
    """One parameter has no gradients, or zeros, until long after the variance of the others has been held."""

    def gradients(step: int, rank: int, name: str) -> Tensor | None:
        if name == "late" and step < start:
            return None if begins == "none" else torch.zeros(WIDE[name])
        return 0.5 + 0.05 * noise(step, rank, name)

    return trained(codec, torch.optim.Adam, gradients, start + 45, lr=1e-3)


@pytest.mark.parametrize(
    ("codec", "begins", "start"),
    [
        (OneBit(block=64), "none", 40),
        # its numbers share a block with others'
        (OneBit(), "zeros", 40),
        (TopK(density=0.1, threshold="exact"), "none", 30),
        (TopK(density=0.1, threshold="exact"), "zeros", 30),
        (PowerSGD(rank=4), "none", 40),
        (PowerSGD(rank=4), "zeros", 40),
    ],
    ids=str,
)
def test_a_parameter_whose_gradients_begin_late_moves_as_with_adam(codec: AnyCodec, begins: str, start: int) -> None:
    """Where few numbers are sent each comes later, and no further."""
    plain, found = (begins_late(one, begins, start) for one in (NoCodec(), codec))
    before, last = start - 1, start + 44
    for stop in range(start + 1, last, 4):
        assert moved(found, "late", before, stop) < 2 * moved(plain, "late", before, stop), stop
        assert float(found[stop]["late"].abs().max()) < 2.5 * float(plain[stop]["late"].abs().max()) + 2e-3, stop
        if isinstance(codec, OneBit) and stop > start + 20:
            assert moved(found, "late", before, stop) > 0.5 * moved(plain, "late", before, stop), stop
    late, other = (moved(found, name, before, last) / moved(plain, name, before, last) for name in ("late", "weight"))
    assert other > 0.4 and late > 0.5 * other


@pytest.mark.parametrize("feedback", [False, True])
def test_fp16_recovers_after_a_spike(feedback: bool) -> None:
    """The scale that a sum of 10¹⁰ leaves makes numbers of ordinary size vanish, for one step."""

    def gradients(step: int, rank: int, name: str) -> Tensor:
        return torch.full(WIDE[name], 1e10 if step == 3 else 0.5)

    log = trained(Fp16(feedback=feedback), torch.optim.SGD, gradients, 12, clip=1e4, lr=1e-3)
    steps = [float((log[step - 1]["weight"] - log[step]["weight"]).mean()) / 1e-3 for step in range(5, 12)]
    # with feedback what has vanished comes one step later
    assert steps == pytest.approx([2.0 if feedback else 1.0, *[1.0] * 6], rel=0.01)


@pytest.mark.parametrize(
    ("codec", "make", "options"),
    [
        (OneBit(block=64), torch.optim.Adam, {}),
        (OneBit(block=64), torch.optim.Adam, {"weight_decay": 0.1}),
        (TopK(density=0.05, threshold="exact"), torch.optim.Adam, {}),
        (TopK(density=0.05, threshold="exact", correction=False), torch.optim.AdamW, {}),
        (TopK(density=0.05, threshold="exact"), torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    ],
    ids=str,
)
def test_what_maximizes_is_the_mirror_of_what_minimizes(codec: AnyCodec, make: Any, options: dict[str, Any]) -> None:
    def gradients(step: int, rank: int, name: str) -> Tensor:
        return 0.5 + 0.05 * noise(step, rank, name)

    def mirrored(step: int, rank: int, name: str) -> Tensor:
        return -gradients(step, rank, name)

    down = trained(codec, make, gradients, 30, lr=1e-2, **options)
    up = trained(codec, make, mirrored, 30, lr=1e-2, maximize=True, **options)
    for step, (one, other) in enumerate(zip(down, up, strict=True)):
        for name in WIDE:
            torch.testing.assert_close(other[name], one[name], rtol=1e-3, atol=1e-4, msg=f"{name} in step {step}")
    assert moved(down, "weight", 19, 29) > 0.01


def test_alone_nothing_is_held() -> None:
    one = SteadyMember(SoloGroup(), OneBit(block=64), torch.optim.AdamW)
    twin = SteadyMember(SoloGroup(), NoCodec(), torch.optim.AdamW)
    for step in range(30):
        one.step(step)
        twin.step(step)
    assert one.encoding.variance is not None and not one.encoding.variance.held
    assert all(torch.equal(one.params[name], twin.params[name]) for name in SHAPES)


# -- what leaves the process -------------------------------------------------------------------------------------------


def test_private_vectors_are_keyed_by_parameter_and_come_back_by_name_and_shape() -> None:
    one = Member(SoloGroup(), Int8())
    vector = torch.arange(float(one.encoding.count))
    keyed = one.encoding.keyed({RESIDUAL: vector})
    assert {name: tuple(value.shape) for name, value in keyed[RESIDUAL].items()} == {
        name: SHAPES[name] for name in LARGE
    }
    assert torch.equal(one.encoding.flat(keyed)[RESIDUAL], vector)
    changed = {"kind": {"second": keyed[RESIDUAL]["second"], "first": torch.ones(3, 3), "gone": torch.ones(2)}}
    back = one.encoding.flat(changed)["kind"]
    assert torch.equal(back[-64 * 33 :], vector[-64 * 33 :]) and not bool(back[: -64 * 33].any())


def test_what_is_common_goes_over_to_another_of_the_same_codec_only() -> None:
    veterans = run_members(2, lambda group: _stepped(group, PowerSGD(rank=2)))
    common = veterans[0].encoding.common()
    same, other = (Member(SoloGroup(), codec) for codec in (PowerSGD(rank=2), Int8()))
    for one in (same, other):
        one.encoding.adopt(common)
    assert same.encoding.steps == 2 and other.encoding.steps == 0
    name = "powersgd rank 2"
    assert torch.equal(same.encoding.memory.common()[name], common["shared"][name])
    assert same.encoding.memory.common()[name] is not common["shared"][name]
    assert other.encoding.memory.common() == {}


def test_exchanges_of_other_codecs_or_parameters_do_not_fit() -> None:
    one, same, other = (Member(SoloGroup(), codec) for codec in (Int8(), Int8(), Int8(block=64)))
    assert one.exchange.digest() == same.exchange.digest() != other.exchange.digest()
    narrow = Member(SoloGroup(), Int8(), dtypes={"first": torch.bfloat16})
    assert narrow.exchange.digest() != one.exchange.digest()
