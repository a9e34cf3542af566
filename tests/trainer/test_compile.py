"""torch.compile before fit(), in the process that workers are forked from: all of them can compile afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import shoal

how = sys.argv[1]
X, y = torch.randn(48, 8), torch.randint(0, 2, (48,))
net = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)))


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def grow(event):
    return shoal.Scale(2) if how == "joiner" and isinstance(event, shoal.StepDone) else None


if how != "first in workers":
    loss(net, (X[:20], y[:20])).backward()  # "does it run?"
settings = {"server": {"sync": "server"}, "joiner": {"workers": 1, "max_workers": 2}}.get(how, {})
trainer = shoal.Trainer(
    net,
    loss,
    lambda params: torch.optim.SGD(params, lr=0.1),
    TensorDataset(X, y),
    batch_size=12,
    steps=400 if how == "joiner" else 6,
    callbacks=[grow],
    **{"workers": 2} | settings,
)
result = trainer.fit()
loss(net, (X[:30], y[:30])).backward()
print("trained", result.steps, result.workers)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["before", "first in workers", "joiner", "server"])
def test_a_model_that_was_compiled_before(tmp_path: Path, how: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, how],
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "SHOAL_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert found.stdout.startswith("trained"), found.stderr
