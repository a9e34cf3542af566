"""onebit: sizes, bits, scales."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shoal.comm.codecs.contract import State
from shoal.comm.codecs.onebit import OneBitCodec
from shoal.comm.codecs.payload import HEADER_BYTES

LARGEST = torch.finfo(torch.float32).max


def numbers(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def decoded(codec: OneBitCodec, tensor: Tensor, state: State | None = None) -> Tensor:
    out = torch.full_like(tensor, math.nan)
    codec.decode(codec.encode(tensor, state or State()), out, gauge=state.gauge if state else None)
    return out


@pytest.mark.parametrize(
    ("count", "block", "body"),
    [(0, 1024, 0), (1, 1024, 16), (64, 1024, 16), (65, 1024, 24), (3073, 1024, 16 + 392), (192, 64, 16 + 24)],
)
def test_a_payload_has_a_bit_a_number_and_four_bytes_a_block(count: int, block: int, body: int) -> None:
    codec = OneBitCodec(block)
    assert codec.encode(numbers(count), State()).numel() == codec.most_bytes(count) == HEADER_BYTES + body


def test_a_payload_is_little_more_than_a_thirtysecond() -> None:
    assert OneBitCodec().most_bytes(1_000_000) <= 0.0323 * 4_000_000


@pytest.mark.parametrize("count", [1, 7, 8, 1023, 1024, 1025, 131_072, 131_079, 200_001])
def test_each_number_is_its_sign_times_the_mean_magnitude_of_its_block(count: int) -> None:
    given = numbers(count)
    found = decoded(OneBitCodec(), given)
    for start in range(0, count, 1024):
        block = given[start : start + 1024]
        torch.testing.assert_close(found[start : start + 1024], block.sign() * block.abs().mean())


def test_bits_are_in_order_from_the_lowest() -> None:
    given = torch.ones(20)
    given[[0, 3, 9, 19]] = -1.0
    body = OneBitCodec().encode(given, State())[HEADER_BYTES + 8 :]
    assert body.tolist() == [0b1001, 0b10, 0b1000, 0, 0, 0, 0, 0]


def test_bits_beyond_the_end_are_zeros() -> None:
    body = OneBitCodec().encode(numbers(131_072 + 3).abs().neg(), State())
    assert body[-8:].tolist() == [0b111, 0, 0, 0, 0, 0, 0, 0]


def test_means_of_the_largest_numbers_are_finite() -> None:
    given = torch.full((1500,), LARGEST)
    given[::2] *= -1
    torch.testing.assert_close(decoded(OneBitCodec(), given), given)


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-40])
def test_blocks_of_tiny_numbers_are_zeros_or_better(size: float) -> None:
    given = torch.full((1100,), size)
    state = State(torch.zeros(1100), torch.full((1100,), math.nan))
    assert state.shadow is not None
    found = decoded(OneBitCodec(), given, state)
    assert bool(((found - given).abs() <= given).all())
    assert torch.equal(found + state.shadow, given)


def test_only_the_block_of_what_is_not_finite_suffers() -> None:
    given = numbers(3000)
    given[1500], given[2999] = math.nan, math.inf
    state = State(numbers(3000, 1), torch.full((3000,), math.nan))
    assert state.residual is not None and state.shadow is not None
    found = decoded(OneBitCodec(), given, state)
    assert bool(torch.isfinite(found[:1024]).all()) and not bool(torch.isfinite(found[1024:]).any())
    assert torch.equal(state.shadow[1024:], state.residual[1024:])
    torch.testing.assert_close(found[:1024] + state.shadow[:1024], (given + state.residual)[:1024])


def test_what_is_lost_is_what_decoding_leaves_also_of_zeros_with_a_sign() -> None:
    given = numbers(2000)
    given[::5], given[1::5] = 0.0, -0.0
    state = State(torch.zeros(2000).neg_(), torch.full((2000,), math.nan))
    assert state.shadow is not None
    found = decoded(OneBitCodec(), given, state)
    torch.testing.assert_close(found + state.shadow, given, rtol=0, atol=1e-6)


def test_what_is_lost_is_in_the_units_of_the_tensor_also_with_a_gauge() -> None:
    gauge = torch.logspace(-4, 2, 1000)
    given = numbers(1000) * gauge
    state = State(numbers(1000, 2) * gauge, torch.full((1000,), math.nan), gauge)
    assert state.residual is not None and state.shadow is not None
    found = decoded(OneBitCodec(), given, state)
    torch.testing.assert_close(found + state.shadow, given + state.residual)
    torch.testing.assert_close((found / gauge).abs(), ((given + state.residual) / gauge).abs().mean().expand(1000))


def test_decoding_can_add() -> None:
    codec, given = OneBitCodec(), numbers(1500)
    out = torch.ones(1500)
    codec.decode(codec.encode(given, State()), out, add=True)
    torch.testing.assert_close(out, 1 + decoded(codec, given))
