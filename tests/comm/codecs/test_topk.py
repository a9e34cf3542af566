"""What is particular to topk: which numbers it chooses, how they lie in a payload, and what is refused."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shoal.comm.codecs import payload as payloads
from shoal.comm.codecs.contract import State
from shoal.comm.codecs.payload import HEADER_BYTES
from shoal.comm.codecs.selection import threshold
from shoal.comm.codecs.topk import TopKCodec
from shoal.core.errors import PayloadError

BOTH = pytest.mark.parametrize("method", ["exact", "sampled"])
COUNT = 200_003


def noise(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def feedback(count: int, seed: int = 1, key: int = 0) -> State:
    """With a residual, and a shadow that must be overwritten."""
    return State(residual=noise(count, seed), shadow=torch.full((count,), math.nan), key=key)


def decoded(codec: TopKCodec, payload: Tensor, count: int, gauge: Tensor | None = None) -> Tensor:
    out = torch.full((count,), math.nan)
    codec.decode(payload, out, gauge=gauge)
    return out


def sent(codec: TopKCodec, numbers: Tensor, key: int = 0) -> Tensor:
    return decoded(codec, codec.encode(numbers, State(key=key)), numbers.numel())


# -- which numbers -----------------------------------------------------------------------------------------------------


def test_exact_sends_exactly_the_largest() -> None:
    numbers = noise(COUNT)
    out = sent(TopKCodec(0.01, "exact"), numbers)
    wanted = numbers.abs().topk(math.ceil(0.01 * COUNT)).indices.sort().values
    assert torch.equal(out.nonzero().view(-1), wanted)
    assert torch.allclose(out[wanted], numbers[wanted], rtol=2**-11, atol=0)


HEAVY = noise(COUNT) * noise(COUNT, 5).mul(3).exp()
LAYERED = torch.cat([noise(COUNT // 2), noise(COUNT // 2, 2) * 1e-4])
PERIODIC = noise(COUNT) * (1 + 100 * (torch.arange(COUNT) % 64 == 0))


@pytest.mark.parametrize("density", [1e-6, 1e-3, 0.01, 0.25, 1.0])
@pytest.mark.parametrize("numbers", [HEAVY, LAYERED, PERIODIC, noise(3000)], ids=["heavy", "layers", "periodic", "few"])
def test_sampled_sends_as_many_as_exact_or_somewhat_fewer(numbers: Tensor, density: float) -> None:
    wanted = math.ceil(density * numbers.numel())
    for key in range(5):
        chosen = sent(TopKCodec(density, "sampled"), numbers, key).nonzero().view(-1)
        assert wanted / 2 <= chosen.numel() <= wanted
        if chosen.numel() == wanted:
            least = numbers[chosen].abs().min()
            assert int((numbers.abs() > least).sum()) < wanted


def test_a_threshold_lets_somewhat_more_than_enough_pass() -> None:
    """For each key by another sample, of what is to be sent and not of the gradient alone."""
    wanted, gauge = 2000, noise(COUNT, 3).exp()
    tensor, residual = noise(COUNT), noise(COUNT, 1) * 50 * gauge
    sizes = ((tensor + residual) / gauge).abs()
    found = set()
    for key in range(20):
        state = State(residual=residual, gauge=gauge, key=key)
        size = threshold(tensor, state, wanted)
        assert wanted <= int((sizes > size).sum()) <= 2.5 * wanted
        assert threshold(tensor, state, wanted) == size
        found.add(size)
    assert len(found) == 20


@pytest.mark.parametrize(("count", "wanted"), [(COUNT, 2001), (100, 1), (1, 1)])
def test_equal_numbers_are_sent_up_to_the_wanted_count(count: int, wanted: int) -> None:
    out = sent(TopKCodec(0.01, "sampled"), torch.full((count,), -0.5))
    assert int(out.count_nonzero()) == wanted and set(out[out != 0].tolist()) == {-0.5}


@BOTH
@pytest.mark.parametrize("count", [0, 1, 100, COUNT])
def test_zeros_decode_to_zeros(count: int, method: str) -> None:
    codec = TopKCodec(0.01, method)
    assert torch.equal(sent(codec, torch.zeros(count)), torch.zeros(count))
    assert codec.encode(torch.zeros(count), State()).numel() <= codec.most_bytes(count)


@pytest.mark.parametrize("places", [[0], [COUNT - 1], [7, 65535, 65536, 131_071]])
@BOTH
def test_few_numbers_among_zeros_are_all_sent(places: list[int], method: str) -> None:
    numbers = torch.zeros(COUNT)
    numbers[places] = torch.arange(1.0, len(places) + 1)
    assert torch.equal(sent(TopKCodec(0.01, method), numbers), numbers)


# -- what is sent and what stays ---------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("density", [0.01, 0.3])
@pytest.mark.parametrize("factor", [1e-44, 1e-38, 1e-6, 1.0, 1e37], ids=str)
def test_nothing_is_lost_to_the_last_bit(density: float, factor: float, method: str) -> None:
    tensor, state = noise(COUNT) * factor, feedback(COUNT)
    assert state.residual is not None and state.shadow is not None
    state.residual *= factor
    before, given = state.residual.clone(), tensor.clone()
    codec = TopKCodec(density, method)
    out = decoded(codec, codec.encode(tensor, state), COUNT)
    assert torch.equal(out + state.shadow, tensor + state.residual)
    assert int(out.count_nonzero()) >= 0.9 * density * COUNT or factor < 1e-43
    assert torch.equal(state.residual, before) and torch.equal(tensor, given)


@BOTH
def test_with_a_gauge_sizes_are_relative_to_it(method: str) -> None:
    gauge = noise(COUNT, 3).exp()
    tensor, state = noise(COUNT) * gauge, feedback(COUNT)
    state.gauge = gauge
    assert state.residual is not None and state.shadow is not None
    codec = TopKCodec(0.01, method)
    out = decoded(codec, codec.encode(tensor, state), COUNT, gauge)
    total = tensor + state.residual
    chosen = out.nonzero().view(-1)
    best = (total / gauge).abs().topk(math.ceil(0.01 * COUNT)).indices.sort().values
    assert torch.equal(chosen, best)
    assert torch.allclose(out + state.shadow, total, rtol=1e-6, atol=0)
    assert torch.allclose(out[chosen], total[chosen], rtol=2**-10, atol=0)


def test_the_largest_and_smallest_numbers_there_are_stay_finite() -> None:
    most, least = torch.finfo(torch.float32).max, 2.0**-149
    for extreme in ([most, -most, 1.0, least], [least, 0.0, -3 * least, 2 * least]):
        tensor = torch.tensor(extreme)
        state = State(residual=torch.zeros(4), shadow=torch.empty(4))
        codec = TopKCodec(1.0, "sampled")
        out = decoded(codec, codec.encode(tensor, state), 4)
        assert state.shadow is not None and torch.equal(out + state.shadow, tensor)
        assert bool(out.isfinite().all()) and out[0] != 0


def test_adding_keeps_what_is_there() -> None:
    codec, numbers = TopKCodec(0.01, "sampled"), noise(COUNT)
    payload = codec.encode(numbers, State())
    out = torch.ones(COUNT)
    codec.decode(payload, out, add=True)
    assert torch.equal(out, 1 + decoded(codec, payload, COUNT))


def test_a_payload_follows_from_numbers_and_key() -> None:
    codec, numbers = TopKCodec(0.01, "sampled"), noise(COUNT)
    first, again = (codec.encode(numbers, feedback(COUNT, key=9)) for _ in range(2))
    assert torch.equal(first, again)


@BOTH
@pytest.mark.parametrize("what", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("count", [1, 100, COUNT])
@pytest.mark.parametrize("everywhere", [True, False])
def test_what_is_not_finite_is_told_and_never_remembered(
    what: float, count: int, everywhere: bool, method: str
) -> None:
    tensor, state = noise(count), feedback(count)
    place = slice(None) if everywhere else slice(count // 2, count // 2 + 1)
    tensor[place] = what
    codec = TopKCodec(0.01, method)
    payload = codec.encode(tensor, state)
    out = decoded(codec, payload, count)
    wrong = out.isfinite().logical_not().nonzero().view(-1)
    assert wrong.numel() == 1 and not math.isfinite(tensor[wrong])
    assert state.shadow is not None and state.residual is not None and torch.equal(state.shadow, state.residual)
    assert payload.numel() <= codec.most_bytes(count)
    added = torch.ones(count)
    codec.decode(payload, added, add=True)
    assert added.isnan().sum() == 1


def test_a_sum_that_overflows_is_not_finite() -> None:
    tensor = torch.full((100,), 3e38)
    state = State(residual=tensor.clone(), shadow=torch.empty(100))
    codec = TopKCodec(0.5, "sampled")
    assert decoded(codec, codec.encode(tensor, state), 100).isnan().any()
    assert state.shadow is not None and torch.equal(state.shadow, tensor)


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_one_hundredth_is_a_hundredth_of_the_bytes() -> None:
    count = 1_000_000
    length = TopKCodec(0.01, "sampled").encode(noise(count), State()).numel()
    assert 0.0099 * 4 * count < length <= 0.0102 * 4 * count


@pytest.mark.parametrize("density", [0.001, 0.05, 0.0625, 0.07, 0.3, 1.0])
def test_places_take_the_shorter_of_offsets_and_a_bitmap(density: float) -> None:
    codec = TopKCodec(density, "exact")
    payload = codec.encode(noise(COUNT), State())
    wanted = math.ceil(density * COUNT)
    assert payload.numel() <= HEADER_BYTES + min(2 * wanted, COUNT // 8) + 2 * wanted + 64
    assert payload.numel() % 8 == 0 and payload.numel() <= codec.most_bytes(COUNT)


@pytest.mark.parametrize("count", [1, 7, 8, 65535, 65536, 65537, 131_072 + 13])
@pytest.mark.parametrize("density", [0.02, 0.5, 1.0])
def test_blocks_of_any_length_come_back(count: int, density: float) -> None:
    numbers = noise(count).half().float()
    out = sent(TopKCodec(density, "exact"), numbers)
    assert int(out.count_nonzero()) == math.ceil(density * count)
    assert torch.equal(out[out != 0], numbers[out != 0])


def test_blocks_with_offsets_and_with_bitmaps_lie_in_one_payload() -> None:
    numbers = torch.zeros(5 * 65536 + 1000)
    for block, step in enumerate([1000, 2, 3000, 3, 500, 2]):
        numbers[block * 65536 : (block + 1) * 65536 : step] = block + 1.0
    numbers[3 * 65536 : 4 * 65536] *= -1
    assert torch.equal(sent(TopKCodec(1.0, "sampled"), numbers), numbers)


# -- damaged payloads --------------------------------------------------------------------------------------------------


def refused(payload: Tensor, count: int, because: str) -> None:
    out = torch.ones(count)
    with pytest.raises(PayloadError, match=because):
        TopKCodec(0.01, "exact").decode(payload, out, add=True)
    assert torch.equal(out, torch.ones(count))


def resealed(payload: Tensor, change: Callable[[Tensor], None], count: int, flags: int = 0) -> Tensor:
    """With a change to the body that its header agrees with."""
    changed = payload.clone()
    change(changed[HEADER_BYTES:])
    return payloads.seal(changed, "topk", count, flags)


SMALL = 70_000
"""Two blocks, of which the second is short."""
OFFSETS_AT = 8 + 8


def small(density: float = 0.01) -> Tensor:
    return TopKCodec(density, "exact").encode(noise(SMALL), State())


def test_any_flipped_byte_is_refused() -> None:
    payload = small(0.0005)
    for at in range(payload.numel()):
        damaged = payload.clone()
        damaged[at] ^= 0x41
        refused(damaged, SMALL, "payload")


def test_one_that_is_cut_short_or_for_another_count_is_refused() -> None:
    payload = small()
    refused(payload[:-8], SMALL, "bytes")
    refused(payload[:16], SMALL, "shorter")
    refused(payload, SMALL + 1, "numbers came")
    shorter = payloads.seal(payload[:-8].clone(), "topk", SMALL)
    refused(shorter, SMALL, "must have")
    refused(payloads.seal(payload[: HEADER_BYTES + 8].clone(), "topk", SMALL), SMALL, "too few")


def offsets_of(body: Tensor) -> Tensor:
    return body[OFFSETS_AT:].view(torch.int16)


def swap_offsets(body: Tensor) -> None:
    offsets_of(body)[:2] = offsets_of(body)[:2].flip(0)


def repeat_offset(body: Tensor) -> None:
    offsets_of(body)[1] = offsets_of(body)[0]


def count_of(body: Tensor) -> Tensor:
    return body[8:16].view(torch.int32)


def beyond_the_end(body: Tensor) -> None:
    offsets_of(body)[int(count_of(body).sum()) - 1] = -1


def test_places_that_do_not_rise_or_lie_beyond_the_end_are_refused() -> None:
    payload = small()
    for change in (swap_offsets, repeat_offset, beyond_the_end):
        refused(resealed(payload, change, SMALL), SMALL, "do not rise")


def set_counts(first: int, second: int) -> Callable[[Tensor], None]:
    def change(body: Tensor) -> None:
        count_of(body)[:] = torch.tensor([first, second], dtype=torch.int32)

    return change


def test_wrong_counts_are_refused() -> None:
    payload = small()
    first, second = count_of(payload[HEADER_BYTES:]).tolist()
    refused(resealed(payload, set_counts(first - 1, second + 1), SMALL), SMALL, "do not rise")
    refused(resealed(payload, set_counts(first + 8, second), SMALL), SMALL, "must have")
    refused(resealed(payload, set_counts(-1, second), SMALL), SMALL, "count for some block")
    refused(resealed(payload, set_counts(first, SMALL - 65536 + 1), SMALL), SMALL, "count for some block")
    refused(resealed(payload, set_counts(2**31 - 1, 2**31 - 1), SMALL), SMALL, "count for some block")


def test_a_bitmap_that_disagrees_with_its_count_is_refused() -> None:
    def flip_bit(body: Tensor) -> None:
        body[OFFSETS_AT] ^= 1

    refused(resealed(small(0.5), flip_bit, SMALL), SMALL, "bitmap")


def test_a_bitmap_that_goes_beyond_the_end_is_refused() -> None:
    count = 1003

    def move_bit(body: Tensor) -> None:
        """From the second number to where the last byte of the bitmap has no numbers left."""
        body[OFFSETS_AT] ^= 2
        body[OFFSETS_AT + count // 8] ^= 0x80

    payload = TopKCodec(1.0, "exact").encode(noise(count), State())
    refused(resealed(payload, move_bit, count), count, "do not rise")


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 1e-40, 2.0**114])
def test_a_scale_that_none_is_made_with_is_refused(scale: float) -> None:
    def change(body: Tensor) -> None:
        body[:4] = torch.tensor(list(struct.pack("<f", scale)), dtype=torch.uint8)

    refused(resealed(small(), change, SMALL), SMALL, "scale")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 65504.0])
def test_numbers_that_are_not_finite_are_refused_where_no_flag_tells(number: float) -> None:
    payload = small()
    total = int(count_of(payload[HEADER_BYTES:]).sum())
    numbers_at = OFFSETS_AT + -(-2 * total // 8) * 8

    def change(body: Tensor) -> None:
        body[numbers_at:].view(torch.float16)[3] = number

    refused(resealed(payload, change, SMALL), SMALL, "not finite")


def test_flags_are_checked() -> None:
    payload = small()
    refused(resealed(payload, lambda body: None, SMALL, flags=2), SMALL, "flags")
    refused(resealed(payload, lambda body: None, SMALL, flags=1), SMALL, "must name one")
    for index in (-1, SMALL):
        named = payloads.room(8, torch.device("cpu"))
        named[HEADER_BYTES:] = torch.tensor([index]).view(torch.uint8)
        refused(payloads.seal(named, "topk", SMALL, 1), SMALL, "must name one")
