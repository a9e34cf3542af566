"""Torn files, flipped bits, full and vanished disks, a writer that is killed: a sound checkpoint is always found."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from shoal.checkpoint import Checkpoints, Loaded, load, load_newest, read_manifest
from shoal.checkpoint import folder as folders
from shoal.core.errors import CheckpointWriteError, CorruptCheckpoint

STATE_FLOATS = 50_000


def no_warning(message: str) -> None:
    raise AssertionError(f"unexpected warning: {message}")


def begin(checkpoints: Checkpoints, step: int, value: float, floats: int = STATE_FLOATS, **more: Any) -> None:
    trees = {"model": {"w": torch.full((floats,), value)}, "optimizer": {"m": [torch.full((floats,), -value)]}}
    checkpoints.begin(step, trees, {"value": value}, **more)


def assert_whole(loaded: Loaded) -> None:
    value = loaded.meta["value"]
    assert loaded.trees["model"]["w"].eq(value).all()
    assert loaded.trees["optimizer"]["m"][0].eq(-value).all()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def two_saved(tmp_path: Path) -> Path:
    """A folder with the checkpoints of step 1 and 2."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", warn=no_warning)
    begin(checkpoints, 1, 1.0)
    begin(checkpoints, 2, 2.0)
    checkpoints.close()
    return tmp_path / "checkpoints"


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def tear(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def fill_with_garbage(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(path.stat().st_size))


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = [
    flip_bit,
    tear,
    lengthen,
    fill_with_garbage,
    Path.unlink,
    replace_by_folder,
    lambda path: os.truncate(path, 0),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "optimizer.safetensors"])
def test_damage_is_named_and_the_previous_one_used(two_saved: Path, name: str, damage: Callable[[Path], Any]) -> None:
    damaged = two_saved / "step-000000002" / name
    damage(damaged)
    with pytest.raises(CorruptCheckpoint) as error:
        load(two_saved / "step-000000002")
    assert str(damaged) in str(error.value)
    warnings: list[str] = []
    newest = load_newest(two_saved, warnings.append)
    assert newest is not None
    assert newest.step == 1
    assert_whole(newest)
    assert len(warnings) == 1
    assert str(error.value) in warnings[0]


def test_every_flipped_bit_of_a_manifest_is_found(two_saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = two_saved / "step-000000002"
    data = bytearray((path / "manifest.json").read_bytes())
    monkeypatch.setattr("shoal.checkpoint.manifest._read", lambda _: bytes(data))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptCheckpoint, match="do not match the checksum"):
            read_manifest(path)
        data[bit // 8] ^= 1 << bit % 8
    assert read_manifest(path).step == 2


def test_when_none_is_sound_that_is_an_error(two_saved: Path) -> None:
    tear(two_saved / "step-000000001" / "model.safetensors")
    (two_saved / "step-000000002" / "manifest.json").unlink()
    warnings: list[str] = []
    with pytest.raises(CorruptCheckpoint, match=r"none of the checkpoints in .* is sound"):
        load_newest(two_saved, warnings.append)
    assert len(warnings) == 2


def test_a_corrupt_one_is_kept_until_enough_newer_ones_are_there(two_saved: Path) -> None:
    flip_bit(two_saved / "step-000000002" / "manifest.json")
    checkpoints = Checkpoints(two_saved, keep=2, warn=no_warning)
    begin(checkpoints, 2, 2.5)  # takes the place of the corrupt one
    checkpoints.finish()
    assert names(two_saved) == ["step-000000001", "step-000000002"]
    flip_bit(two_saved / "step-000000002" / "manifest.json")
    another = Checkpoints(two_saved, keep=2, warn=no_warning)
    begin(another, 3, 3.0)
    another.finish()
    assert names(two_saved) == ["step-000000001", "step-000000003"]


def test_with_the_note_about_the_best_torn_nothing_is_deleted(two_saved: Path) -> None:
    (two_saved / "best.json").write_bytes(b'{"checkp')
    warnings: list[str] = []
    checkpoints = Checkpoints(two_saved, keep=1, warn=warnings.append)
    assert checkpoints.best() is None
    begin(checkpoints, 3, 3.0)
    checkpoints.finish()
    assert names(two_saved) == ["best.json", "step-000000001", "step-000000002", "step-000000003"]
    assert [warning.split(":")[0] for warning in warnings] == [
        "the best checkpoint is not known",
        "no checkpoint is deleted until the next best one is saved",
    ]
    begin(checkpoints, 4, 4.0, best=True)
    checkpoints.finish()
    assert names(two_saved) == ["best.json", "step-000000004"]


def test_leftovers_are_removed_and_an_interrupted_replacement_is_undone(two_saved: Path) -> None:
    (two_saved / "step-000000002").rename(two_saved / ".replaced-step-000000002")
    (two_saved / ".writing-step-000000002").mkdir()
    (two_saved / ".writing-step-000000002" / "model.safetensors").write_bytes(b"half")
    (two_saved / ".removing-step-000000000").mkdir()
    (two_saved / ".writing-best.json").write_bytes(b"{")
    newest = load_newest(two_saved, no_warning)
    assert newest is not None
    assert newest.step == 2
    checkpoints = Checkpoints(two_saved, warn=no_warning)
    assert checkpoints.latest() == two_saved / ".replaced-step-000000002"
    begin(checkpoints, 3, 3.0)
    checkpoints.finish()
    assert names(two_saved) == ["step-000000001", "step-000000002", "step-000000003"]
    assert load(two_saved / "step-000000002").meta == {"value": 2.0}


def test_an_old_one_that_cannot_be_deleted_is_said(two_saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "no", str(path))

    warnings: list[str] = []
    checkpoints = Checkpoints(two_saved, keep=2, warn=warnings.append)
    monkeypatch.setattr(folders, "remove", refuse)
    begin(checkpoints, 3, 3.0)
    checkpoints.finish()
    assert len(warnings) == 1
    assert "step-000000001 could not be deleted" in warnings[0]
    assert checkpoints.latest() == two_saved / "step-000000003"


# --- the disk --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    mountpoint = tmp_path / "disk"
    mountpoint.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mountpoint)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here (it takes root): {done.stderr.strip()}")
    try:
        yield mountpoint
    finally:
        subprocess.run(["umount", "-l", str(mountpoint)], check=True)


