from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(60)

LIVES_ON = """
import os, time
from shoal.engines.lifeline import die_with_parent
parent = os.getpid()
if os.fork() == 0:
    die_with_parent(parent)
    print("ready", flush=True)
    time.sleep(600)
time.sleep(600)
"""

TOO_LATE = """
import os
from shoal.engines.lifeline import die_with_parent
parent = os.getpid()
asked, ask = os.pipe()
if os.fork() == 0:
    os.close(ask)
    os.read(asked, 1)  # returns when the parent is about to be gone
    while os.getppid() == parent:
        pass
    die_with_parent(parent)
    print("still here", flush=True)
os._exit(0)
"""

IN_TIME = """
import os
from shoal.engines.lifeline import die_with_parent
parent = os.getpid()
if os.fork() == 0:
    die_with_parent(parent)
    os._exit(5)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def printed(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_child_dies_with_its_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", LIVES_ON], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
        # the child holds the other end: the pipe ends only when it is gone too
        assert parent.stdout.read() == ""


def test_a_child_whose_parent_is_gone_already_dies_at_once() -> None:
    assert printed(TOO_LATE) == ""


def test_a_child_of_a_living_parent_lives() -> None:
    assert printed(IN_TIME) == "5\n"
