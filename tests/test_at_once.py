"""Tests that run at once are reported as if one process had run them, also when that process dies or is interrupted."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

DEADLINE = 60
AT_ONCE = Path(__file__).with_name("at_once.py")


def start(folder: Path, **files: str) -> subprocess.Popen[str]:
    for name, code in files.items():
        (folder / f"test_{name}.py").write_text(code)
    command = [sys.executable, str(AT_ONCE), "-q", "-m", "not slow", "--durations=1", "-p", "no:cacheprovider"]
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, str(folder)], cwd=AT_ONCE.parent.parent, stdout=pipe, stderr=pipe, text=True)


MIXED = """
import pytest
def test_right(): pass
def test_wrong():
    print("words")
    assert [1, 2] == [1, 3]
@pytest.mark.skip
def test_skipped(): pass
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_slow(): pass
"""
DYING = """
import os
def test_before(): pass
def test_last(): os.abort()
def test_after(): pass
"""


def test_every_outcome_is_told(tmp_path: Path) -> None:
    job = start(tmp_path, mixed=MIXED, dying=DYING, unreadable="import nothing_of_this_name")
    told, _ = job.communicate(timeout=DEADLINE)
    assert job.returncode == 1
    assert "At index 1 diff: 2 != 3" in told and "words" in told
    assert re.search(r"_ \S*test_dying.py::test_last _+\nthe process that ran it was killed by SIGABRT", told)
    assert "ModuleNotFoundError: No module named 'nothing_of_this_name'" in told
    assert "slowest 1 durations" in told
    last = told.splitlines()[-1]
    assert re.match(r"2 failed, 2 passed, 1 skipped, 1 deselected, .*1 error in \d+\.\d\ds", last), last


def test_all_is_well_if_all_tests_pass(tmp_path: Path) -> None:
    job = start(tmp_path, one="def test_one(): pass", two="def test_two(): pass")
    told, _ = job.communicate(timeout=DEADLINE)
    assert job.returncode == 0 and told.splitlines()[-1].startswith("2 passed in ")


def test_nothing_to_run_is_no_success(tmp_path: Path) -> None:
    job = start(tmp_path)
    job.communicate(timeout=DEADLINE)
    assert job.returncode == pytest.ExitCode.NO_TESTS_COLLECTED


WAITING = """
import pathlib, pytest, time
here = pathlib.Path(__file__).parent
@pytest.fixture
def tidy():
    yield
    time.sleep(0.3)
    (here / "tidied").touch()
def test_waiting(tidy):
    (here / "waiting").touch()
    time.sleep(100)
def test_after(): (here / "after").touch()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_for_the_clean_up(number: signal.Signals, tmp_path: Path) -> None:
    job = start(tmp_path, waiting=WAITING)
    deadline = time.monotonic() + DEADLINE
    while not (tmp_path / "waiting").exists():
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.02)
    job.send_signal(number)
    told, errors = job.communicate(timeout=DEADLINE)
    assert (tmp_path / "tidied").exists() and not (tmp_path / "after").exists()
    assert job.returncode == pytest.ExitCode.INTERRUPTED and "KeyboardInterrupt" in told
    assert errors == ""
