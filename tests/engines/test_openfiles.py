"""Processes that are forked have positions of their own in files that were open for reading."""

from __future__ import annotations

import errno
import os
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest

from shoal.engines import openfiles
from shoal.engines.openfiles import open_files, separate, take_failures, why_shared
from shoal.engines.zygote import fork

LINES = [f"line {number}\n" for number in range(2000)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "lines.txt"
    made.write_text("".join(LINES))
    return made


def in_child(work: Callable[[], object]) -> str:
    """What `work` returned in a forked process, as text, once that has ended."""
    heard, says = os.pipe()
    born: list[int] = []

    def tell() -> None:
        os.write(says, repr(work()).encode())

    fork(tell, born)
    os.close(says)
    with open(heard) as answer:
        text = answer.read()
    assert os.waitstatus_to_exitcode(os.waitpid(born[0], 0)[1]) == 0
    return text


def raw(path: Path) -> IO[Any]:
    return open(path, "rb", buffering=0)


def buffered(path: Path) -> IO[Any]:
    return open(path, "rb")


def as_text(path: Path) -> IO[Any]:
    return open(path)


def deleted(path: Path) -> IO[Any]:
    file = open(path, "rb")  # noqa: SIM115 - the test closes it
    path.unlink()
    return file


@pytest.mark.parametrize("opened", [raw, buffered, as_text, deleted])
def test_parent_and_child_read_on_where_the_fork_was(path: Path, opened: Callable[[Path], IO[Any]]) -> None:
    with opened(path) as file:
        first = [file.readline() for _ in range(3)]
        child = in_child(lambda: [file.readline() for _ in range(1500)])
        mine = [file.readline() for _ in range(1500)]
    assert child == repr(mine)
    expected = LINES if isinstance(first[0], str) else [line.encode() for line in LINES]
    assert first + mine == expected[:1503]


def test_members_of_a_zip_file_are_read_on_both_sides(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as made:
        for number in range(20):
            made.writestr(str(number), bytes([number]) * 30_000)
    with zipfile.ZipFile(tmp_path / "data.zip") as file, file.open("3") as member:
        member.read(10)
        assert in_child(lambda: (len(file.read("7")), set(member.read()))) == repr((30_000, {3}))
        assert set(member.read()) == {3} and set(file.read("9")) == {9}


def test_a_descriptor_of_a_library_is_found_and_keeps_its_flags(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOATIME | os.O_NOFOLLOW)
    os.set_inheritable(descriptor, True)
    try:
        os.read(descriptor, 7)
        (file,) = (file for file in open_files() if file.descriptor == descriptor)
        separate([file])
        assert os.lseek(descriptor, 0, os.SEEK_CUR) == 7 and os.get_inheritable(descriptor)
        assert in_child(lambda: os.read(descriptor, 7)) == repr(b"line 1\n")
        assert os.lseek(descriptor, 0, os.SEEK_CUR) == 7
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("mode", ["wb", "ab", "w+b"])
def test_what_is_written_to_keeps_its_common_position(tmp_path: Path, mode: str) -> None:
    with open(tmp_path / "log", mode, buffering=0) as log:
        log.write(b"before ")
        in_child(lambda: log.write(b"child "))
        log.write(b"parent")
    assert (tmp_path / "log").read_bytes() == b"before child parent"


def test_only_regular_files_that_are_only_read_are_opened_again(path: Path) -> None:
    ends = os.pipe()
    folder = os.open(path.parent, os.O_RDONLY)
    with (
        open(path, "rb") as read,
        open(path, "ab") as written,
        open(path, "r+b") as both,
        open(os.devnull, "rb") as device,
    ):
        found = {file.descriptor for file in open_files()}
        others = {written.fileno(), both.fileno(), device.fileno(), folder, *ends}
    for descriptor in (*ends, folder):
        os.close(descriptor)
    assert read.closed and len(others) == 6
    assert not found & {0, 1, 2, *others} and found


def test_what_cannot_be_opened_again_is_named_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with open(path, "rb") as file:
        files = [found for found in open_files() if found.descriptor == file.fileno()]
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", refused)
            separate(files)
        assert file.readline() == b"line 0\n"
    assert take_failures() == {str(path): "Permission denied"} and take_failures() == {}


def test_a_number_that_is_another_file_by_now_is_left_alone(path: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"other")
    descriptor = os.open(path, os.O_RDONLY)
    os.lseek(descriptor, 3, os.SEEK_SET)
    files = [found for found in open_files() if found.descriptor == descriptor]
    other = os.open(tmp_path / "other", os.O_RDONLY)
    os.dup2(other, descriptor)
    separate(files)
    assert os.read(descriptor, 5) == b"other"
    os.close(other)
    os.close(descriptor)
    separate(files)
    assert take_failures() == {}


def test_why_a_file_is_shared(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = os.pipe()
    with (
        open(path, "rb") as read,
        open(path, "r+b") as both,
        open(path, "ab") as log,
        tempfile.TemporaryFile() as temporary,
    ):
        assert [why_shared(file.fileno()) for file in (read, log)] == ["", ""]
        assert [why_shared(file.fileno()) for file in (both, temporary)] == ["it is open for writing too"] * 2
        assert [why_shared(end) for end in ends] == ["it is no regular file", ""]
        assert [why_shared(standard) for standard in range(3)] == ["", "", ""]
        monkeypatch.setattr(openfiles, "_TABLE", "/nowhere")
        assert open_files() == [] and "no /proc" in why_shared(read.fileno())
    for end in ends:
        os.close(end)
