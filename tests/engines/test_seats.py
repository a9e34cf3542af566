"""Crews whose processes are started one by one, and again; and what becomes of them when their supervisor is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from shoal.core.errors import ConfigError
from shoal.engines.local import Crew, Ended, LocalEngine, Message
from shoal.wire.link import Link, LinkClosed

pytestmark = pytest.mark.timeout(60)
DEADLINE = 20.0


@pytest.fixture(autouse=True)
def leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert psutil.Process().children(recursive=True) == []
    assert len(os.listdir("/proc/self/fd")) == before
    assert list(tmp_path.glob("shoal-*")) == []


def eventually(holds: Callable[[], bool], within: float = DEADLINE) -> None:
    deadline = time.monotonic() + within
    while not holds():
        assert time.monotonic() < deadline, "it did not come to hold"
        time.sleep(0.005)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def echo(seat: int, link: Link, scratch: Path) -> None:
    with contextlib.suppress(LinkClosed):
        while True:
            header, buffers = link.recv()
            link.send(b"%d:%d:" % (seat, os.getpid()) + header, buffers)


def answer(crew: Crew, seat: int) -> tuple[int, int, bytes]:
    arrival = crew.next(DEADLINE)
    assert isinstance(arrival, Message) and arrival.worker == seat, arrival
    said, pid, header = arrival.header.split(b":")
    return int(said), int(pid), header


def test_a_crew_may_begin_empty_and_seats_need_not_be_in_a_row() -> None:
    with LocalEngine().open(echo) as crew:
        assert crew.pids() == {}
        assert crew.next(0.0) is None
        for seat in (4096, 3):
            crew.add(seat)
            crew.send(seat, b"hello")  # before it is known to have been forked
            assert answer(crew, seat)[::2] == (seat, b"hello")
        # what the process says may come before the word that it was forked
        eventually(lambda: crew.next(0.0) is None and sorted(crew.pids()) == [3, 4096])


def test_a_seat_is_filled_again_after_its_process_has_ended() -> None:
    with LocalEngine().start(2, echo) as crew:
        crew.send(1, b"first")
        _, before, _ = answer(crew, 1)
        crew.kill(1)
        end = crew.next(DEADLINE)
        assert end == Ended(1, None, signal.SIGKILL)
        assert isinstance(end, Ended) and end.pid == before
        crew.add(1)
        crew.send(1, b"second")
        _, after, said = answer(crew, 1)
        assert said == b"second" and after != before
        # what the process says may come before the word that it was forked
        eventually(lambda: crew.next(0.0) is None and crew.pids().get(1) == after)
        crew.kill(1)
        assert crew.next(DEADLINE) == Ended(1, None, signal.SIGKILL)


def test_a_seat_that_is_taken_is_refused() -> None:
    with LocalEngine().start(1, echo) as crew:
        with pytest.raises(ConfigError, match="seat 0"):
            crew.add(0)
        crew.send(0, b"still here")
        assert answer(crew, 0)[2] == b"still here"
    with pytest.raises(ConfigError, match="seat 5"):
        crew.add(5)


def test_many_lives_leak_nothing() -> None:
    with LocalEngine().open(lambda seat, link, scratch: link.send(b"x")) as crew:
        before = len(os.listdir("/proc/self/fd"))
        for life in range(30):
            crew.add(7)
            assert crew.next(DEADLINE) == Message(7, b"x", [])
            assert crew.next(DEADLINE) == Ended(7, 0, None), life
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_later_process_that_cannot_be_forked_is_told_and_not_raised() -> None:
    def only_once() -> None:
        real, forks = os.fork, [0]

        def fork() -> int:
            forks[0] += 1
            if forks[0] == 2:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            return real()

        os.fork = fork

    with LocalEngine().start(1, echo, warm=only_once) as crew:
        crew.add(1)
        end = crew.next(DEADLINE)
        assert isinstance(end, Ended) and (end.worker, end.code, end.signal) == (1, None, None)
        assert "temporarily unavailable" in end.why
        assert sorted(crew.pids()) == [0]
        crew.add(1)  # now there is room again
        crew.send(1, b"here")
        assert answer(crew, 1)[2] == b"here"


def test_without_a_zygote_nothing_is_added_and_that_is_told() -> None:
    with LocalEngine().start(1, echo) as crew:
        (zygote,) = psutil.Process().children()
        os.kill(zygote.pid, signal.SIGKILL)
        assert crew.next(DEADLINE) == Ended(0, None, signal.SIGKILL)
        crew.add(0)
        end = crew.next(DEADLINE)
        assert isinstance(end, Ended) and end.worker == 0 and end.code is None
        assert end.why or end.signal == signal.SIGKILL
        assert crew.next(0.0) is None


def test_no_more_open_files_is_told_and_not_raised() -> None:
    import resource

    with LocalEngine().start(1, echo) as crew:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))
        try:
            crew.add(1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        end = crew.next(DEADLINE)
        assert isinstance(end, Ended) and end.worker == 1 and "open files" in end.why


def test_close_does_not_wait_for_the_grace() -> None:
    def stubborn(seat: int, link: Link, scratch: Path) -> None:
        link.send(b"here")
        time.sleep(600)

    crew = LocalEngine().start(2, stubborn, grace=300.0)
    for _ in range(2):
        assert isinstance(crew.next(DEADLINE), Message)
    pids = list(crew.pids().values())
    begun = time.monotonic()
    crew.close()
    assert time.monotonic() - begun < 2.0
    assert not any(psutil.pid_exists(pid) for pid in pids)


SUPERVISOR = """
import sys, threading, time
from pathlib import Path
from shoal.engines.local import LocalEngine
from shoal.wire.link import LinkClosed

grace, folder, where = float(sys.argv[1]), Path(sys.argv[2]), sys.argv[4]

def body(seat, link, scratch):
    link.send(b"here")
    try:
        link.recv()
    except LinkClosed:
        pass
    if seat == 0 and sys.argv[3] == "stubborn":
        time.sleep(600)
    time.sleep(0.3)
    (folder / str(seat)).touch()

def start():
    crews.append(LocalEngine().start(2, body, grace=grace))

crews = []
thread = threading.Thread(target=start)
if where == "thread":
    thread.start()
    thread.join()
else:
    start()
(crew,) = crews
crew.add(5)
for _ in range(3):
    crew.next(20)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("grace", "kind", "where", "saved"),
    [
        (20.0, "willing", "main", ["0", "1", "5"]),
        (20.0, "willing", "thread", ["0", "1", "5"]),
        (1.5, "stubborn", "main", ["1", "5"]),
        (0.0, "willing", "main", []),
    ],
)
def test_workers_of_a_killed_supervisor_have_their_grace_and_nothing_stays(
    grace: float, kind: str, where: str, saved: list[str], tmp_path: Path
) -> None:
    for name in ("scratch", "saved"):
        (tmp_path / name).mkdir()
    env = {**os.environ, "TMPDIR": str(tmp_path / "scratch")}
    command = [sys.executable, "-c", SUPERVISOR, str(grace), str(tmp_path / "saved"), kind, where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "ready\n"
        descendants = [process.pid for process in psutil.Process(supervisor.pid).children(recursive=True)]
        assert len(descendants) == 4
        supervisor.kill()
        begun = time.monotonic()
        eventually(lambda: not any(alive(pid) for pid in descendants), within=6.0)
        took = time.monotonic() - begun
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == saved
    if kind == "stubborn":
        assert took > 1.0, "it was not left its grace"
