"""Workers' clients and servers together: the weights are those of one process, wherever a worker is."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from torch import Tensor, nn

from shoal.core.spec import Int8, Server
from shoal.syncs.server.client import Client
from shoal.syncs.server.messages import Lease
from shoal.syncs.server.setup import Setup
from shoal.syncs.updating import update

from .cluster import HERE, THERE, Cluster, make_setup, model, optimizer_of, schedule_of

WHOLE = (0, 8)


def batch(step: int) -> Tensor:
    return torch.randn(16, 33, generator=torch.Generator().manual_seed(step))


def loss_of(net: nn.Module, step: int) -> Tensor:
    loss: Tensor = net(batch(step)).square().mean()
    return loss


def in_one_process(steps: int) -> list[Tensor]:
    net = model()
    optimizer = optimizer_of(list(net.parameters()))
    schedule = schedule_of(optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        update(optimizer)
        schedule.step()
    return [param.detach() for param in net.parameters()]


def train(setup: Setup, cluster: Cluster, host: str, steps: int, kill_at: int | None = None) -> list[Tensor]:
    """What one worker's parameters are after so many steps."""
    net = model()
    reading, writing = os.pipe()
    client = Client(setup, 0, host, list(net.named_parameters()), fd=reading, hear=lambda: None)
    try:
        assert cluster.placement is not None
        client.place(cluster.placement)
        for step in range(steps):
            assert client.pull(step) == step
            client.open(Lease(step, *WHOLE), step)
            client.arm()
            loss_of(net, step).backward()
            if step == kill_at:
                cluster.kill(0)
                cluster.place([(1, None)] * 4)
                client.place(cluster.placement)
            client.push()
            cluster.close(step)
            cluster.apply(step, keep=step + 1 == steps)
        client.pull_exact(steps)
        return [param.detach().clone() for param in net.parameters()]
    finally:
        client.close()
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("kill_at", [None, 2])
@pytest.mark.parametrize("host", [HERE, THERE])
def test_a_worker_trains_as_in_one_process(host: str, kill_at: int | None) -> None:
    setup = make_setup(Server(servers=2))
    with Cluster(setup) as cluster:
        cluster.start(0)
        cluster.start(1)
        cluster.begin([(0, 1), (0, 1), (1, 0), (1, 0)])
        trained = train(setup, cluster, host, 4, kill_at)
    assert all(torch.equal(one, other) for one, other in zip(trained, in_one_process(4), strict=True))


def test_far_pushes_are_decoded() -> None:
    setup = dataclasses.replace(make_setup(Server(servers=1, durability="none")), codec=Int8())
    with Cluster(setup) as cluster:
        cluster.start(0)
        cluster.begin([(0, None)] * 4)
        encoded = train(setup, cluster, THERE, 4)
    plain = in_one_process(4)
    assert not all(torch.equal(one, other) for one, other in zip(encoded, plain, strict=True))
    for one, other in zip(encoded, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=0.03)
