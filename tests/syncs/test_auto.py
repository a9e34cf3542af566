"""Which codec is fastest: the trial by its figures alone, and the exchange that makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from shoal.comm.codecs.memory import RESIDUAL
from shoal.comm.group import Group, SoloGroup
from shoal.core.spec import AutoCodec
from shoal.core.traffic import GRADIENT
from shoal.syncs import auto
from shoal.syncs.allreduce import Weighing
from shoal.syncs.auto import ARMS, NONE, TIMED_STEPS, AutoExchange, Trial
from shoal.syncs.encoding import Encoding
from shoal.testing.fake_group import FakeGroup, run_members

NAMES = [codec.name for codec, _ in ARMS]
POWERSGD, INT8, FP16 = (NAMES.index(name) for name in ("powersgd", "int8", "fp16"))


def tried(seconds: Mapping[int, float | Sequence[float]], waited: float) -> tuple[int, list[int]]:
    """The winner of a trial in which a step with each arm takes so long, and the arms in the order of their rounds."""
    trial, rounds, counts = Trial(), [], dict.fromkeys(seconds, 0)
    for _ in range(200):
        arm = trial.arm
        if not rounds or rounds[-1][0] != arm or rounds[-1][1] == TIMED_STEPS + 1:
            rounds.append([arm, 0])
        rounds[-1][1] += 1
        own = seconds[arm]
        times = [own] if isinstance(own, float) else own
        taken = 50.0 if rounds[-1][1] == 1 else times[counts[arm] % len(times)]  # the first of a round does not count
        counts[arm] += rounds[-1][1] > 1
        winner = trial.step(taken, waited, settled=True)
        if winner is not None:
            assert all(count == TIMED_STEPS + 1 for _, count in rounds)
            return winner, [arm for arm, _ in rounds]
    raise AssertionError("the trial does not end")


def test_where_waiting_is_not_noticeable_nothing_is_tried() -> None:
    assert tried({NONE: 1.0}, waited=0.029) == (NONE, [NONE])


def test_just_noticeable_is_tried() -> None:
    winner, rounds = tried({NONE: 1.0, POWERSGD: 2.0, INT8: 2.0, FP16: 2.0}, waited=0.031)
    assert winner == NONE and rounds[:4] == [NONE, POWERSGD, INT8, FP16]


@pytest.mark.parametrize("best", range(len(ARMS)))
def test_the_fastest_stays(best: int) -> None:
    seconds = {arm: 1.0 for arm in range(len(ARMS))} | {best: 0.5}
    winner, rounds = tried(seconds, waited=0.9)
    assert winner == best
    # at best a step with fp16 would take 0.55
    assert rounds == ([NONE, POWERSGD, INT8, FP16] if best in (FP16, NONE) else [NONE, POWERSGD, INT8])


def test_what_cannot_be_faster_is_not_tried() -> None:
    """Of waiting for 0.5 s int8 saves 0.37 at best, and fp16 0.25."""
    assert tried({NONE: 1.0, POWERSGD: 0.55}, waited=0.5) == (POWERSGD, [NONE, POWERSGD])
    assert tried({NONE: 1.0, POWERSGD: 0.7, INT8: 0.65}, waited=0.5) == (INT8, [NONE, POWERSGD, INT8, INT8, POWERSGD])


def test_close_ones_are_timed_once_more_and_all_their_times_count() -> None:
    """The first time the fastest may have met a slow spell."""
    times = {NONE: 2.0, POWERSGD: [1.2] * 4 + [0.9] * 4, INT8: 1.0, FP16: 1.9}
    winner, rounds = tried(times, waited=2.0)
    assert rounds == [NONE, POWERSGD, INT8, INT8, POWERSGD]
    assert winner == POWERSGD


def test_one_slow_step_of_a_round_does_not_count() -> None:
    times = {NONE: 2.0, POWERSGD: [0.5, 9.0, 0.5, 0.5], INT8: 1.0, FP16: 1.0}
    assert tried(times, waited=1.5)[0] == POWERSGD


def test_steps_before_an_arm_is_settled_do_not_count() -> None:
    trial = Trial()
    for _ in range(20):
        assert trial.step(0.001, 0.0, settled=False) is None
    found = [trial.step(1.0, 0.0, settled=True) for _ in range(TIMED_STEPS + 1)]
    assert found == [None] * TIMED_STEPS + [NONE]
    assert trial.figures() == "none 1e+03 ms" and trial.waited == 0.0


def test_figures_are_told_fastest_first() -> None:
    trial = Trial()
    for _ in range(TIMED_STEPS + 1):
        trial.step(0.32, 0.24, settled=True)
    assert trial.arm == POWERSGD and trial.waited == pytest.approx(0.75)
    for _ in range(TIMED_STEPS + 1):
        trial.step(0.11, 0.0, settled=True)
    assert trial.figures() == "powersgd 110 ms, none 320 ms"


# -- the exchange ------------------------------------------------------------------------------------------------------

SHAPES = {"weight": (64, 48), "bias": (48,)}


class Member:
    def __init__(self, group: Group, knowledge: bytes | None = None, make: Any = torch.optim.SGD) -> None:
        self.group = group
        self.params = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        self.optimizer = make(self.params.values(), lr=1.0)
        self.encoding = Encoding(AutoCodec(), self.optimizer, list(self.params.items()))
        self.given = torch.zeros(SHAPES["weight"])
        self.meet(group, knowledge)

    def meet(self, group: Group, knowledge: bytes | None = None) -> None:
        self.group = group
        self.exchange = AutoExchange(group, list(self.params.items()), self.encoding, knowledge)

    def step(self, step: int) -> str:
        """One step; the codec by which most of it was sent."""
        before = self.sent()
        self.exchange.open(1, 2)
        self.exchange.arm()
        random = torch.Generator().manual_seed(100 * step + self.group.rank)
        weight = torch.randn(SHAPES["weight"], generator=random)
        self.given += weight
        (self.params["weight"] * weight).sum().backward()  # type: ignore[no-untyped-call]
        sums, flags = self.exchange.finish(torch.ones(1), torch.ones(1))
        assert sums.tolist() == flags.tolist() == [float(self.group.size)]
        with self.exchange.applying():
            self.optimizer.step()
        now = self.sent()
        return max(now, key=lambda codec: now[codec] - before.get(codec, 0)) if now else "alone"

    def sent(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for flow in self.group.account.now().flows:
            if flow.kind == GRADIENT:
                found[flow.codec] = found.get(flow.codec, 0) + flow.bytes
        return found

    def rest(self) -> Tensor:
        return self.encoding.memory.parts().get(RESIDUAL, torch.zeros(self.encoding.count)).view(SHAPES["weight"])


def known(arm: int, note: str = "a note") -> bytes:
    return msgspec.msgpack.encode([arm, note, None])


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """Seconds of each arm, in place of those that are measured: no clock decides what these tests see."""
    seconds = [dict.fromkeys(NAMES, 1.0)]
    step = Trial.step

    def timed(self: Trial, taken: float, waited: float, *, settled: bool) -> int | None:
        return step(self, seconds[0][NAMES[self.arm]], 0.9, settled=settled)

    monkeypatch.setattr(Trial, "step", timed)
    return seconds


@pytest.mark.parametrize("best", NAMES)
def test_all_members_go_through_the_arms_and_stay_with_the_fastest(best: str, decided: list[dict[str, float]]) -> None:
    decided[0][best] = 0.5

    def member(group: FakeGroup) -> tuple[list[str], str, bytes | None, Tensor, Tensor, Tensor]:
        one = Member(group)
        assert one.exchange.settled() is None and one.exchange.knowledge() is None
        found = [one.step(step) for step in range(80)]
        told = one.exchange.settled()
        assert told is not None and told.codec == best
        weight = one.params["weight"].detach().clone()
        knowledge = one.exchange.knowledge()
        one.exchange.close()
        return found, told.note, knowledge, weight, one.given, one.rest()

    found = run_members(2, member)
    codecs, note, knowledge, weight, _, _ = found[0]
    assert codecs[0] == "none" and set(codecs[-5:]) == {best}
    assert {"powersgd", "int8"} <= set(codecs)
    assert note == found[1][1] and note.startswith(f"auto: {best}, as a step takes {best} 500 ms")
    assert ("of it is waiting for the exchange" in note) == (best == "none")
    assert knowledge is not None
    # steps of the training like any other: nothing of them is lost
    assert torch.equal(weight, found[1][3])
    given, rest = (sum((one[place] for one in found), torch.zeros(SHAPES["weight"])) for place in (4, 5))
    torch.testing.assert_close(-weight, given - rest, rtol=1e-3, atol=0.02 if best == "fp16" else 1e-2)
    if best == "none":
        assert float(rest.abs().max()) == 0.0


def test_adams_variance_is_held_only_once_powersgd_has_won(decided: list[dict[str, float]]) -> None:
    """What is timed is powersgd itself; then gradients go by int8 until the variance is steady."""
    decided[0]["powersgd"] = 0.5

    def member(group: FakeGroup) -> tuple[list[str], list[bool], int]:
        one = Member(group, make=torch.optim.Adam)
        variance = one.encoding.variance
        assert variance is not None
        found, held, settled = [], [], 0
        for step in range(120):
            found.append(one.step(step))
            held.append(variance.held)
            settled += one.exchange.settled() is None
        later = Member(group, one.exchange.knowledge(), torch.optim.Adam)
        later.encoding.adopt(one.encoding.common())
        assert later.step(120) == "powersgd"
        return found, held, settled

    found, held, settled = run_members(2, member)[0]
    begins = held.index(True)
    assert "powersgd" in found[:settled] and not any(held[:settled])
    assert settled < begins and set(found[settled + 1 : begins + 1]) == {"int8"}
    assert set(found[begins + 1 :]) == {"powersgd"} and all(held[begins:])


def test_what_was_settled_is_known_in_another_group() -> None:
    def member(group: FakeGroup) -> tuple[list[str], str, bytes | None]:
        one = Member(group, known(INT8))
        found = [one.step(step) for step in range(3)]
        told = one.exchange.settled()
        assert told is not None and told.codec == "int8"
        return found, told.note, one.exchange.knowledge()

    for codecs, note, knowledge in run_members(2, member):
        assert codecs == ["int8"] * 3 and note == "a note"
        assert knowledge == known(INT8)


@pytest.mark.parametrize(
    "knowledge",
    [b"", b"\x00", b"nonsense", known(len(ARMS)), known(-1), known(INT8)[:-3], msgspec.msgpack.encode(["1", 2, 3])],
)
def test_knowledge_that_cannot_be_read_is_not_used(knowledge: bytes) -> None:
    one = Member(SoloGroup(), knowledge)
    assert one.exchange.knowledge() is None and one.exchange.settled() is None


def test_knowledge_with_any_bit_turned_is_read_or_not_used() -> None:
    whole = known(INT8)
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        found = auto._read(bytes(damaged))
        assert found is None or 0 <= found.arm < len(ARMS)


def test_who_joins_with_nothing_to_send_does_as_those_who_have() -> None:
    """Where all goes as it is again, what others still have to send goes first, for which all members are needed."""
    veterans = run_members(2, lambda group: _stepped(group, INT8))
    rests = [one.rest().clone() for one in veterans]
    given = [one.given.clone() for one in veterans]
    before = veterans[0].params["weight"].detach().clone()
    assert all(float(rest.abs().max()) > 0 for rest in rests)

    def member(group: FakeGroup) -> tuple[Tensor, Tensor, Tensor]:
        if group.rank == 2:
            one = Member(group, known(NONE))
        else:
            one = veterans[group.rank]
            one.meet(group, known(NONE))
        one.step(5)
        first = one.params["weight"].detach().clone()
        one.step(6)
        return first, one.given, one.rest()

    found = run_members(3, member, seconds=10.0)
    assert all(float(rest.abs().max()) == 0 for _, _, rest in found)
    newly = torch.stack([one[1] for one in found]).sum(0) - torch.stack(given).sum(0)
    applied = before - veterans[0].params["weight"].detach()
    torch.testing.assert_close(applied, newly + torch.stack(rests).sum(0), rtol=1e-4, atol=1e-4)


def _stepped(group: FakeGroup, arm: int) -> Member:
    one = Member(group, known(arm))
    one.step(0)
    return one


def test_what_a_checkpoint_had_to_send_is_sent_though_it_comes_after_the_exchange_was_made() -> None:
    def member(group: FakeGroup) -> tuple[Tensor, Tensor, Tensor]:
        one = Member(group, known(NONE))
        one.encoding.memory.take({RESIDUAL: torch.full((one.encoding.count,), 4.0)}, group.size)
        one.step(0)
        return -one.params["weight"].detach(), one.given, one.rest()

    found = run_members(2, member)
    torch.testing.assert_close(found[0][0], found[0][1] + found[1][1] + 4.0)
    assert all(float(rest.abs().max()) == 0 for _, _, rest in found)


def test_alone_nothing_is_tried_and_what_was_kept_is_sent() -> None:
    veteran = run_members(2, lambda group: _stepped(group, INT8))[0]
    rest, before = veteran.rest().clone(), veteran.params["weight"].detach().clone()
    veteran.meet(SoloGroup())
    veteran.given.zero_()
    assert veteran.step(1) == "alone"
    torch.testing.assert_close(before - veteran.params["weight"].detach(), veteran.given + rest)
    assert float(veteran.rest().abs().max()) == 0.0
    for step in range(2, 20):
        veteran.step(step)
    assert veteran.exchange.settled() is None


def test_where_nothing_is_large_enough_to_be_encoded_nothing_is_tried() -> None:
    def member(group: FakeGroup) -> tuple[str, str, bytes | None]:
        params = [("bias", nn.Parameter(torch.zeros(48)))]
        optimizer = torch.optim.SGD([param for _, param in params], lr=1.0)
        exchange = AutoExchange(group, params, Encoding(AutoCodec(), optimizer, params))
        for _ in range(3):
            exchange.open(1, 2)
            exchange.arm()
            (params[0][1] * (1.0 + group.rank)).sum().backward()
            exchange.finish(torch.ones(1), torch.ones(1))
            with exchange.applying():
                optimizer.step()
        assert bool((params[0][1] == -9.0).all())
        told = exchange.settled()
        assert told is not None
        return told.codec, told.note, exchange.knowledge()

    for codec, note, knowledge in run_members(2, member):
        assert codec == "none" and note == "auto: none, as no tensor is large enough to be encoded"
        assert knowledge is not None and auto._read(knowledge) is not None


@pytest.mark.parametrize("who", [0, 1, 2])
def test_what_one_member_alone_has_to_send_is_known_to_all_also_in_a_later_group(who: int) -> None:
    """Else one would sum what it has to send, and others would sum buckets, and they would wait for ever."""

    def member(group: FakeGroup) -> tuple[Tensor, Tensor, float]:
        one = Member(group, known(NONE))
        one.step(0)  # all agree that there is nothing
        one.exchange.close()
        one.meet(group, known(NONE))
        if group.rank == who:
            one.encoding.memory.take({RESIDUAL: torch.full((one.encoding.count,), 4.0)}, 1)
        for step in range(1, 4):
            one.step(step)
        return -one.params["weight"].detach(), one.given, float(one.rest().abs().max())

    found = run_members(3, member, seconds=10.0)
    given = torch.stack([given for _, given, _ in found]).sum(0)
    for weight, _, rest in found:
        torch.testing.assert_close(weight, given + 4.0)
        assert rest == 0.0


@pytest.mark.parametrize("arm", [NONE, INT8])
def test_whether_it_makes_means_of_sums_is_as_its_arm_does(arm: int) -> None:
    def member(group: FakeGroup) -> tuple[bool, Tensor, Tensor]:
        one = Member(group, known(arm))
        one.exchange.open(1, 2, 1)
        one.exchange.arm()
        one.params["weight"].grad = None
        (2.0 * one.params["weight"]).sum().backward()  # type: ignore[no-untyped-call]
        weighing = Weighing(8, None)
        one.exchange.finish(torch.ones(1), torch.ones(1), weighing, torch.tensor([16.0], dtype=torch.float64))
        grad = one.params["weight"].grad
        assert grad is not None
        return one.exchange.weighs, grad.clone(), one.rest()

    for weighs, grad, _ in run_members(2, member):
        # 4 over both, times 8 / 32 where it does
        assert weighs == (arm != NONE)
        torch.testing.assert_close(grad, torch.full_like(grad, 1.0 if weighs else 4.0), rtol=0.01, atol=0.0)


def test_what_is_to_be_called_before_parts_leave_is_called_by_every_arm() -> None:
    called = []

    def member(group: FakeGroup) -> None:
        one = Member(group, known(INT8))
        group.account.departing.passed = lambda: called.append(group.rank)  # type: ignore[method-assign]
        one.step(0)

    run_members(2, member)
    assert sorted(called) == [0, 1]
