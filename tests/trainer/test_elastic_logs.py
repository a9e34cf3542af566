"""Following what workers print that are started later, or again."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cluster.logs import ERR, OUT, Tail, log_path

pytestmark = pytest.mark.timeout(30)


class Screen:
    def __init__(self) -> None:
        self.lines: list[tuple[int, str, str]] = []

    def __call__(self, worker: int, stream: str, text: str) -> None:
        self.lines += [(worker, stream, line) for line in text.splitlines()]


def write(folder: Path, worker: int, stream: str, text: str) -> None:
    with open(log_path(folder, worker, stream), "a") as file:
        file.write(text)


def test_a_worker_that_comes_later_is_followed(tmp_path: Path) -> None:
    screen = Screen()
    with Tail(tmp_path, 0, screen) as tail:
        write(tmp_path, 4, OUT, "of an earlier run\n")
        tail.follow(4)
        write(tmp_path, 4, OUT, "here\n")
        tail.look()
        assert screen.lines == [(4, OUT, "here")]
        tail.follow(4)  # its replacement writes on
        write(tmp_path, 4, OUT, "again\n")
    assert screen.lines == [(4, OUT, "here"), (4, OUT, "again")]


def test_the_traceback_of_the_one_before_is_not_shown_and_the_next_one_is_heard(tmp_path: Path) -> None:
    screen = Screen()
    with Tail(tmp_path, 0, screen) as tail:
        tail.follow(1)
        write(tmp_path, 1, ERR, "a warning\n=== shoal: the traceback of the error that ended worker 1 ===\nTraceback\n")
        tail.follow(1)
        write(tmp_path, 1, ERR, "the next one warns\n")
    assert screen.lines == [(1, ERR, "a warning"), (1, ERR, "the next one warns")]


def test_without_a_folder_there_is_nothing_to_follow() -> None:
    screen = Screen()
    with Tail(None, 0, screen) as tail:
        tail.follow(0)
        assert not tail.look()


def test_empty_files_of_later_workers_do_not_stay(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    with Tail(folder, 1, Screen()) as tail:
        tail.follow(3)
        assert len(list(folder.iterdir())) == 4
    assert not folder.exists()
