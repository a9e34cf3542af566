"""Segments of shared memory: private, named by run, and never left behind."""

from __future__ import annotations

import os
import signal
import stat
from contextlib import suppress
from pathlib import Path

import pytest

from shoal.comm.shm import segment

NOBODY = 65534


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of these tests alone: other runs on this machine sweep /dev/shm, and find there what these leave on purpose."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(segment, "FOLDER", folder)


def named() -> list[str]:
    return [path.name for path in segment.FOLDER.glob(f"{segment.PREFIX}*")]


def test_a_segment_is_private_named_by_run_and_seen_by_whoever_attaches() -> None:
    made = segment.create("my run/../x", 8192)
    try:
        assert made.path.parent == segment.FOLDER and made.path.name.startswith("shoal-my-run")
        found = os.stat(made.path)
        assert stat.S_IMODE(found.st_mode) == 0o600 and found.st_uid == os.geteuid() and found.st_blocks * 512 >= 8192
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                segment.attach(made.path.name, 8192).words[5] = 77
            os._exit(0)
        os.waitpid(child, 0)
        assert made.words[5] == 77
    finally:
        made.unlink()
        made.close()
    assert not named()


def test_a_name_that_exists_is_not_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["taken", "taken", "free"])
    monkeypatch.setattr(segment.secrets, "token_hex", lambda size: next(names))
    first = segment.create("run", 4096)
    second = segment.create("run", 4096)
    try:
        assert first.path.name == "shoal-run-taken" and second.path.name == "shoal-run-free"
    finally:
        for made in (first, second):
            made.unlink()
            made.close()


@pytest.mark.parametrize("wrong", ["owner", "mode", "size", "link", "name"])
def test_a_strangers_segment_is_refused(wrong: str, tmp_path: Path) -> None:
    if wrong == "owner" and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    path = segment.FOLDER / f"{segment.PREFIX}strange-{os.getpid()}"
    path.write_bytes(bytes(4096))
    try:
        path.chmod(0o644 if wrong == "mode" else 0o600)
        if wrong == "owner":
            os.chown(path, NOBODY, NOBODY)
        if wrong == "link":
            path.unlink()
            (tmp_path / "elsewhere").write_bytes(bytes(4096))
            (tmp_path / "elsewhere").chmod(0o600)
            path.symlink_to(tmp_path / "elsewhere")
        name = f"../shm/{path.name}" if wrong == "name" else path.name
        with pytest.raises(OSError) as caught:
            segment.attach(name, 8192 if wrong == "size" else 4096)
        if wrong == "owner":
            assert f"belongs to user {NOBODY}, not to user {os.geteuid()}" in str(caught.value)
    finally:
        path.unlink()


def leave_a_segment(die: bool) -> int:
    """A process that makes a segment and is killed, or waits; its id."""
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        made = segment.create("dead", 4096)
        made.hold(0)
        os.write(tell, b"x")
        if die:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    os.close(tell)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    return child


def test_what_a_dead_run_left_is_reclaimed_and_what_a_live_one_has_is_not() -> None:
    dead = leave_a_segment(die=True)
    os.waitpid(dead, 0)
    alive = leave_a_segment(die=False)
    try:
        assert len(named()) == 2
        assert len(segment.sweep()) == 1
        assert len(named()) == 1 and segment.sweep() == []
    finally:
        os.kill(alive, signal.SIGKILL)
        os.waitpid(alive, 0)
    assert len(segment.sweep()) == 1 and not named()


def test_ones_own_segment_is_not_swept() -> None:
    made = segment.create("own", 4096)
    try:
        assert segment.sweep() == [] and made.path.exists()
        made.hold(0)
        child = os.fork()
        if child == 0:
            os._exit(0 if segment.attach(made.path.name, 4096).is_held(0) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        made.unlink()
        made.close()


def test_a_strangers_file_is_not_swept() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    path = segment.FOLDER / f"{segment.PREFIX}other-{os.getpid()}"
    path.write_bytes(b"")
    os.chown(path, NOBODY, NOBODY)
    try:
        assert segment.sweep() == [] and path.exists()
    finally:
        path.unlink()


def test_a_child_does_not_keep_its_parent_alive_in_the_eyes_of_others() -> None:
    """Locks are of the process: a loader forked by a worker that dies must not hide that."""
    made = segment.create("locks", 4096)
    told, tell = os.pipe()
    worker = os.fork()
    if worker == 0:
        held = segment.attach(made.path.name, 4096)
        held.hold(1)
        grandchild = os.fork()
        if grandchild == 0:
            signal.pause()
        os.write(tell, grandchild.to_bytes(4, "little"))
        signal.pause()
    grandchild = int.from_bytes(os.read(told, 4), "little")
    try:
        assert made.is_held(1)
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
        assert not made.is_held(1)
    finally:
        os.kill(grandchild, signal.SIGKILL)
        for descriptor in (told, tell):
            os.close(descriptor)
        made.unlink()
        made.close()


@pytest.mark.parametrize("name", ["shoal-mine.txt", "shoal-run-0123456789abcdef.bak", "shoal-run-0123456789abcdeX"])
def test_what_is_no_segment_is_not_swept(name: str) -> None:
    path = segment.FOLDER / name
    path.write_bytes(b"precious")
    path.chmod(0o600)
    try:
        assert segment.sweep() == [] and path.read_bytes() == b"precious"
    finally:
        path.unlink()


def test_no_room_is_an_error_at_once_and_leaves_nothing() -> None:
    free = os.statvfs(segment.FOLDER)
    with pytest.raises(OSError):
        segment.create("big", free.f_blocks * free.f_frsize * 2)
    assert not named()


def test_what_is_larger_than_the_room_left_takes_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(segment.os, "posix_fallocate", lambda descriptor, at, size: taken.append(size))
    free = os.statvfs(segment.FOLDER)
    with pytest.raises(OSError, match="No space left"):
        segment.create("big", free.f_blocks * free.f_frsize + 4096)
    assert not taken
