"""Measuring a group: with a clock that is made up, to know what must come out, and with real members."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.comm import bench
from shoal.comm.bench import LEAST_REPETITIONS, MOST_REPETITIONS, OPERATIONS, measure, memcpy_bandwidth
from shoal.comm.group import Done, Group, SoloGroup, Work
from shoal.core.errors import ConfigError
from shoal.core.linkfit import Point, fit
from shoal.testing.ranks import run_ranks

SIZES = [4 << power for power in range(0, 25, 2)]


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Link(SoloGroup):
    """A group over a link of which everything is known: sums take `latency` and `per_byte`, all else nothing."""

    def __init__(self, clock: Clock, latency: float, per_byte: float) -> None:
        super().__init__()
        self.clock, self.latency, self.per_byte = clock, latency, per_byte
        self.sums = 0

    def sum(self, buffer: Tensor, kind: str = "gradient") -> Work:
        self.sums += 1
        self.clock.now += self.latency + self.per_byte * buffer.nbytes
        return Done()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(bench, "time", made)
    return made


def test_the_link_is_found_again(clock: Clock) -> None:
    points = measure(Link(clock, 1e-5, 1e-9), "sum", SIZES, budget_seconds=60)
    assert [point.bytes for point in points] == SIZES
    for point in points:
        assert point.seconds == pytest.approx(1e-5 + 1e-9 * point.bytes, rel=1e-6)
        assert point.low <= point.seconds <= point.high
        assert point.repetitions == MOST_REPETITIONS
    model = fit(points)
    assert (model.latency, model.bandwidth) == (pytest.approx(1e-5, rel=1e-3), pytest.approx(1e9, rel=1e-3))


def test_a_point_is_the_median_of_the_slowest_member(clock: Clock) -> None:
    class WithAnother(Link):
        def gather(self, buffer: Tensor, kind: str = "control") -> Tensor:
            other = buffer.clone()
            other[:6] *= 3  # slower in 6 of 10 repetitions
            other[6:] /= 3  # and waits for nothing in the others
            return torch.stack([buffer, other])

    # a warm-up and a trial, then half of what is left
    (point,) = measure(WithAnother(clock, 0.1, 0.0), "sum", [4], budget_seconds=0.2 + 2 * 0.1 * 10 + 0.05)
    assert point.repetitions == 10
    assert point.seconds == pytest.approx(0.3)
    assert point.low == pytest.approx(0.1)


def test_small_messages_are_measured_in_batches(clock: Clock) -> None:
    group = Link(clock, 1e-5, 0.0)
    (point,) = measure(group, "sum", [4], budget_seconds=10)
    assert 190 <= (group.sums - 2) / point.repetitions <= 200
    assert point.seconds == pytest.approx(1e-5)


def test_a_slow_link_ends_within_its_budget_and_without_the_large_sizes(clock: Clock) -> None:
    begun = clock.now
    points = measure(Link(clock, 1e-3, 1e-6), "sum", SIZES, budget_seconds=5)
    assert 0 < len(points) < len(SIZES)
    assert [point.bytes for point in points] == SIZES[: len(points)]
    assert all(point.repetitions >= LEAST_REPETITIONS for point in points)
    assert clock.now - begun < 5.5
    next_size = SIZES[len(points)]
    assert (2 + LEAST_REPETITIONS) * 1e-6 * next_size > 0.3, "one more would have fitted"


def test_the_first_size_is_measured_whatever_the_budget(clock: Clock) -> None:
    (point,) = measure(Link(clock, 2.0, 1e-3), "sum", [4, 4096], budget_seconds=0.1)
    assert (point.bytes, point.repetitions) == (4, 2)


def test_sizes_that_are_far_apart_are_not_taken_for_too_slow(clock: Clock) -> None:
    points = measure(Link(clock, 1e-3, 1e-9), "sum", [4, 10_000_000], budget_seconds=10)
    assert [point.bytes for point in points] == [4, 10_000_000]


def test_who_watches_may_end_it(clock: Clock) -> None:
    seen: list[Point] = []

    def on_point(point: Point) -> bool:
        seen.append(point)
        return len(seen) == 3

    assert measure(Link(clock, 1e-4, 1e-9), "sum", SIZES, budget_seconds=60, on_point=on_point) == seen
    assert len(seen) == 3


@pytest.mark.parametrize(("operation", "sizes"), [("product", [4]), ("sum", []), ("sum", [-4])])
def test_what_cannot_be_measured_is_refused(operation: str, sizes: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"use sum, sum_any|give at least one"):
        measure(SoloGroup(), operation, sizes, budget_seconds=1)


def test_real_members_agree_on_every_point() -> None:
    sizes = [1, 6, 4096, 100_000]

    def fn(group: Group) -> dict[str, Any]:
        told: list[int] = []
        found = {}
        for operation in OPERATIONS:
            points = measure(
                group, operation, sizes, budget_seconds=0.3, on_point=lambda point: told.append(point.bytes)
            )
            found[operation] = [[point.bytes, point.seconds, point.low, point.high] for point in points]
        return {"found": found, "told": told}

    values = run_ranks(3, fn)
    assert values[0]["found"] == values[1]["found"] == values[2]["found"]
    for operation, points in values[0]["found"].items():
        rounded = {"barrier": [0], "scatter_sum": [12, 4104, 100_008]}.get(operation, [4, 8, 4096, 100_000])
        measured = [point[0] for point in points]
        assert measured and measured == rounded[: len(measured)], operation
        assert all(0 < low <= middle <= high for _, middle, low, high in points), operation
    assert values[0]["told"] == [point[0] for points in values[0]["found"].values() for point in points]
    assert values[1]["told"] == values[2]["told"] == []


def test_only_member_0_decides() -> None:
    def fn(group: Group) -> list[int]:
        # were the others asked, they would have no time at all
        budget = 0.5 if group.rank == 0 else -1.0
        points = measure(group, "sum", [4, 8, 16], budget_seconds=budget, on_point=lambda point: point.bytes == 8)
        return [number for point in points for number in (point.bytes, point.repetitions)]

    first, second = run_ranks(2, fn)
    assert first == second
    assert first[0::2] == [4, 8]


def test_memory_is_copied() -> None:
    assert 1e7 < memcpy_bandwidth(1 << 20, 5) < 1e12
