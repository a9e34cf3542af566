"""Small runs with servers, for tests of what servers do: no processes, one parameter area, gradients by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.core.atoms import Course
from shoal.core.spec import NoCodec, Server
from shoal.syncs.server.cutting import cut
from shoal.syncs.server.messages import Lease
from shoal.syncs.server.optimizers import needs_whole
from shoal.syncs.server.setup import Setup
from shoal.syncs.server.shard import Holding

SHAPES = ((40, 30), (30,), (7, 11, 13), ())
"""A matrix over several shards, parameters that share one, and one without dimensions."""


def adamw(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def make_setup(
    make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] = adamw,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32,) * 4,
    course: Course | None = None,
    total: int = 20,
    make_schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    **spec: Any,
) -> Setup:
    generator = torch.Generator().manual_seed(3)
    params = [
        (f"p{number}", torch.randn(shape, generator=generator).to(dtype).requires_grad_())
        for number, (shape, dtype) in enumerate(zip(SHAPES, dtypes, strict=True))
    ]
    optimizer = make_optimizer([param for _, param in params])
    return Setup(
        run="r",
        keys=None,  # type: ignore[arg-type]  # nothing is sent
        spec=Server(**spec),
        course=course or Course(size=24, batch=8),
        total=total,
        version=0,
        cut=cut(params, whole=needs_whole(optimizer), shards=4),
        params=params,
        optimizer=optimizer,
        make_schedule=make_schedule,
        schedule_state=None,
        clip=None,
        codec=NoCodec(),
        memory={},
        extra={"make_optimizer": make_optimizer},
    )


def area_of(setup: Setup, values: Sequence[Tensor]) -> Tensor:
    area = torch.zeros(setup.cut.size, dtype=torch.uint8)
    for number, value in enumerate(values):
        setup.cut.view(area, number).copy_(value.detach())
    return area


def part(setup: Setup, area: Tensor, shard: int) -> Tensor:
    whole = setup.cut.shards[shard]
    return area[whole.start : whole.stop]


def hold(setup: Setup, shard: int) -> Holding:
    weights = part(setup, area_of(setup, [param for _, param in setup.params]), shard).clone()
    return Holding(setup, shard, weights, setup.version)


def sample_gradient(setup: Setup, step: int, position: int) -> list[Tensor]:
    """The gradient of one sample: the same for whoever computes it, and of few digits: sums in any order are equal."""
    generator = torch.Generator().manual_seed(1000 * step + position)
    drawn = [torch.randn(param.shape, generator=generator) for _, param in setup.params]
    return [(value * 64).round().div(64).to(param.dtype) for value, (_, param) in zip(drawn, setup.params, strict=True)]


def gradient(setup: Setup, lease: Lease) -> Tensor:
    """The area of a lease's gradient: the sum of those of its samples."""
    total = [torch.zeros_like(param) for _, param in setup.params]
    for position in range(lease.start, lease.stop):
        drawn = sample_gradient(setup, lease.step, position)
        total = [one.detach() + other for one, other in zip(total, drawn, strict=True)]
    return area_of(setup, total)


def samples(setup: Setup, step: int) -> int:
    return setup.course.step(step).samples
