"""Whether a run that says it is running is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import msgspec
import pytest

from shoal.store.liveness import LOST_AFTER, Process, boot, status_now, this_process

NOW = 10_000.0


def changed(**changes: object) -> Process:
    return msgspec.structs.replace(this_process(), **changes)


def test_this_process_is_alive_however_quiet() -> None:
    assert status_now("running", this_process(), 0.0, NOW) == "running"
    assert this_process().pid == os.getpid() and this_process().host == socket.gethostname()


@pytest.mark.parametrize("stored", ["complete", "failed", "interrupted", "stopped", "preempted"])
def test_an_end_stays_an_end(stored: str) -> None:
    assert status_now(stored, changed(pid=2**22 + 1), 0.0, NOW) == stored


@pytest.mark.parametrize("changes", [{"pid": 2**22 + 1}, {"pid": 0}, {"pid": -1}, {"started": 1.0}])
def test_gone_or_another_with_its_number(changes: dict[str, object]) -> None:
    assert status_now("running", changed(**changes), NOW, NOW) == "killed"


def test_a_zombie_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert status_now("running", changed(pid=process.pid, started=0.0), NOW, NOW) == "killed"
    finally:
        process.wait()


def test_on_another_machine_only_time_tells() -> None:
    far = changed(host="elsewhere.example", pid=2**22 + 1)
    assert status_now("running", far, NOW - LOST_AFTER + 1, NOW) == "running"
    assert status_now("running", far, NOW - LOST_AFTER - 1, NOW) == "lost"


def test_after_a_reboot_the_number_says_nothing() -> None:
    before = changed(boot="another-boot pid:[1]")
    assert status_now("running", before, NOW - LOST_AFTER - 1, NOW) == "killed"
    container = changed(boot=boot().partition(" ")[0] + " pid:[1]")
    assert status_now("running", container, NOW - LOST_AFTER - 1, NOW) == "lost"
    assert status_now("running", container, NOW, NOW) == "running"
