"""A data set's open file is read in every process as if there were no others."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.core.events import AnyEvent, Notice
from shoal.trainer.session import Session


class Reading:
    """Items are the positions in a file that was opened here, each one further than the one before."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "rb", buffering=0)  # noqa: SIM115 - the test closes it

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Tensor:
        position = self.file.tell()
        self.file.read(1)
        return torch.tensor([float(position)])


@pytest.mark.parametrize("loaders", [0, 1])
def test_each_process_has_its_own_position(tmp_path: Path, loaders: int) -> None:
    (tmp_path / "data").write_bytes(bytes(1000))
    data = Reading(tmp_path / "data")

    def positions(session: Session) -> list[float]:
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.named_parameters(), lr=0.01)
        session.track(net=net, optimizer=optimizer)
        seen = []
        for step in session.steps(data, 16, data_workers=loaders):
            for batch in step:
                seen += batch[:, 0].tolist()
                step.backward(net(batch).mean())
            step.apply(optimizer)
        return seen

    with data.file:
        told = shoal.launch(positions, workers=2)
        assert data.file.tell() == 0
    # the proof has read them too, in a process of its own
    assert told == [[float(position) for position in range(24)]] * 2


class Connected:
    def __init__(self) -> None:
        self.database = sqlite3.connect(":memory:")

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


def test_a_connection_is_named_once_with_servers_too() -> None:
    data, told = Connected(), []

    def listen(event: AnyEvent) -> None:
        if isinstance(event, Notice):
            told.append(event.text)

    shoal.Trainer(
        nn.Linear(1, 1),
        lambda model, batch: model(batch / 32).pow(2).mean(),
        lambda params: torch.optim.SGD(params, lr=0.01),
        data,
        eval_data=data,
        batch_size=16,
        workers=2,
        sync="server",
        callbacks=[listen],
    ).fit()
    data.database.close()
    assert sum("data.database is a sqlite3.Connection" in text for text in told) == 1


def test_a_connection_is_named_where_only_predictions_are_made(capfd: pytest.CaptureFixture[str]) -> None:
    data = Connected()
    trainer = shoal.Trainer(
        nn.Linear(1, 1),
        lambda model, batch: model(batch).pow(2).mean(),
        lambda params: torch.optim.SGD(params, lr=0.01),
        [torch.ones(1)] * 4,
        batch_size=4,
        workers=2,
        predict=lambda model, batch: batch,
    )
    assert trainer.predict(data).flatten().tolist() == [float(number) for number in range(32)]
    data.database.close()
    assert capfd.readouterr().err.count("data.database is a sqlite3.Connection") == 1
