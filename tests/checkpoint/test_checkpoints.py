"""Saving, loading, keeping: what a training loop and a reader see."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from shoal.checkpoint import Checkpoints, load, load_newest, read_manifest
from shoal.checkpoint.tensorfile import ChecksummedFile
from shoal.core.errors import CheckpointError, CheckpointMismatch, CheckpointWriteError, ConfigError


def no_warning(message: str) -> None:
    raise AssertionError(f"unexpected warning: {message}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def open_checkpoints(folder: Path) -> Iterator[Callable[..., Checkpoints]]:
    opened = []

    def open_one(keep: int = 3, warn: Callable[[str], None] = no_warning) -> Checkpoints:
        opened.append(Checkpoints(folder, keep=keep, warn=warn))
        return opened[-1]

    yield open_one
    for checkpoints in opened:
        checkpoints.close()


Open = Callable[..., Checkpoints]


def save(checkpoints: Checkpoints, step: int, value: float | None = None, *, best: bool = False) -> None:
    filling = float(step) if value is None else value
    checkpoints.begin(step, {"model": {"w": torch.full((3,), filling)}}, {"value": filling}, best=best)
    checkpoints.finish()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Gate:
    """Holds every write of tensors until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        write = ChecksummedFile.write

        def held(file: ChecksummedFile, data: bytes | memoryview) -> None:
            self.reached.set()
            assert self.opened.wait(30)
            write(file, data)

        monkeypatch.setattr(ChecksummedFile, "write", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def test_a_checkpoint_comes_back(folder: Path, open_checkpoints: Open) -> None:
    trees = {
        "model": OrderedDict(weight=torch.randn(3, 4), steps=torch.tensor(7), none=torch.zeros(0, 2)),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "m": torch.randn(3, 4)}}, "lr": [0.1, (0.9, math.inf)]},
        "plain": {"epoch": 3, "name": "grün", "big": 2**70, "seen": (1, None, True)},
        "random": np.arange(5, dtype=np.uint64),
        "nothing": None,
    }
    meta = {"batch_size": 32, "best": -math.inf, "shape": (1, 2), "parts": {3: "c"}, "nan": math.nan}
    checkpoints = open_checkpoints()
    assert not folder.exists()
    checkpoints.begin(12, trees, meta)
    checkpoints.finish()
    loaded = load(folder / "step-000000012")
    assert loaded.step == 12
    assert loaded.path == folder / "step-000000012"
    assert repr(loaded.meta) == repr(meta)
    assert repr(loaded.trees["optimizer"]) == repr(trees["optimizer"])
    assert loaded.trees["plain"] == trees["plain"]
    assert loaded.trees["nothing"] is None
    assert loaded.trees["random"].dtype == np.uint64
    assert (loaded.trees["random"] == trees["random"]).all()
    for name, tensor in trees["model"].items():
        assert loaded.trees["model"][name].equal(tensor)
        assert loaded.trees["model"][name].dtype == tensor.dtype
    assert names(loaded.path) == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "random.safetensors",
    ]


def test_the_safetensors_library_opens_the_model(folder: Path, open_checkpoints: Open) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    checkpoints = open_checkpoints()
    checkpoints.begin(1, {"model": model.state_dict()}, {})
    checkpoints.finish()
    theirs = safetensors.torch.load_file(folder / "step-000000001" / "model.safetensors")
    assert theirs.keys() == model.state_dict().keys()
    assert all(theirs[name].equal(tensor) for name, tensor in model.state_dict().items())


