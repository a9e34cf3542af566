"""Buffers of several workers, without the workers: what their exchange would add up is added up here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError
from shoal.layouts.single import Buffers
from shoal.layouts.totals import Totals

Forward = Callable[[Any], None]
Plan = Sequence[tuple[int, Forward]]
"""One worker's forwards in a step: (samples, what the forward does to the model)."""


class Fleet:
    """Replicas of a model, and what a step's exchange does with their buffers."""

    def __init__(self, make: Callable[[], nn.Module], workers: int, words: dict[str, str] | None = None) -> None:
        self.models: list[Any] = [make() for _ in range(workers)]
        self.buffers = [Buffers([model]) for model in self.models]
        for buffers in self.buffers:
            buffers.use(words)
        self.agreed = 0
        """Steps in which the workers had to agree on something."""

    def step(self, plans: Sequence[Plan]) -> None:
        samples = sum(count for plan in plans for count, _ in plan)
        atom = 0
        for model, buffers, plan in zip(self.models, self.buffers, plans, strict=True):
            buffers.open(samples)
            for count, forward in plan:
                buffers.before_forward()
                forward(model)
                buffers.after_forward(atom, count)
                atom += 1
        totals = self._summed()
        news = any([buffers.news for buffers in self.buffers])
        self.agreed += news
        changes = [change for buffers in self.buffers for change in buffers.changes]
        for buffers in self.buffers:
            buffers.set_known(totals)
            if news:
                buffers.learn(changes)
            buffers.settle()
        self.assert_equal()

    def _summed(self) -> Totals:
        taken = [buffers.take_sums() for buffers in self.buffers]
        singles = [totals.single for totals in taken if totals.single is not None]
        doubles = [totals.double for totals in taken if totals.double is not None]
        assert all(total.dtype == torch.float32 for total in singles)
        assert all(total.dtype == torch.float64 for total in doubles)
        return Totals(
            torch.stack(singles).sum(0) if singles else None, torch.stack(doubles).sum(0) if doubles else None
        )

    def notices(self) -> list[str]:
        return self.buffers[0].notices()

    def assert_equal(self) -> None:
        first = dict(self.models[0].named_buffers())
        for model in self.models[1:]:
            for name, buffer in model.named_buffers():
                assert torch.equal(buffer, first[name]), name


class Tally(nn.Module):
    """Buffers of every kind."""

    mean: Tensor
    count: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.tensor(0))
        self.inner = nn.Module()
        self.inner.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
        self.inner.register_buffer("flags", torch.tensor([True, False]))
        self.inner.register_buffer("nothing", None)


def move(by: float) -> Forward:
    def forward(model: Any) -> None:
        model.mean += by
        model.count += 1

    return forward


def still(model: Any) -> None:
    return None


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_floats_become_the_mean_weighted_by_samples(workers: int) -> None:
    fleet = Fleet(Tally, workers)
    forwards = [(2, move(1.0)), (6, move(5.0)), (4, move(-2.0))]
    plans: list[Plan] = [forwards[rank::workers] for rank in range(workers)]
    expected = 0.0
    for _ in range(4):
        fleet.step(plans)
        expected += (2 * 1.0 + 6 * 5.0 + 4 * -2.0) / 12
        torch.testing.assert_close(fleet.models[0].mean, torch.full((3,), expected))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_counter_moves_by_one_per_step_however_many_forwards_there_are(workers: int) -> None:
    fleet = Fleet(Tally, workers)
    forwards = [(3, move(1.0)), (4, move(1.0)), (5, move(1.0)), (1, move(1.0))]
    for step in range(1, 5):
        fleet.step([forwards[rank::workers] for rank in range(workers)])
        assert fleet.models[-1].count.item() == step
        assert fleet.models[-1].count.dtype == torch.int64


def test_a_counter_beyond_single_precision_stays_exact() -> None:
    fleet = Fleet(Tally, 2)
    for model in fleet.models:
        model.count.fill_(2**40 + 1)
    for step in range(1, 4):
        fleet.step([[(3, move(0.0))], [(4, move(0.0))]])
        assert fleet.models[0].count.item() == 2**40 + 1 + step


