from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.engines import look
from shoal.engines.look import CUT, GONE, SLOW, STOPPED, Look, Sample, is_halted

pytestmark = pytest.mark.timeout(60)
DEADLINE = 10.0


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", request.param], stdout=subprocess.PIPE, text=True) as made:
        assert made.stdout is not None
        assert made.stdout.readline() == "here\n"
        yield made
        made.kill()


BUSY = "print('here', flush=True)\nwhile True: pass"
ASLEEP = "import time; print('here', flush=True); time.sleep(600)"


def verdict(at: Look, ticks: Iterator[int], within: float = DEADLINE) -> tuple[str, float]:
    """The word, and how long it took."""
    begun = time.monotonic()
    while (found := at.take(next(ticks), time.monotonic())) is None:
        assert time.monotonic() - begun < within, "no verdict"
        time.sleep(0.05)
    assert found[1]
    return found[0], time.monotonic() - begun


def still() -> Iterator[int]:
    while True:
        yield 41


def growing() -> Iterator[int]:
    yield from range(10**9)


@pytest.mark.parametrize("process", [BUSY], indirect=True)
def test_one_that_computes_is_slow(process: subprocess.Popen[str]) -> None:
    word, took = verdict(Look(process.pid), still())
    assert word == SLOW and took < 2.0


LOCKED = """
import ctypes, threading, time
def beat():
    while True:
        time.sleep(0.01)
for _ in range(3):
    threading.Thread(target=beat, daemon=True).start()
print("here", flush=True)
ctypes.PyDLL(None).sleep(600)
"""


@pytest.mark.parametrize("process", [LOCKED], indirect=True)
def test_one_that_sleeps_with_the_lock_is_slow_and_does_not_compute(process: subprocess.Popen[str]) -> None:
    at = Look(process.pid)
    while (found := at.take(41, time.monotonic())) is None:
        time.sleep(0.05)
    assert found[0] == SLOW and "sleeps" in found[1]


@pytest.mark.parametrize("process", [ASLEEP], indirect=True)
def test_one_that_sleeps_without_giving_its_threads_a_turn_is_slow(process: subprocess.Popen[str]) -> None:
    assert verdict(Look(process.pid), still())[0] == SLOW


@pytest.mark.parametrize("process", [ASLEEP], indirect=True)
def test_one_whose_threads_have_their_turns_is_cut(process: subprocess.Popen[str]) -> None:
    word, took = verdict(Look(process.pid), growing())
    assert word == CUT and took < 1.0


@pytest.mark.parametrize("process", [BUSY, ASLEEP], indirect=True)
def test_a_stopped_one_is_stopped_at_once_and_not_once_it_goes_on(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    deadline = time.monotonic() + DEADLINE
    while not is_halted(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    found = Look(process.pid).take(1, time.monotonic())
    assert found is not None and found[0] == STOPPED
    os.kill(process.pid, signal.SIGCONT)
    assert verdict(Look(process.pid), still())[0] == SLOW
    assert not is_halted(process.pid)


@pytest.mark.parametrize("process", [ASLEEP], indirect=True)
def test_a_dead_one_is_gone_reaped_or_not(process: subprocess.Popen[str]) -> None:
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert verdict(Look(process.pid), still())[0] == GONE  # a zombie
    process.wait()
    assert verdict(Look(process.pid), still())[0] == GONE


class Script:
    """Samples as they are told, one after the other; the last one again and again."""

    def __init__(self, *samples: Sample) -> None:
        self._samples = list(samples)

    def __call__(self, pid: int) -> Sample:
        return self._samples.pop(0) if len(self._samples) > 1 else self._samples[0]


def words(monkeypatch: pytest.MonkeyPatch, script: Script, times: list[float]) -> list[str | None]:
    monkeypatch.setattr(look, "sample", script)
    at = Look(1)
    found = [at.take(7, now) for now in times]
    return [None if one is None else one[0] for one in found]


def test_waiting_for_the_disk_without_computing_is_stopped_after_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert words(monkeypatch, Script(Sample("D", 5)), [0.0, 2.4, 4.9, 5.1]) == [None, None, None, STOPPED]


def test_waiting_for_the_disk_and_computing_in_between_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(*(Sample("D", 5 + 20 * (at // 2)) for at in range(8)))
    assert STOPPED not in words(monkeypatch, script, [1.5 * at for at in range(8)])


def test_sleeping_with_the_lock_is_slow_for_a_minute_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [float(at) for at in range(0, 62)]
    found = words(monkeypatch, Script(Sample("S", 5)), times)
    assert found[0] is None
    assert found[1:60] == [SLOW] * 59
    assert found[60:] == [STOPPED] * 2


def test_threads_that_wait_for_the_lock_do_not_count_as_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(*(Sample("S", at) for at in range(70)))  # a hundredth of a core
    found = words(monkeypatch, script, [float(at) for at in range(62)])
    assert found[59:61] == [SLOW, STOPPED]


def test_a_minute_begins_anew_when_it_computes_or_was_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert words(monkeypatch, Script(Sample("S", 5)), [0.0, 1.0, 50.0, 51.0, 65.0, 66.0])[-1] == SLOW
    script = Script(*[Sample("S", 5)] * 40, Sample("S", 60))
    assert words(monkeypatch, script, [float(at) for at in range(70)])[-1] == SLOW


def test_a_new_question_waits_for_samples_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "sample", Script(Sample("S", 5)))
    at = Look(1)
    assert [at.take(7, now) for now in (0.0, 0.1)] == [None, None]
    assert at.take(7, 0.5) is not None
    at.again()
    assert at.take(7, 5.05) is None
    assert at.take(7, 5.2) is None
    assert at.take(7, 5.5) is not None


def test_ticks_from_before_the_question_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "sample", Script(Sample("S", 5)))
    at = Look(1)
    assert [at.take(7, now) for now in (0.0, 0.1)] == [None, None]
    assert (at.take(7, 0.5) or "")[0] == SLOW
    at.again()
    found = [at.take(99, 5.0 + after) for after in (0.0, 0.1, 0.2, 0.4, 0.5)]
    assert [one and one[0] for one in found] == [None, None, None, SLOW, SLOW]


def test_one_that_has_just_come_back_has_time_to_be_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "sample", Script(Sample("S", 5)))
    at = Look(1)
    found = [at.take(int(10 * after), after) for after in (0.0, 0.1, 0.2, 0.3, 0.45)]
    assert [one and one[0] for one in found] == [None, None, None, None, CUT]


def test_a_name_with_brackets_and_spaces_is_read(tmp_path: Path) -> None:
    tool = tmp_path / "a) R (b"
    tool.symlink_to("/bin/sleep")
    with subprocess.Popen([str(tool), "60"]) as made:
        try:
            deadline = time.monotonic() + DEADLINE
            while look.sample(made.pid).state != "S":
                assert time.monotonic() < deadline
                time.sleep(0.005)
        finally:
            made.kill()
