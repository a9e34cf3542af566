"""Checkpoints that an earlier version wrote, in the middle of an epoch, go on as if nothing had stopped the run.

`write_checkpoints.py` wrote them. They have what a run keeps: weights, optimizer, schedule, average, position, and what
a lossy codec has still to send.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import shoal
from tests.net.write_checkpoints import BATCH, MIDDLE, trained

pytestmark = pytest.mark.timeout(60)
WRITTEN = Path(__file__).parent / "checkpoints"

GOES_ON: dict[str, tuple[str, dict[str, Any]]] = {
    "allreduce": ("allreduce", {"workers": 3}),
    "allreduce, elastic": ("allreduce", {"workers": 2, "min_workers": 1}),
    "server": ("server", {"workers": 3}),
    "server, by allreduce": ("server", {"workers": 1, "sync": "allreduce"}),
    "topk": ("topk", {}),
    "topk, elastic": ("topk", {"min_workers": 1}),
    "loop": ("loop", {"workers": 3}),
}


@pytest.mark.parametrize("case", GOES_ON)
def test_it_goes_on_to_where_the_run_would_have_ended(case: str, tmp_path: Path) -> None:
    name, options = GOES_ON[case]
    shutil.copytree(WRITTEN / name / "checkpoints", tmp_path / "run" / "checkpoints")
    events: list[Any] = []
    found = trained(name, **options, run_dir=tmp_path / "run", resume="last", callbacks=[events.append])
    assert_close(found, load_file(WRITTEN / name / "expected.safetensors"))
    done = [event for event in events if isinstance(event, shoal.StepDone)]
    assert [(event.step, event.epoch, event.samples) for event in done] == [
        (6, 1, 10),
        (7, 2, 20),
        (8, 2, 20),
        (9, 2, 10),
    ]
    (started,) = (event for event in events if isinstance(event, shoal.RunStarted))
    assert (started.step, started.run_id) == (MIDDLE, run_id(name)), "it is the same run"


def run_id(name: str) -> str:
    manifest = json.loads((WRITTEN / name / "checkpoints" / f"step-{MIDDLE:09}" / "manifest.json").read_text())
    return str(dict(manifest["content"]["meta"][1])["run_id"])


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_what_a_codec_has_still_to_send_is_in_its_checkpoint() -> None:
    """As a sum over workers, by parameter: without it the run that goes on would end elsewhere."""
    saved = load_file(WRITTEN / "topk" / "checkpoints" / f"step-{MIDDLE:09}" / "codec.safetensors")
    assert [tuple(value.shape) for value in saved.values()] == [(32, 32), (32, 32)]
    assert all(int(value.count_nonzero()) > 900 for value in saved.values()), "nothing was left to send"


@pytest.mark.parametrize("name", ["allreduce", "server"])
def test_what_else_is_in_a_checkpoint_is_read_by_others(name: str) -> None:
    """Weights by safetensors alone, and `manifest.json` with everything that is not a tensor."""
    folder = WRITTEN / name / "checkpoints" / f"step-{MIDDLE:09}"
    weights, expected = load_file(folder / "model.safetensors"), load_file(WRITTEN / name / "expected.safetensors")
    assert {f"weights.{key}": value.shape for key, value in weights.items()} == {
        key: value.shape for key, value in expected.items() if key.startswith("weights.")
    }
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["content"]["format"], manifest["content"]["step"]) == (1, MIDDLE)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"batch_size": BATCH + 1}, shoal.CheckpointMismatch, "batch: 20 there, 21 here"),
        ({"seed": 9}, shoal.CheckpointMismatch, "seed: 8 there, 9 here"),
        ({"steps": MIDDLE - 1}, shoal.ConfigError, "is at step 5, and this run has only 4 steps"),
    ],
    ids=["batch size", "seed", "fewer steps"],
)
def test_what_it_does_not_fit_is_refused(
    options: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    shutil.copytree(WRITTEN / "allreduce" / "checkpoints", tmp_path / "run" / "checkpoints")
    with pytest.raises(error, match=words):
        trained("allreduce", **options, run_dir=tmp_path / "run", resume="last")


def test_a_damaged_one_is_not_taken(tmp_path: Path) -> None:
    shutil.copytree(WRITTEN / "server" / "checkpoints", tmp_path / "run" / "checkpoints")
    (file,) = tmp_path.rglob("optimizer.safetensors")
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(shoal.CorruptCheckpoint):
        trained("server", run_dir=tmp_path / "run", resume="last")


def test_all_that_was_written_is_tried() -> None:
    assert {name for name, _ in GOES_ON.values()} == {folder.name for folder in WRITTEN.iterdir()}
