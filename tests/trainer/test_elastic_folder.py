"""The folder with a run's keys: for its user alone, and gone with the run, however that ends."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal.cluster.supervisor.watch import Unwatched
from shoal.core.errors import WorkerError
from shoal.core.events import AnyEvent, StepDone
from shoal.trainer.session import Session
from shoal.trainer.workers.elastic import Elasticity, run_elastic
from shoal.trainer.workers.start import Start, import_for_training

pytestmark = pytest.mark.timeout(60)
DATA = TensorDataset(torch.randn(16, 2, generator=torch.Generator().manual_seed(1)))


class Watching(Unwatched):
    """Looks into the folder while the run is under way."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.modes: dict[str, int] = {}

    def __call__(self, event: AnyEvent) -> None:
        if isinstance(event, StepDone):
            for path in (self._folder, *self._folder.rglob("*")):
                self.modes[path.name] = stat.S_IMODE(path.stat().st_mode)


def trained(session: Session) -> list[float]:
    net = nn.Linear(2, 1)
    nn.init.ones_(net.weight)
    nn.init.zeros_(net.bias)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    session.track(net=net, optimizer=optimizer)
    for step in session.steps(DATA, 8, steps=3):
        for (x,) in step:
            step.backward(net(x).square().mean())
        step.apply(optimizer)
    session.farewell(lambda: None)
    weights: list[float] = net.weight.flatten().tolist()
    return weights


def run(folder: Path, body: Any) -> tuple[list[Any], Watching]:
    import_for_training()
    watching = Watching(folder / "control")
    return run_elastic(body, Start(run_id="r", run_dir=folder), Elasticity(2, 1, 2), watching, None), watching


def test_the_folder_is_for_one_user_and_goes_with_the_run(tmp_path: Path) -> None:
    left = tmp_path / "control"  # by a supervisor that was killed
    left.mkdir()
    (left / "endpoint").write_text("of another run")
    (one, other), watching = run(tmp_path, trained)
    assert one == other
    assert watching.modes.pop("control") == 0o700
    assert watching.modes and set(watching.modes.values()) == {0o600}
    assert not left.exists()


def test_it_goes_with_a_run_that_fails(tmp_path: Path) -> None:
    def body(session: Session) -> None:
        raise LookupError(f"not here, {os.getpid()}")

    with pytest.raises(WorkerError, match="LookupError: not here"):
        run(tmp_path, body)
    assert not (tmp_path / "control").exists()
