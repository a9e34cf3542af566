"""The conformance suite of codecs: what `shoal.comm.codecs.contract` promises of them, as cases for any codec.

    check_codec(Claim(lambda: MyCodec(), kept=0.5))

A codec says what it claims (`Claim`), and is held to it. `shoal.testing.codec_sums` does the same for sums over groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.codecs.contract import Codec, State, flat
from shoal.comm.codecs.payload import CODECS, HEADER_BYTES, seal
from shoal.core.errors import PayloadError

LENGTHS = (0, 1, 2, 7, 8, 63, 64, 65, 255, 256, 257, 1000, 4099)
EPS = torch.finfo(torch.float32).eps
TINY = torch.finfo(torch.float32).tiny


class CaseFailed(AssertionError):
    """A case did not hold; the message begins with its name."""


@dataclass(frozen=True)
class Claim:
    """A codec, and what it says of itself."""

    make: Callable[[], Codec]
    kept: float
    """Contraction: ‖x − decoded‖² ≤ (1 − kept) ‖x‖² for every x, where `count` numbers are at most `LENGTHS`' largest;
    1 is without loss."""
    error: Callable[[Tensor], Tensor] | None = None
    """A bound on the error of each number, given all of them; None claims nothing of single numbers."""
    unbiased: bool = False
    """The mean of what is decoded, over keys, is what was encoded."""
    tiny: float = 0.0
    """Errors up to this large are granted in any number besides: denormals may be lost."""


def gradient(count: int, seed: int = 0) -> Tensor:
    """Numbers as gradients have them: stretches of different scales, some zeros."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(count, generator=generator)
    scales = 10.0 ** torch.linspace(-1, -4, max(1, -(-count // 100)))
    numbers *= scales.repeat_interleave(100)[:count]
    return numbers.masked_fill_(torch.rand(count, generator=generator) < 0.05, 0.0)


def round_trip(codec: Codec, payload: Tensor, count: int, gauge: Tensor | None = None) -> Tensor:
    """What is decoded, into memory that holds something else."""
    out = torch.full((count,), torch.nan)
    codec.decode(payload, out, gauge=gauge)
    return out


def with_residual(residual: Tensor, key: int = 0, gauge: Tensor | None = None) -> State:
    return State(residual, torch.full_like(residual, torch.nan), gauge, key)


def check_codec(claim: Claim, *, leave_out: Collection[str] = ()) -> None:
    """Put a codec through all cases but those in `leave_out`. Raises `CaseFailed`."""
    unknown = sorted(set(leave_out) - set(CASES))
    if unknown:
        raise ValueError(f"there is no case {unknown[0]!r} to leave out; there are {', '.join(CASES)}")
    for name, case in CASES.items():
        if name in leave_out:
            continue
        try:
            case(claim)
        except Exception as error:
            raise CaseFailed(f"{name}: codec {claim.make().name}: {error!r}") from error


# -- what is lost ------------------------------------------------------------------------------------------------------


def assert_close(claim: Claim, numbers: Tensor, decoded: Tensor, what: object = "") -> None:
    """Decoded numbers are as near as claimed."""
    wide, off = numbers.double(), (decoded.double() - numbers.double()).abs()
    assert bool(torch.isfinite(decoded).all()), (what, "finite numbers decode to finite ones")
    granted = claim.tiny * math.sqrt(max(1, numbers.numel())) + 4 * EPS * float(wide.norm())
    lost, most = float(off.norm()), math.sqrt(1 - claim.kept) * float(wide.norm()) + granted
    assert lost <= most, f"{what}: {lost:g} is lost where at most {most:g} is claimed"
    if claim.error is not None:
        over = off > claim.error(wide) + 4 * EPS * wide.abs() + claim.tiny
        assert not over.any(), f"{what}: number {int(over.nonzero()[0])} is off by {float(off[over][0]):g}"


def errors_are_as_claimed(claim: Claim) -> None:
    codec = claim.make()
    for count in LENGTHS:
        for seed, numbers in enumerate((gradient(count), torch.ones(count), -gradient(count, 1), torch.zeros(count))):
            before = numbers.clone()
            payload = codec.encode(numbers, State(key=seed))
            assert torch.equal(numbers, before), "what is encoded is not changed"
            assert_close(claim, numbers, round_trip(codec, payload, count), (count, seed))


def payloads_have_the_right_length(claim: Claim) -> None:
    codec = claim.make()
    for count in LENGTHS:
        payload = codec.encode(gradient(count), State())
        most = codec.most_bytes(count)
        assert payload.dtype == torch.uint8 and payload.dim() == 1 and payload.is_contiguous(), payload.dtype
        assert payload.numel() % 8 == 0 and payload.numel() <= most, (count, payload.numel(), most)
        assert payload.numel() == most or not codec.fixed, (count, payload.numel(), most)


def unbiased_if_claimed(claim: Claim) -> None:
    if not claim.unbiased:
        return
    codec, numbers, draws = claim.make(), gradient(600), 400
    found = torch.stack([round_trip(codec, codec.encode(numbers, State(key=key)), 600) for key in range(draws)])
    spread = found.double().std(0) / math.sqrt(draws)
    off = (found.double().mean(0) - numbers.double()).abs()
    # what is drawn once in some hundred times is not seen in the spread
    rare = claim.error(numbers.double()) * 10 / draws if claim.error is not None else 0.0
    assert bool((off <= 5.5 * spread + rare + 8 * EPS * numbers.abs()).all()), (
        "the mean over keys is not what was encoded"
    )
    assert bool(spread.max() > 0), "numbers do not depend on the key"


def a_key_determines_a_payload(claim: Claim) -> None:
    codec, numbers = claim.make(), gradient(1000)
    for key in (0, 1, 1 << 40, (1 << 62) + 5):
        before = torch.get_rng_state()
        first = codec.encode(numbers, State(key=key))
        torch.rand(7)
        assert torch.equal(first, claim.make().encode(numbers, State(key=key))), f"key {key}"
        torch.set_rng_state(before)
        codec.encode(numbers, State(key=key))
        assert torch.equal(before, torch.get_rng_state()), "the random numbers of the script are not used up"


# -- feedback ----------------------------------------------------------------------------------------------------------


def nothing_is_lost_with_feedback(claim: Claim) -> None:
    """tensor + residual = decoded + shadow, for each number, and the residual stays."""
    codec = claim.make()
    for count in LENGTHS:
        for gauge in (None, gauge_of(count)):
            numbers, residual = gradient(count), 0.3 * gradient(count, 5)
            state, kept = with_residual(residual, 3, gauge), residual.clone()
            payload = codec.encode(numbers, state)
            assert torch.equal(residual, kept), "the residual is not changed"
            assert_conserved(codec, payload, numbers, state, (count, gauge is not None))


def assert_conserved(codec: Codec, payload: Tensor, numbers: Tensor, state: State, what: object = "") -> None:
    assert state.residual is not None and state.shadow is not None
    assert bool(torch.isfinite(state.shadow).all()), (what, "the shadow is written completely")
    decoded = round_trip(codec, payload, numbers.numel(), state.gauge).double()
    given = numbers.double() + state.residual.double()
    slack = 4 * EPS * (numbers.abs() + state.residual.abs() + decoded.abs()).double() + 4 * TINY
    over = (decoded + state.shadow.double() - given).abs() > slack
    assert not over.any(), f"{what}: at {int(over.nonzero()[0])} decoded + shadow is not tensor + residual"


def gauge_of(count: int) -> Tensor:
    """Powers of two: dividing by them is exact."""
    return 2.0 ** (torch.arange(count) % 13 - 9).float()


def errors_are_as_claimed_under_a_gauge(claim: Claim) -> None:
    codec = claim.make()
    for count in LENGTHS:
        numbers, gauge = gradient(count), gauge_of(count)
        decoded = round_trip(codec, codec.encode(numbers, State(gauge=gauge, key=1)), count, gauge)
        divided = round_trip(codec, codec.encode(numbers / gauge, State(key=1)), count)
        assert torch.equal(decoded, divided * gauge), (count, "tensor / gauge is encoded, decoding multiplies by it")


def residuals_stay_bounded(claim: Claim, steps: int = 300, count: int = 300) -> None:
    """With contraction they are at most √(1 − kept) / (1 − √(1 − kept)) times the largest gradient; nothing is lost."""
    codec, rate = claim.make(), math.sqrt(1 - claim.kept)
    fixed, residual, shadow = gradient(count, 99), torch.zeros(count), torch.zeros(count)
    given, applied, most, largest = torch.zeros(count).double(), torch.zeros(count).double(), 0.0, 0.0
    out, gradients = torch.zeros(count), [fixed + gradient(count, seed) for seed in range(min(steps, 97))]
    for step in range(steps):
        numbers = gradients[step % 97]
        codec.decode(codec.encode(numbers, State(residual, shadow, None, step)), out)
        residual, shadow = shadow, residual
        given += numbers
        applied += out
        most, largest = max(most, float(residual.norm())), max(largest, float(numbers.norm()))
    bound = (rate / (1 - rate) + 1e-5) * largest + steps * claim.tiny
    assert most <= bound, f"residuals grow to {most:g} over {steps} steps, where {bound:g} is the most"
    off = float((given - applied - residual).norm())
    assert off <= 1e-6 * math.sqrt(steps) * (largest + most), f"{off:g} was lost over {steps} steps"


# -- odd numbers -------------------------------------------------------------------------------------------------------


def huge_numbers(claim: Claim) -> None:
    codec = claim.make()
    for count in (1, 2, 300):
        for numbers in (torch.full((count,), 3e38), 3e38 * gradient(count).sign(), 1e36 * gradient(count)):
            assert_close(claim, numbers, round_trip(codec, codec.encode(numbers, State()), count), count)
            state = with_residual(torch.zeros(count))
            codec.encode(numbers, state)
            assert state.shadow is not None and bool(torch.isfinite(state.shadow).all()), "a shadow is finite"
        state = with_residual(torch.full((count,), 3e38))
        payload = codec.encode(torch.full((count,), 3e38), state)
        assert state.shadow is not None and bool(torch.isfinite(state.shadow).all()), "a shadow is finite"
        assert not torch.isfinite(round_trip(codec, payload, count)).all(), "3e38 + 3e38 is not finite"


def tiny_numbers(claim: Claim) -> None:
    codec = claim.make()
    for count in (1, 2, 300):
        for numbers in (torch.full((count,), 1e-40), 1e-38 * gradient(count).sign(), 1e-37 * gradient(count)):
            decoded = round_trip(codec, codec.encode(numbers, State()), count)
            assert bool(torch.isfinite(decoded).all()), "denormals decode to finite numbers"
            largest = float(numbers.abs().max())
            assert float(decoded.abs().max()) <= 2 * largest + claim.tiny, (count, "they stay as tiny")
            state = with_residual(torch.zeros(count))
            assert_conserved(codec, codec.encode(numbers, state), numbers, state, count)


def numbers_that_are_not_finite(claim: Claim) -> None:
    codec = claim.make()
    for bad in (torch.nan, torch.inf, -torch.inf):
        for count, at in ((1, 0), (300, 0), (300, 150), (300, 299), (4099, 4098)):
            numbers, residual = gradient(count), 0.1 * gradient(count, 2)
            numbers[at] = bad
            plain = round_trip(codec, codec.encode(numbers, State()), count)
            assert not torch.isfinite(plain).all(), (bad, count, at, "what is not finite is seen")
            state = with_residual(residual)
            decoded = round_trip(codec, codec.encode(numbers, state), count)
            assert not torch.isfinite(decoded).all(), (bad, count, at, "what is not finite is seen")
            assert state.shadow is not None and bool(torch.isfinite(state.shadow).all()), (bad, count, at, "shadow")
            assert state.shadow[at] == residual[at], (bad, count, at, "there the shadow is the old residual")


def dtypes_and_views(claim: Claim) -> None:
    codec = claim.make()
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        whole = gradient(1200).to(dtype).view(30, 40)
        for view in (whole, whole.t(), whole[::2, 1::3], whole[:0], whole[3, 5], whole.view(5, 6, 40).transpose(0, 2)):
            numbers, before = flat(view), view.clone()
            assert numbers.dtype == torch.float32 and numbers.is_contiguous() and numbers.dim() == 1
            decoded = round_trip(codec, codec.encode(numbers, State()), numbers.numel())
            assert_close(claim, view.to(torch.float32).reshape(-1), decoded, (dtype, tuple(view.shape)))
            assert torch.equal(view, before), (dtype, "a view is not changed")
    inside = torch.randn(700)
    part, alone = inside[3:603], inside[3:603].clone()
    assert torch.equal(codec.encode(part, State()), codec.encode(alone, State())), "a part of a larger vector"


# -- payloads ----------------------------------------------------------------------------------------------------------


def decoding_adds(claim: Claim) -> None:
    codec = claim.make()
    for count in LENGTHS:
        for gauge in (None, gauge_of(count)):
            payload = codec.encode(gradient(count), State(gauge=gauge))
            decoded, there = round_trip(codec, payload, count, gauge), gradient(count, 8)
            out, kept = there.clone(), payload.clone()
            codec.decode(payload, out, gauge=gauge, add=True)
            assert torch.equal(payload, kept), "a payload is not changed"
            slack = 2 * EPS * (there.abs() + decoded.abs())
            assert bool(((out - (there + decoded)).abs() <= slack).all()), (count, "decoding adds to what is there")


def payloads_in_longer_rows(claim: Claim) -> None:
    codec, numbers = claim.make(), gradient(257)
    payload = codec.encode(numbers, State())
    row = torch.cat([payload, torch.full((24,), 255, dtype=torch.uint8)])
    assert torch.equal(round_trip(codec, payload, 257), round_trip(codec, row, 257)), "what follows is ignored"


def assert_refused(codec: Codec, payload: Tensor, count: int, what: object) -> None:
    out = torch.full((count,), 7.0)
    try:
        codec.decode(payload, out)
    except PayloadError:
        assert bool((out == 7.0).all()), (what, "nothing is made of what is refused")
        return
    raise AssertionError(f"{what}: a payload that was damaged is decoded")


def damaged_payloads_are_refused(claim: Claim) -> None:
    """Every truncation, one flipped bit in any byte, wrong counts, and what is no payload at all."""
    codec, count = claim.make(), 70
    payload = codec.encode(gradient(count), State())
    for length in range(payload.numel()):
        assert_refused(codec, payload[:length], count, f"cut to {length} bytes of {payload.numel()}")
    for at in range(payload.numel()):
        damaged = payload.clone()
        damaged[at] ^= 1 << at % 8
        assert_refused(codec, damaged, count, f"bit {at % 8} of byte {at} flipped")
    for wrong in (0, count - 1, count + 1, 10 * count):
        assert_refused(codec, payload, wrong, f"decoded as {wrong} numbers")
    assert_refused(codec, torch.zeros(64, dtype=torch.uint8), count, "zeros")
    assert_refused(codec, payload.to(torch.int32), count, "bytes as words")


def forged_payloads_do_no_harm(claim: Claim) -> None:
    """Whoever makes the sum over the bytes right still gets no other error, and nothing but the numbers changed."""
    codec, count = claim.make(), 70
    payload, generator = codec.encode(gradient(count), State()), torch.Generator().manual_seed(4)
    name = next(name for name, code in CODECS.items() if code == int(payload[4]))
    flags = int(payload[5])
    for trial in range(150):
        forged = payload.clone()
        body = forged[HEADER_BYTES:]
        if trial % 3 == 2:
            forged = forged[: HEADER_BYTES + 8 * int(torch.randint(0, body.numel() // 8 + 1, (), generator=generator))]
        elif body.numel():
            places = torch.randint(0, body.numel(), (1 + trial % 9,), generator=generator)
            body[places] = torch.randint(0, 256, places.shape, generator=generator, dtype=torch.uint8)
        forged = seal(forged.clone(), name, count, flags if trial % 4 else trial % 256)
        around = torch.full((count + 32,), 7.0)
        try:
            codec.decode(forged, around[16:-16])
        except PayloadError:
            assert bool((around == 7.0).all()), (trial, "nothing is made of what is refused")
        assert bool((around[:16] == 7.0).all() and (around[-16:] == 7.0).all()), (trial, "numbers beside are changed")


CASES: dict[str, Callable[[Claim], None]] = {
    case.__name__: case
    for case in (
        errors_are_as_claimed,
        payloads_have_the_right_length,
        unbiased_if_claimed,
        a_key_determines_a_payload,
        nothing_is_lost_with_feedback,
        errors_are_as_claimed_under_a_gauge,
        residuals_stay_bounded,
        huge_numbers,
        tiny_numbers,
        numbers_that_are_not_finite,
        dtypes_and_views,
        decoding_adds,
        payloads_in_longer_rows,
        damaged_payloads_are_refused,
        forged_payloads_do_no_harm,
    )
}
"""By name, in the order in which they run."""
