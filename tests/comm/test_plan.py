from __future__ import annotations

import random
import time

import pytest

from shoal.comm.plan import (
    CAPS,
    SMALLEST,
    UNDIVIDED,
    Costs,
    Gradient,
    choose,
    lay,
    parts,
    predict,
    settle,
)

KB, MB = 1 << 10, 1 << 20


def linear(latency: float, bandwidth: float, overlap: float) -> Costs:
    """A link of so many seconds and bytes per second."""
    return Costs([(at, latency + at / bandwidth) for at in (4 * KB, 256 * KB, MB, 4 * MB, 256 * MB)], overlap)


def even(count: int, size: int, backward: float) -> list[Gradient]:
    """Gradients that arrive evenly through backward."""
    return [Gradient(size, ready=backward * (at + 1) / count) for at in range(count)]


def number(gradients: list[Gradient], cap: int) -> int:
    return len(lay(gradients, cap))


# -- the choice --------------------------------------------------------------------------------------------------------


def test_where_latency_counts_there_are_few_buckets() -> None:
    gradients = even(100, 100 * KB, backward=0.02)
    choice = choose(gradients, linear(10e-3, 10e9, overlap=1.0), 0.02)
    assert number(gradients, choice.cap) <= 3
    # and if a sum costs more than the whole backward, one
    assert choose(gradients, linear(0.1, 10e9, overlap=1.0), 0.02) == (UNDIVIDED, False)


def test_where_bandwidth_counts_and_backward_is_long_gradients_leave_early() -> None:
    gradients = even(100, MB, backward=1.0)
    costs = linear(0.2e-3, 120e6, overlap=1.0)
    choice = choose(gradients, costs, 1.0)
    assert choice.cap <= 8 * MB and not choice.close
    assert predict(gradients, choice.cap, costs, 1.0) < 0.6 * predict(gradients, UNDIVIDED, costs, 1.0)


def test_where_nothing_overlaps_early_leaving_gains_nothing_that_can_be_predicted() -> None:
    gradients = even(100, MB, backward=1.0)
    assert choose(gradients, linear(0.2e-3, 120e6, overlap=0.0), 1.0) == (16 * MB, True)
    assert choose(gradients, linear(0.2e-3, 120e6, overlap=0.0), 1.0, during_backward=False) == (UNDIVIDED, False)


def test_where_small_sums_are_cheaper_by_the_byte_buckets_are_small() -> None:
    """In the calling thread: 1 MB stays in the cache between the copy and the sum, 4 MB do not."""
    gradients = even(50, MB, backward=0.01)
    in_cache, in_memory = 10e9, 4e9
    points = [(4 * KB, 10e-6), (256 * KB, 40e-6), (MB, MB / in_cache), (4 * MB, 4 * MB / in_memory)]
    costs = Costs([*points, (50 * MB, 50 * MB / in_memory)], overlap=0.0)
    assert choose(gradients, costs, 0.01) == (MB, False)
    assert choose(gradients, costs, 0.01, during_backward=False) == (MB, False)
    # a giant parameter is summed in such parts too
    giant = [Gradient(50 * MB, ready=0.01)]
    assert choose(giant, costs, 0.01) == (MB, False)
    assert settle(giant, MB, costs).bandwidth == pytest.approx(in_cache)
    assert settle(giant, UNDIVIDED, costs).bandwidth == pytest.approx(in_memory)


def test_one_giant_parameter_over_a_link_is_one_sum_or_few() -> None:
    giant = [Gradient(200 * MB, ready=0.1)]
    assert choose(giant, linear(1e-3, 1e9, overlap=1.0), 0.1) == (32 * MB, True)
    assert choose(giant, linear(0.5, 1e9, overlap=1.0), 0.1) == (UNDIVIDED, False)


def test_a_giant_parameter_that_arrives_first_does_not_hold_up_the_others() -> None:
    """Like a large output layer: it leaves at once, and the rest follows while it is under way or after it."""
    gradients = [Gradient(200 * MB, ready=0.01), *even(20, 200 * KB, backward=0.5)]
    costs = linear(1e-3, 1e9, overlap=1.0)
    choice = choose(gradients, costs, 0.5)
    assert lay(gradients, choice.cap)[0] == [0] and not choice.close
    assert predict(gradients, choice.cap, costs, 0.5) < 0.5 + 0.01


def test_thousands_of_tiny_parameters_are_planned_quickly_into_few_buckets() -> None:
    gradients = even(10_000, 400, backward=0.2)
    begun = time.perf_counter()
    choice = choose(gradients, linear(0.3e-3, 1e9, overlap=1.0), 0.2)
    assert time.perf_counter() - begun < 2.0
    assert 1 <= number(gradients, choice.cap) <= 16


def test_hooks_must_pay() -> None:
    """40 000 hooks cost more than the sum itself can hide."""
    gradients = even(40_000, 40, backward=0.2)
    assert choose(gradients, linear(0.1e-3, 10e9, overlap=1.0), 0.2) == (UNDIVIDED, False)


