from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.comm import measure as measuring
from shoal.comm.group import Group, SoloGroup
from shoal.comm.measure import BUDGET_SECONDS, measure
from shoal.core.traffic import CONTROL, MEASUREMENT
from shoal.testing.ranks import run_ranks

MB = 1 << 20


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def compute(self, matrix: Tensor) -> None:
        self.now += 20e-6


class Link:
    """A group of one with a link of this latency and bandwidth, used in the background or in the calling thread."""

    rank, size = 0, 1

    def __init__(self, clock: Clock, latency: float, bandwidth: float, *, background: bool) -> None:
        self._clock = clock
        self._latency, self._bandwidth = latency, bandwidth
        self._background = background
        self._free = 0.0
        self.sizes: list[int] = []
        self.kinds: list[str] = []
        self._under_way: list[range] = []

    def sum(self, buffer: Tensor, kind: str) -> Any:
        self.sizes.append(buffer.nbytes)
        self.kinds.append(kind)
        here = range(buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes)
        assert not any(here[0] < other.stop and other.start < here.stop for other in self._under_way)
        self._under_way.append(here)
        self._free = max(self._free, self._clock.now) + self._latency + buffer.nbytes / self._bandwidth
        ends = self._free
        if not self._background:
            self._clock.now = ends
        return SimpleNamespace(wait=lambda: self._wait(ends, here))

    def _wait(self, until: float, here: range) -> None:
        self._under_way.remove(here)
        self._clock.now = max(self._clock.now, until)

    def broadcast(self, buffer: Tensor, kind: str) -> None:
        self.kinds.append(kind)
        self._clock.now += self._latency


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measuring, "time", clock)
    monkeypatch.setattr(measuring, "_compute", clock.compute)
    return clock


@pytest.mark.parametrize("background", [True, False])
def test_a_quick_link_is_measured_as_it_is(clock: Clock, background: bool) -> None:
    link = Link(clock, 10e-6, 5e9, background=background)
    costs = measure(link, torch.zeros(50 * MB // 4), (50 * MB, 0.011))
    assert [size for size, _ in costs.points] == [4 << 10, 256 << 10, MB, 4 * MB, 16 * MB]
    for size, seconds in costs.points:
        assert seconds == pytest.approx(10e-6 + size / 5e9)
    assert costs.overlap == pytest.approx(1.0 if background else 0.0, abs=0.05)
    assert clock.now < 1.2 * BUDGET_SECONDS
    assert set(link.kinds) == {CONTROL, MEASUREMENT}


def test_a_slow_link_is_used_little(clock: Clock) -> None:
    link = Link(clock, 0.04, 1e6, background=True)
    costs = measure(link, torch.zeros(50 * MB // 4), (50 * MB, 50.0))
    assert len(link.kinds) <= 5 and sum(link.sizes) <= 16 << 10
    assert costs.points[0][1] == pytest.approx(0.044, rel=0.01) and costs.points[-1] == (50 * MB, 50.0)
    assert costs.overlap > 0.9


def test_sizes_grow_until_one_costs_too_much(clock: Clock) -> None:
    """A gigabit: 256 KB take 2 ms and 1 MB 9 ms, but 4 MB would take longer than what is left."""
    link = Link(clock, 0.2e-3, 120e6, background=True)
    costs = measure(link, torch.zeros(50 * MB // 4), (50 * MB, 0.45))
    assert [size for size, _ in costs.points] == [4 << 10, 256 << 10, MB, 50 * MB]
    assert clock.now < 4 * BUDGET_SECONDS


@pytest.mark.parametrize("numel", [1, 10, 70_000, 140_000, 1_400_000, 5_000_000])
def test_small_buffers_are_not_overrun(clock: Clock, numel: int) -> None:
    link = Link(clock, 10e-6, 5e9, background=True)
    costs = measure(link, torch.zeros(numel), (4 * numel, 1e-3))
    assert max(link.sizes) <= 4 * numel
    largest, seconds = costs.points[-1]
    assert largest == min(4 * numel, 16 * MB) and seconds == pytest.approx(10e-6 + largest / 5e9)
    assert [size for size, _ in costs.points] == sorted({size for size, _ in costs.points})


@pytest.mark.parametrize("budgets", [(0.0, 1e9), (0.5, 0.0)])
def test_members_do_the_same_operations_whatever_their_clocks_say(
    monkeypatch: pytest.MonkeyPatch, budgets: tuple[float, float]
) -> None:
    """Left to itself a member that finds everything free would measure more than the others, and wait for ever."""

    def fn(group: Group) -> list[float]:
        monkeypatch.setattr(measuring, "BUDGET_SECONDS", budgets[group.rank])
        costs = measure(group, group.buffer(MB, torch.float32), (8 * MB, 1.0))
        check = torch.ones(3)
        group.sum(check).wait()
        return [float(check.sum()), len(costs.points)]

    first, second = run_ranks(2, fn)
    assert first == second and first[0] == 6.0
    assert budgets[0] > 0.0 or first[1] == 2, "only the smallest and the whole are known then"


def test_a_group_of_one_can_be_measured() -> None:
    costs = measure(SoloGroup(), torch.zeros(MB), (4 * MB, 1e-6))
    assert 0.0 <= costs.overlap <= 1.0 and all(seconds >= 0.0 for _, seconds in costs.points)
