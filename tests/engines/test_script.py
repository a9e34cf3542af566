from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.core.errors import ConfigError
from shoal.engines import script


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A program that tells its place and waits for a word; this process takes itself for worker 0 of it."""
    path = tmp_path / "program.py"
    path.write_text(
        "import os, sys\n"
        "place = [os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR')]\n"
        "open(sys.argv[1] + place[0], 'w').write(' '.join([*place, *sys.argv[2:]]))\n"
        "sys.exit(int(sys.argv[2]) if place[0] == '1' else 0)\n"
    )
    monkeypatch.setattr(sys, "argv", [str(path)])
    monkeypatch.setattr(script, "_others", [])
    monkeypatch.setattr(script, "_world", None)
    monkeypatch.setattr(script, "_listener", None)
    monkeypatch.setattr(script.atexit, "register", lambda fn: None)
    yield path
    listener = script.take_listener()
    if listener is not None:
        socket.socket(fileno=listener).close()
    for process in script._others:
        process.wait(20)


def start(program: Path, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> list[subprocess.Popen[bytes]]:
    out = str(program.parent / "out-")
    monkeypatch.setattr(sys, "orig_argv", ["python", str(program), out, str(code), "--flag"])
    world = script.run_script_on(3)
    assert (world.rank, world.size, world.local_rank, world.address) == (0, 3, 0, "127.0.0.1")
    return script._others


def test_others_run_the_same_command_each_in_its_place(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for process in start(program, monkeypatch):
        assert process.wait(20) == 0
    for rank in (1, 2):
        assert (program.parent / f"out-{rank}").read_text() == f"{rank} {rank} 3 127.0.0.1 0 --flag"


def test_the_meeting_place_is_held_until_it_is_taken(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(program, monkeypatch)
    port = script.run_script_on(3).port
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    descriptor = script.take_listener()
    assert descriptor is not None and script.take_listener() is None
    with socket.socket(fileno=descriptor) as listener:
        assert listener.getsockname() == ("127.0.0.1", port)


def test_a_second_start_is_the_same_world(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(program, monkeypatch)
    assert script.run_script_on(3) is script.run_script_on(3)
    assert len(script._others) == 2
    with pytest.raises(ConfigError, match=r"workers=2, but this script already runs on 3"):
        script.run_script_on(2)


def test_who_ended_and_how(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for process in start(program, monkeypatch, code=7):
        process.wait(20)
    assert script.ended() == ["worker 1 left with exit code 7"]
    assert script.ended(well=True) == ["worker 1 left with exit code 7", "worker 2 left with exit code 0"]


def test_nobody_else_has_ended_where_there_is_nobody_else() -> None:
    assert script.ended(patience=5.0) == []


def test_at_the_end_those_who_failed_are_named(
    program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start(program, monkeypatch, code=7)
    script._wait_for_others()
    assert all(process.returncode is not None for process in script._others)
    assert capsys.readouterr().err == "shoal: worker 1 left with exit code 7\n"


def test_at_the_end_a_stop_that_was_asked_for_is_no_failure(
    program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start(program, monkeypatch, code=75)
    script._wait_for_others()
    assert capsys.readouterr().err == ""


def test_who_goes_on_for_too_long_is_ended(
    program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "_FAREWELL_SECONDS", 0.2)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", "import time; time.sleep(1000)"])
    script.run_script_on(2)
    script._wait_for_others()
    assert "worker 1 goes on 0.2 s after worker 0; ending it" in capsys.readouterr().err