def test_constants_are_not_touched() -> None:
    fleet = Fleet(Tally, 2)
    masks = [model.inner.mask for model in fleet.models]
    for step in range(4):
        # the first step has to watch them all
        versions = [mask._version for mask in masks] if step else [-1, -1]
        fleet.step([[(1, move(1.0)), (2, move(1.0))], [(3, move(1.0))]])
    assert [mask._version for mask in masks] == versions
    assert fleet.buffers[0].known == [0, 1]
    assert fleet.buffers[0].sizes == (3, 1)
    for model, mask in zip(fleet.models, masks, strict=True):
        assert model.inner.mask is mask
        assert model.inner.mask[0, 1] == float("-inf") and model.inner.flags.tolist() == [True, False]


def test_a_model_whose_forward_changes_nothing_sends_nothing() -> None:
    fleet = Fleet(Tally, 2)
    for _ in range(2):
        fleet.step([[(1, still)], [(3, still)]])
    assert fleet.buffers[0].sizes == (0, 0) and fleet.buffers[0].known == []


def test_a_mask_beside_a_counter_survives_the_merge() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.tensor(0.0))
            self.register_buffer("mask", torch.full((3,), float("-inf")))

    def forward(model: Any) -> None:
        model.count += 2.0

    fleet = Fleet(Masked, 2)
    for step in range(1, 4):
        fleet.step([[(1, forward), (2, forward)], [(3, forward)]])
        assert fleet.models[0].mask.tolist() == [float("-inf")] * 3
        assert fleet.models[0].count.item() == 2.0 * step


def test_a_worker_without_forwards_takes_part() -> None:
    fleet = Fleet(Tally, 3)
    for step in range(1, 4):
        fleet.step([[], [(2, move(1.0))], [(2, move(3.0))]])
        assert fleet.models[0].mean.tolist() == [2.0 * step] * 3
        assert fleet.models[0].count.item() == step


def test_forwards_that_leave_a_buffer_alone_count_with_its_old_value() -> None:
    """In the step in which it changes first, and in all later ones."""
    for workers, plans in (
        (1, [[(1, move(4.0)), (3, still)]]),
        (2, [[(1, move(4.0))], [(3, still)]]),
    ):
        fleet = Fleet(Tally, workers)
        for model in fleet.models:
            model.mean.fill_(10.0)
        for step in range(1, 4):
            fleet.step(plans)
            torch.testing.assert_close(fleet.models[0].mean, torch.full((3,), 10.0 + step))


def test_a_buffer_that_begins_to_change_later_is_merged_from_then_on() -> None:
    fleet = Fleet(Tally, 2)
    for model in fleet.models:
        model.mean.fill_(10.0)
        model.count.fill_(7)
    fleet.step([[(1, still)], [(3, still)]])
    for step in range(1, 4):
        fleet.step([[(1, move(1.0))], [(3, move(5.0))]])
        torch.testing.assert_close(fleet.models[0].mean, torch.full((3,), 10.0 + 4.0 * step))
        assert fleet.models[0].count.item() == 7 + step


def test_a_late_change_of_some_forwards_only() -> None:
    """Its old value may be gone where it changed, so that step's mean may leave out the others; it must not shrink."""
    fleet = Fleet(Tally, 2)
    for model in fleet.models:
        model.mean.fill_(10.0)
    fleet.step([[(1, still)], [(3, still)]])
    fleet.step([[(1, move(4.0))], [(3, still)]])
    met = fleet.models[0].mean[0].item()
    assert 10.0 < met <= 14.0
    for step in range(1, 3):
        fleet.step([[(1, move(4.0))], [(3, still)]])
        torch.testing.assert_close(fleet.models[0].mean, torch.full((3,), met + step))


def test_batch_norm_is_merged_the_same_for_any_number_of_workers() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(count, 4) * count for count in (3, 5, 2, 6)]

    def make() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))

    found = []
    for workers in (1, 2, 3):
        fleet = Fleet(make, workers)
        plans = [[(len(x), run_on(x)) for x in parts[rank::workers]] for rank in range(workers)]
        for _ in range(3):
            fleet.step(plans)
        found.append(fleet.models[0].state_dict())
    for other in found[1:]:
        for name, value in found[0].items():
            torch.testing.assert_close(other[name], value)
    assert found[0]["0.num_batches_tracked"].item() == 3
    # each forward starts from the beginning of the step, and so does the mean over them
    momentum, mean = 0.1, torch.cat(parts).mean(0)
    expected = torch.zeros(4)
    for _ in range(3):
        expected = (1 - momentum) * expected + momentum * mean
    torch.testing.assert_close(found[0]["0.running_mean"], expected)


