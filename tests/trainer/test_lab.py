"""Training in the hosts of a lab gives the weights of one process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal
from shoal import Trainer
from shoal.comm.group import Group
from shoal.core.errors import ConfigError
from shoal.testing.lab import Lab, why_no_lab
from shoal.testing.ranks import run_ranks

needs_lab = pytest.mark.skipif(why_no_lab() is not None, reason=str(why_no_lab()))


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(hosts=2) as made:
        yield made


generator = torch.Generator().manual_seed(9)
INPUTS = torch.randn(64, 6, generator=generator)
DATA = TensorDataset(INPUTS, INPUTS.sin().sum(1, keepdim=True))


def mse(net: nn.Module, batch: list[Tensor]) -> Tensor:
    return nn.functional.mse_loss(net(batch[0]), batch[1])


def trained(**options: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    Trainer(
        model=net,
        loss=mse,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        data=DATA,
        batch_size=16,
        epochs=3,
        **options,
    ).fit()
    return net.state_dict()


@needs_lab
def test_workers_in_lab_hosts_train_to_parity(lab: Lab) -> None:
    alone = trained(workers=1)
    before = lab.counters("a")
    spread_out = trained(workers=4, engine=f"local:lab={lab.name}")
    for name, value in alone.items():
        torch.testing.assert_close(spread_out[name], value, rtol=1e-5, atol=1e-5)
    assert (lab.counters("a") - before).sent > 1000  # they met over the network


@needs_lab
def test_workers_and_ranks_are_in_their_hosts(lab: Lab) -> None:
    def where(session: Any) -> list[str]:
        return [socket.gethostname(), os.getcwd(), *os.listdir("/dev/shm")]

    values = shoal.launch(where, workers=5, engine=f"local:lab={lab.name}")
    assert [value[0] for value in values] == ["a", "a", "a", "b", "b"]
    assert {value[1] for value in values} == {os.getcwd()}

    def name_and_sum(group: Group) -> list[Any]:
        return [socket.gethostname(), group.rank]

    assert run_ranks(3, name_and_sum, lab=lab) == [["a", 0], ["a", 1], ["b", 2]]


def test_a_lab_that_is_not_up_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"lab='nowhere' is not up|labs belong to root"):
        trained(workers=2, engine="local:lab=nowhere")
    with pytest.raises(ConfigError, match="forks its workers; leave start=script out"):
        trained(workers=2, engine="local:lab=nowhere,start=script")