@pytest.mark.parametrize("free_space_is_known", [True, False], ids=["refused beforehand", "full while writing"])
def test_a_full_disk_is_said_and_earlier_checkpoints_are_intact(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, free_space_is_known: bool
) -> None:
    checkpoints = Checkpoints(small_disk / "run" / "checkpoints", warn=no_warning)
    begin(checkpoints, 1, 1.0)
    checkpoints.finish()
    if free_space_is_known:
        monkeypatch.setattr(folders, "make_writing_folder", lambda final: pytest.fail("something was written"))
    else:
        monkeypatch.setattr(folders, "free_bytes", lambda folder: None)
    begin(checkpoints, 2, 2.0, floats=100_000)
    checkpoints.wait_copied()
    with pytest.raises(CheckpointWriteError) as error:
        checkpoints.finish()
    message = str(error.value)
    assert f"step 2 could not be written to {small_disk}/run/checkpoints/step-000000002: No space left" in message
    assert "It needs 800" in message
    assert ("bytes, and 6" in message) is free_space_is_known
    assert "set run_dir to a folder on a larger disk, or set keep lower" in message
    assert names(small_disk / "run" / "checkpoints") == ["step-000000001"]
    assert_whole(load(small_disk / "run" / "checkpoints" / "step-000000001"))
    monkeypatch.undo()
    checkpoints.finish()  # said once
    begin(checkpoints, 3, 3.0, floats=1000)
    checkpoints.finish()
    assert names(small_disk / "run" / "checkpoints") == ["step-000000001", "step-000000003"]


def test_a_disk_that_became_read_only_is_said(small_disk: Path) -> None:
    checkpoints = Checkpoints(small_disk / "checkpoints", warn=no_warning)
    begin(checkpoints, 1, 1.0)
    checkpoints.finish()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    begin(checkpoints, 2, 2.0)
    with pytest.raises(
        CheckpointWriteError, match=r"Read-only file system.* Set run_dir to a folder that this process may"
    ):
        checkpoints.finish()
    assert_whole(load(small_disk / "checkpoints" / "step-000000001"))
    first = Checkpoints(small_disk / "elsewhere" / "checkpoints", warn=no_warning)
    begin(first, 1, 1.0)
    with pytest.raises(CheckpointWriteError, match="Read-only file system"):
        first.finish()


def test_a_vanished_folder_is_said_and_not_made_again(two_saved: Path) -> None:
    checkpoints = Checkpoints(two_saved, warn=no_warning)
    begin(checkpoints, 3, 3.0)
    checkpoints.finish()
    shutil.rmtree(two_saved)
    begin(checkpoints, 4, 4.0)
    with pytest.raises(CheckpointWriteError, match=r"No such file or directory.* The folder went away"):
        checkpoints.finish()
    assert not two_saved.exists()


def test_a_file_in_the_place_of_the_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    checkpoints = Checkpoints(tmp_path / "checkpoints", warn=no_warning)
    begin(checkpoints, 1, 1.0)
    with pytest.raises(CheckpointWriteError, match="File exists"):
        checkpoints.finish()