def test_a_buffer_that_is_replaced_instead_of_changed() -> None:
    def forward(model: Any) -> None:
        model.mean = model.mean + 1.0

    fleet = Fleet(Tally, 2)
    for step in range(1, 4):
        fleet.step([[(1, forward), (1, forward)], [(2, forward)]])
        assert fleet.models[0].mean.tolist() == [float(step)] * 3


def test_a_buffer_in_double_precision_keeps_it() -> None:
    class Precise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(1, dtype=torch.float64))

    def forward(model: Any) -> None:
        model.mean += 1 / 3

    fleet = Fleet(Precise, 2)
    for step in range(1, 4):
        fleet.step([[(1, forward)], [(2, forward)]])
        assert fleet.models[0].mean.dtype == torch.float64
        assert fleet.models[0].mean.item() == pytest.approx(step / 3, rel=1e-15)


def test_a_buffer_shared_by_two_modules_is_one() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Tally(), Tally()
            self.other.mean = self.one.mean

    def forward(model: Any) -> None:
        model.one.mean += 1.0

    fleet = Fleet(Shared, 2)
    for step in range(1, 3):
        fleet.step([[(1, forward)], [(1, forward)]])
        assert fleet.models[0].other.mean.tolist() == [float(step)] * 3


def test_buffers_that_another_worker_tells_of_are_merged_from_the_next_step_on() -> None:
    """A worker that copied a step has not seen which buffers began to change in it."""
    net = nn.BatchNorm1d(2)
    buffers = Buffers([net])
    buffers.settle()  # none of them was known to change
    buffers.know([0, 1, 2])
    buffers.open(8)
    buffers.before_forward()
    before = net.running_mean.clone()
    net(torch.randn(8, 2))
    buffers.rewind()
    assert torch.equal(net.running_mean, before) and int(net.num_batches_tracked) == 0


def test_rewinding_undoes_a_step_that_is_not_settled_and_no_other() -> None:
    net = nn.BatchNorm1d(2)
    buffers = Buffers([net])
    buffers.know([0, 1, 2])
    buffers.open(8)
    buffers.before_forward()
    net(torch.randn(8, 2))
    buffers.settle()
    after = net.running_mean.clone()
    buffers.rewind()
    assert torch.equal(net.running_mean, after)


# -- in their own type -------------------------------------------------------------------------------------------------


class Kept(nn.Module):
    """Whatever buffers a test needs."""

    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        for name, value in buffers.items():
            self.register_buffer(name, value.clone())


def kept(**buffers: Tensor) -> Callable[[], nn.Module]:
    return lambda: Kept(**buffers)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_forward_is_plain_torch_bit_for_bit(dtype: torch.dtype) -> None:
    def forward(model: Any) -> None:
        model.mean.lerp_(torch.linspace(-1, 7, 33).to(dtype), 0.01)

    fleet = Fleet(kept(mean=torch.full((33,), 1 / 3, dtype=dtype)), 1)
    plain = Kept(mean=torch.full((33,), 1 / 3, dtype=dtype))
    for _ in range(5):
        fleet.step([[(7, forward)]])
        forward(plain)
        assert torch.equal(fleet.models[0].mean, plain.mean)


def test_a_double_counts_beyond_single_precision() -> None:
    def forward(model: Any) -> None:
        model.count += 1

    fleet = Fleet(kept(count=torch.tensor(2.0**30, dtype=torch.float64)), 2)
    for step in range(1, 5):
        fleet.step([[(3, forward)], [(4, forward), (2, forward)]])
        assert fleet.models[0].count.item() == 2.0**30 + step


def test_half_precision_is_merged_in_single_precision() -> None:
    def forward(by: float) -> Forward:
        return lambda model: model.mean.fill_(by)

    fleet = Fleet(kept(mean=torch.zeros(1, dtype=torch.bfloat16)), 2)
    for _ in range(3):
        fleet.step([[(129, forward(1.0))], [(127, forward(3.0))]])
        assert fleet.models[0].mean.item() == torch.tensor((129 + 3 * 127) / 256).bfloat16().item()


# -- whole numbers -----------------------------------------------------------------------------------------------------


def counting(samples: int, by: int = 1) -> tuple[int, Forward]:
    def forward(model: Any) -> None:
        model.seen += samples * by
        model.calls += 1

    return samples, forward


COUNTS = {"seen": torch.tensor(0), "calls": torch.tensor(0)}


