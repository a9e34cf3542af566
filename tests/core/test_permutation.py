from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.permutation import Permutation

GOLDEN_10 = [7, 3, 5, 4, 6, 0, 8, 9, 1, 2]
GOLDEN_1000 = [837, 422, 672, 550, 133, 353, 100, 182]
GOLDEN_BILLION = [940666682, 584502442, 413853605, 522818496]

sizes = st.integers(1, 3000)
keys = st.integers(0, 2**63 - 1)


@given(size=sizes, key=keys)
def test_every_sample_has_exactly_one_position(size: int, key: int) -> None:
    order = Permutation(size, key).at(np.arange(size))
    assert sorted(order.tolist()) == list(range(size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 9, 10, 99, 100, 101, 1023, 1024, 1025, 65_536, 65_537])
def test_sizes_at_and_beside_squares_and_blocks(size: int) -> None:
    order = Permutation(size, 7).span(0, size)
    assert np.array_equal(np.sort(order), np.arange(size))


@given(data=st.data(), size=sizes, key=keys)
def test_a_span_is_what_its_positions_are(data: st.DataObject, size: int, key: int) -> None:
    permutation = Permutation(size, key)
    # several spans of one object: it remembers a block, and must not hand out a stale one
    for _ in range(4):
        start = data.draw(st.integers(0, size))
        stop = data.draw(st.integers(start, size))
        expected = Permutation(size, key).at(np.arange(start, stop))
        assert np.array_equal(permutation.span(start, stop), expected)


def test_a_billion_samples_cost_no_memory_and_no_time() -> None:
    size = 10**9
    tracemalloc.start()
    begun = time.perf_counter()
    try:
        permutation = Permutation(size, 3)
        spans = [permutation.span(start, start + 256) for start in (0, 123_456_789, size - 256)]
        seconds = time.perf_counter() - begun
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    samples = np.concatenate(spans)
    assert samples.min() >= 0 and samples.max() < size
    assert len(set(samples.tolist())) == len(samples)
    assert peak < 1 << 20
    assert seconds < 1.0


def test_beyond_32_bits() -> None:
    size = 10**15 + 7
    samples = Permutation(size, 1).span(size - 4096, size)
    assert len(set(samples.tolist())) == 4096
    assert samples.min() >= 0 and samples.max() < size
    assert samples.max() > 1 << 40


@given(size=st.integers(50, 3000), key=st.integers(0, 2**62))
def test_another_key_is_another_order(size: int, key: int) -> None:
    one, other = (Permutation(size, k).span(0, size) for k in (key, key + 1))
    assert np.count_nonzero(one == other) < size // 4 + 10


def test_all_orders_of_a_small_set_come_up() -> None:
    seen: dict[tuple[int, ...], int] = {}
    for key in range(2400):
        order = tuple(Permutation(4, key).span(0, 4).tolist())
        seen[order] = seen.get(order, 0) + 1
    assert len(seen) == 24
    # 100 of each are expected, give or take 10
    assert all(50 < count < 160 for count in seen.values()), seen


def test_samples_are_spread_evenly_over_positions() -> None:
    """Chi-square over 20 × 20 cells of (position, sample): 361 degrees of freedom, so 361 ± 27."""
    size, cells = 2000, 20
    table = np.zeros((cells, cells))
    for key in range(20):
        order = Permutation(size, key).span(0, size)
        np.add.at(table, (np.arange(size) * cells // size, order * cells // size), 1)
    expected = 20 * size / cells**2
    chi_square = float(((table - expected) ** 2 / expected).sum())
    assert 361 - 6 * 27 < chi_square < 361 + 6 * 27


def test_neighbours_do_not_stay_neighbours() -> None:
    order = Permutation(10_000, 5).span(0, 10_000)
    assert np.count_nonzero(np.abs(np.diff(order)) <= 1) < 15


def test_the_order_never_changes() -> None:
    """A run that resumes must meet the samples in the order of the version it was started with."""
    assert Permutation(10, 0).span(0, 10).tolist() == GOLDEN_10
    assert Permutation(1000, 12345).span(500, 508).tolist() == GOLDEN_1000
    assert Permutation(10**9, 2**62).span(10**9 - 4, 10**9).tolist() == GOLDEN_BILLION


@pytest.mark.parametrize("span", [(-1, 3), (0, 11), (6, 5), (11, 11)])
def test_positions_outside_are_refused(span: tuple[int, int]) -> None:
    with pytest.raises(IndexError, match="outside 0…10"):
        Permutation(10, 0).span(*span)


def test_an_empty_span_is_empty() -> None:
    assert Permutation(10, 0).span(10, 10).tolist() == []
    assert Permutation(10, 0).span(4, 4).tolist() == []


def test_no_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Permutation(0, 0)
