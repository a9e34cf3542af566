"""A worker's side with real servers: the weights are those of one process, also when a server dies."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import nn

from shoal.core.spec import Server
from shoal.syncs.server.client import Client
from shoal.syncs.server.messages import Lease, Placement

from .cluster import HALVES, HERE, THERE, Cluster, gradient, make_setup, reference


class Worker:
    def __init__(self, cluster: Cluster, seat: int, host: str) -> None:
        self.setup = cluster.setup
        self.params = [(name, nn.Parameter(torch.zeros_like(value))) for name, value in self.setup.params]
        self._read, self._write = os.pipe()
        self._heard: list[Callable[[], object]] = []
        self.client = Client(self.setup, seat, host, self.params, fd=self._read, hear=self._hear)
        assert cluster.placement is not None
        self.client.place(cluster.placement)

    def tell(self, placement: Placement) -> None:
        self._heard.append(lambda: self.client.place(placement))
        os.write(self._write, b"x")

    def _hear(self) -> None:
        os.read(self._read, 1)
        self._heard.pop(0)()

    def compute(self, lease: Lease) -> None:
        area = gradient(self.setup, lease)
        read = self.client.pull(lease.step)
        assert read == lease.step
        self.client.open(lease, read)
        self.client.arm()
        loss = torch.zeros(())
        for number, (_, param) in enumerate(self.params):
            loss = loss + (param * self.setup.cut.view(area, number)).sum()
        loss.backward()
        self.client.push()

    def has(self, steps: int) -> bool:
        area = reference(self.setup, steps)
        return all(torch.equal(param, self.setup.cut.view(area, n)) for n, (_, param) in enumerate(self.params))

    def end(self) -> None:
        self.client.close()
        os.close(self._read)
        os.close(self._write)


@pytest.mark.parametrize("hosts", [(HERE, HERE), (THERE, THERE), (HERE, THERE)], ids=["near", "far", "mixed"])
def test_weights_are_those_of_one_process_also_when_a_server_dies(hosts: tuple[str, str]) -> None:
    with Cluster(make_setup(Server(durability="peer"))) as cluster:
        for number, host in enumerate(hosts):
            cluster.start(number, host)
        cluster.begin([(0, 1), (1, 0), (0, 1), (1, 0)])
        workers = [Worker(cluster, seat, HERE) for seat in (0, 1)]
        for step in range(4):
            if step == 2:
                # one half is taken, the other one meets a server that is gone
                workers[0].compute(Lease(step, *HALVES[0]))
                cluster.kill(0)
                cluster.place([(1, None)] * 4)
                assert cluster.placement is not None
                for worker in workers:
                    worker.tell(cluster.placement)
            for worker, half in zip(workers, HALVES, strict=True):
                worker.compute(Lease(step, *half))
            cluster.close(step)
            cluster.apply(step, keep=step == 1)
        for worker in workers:
            worker.client.pull_exact(2)
            assert worker.has(2)
            assert worker.client.pull(4) == 4
            assert worker.has(4)
            worker.end()
        cluster.end()