@pytest.mark.parametrize("by", [1, 1 << 22])
@pytest.mark.parametrize(
    "plans",
    [
        [[24, 24]],
        [[24], [24]],
        [[16], [16], [16]],
        [[5, 5, 5, 1], [5, 5, 5, 1], [16]],
        [[], [47], [1]],
        [[48]],
    ],
)
def test_what_moves_with_samples_adds_up_and_what_moves_per_call_counts_once(plans: list[list[int]], by: int) -> None:
    fleet = Fleet(kept(**COUNTS), len(plans))
    for step in range(1, 5):
        fleet.step([[counting(samples, by) for samples in plan] for plan in plans])
        assert fleet.models[-1].seen.item() == 48 * by * step
        assert fleet.models[-1].calls.item() == step
    assert fleet.agreed <= 2 and fleet.notices() == []


def test_workers_that_come_later_learn_what_is_counted() -> None:
    """While there is one forward in a step nothing shows; with the second worker it does."""
    fleet = Fleet(kept(**COUNTS), 2)
    for step in range(1, 3):
        fleet.step([[counting(48)], []])
        assert (fleet.models[1].seen.item(), fleet.models[1].calls.item()) == (48 * step, step)
    for step in range(3, 6):
        fleet.step([[counting(24)], [counting(24)]])
        assert (fleet.models[1].seen.item(), fleet.models[1].calls.item()) == (48 * step, step)
    other = Buffers([Kept(**COUNTS)])
    other.know(fleet.buffers[0].known, fleet.buffers[0].counts())
    assert other.counts() == fleet.buffers[0].counts() == {"0": ["samples", 1], "1": ["calls", 0]}


def test_a_run_goes_on_from_a_checkpoint_that_says_nothing_of_what_is_counted() -> None:
    """As those of earlier versions, and of one worker."""
    fleet = Fleet(kept(**COUNTS), 2)
    for buffers in fleet.buffers:
        buffers.resume([0, 1], None)
    for step in range(1, 4):
        fleet.step([[counting(24)], [counting(24)]])
        assert (fleet.models[0].seen.item(), fleet.models[0].calls.item()) == (48 * step, step)


def test_what_was_taken_for_samples_is_judged_anew() -> None:
    """It moves by 6 a call, and by chance that is a multiple of the samples."""

    def forward(model: Any) -> None:
        model.calls += 6

    fleet = Fleet(kept(calls=torch.tensor(0)), 2)
    fleet.step([[(3, forward)], [(3, forward)]])
    before = fleet.models[0].calls.item()
    for step in range(1, 4):
        fleet.step([[(3, forward)], [(2, forward)]])
        assert fleet.models[0].calls.item() == before + 6 * step
    assert fleet.agreed == 2


def test_a_histogram_adds_up() -> None:
    def forward(labels: list[int]) -> tuple[int, Forward]:
        def run(model: Any) -> None:
            model.classes += torch.bincount(torch.tensor(labels), minlength=4)

        return len(labels), run

    for plans in ([[[0, 1, 1]], [[3, 3, 3]]], [[[0, 1]], [[1, 3, 3, 3]]]):
        fleet = Fleet(kept(classes=torch.zeros(4, dtype=torch.int64)), 2)
        for step in range(1, 4):
            fleet.step([[forward(labels) for labels in plan] for plan in plans])
            assert fleet.models[0].classes.tolist() == [step, 2 * step, 0, 3 * step]
        assert fleet.notices() == []


def test_forwards_of_one_sample_do_not_show_what_is_counted_and_that_is_said() -> None:
    fleet = Fleet(kept(**COUNTS), 2)
    for step in range(1, 4):
        fleet.step([[counting(1)], [counting(1)]])
        assert fleet.models[0].calls.item() == step
    assert fleet.agreed == 1
    notices = fleet.notices()
    assert len(notices) == 2 and all('"sum"' in text for text in notices)
    fleet.step([[counting(2)], [counting(1)]])
    assert (fleet.models[0].seen.item(), fleet.models[0].calls.item()) == (6, 4)


def test_whole_numbers_that_no_rule_fits_are_named_once() -> None:
    def forward(by: int) -> Forward:
        def run(model: Any) -> None:
            model.odd += by

        return run

    fleet = Fleet(kept(odd=torch.tensor(0)), 2)
    for _ in range(3):
        fleet.step([[(4, forward(3))], [(4, forward(7))]])
    (text,) = fleet.notices()
    assert "'odd'" in text and 'buffers={"odd": "sum"}' in text
    told = Fleet(kept(odd=torch.tensor(0)), 2, {"odd": "sum"})
    for step in range(1, 4):
        told.step([[(4, forward(3))], [(4, forward(7))]])
        assert told.models[0].odd.item() == 10 * step
    assert told.notices() == []


