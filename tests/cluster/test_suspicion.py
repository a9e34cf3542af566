"""How long a process may be silent: from its own beats, within bounds."""

from __future__ import annotations

import pytest

from shoal.cluster.roster.suspicion import Suspicion


def beaten(intervals: list[float], **bounds: float) -> tuple[Suspicion, float]:
    suspicion, now = Suspicion(**bounds), 100.0
    suspicion.beat(now)
    for interval in intervals:
        now += interval
        suspicion.beat(now)
    return suspicion, now


def test_a_process_that_never_beat_is_not_overdue() -> None:
    assert not Suspicion().overdue(1e9)


def test_until_enough_is_known_the_bound_is_the_ceiling() -> None:
    suspicion, now = beaten([0.1] * 3)
    assert suspicion.bound() == 2.0
    assert not suspicion.overdue(now + 1.9)
    assert suspicion.overdue(now + 2.1)


def test_even_beats_give_the_floor() -> None:
    suspicion, now = beaten([0.1] * 50)
    assert suspicion.bound() == 0.5
    assert not suspicion.overdue(now + 0.45)
    assert suspicion.overdue(now + 0.55)


def test_the_bound_grows_with_the_interval_and_with_the_spread() -> None:
    even, _ = beaten([0.4] * 50)
    uneven, _ = beaten([0.2, 0.3, 0.5, 0.6] * 12)
    assert 0.5 < even.bound() < 2.0
    assert uneven.bound() > even.bound()


def test_a_few_late_beats_do_not_stretch_it() -> None:
    calm, _ = beaten([0.1] * 60, floor=0.0)
    late, _ = beaten([0.1] * 57 + [3.0] * 3, floor=0.0)
    assert late.bound() == pytest.approx(calm.bound(), rel=0.2)


def test_many_late_beats_do() -> None:
    suspicion, _ = beaten([0.1] * 20 + [0.5] * 80)
    assert suspicion.bound() > 1.0


def test_it_never_exceeds_the_ceiling() -> None:
    suspicion, now = beaten([5.0] * 50, ceiling=3.0)
    assert suspicion.bound() == 3.0
    assert suspicion.overdue(now + 3.1)


def test_a_clock_that_goes_backwards_changes_nothing() -> None:
    suspicion, now = beaten([0.1] * 50)
    suspicion.beat(now - 10.0)
    assert suspicion.last == now
    assert suspicion.bound() == 0.5
