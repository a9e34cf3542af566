"""Who computes which positions of a step, and in which forwards."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.atoms import Course, cut
from shoal.core.slices import Forward, Pace, better, deal, evenly, forwards, forwards_by_atom, grain

samples = st.integers(1, 3000)
members = st.integers(1, 200)
least = st.integers(1, 3)


def lengths(samples: int, members: int, pace: Pace = (), **options: int) -> list[int]:
    return [len(own) for own in deal(samples, members, pace, **options)]


def test_slices_begin_and_end_anywhere() -> None:
    assert lengths(64, 3) == [22, 21, 21]
    assert lengths(10, 4) == [3, 3, 2, 2]
    assert lengths(2, 4) == [1, 1, 0, 0]
    assert lengths(0, 2) == [0, 0]
    assert lengths(128, 128) == [1] * 128


@given(samples=samples, members=members, least=least, paced=st.booleans(), by_atom=st.booleans(), data=st.data())
def test_every_position_is_dealt_once_and_in_order(
    samples: int, members: int, least: int, paced: bool, by_atom: bool, data: st.DataObject
) -> None:
    speeds = st.lists(st.floats(1e-3, 1e6), min_size=members, max_size=members)
    pace = tuple(data.draw(speeds)) if paced else ()
    dealt = deal(samples, members, pace, least=least, by_atom=by_atom)
    assert len(dealt) == members
    assert [at for own in dealt for at in own] == list(range(samples))
    if not by_atom and samples >= least:
        assert min(len(own) for own in dealt if own) >= least
    if by_atom:
        edges = {0, *(atom.stop for atom in cut(samples))}
        assert all({own.start, own.stop} <= edges for own in dealt)


@given(samples=samples, members=members)
def test_without_pace_slices_differ_by_one_sample_at_most(samples: int, members: int) -> None:
    sizes = lengths(samples, members)
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@given(samples=samples, members=members, least=least)
def test_as_many_compute_as_have_enough_samples(samples: int, members: int, least: int) -> None:
    busy = sum(bool(own) for own in deal(samples, members, least=least))
    assert busy == max(1, min(members, samples // least))


@given(samples=st.integers(200, 3000), pace=st.lists(st.floats(1.0, 4.0), min_size=2, max_size=8))
def test_slices_follow_pace_to_the_nearest_grain(samples: int, pace: list[float]) -> None:
    size = grain(samples, 1, len(pace))
    for own, speed in zip(deal(samples, len(pace), tuple(pace)), pace, strict=True):
        assert abs(len(own) - samples * speed / sum(pace)) <= 2 * size


def test_the_slowest_keeps_a_grain_so_that_it_is_measured() -> None:
    assert lengths(96, 3, (1.0, 1000.0, 1e-9)) == [4, 88, 4]
    assert lengths(96, 3, (1e-9, 1e-9, 1.0)) == [4, 4, 88]


def test_equal_pace_gives_about_equal_slices() -> None:
    assert lengths(96, 3, (5.0, 5.0, 5.0)) == [32, 32, 32]


def test_pace_is_taken_up_only_where_it_is_worth_it() -> None:
    assert better((), (1.0, 1.01), 96) == ()
    assert better((), (1.0, 1.0), 96) == ()
    slow = better((), (1.0, 0.5), 96)
    assert slow == (1.0, 0.5) and lengths(96, 2, slow) == [64, 32]
    assert better(slow, (1.0, 0.51), 96) is slow
    assert better(slow, (1.0, 1.0), 96) == (1.0, 1.0)


@given(own=st.builds(lambda a, n: range(a, a + n), st.integers(0, 500), st.integers(0, 500)), limit=st.integers(1, 90))
def test_forwards_cover_a_slice_in_few_nearly_equal_parts(own: range, limit: int) -> None:
    parts = forwards(own, limit)
    assert [at for part in parts for at in range(part.start, part.stop)] == list(own)
    assert len(parts) == -(-len(own) // limit)
    sizes = [part.samples for part in parts]
    assert not sizes or (max(sizes) <= limit and max(sizes) - min(sizes) <= 1)
    assert all(part.atom is None for part in parts)


def test_without_a_limit_a_slice_is_one_forward() -> None:
    assert forwards(range(3, 9), None) == (Forward(3, 9),)
    assert forwards(range(4, 4), None) == ()


@given(samples=st.integers(1, 200), limit=st.integers(2, 60))
def test_no_forward_has_too_few_samples(samples: int, limit: int) -> None:
    sizes = [part.samples for part in forwards(range(samples), limit, least=2)]
    assert samples == 1 or min(sizes) >= 2
    assert max(sizes) <= limit + 1


def test_a_limit_below_what_is_needed_stays_one() -> None:
    assert [part.samples for part in forwards(range(7), 1, least=2)] == [1] * 7


@given(samples=samples, members=st.integers(1, 30), limit=st.none() | st.integers(1, 60))
def test_atoms_are_computed_alike_whoever_has_them(samples: int, members: int, limit: int | None) -> None:
    whole = forwards_by_atom(range(samples), limit, samples)
    dealt = deal(samples, members, by_atom=True)
    assert tuple(part for own in dealt for part in forwards_by_atom(own, limit, samples)) == whole
    assert [part.atom for part in whole if part.atom is not None] == list(range(len(cut(samples))))
    assert [at for part in whole for at in range(part.start, part.stop)] == list(range(samples))


@given(course=st.builds(Course, size=st.integers(1, 400), batch=st.integers(1, 450)), members=st.integers(1, 30))
def test_every_position_of_an_epoch_is_computed_once(course: Course, members: int) -> None:
    met = []
    for number in range(course.steps_per_epoch):
        step = course.step(number)
        for own in deal(step.samples, members):
            met += [step.start + at for part in forwards(own, 7) for at in range(part.start, part.stop)]
    assert met == list(range(course.size))


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6, 8, 12, 24])
def test_a_large_step_has_as_many_atoms_for_each(workers: int) -> None:
    assert {len(part) for part in evenly(len(cut(1000)), workers)} == {24 // workers}
