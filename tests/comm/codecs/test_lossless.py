"""Payloads compressed without loss, and the decision whether that pays."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable

import lz4.block
import pytest
import torch
import zstandard
from torch import Tensor

from shoal.comm.codecs.cast import CastCodec, RawCodec
from shoal.comm.codecs.contract import Codec, State, Summing
from shoal.comm.codecs.int8 import Int8Codec
from shoal.comm.codecs.lossless import LosslessCodec, LosslessSum, Trial, choose_method
from shoal.comm.codecs.make import make_summing
from shoal.comm.codecs.memory import Memory
from shoal.comm.codecs.payload import HEADER_BYTES, room, seal
from shoal.comm.codecs.topk import TopKCodec
from shoal.comm.group import SoloGroup
from shoal.core.errors import ConfigError, PayloadError
from shoal.core.spec import parse
from shoal.testing.codecs import gradient
from shoal.testing.fake_group import FakeGroup, run_members

CPU = torch.device("cpu")
ZSTD, LZ4 = 1, 2


def forged(content: bytes, lengths: tuple[int, int], flags: int, count: int) -> Tensor:
    """A payload that says of itself what its maker likes."""
    body = struct.pack("<QQ", *lengths) + content
    body += bytes(-len(body) % 8)
    payload = room(len(body), CPU)
    payload[HEADER_BYTES:].copy_(torch.frombuffer(bytearray(body), dtype=torch.uint8))
    return seal(payload, "lossless", count, flags)


# -- the codec ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["zstd", "lz4"])
@pytest.mark.parametrize(
    "make", [RawCodec, lambda: CastCodec("fp16"), lambda: CastCodec("bf16"), Int8Codec, lambda: TopKCodec(0.1, "exact")]
)
def test_what_comes_out_is_what_the_inner_codec_makes(make: Callable[[], Codec], method: str) -> None:
    numbers, plain, packed = gradient(5000), make(), LosslessCodec(make(), method)
    found, expected = torch.empty(5000), torch.empty(5000)
    packed.decode(packed.encode(numbers, State(key=3)), found)
    plain.decode(plain.encode(numbers, State(key=3)), expected)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("make", "most"),
    [(RawCodec, 0.88), (lambda: CastCodec("bf16"), 0.76), (lambda: TopKCodec(0.01, "exact"), 0.96)],
)
def test_zstd_saves_bytes_of_gradients(make: Callable[[], Codec], most: float) -> None:
    numbers = torch.cat([torch.randn(50_000) * 10**-scale for scale in range(1, 5)])
    plain, packed = make().encode(numbers, State()), LosslessCodec(make(), "zstd").encode(numbers, State())
    assert packed.numel() < most * plain.numel(), packed.numel() / plain.numel()


@pytest.mark.parametrize("method", ["zstd", "lz4"])
def test_what_cannot_be_compressed_is_stored(method: str) -> None:
    noise = torch.randint(-(2**30), 2**30, (1000,), dtype=torch.int32).view(torch.float32)
    codec = LosslessCodec(RawCodec(), method)
    payload, found = codec.encode(noise, State()), torch.empty(1000)
    assert payload.numel() <= codec.most_bytes(1000)
    codec.decode(payload, found)
    assert torch.equal(found.view(torch.int32), noise.view(torch.int32))


def test_zeros_become_very_small() -> None:
    for method in ("zstd", "lz4"):
        assert LosslessCodec(RawCodec(), method).encode(torch.zeros(100_000), State()).numel() < 2500


@pytest.mark.parametrize("flags", [ZSTD, LZ4])
def test_a_bomb_is_refused_before_it_is_unpacked(flags: int) -> None:
    """Both what the payload and what the frame in it claims is bounded by what the inner codec may need."""
    bomb = bytes(1 << 20)
    content = zstandard.compress(bomb) if flags == ZSTD else lz4.block.compress(bomb, store_size=False)
    codec, out = LosslessCodec(RawCodec(), "zstd" if flags == ZSTD else "lz4"), torch.full((10,), 7.0)
    for claimed in (len(bomb), HEADER_BYTES + 40):
        with pytest.raises(PayloadError, match=r"bytes|cannot be read"):
            codec.decode(forged(content, (len(content), claimed), flags, 10), out)
    assert bool((out == 7.0).all())


@pytest.mark.parametrize("flags", [ZSTD, LZ4])
def test_frames_that_are_damaged_are_refused(flags: int) -> None:
    codec = LosslessCodec(RawCodec(), "zstd" if flags == ZSTD else "lz4")
    plain = HEADER_BYTES + 40
    for content in (b"", b"not a frame at all", bytes(40), zstandard.compress(bytes(plain))[:-3]):
        with pytest.raises(PayloadError):
            codec.decode(forged(content, (len(content), plain), flags, 10), torch.empty(10))
    for lengths in ((1 << 60, plain), (0, plain), (18, 0), (18, plain + 1), (18, 1 << 62)):
        with pytest.raises(PayloadError):
            codec.decode(forged(b"not a frame at all", lengths, flags, 10), torch.empty(10))


def test_payloads_of_the_other_method_are_refused() -> None:
    payload = LosslessCodec(RawCodec(), "lz4").encode(torch.zeros(1000), State())
    with pytest.raises(PayloadError, match="zstd was expected"):
        LosslessCodec(RawCodec(), "zstd").decode(payload, torch.empty(1000))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert choose_method("auto") == "lz4"
    with pytest.raises(ConfigError, match=r"needs the package zstandard: pip install shoal\[lossless\]"):
        LosslessCodec(RawCodec(), "zstd")
    monkeypatch.setitem(sys.modules, "lz4.block", None)
    with pytest.raises(ConfigError, match=r"zstandard or lz4: pip install shoal\[lossless\]"):
        make_summing(parse("codec", "int8:lossless=auto"), SoloGroup(), [(5,)])


# -- whether it pays ---------------------------------------------------------------------------------------------------


class Timed:
    """Sums, and lets the time pass that it is told to take on this member."""

    name = "timed"

    def __init__(self, group: FakeGroup, now: list[float], seconds: list[float], size: int) -> None:
        self.group, self.now, self.seconds, self.size, self.calls = group, now, seconds, size, 0

    def sum(self, flat: Tensor, memory: Memory, *, key: int = 0, gauge: Tensor | None = None) -> None:
        self.group.gather(torch.empty(self.size, dtype=torch.uint8))
        self.group.sum(flat).wait()
        self.now[0] += self.seconds[min(self.calls, len(self.seconds) - 1)]
        self.calls += 1


def trial(
    group: FakeGroup, plain: list[float], packed: list[float], steps: int, memory: Memory | None = None
) -> tuple[str, list[int]]:
    """The decision, and the way that was taken in each step: 0 is plain."""
    now = [0.0]
    ways = (Timed(group, now, plain, 1000), Timed(group, now, packed, 600))
    summing = LosslessSum(group, *ways, "zstd", clock=lambda: now[0])
    memory = memory or Memory(4, CPU)
    taken = []
    for step in range(steps):
        before = ways[0].calls
        memory.open()
        summing.sum(torch.ones(4), memory, key=step)
        memory.commit()
        taken.append(int(ways[0].calls == before))
    return summing.decision, taken


def test_the_first_steps_take_turns_and_the_faster_way_stays() -> None:
    found = run_members(2, lambda group: trial(group, [0.009], [0.0141], 9))
    assert found[0] == found[1]
    decision, taken = found[0]
    assert taken == [0, 1, 0, 1, 0, 1, 0, 0, 0]
    assert decision == ("lossless zstd saves 39 % of bytes, but a sum takes 14.1 ms with it and 9 ms without: not used")


def test_what_pays_is_used() -> None:
    decision, taken = run_members(3, lambda group: trial(group, [0.02], [0.01], 9))[0]
    assert taken[6:] == [1, 1, 1] and decision.endswith("and a sum takes 10 ms with it and 20 ms without: used")


def test_the_slowest_member_counts() -> None:
    def member(group: FakeGroup) -> tuple[str, list[int]]:
        return trial(group, [0.02], [0.01] if group.rank else [0.03], 8)

    found = run_members(3, member)
    assert found == [found[0]] * 3 and found[0][1][6:] == [0, 0]


def test_the_first_turn_of_each_way_does_not_count() -> None:
    _, taken = run_members(2, lambda group: trial(group, [0.02], [9.0, 0.01], 8))[0]
    assert taken[6:] == [1, 1]
    _, taken = run_members(2, lambda group: trial(group, [0.001, 0.02], [0.01], 8))[0]
    assert taken[6:] == [1, 1]


def test_a_difference_within_chance_is_none() -> None:
    assert run_members(2, lambda group: trial(group, [0.02], [0.0199], 8))[0][1][6:] == [0, 0]


def test_a_member_that_joins_does_as_the_others() -> None:
    """It has the shared vectors of another one, and different times of its own."""
    old = [Memory(4, CPU) for _ in range(2)]
    run_members(2, lambda group: trial(group, [0.02], [0.01], 7, old[group.rank]))
    joined = Memory(4, CPU)
    joined.adopt(old[0].common())
    memories = [old[0], joined]
    found = run_members(2, lambda group: trial(group, [0.02], [0.01], 2, memories[group.rank]))
    assert [taken for _, taken in found] == [[1, 1], [1, 1]]


def test_it_is_measured_anew_in_a_group_of_another_size() -> None:
    memory = Memory(4, CPU)
    old = [memory, Memory(4, CPU)]
    run_members(2, lambda group: trial(group, [0.02], [0.01], 7, old[group.rank]))
    more = [Memory(4, CPU) for _ in range(3)]
    for other in more:
        other.adopt(memory.common())
    decision, taken = run_members(3, lambda group: trial(group, [0.02], [0.03], 8, more[group.rank]))[0]
    assert taken == [0, 1, 0, 1, 0, 1, 0, 0] and decision.endswith("not used")


def test_a_step_that_is_done_again_is_done_the_same_way() -> None:
    def member(group: FakeGroup) -> list[int]:
        now = [0.0]
        ways = (Timed(group, now, [0.02], 10), Timed(group, now, [0.01], 10))
        summing, memory, taken = LosslessSum(group, *ways, "zstd", clock=lambda: now[0]), Memory(4, CPU), []
        for step in range(8):
            for _ in range(3):
                before = ways[0].calls
                memory.open()
                summing.sum(torch.ones(4), memory, key=step)
                taken.append(int(ways[0].calls == before))
            memory.commit()
        return taken

    for taken in run_members(2, member):
        assert taken == [way for way in (0, 1, 0, 1, 0, 1, 1, 1) for _ in range(3)]


def test_a_group_of_one_sends_nothing() -> None:
    decision, taken = run_members(1, lambda group: trial(group, [0.02], [0.01], 3))[0]
    assert taken == [0, 0, 0] and "nothing is sent" in decision


def test_nothing_is_decided_at_first() -> None:
    assert "is being measured" in run_members(2, lambda group: trial(group, [0.02], [0.01], 3))[0][0]
    assert "is being measured" in Trial(()).in_words("lz4")


# -- on top of any codec -----------------------------------------------------------------------------------------------

SPECS = ["none", "fp16", "bf16:feedback=true", "int8", "onebit:block=64", "topk:density=0.1", "powersgd:rank=1"]


@pytest.mark.parametrize("spec", SPECS)
def test_both_ways_give_nearly_the_same_numbers(spec: str) -> None:
    def member(group: FakeGroup) -> tuple[Tensor, Tensor]:
        lossless = f"{spec}{',' if ':' in spec else ':'}lossless=zstd"
        summing = make_summing(parse("codec", lossless), group, [(20, 30), (8,)])
        assert isinstance(summing, LosslessSum)
        ways: tuple[Summing, Summing] = summing.ways
        found = []
        for way in ways:
            flat = gradient(608, group.rank)
            way.sum(flat, Memory(608, CPU), key=1)
            assert group.account.codec == "none"
            found.append(flat)
        return found[0], found[1]

    for plain, packed in run_members(3, member):
        slack = 0.02 if spec.startswith(("fp16", "bf16")) else 1e-5
        assert float((plain - packed).norm()) <= slack * float(plain.norm())


def test_without_lossless_there_is_nothing_to_decide() -> None:
    for spec in SPECS:
        assert not isinstance(make_summing(parse("codec", spec), SoloGroup(), [(20, 30)]), LosslessSum)


def test_auto_is_no_codec_to_sum_with() -> None:
    with pytest.raises(ConfigError, match="codec auto"):
        make_summing(parse("codec", "auto"), SoloGroup(), [(3,)])


def test_a_plain_sum_sends_what_an_earlier_codec_left() -> None:
    def member(group: FakeGroup) -> tuple[list[float], list[float]]:
        memory, summing = Memory(2, CPU), make_summing(parse("codec", "none"), group, [(2,)])
        memory.take({"residual": torch.tensor([1.0, 2.0])}, 1)
        memory.open()
        bad = torch.tensor([torch.nan if group.rank else 0.0, 0.0])
        summing.sum(bad, memory)
        memory.commit()
        assert not torch.isfinite(bad).all()
        flat = torch.zeros(2)
        memory.open()
        summing.sum(flat, memory)
        memory.commit()
        return flat.tolist(), memory.parts()["residual"].tolist()

    assert run_members(2, member) == [([2.0, 4.0], [0.0, 0.0])] * 2