def test_tied_weights_are_stored_once_and_come_back_tied(folder: Path, open_checkpoints: Open) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 8)
            self.head = nn.Linear(8, 8, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    flipped = model.embed.weight.detach().t()  # the same memory, but other values in other places
    checkpoints = open_checkpoints()
    checkpoints.begin(
        1, {"model": model.state_dict(), "other": {"a": [model.embed.weight, model.head.weight, flipped]}}, {}
    )
    checkpoints.finish()
    path = folder / "step-000000001"
    assert list(safetensors.torch.load_file(path / "model.safetensors")) == ["embed.weight"]
    assert list(safetensors.torch.load_file(path / "other.safetensors")) == ["0", "2"]
    trees = load(path).trees
    assert trees["model"]["head.weight"] is trees["model"]["embed.weight"]
    Tied().load_state_dict(trees["model"])
    first, second, turned = trees["other"]["a"]
    assert first is second
    assert first.equal(model.embed.weight)
    assert turned.equal(flipped)


def test_overlapping_and_empty_tensors_keep_their_own_values(folder: Path, open_checkpoints: Open) -> None:
    flat = torch.arange(6.0)
    state = {
        "all": flat,
        "head": flat[:3],
        "tail": flat[3:],
        "e1": flat[:0],
        "e2": flat[:0],
        "e3": flat[:0].reshape(0, 4),
    }
    checkpoints = open_checkpoints()
    checkpoints.begin(1, {"model": state}, {})
    checkpoints.finish()
    loaded = load(folder / "step-000000001").trees["model"]
    assert safetensors.torch.load_file(folder / "step-000000001" / "model.safetensors").keys() == state.keys()
    assert {name: (tensor.shape, tensor.tolist()) for name, tensor in loaded.items()} == {
        name: (tensor.shape, tensor.tolist()) for name, tensor in state.items()
    }


def test_a_state_dict_with_more_than_tensors_is_stored_by_number(folder: Path, open_checkpoints: Open) -> None:
    checkpoints = open_checkpoints()
    trees = {"extra": {"w": torch.ones(2), "_extra_state": {"note": "x"}}, "odd": {"__metadata__": torch.ones(1)}}
    checkpoints.begin(1, trees, {})
    checkpoints.finish()
    loaded = load(folder / "step-000000001").trees
    assert repr(loaded) == repr(trees)


def test_begin_returns_while_the_thread_writes(open_checkpoints: Open, gate: Gate) -> None:
    checkpoints = open_checkpoints()
    assert checkpoints.wait_copied() == 0.0
    stall = checkpoints.begin(1, {"model": {"w": torch.zeros(3)}}, {})
    assert gate.reached.wait(30)
    assert stall < 10.0
    assert checkpoints.check() is None
    assert checkpoints.latest() is None
    gate.opened.set()
    checkpoints.finish()
    saved = checkpoints.check()
    assert saved is not None
    assert (saved.step, saved.path, saved.best) == (1, checkpoints.latest(), False)
    assert saved.bytes == sum(path.stat().st_size for path in saved.path.iterdir())
    assert saved.seconds >= stall
    assert checkpoints.check() is None


def test_tensors_may_change_once_wait_copied_has_returned(folder: Path, open_checkpoints: Open, gate: Gate) -> None:
    weight = torch.zeros(1000)
    buffer = torch.zeros(())
    checkpoints = open_checkpoints()
    checkpoints.begin(1, {"model": {"w": weight, "running": buffer}}, {}, volatile=[buffer])
    assert gate.reached.wait(30)
    buffer.fill_(1.0)
    timer = threading.Timer(0.05, gate.opened.set)
    timer.start()
    waited = checkpoints.wait_copied()
    weight.fill_(1.0)
    timer.join()
    checkpoints.finish()
    assert waited > 0.0
    assert checkpoints.wait_copied() == 0.0
    loaded = load(folder / "step-000000001").trees["model"]
    assert loaded["w"].eq(0.0).all()
    assert loaded["running"] == 0.0


def test_tensors_may_change_while_the_disk_still_works(
    folder: Path, open_checkpoints: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = threading.Event()
    fsync = os.fsync

    def held(fd: int) -> None:
        assert synced.wait(30)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", held)
    checkpoints = open_checkpoints()
    checkpoints.begin(1, {"model": {"w": torch.zeros(3)}}, {})
    checkpoints.wait_copied()
    assert not synced.is_set()
    assert checkpoints.check() is None
    synced.set()
    checkpoints.finish()
    assert load(folder / "step-000000001").step == 1


def test_plain_values_are_taken_at_begin(folder: Path, open_checkpoints: Open, gate: Gate) -> None:
    tree, meta = {"lr": [0.1]}, {"seen": [1]}
    checkpoints = open_checkpoints()
    checkpoints.begin(1, {"schedule": tree, "model": {"w": torch.zeros(1)}}, meta)
    tree["lr"].append(0.2)
    meta["seen"].append(2)
    gate.opened.set()
    checkpoints.finish()
    loaded = load(folder / "step-000000001")
    assert (loaded.trees["schedule"], loaded.meta) == ({"lr": [0.1]}, {"seen": [1]})


def test_a_second_begin_waits_for_the_first_and_says_how_long(folder: Path, open_checkpoints: Open, gate: Gate) -> None:
    checkpoints = open_checkpoints()
    checkpoints.begin(1, {"model": {"w": torch.zeros(3)}}, {})
    timer = threading.Timer(0.1, gate.opened.set)
    begun = time.perf_counter()
    timer.start()
    stall = checkpoints.begin(2, {"model": {"w": torch.zeros(3)}}, {})
    assert 0.09 < stall <= time.perf_counter() - begun
    assert (folder / "step-000000001").is_dir()
    timer.join()
    checkpoints.finish()
    saved = checkpoints.check()
    assert saved is not None
    assert saved.step == 2


def test_wait_copied_costs_next_to_nothing_when_nothing_is_pending(open_checkpoints: Open) -> None:
    checkpoints = open_checkpoints()
    begun = time.perf_counter()
    for _ in range(10_000):
        checkpoints.wait_copied()
    assert (time.perf_counter() - begun) / 10_000 < 20e-6  # 0.1 µs; the bound leaves room for a busy machine


def test_the_last_ones_and_the_best_are_kept(folder: Path, open_checkpoints: Open) -> None:
    checkpoints = open_checkpoints(keep=2)
    assert checkpoints.best() is None
    for step in range(1, 7):
        save(checkpoints, step, best=step in (1, 3))
    assert names(folder) == ["best.json", "step-000000003", "step-000000005", "step-000000006"]
    assert checkpoints.best() == folder / "step-000000003"
    assert checkpoints.latest() == folder / "step-000000006"
    save(checkpoints, 7, best=True)
    assert names(folder) == ["best.json", "step-000000006", "step-000000007"]
    assert json.loads((folder / "best.json").read_bytes()) == {"checkpoint": "step-000000007"}


def test_nothing_is_deleted_before_the_new_one_is_complete(folder: Path, open_checkpoints: Open, gate: Gate) -> None:
    gate.opened.set()
    checkpoints = open_checkpoints(keep=1)
    save(checkpoints, 1)
    gate.opened.clear()
    gate.reached.clear()
    checkpoints.begin(2, {"model": {"w": torch.zeros(3)}}, {})
    assert gate.reached.wait(30)
    assert load(folder / "step-000000001").step == 1
    gate.opened.set()
    checkpoints.finish()
    assert names(folder) == ["step-000000002"]


def test_the_same_step_can_be_saved_again(folder: Path, open_checkpoints: Open) -> None:
    checkpoints = open_checkpoints(keep=1)
    save(checkpoints, 4, 1.0, best=True)
    save(checkpoints, 4, 2.0)
    assert load(folder / "step-000000004").meta == {"value": 2.0}
    another = open_checkpoints(keep=1)
    save(another, 4, 3.0)
    assert load(folder / "step-000000004").meta == {"value": 3.0}
    assert another.best() == folder / "step-000000004"
    assert names(folder) == ["best.json", "step-000000004"]


def test_newest_is_the_one_saved_last_after_going_back(folder: Path, open_checkpoints: Open) -> None:
    first = open_checkpoints()
    for step in (10, 20, 30):
        save(first, step)
    second = open_checkpoints()
    save(second, 15)
    newest = load_newest(folder, no_warning)
    assert newest is not None
    assert newest.step == 15
    assert second.latest() == folder / "step-000000015"
    save(second, 16)
    save(second, 17)
    assert names(folder) == ["step-000000015", "step-000000016", "step-000000017"]


def test_an_empty_or_missing_folder_has_no_newest(folder: Path, open_checkpoints: Open) -> None:
    assert load_newest(folder, no_warning) is None
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    assert load_newest(folder, no_warning) is None
    assert open_checkpoints().latest() is None


def test_files_of_others_are_left_alone(folder: Path, open_checkpoints: Open) -> None:
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    (folder / "step-1-old").mkdir()
    checkpoints = open_checkpoints(keep=1)
    save(checkpoints, 1)
    save(checkpoints, 2)
    assert names(folder) == ["notes.txt", "step-000000002", "step-1-old"]


def test_the_manifest_tells_without_loading(folder: Path, open_checkpoints: Open) -> None:
    checkpoints = open_checkpoints()
    save(checkpoints, 3)
    saved = checkpoints.check()
    assert saved is not None
    (saved.path / "model.safetensors").unlink()
    manifest = read_manifest(saved.path)
    assert (manifest.step, manifest.meta, manifest.bytes) == (3, {"value": 3.0}, saved.bytes)
    assert json.loads((saved.path / "manifest.json").read_bytes())["content"]["step"] == 3


def test_a_checkpoint_of_another_format_is_not_taken_for_a_corrupt_one(
    folder: Path, open_checkpoints: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(open_checkpoints(), 1)
    monkeypatch.setattr("shoal.checkpoint.manifest.FORMAT", 0)
    with pytest.raises(CheckpointMismatch, match="is of format 1, and this version of shoal reads format 0"):
        load_newest(folder, no_warning)


def test_a_path_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no checkpoint at .*absent"):
        load(tmp_path / "absent")


@pytest.mark.parametrize(
    ("trees", "meta", "message"),
    [
        (
            {"optimizer": {"state": [object()]}},
            {},
            r"the tree 'optimizer' .*value\['state'\]\[0\] is of type builtins.object",
        ),
        ({"model": {"w": torch.eye(2).to_sparse()}}, {}, r"tree 'model' .* tensor 'w' is a tensor of layout"),
        ({"model": [torch.zeros(1, dtype=torch.complex128)]}, {}, r"tree 'model' .* tensor '0' is .*complex128"),
        ({}, {"loss": torch.zeros(())}, r"meta holds a tensor"),
        ({}, {"loss": np.float64(1)}, r"\.item\(\)"),
        ({}, {"loss": object()}, r"meta cannot"),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once(
    folder: Path, open_checkpoints: Open, trees: dict[str, Any], meta: dict[str, Any], message: str
) -> None:
    checkpoints = open_checkpoints()
    with pytest.raises(CheckpointWriteError, match=message):
        checkpoints.begin(1, trees, meta)
    assert checkpoints.wait_copied() == 0.0
    checkpoints.finish()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("step", "name"), [(-1, "model"), (1.5, "model"), (1, "../model"), (1, ""), (1, ".hidden"), (1, "a/b")]
)
def test_wrong_arguments_are_named(open_checkpoints: Open, step: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=r"step=|is called"):
        open_checkpoints().begin(step, {name: 1}, {})


@pytest.mark.parametrize("keep", [0, -1, 1.5])
def test_keep_must_be_a_positive_int(folder: Path, keep: Any) -> None:
    with pytest.raises(ConfigError, match="keep="):
        Checkpoints(folder, keep=keep, warn=no_warning)


def test_many_steps_leave_no_thread_and_no_reference(open_checkpoints: Open) -> None:
    checkpoints = open_checkpoints(keep=1)
    weight = torch.zeros(10)
    for step in range(5):
        checkpoints.begin(step, {"model": {"w": weight}}, {})
        checkpoints.wait_copied()
        weight += 1
    checkpoints.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shoal-checkpoint")]
    assert checkpoints._save is None
    assert checkpoints._lent is None