def test_what_is_small_is_never_split() -> None:
    gradients = even(100, SMALLEST // 100, backward=10.0)
    assert choose(gradients, linear(0.0, 1.0, overlap=1.0), 10.0) == (UNDIVIDED, False)
    assert choose([], linear(0.0, 1.0, overlap=1.0), 10.0) == (UNDIVIDED, False)


def test_of_plans_as_good_the_one_with_the_fewest_sums_wins() -> None:
    gradients = even(64, MB, backward=0.0)
    free = Costs([(4 * KB, 0.0), (64 * MB, 0.0)], overlap=1.0)
    assert choose(gradients, free, 0.0, during_backward=False) == (UNDIVIDED, False)


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_within_slack_of_the_best(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 60)
    backward = draw.choice([0.001, 0.05, 1.0])
    gradients = sorted(
        (
            Gradient(draw.choice([400, 30 * KB, 2 * MB, 40 * MB]), draw.choice("ab"), draw.random() * backward)
            for _ in range(count)
        ),
        key=lambda gradient: gradient.ready,
    )
    costs = linear(draw.choice([1e-5, 1e-3]), draw.choice([1e8, 1e9, 1e10]), draw.random())
    choice = choose(gradients, costs, backward)
    total = sum(gradient.size for gradient in gradients)
    ends = {cap: predict(gradients, cap, costs, backward) for cap in CAPS if cap < total or cap == UNDIVIDED}
    assert choice == choose(list(gradients), costs, backward)
    if choice.close:
        assert 1 / 1.25 < ends[choice.cap] / ends.pop(UNDIVIDED) < 1.25
        ends = {cap: end for cap, end in ends.items() if 4 * cap <= total} or ends
    best = min(ends.values())
    assert ends[choice.cap] <= best + 21e-6 + 0.02 * (best - backward)


# -- the prediction ----------------------------------------------------------------------------------------------------


def test_the_end_of_one_bucket_is_backward_and_its_sum() -> None:
    costs = linear(1e-3, 1e9, overlap=1.0)
    assert predict(even(10, MB, 0.5), UNDIVIDED, costs, 0.5) == pytest.approx(0.5 + costs.of(10 * MB))


def test_buckets_wait_for_the_link() -> None:
    """Two sums of a second each, complete after 1 and 2 seconds, and after 1 and 1.2 seconds."""
    costs = Costs([(MB, 1.0)], overlap=1.0)
    apart = [Gradient(MB, ready=1.0), Gradient(MB, ready=2.0)]
    close = [Gradient(MB, ready=1.0), Gradient(MB, ready=1.2)]
    assert predict(apart, MB, costs, 2.0) == pytest.approx(3.0, abs=1e-4)
    assert predict(close, MB, costs, 1.2) == pytest.approx(3.0, abs=1e-4)
    assert predict(close, MB, costs, 1.2, during_backward=False) == pytest.approx(3.2, abs=1e-4)
    # in the calling thread each of them delays what comes after it
    assert predict(apart, MB, costs._replace(overlap=0.0), 2.0) == pytest.approx(4.0, abs=1e-4)


def test_the_last_bucket_leaves_when_backward_is_over() -> None:
    costs = Costs([(MB, 1.0)], overlap=1.0)
    assert predict([Gradient(MB, ready=0.1)], MB, costs, 5.0) == pytest.approx(6.0, abs=1e-4)


# -- the layout --------------------------------------------------------------------------------------------------------


def test_every_gradient_is_in_one_bucket_of_its_kind() -> None:
    draw = random.Random(1)
    gradients = [Gradient(draw.choice([0, 3, 50, 400]), draw.choice("abc")) for _ in range(200)]
    for cap in (1, 60, 500, UNDIVIDED):
        buckets = lay(gradients, cap)
        assert sorted(place for bucket in buckets for place in bucket) == list(range(200))
        for bucket in buckets:
            assert len({gradients[place].kind for place in bucket}) == 1
            assert len(bucket) == 1 or sum(gradients[place].size for place in bucket) <= cap
        assert [bucket[-1] for bucket in buckets] == sorted(bucket[-1] for bucket in buckets)
    assert len(lay(gradients, UNDIVIDED)) == 3, "kinds that alternate do not break each other's buckets"


def test_parts_are_about_equal() -> None:
    assert parts(10, 100) == [10]
    assert parts(0, 100) == [0]
    assert parts(10, 4) == [4, 4, 2]
    assert parts(100, 64, 16) == [64, 36]
    assert parts(130, 64, 16) == [48, 48, 34]
    assert parts(3, 0) == [1, 1, 1]
    for count in range(200):
        for line in (1, 8):
            assert sum(parts(count, 16, line)) == count and max(parts(count, 16, line)) <= 16


def test_costs_lie_on_lines_and_never_fall() -> None:
    costs = Costs([(10, 1.0), (20, 3.0), (30, 2.0), (40, 4.0)])
    assert [costs.of(size) for size in (0, 10, 15, 20, 25, 30, 40, 50)] == [1.0, 1.0, 1.5, 2.0, 2.0, 2.0, 4.0, 5.0]
    assert Costs([(10, 1.0)]).of(40) == 4.0
    assert [Costs([(10, 2.0), (20, 1.0)]).of(size) for size in (1, 15, 1000)] == [1.0, 1.0, 1.0]


def test_settled_tells_buckets_in_the_order_in_which_they_leave() -> None:
    gradients = [Gradient(300 * KB), Gradient(MB), Gradient(100 * KB)]
    settled = settle(gradients, 512 * KB, linear(1e-3, 1e9, overlap=1.0))
    assert settled.buckets == [300 * KB, MB, 100 * KB]
    assert settled.latency == pytest.approx(1e-3, rel=0.01)
    # four sums: of 300 KB, of two halves, and of 100 KB
    assert settled.bandwidth == pytest.approx(1424 * KB / (4e-3 + 1424 * KB / 1e9), rel=1e-3)
