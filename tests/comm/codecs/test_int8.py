"""int8: sizes, scales, rounding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shoal.comm.codecs.contract import State
from shoal.comm.codecs.int8 import Int8Codec
from shoal.comm.codecs.payload import HEADER_BYTES
from shoal.core.errors import PayloadError

LARGEST = torch.finfo(torch.float32).max


def numbers(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def decoded(codec: Int8Codec, tensor: Tensor, state: State | None = None) -> Tensor:
    out = torch.full_like(tensor, math.nan)
    codec.decode(codec.encode(tensor, state or State()), out, gauge=state.gauge if state else None)
    return out


@pytest.mark.parametrize(
    ("count", "block", "body"),
    [(0, 256, 0), (1, 256, 16), (256, 256, 264), (257, 256, 272), (513, 256, 16 + 520), (64, 8, 96)],
)
def test_a_payload_has_a_byte_a_number_and_four_a_block(count: int, block: int, body: int) -> None:
    codec = Int8Codec(block)
    assert codec.encode(numbers(count), State()).numel() == codec.most_bytes(count) == HEADER_BYTES + body


def test_a_payload_is_little_more_than_a_quarter() -> None:
    assert Int8Codec().most_bytes(1_000_000) <= 0.255 * 4_000_000


@pytest.mark.parametrize("count", [1, 300, 131_072, 131_073, 300_000])
def test_nothing_is_off_by_more_than_half_a_scale_of_its_block(count: int) -> None:
    given = numbers(count) * torch.logspace(-3, 3, count)
    off = (decoded(Int8Codec(), given) - given).abs()
    for start in range(0, count, 256):
        block = slice(start, start + 256)
        assert float(off[block].max()) <= 0.5001 / 127 * float(given[block].abs().max())


def test_the_largest_of_a_block_is_sent_as_it_is() -> None:
    given = torch.linspace(-1, 1, 256)
    assert float(decoded(Int8Codec(), given)[0]) == pytest.approx(-1, rel=1e-6)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_the_largest_numbers_stay_finite_and_keep_their_sign(rounding: str) -> None:
    given = torch.tensor([LARGEST, -LARGEST, 1e38, 0.0] * 64)
    found = decoded(Int8Codec(256, rounding), given, State(key=3))
    assert bool(torch.isfinite(found).all())
    torch.testing.assert_close(found, given, rtol=0.03, atol=0.0)


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-36])
def test_blocks_of_tiny_numbers_are_zeros_or_better(size: float) -> None:
    given = torch.full((256,), size)
    state = State(torch.zeros(256), torch.full((256,), math.nan))
    assert state.shadow is not None
    found = decoded(Int8Codec(), given, state)
    assert bool(((found - given).abs() <= given).all())
    assert torch.equal(found + state.shadow, given)


def test_only_the_block_of_what_is_not_finite_suffers() -> None:
    given = numbers(1000)
    given[300], given[990] = math.nan, -math.inf
    state = State(numbers(1000, 1), torch.full((1000,), math.nan))
    assert state.residual is not None and state.shadow is not None
    found = decoded(Int8Codec(), given, state)
    bad = torch.zeros(1000, dtype=torch.bool)
    bad[256:512] = bad[768:] = True
    assert torch.equal(torch.isfinite(found), ~bad)
    assert torch.equal(state.shadow[bad], state.residual[bad])
    assert float(state.shadow[~bad].abs().max()) < 0.03


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_what_is_lost_is_in_the_units_of_the_tensor_also_with_a_gauge(rounding: str) -> None:
    given, gauge = numbers(1000), torch.logspace(-6, 2, 1000)
    state = State(numbers(1000, 2) * 0.1, torch.full((1000,), math.nan), gauge, 5)
    assert state.residual is not None and state.shadow is not None
    found = decoded(Int8Codec(256, rounding), given * gauge, state)
    torch.testing.assert_close(found + state.shadow, given * gauge + state.residual)


def test_a_gauge_spreads_what_is_lost() -> None:
    gauge = torch.tensor([1e-3, 1e3]).repeat(128)
    given = numbers(256) * gauge
    found = decoded(Int8Codec(), given, State(gauge=gauge))
    assert float(((found - given) / gauge).abs().max()) < 0.02
    assert float(((decoded(Int8Codec(), given) - given) / gauge).abs().max()) > 0.5


def test_stochastic_rounding_is_right_on_average_and_off_by_less_than_a_scale() -> None:
    given = numbers(256)
    scale = float(given.abs().max()) / 127
    codec = Int8Codec(256, "stochastic")
    tries = torch.stack([decoded(codec, given, State(key=key)) for key in range(2000)])
    assert float((tries - given).abs().max()) <= scale * 1.001
    assert float((tries.mean(0) - given).abs().max()) < 5 * 0.5 * scale / math.sqrt(2000)


def test_stochastic_rounding_depends_on_the_key() -> None:
    codec, given = Int8Codec(256, "stochastic"), numbers(400_000)
    first = codec.encode(given, State(key=1))
    assert torch.equal(first, codec.encode(given, State(key=1)))
    assert not torch.equal(first, codec.encode(given, State(key=2)))


def test_the_largest_of_a_block_is_never_rounded_to_beyond_127() -> None:
    given = torch.full((1 << 20,), 0.7)
    found = decoded(Int8Codec(256, "stochastic"), given, State(key=1))
    torch.testing.assert_close(found, given)


def test_decoding_can_add() -> None:
    codec, given = Int8Codec(), numbers(1000)
    out = torch.ones(1000)
    codec.decode(codec.encode(given, State()), out, add=True)
    torch.testing.assert_close(out, 1 + decoded(codec, given))


def test_a_payload_of_another_block_is_refused() -> None:
    out = torch.zeros(1000)
    with pytest.raises(PayloadError, match="same options"):
        Int8Codec(128).decode(Int8Codec(256).encode(numbers(1000), State()), out)
    assert not out.any()
