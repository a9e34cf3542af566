"""Which collective workers get, and what happens where shared memory is not to be had."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.comm.choose import choose
from shoal.core.errors import ConfigError
from shoal.core.spec import check_collective
from shoal.testing.lab import why_no_lab

ONE, TWO, EACH = [0, 0, 0], [0, 0, 1, 1], [0, 1, 2]


@pytest.mark.parametrize(
    ("asked", "device", "hosts", "given"),
    [
        ("auto", "cpu", ONE, "shm"),
        ("auto", "cpu", TWO, "hierarchical"),
        ("auto", "cpu", [0, 1, 1], "hierarchical"),
        ("auto", "cpu", EACH, "gloo"),
        ("auto", "cuda", ONE, "nccl"),
        ("auto", "cuda", TWO, "nccl"),
        ("nccl", "cuda", TWO, "nccl"),
        ("gloo", "cpu", ONE, "gloo"),
        ("gloo", "cuda", ONE, "gloo"),
        ("shm", "cpu", ONE, "shm"),
        ("hierarchical", "cpu", TWO, "hierarchical"),
        ("hierarchical", "cpu", EACH, "hierarchical"),
        ("hierarchical", "cpu", ONE, "shm"),
    ],
)
def test_what_is_chosen(asked: str, device: str, hosts: list[int], given: str) -> None:
    chosen, reason = choose(asked, device, hosts)
    assert chosen == given and reason


@pytest.mark.parametrize(
    ("asked", "device", "hosts", "said"),
    [
        ("shm", "cpu", TWO, "4 workers on 2 hosts, which share no memory; use 'hierarchical'"),
        ("nccl", "cpu", ONE, "the model is on the CPU; use 'auto'"),
        ("shm", "cuda", ONE, "the model is on CUDA; use 'nccl'"),
        ("hierarchical", "cuda", TWO, "the model is on CUDA; use 'nccl'"),
    ],
)
def test_what_cannot_be(asked: str, device: str, hosts: list[int], said: str) -> None:
    with pytest.raises(ConfigError, match="collective=") as caught:
        choose(asked, device, hosts)
    assert said in str(caught.value)


@pytest.mark.parametrize("asked", ["shn", "", None, 3, "SHM"])
def test_an_unknown_name_is_refused_with_those_that_exist(asked: object) -> None:
    with pytest.raises(ConfigError, match="'auto', 'shm', 'hierarchical', 'gloo', 'nccl'"):
        check_collective(asked)


SCRIPT = """
import torch
from torch import nn
import shoal

torch.manual_seed(0)
x, y = torch.randn(64, 200), torch.randn(64, 1)

def loss(net, batch):
    return nn.functional.mse_loss(net(batch[0]), batch[1])

def main():
    net = nn.Sequential(nn.Linear(200, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    events = []
    trainer = shoal.Trainer(
        net, loss, lambda params: torch.optim.SGD(params, lr=0.001), torch.utils.data.TensorDataset(x, y),
        batch_size=16, steps=8, workers=2, callbacks=[events.append],
    )
    trainer.fit()
    for event in events:
        if isinstance(event, shoal.ExchangeSettled):
            print("COLLECTIVE", event.collective, event.reason)

main()
"""


@pytest.mark.skipif(why_no_lab() is not None, reason=f"needs to mount: {why_no_lab()}")
@pytest.mark.parametrize(
    ("room", "width", "collective", "said"),
    [
        ("256k", 10, "gloo", "has no room for 2.1 MB of shared memory"),
        ("3m", 4000, "shm", "gradients are copied through 1 MB instead of being summed in place"),
        ("64m", 4000, "shm", ""),
    ],
)
def test_too_little_room_for_shared_memory(room: str, width: int, collective: str, said: str, tmp_path: Path) -> None:
    """As in a container whose /dev/shm is small: it trains, and says what is missing."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("WIDTH", str(width)))
    mounted = f"mount -t tmpfs -o size={room} tmpfs /dev/shm && exec {sys.executable} {script}"
    ran = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounted],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "SHOAL_HOME": str(tmp_path / "home"), "SHOAL_PROGRESS": "plain"},
    )
    assert ran.returncode == 0, ran.stderr
    assert f"COLLECTIVE {collective}" in ran.stdout
    shown = " ".join((ran.stdout + ran.stderr).split())
    if said:
        assert "/dev/shm" in shown and said in shown
    else:
        assert "/dev/shm" not in shown
