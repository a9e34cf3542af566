"""The leak check finds what is left, and nothing else."""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest

from shoal.testing.leaks import LeakCheck, LeakError

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
# Prints the process id of a child that it leaves behind; the child must not hold the pipe that the id comes through.
ORPHAN = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdout=subprocess.DEVNULL)
print(child.pid)
"""


def end(pid: int) -> None:
    """Kill a process that may not be our child, and wait until it is gone."""
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_nothing_left_is_fine() -> None:
    with LeakCheck():
        subprocess.run([sys.executable, "-c", ""], check=True)
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()


def test_a_child_is_found() -> None:
    check = LeakCheck(grace=0.05)
    with pytest.raises(LeakError, match=r"process \d+ .*time\.sleep\(60\)"), check:
        # Without an environment it has no mark either: only its parent tells.
        child = subprocess.Popen(SLEEPER, stdout=subprocess.PIPE, env={})
        assert child.stdout is not None and child.stdout.readline()
    child.kill()
    child.communicate()
    assert check.leaks() == []


def test_an_orphan_of_a_program_is_found() -> None:
    with pytest.raises(LeakError, match=r"process \d+"), LeakCheck(grace=0.05):
        pid = int(subprocess.run([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, check=True).stdout)
    end(pid)


def test_a_forked_orphan_is_found() -> None:
    receive, send = os.pipe()
    with pytest.raises(LeakError, match=r"process \d+"), LeakCheck(grace=0.05):
        child = os.fork()
        if child == 0:
            orphan = os.fork()
            if orphan == 0:
                time.sleep(60)
            os.write(send, str(orphan).encode())
            os._exit(0)
        os.waitpid(child, 0)
    end(int(os.read(receive, 20)))
    os.close(receive)
    os.close(send)


def test_a_process_of_somebody_else_is_not_ours() -> None:
    """Without parents, mark and memory in common, a process that appears is a stranger."""
    strange = f"import os; os.environ.clear()\n{ORPHAN}"
    with LeakCheck(grace=0.05):
        pid = int(subprocess.run([sys.executable, "-c", strange], stdout=subprocess.PIPE, check=True).stdout)
    end(pid)


@pytest.mark.parametrize("daemon", [True, False])
def test_a_thread_is_found(released: threading.Event, daemon: bool) -> None:
    with pytest.raises(LeakError, match="thread 'the-listener'"), LeakCheck(grace=0.05):
        threading.Thread(target=released.wait, name="the-listener", daemon=daemon).start()


def test_what_ends_within_the_grace_is_fine() -> None:
    with LeakCheck(grace=10):
        threading.Timer(0.05, lambda: None).start()


def test_shared_memory_is_found() -> None:
    with pytest.raises(LeakError, match="shared memory /dev/shm/shoal-leak-"), LeakCheck(grace=0.05):
        memory = shared_memory.SharedMemory(f"shoal-leak-{os.getpid()}", create=True, size=64)
    memory.close()
    memory.unlink()


def test_shared_memory_that_nobody_uses_any_more_is_found() -> None:
    path = Path(f"/dev/shm/shoal-torn-{os.getpid()}")
    with pytest.raises(LeakError, match=path.name), LeakCheck(grace=0.05):
        path.write_bytes(b"left")
    path.unlink()


def test_shared_memory_of_somebody_else_is_not_ours() -> None:
    path = Path(f"/dev/shm/shoal-strange-{os.getpid()}")
    holder = f"import time; f = open({str(path)!r}, 'w'); print('up', flush=True); time.sleep(60)"
    starter = (
        "import os, subprocess, sys; os.environ.clear();"
        f"p = subprocess.Popen([sys.executable, '-c', {holder!r}], stdout=subprocess.PIPE); p.stdout.readline();"
        "print(p.pid)"
    )
    with LeakCheck(grace=0.05):
        pid = int(subprocess.run([sys.executable, "-c", starter], stdout=subprocess.PIPE, check=True).stdout)
        assert path.exists()
    end(pid)
    path.unlink()


def test_sockets_are_found_on_request() -> None:
    with LeakCheck(grace=0.05):
        unseen = socket.socket()
    with pytest.raises(LeakError, match=r"socket socket:\[\d+\]"), LeakCheck(grace=0.05, sockets=True):
        seen = socket.socket()
    seen.close()
    unseen.close()


def test_the_error_of_the_block_is_kept(released: threading.Event) -> None:
    with pytest.raises(KeyError), LeakCheck(grace=0.05):
        threading.Thread(target=released.wait).start()
        raise KeyError


def test_a_look_is_cheap() -> None:
    taken = []
    for _ in range(20):
        start = time.thread_time()
        with LeakCheck():
            pass
        taken.append(time.thread_time() - start)
    assert statistics.median(taken) < 0.002
