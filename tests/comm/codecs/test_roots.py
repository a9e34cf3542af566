"""Squares of gradients in 8 bits: what is lost of each, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.comm.codecs.contract import State
from shoal.comm.codecs.int8 import Int8Codec
from shoal.comm.codecs.memory import Memory
from shoal.comm.codecs.payload import HEADER_BYTES
from shoal.comm.codecs.roots import RootCodec
from shoal.comm.codecs.twophase import TwoPhaseSum
from shoal.core.errors import PayloadError
from shoal.testing.fake_group import FakeGroup, run_members

BLOCK = 256


def through(numbers: Tensor) -> Tensor:
    codec, out = RootCodec(BLOCK), torch.full_like(numbers, torch.nan)
    codec.decode(codec.encode(numbers, State()), out)
    return out


def squares(count: int) -> Tensor:
    """Over many orders of magnitude, as squares of gradients are."""
    random = torch.Generator().manual_seed(count)
    sizes = 10 ** torch.empty(count).uniform_(-5, 0, generator=random)
    return (torch.randn(count, generator=random) * sizes).square()


@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, 5 * BLOCK + 3])
def test_fourth_roots_are_off_by_half_a_step_of_their_block(count: int) -> None:
    numbers = squares(count)
    found = through(numbers)
    for start in range(0, count, BLOCK):
        roots, back = (part[start : start + BLOCK].double() ** 0.25 for part in (numbers, found))
        assert float((roots - back).abs().max()) <= float(roots.max()) / 254 * (1 + 1e-4)


def test_large_numbers_lose_little_and_small_ones_stay_above_nothing() -> None:
    shares = torch.tensor([1.0, 1e-2, 1e-4, 1e-6, 4e-9, 1e-10])
    numbers = shares * 7e-5
    off = ((through(numbers) - numbers) / numbers).abs()
    assert off[0] < 1e-5 and off[1] < 0.06 and off[2] < 0.2 and off[3] < 0.6
    assert float(through(numbers)[4]) > 0.0  # where 8 bits of the numbers themselves end at 4e-3
    assert float(through(numbers)[5]) == 0.0
    plain = torch.empty_like(numbers)
    codec = Int8Codec(BLOCK, "nearest")
    codec.decode(codec.encode(numbers, State()), plain)
    assert float(plain[2]) == 0.0


def test_zeros_stay_zeros_and_nothing_becomes_negative() -> None:
    numbers = squares(1000)
    numbers[::3] = 0.0
    found = through(numbers)
    assert bool((found[::3] == 0).all()) and bool((found >= 0).all())
    assert torch.equal(through(torch.zeros(300)), torch.zeros(300))


def test_the_numbers_given_stay_as_they_are_and_may_be_added_to_others() -> None:
    numbers = squares(700)
    before = numbers.clone()
    codec, out = RootCodec(BLOCK), torch.full((700,), 2.0)
    payload = codec.encode(numbers, State())
    codec.decode(payload, out, add=True)
    assert torch.equal(numbers, before)
    assert torch.equal(out, 2.0 + through(numbers))
    assert payload.numel() == codec.most_bytes(700) < 700 * 1.2 + HEADER_BYTES


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    numbers = squares(600)
    numbers[300] = bad
    assert not bool(torch.isfinite(through(numbers)).all())


def test_a_damaged_payload_is_refused() -> None:
    codec, out = RootCodec(BLOCK), torch.full((600,), 3.0)
    payload = codec.encode(squares(600), State())
    payload[HEADER_BYTES + 20] ^= 1
    with pytest.raises(PayloadError, match="damaged"):
        codec.decode(payload, out)
    assert bool((out == 3.0).all())


def test_members_add_up_squares_to_the_same_bits() -> None:
    def member(group: FakeGroup) -> tuple[Tensor, Tensor]:
        own = squares(900 + group.rank)[:900]
        total = own.clone()
        TwoPhaseSum(group, RootCodec(), False).sum(total, Memory(900, own.device))
        return own, total

    owns, totals = zip(*run_members(3, member), strict=True)
    assert all(torch.equal(total, totals[0]) for total in totals)
    truth = torch.stack(owns).double().sum(0)
    large = truth > 0.01 * truth.max()
    assert int(large.sum()) > 20
    assert float(((totals[0] - truth) / truth)[large].abs().max()) < 0.15
