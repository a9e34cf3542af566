"""Sums in two phases: chunks, what is kept, and that all members have the same bits."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shoal.comm.codecs.cast import CastCodec
from shoal.comm.codecs.contract import Codec, State
from shoal.comm.codecs.int8 import Int8Codec
from shoal.comm.codecs.memory import Memory
from shoal.comm.codecs.onebit import OneBitCodec
from shoal.comm.codecs.twophase import TwoPhaseSum, chunks
from shoal.comm.group import Group
from shoal.core.errors import PayloadError
from shoal.core.traffic import GRADIENT
from shoal.testing.fake_group import run_members
from shoal.testing.ranks import run_ranks

CPU = torch.device("cpu")
CODECS: dict[str, Callable[[], Codec]] = {
    "int8": lambda: Int8Codec(64),
    "stochastic": lambda: Int8Codec(64, "stochastic"),
    "onebit": lambda: OneBitCodec(64),
    "fp16": lambda: CastCodec("fp16"),
}


class Ragged:
    """int8 whose payloads say that they may differ in length, and do: some have a useless tail."""

    name = "int8"
    fixed = False
    block = 64

    def __init__(self, most: int = 64) -> None:
        self._codec = Int8Codec(self.block)
        self._most = most

    def encode(self, tensor: Tensor, state: State) -> Tensor:
        payload = self._codec.encode(tensor, state)
        return torch.cat((payload, payload.new_full((8 * (state.key % 9),), 255)))

    def decode(self, payload: Tensor, out: Tensor, *, gauge: Tensor | None = None, add: bool = False) -> None:
        self._codec.decode(payload, out, gauge=gauge, add=add)

    def most_bytes(self, count: int) -> int:
        return self._codec.most_bytes(count) + self._most


def numbers(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def step(summing: TwoPhaseSum, mine: Tensor, memory: Memory, key: int = 0, gauge: Tensor | None = None) -> Tensor:
    result = mine.clone()
    memory.open()
    summing.sum(result, memory, key=key, gauge=gauge)
    return result


def total(parts: list[Tensor]) -> Tensor:
    return torch.stack([part.double() for part in parts]).sum(0)


# ---- chunks


@pytest.mark.parametrize(
    ("count", "members", "block", "wanted"),
    [
        (0, 3, 8, [(0, 0), (0, 0), (0, 0)]),
        (1, 3, 8, [(0, 1), (1, 1), (1, 1)]),
        (20, 2, 8, [(0, 16), (16, 20)]),
        (32, 4, 8, [(0, 8), (8, 16), (16, 24), (24, 32)]),
        (40, 4, 8, [(0, 16), (16, 32), (32, 40), (40, 40)]),
    ],
)
def test_chunks_are_whole_blocks(count: int, members: int, block: int, wanted: list[tuple[int, int]]) -> None:
    assert chunks(count, members, block) == wanted


# ---- sums


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("count", [0, 1, 5, 64, 1000])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_all_have_the_same_bits_and_nothing_is_lost_for_good(name: str, count: int, size: int) -> None:
    """Over some steps, what all members gave is what was applied and what they still have to send."""

    def member(group: Group) -> tuple[list[Tensor], Tensor]:
        memory, summing = Memory(count, CPU), TwoPhaseSum(group, CODECS[name](), True)
        results = []
        for key in range(4):
            results.append(step(summing, numbers(count, 10 * key + group.rank), memory, key))
            memory.commit()
        return results, memory.parts()["residual"]

    found = run_members(size, member)
    for results, _ in found:
        assert all(torch.equal(a, b) for a, b in zip(results, found[0][0], strict=True))
    given = total([numbers(count, 10 * key + rank) for key in range(4) for rank in range(size)])
    applied, kept = total(found[0][0]), total([kept for _, kept in found])
    torch.testing.assert_close(applied + kept, given, rtol=0, atol=1e-5)


def test_a_step_that_is_done_again_gives_the_same_and_keeps_the_same() -> None:
    def member(group: Group) -> list[Tensor]:
        memory, summing = Memory(500, CPU), TwoPhaseSum(group, CODECS["stochastic"](), True)
        step(summing, numbers(500, group.rank), memory, 1)
        memory.commit()
        step(summing, numbers(500, 50 + group.rank), memory, 2)
        first = step(summing, numbers(500, group.rank), memory, 3)
        again = step(summing, numbers(500, group.rank), memory, 3)
        memory.commit()
        return [first, again, memory.parts()["residual"]]

    def calm(group: Group) -> Tensor:
        memory, summing = Memory(500, CPU), TwoPhaseSum(group, CODECS["stochastic"](), True)
        step(summing, numbers(500, group.rank), memory, 1)
        memory.commit()
        step(summing, numbers(500, group.rank), memory, 3)
        memory.commit()
        return memory.parts()["residual"]

    for (first, again, kept), wanted in zip(run_members(3, member), run_members(3, calm), strict=True):
        assert torch.equal(first, again) and torch.equal(kept, wanted)


def test_members_and_chunks_round_by_different_random_numbers() -> None:
    def member(group: Group) -> Tensor:
        memory = Memory(4 * 256, CPU)
        step(TwoPhaseSum(group, Int8Codec(256, "stochastic"), True), numbers(256, 3).repeat(4), memory, 1)
        return memory.private()[1].clone()

    shadows = run_members(4, member)
    lost = [shadows[rank].view(4, 256)[chunk] for rank in range(4) for chunk in range(4) if rank != chunk]
    assert not any(torch.equal(a, b) for i, a in enumerate(lost) for b in lost[:i])


def test_what_a_member_adds_to_its_own_chunk_is_exact() -> None:
    def member(group: Group) -> Tensor:
        memory = Memory(256, CPU)
        step(TwoPhaseSum(group, OneBitCodec(64), True), numbers(256, group.rank), memory)
        return memory.private()[1].clone()

    for rank, shadow in enumerate(run_members(2, member)):
        own, other = shadow.view(2, 128)[rank], shadow.view(2, 128)[1 - rank]
        assert not own.any() and other.any()


def test_another_block_folds_what_was_owned_and_loses_nothing() -> None:
    """As when a warm-up with int8 ends: the chunks of the next codec are others."""

    def member(group: Group) -> tuple[Tensor, Tensor]:
        memory = Memory(300, CPU)
        applied = torch.zeros(300)
        for key, codec in enumerate((Int8Codec(8), Int8Codec(8), OneBitCodec(64), OneBitCodec(64))):
            applied += step(TwoPhaseSum(group, codec, True), numbers(300, 10 * key + group.rank), memory, key)
            memory.commit()
        return applied, memory.parts()["residual"]

    found = run_members(3, member)
    given = total([numbers(300, 10 * key + rank) for key in range(4) for rank in range(3)])
    torch.testing.assert_close(found[0][0] + total([kept for _, kept in found]), given, rtol=0, atol=1e-5)


def test_without_feedback_nothing_is_remembered() -> None:
    def member(group: Group) -> tuple[Tensor, bool]:
        memory = Memory(300, CPU)
        return step(TwoPhaseSum(group, Int8Codec(64), False), numbers(300, group.rank), memory), memory.has()

    for result, remembers in run_members(2, member):
        torch.testing.assert_close(result, numbers(300) + numbers(300, 1), rtol=0, atol=0.05)
        assert not remembers


def test_a_gauge_spreads_what_is_lost() -> None:
    gauge = torch.tensor([1e-3, 1e3]).repeat(128)

    def member(group: Group) -> tuple[Tensor, Tensor]:
        memory = Memory(256, CPU)
        result = step(TwoPhaseSum(group, Int8Codec(64), True), numbers(256, group.rank) * gauge, memory, 0, gauge)
        memory.commit()
        return result, memory.parts()["residual"]

    found = run_members(2, member)
    given = (numbers(256).double() + numbers(256, 1).double()) * gauge
    assert float(((found[0][0] - given) / gauge).abs().max()) < 0.06
    kept = total([kept for _, kept in found])
    torch.testing.assert_close(found[0][0] / gauge + kept / gauge, given / gauge, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["int8", "onebit"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 150, 299])
def test_what_is_not_finite_reaches_all_and_no_residual(name: str, bad: float, at: int) -> None:
    def member(group: Group) -> tuple[Tensor, Tensor, Tensor]:
        memory, summing = Memory(300, CPU), TwoPhaseSum(group, CODECS[name](), True)
        step(summing, numbers(300, group.rank), memory)
        memory.commit()
        before = torch.cat((memory.private()[0], memory.owned(chunks(300, 3, 64)[group.rank])[0][0]))
        mine = numbers(300, group.rank)
        mine[at] = bad if group.rank == 1 else 1.0
        result = step(summing, mine, memory)
        memory.commit()
        return result, before, torch.cat((memory.private()[0], memory.owned(chunks(300, 3, 64)[group.rank])[0][0]))

    found = run_members(3, member)
    for result, before, after in found:
        assert not math.isfinite(result[at])
        assert torch.equal(before, after) and before.any()
        assert torch.equal(torch.isfinite(result), torch.isfinite(found[0][0]))


@pytest.mark.parametrize("bad", [None, 20, 290])
@pytest.mark.parametrize("name", ["int8", "onebit"])
def test_stretches_are_one_sum(name: str, bad: int | None) -> None:
    """Sent one after the other, turned while the next is on its way: nothing is lost, or nothing at all is applied."""
    stretches = [(200, 300), (64, 200), (0, 64)]

    def member(group: Group) -> tuple[list[Tensor], Tensor, Tensor]:
        memory, summing = Memory(300, CPU), TwoPhaseSum(group, CODECS[name](), True)
        results, before = [], torch.zeros(300)
        for key in range(3):
            mine = numbers(300, 10 * key + group.rank)
            if bad is not None and key == 2:
                before = memory.parts()["residual"].clone()
                mine[bad] = math.nan
            memory.open()
            running = summing.begin(mine, memory, key=key, stretches=stretches)
            for number in range(3):
                running.send(number)
                if number:
                    running.turn(number - 1)
            running.turn(2)
            running.end()
            memory.commit()
            results.append(mine)
        return results, before, memory.parts()["residual"]

    found = run_members(3, member)
    if bad is not None:
        for results, before, after in found:
            assert math.isnan(results[2][bad]) and torch.equal(before, after) and bool(before.any())
        return
    for results, _, _ in found:
        assert all(torch.equal(a, b) for a, b in zip(results, found[0][0], strict=True))
    given = total([numbers(300, 10 * key + rank) for key in range(3) for rank in range(3)])
    torch.testing.assert_close(total(found[0][0]) + total([kept for _, _, kept in found]), given, rtol=0, atol=1e-5)


def test_no_two_payloads_have_the_same_random_numbers() -> None:
    class Keyed(Int8Codec):
        def encode(self, tensor: Tensor, state: State) -> Tensor:
            keys.append(state.key)
            return super().encode(tensor, state)

    keys: list[int] = []

    def member(group: Group) -> None:
        memory = Memory(300, CPU)
        memory.open()
        summing = TwoPhaseSum(group, Keyed(64, "stochastic"), True)
        summing.begin(numbers(300), memory, key=7, stretches=[(200, 300), (64, 200), (0, 64)]).go()

    run_members(3, member)
    assert len(keys) == 3 * 3 * 3 and len(set(keys)) == len(keys)


# ---- what is sent


def test_bytes_sent_are_those_of_the_payloads() -> None:
    count = 64 * 30

    def member(group: Group) -> dict[str, int]:
        step(TwoPhaseSum(group, OneBitCodec(64), True), numbers(count, group.rank), Memory(count, CPU))
        assert group.account.codec == "none"
        return {flow.codec: flow.bytes for flow in group.account.now().flows if flow.kind == GRADIENT}

    row = OneBitCodec(64).most_bytes(count // 3)
    assert run_members(3, member) == [{"onebit": 2 * row + 2 * row}] * 3


def test_payloads_of_different_lengths_travel_too() -> None:
    def member(group: Group) -> tuple[Tensor, Tensor]:
        mine = numbers(1000, group.rank)
        ragged = step(TwoPhaseSum(group, Ragged(), True), mine, Memory(1000, CPU))
        return ragged, step(TwoPhaseSum(group, Int8Codec(64), True), mine, Memory(1000, CPU))

    for ragged, plain in run_members(4, member):
        assert torch.equal(ragged, plain)


def test_a_length_beyond_the_limit_is_refused_before_memory_is_taken_for_it() -> None:
    def member(group: Group) -> Tensor:
        return step(TwoPhaseSum(group, Ragged(-64), True), numbers(1000), Memory(1000, CPU))

    with pytest.raises(PayloadError, match="announced"):
        run_members(2, member)


@pytest.mark.parametrize("collective", ["gloo", "shm"])
def test_sums_over_processes_are_those_over_threads(collective: str) -> None:
    def member(group: Group) -> list[Tensor]:
        found = []
        for make in CODECS.values():
            memory, summing = Memory(5000, CPU), TwoPhaseSum(group, make(), True)
            for key in range(2):
                found.append(step(summing, numbers(5000, 10 * key + group.rank), memory, key))
                memory.commit()
        return found

    wanted = run_members(3, member)[0]
    for found in run_ranks(3, member, collective=collective):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
