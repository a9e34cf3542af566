"""fp16 and bf16: sizes, scales, and sums in place."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shoal.comm.codecs.cast import FP16_SCALE, CastCodec, CastSum, RawCodec
from shoal.comm.codecs.contract import State
from shoal.comm.codecs.memory import Memory
from shoal.comm.codecs.payload import HEADER_BYTES
from shoal.testing.fake_group import FakeGroup, run_members
from shoal.testing.ranks import run_ranks

CPU = torch.device("cpu")
LARGEST = torch.finfo(torch.float32).max


def numbers(count: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * size


def decoded(codec: CastCodec | RawCodec, tensor: Tensor, state: State | None = None) -> Tensor:
    out = torch.full_like(tensor, math.nan)
    codec.decode(codec.encode(tensor, state or State()), out, gauge=state.gauge if state else None)
    return out


# ---- payloads


@pytest.mark.parametrize(("count", "body"), [(0, 0), (1, 8), (4, 8), (5, 16), (65536, 131072), (200_001, 400_008)])
def test_a_payload_has_two_bytes_a_number_and_for_half_precision_scales(count: int, body: int) -> None:
    plain, scaled = CastCodec("bf16"), CastCodec("fp16")
    scales = 8 * math.ceil(count / 131072)
    assert plain.encode(numbers(count), State()).numel() == plain.most_bytes(count) == HEADER_BYTES + body
    assert scaled.encode(numbers(count), State()).numel() == scaled.most_bytes(count) == HEADER_BYTES + body + scales


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_what_is_not_finite_is_in_no_shadow_and_what_is_far_from_it_is_sent(name: str, bad: float) -> None:
    given = numbers(200_000)
    given[70_000] = bad
    state = State(numbers(200_000, 1), torch.full((200_000,), math.nan))
    assert state.residual is not None and state.shadow is not None
    found = decoded(CastCodec(name), given, state)
    assert not math.isfinite(found[70_000])
    assert float(state.shadow[70_000]) == float(state.residual[70_000])
    sent = torch.isfinite(found)
    assert int(sent.sum()) >= 200_000 - 65536
    torch.testing.assert_close((found + state.shadow)[sent], (given + state.residual)[sent])
    assert torch.equal(state.shadow[~sent], state.residual[~sent])


@pytest.mark.parametrize(("count", "body"), [(0, 0), (1, 8), (2, 8), (5, 24)])
def test_plain_numbers_have_four_bytes_each(count: int, body: int) -> None:
    codec = RawCodec()
    assert codec.encode(numbers(count), State()).numel() == codec.most_bytes(count) == HEADER_BYTES + body
    assert torch.equal(decoded(codec, numbers(count)), numbers(count))


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e30])
def test_half_precision_is_as_exact_for_numbers_of_any_size(size: float) -> None:
    given = numbers(100_000, size=size)
    worst = (decoded(CastCodec("fp16"), given) - given).abs().max() / given.abs().max()
    assert float(worst) <= 2**-11


def test_numbers_that_bfloat16_has_are_what_it_makes_of_them() -> None:
    given = numbers(70_000)
    assert torch.equal(decoded(CastCodec("bf16"), given), given.bfloat16().float())


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_the_largest_numbers_stay_finite(name: str) -> None:
    given = torch.tensor([LARGEST, -LARGEST, 1.0])
    found = decoded(CastCodec(name), given)
    assert bool(torch.isfinite(found).all())
    assert float(found[0]) == pytest.approx(LARGEST, rel=0.01)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_what_is_lost_is_in_the_units_of_the_tensor_also_with_a_gauge(name: str) -> None:
    given, gauge = numbers(1000), numbers(1000, 1).abs() + 1e-3
    state = State(numbers(1000, 2, 0.01), torch.full((1000,), math.nan), gauge)
    assert state.residual is not None and state.shadow is not None
    found = decoded(CastCodec(name), given, state)
    torch.testing.assert_close(found + state.shadow, given + state.residual)
    assert float(state.shadow.norm()) > 0


def test_plain_numbers_lose_nothing_and_keep_what_is_not_finite_out_of_the_shadow() -> None:
    given = numbers(10)
    given[3] = math.inf
    state = State(numbers(10, 1), torch.full((10,), math.nan))
    assert state.residual is not None and state.shadow is not None
    found = decoded(RawCodec(), given, state)
    assert torch.equal(found, given + state.residual)
    assert float(state.shadow[3]) == float(state.residual[3])
    assert float(state.shadow.count_nonzero()) == 1


# ---- sums


def summed(group: FakeGroup, name: str, mine: Tensor, memory: Memory, *, feedback: bool = False) -> Tensor:
    result = mine.clone()
    memory.open()
    CastSum(group, name, feedback).sum(result, memory)
    return result


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("size", [1e-30, 1e-7, 1.0, 1e5, 1e30])
def test_sums_of_numbers_of_any_size_from_the_first_step_on(name: str, size: float) -> None:
    def member(group: FakeGroup) -> list[Tensor]:
        memory, found = Memory(3000, CPU), []
        for _ in range(2):
            found.append(summed(group, name, numbers(3000, group.rank, size), memory))
            memory.commit()
        return found

    found = run_members(3, member)
    wanted = torch.stack([numbers(3000, rank, size).double() for rank in range(3)]).sum(0)
    for step in range(2):
        assert all(torch.equal(found[0][step], other[step]) for other in found)
        assert float((found[0][step] - wanted).norm() / wanted.norm()) < (1e-3 if name == "fp16" else 1e-2)


def test_numbers_that_grow_beyond_half_precision_are_summed_once_more() -> None:
    """They are a million times larger than the scale expects."""

    def member(group: FakeGroup) -> tuple[Tensor, float]:
        memory = Memory(100, CPU)
        summed(group, "fp16", numbers(100, group.rank, 1e-3), memory)
        memory.commit()
        result = summed(group, "fp16", numbers(100, group.rank, 1e3), memory)
        memory.commit()
        return result, float(memory.common()[FP16_SCALE])

    found = run_members(2, member)
    wanted = numbers(100, 0, 1e3) + numbers(100, 1, 1e3)
    for result, scale in found:
        torch.testing.assert_close(result, wanted, rtol=1e-2, atol=1.0)
        assert scale == found[0][1] and 64 <= scale * float(wanted.abs().max()) <= 256


def test_a_step_that_is_done_again_starts_from_the_same_scale() -> None:
    def member(group: FakeGroup) -> tuple[Tensor, Tensor, float]:
        memory = Memory(100, CPU)
        summed(group, "fp16", numbers(100, group.rank), memory)
        memory.commit()
        before = float(memory.common()[FP16_SCALE])
        first = summed(group, "fp16", numbers(100, group.rank, 1e-4), memory)
        again = summed(group, "fp16", numbers(100, group.rank, 1e-4), memory)
        return first, again, before - float(memory.common()[FP16_SCALE])

    for first, again, change in run_members(2, member):
        assert torch.equal(first, again) and change == 0


@pytest.mark.parametrize("spike", [1e10, 1e30])
def test_the_scale_that_a_spike_leaves_is_found_anew(spike: float) -> None:
    """With it all that is of ordinary size vanishes, in the one step after the spike, which says that it is wrong."""

    def member(group: FakeGroup) -> tuple[list[float], list[float]]:
        memory, summing = Memory(100, CPU), CastSum(group, "fp16")
        found, scales = [], []
        for size in (1.0, spike, 1.0, 1.0, 1.0):
            flat = torch.full((100,), size)
            memory.open()
            summing.sum(flat, memory)
            memory.commit()
            found.append(float(flat.mean()))
            scales.append(float(memory.common()[FP16_SCALE]))
        return found, scales

    for found, scales in run_members(2, member):
        assert found[0] == 2.0 and found[1] == pytest.approx(2 * spike, rel=1e-3)
        assert found[2] == 0.0 == scales[2] and 0 < scales[1] < 1e-5
        assert found[3:] == [2.0, 2.0] and scales[3] == scales[4] == scales[0] > 1.0


def test_zeros_leave_the_scale_to_be_found_later() -> None:
    def member(group: FakeGroup) -> Tensor:
        memory = Memory(10, CPU)
        assert not summed(group, "fp16", torch.zeros(10), memory).any()
        memory.commit()
        return summed(group, "fp16", numbers(10, 3, 1e-9), memory)

    torch.testing.assert_close(run_members(2, member)[0], 2 * numbers(10, 3, 1e-9), rtol=2e-3, atol=1e-13)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_a_member_keeps_what_rounding_its_own_numbers_lost(name: str) -> None:
    def member(group: FakeGroup) -> tuple[Tensor, Tensor]:
        memory = Memory(500, CPU)
        result = summed(group, name, numbers(500, group.rank), memory, feedback=True)
        memory.commit()
        return result, memory.parts()["residual"]

    (result, kept), (_, other) = run_members(2, member)
    given = numbers(500).double() + numbers(500, 1).double()
    lost = float((given - result).norm())
    # what the addition itself rounds is nobody's
    assert float((given - result - kept - other).norm()) < 0.9 * lost
    assert 0 < float(kept.abs().max()) < float(numbers(500).abs().max()) * 2**-8


def test_what_an_earlier_codec_left_is_sent() -> None:
    def member(group: FakeGroup) -> tuple[Tensor, Tensor]:
        memory = Memory(50, CPU)
        memory.take({"residual": torch.full((50,), 2.0)}, group.size)
        [(owned, _)] = memory.owned((0, 25))
        owned.fill_(1.0)
        result = summed(group, "bf16", torch.ones(50), memory)
        memory.commit()
        return result, memory.parts()["residual"]

    for result, kept in run_members(2, member):
        assert result.tolist() == [6.0] * 25 + [4.0] * 25
        assert not kept.any()


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_reaches_all_and_no_residual_nor_scale(name: str, bad: float) -> None:
    def member(group: FakeGroup) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        memory = Memory(100, CPU)
        summed(group, name, numbers(100, group.rank), memory, feedback=True)
        memory.commit()
        before = memory.parts()["residual"].clone()
        mine = numbers(100, group.rank)
        mine[7] = bad if group.rank else 1.0
        result = summed(group, name, mine, memory, feedback=True)
        memory.commit()
        after = memory.parts()["residual"].clone()
        return result, before, after, summed(group, name, numbers(100, group.rank), memory, feedback=True)

    for result, before, after, later in run_members(2, member):
        assert not math.isfinite(result[7])
        assert torch.equal(before, after)
        assert bool(torch.isfinite(later).all())


def test_the_label_of_what_is_sent_is_put_back_also_after_an_error() -> None:
    def member(group: FakeGroup) -> str:
        seen = []
        inner = group.sum
        group.sum = lambda *given: seen.append(group.account.codec) or inner(*given)  # type: ignore[method-assign, func-returns-value]
        summed(group, "bf16", numbers(5), Memory(5, CPU))

        def fail(*_: object) -> None:
            raise RuntimeError("no sum")

        group.sum = fail  # type: ignore[method-assign, assignment]
        with pytest.raises(RuntimeError):
            summed(group, "bf16", numbers(5), Memory(5, CPU))
        assert group.account.codec == "none"
        return seen[0]

    assert run_members(1, member) == ["bf16"]


@pytest.mark.parametrize("collective", ["gloo", "shm"])
def test_sums_over_processes_have_the_same_bits(collective: str) -> None:
    def member(group: FakeGroup) -> list[Tensor]:
        found = []
        for name in ("fp16", "bf16"):
            memory = Memory(5000, CPU)
            for step in range(2):
                found.append(summed(group, name, numbers(5000, 10 * step + group.rank, 1e-4), memory, feedback=True))
                memory.commit()
        return found

    members = run_ranks(3, member, collective=collective)  # type: ignore[arg-type]
    for at, result in enumerate(members[0]):
        wanted = sum(numbers(5000, 10 * (at % 2) + rank, 1e-4) for rank in range(3))
        assert all(torch.equal(result, other[at]) for other in members)
        torch.testing.assert_close(result, wanted, rtol=3e-2, atol=3e-6)
