"""`shoal logs`: what workers printed, at rest and while it grows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from shoal.cli import logs
from shoal.cli.logs import Tail
from shoal.core.errors import ConfigError, RunDirError, RunNotFound
from shoal.store.liveness import this_process
from shoal.store.store import Store
from shoal.store.values import NewRun, RunEnd
from shoal.store.writing import RunWriter

PROGRAM = """
import typer
from shoal.cli import logs
app = typer.Typer(pretty_exceptions_enable=False)
app.callback()(lambda: None)
logs.register(app)
app()
"""
SECONDS = 30.0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of run a-1, of two workers."""
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SHOAL_STORE", raising=False)
    monkeypatch.setattr(logs, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(logs, "_STATUS_SECONDS", 0.02)
    folder = tmp_path / "a-1"
    (folder / "logs").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"run_id": "a-1"}))
    return folder


def record(folder: Path | None, *, running: bool = False, workers: int = 2) -> Callable[[], None]:
    """Put the run into the store. What comes back ends it."""
    alive = this_process()
    new = NewRun(
        id="a-1", name="a", created=time.time(), workers=workers, run_dir=str(folder) if folder else None,
        host=alive.host, pid=alive.pid, pid_started=alive.started, boot=alive.boot,
    )  # fmt: skip

    def write(end: RunEnd | None) -> None:
        with Store.open() as store:
            writer = RunWriter(store, new)
            writer.begin()
            writer.write([], end)

    write(None if running else RunEnd(status="complete"))
    return lambda: write(RunEnd(status="complete"))


def log(folder: Path, name: str, data: bytes) -> None:
    with (folder / "logs" / name).open("ab") as file:
        file.write(data)


def shoal(*args: str) -> Result:
    app = typer.Typer()
    app.callback()(lambda: None)
    logs.register(app)
    return CliRunner().invoke(app, ["logs", *args])


def test_workers_in_order_output_before_errors(folder: Path) -> None:
    record(folder)
    log(folder, "worker-10.out", b"ten\n")
    log(folder, "worker-2.err", b"bad\nlast without end")
    log(folder, "worker-2.out", b"two\n\xff\n")
    log(folder, "notes.txt", b"no log\n")
    assert shoal("last").stdout == "[2] two\n[2] \ufffd\n[2] bad\n[2] last without end\n[10] ten\n"
    assert shoal("a", "--lines", "1").stdout == "[2] \ufffd\n[2] last without end\n[10] ten\n"
    assert shoal("a", "--lines", "0").stdout == ""
    assert shoal("a-1", "--worker", "10").stdout == "ten\n"


def test_one_worker_has_no_prefix(folder: Path) -> None:
    record(folder, workers=1)
    log(folder, "worker-0.out", b"one\n")
    assert shoal("last").stdout == "one\n"


def test_a_folder_will_do_without_a_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_STORE", "none")
    log(folder, "worker-0.out", b"one\n")
    assert shoal(str(folder)).stdout == "one\n"
    assert shoal(str(folder), "-f").stdout == "one\n", "nobody holds its lock: it is over"
    monkeypatch.chdir(folder.parent)
    assert shoal("a-1").stdout == "one\n"
    assert isinstance(shoal("./gone").exception, RunNotFound)
    assert isinstance(shoal(str(folder / "logs")).exception, RunNotFound)


def test_an_unknown_worker_is_told_which_there_are(folder: Path) -> None:
    record(folder)
    log(folder, "worker-0.out", b"")
    log(folder, "worker-1.err", b"")
    refused = shoal("last", "--worker", "7").exception
    assert isinstance(refused, ConfigError) and "logs of 0, 1" in str(refused)
    assert shoal("last", "--worker", "-1").exit_code == 2


@pytest.mark.parametrize(("workers", "number"), [(1, "1 worker)"), (2, "2 workers)")])
def test_an_unknown_worker_where_none_has_printed(folder: Path, workers: int, number: str) -> None:
    record(folder, workers=workers)
    assert f"the run has {number}" in str(shoal("last", "--worker", "7").exception)


def test_nothing_printed(folder: Path) -> None:
    record(folder)
    told = shoal("last")
    assert told.exit_code == 0 and told.stdout == "" and "No worker has printed" in told.stderr


def test_a_run_without_a_folder() -> None:
    record(None)
    assert isinstance(shoal("last").exception, RunDirError)


def test_a_folder_that_is_gone(folder: Path) -> None:
    record(folder / "elsewhere")
    assert isinstance(shoal("last").exception, RunDirError)


def test_following_until_the_run_is_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New lines, a new file and a last line without an end arrive; then the status ends it."""
    end = record(folder, running=True)
    log(folder, "worker-0.out", b"before\nhal")
    shown: list[str] = []
    monkeypatch.setattr(logs, "write", shown.append)
    done = threading.Thread(target=lambda: shoal("last", "-f"))
    done.start()
    try:
        wait_for(lambda: "".join(shown) == "[0] before\n")
        log(folder, "worker-0.out", b"f\n")
        wait_for(lambda: "".join(shown) == "[0] before\n[0] half\n")
        log(folder, "worker-1.err", b"new\nrest")
        wait_for(lambda: "".join(shown).endswith("[1] new\n"))
    finally:
        end()
        done.join(SECONDS)
    assert not done.is_alive()
    assert "".join(shown) == "[0] before\n[0] half\n[1] new\n[1] rest\n"


def test_following_the_last_lines(folder: Path) -> None:
    record(folder)
    log(folder, "worker-0.out", b"1\n2\n3\nopen")
    assert shoal("last", "-f", "--lines", "2").stdout == "[0] 3\n[0] open\n"
    assert shoal("last", "-f", "--lines", "0").stdout == ""


def test_an_interrupt_ends_following_quietly(folder: Path) -> None:
    record(folder, running=True)
    log(folder, "worker-0.out", b"ready\n")
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "logs", "last", "-f"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=dict(os.environ), preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"[0] ready\n"
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, rest, errors) == (130, b"", b"")


def test_a_file_that_is_cut_or_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"first\npart")
    tail = Tail(path)
    assert list(tail.read()) == [b"first"]
    path.write_bytes(b"new\n")
    assert list(tail.read()) == [b"new"]
    (tmp_path / "y").write_bytes(b"another, and longer\n")
    (tmp_path / "y").replace(path)
    assert list(tail.read()) == [b"another, and longer"]
    path.unlink()
    assert list(tail.read()) == []


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_LONGEST_LINE", 10)
    (tmp_path / "x").write_bytes(b"x" * 25)
    assert list(logs.read_lines(tmp_path / "x")) == [b"x" * 10, b"x" * 10, b"x" * 5]
    assert b"".join(Tail(tmp_path / "x").read()) == b"x" * 25


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.005)
