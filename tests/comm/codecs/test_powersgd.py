"""PowerSGD as a codec of one stretch of numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.comm.codecs.contract import State
from shoal.comm.codecs.payload import HEADER_BYTES, seal
from shoal.comm.codecs.powersgd import PowerSGDCodec
from shoal.core.errors import ConfigError, PayloadError


def numbers(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def low_rank(rank: int, rows: int, cols: int) -> Tensor:
    return (numbers(rows * rank).view(rows, rank) @ numbers(rank * cols, 1).view(rank, cols)).view(-1)


def through(codec: PowerSGDCodec, given: Tensor, state: State | None = None) -> Tensor:
    out = torch.full_like(given, 7.0)
    state = state or State(key=3)
    payload = codec.encode(given, state)
    assert payload.dtype == torch.uint8 and payload.numel() == codec.most_bytes(given.numel())
    assert payload.numel() % 8 == 0
    codec.decode(payload, out, gauge=state.gauge)
    return out


def error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("rank", [1, 3, 8, 100])
@pytest.mark.parametrize("rows", [1, 7, 32, 5000])
@pytest.mark.parametrize("count", [0, 1, 2, 31, 1024, 1500, 1501])
def test_what_is_lost_is_at_most_all(rank: int, rows: int, count: int) -> None:
    codec, given = PowerSGDCodec(rank, rows), numbers(count)
    lost = (through(codec, given) - given).norm()
    assert lost <= given.norm()
    assert (codec.most_bytes(count) < HEADER_BYTES + 4 * count) == bool(lost)  # exact, or shorter


def test_what_has_no_more_than_this_rank_comes_through() -> None:
    for rank in (1, 2, 4):
        given = low_rank(rank, 48, 36)
        assert error(through(PowerSGDCodec(4, 48), given), given) < 1e-5


def test_the_approximation_is_near_the_best_one() -> None:
    given = low_rank(4, 96, 80) + 0.5 * numbers(96 * 80, 2)
    left, values, right = torch.linalg.svd(given.view(96, 80))
    best = error((left[:, :4] * values[:4] @ right[:4]).view(-1), given)
    assert best <= error(through(PowerSGDCodec(4, 96), given), given) < 1.05 * best


def test_the_rest_of_a_stretch_comes_through_as_it_is() -> None:
    codec, given = PowerSGDCodec(2, 32), numbers(32 * 40 + 13)
    out = through(codec, given)
    assert torch.equal(out[32 * 40 :], given[32 * 40 :]) and not torch.equal(out, given)
    assert codec.most_bytes(given.numel()) == HEADER_BYTES + 4 * (2 + 2 * (32 + 40) + 13 + 1)


def test_numbers_and_what_is_lost_of_them_are_what_was_there() -> None:
    codec, residual = PowerSGDCodec(2, 32), numbers(1500, 5)
    kept, shadow, gauge = residual.clone(), torch.empty(1500), numbers(1500, 6).abs() + 0.1
    for weights in (None, gauge):
        given = numbers(1500)
        state = State(residual, shadow, weights, key=1)
        out = through(codec, given, state)
        torch.testing.assert_close(out + shadow, given + residual)
        assert torch.equal(given, numbers(1500)) and torch.equal(residual, kept)
    weighed = through(codec, (numbers(1500) + residual) / gauge, State(key=1)) * gauge
    torch.testing.assert_close(out, weighed)


def test_what_is_left_stays_bounded() -> None:
    codec, residual, shadow = PowerSGDCodec(2, 16), torch.zeros(512), torch.empty(512)
    sizes = []
    for step in range(600):
        codec.encode(numbers(512, step), State(residual, shadow, key=step))
        residual, shadow = shadow, residual
        sizes.append(float(residual.norm()))
    assert max(sizes[-200:]) < 1.3 * max(sizes[100:300])


def test_a_payload_depends_on_numbers_and_key_only() -> None:
    codec, given = PowerSGDCodec(2, 32), numbers(1501)
    first = codec.encode(given, State(key=-5))
    torch.rand(3)
    assert torch.equal(first, codec.encode(given.clone(), State(key=-5)))
    assert not torch.equal(first, codec.encode(given, State(key=6)))


def test_decoding_can_add() -> None:
    codec, given = PowerSGDCodec(2, 32), numbers(1500)
    out = torch.ones(1500)
    codec.decode(codec.encode(given, State(key=3)), out, add=True)
    torch.testing.assert_close(out, through(codec, given) + 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 777, 1499])
@pytest.mark.parametrize("rows", [32, 5000])
def test_what_is_not_finite_is_seen_and_not_kept(bad: float, place: int, rows: int) -> None:
    given, residual, shadow = numbers(1500), numbers(1500, 1), torch.empty(1500)
    given[place] = bad
    assert not torch.isfinite(through(PowerSGDCodec(2, rows), given, State(residual, shadow))).all()
    assert torch.equal(shadow, residual)


@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-38, 1e-20, 1e20, 3e38])
def test_all_magnitudes(scale: float) -> None:
    pattern = numbers(32 * 40).sign().view(32, 40)[:, :1].expand(32, 40).contiguous()  # of rank one
    given, shadow = pattern.view(-1) * scale, torch.empty(32 * 40)
    out = through(PowerSGDCodec(2, 32), given, State(torch.zeros(32 * 40), shadow))
    assert torch.isfinite(out).all() and torch.isfinite(shadow).all()
    torch.testing.assert_close(out, given, rtol=1e-5, atol=2e-45)


def test_the_largest_number_of_all_does_not_become_infinite() -> None:
    given = torch.full((32 * 40,), torch.finfo(torch.float32).max)
    assert torch.isfinite(through(PowerSGDCodec(1, 32), given)).all()


def test_what_is_damaged_or_of_another_shape_is_refused() -> None:
    codec = PowerSGDCodec(2, 32)
    payload, out = codec.encode(numbers(1500), State()), torch.zeros(1500)
    broken = payload.clone()
    broken[100] ^= 1
    for wrong in (
        broken,
        payload[:-8],
        seal(payload.clone(), "int8", 1500),
        seal(payload.clone(), "powersgd", 1500, 1),
    ):
        with pytest.raises(PayloadError):
            codec.decode(wrong, out)
    for other in (PowerSGDCodec(3, 32), PowerSGDCodec(2, 31)):
        with pytest.raises(PayloadError, match="numbers at rank"):
            other.decode(payload, out)
    with pytest.raises(PayloadError):
        codec.decode(payload, torch.zeros(1499))
    assert not out.any()


def test_rank_and_rows_must_be_positive() -> None:
    for rank, rows in ((0, 4), (4, 0)):
        with pytest.raises(ConfigError, match="must be at least 1"):
            PowerSGDCodec(rank, rows)
