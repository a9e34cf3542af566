"""A lab ends with its owner, leaves nothing behind, and says why where there can be none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.core.errors import ConfigError, LabUnavailable
from shoal.engines.places import LABS, labs_up
from shoal.testing.lab import Lab, needs, why_no_lab

needs_lab = pytest.mark.skipif(why_no_lab() is not None, reason=str(why_no_lab()))
SECONDS = 10.0
"""For what should take none."""


def eventually(condition: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)


def sleeper_in(lab: Lab, host: int) -> subprocess.Popen[str]:
    """A program that runs in a host, and is there when this returns."""
    process = lab.run(host, ["sh", "-c", "echo here; exec sleep 600"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as said:
        assert said.readline() == "here\n"
    return process


def said_in(lab: Lab, host: str, script: str) -> str:
    process = lab.run(host, ["sh", "-c", script], stdout=subprocess.PIPE, text=True)
    return str(process.communicate(timeout=SECONDS)[0])


@needs_lab
def test_what_runs_in_a_host_ends_with_the_lab() -> None:
    with Lab(hosts=1, name="mortal") as lab:
        sleeper = sleeper_in(lab, 0)
        # one that came another way, past the control group
        network = f"/proc/{lab.hosts[0].pid}/ns/net"
        guest = subprocess.Popen(["nsenter", f"--net={network}", "--", "sleep", "600"])
        eventually(lambda: os.readlink(f"/proc/{guest.pid}/ns/net") == os.readlink(network), "it is in the host")
        assert labs_up().count("mortal") == 1
    assert sleeper.wait(SECONDS) == guest.wait(SECONDS) == -signal.SIGKILL
    assert "mortal" not in labs_up()
    lab.close()
    with pytest.raises(ConfigError, match=r"lab mortal does not answer .* is it still up"):
        lab.cut(0)


OWNER = """
import sys, time
from shoal.testing.lab import Lab
lab = Lab(hosts=2, name=sys.argv[1], rate="1gbit", cpu=0.5, delay=0.001)
sleeper = lab.run("b", ["sh", "-c", "echo here; exec sleep 600"], stdout=-1)
sleeper.stdout.readline()
print(*(host.pid for host in lab.hosts), sleeper.pid, lab._keeper.pid, flush=True)
time.sleep(600)
"""


def traces(name: str) -> list[str]:
    """What exists of a lab besides processes."""
    folders = [LABS, Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/cpu")]
    return [str(path) for folder in folders if folder.is_dir() for path in folder.iterdir() if name in path.name]


def networks() -> set[str]:
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found.add(os.readlink(folder / "ns" / "net"))
        except OSError:
            continue
    return found


@needs_lab
def test_nothing_is_left_when_the_owner_is_killed() -> None:
    name = f"killed-{os.getpid()}"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, name], stdout=subprocess.PIPE, text=True)
    with owner:
        try:
            assert owner.stdout is not None
            pids = [int(word) for word in owner.stdout.readline().split()]
            theirs = {os.readlink(f"/proc/{pid}/ns/net") for pid in pids}
            assert len(theirs) == 3 and traces(name)
        finally:
            owner.kill()
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the lab's processes end")
    assert not traces(name) and not theirs & networks()


@needs_lab
def test_what_a_killed_keeper_leaves_is_swept_by_the_next_lab() -> None:
    name = f"swept-{os.getpid()}"
    lab = Lab(hosts=1, name=name, cpu=0.5)
    sleeper = sleeper_in(lab, 0)
    assert lab._keeper is not None
    lab._keeper.kill()
    lab._keeper.wait(SECONDS)
    assert name not in labs_up() and traces(name)
    with pytest.raises(ConfigError, match=f"lab='{name}' is not up; labs that are up: "):
        Lab.attach(name)
    with Lab(hosts=1, name=name):
        pass
    lab.close()
    assert sleeper.wait(SECONDS) == -signal.SIGKILL and not traces(name)


@needs_lab
def test_a_name_is_used_once_and_the_first_lab_keeps_it() -> None:
    with Lab(hosts=1, name="twice", cpu=0.5) as lab:
        sleeper = sleeper_in(lab, 0)
        with pytest.raises(ConfigError, match="lab twice is up already"):
            Lab(hosts=1, name="twice")
        assert sleeper.poll() is None and traces("twice")
        assert said_in(lab, "a", "hostname").strip() == "a"
    sleeper.wait(SECONDS)


def test_without_root_the_reason_is_told() -> None:
    script = """
import os
from shoal.core.errors import LabUnavailable
from shoal.testing.lab import Lab, why_no_lab
if os.geteuid() == 0:
    os.setuid(65534)
print(why_no_lab())
try:
    Lab()
except LabUnavailable as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    said = done.stdout.splitlines()
    assert len(said) == 2 and said[0] == said[1]
    assert "a lab needs root, and this process runs as user" in said[0] and "sudo" in said[0]


@needs_lab
def test_a_missing_tool_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    there = needs.find
    monkeypatch.setattr(needs, "find", lambda tool: None if tool in ("ip", "tc") else there(tool))
    with pytest.raises(LabUnavailable, match=r"needs ip, tc; on Debian and Ubuntu: apt-get install iproute2$"):
        Lab()