# -- what is meant -----------------------------------------------------------------------------------------------------

ROWS = 12


class Queued(nn.Module):
    """Rows, or columns, written at a pointer, with labels beside them; and counts that decay."""

    queue: Tensor
    columns: Tensor
    labels: Tensor
    pointer: Tensor
    used: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(ROWS, 3))
        self.register_buffer("columns", torch.ones(3, ROWS))
        self.register_buffer("labels", torch.zeros(ROWS, dtype=torch.int64))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("used", torch.zeros(4))

    def forward(self, x: Tensor) -> None:
        index = (torch.arange(len(x)) + int(self.pointer)) % ROWS
        self.queue[index] = x
        self.columns[:, index] = -x.T
        self.labels[index] = x[:, 0].long() % 4
        self.pointer[0] = (int(self.pointer) + len(x)) % ROWS
        self.used.mul_(0.9).add_(torch.bincount(x[:, 0].long() % 4, minlength=4), alpha=0.1)


QUEUED = {
    "queue": "concat",
    "columns": "concat",
    "labels": "concat",
    "pointer": f"sum:modulo={ROWS}",
    "used": "sum:decay=0.9",
}


def queued_steps(fleet: Fleet, cuts: Sequence[Sequence[int]], steps: int = 7) -> None:
    """Steps whose samples are cut so for the workers."""
    drawn = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.randint(0, 100, (sum(map(sum, cuts)), 3), generator=drawn).float()
        parts = iter(x.split([samples for cut in cuts for samples in cut]))
        fleet.step([[(samples, run_on(next(parts))) for samples in cut] for cut in cuts])


def run_on(x: Tensor) -> Forward:
    return lambda model: model(x)


@pytest.mark.parametrize("cuts", [[[4, 4]], [[4], [4]], [[3], [3], [2]], [[1, 2], [], [2, 2, 1]]])
def test_queues_pointers_and_decayed_sums_are_those_of_one_process(cuts: list[list[int]]) -> None:
    one, fleet = Fleet(Queued, 1), Fleet(Queued, len(cuts), QUEUED)
    queued_steps(one, [[8]])
    queued_steps(fleet, cuts)
    for name, value in one.models[0].named_buffers():
        torch.testing.assert_close(fleet.models[0].get_buffer(name), value, msg=name)
    assert fleet.notices() == [] and one.notices() == []


def test_a_count_beside_a_pointer_is_a_count_once_the_pointer_is_said() -> None:
    """At first both move from 0 by the rows that are written."""

    class Both(Queued):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.tensor(0))

        def forward(self, x: Tensor) -> None:
            super().forward(x)
            self.seen += len(x)

    fleet = Fleet(Both, 2, QUEUED)
    queued_steps(fleet, [[4], [4]])
    assert fleet.models[0].seen.item() == 7 * 8 and fleet.notices() == []


def test_queues_pointers_and_decayed_sums_are_named() -> None:
    fleet = Fleet(Queued, 2)
    queued_steps(fleet, [[4], [4]])
    texts = " ".join(fleet.notices())
    for name in ("queue", "columns", "pointer", "used"):
        assert f'buffers={{"{name}": "{QUEUED[name]}"}}' in texts
    assert "'labels'" in texts
    assert fleet.notices() == []


@pytest.mark.parametrize("front", [True, False])
def test_a_queue_that_is_shifted(front: bool) -> None:
    class Shifted(nn.Module):
        queue: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.arange(ROWS * 2.0).view(ROWS, 2))

        def forward(self, x: Tensor) -> None:
            rows = torch.cat([x, self.queue]) if front else torch.cat([self.queue, x])
            self.queue.copy_(rows[:ROWS] if front else rows[-ROWS:])

    one, fleet = Fleet(Shifted, 1), Fleet(Shifted, 2, {"queue": "concat"})
    drawn = torch.randn(5, 7, 2)
    for x in drawn:
        one.step([[(7, run_on(x))]])
        fleet.step([[(len(part), run_on(part))] for part in x.split([3, 4])])
        assert torch.equal(fleet.models[0].queue, one.models[0].queue)


