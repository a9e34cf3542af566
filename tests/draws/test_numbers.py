"""The hash: how its numbers are distributed, and what becomes of its most extreme ones."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shoal.draws import hashing, numbers
from shoal.draws.forward import Forward, Keying, seed_of
from shoal.draws.hashing import BLOCK, Elements, Grid, Keys, keys, spread

ROWS, LENGTH = 64, 4096
EXTREMES = [0, 1, 0x1FF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FE00, 0xFFFF_FFFE, 0xFFFF_FFFF]


def bits(salt: int, rows: int = ROWS, shape: tuple[int, ...] = (LENGTH,), first: int = 0) -> NDArray[np.uint32]:
    """The numbers of some rows."""
    grid = Grid.of(keys(spread(np.arange(first, first + rows)), salt), shape, 1)
    found = numbers.filled(grid, np.uint32, lambda words, place: np.copyto(place, words))
    return found.reshape(rows, -1)


class Fixed(Grid):
    """A grid whose hash gives the most extreme numbers."""

    def blocks(self) -> Iterator[tuple[slice, NDArray[np.uint32]]]:
        yield slice(0, self.size), np.array(EXTREMES, np.uint32)


EXTREME = Fixed(Keys(np.zeros(1, np.uint32), np.zeros(1, np.uint32)), Elements((len(EXTREMES),)), 1, len(EXTREMES))


def standardised(words: NDArray[np.uint32]) -> NDArray[np.float64]:
    return (words.astype(np.float64) / 2**32 - 0.5) * math.sqrt(12.0)


def sigmas(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    return float(abs((one * other).mean()) * math.sqrt(one.size))


SALTS = [seed_of(3, step, 0) for step in range(4)]


@pytest.mark.parametrize("salt", SALTS[:2])
def test_neighbours_are_not_correlated(salt: int) -> None:
    x = standardised(bits(salt))
    assert abs(x.mean()) * math.sqrt(x.size) < 4 and abs((x**2).mean() - 1) * math.sqrt(x.size / 0.8) < 4
    for lag in (1, 2, 16, 64, 1024):
        assert sigmas(x[:, lag:], x[:, :-lag]) < 4, f"elements {lag} apart"
    for lag in (1, 2, 32):
        assert sigmas(x[lag:], x[:-lag]) < 4, f"positions {lag} apart"


def test_draws_and_steps_are_not_correlated() -> None:
    steps = [standardised(bits(salt)) for salt in SALTS]
    assert max(sigmas(one, other) for at, one in enumerate(steps) for other in steps[:at]) < 4
    forward = Forward(Keying(), range(ROWS), SALTS[0])
    draws = [
        numbers.uniform(forward.draw("rand", (ROWS, LENGTH)).grid, torch.float64).numpy() * math.sqrt(12.0)
        - math.sqrt(3.0)
        for _ in range(4)
    ]
    assert max(sigmas(one, other) for at, one in enumerate(draws) for other in draws[:at]) < 4


@pytest.mark.parametrize("shape", [(4096,), (64, 64), (8, 16, 32)])
def test_single_bits_are_not_correlated(shape: tuple[int, ...]) -> None:
    """Each bit is 1 in half of all numbers, and agrees with its neighbours in half of them."""
    x = bits(SALTS[0], shape=shape)
    planes = np.unpackbits(x.view(np.uint8).reshape(*x.shape, 4), axis=-1).astype(np.float32) * 2 - 1
    bound = 5 / math.sqrt(x.size)  # 32 bits at a time
    assert np.abs(planes.mean((0, 1))).max() < bound
    assert np.abs((planes[1:] * planes[:-1]).mean((0, 1))).max() < bound
    assert np.abs((planes[:, 1:] * planes[:, :-1]).mean((0, 1))).max() < bound
    assert np.abs((planes[..., 1:] * planes[..., :-1]).mean((0, 1))).max() < bound


@pytest.mark.parametrize("byte", range(4))
def test_bytes_are_even(byte: int) -> None:
    found = bits(SALTS[1], rows=128).view(np.uint8).reshape(-1, 4)[:, byte]
    counts = np.bincount(found, minlength=256)
    expected = found.size / 256
    square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(square - 255) < 4.5 * math.sqrt(2 * 255)


def test_pairs_of_bytes_are_even() -> None:
    """Of an element and the next, and of a row and the next."""
    x = (bits(SALTS[2], rows=256) >> np.uint32(24)).astype(np.int64)
    for pairs in (x[:, 1:] * 256 + x[:, :-1], x[1:] * 256 + x[:-1]):
        counts = np.bincount(pairs.reshape(-1), minlength=65536)
        expected = pairs.size / 65536
        square = float(((counts - expected) ** 2 / expected).sum())
        assert abs(square - 65535) < 5 * math.sqrt(2 * 65535)


def test_no_window_of_a_row_is_found_in_another() -> None:
    """Two numbers side by side have 64 bits: among a million of them, at any shift, none should be there twice.

    With one word per row, there are pairs of rows with lines that have the same sums, and all of these are.
    """
    for shape in ((1024,), (256, 4)):
        x = bits(SALTS[3], rows=1024, shape=shape).astype(np.uint64)
        windows = np.sort(((x[:, 1::2] << np.uint64(32)) | x[:, ::2]).reshape(-1))
        assert (windows[1:] != windows[:-1]).all()


@pytest.mark.parametrize("words", [(0, 0), (0, 5), (5, 0)])
def test_rows_with_half_a_key_in_common_differ(words: tuple[int, int]) -> None:
    elements = Elements((LENGTH,)).piece(0, LENGTH)
    first, second = words
    one = hashing._hash(np.uint32(1), np.uint32(2), elements, (LENGTH,)).copy()
    other = hashing._hash(np.uint32(1 + first), np.uint32(2 + second), elements, (LENGTH,)).copy()
    if words == (0, 0):
        assert np.array_equal(one, other)
    else:
        assert (one == other).sum() < 3 and sigmas(standardised(one), standardised(other)) < 4


def test_keys_have_64_bits() -> None:
    found = keys(spread(np.arange(200_000)), 12345)
    whole = found.first.astype(np.uint64) << np.uint64(32) | found.second
    assert np.unique(whole).size == whole.size
    for half in found:
        # as many as there are with 32 random bits
        assert 199_985 < np.unique(half).size < 200_000
    other = keys(spread(np.arange(200_000)), 12346)
    assert not np.isin(whole, other.first.astype(np.uint64) << np.uint64(32) | other.second).any()


@pytest.mark.parametrize(
    "shape", [(), (5,), (3, 1), (40, 50, 60), (300_000,), (400, 1000), (200_000, 3), (2, 300, 1, 257), (90_000, 2)]
)
def test_the_words_of_elements_are_sums_over_coordinates(shape: tuple[int, ...]) -> None:
    expected = np.zeros(shape, np.uint32)
    for dimension, size in enumerate(shape):
        along = [1] * len(shape)
        along[dimension] = size
        expected += hashing._along(dimension, np.arange(size, dtype=np.uint32)).reshape(along)
    elements, flat = Elements(shape), expected.reshape(-1)
    size = elements.size
    assert size == flat.size and elements.kept <= max(2 * BLOCK, 1 << 18)
    for start, stop in ((0, size), (size // 3, size // 3 + 1), (size // 3, size - size // 3), (size - 1, size)):
        assert np.array_equal(elements.piece(start, stop), flat[start:stop])
    # almost no two elements of a row have the same word
    assert size - np.unique(flat).size <= 10 + size**2 / 2**32


@pytest.mark.parametrize(
    "shape, at",
    [((7, 5), 0), ((3, 7, 4), 1), ((6, 2, 7), 2), ((90, 7, 700), 1), ((7, 80_000), 0), ((3, 7, 40_000), 1), ((7,), 0)],
)
def test_a_tensor_in_blocks_is_the_tensor_row_by_row(shape: tuple[int, ...], at: int) -> None:
    rows = keys(spread(np.arange(7)), 5)
    inside = shape[:at] + shape[at + 1 :]
    whole = Grid.of(rows, inside, math.prod(shape[:at]))
    found = numbers.filled(whole, np.uint32, lambda words, place: np.copyto(place, words)).reshape(shape)
    for row in range(7):
        one = Keys(rows.first[row : row + 1], rows.second[row : row + 1])
        alone = numbers.filled(Grid.of(one, inside, 1), np.uint32, lambda words, place: np.copyto(place, words))
        assert np.array_equal(found.take(row, at), alone.reshape(inside))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_the_most_extreme_numbers(dtype: torch.dtype) -> None:
    uniform = numbers.uniform(lambda number: EXTREME, dtype).to(dtype)
    assert float(uniform.min()) > 0.0 and float(uniform.max()) < 1.0
    normal = numbers.normal(lambda number: EXTREME, dtype).to(dtype)
    assert torch.isfinite(normal).all() and 5.0 < float(normal.abs().max()) < 9.0
    exponential = numbers.exponential(lambda number: EXTREME, dtype).to(dtype)
    assert torch.isfinite(exponential).all() and float(exponential.min()) > 0.0
    for p in (0.0, 1.0):
        assert numbers.mask(EXTREME, p).tolist() == [bool(p)] * len(EXTREMES)


def test_whole_numbers_stay_within_bounds() -> None:
    for low, high in ((0, 1), (-3, 4), (0, 2**32), (0, 2**32 + 1), (-(2**63), 2**63 - 1), (2**62, 2**63 - 1)):
        found = numbers.whole(lambda number: EXTREME, low, high)
        assert found.dtype == np.int64 and low <= found.min() and found.max() < high


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_and_tails_of_normal_numbers(dtype: torch.dtype) -> None:
    size = 2_000_000
    x = numbers.normal(lambda n: Grid.of(keys(spread(np.arange(40)), 9 + n), (size // 40,), 1), dtype).double()
    assert x.numel() == size
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        assert abs(float((x**power).mean()) - expected) < 4 * math.sqrt(variance / size)
    for bound in (1.0, 2.0, 3.0, 4.0):
        share = math.erfc(bound / math.sqrt(2)) / 2
        for side in (x, -x):
            assert abs(float((side > bound).double().mean()) - share) < 4.5 * math.sqrt(share / size)


def test_moments_of_others() -> None:
    grids = lambda n: Grid.of(keys(spread(np.arange(40)), 11 + n), (20_000,), 1)  # noqa: E731
    for dtype in (torch.float32, torch.float64):
        x = numbers.uniform(grids, dtype).double()
        assert abs(float(x.mean()) - 0.5) < 4 / math.sqrt(12 * x.numel())
        y = numbers.exponential(grids, dtype).double()
        assert abs(float(y.mean()) - 1) < 4 / math.sqrt(y.numel())
        assert abs(float((y > 5).double().mean()) - math.exp(-5)) < 4 * math.sqrt(math.exp(-5) / y.numel())
    # the lower half of a double's bits is random too
    low = (numbers.uniform(grids, torch.float64).numpy() * 2**52).astype(np.int64) & 0xFFFF
    assert abs(low.mean() - 0x7FFF) < 4 * 0x10000 / math.sqrt(12 * low.size)
    whole = numbers.whole(grids, 0, 1000)
    counts = np.bincount(whole, minlength=1000)
    assert abs(float(((counts - 800.0) ** 2 / 800).sum()) - 999) < 4.5 * math.sqrt(2 * 999)


def test_what_is_kept_for_shapes_is_bounded() -> None:
    kept = hashing._Kept()
    for length in range(1, 400):
        kept.of((length, 512, 8))
    assert kept._size <= hashing._KEPT and kept._size == sum(each.kept for each in kept._all.values())
