"""`shoal rm`: never another run than the one that is meant, one in use, a file of somebody else, or half of one."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from shoal.cli import folder as folders
from shoal.cli import rm
from shoal.core.errors import RunDirError, RunNotFound, StoreError
from shoal.store import connect
from shoal.store.store import Store
from shoal.store.values import NewRun, RunEnd
from shoal.store.writing import RunWriter


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SHOAL_STORE", raising=False)
    return tmp_path


def stored(run_id: str, folder: Path | None = None, *, name: str = "digits", tags: tuple[str, ...] = ()) -> None:
    """A run that is over, and in its folder what runs write."""
    with Store.open() as store:
        writer = RunWriter(
            store, NewRun(id=run_id, name=name, created=1.0, workers=1, run_dir=str(folder) if folder else None)
        )
        writer.begin()
        writer.write([], RunEnd(status="complete"))
        store.tag(run_id, tags)
    if folder is not None:
        for step in ("step-000000004", ".writing-step-000000008"):
            (folder / "checkpoints" / step).mkdir(parents=True)
        (folder / "checkpoints" / "step-000000004" / "manifest.json").write_text("{}")
        (folder / "checkpoints" / "best.json").write_text("{}")
        (folder / "logs").mkdir()
        (folder / "logs" / "worker-0.out").write_text("x")
        (folder / "run.json").write_text(json.dumps({"run_id": run_id}))
        (folder / ".lock").write_text("4194305")


def shoal(*args: str) -> Result:
    app = typer.Typer()
    app.callback()(lambda: None)
    rm.register(app)
    return CliRunner().invoke(app, args)


def ids() -> list[str]:
    with Store.open(create=False) as store:
        return sorted(run.id for run in store.runs())


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@contextmanager
def in_use(folder: Path, holder: int) -> Iterator[None]:
    """As a run holds its folder."""
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(holder).encode(), 0)
        yield
    finally:
        os.close(lock)


def test_a_tag_is_not_taken_for_the_beginning_of_an_id(home: Path) -> None:
    stored("best-model-1", home / "best-model-1")
    stored("digits-1", home / "digits-1", tags=("best",))
    told = shoal("rm", "best", "--yes").exception
    assert isinstance(told, RunNotFound)
    assert "best-model-1" in str(told) and "digits-1" in str(told)
    assert ids() == ["best-model-1", "digits-1"] and (home / "best-model-1").is_dir()


@pytest.mark.parametrize("keep", [[], ["--keep-folder"]])
def test_a_run_that_is_being_resumed_stays(home: Path, keep: list[str]) -> None:
    """Its row still tells of the run before: the lock on its folder is the first thing that a run takes."""
    stored("free-1", home / "free-1")
    stored("busy-1", home / "busy-1")
    before = files_in(home / "busy-1")
    with in_use(home / "busy-1", os.getpid()):
        told = shoal("rm", "free-1", "busy-1", "--yes", *keep).exception
    assert isinstance(told, RunDirError) and f"busy-1 is in use by process {os.getpid()}" in str(told)
    assert files_in(home / "busy-1") == before and ids() == ["busy-1", "free-1"] and (home / "free-1").is_dir()
    assert shoal("rm", "busy-1", "--yes", *keep).exit_code == 0
    assert ids() == ["free-1"] and (home / "busy-1").is_dir() == bool(keep)


def test_the_workers_of_a_killed_run_that_do_not_end_are_waited_for_briefly(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_DYING_SECONDS", 0.05)
    stored("a-1", home / "a-1")
    with in_use(home / "a-1", 2**22 + 1):
        assert isinstance(shoal("rm", "a-1", "--yes").exception, RunDirError)
    assert ids() == ["a-1"]


def test_the_folder_is_held_until_all_else_in_it_is_gone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored("a-1", home / "a-1")
    remove, seen = shutil.rmtree, []

    def watched(path: Path) -> None:
        lock = os.open(home / "a-1" / ".lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        seen.append(os.pread(lock, 32, 0))
        os.close(lock)
        remove(path)

    monkeypatch.setattr("shutil.rmtree", watched)
    assert shoal("rm", "a-1", "--yes").exit_code == 0
    assert seen and set(seen) == {str(os.getpid()).encode()} and not (home / "a-1").exists()


def test_a_store_that_is_locked_loses_no_files(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "BUSY_SECONDS", 0.05)
    stored("a-1", home / "a-1")
    before = files_in(home / "a-1")
    other = sqlite3.connect(home / "home" / "shoal.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    told = shoal("rm", "a-1", "--yes").exception
    other.close()
    assert isinstance(told, StoreError) and "in use" in str(told)
    assert files_in(home / "a-1") == before and ids() == ["a-1"]


def test_a_store_that_cannot_be_written_loses_no_files(home: Path) -> None:
    stored("a-1", home / "a-1")
    before = files_in(home / "a-1")
    with Store.open() as store, store.writing() as connection:
        connection.exec_driver_sql(
            "CREATE TRIGGER refuse BEFORE DELETE ON shoal_runs BEGIN SELECT RAISE(ABORT, 'no'); END"
        )
    assert isinstance(shoal("rm", "a-1", "--yes").exception, StoreError)
    assert files_in(home / "a-1") == before and ids() == ["a-1"]


def test_what_is_left_of_a_folder_is_told_and_the_run_stays(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored("a-1", home / "a-1")
    remove = shutil.rmtree

    def refuse_logs(path: Path) -> None:
        if path.name == "logs":
            raise PermissionError(13, "Permission denied", str(path / "worker-0.out"))
        remove(path)

    monkeypatch.setattr("shutil.rmtree", refuse_logs)
    told = shoal("rm", "a-1", "--yes").exception
    assert isinstance(told, RunDirError) and "worker-0.out cannot be removed (Permission denied)" in str(told)
    assert "left in" in str(told) and "logs" in str(told) and "checkpoints" not in str(told)
    assert ids() == ["a-1"] and (home / "a-1" / "run.json").exists(), "it can be tried again"
    monkeypatch.undo()
    os.environ["SHOAL_HOME"] = str(home / "home")
    assert shoal("rm", "a-1", "--yes").exit_code == 0 and not (home / "a-1").exists()


def test_a_store_that_fails_at_the_end_says_that_the_files_are_gone(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored("a-1", home / "a-1")

    @contextmanager
    def removing(self: Store, run_id: str) -> Iterator[None]:
        yield
        raise StoreError("The disk is full.")

    monkeypatch.setattr(Store, "removing", removing)
    told = shoal("rm", "a-1", "--yes").exception
    assert isinstance(told, StoreError) and "The disk is full." in str(told)
    assert "files of a-1 are gone" in str(told) and "shoal rm" in str(told)


def test_files_of_others_among_those_of_a_run_stay(home: Path) -> None:
    project = home / "project"
    stored("a-1", project)
    for mine in ("checkpoints/notes.txt", "checkpoints/step-by-step.md", "logs/mine.txt", "logs/worker-x.out"):
        (project / mine).write_text("precious")
    for mine in ("checkpoints/step-mine", "checkpoints/step-000000099", "checkpoints/.writing-a-novel"):
        (project / mine).mkdir()
        (project / mine / "model.safetensors").write_text("precious")
    told = shoal("rm", "a-1", "--yes")
    assert told.exit_code == 0 and "checkpoints, logs, run.json" in told.stdout
    assert files_in(project) == sorted([
        "checkpoints", "checkpoints/notes.txt", "checkpoints/step-by-step.md", "checkpoints/step-mine",
        "checkpoints/step-mine/model.safetensors", "checkpoints/step-000000099",
        "checkpoints/step-000000099/model.safetensors", "checkpoints/.writing-a-novel",
        "checkpoints/.writing-a-novel/model.safetensors", "logs", "logs/mine.txt", "logs/worker-x.out",
    ])  # fmt: skip
    assert ids() == []


def test_nothing_stays_of_a_chosen_folder_with_only_the_run_in_it(home: Path) -> None:
    stored("a-1", home / "mine")
    assert shoal("rm", "a-1", "--yes").exit_code == 0
    assert not (home / "mine").exists()


def test_names_that_speak_to_the_terminal_are_cleaned(home: Path) -> None:
    stored("a\x1b[2J-1", home / "x\x1b[31mred")
    told = shoal("rm", "last", "--yes")
    assert told.exit_code == 0 and "\x1b" not in told.stdout and "a-1" in told.stdout
