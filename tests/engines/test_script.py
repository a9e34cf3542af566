from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.core.errors import ConfigError, WorkerError
from shoal.engines.crew import Ended, Message
from shoal.engines.here import _read, here
from shoal.engines.script import ScriptCrew
from shoal.wire.link import Link

pytestmark = pytest.mark.timeout(60)
FORKED = 100
PROGRAM = """
import os, sys
from shoal.engines.here import here
place = here()
assert place is not None and here() is place and "SHOAL_WORKER" not in os.environ
numbers = [os.environ["RANK"], os.environ["LOCAL_RANK"]]
place.link.send(" ".join([str(place.seat), *numbers, *sys.argv[1:]]).encode())
while (word := place.link.recv()[0]) != b"end":
    if word != b"over":
        place.link.send(b"heard " + word)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    monkeypatch.setattr(sys, "argv", [str(path)])
    monkeypatch.setattr(sys, "orig_argv", ["python", str(path), "7", "--flag"])
    return path


@pytest.fixture
def crew(program: Path) -> Iterator[ScriptCrew]:
    def forked(seat: int, link: Link, scratch: Path) -> None:
        link.send(b"forked")
        link.recv()

    made = ScriptCrew(FORKED, forked)
    try:
        yield made
    finally:
        made.close()


def take(crew: ScriptCrew) -> Message | Ended:
    found = crew.next(30.0)
    assert found is not None
    return found


def said(crew: ScriptCrew) -> bytes:
    found = take(crew)
    assert isinstance(found, Message)
    return found.header


def test_each_runs_the_same_command_in_its_place(crew: ScriptCrew) -> None:
    crew.begin(b"go", lambda seat, pid: True)
    for seat in (0, 2):
        crew.add(seat)
        assert [said(crew), said(crew)] == [f"{seat} {seat + 1} {seat} 7 --flag".encode(), b"heard go"]
    crew.add(FORKED)
    assert said(crew) == b"forked"
    while len(crew.pids()) < 3:  # the zygote says it, and may be slower than the process itself
        assert crew.next(0.05) is None
    assert sorted(crew.pids()) == [0, 2, FORKED]


def test_those_who_have_returned_take_part_in_the_next_run(crew: ScriptCrew) -> None:
    crew.begin(b"first", lambda seat, pid: True)
    for seat in (0, 1):
        crew.add(seat)
        assert [said(crew), said(crew)][1] == b"heard first"
    before = crew.pids()
    crew.finish([0], b"over")
    assert crew.pids() == {}  # none has a part in a run
    crew.begin(b"second", lambda seat, pid: True)
    crew.add(0)
    assert said(crew) == b"heard second"
    assert crew.pids() == {0: before[0]}
    crew.add(1)  # that one was ended
    assert [said(crew), said(crew)][1] == b"heard second"
    assert crew.pids()[1] != before[1]


def test_one_that_ends_before_it_comes_is_an_error_and_one_that_is_killed_is_not(crew: ScriptCrew) -> None:
    crew.begin(b"end", lambda seat, pid: False)
    crew.add(0)
    assert isinstance(take(crew), Message)
    with pytest.raises(WorkerError, match=r"worker 0 left with exit code 7 before it came to this call"):
        take(crew)
    crew.begin(b"go", lambda seat, pid: False)
    crew.add(0)
    assert [said(crew), said(crew)][1] == b"heard go"
    crew.kill(0)
    end = take(crew)
    assert isinstance(end, Ended) and end.signal == signal.SIGKILL


def test_at_the_end_those_who_failed_are_named(crew: ScriptCrew, capsys: pytest.CaptureFixture[str]) -> None:
    crew.begin(b"go", lambda seat, pid: True)
    crew.add(0)
    assert [said(crew), said(crew)][1] == b"heard go"
    crew.finish([0], b"over")
    crew.farewell(b"end")
    assert capsys.readouterr().err == "shoal: worker 0 left with exit code 7\n"
    assert not crew.scratch.exists()


def test_who_goes_on_for_too_long_is_ended(
    crew: ScriptCrew, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shoal.engines.script._FAREWELL_SECONDS", 0.2)
    crew.begin(b"go", lambda seat, pid: True)
    crew.add(0)
    assert [said(crew), said(crew)][1] == b"heard go"
    (pid,) = crew.pids().values()
    crew.finish([0], b"over")
    begun = time.monotonic()
    crew.farewell(b"another word")
    assert time.monotonic() - begun < 5.0 and not Path(f"/proc/{pid}").exists()
    assert "worker 0 goes on 0.2 s after the process that started it; ending it" in capsys.readouterr().err


def test_a_program_that_a_worker_has_started_is_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    assert here() is None
    monkeypatch.setenv("SHOAL_WORKER", f"0:3:{os.getpid()}:/tmp")  # its parent is another one
    _read.cache_clear()
    assert here() is None and "SHOAL_WORKER" not in os.environ


def test_without_a_script_there_is_none_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["-c"])
    with pytest.raises(ConfigError, match="not started from a file"):
        ScriptCrew(FORKED, lambda seat, link, scratch: None)
