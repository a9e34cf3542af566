"""The α–β fit: finds the lines that are there, and is not led astray."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.core.errors import ConfigError
from shoal.core.linkfit import MOST_POINTS, MOST_SEGMENTS, LinkModel, Point, Segment, fit, merged

SIZES = [4 << power for power in range(25)]
latencies = st.floats(1e-7, 1e-1)
slopes = st.floats(1e-12, 1e-6)


def points_of(line: Segment) -> list[Point]:
    return [Point(size, line.at(size)) for size in SIZES]


def far_off(model: LinkModel, points: list[Point]) -> float:
    """The largest relative error."""
    return max(abs(model.seconds(point.bytes) / point.seconds - 1) for point in points)


@given(latency=latencies, slope=slopes)
@settings(max_examples=25)
def test_one_line_is_found_and_nothing_else(latency: float, slope: float) -> None:
    model = fit(points_of(Segment(0, latency, slope)))
    assert len(model.segments) == 1
    assert model.latency == pytest.approx(latency, rel=1e-6)
    # where the smallest size takes nearly all of the time, the slope is what is left of the digits
    assert model.seconds(SIZES[-1]) == pytest.approx(latency + slope * SIZES[-1], rel=1e-6)


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_three_ranges_are_found(noise: float) -> None:
    def real(size: int) -> float:
        if size <= 65_536:
            return 11e-6 + 0.21e-9 * size
        return 20e-6 + 0.15e-9 * size if size < 4_000_000 else -4e-4 + 0.25e-9 * size

    chance = random.Random(3)
    model = fit([Point(size, real(size) * math.exp(chance.gauss(0, noise))) for size in SIZES])
    assert len(model.segments) == 3
    assert 65_536 < model.segments[1].from_bytes <= 3 * 65_536
    assert 2_000_000 < model.segments[2].from_bytes <= 8_500_000
    assert far_off(model, [Point(size, real(size)) for size in SIZES]) < 3 * noise + 1e-6
    assert model.latency == pytest.approx(11e-6, rel=0.02 + noise)
    assert model.bandwidth == pytest.approx(4e9, rel=0.01 + 3 * noise)


def test_lines_that_cross_between_two_sizes_join_where_they_cross() -> None:
    bend = 3 << 18
    model = fit([Point(size, 1e-5 + 1e-9 * size + max(0, size - bend) * 4e-9) for size in SIZES])
    assert [segment.from_bytes for segment in model.segments] == [0, pytest.approx(bend, abs=2)]
    assert model.seconds(bend - 1) == pytest.approx(model.seconds(bend + 1), rel=1e-5)


@given(
    latency=st.floats(1e-6, 1e-3),
    slope=st.floats(1e-11, 1e-8),
    at=st.integers(0, len(SIZES) - 1),
    factor=st.sampled_from([0.02, 0.1, 0.2, 0.5, 2.0, 5.0, 30.0]),
)
@example(latency=2.49e-05, slope=6.76e-09, at=20, factor=0.02)
@settings(max_examples=40)
def test_one_outlier_does_not_matter(latency: float, slope: float, at: int, factor: float) -> None:
    true = points_of(Segment(0, latency, slope))
    seen = [msgspec.structs.replace(point, seconds=point.seconds * factor) if n == at else point
            for n, point in enumerate(true)]  # fmt: skip
    model = fit(seen)
    assert len(model.segments) == 1
    assert far_off(model, true) < 0.01


@given(
    st.lists(
        st.tuples(st.integers(0, 10**9), st.floats(1e-7, 100, allow_nan=False)),
        min_size=1,
        max_size=30,
    ),
    st.lists(st.floats(0, 1e11), min_size=2, max_size=20),
)
@settings(max_examples=40)
def test_whatever_was_measured_the_model_is_monotone_and_never_negative(
    measured: list[tuple[int, float]], sizes: list[float]
) -> None:
    model = fit([Point(*pair) for pair in measured])
    assert 1 <= len(model.segments) <= MOST_SEGMENTS
    around = [segment.from_bytes + by for segment in model.segments for by in (-1, 0, 1)]
    times = [model.seconds(size) for size in sorted([*sizes, *around])]
    assert times == sorted(times)
    assert times[0] >= 0
    assert model.latency >= 0 and model.bandwidth > 0


def test_a_jump_down_does_not_make_a_larger_message_cheaper() -> None:
    model = LinkModel([Segment(0, 1.0, 0.5), Segment(10, 0.0, 0.1)])
    assert [model.seconds(size) for size in (9, 10, 11, 50, 80)] == [5.5, 6.0, 6.0, 6.0, 8.0]


def test_with_one_size_all_of_it_is_latency() -> None:
    model = fit([Point(0, 2e-5), Point(0, 4e-5), Point(0, 3e-5)])
    assert model.segments == [Segment(0, pytest.approx(3e-5), 0.0)]
    assert model.bandwidth == math.inf


def test_through_two_sizes_there_is_one_line() -> None:
    model = fit([Point(2_000_000, 5e-3), Point(1_000_000, 3e-3)])
    assert model.segments == [Segment(0, pytest.approx(1e-3), pytest.approx(2e-9))]


def test_no_message_takes_less_than_nothing() -> None:
    model = fit([Point(100, 1e-3), Point(200, 3e-3)])
    assert model.segments[0].latency == 0.0
    assert 1e-3 < model.seconds(200) < 3e-3


def test_small_sizes_that_are_measured_badly_do_not_make_messages_free() -> None:
    small = [3e-4, 3.3e-4, 1.6e-3, 4.7e-3]
    model = fit([Point(size, seconds) for size, seconds in zip(SIZES, small + [5e-3] * 10, strict=False)])
    assert 1.4e-4 < model.latency < 6e-4


def test_json_there_and_back() -> None:
    model = fit([Point(size, 1e-5 + 1e-9 * size) for size in SIZES])
    assert msgspec.json.decode(msgspec.json.encode(model), type=LinkModel) == model


@pytest.mark.parametrize(
    "segments",
    [
        "[]",
        '[{"from_bytes": 1, "latency": 1, "seconds_per_byte": 1}]',
        '[{"from_bytes": 0, "latency": 1, "seconds_per_byte": -1}]',
        '[{"from_bytes": 0, "latency": null, "seconds_per_byte": 1}]',
        "[" + ", ".join(['{"from_bytes": 0, "latency": 1, "seconds_per_byte": 1}'] * 2) + "]",
    ],
)
def test_a_model_that_cannot_be_is_not_read(segments: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(f'{{"segments": {segments}}}', type=LinkModel)


@pytest.mark.parametrize(
    "points",
    [
        [],
        [Point(4, 0.0)],
        [Point(4, -1.0)],
        [Point(4, math.nan)],
        [Point(4, math.inf)],
        [Point(-4, 1.0)],
        [Point(4, 1.0)] * (MOST_POINTS + 1),
    ],
)
def test_what_cannot_be_fitted_is_refused(points: list[Point]) -> None:
    with pytest.raises(ConfigError, match="must"):
        fit(points)


def test_rounds_are_merged_size_by_size() -> None:
    rounds = [
        [Point(4, 1.0, 0.9, 1.1, 5), Point(8, 2.0, 1.8, 2.2, 5)],
        [Point(4, 3.0, 2.5, 3.5, 7)],
        [Point(4, 1.5, 1.4, 1.6, 5), Point(8, 4.0, 3.0, 5.0, 5)],
    ]
    assert merged(rounds) == [Point(4, 1.5, 0.9, 3.5, 17), Point(8, 3.0, 1.8, 5.0, 10)]