def test_rows_that_begin_at_different_places_are_refused() -> None:
    """The pointer is not in a buffer, so a second forward does not begin where the step began."""

    class Astray(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.zeros(ROWS))
            self.pointer = 0

    def forward(model: Any) -> None:
        model.queue[model.pointer : model.pointer + 2] = 1.0
        model.pointer += 9

    fleet = Fleet(Astray, 1, {"queue": "concat"})
    with pytest.raises(ConfigError, match=r"'queue'.*pointer in a buffer"):
        fleet.step([[(2, forward), (2, forward)]])


def test_the_first_forward_counts() -> None:
    def forward(by: float) -> Forward:
        def run(model: Any) -> None:
            model.book.fill_(by)
            model.step += int(by)

        return run

    fleet = Fleet(kept(book=torch.zeros(2), step=torch.tensor(5)), 2, {"*": "first"})
    for step in range(1, 4):
        fleet.step([[(1, forward(7.3)), (5, forward(9.0))], [(1, forward(1.0))]])
        assert fleet.models[1].book.tolist() == torch.tensor([7.3, 7.3]).tolist()
        assert fleet.models[1].step.item() == 5 + 7 * step
    fleet.step([[(1, still), (5, forward(9.0))], [(1, forward(1.0))]])
    assert fleet.models[1].book.tolist() == torch.tensor([7.3, 7.3]).tolist()


def test_a_decayed_sum_stands_still_in_a_phase_that_leaves_it_alone() -> None:
    fleet = Fleet(Queued, 2, QUEUED)
    queued_steps(fleet, [[4], [4]])
    before = fleet.models[0].used.clone()
    fleet.step([[(4, still)], [(4, still)]])
    assert torch.equal(fleet.models[0].used, before)


def test_statistics_are_not_named() -> None:
    class Statistics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)
            self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
            self.register_buffer("activity", torch.zeros(8))
            self.register_buffer("scale", torch.ones(()))
            self.register_buffer("started", torch.tensor(False))

        def forward(self, x: Tensor) -> None:
            # a dead channel, and one that is dead in some forwards
            y = self.spectral(self.norm(x * torch.tensor([0.0, float(x[0, 0] > 0), 1, 1, 1, 1, 1, 1]))).relu()
            self.activity.lerp_((y > 0).float().mean(0), 0.1)
            self.scale.mul_(0.99).add_(y.abs().max(), alpha=0.01)
            self.started.fill_(True)

    first = Statistics()
    fleet = Fleet(lambda: copy.deepcopy(first), 2)
    drawn = torch.Generator().manual_seed(0)
    for _ in range(10):
        parts = [torch.randn(4, 8, generator=drawn), torch.randn(5, 8, generator=drawn)]
        fleet.step([[(len(part), run_on(part))] for part in parts])
    assert fleet.notices() == []
    assert fleet.models[0].started.item() is True


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"quue": "concat"}, "did you mean 'queue'"),
        ({"zzzz": "concat"}, "there are 'queue', 'columns', 'labels', 'pointer', 'used'"),
        ({"queue": "median"}, '\'median\'; there are "mean", "sum"'),
        ({"queue": 3}, "'queue' is given 3"),
        ({"queue": "concat:rows=3"}, "concat:rows=3"),
        ({"queue": "sum:modulo=64"}, "whole numbers"),
        ({"pointer": "sum:decay=0.5"}, "floating-point"),
        ({"used": "sum:decay=2"}, "between 0 and 1"),
        (["queue"], "must be a dict"),
        ({1: "sum"}, "is text"),
    ],
)
def test_what_cannot_be_meant_is_refused(words: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Buffers([Queued()]).use(words)


def test_names_are_those_of_named_buffers_and_patterns_and_tracked() -> None:
    net = nn.Sequential(Queued(), Queued())
    for words in ({"*.queue": "concat"}, {"0.queue": "concat", "net.1.queue": "concat"}):
        buffers = Buffers({"net": net})
        buffers.use(words)
        assert buffers.queues == ["0.queue", "1.queue"]


def test_sums_are_named_whatever_the_sizes_of_forwards() -> None:
    fleet = Fleet(kept(used=torch.zeros(3), total=torch.ones(())), 2)

    def forward(samples: int) -> tuple[int, Forward]:
        def run(model: Any) -> None:
            model.used.mul_(0.95).add_(torch.tensor([samples - 2.0, 1.0, 1.0]), alpha=0.05)
            model.total += samples

        return samples, run

    for samples in (4, 5, 3, 7):
        fleet.step([[forward(samples)], [forward(samples + 1)]])
    texts = " ".join(fleet.notices())
    assert 'buffers={"used": "sum:decay=0.95"}' in texts and 'buffers={"total": "sum"}' in texts