@pytest.mark.parametrize("say", ["check", "begin", "finish", "close"])
def test_a_failure_in_the_thread_is_said_once_by_whoever_asks_next(
    two_saved: Path, monkeypatch: pytest.MonkeyPatch, say: str
) -> None:
    def broken(fd: int) -> NoReturn:
        raise OSError(errno.EIO, "the disk is broken")

    warnings: list[str] = []
    checkpoints = Checkpoints(two_saved, warn=warnings.append)
    monkeypatch.setattr(os, "fsync", broken)
    begin(checkpoints, 3, 3.0)
    assert checkpoints.wait_copied() < 60.0
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("shoal-checkpoint")]:
        thread.join()
    expected: contextlib.AbstractContextManager[Any] = (
        contextlib.nullcontext()
        if say == "close"
        else pytest.raises(CheckpointWriteError, match=r"step 3 could not be written .*Input/output error")
    )
    with expected:
        begin(checkpoints, 4, 4.0) if say == "begin" else getattr(checkpoints, say)()
    assert len(warnings) == (say == "close")
    assert checkpoints.check() is None
    assert names(two_saved) == ["step-000000001", "step-000000002"]


def test_a_failed_rename_puts_the_former_one_back(two_saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name.startswith(".writing-"):
            raise OSError(errno.EIO, "no")
        return rename(path, target)

    checkpoints = Checkpoints(two_saved, warn=no_warning)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        begin(checkpoints, 2, 2.5)
        with pytest.raises(CheckpointWriteError):
            checkpoints.finish()
    assert names(two_saved) == ["step-000000001", "step-000000002"]
    assert load(two_saved / "step-000000002").meta == {"value": 2.0}


# --- the end of the writer at any moment -----------------------------------------------------------------------------


def in_child(body: Callable[[int], None]) -> tuple[int, int]:
    """Run `body(pipe)` in a forked process. Its id, and where to read what it writes to the pipe."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    try:
        os.close(reader)
        body(writer)
        os._exit(0)
    finally:
        os._exit(1)


def wait_for(pid: int, reader: int) -> tuple[int, bytes]:
    """(exit code or minus the signal, everything that was written to the pipe)."""
    with os.fdopen(reader, "rb") as file:
        data = file.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), data


def save_and_report(folder: Path, steps: Iterator[int], pipe: int) -> None:
    checkpoints = Checkpoints(folder, keep=1, warn=no_warning)
    for value, step in enumerate(steps, start=2):
        begin(checkpoints, step, float(value), best=value % 3 == 0)
        checkpoints.finish()
        os.write(pipe, bytes([value]))


def assert_survived(folder: Path, reported: bytes) -> float:
    """What is found is whole, and as new as the writer had said or newer. Its value."""
    newest = load_newest(folder, no_warning)
    assert newest is not None
    assert_whole(newest)
    value: float = newest.meta["value"]
    assert value >= max(reported, default=1)
    best = Checkpoints(folder, warn=no_warning).best()
    assert (best is None) == (not (folder / "best.json").exists())
    if best is not None:
        assert_whole(load(best))
    return value


@pytest.fixture
def one_saved(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, warn=no_warning)
    begin(checkpoints, 1, 1.0)
    checkpoints.close()
    return folder


def test_a_writer_killed_at_any_time_leaves_a_sound_checkpoint(one_saved: Path, tmp_path: Path) -> None:
    chance = random.Random(7)
    for attempt in range(15):
        folder = tmp_path / f"attempt-{attempt}"
        shutil.copytree(one_saved, folder)
        steps = itertools.cycle([2, 3, 3, 4, 2])
        pid, reader = in_child(lambda pipe, folder=folder, steps=steps: save_and_report(folder, steps, pipe))
        before = b"".join(os.read(reader, 1) for _ in range(chance.randrange(4)))
        time.sleep(chance.uniform(0.0, 0.03))  # the moment of the kill is the subject, not something to wait for
        os.kill(pid, signal.SIGKILL)
        code, after = wait_for(pid, reader)
        assert code == -signal.SIGKILL
        assert_survived(folder, before + after)


def die_at(event_number: int, folder: Path) -> None:
    """End this process, without any cleaning up, just before it touches the folder for the n-th time."""
    count = itertools.count(1)
    watched = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        touches = event in watched and (str(arguments[0]).startswith(str(folder)) or event in ("os.remove", "os.rmdir"))
        if touches and next(count) == event_number:
            os._exit(9)

    sys.addaudithook(hook)


def test_a_writer_that_ends_between_any_two_operations_leaves_a_sound_checkpoint(
    one_saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # slow, and of no use against the end of a process
    values = []
    for event_number in itertools.count(1):
        folder = tmp_path / f"event-{event_number}"
        shutil.copytree(one_saved, folder)

        def write(pipe: int, folder: Path = folder, event_number: int = event_number) -> None:
            die_at(event_number, folder)
            save_and_report(folder, iter([1, 2, 2, 3]), pipe)

        code, reported = wait_for(*in_child(write))
        values.append(assert_survived(folder, reported))
        if code == 0:
            break
        assert code == 9
        successor = Checkpoints(folder, keep=1, warn=no_warning)
        begin(successor, 9, 9.0, best=True)
        successor.close()
        assert names(folder) == ["best.json", "step-000000009"]
    assert values == sorted(values)
    assert set(values) == {1.0, 2.0, 3.0, 4.0, 5.0}
