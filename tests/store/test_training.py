"""A real training, recorded in either database, and read by the command line."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.core.events import AnyEvent, StepDone
from shoal.store.store import Store


def command(url: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "shoal.cli", *args],
        env={**os.environ, "SHOAL_STORE": url, "COLUMNS": "120", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_was_trained_is_what_is_read(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_STORE", url)
    losses: dict[int, float] = {}

    def note(event: AnyEvent) -> shoal.Stop | None:
        if isinstance(event, StepDone):
            losses[event.step] = event.loss
        return None

    def make(**changed: Any) -> shoal.Trainer:
        return shoal.Trainer(
            nn.Linear(2, 1),
            lambda model, batch: {"loss": model(batch).square().mean(), "twice": 2.0},
            lambda params: torch.optim.SGD(params, lr=0.01),
            torch.randn(60, 2, generator=torch.Generator().manual_seed(0)),
            eval_data=torch.ones(4, 2),
            batch_size=10,
            workers=2,
            run_dir=tmp_path / "run",
            name="tide",
            callbacks=[note],
            **changed,
        )

    first = make(steps=6, checkpoint_every=4).fit()
    # from a step before the last one: what is done again replaces what was done
    again = make(steps=9, resume=tmp_path / "run" / "checkpoints" / "step-000000004").fit()
    assert again.run_id == first.run_id

    with Store.open(url) as store:
        rows = store.steps(first.run_id)
        assert [row.step for row in rows] == list(range(1, 10))
        assert {row.step: row.loss for row in rows} == losses
        assert all(row.logs == {"twice": 2.0} and row.samples == 10 for row in rows)
        assert sorted(worker.worker for worker in store.workers(first.run_id)) == [0, 1]

    (listed,) = json.loads(command(url, "runs", "--json"))
    assert (listed["id"], listed["status"], listed["step"], listed["resumes"]) == (first.run_id, "complete", 9, 1)
    shown = command(url, "show", "tide")
    assert "complete" in shown and "9 of 9" in shown
    exported = list(csv.DictReader(io.StringIO(command(url, "export", first.run_id, "--format", "csv"))))
    assert {int(row["step"]): float(row["loss"]) for row in exported} == losses
    assert "tide" in command(url, "compare", "tide", first.run_id)
    command(url, "tag", "tide", "best")
    assert json.loads(command(url, "runs", "--json"))[0]["tags"] == ["best"]
