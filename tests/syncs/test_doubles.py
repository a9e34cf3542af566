"""Doubles in a tail of single precision."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.syncs.doubles import LONGEST, Riding, add_up, places, spread
from shoal.testing.fake_group import FakeGroup, run_members

VALUES = [0.1, -1e300, 5e-324, 2.0**53 + 2, -0.0, math.pi, 1e-17, math.inf]


@pytest.mark.parametrize("members", [1, 2, 5])
def test_a_sum_of_single_precision_gives_all_bits_of_doubles(members: int) -> None:
    own = [torch.tensor(VALUES, dtype=torch.float64) * (rank + 1) for rank in range(members)]
    summed = torch.stack([spread(value, rank, members) for rank, value in enumerate(own)]).sum(0)
    assert summed.dtype == torch.float32 and summed.numel() == places(len(VALUES), members)
    expected = own[0].clone()
    for value in own[1:]:
        expected += value
    assert torch.equal(add_up(summed, members), expected)
    assert math.isnan(float(add_up(spread(torch.tensor([math.nan], dtype=torch.float64), 0, 1), 1)))


@pytest.mark.parametrize("count", [0, 3, LONGEST])
def test_they_ride_in_the_tail_or_travel_alone(count: int) -> None:
    def member(group: FakeGroup) -> tuple[int, torch.Tensor]:
        doubles = torch.full((count,), 0.1 + group.rank, dtype=torch.float64)
        riding = Riding(group, doubles)
        tail = torch.cat([torch.ones(1), *riding.parts(torch.device("cpu"))])
        group.sum(tail).wait()
        riding.start()
        riding.finish(tail[1:])
        return riding.size, doubles

    for size, doubles in run_members(3, member):
        assert size == (27 if count == 3 else 0)
        assert torch.equal(doubles, torch.full((count,), 0.1 + 1.1 + 2.1, dtype=torch.float64))
