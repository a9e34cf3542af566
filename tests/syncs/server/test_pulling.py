"""Weights on their way into parameters, however these lie in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal.syncs.server.cutting import LARGEST, Cut, cut
from shoal.syncs.server.pulling import Copying
from shoal.syncs.server.setup import Memory


def some() -> list[tuple[str, nn.Parameter]]:
    torch.manual_seed(0)
    return [
        ("plain", nn.Parameter(torch.randn(60, 40))),
        ("transposed", nn.Parameter(torch.randn(50, 70).t())),
        ("channels", nn.Parameter(torch.randn(8, 6, 5, 5).contiguous(memory_format=torch.channels_last))),
        ("single", nn.Parameter(torch.randn(()))),
    ]


def put(memory: Memory, layout: Cut, values: list[Tensor]) -> None:
    for number, value in enumerate(values):
        layout.view(memory.weights, number).copy_(value)


@pytest.mark.parametrize("largest", [LARGEST, 256])
@pytest.mark.parametrize("far", [False, True])
def test_parameters_get_their_values(largest: int, far: bool) -> None:
    params = some()
    layout = cut(params, shards=5, largest=largest)
    memory = Memory(layout.size, len(layout.shards), seats=1, steps=1)
    copying = Copying(layout, params, memory)
    strides = [param.stride() for _, param in params]

    def copied(changed: range) -> None:
        for shard in layout.shards:
            if far:
                copying.frame(shard.number, memory.weights[shard.start : shard.stop].numpy().data)
            else:
                memory.state[shard.number, 0] += 2 * (shard.number in changed)
                assert copying.near(shard.number, 0) == 0
        copying.finish()

    every = range(len(layout.shards))
    first = [torch.randn(param.shape) for _, param in params]
    put(memory, layout, first)
    copied(every)
    for (_, param), value in zip(params, first, strict=True):
        assert torch.equal(param, value)
    # one shard changes: the others are not copied again from shared memory
    edge = layout.shards[2]
    memory.weights[edge.start : edge.stop] = torch.zeros(edge.size, dtype=torch.uint8)
    copied(range(2, 3))
    for number, (_, param) in enumerate(params):
        assert torch.equal(param, layout.view(memory.weights, number))
    assert [param.stride() for _, param in params] == strides


def test_what_lies_in_another_order_is_put_there_once() -> None:
    """Not once for each piece: each time all of its elements are moved."""
    params = some()[1:2]
    layout = cut(params, shards=5, largest=256)
    memory = Memory(layout.size, len(layout.shards), seats=1, steps=1)
    copying = Copying(layout, params, memory)
    before = params[0][1].detach().clone()
    for shard in layout.shards:
        copying.near(shard.number, 0)
        assert torch.equal(params[0][1], before)
    copying.finish()
    assert torch.equal(params[0][1], torch.zeros(70, 50))
