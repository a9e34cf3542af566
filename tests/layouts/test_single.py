"""Buffers of several workers, without the workers: what their exchange would add up is added up here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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

    def forward(x: Tensor) -> Forward:
        return lambda model: model(x)

    def make() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))

    found = []
    for workers in (1, 2, 3):
        fleet = Fleet(make, workers)
        plans = [[(len(x), forward(x)) for x in parts[rank::workers]] for rank in range(workers)]
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
