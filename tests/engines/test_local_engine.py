from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import psutil
import pytest

from shoal.core.errors import ConfigError, WorkerError
from shoal.engines import zygote
from shoal.engines.local import EXIT_RAISED, Crew, Ended, LocalEngine, Message
from shoal.engines.zygote import fork
from shoal.wire.link import FrameError, Link, LinkClosed

pytestmark = pytest.mark.timeout(60)
DEADLINE = 20.0


@pytest.fixture(autouse=True)
def leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = open_descriptors(), threading.active_count()
    yield
    assert psutil.Process().children(recursive=True) == []
    assert (open_descriptors(), threading.active_count()) == before
    assert list(tmp_path.glob("shoal-*")) == []


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def eventually(holds: Callable[[], bool], within: float = DEADLINE) -> None:
    deadline = time.monotonic() + within
    while not holds():
        assert time.monotonic() < deadline, "it did not come to hold"
        time.sleep(0.005)


def taken(crew: Crew) -> list[Message | Ended]:
    """Everything until all workers have ended."""
    events: list[Message | Ended] = []
    while sum(isinstance(event, Ended) for event in events) < crew.workers:
        event = crew.next(DEADLINE)
        assert event is not None, f"nothing came after {events}"
        events.append(event)
    assert crew.next(None) is None
    return events


def headers(crew: Crew) -> dict[int, bytes]:
    return {event.worker: event.header for event in taken(crew) if isinstance(event, Message)}


def ends(crew: Crew) -> dict[int, tuple[int | None, int | None]]:
    return {event.worker: (event.code, event.signal) for event in taken(crew) if isinstance(event, Ended)}


def idle(rank: int, link: Link, scratch: Path) -> None:
    link.send(b"here")
    link.recv()


def all_here(crew: Crew) -> None:
    arrived = set()
    while len(arrived) < crew.workers:
        event = crew.next(DEADLINE)
        assert isinstance(event, Message), event
        arrived.add(event.worker)


def test_workers_get_rank_link_and_scratch_and_answer() -> None:
    factor = 7  # nothing is pickled: closures are fine

    def body(rank: int, link: Link, scratch: Path) -> None:
        header, buffers = link.recv()
        (scratch / str(rank)).write_bytes(header)
        link.send(bytes([rank * factor]), buffers)

    with LocalEngine().start(3, body) as crew:
        assert crew.workers == 3
        assert stat.S_IMODE(crew.scratch.stat().st_mode) == 0o700
        assert sorted(crew.pids()) == [0, 1, 2]
        assert len({os.getpid(), *crew.pids().values()}) == 4
        for rank in range(3):
            crew.send(rank, b"go", [bytes([rank])])
        events = taken(crew)
        for rank in range(3):
            mine = [event for event in events if event.worker == rank]
            assert mine == [Message(rank, bytes([rank * factor]), [bytearray([rank])]), Ended(rank, 0, None)]
            assert (crew.scratch / str(rank)).read_bytes() == b"go"
        assert crew.pids() == {}
    assert not crew.scratch.exists()


def leave_by(how: str) -> None:
    if how == "exit":
        sys.exit(3)
    elif how == "exit text":
        sys.exit("going, with words")
    elif how == "exit none":
        sys.exit()
    elif how == "raise":
        raise RuntimeError("the body broke")
    elif how == "os exit":
        os._exit(3)
    else:
        os.kill(os.getpid(), int(how))


@pytest.mark.parametrize(
    ("how", "code", "number"),
    [
        ("exit", 3, None),
        ("exit text", 1, None),
        ("exit none", 0, None),
        ("raise", EXIT_RAISED, None),
        ("os exit", 3, None),
        (str(int(signal.SIGTERM)), None, signal.SIGTERM),
        (str(int(signal.SIGUSR1)), None, signal.SIGUSR1),
        (str(int(signal.SIGINT)), 0, None),
    ],
)
def test_every_way_to_end(how: str, code: int | None, number: int | None, capfd: pytest.CaptureFixture[str]) -> None:
    with LocalEngine().start(2, lambda rank, link, scratch: leave_by(how) if rank else None) as crew:
        assert ends(crew) == {0: (0, None), 1: (code, number)}
    said = capfd.readouterr().err
    assert ("the body broke" in said) == (how == "raise")
    assert ("going, with words" in said) == (how == "exit text")
    assert ("Traceback" in said) == (how == "raise")


def test_a_killed_worker_is_reported_after_its_messages() -> None:
    def body(rank: int, link: Link, scratch: Path) -> None:
        for number in range(50):
            link.send(str(number).encode(), [bytes(1000)])
        os.kill(os.getpid(), signal.SIGKILL)

    with LocalEngine().start(2, body) as crew:
        events = taken(crew)
        for rank in range(2):
            *messages, end = [event for event in events if event.worker == rank]
            assert end == Ended(rank, None, signal.SIGKILL)
            assert [event.header for event in messages if isinstance(event, Message)] == [b"%d" % n for n in range(50)]


def test_a_message_cut_short_by_death_is_dropped() -> None:
    def body(rank: int, link: Link, scratch: Path) -> None:
        def die() -> NoReturn:
            os._exit(4)

        link.send(b"whole")
        link.send(b"cut", [bytes(10 << 20)], when_full=die)

    with LocalEngine().start(1, body) as crew:
        assert taken(crew) == [Message(0, b"whole", []), Ended(0, 4, None)]


def test_kill_ends_one_worker_and_sending_to_it_is_ignored() -> None:
    with LocalEngine().start(3, idle) as crew:
        all_here(crew)
        crew.kill(1)
        assert crew.next(DEADLINE) == Ended(1, None, signal.SIGKILL)
        assert sorted(crew.pids()) == [0, 2]
        crew.kill(1)
        crew.send(1, b"anyone?", [bytes(1 << 20)])
        assert crew.next(0.0) is None
        assert crew.next(0.01) is None
        crew.send(0, b"bye")
        crew.send(2, b"bye")
        assert ends_of_the_rest(crew, 2) == {0: (0, None), 2: (0, None)}
        with pytest.raises(ConfigError, match="workers 0 to 2"):
            crew.kill(3)


def ends_of_the_rest(crew: Crew, count: int) -> dict[int, tuple[int | None, int | None]]:
    events = [crew.next(DEADLINE) for _ in range(count)]
    return {event.worker: (event.code, event.signal) for event in events if isinstance(event, Ended)}


def test_sending_to_a_worker_that_dies_meanwhile_returns() -> None:
    def body(rank: int, link: Link, scratch: Path) -> None:
        link.poll(None)
        os._exit(5)

    with LocalEngine().start(1, body) as crew:
        crew.send(0, b"much", [bytes(50 << 20)])
        assert taken(crew) == [Ended(0, 5, None)]


def test_large_messages_do_not_deadlock_in_either_direction() -> None:
    size = 100 << 20

    def body(rank: int, link: Link, scratch: Path) -> None:
        link.send(b"big", [bytes(size)])
        header, (buffer,) = link.recv()
        link.send(header, [str(len(buffer)).encode()])

    with LocalEngine().start(2, body) as crew:
        # both workers are blocked in send now, or will be: the socket holds a fraction of a megabyte
        crew.send(0, b"back", [bytes(size)])
        crew.send(1, b"back", [bytes(size)])
        events = taken(crew)
        for rank in range(2):
            big, answer, end = [event for event in events if event.worker == rank]
            assert isinstance(big, Message) and big.header == b"big" and len(big.buffers[0]) == size
            assert isinstance(answer, Message) and answer.buffers == [str(size).encode()]
            assert end == Ended(rank, 0, None)


def test_a_stopped_worker_keeps_neither_the_others_nor_the_timeout() -> None:
    def body(rank: int, link: Link, scratch: Path) -> None:
        def stop() -> None:
            os.kill(os.getpid(), signal.SIGSTOP)

        if rank == 0:
            link.send(b"half", [bytes(10 << 20)], when_full=stop)
        else:
            link.recv()
            link.send(b"fine")

    with LocalEngine().start(2, body) as crew:
        eventually(lambda: psutil.Process(crew.pids()[0]).status() == psutil.STATUS_STOPPED)
        assert crew.next(0.05) is None
        crew.send(1, b"go")
        assert crew.next(DEADLINE) == Message(1, b"fine", [])
        assert crew.next(DEADLINE) == Ended(1, 0, None)
        assert crew.next(0.0) is None


def test_a_busy_worker_does_not_starve_the_others() -> None:
    def body(rank: int, link: Link, scratch: Path) -> None:
        with contextlib.suppress(LinkClosed):
            while True:
                link.send(b"x")

    with LocalEngine().start(2, body) as crew:
        seen = [0, 0]
        while min(seen) < 100:
            event = crew.next(DEADLINE)
            assert isinstance(event, Message)
            seen[event.worker] += 1


def test_a_worker_that_closes_its_link_is_not_ended_until_it_is() -> None:
    def body(rank: int, link: Link, scratch: Path) -> None:
        link.close()
        while not (scratch / "leave").exists():
            time.sleep(0.005)

    with LocalEngine().start(1, body) as crew:
        assert crew.next(0.05) is None
        crew.send(0, b"into the void")
        (crew.scratch / "leave").touch()
        assert taken(crew) == [Ended(0, 0, None)]


def test_garbage_on_a_link_names_the_worker_and_ends_it() -> None:
    def body(rank: int, link: Link, scratch: Path) -> None:
        if rank == 1:
            os.write(link.fileno(), b"print debugging on the wrong descriptor")
        link.recv()

    with LocalEngine().start(2, body) as crew:
        with pytest.raises(FrameError, match=r"worker 1.*SHL1"):
            crew.next(DEADLINE)
        assert crew.next(DEADLINE) == Ended(1, None, signal.SIGKILL)
        crew.send(0, b"bye")
        assert crew.next(DEADLINE) == Ended(0, 0, None)


def test_warm_runs_once_before_the_workers_and_not_in_the_supervisor() -> None:
    notes: list[int] = []

    def body(rank: int, link: Link, scratch: Path) -> None:
        link.send(str([len(notes), notes[0], os.getppid()]).encode())

    with LocalEngine().start(2, body, warm=lambda: notes.append(os.getpid())) as crew:
        answers = set(headers(crew).values())
    assert notes == []
    (answer,) = answers
    count, warmed, parent = map(int, answer.strip(b"[]").split(b","))
    assert count == 1
    assert warmed == parent != os.getpid()


def test_a_failing_warm_reaches_the_caller_with_its_traceback() -> None:
    def warm() -> None:
        raise LookupError("no such thing to warm")

    with pytest.raises(WorkerError, match=r"(?s)in warm\n.*LookupError: no such thing to warm"):
        LocalEngine().start(2, idle, warm=warm)


@pytest.mark.parametrize(
    ("warm", "said"),
    [
        (lambda: os._exit(9), "left with code 9 during the warm-up"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by signal 9 during the warm-up"),
        (lambda: sys.exit("no"), "SystemExit: no"),
    ],
)
def test_a_warm_that_ends_the_process_is_an_error(warm: Callable[[], None], said: str) -> None:
    with pytest.raises(WorkerError, match=said):
        LocalEngine().start(1, idle, warm=warm)


@pytest.mark.parametrize("workers", [0, -1, True, 1.0, "2"])
def test_a_bad_number_of_workers_is_refused(workers: int) -> None:
    with pytest.raises(ConfigError, match="workers="):
        LocalEngine().start(workers, idle)


def test_too_many_workers_for_the_open_files_is_a_clear_error() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_descriptors() + 8, hard))
    try:
        with pytest.raises(WorkerError, match=r"worker \d+ of 50 could not be started: .*workers="):
            LocalEngine().start(50, idle)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_fork_that_fails_is_a_clear_error() -> None:
    def no_more_processes() -> None:
        def refuse() -> int:
            raise BlockingIOError(11, "Resource temporarily unavailable")

        os.fork = refuse

    with pytest.raises(WorkerError, match=r"worker 0 of 2 could not be started: .*temporarily unavailable"):
        LocalEngine().start(2, idle, warm=no_more_processes)


@pytest.fixture
def interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# An interrupt can also come in the middle of closing a socket, which then waits for the collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_during_the_warm_up_leaves_nothing(interruptible: None) -> None:
    def warm() -> None:
        os.kill(supervisor, signal.SIGINT)
        time.sleep(600)

    supervisor = os.getpid()
    with pytest.raises(KeyboardInterrupt):
        LocalEngine().start(2, idle, warm=warm)


def test_an_interrupt_during_the_fork_leaves_nothing(interruptible: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fork_and_interrupt() -> int:
        pid = fork()
        if pid:
            # To this thread, which holds signals back: another one would let it in here, where the real fork has no
            # step of the interpreter.
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        return pid

    fork = os.fork
    monkeypatch.setattr(os, "fork", fork_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        LocalEngine().start(2, idle, warm=lambda: time.sleep(600))


def test_the_death_of_the_zygote_ends_every_worker() -> None:
    with LocalEngine().start(3, idle) as crew:
        all_here(crew)
        pids = crew.pids().values()
        (zygote,) = psutil.Process().children()
        os.kill(zygote.pid, signal.SIGKILL)
        assert ends(crew) == dict.fromkeys(range(3), (None, signal.SIGKILL))
        eventually(lambda: not any(alive(pid) for pid in pids))
        crew.send(0, b"x")
        crew.kill(0)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_close_is_quick_and_kills_what_does_not_listen() -> None:
    def stubborn(rank: int, link: Link, scratch: Path) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        link.send(b"here")
        time.sleep(600)

    durations = []
    for _ in range(5):
        crew = LocalEngine().start(3, stubborn)
        all_here(crew)
        pids = crew.pids().values()
        begun = time.monotonic()
        crew.close()
        durations.append(time.monotonic() - begun)
        crew.close()
        assert not any(psutil.pid_exists(pid) for pid in pids)
        assert crew.next(None) is None
        crew.send(0, b"x")
    # 10 ms on an idle machine; what must not happen is that close waits for a timeout of its own, which takes seconds
    assert min(durations) < 0.5


def test_a_forked_copy_of_the_crew_closes_nothing() -> None:
    with LocalEngine().start(1, idle) as crew:
        all_here(crew)
        child = os.fork()
        if child == 0:
            crew.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert crew.scratch.exists()
        crew.send(0, b"bye")
        assert taken(crew) == [Ended(0, 0, None)]


def test_workers_inherit_no_handlers_and_only_their_own_socket(tmp_path: Path) -> None:
    def body(rank: int, link: Link, scratch: Path) -> None:
        sockets = [fd for fd in os.listdir("/proc/self/fd") if is_crew_socket(fd)]
        found = {
            "sockets": sockets == [str(link.fileno())],
            "interrupt": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
            "terminate": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
            "user": signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL,
            "child": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
            "wakeup": signal.set_wakeup_fd(-1) == -1,
            "mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set(),
        }
        link.send(str([name for name, holds in found.items() if not holds]).encode())

    theirs = set(os.listdir("/proc/self/fd"))

    def is_crew_socket(fd: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return fd not in theirs and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        return False

    def handler(*_: object) -> None:
        (tmp_path / "handled").touch()

    read, write = os.pipe()
    os.set_blocking(write, False)
    theirs |= {str(read), str(write)}
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGUSR1)}
    before |= {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGCHLD)}
    wakeup = signal.set_wakeup_fd(write)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with LocalEngine().start(3, idle) as other, LocalEngine().start(3, body) as crew:
            assert headers(crew) == dict.fromkeys(range(3), b"[]")
            assert signal.getsignal(signal.SIGUSR1) is handler
            assert other.pids()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.set_wakeup_fd(wakeup)
        for number, was in before.items():
            signal.signal(number, was)
        os.close(read)
        os.close(write)
    assert not (tmp_path / "handled").exists()


def test_output_appears_once_and_exit_handlers_stay_with_the_parent() -> None:
    script = """
import atexit, sys
from shoal.engines.local import LocalEngine
atexit.register(lambda: print("exit handler"))
sys.stdout.write("before,")
def body(rank, link, scratch):
    sys.stdout.write(f"worker {rank},")
with LocalEngine().start(1, body) as crew:
    while crew.next(20) is not None:
        pass
print("after")
"""
    # a buffered stdout is the one whose contents a fork could double
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE, env=env)
    assert done.stdout == "before,worker 0,after\nexit handler\n", done.stderr


def test_crews_one_after_the_other_leak_nothing() -> None:
    def body(rank: int, link: Link, scratch: Path) -> None:
        link.send(b"hello")

    before = open_descriptors(), threading.active_count()
    for _ in range(20):
        with LocalEngine().start(2, body) as crew:
            assert headers(crew) == {0: b"hello", 1: b"hello"}
    assert (open_descriptors(), threading.active_count()) == before


def test_folders_of_killed_supervisors_are_swept(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    long_ago = time.time() - 3600
    kept = [tmp_path / f"shoal-{os.getpid()}-alive", tmp_path / f"shoal-{gone.pid}-young", tmp_path / "shoal-x-other"]
    for folder in [*kept, tmp_path / f"shoal-{gone.pid}-old"]:
        folder.mkdir()
        (folder / "store").touch()
        if "young" not in folder.name:
            os.utime(folder, (long_ago, long_ago))
    with LocalEngine().start(1, lambda rank, link, scratch: None) as crew:
        taken(crew)
        assert sorted(tmp_path.glob("shoal-*")) == sorted([*kept, crew.scratch])
    for folder in kept:
        (folder / "store").unlink()
        folder.rmdir()


def test_two_crews_at_once_are_apart() -> None:
    def echo(rank: int, link: Link, scratch: Path) -> None:
        link.send(link.recv()[0])

    with LocalEngine().start(2, echo) as first, LocalEngine().start(2, echo) as second:
        assert first.scratch != second.scratch
        for rank in range(2):
            first.send(rank, b"first")
            second.send(rank, b"second")
        assert headers(second) == {0: b"second", 1: b"second"}
        second.close()
        assert headers(first) == {0: b"first", 1: b"first"}


def test_closing_the_first_of_two_crews_is_quick() -> None:
    first = LocalEngine().start(1, idle)
    with LocalEngine().start(1, idle):
        all_here(first)
        begun = time.monotonic()
        first.close()
        assert time.monotonic() - begun < 2.0


def test_a_crew_started_in_a_thread_outlives_the_thread() -> None:
    crews: list[Crew] = []
    thread = threading.Thread(target=lambda: crews.append(LocalEngine().start(2, idle)))
    thread.start()
    thread.join(DEADLINE)
    (crew,) = crews
    with crew:
        all_here(crew)
        assert crew.next(0.1) is None, "the end of the thread ended the workers"
        crew.send(0, b"bye")
        crew.send(1, b"bye")
        assert ends(crew) == {0: (0, None), 1: (0, None)}


def test_threads_may_start_crews_at_the_same_time() -> None:
    def run() -> None:
        for _ in range(5):
            with LocalEngine().start(2, lambda rank, link, scratch: link.send(b"%d" % rank)) as crew:
                results.append(headers(crew))

    results: list[dict[int, bytes]] = []
    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert results == [{0: b"0", 1: b"1"}] * 15


def test_a_worker_may_start_a_crew_of_its_own() -> None:
    def body(rank: int, link: Link, scratch: Path) -> None:
        with LocalEngine().start(2, lambda rank, link, scratch: link.send(b"inner")) as crew:
            link.send(b",".join(headers(crew).values()))

    with LocalEngine().start(1, body) as crew:
        assert headers(crew) == {0: b"inner,inner"}


SUPERVISOR = """
import sys, threading, time
from shoal.engines.local import LocalEngine

def body(rank, link, scratch):
    link.send(b"here")
    time.sleep(600)

def start():
    crews.extend(LocalEngine().start(2, body) for _ in range(2))

crews = []
thread = threading.Thread(target=start)
if sys.argv[1] == "thread":
    thread.start()
    thread.join()
else:
    start()
for crew in crews:
    crew.next(20), crew.next(20)
print(*(pid for crew in crews for pid in crew.pids().values()), flush=True)
if sys.argv[2] == "stay":
    time.sleep(600)
"""


@pytest.mark.parametrize("where", ["main", "thread"])
@pytest.mark.parametrize("then", ["stay", "leave"])
def test_a_supervisor_that_is_killed_or_forgets_to_close_leaves_no_process(
    where: str, then: str, tmp_path: Path
) -> None:
    (tmp_path / "theirs").mkdir()
    env = {**os.environ, "TMPDIR": str(tmp_path / "theirs")}
    command = [sys.executable, "-c", SUPERVISOR, where, then]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as supervisor:
        assert supervisor.stdout is not None
        workers = [int(word) for word in supervisor.stdout.readline().split()]
        assert len(workers) == 4
        if then == "stay":
            descendants = [process.pid for process in psutil.Process(supervisor.pid).children(recursive=True)]
            assert len(descendants) == 6
            supervisor.kill()
        else:
            supervisor.wait(DEADLINE)
            descendants = workers
        eventually(lambda: not any(alive(pid) for pid in descendants), within=2.0)


TORCH = """
import torch
from shoal.engines.local import LocalEngine, Message

torch.set_num_threads(2)
layer = torch.nn.Linear(2000, 2000)
layer(torch.randn(500, 2000)).sum().backward()

def warm():
    import torch.distributed

def body(rank, link, scratch):
    torch.set_num_threads(1)
    for _ in range(3):
        data = torch.randn(200, 2000) @ torch.randn(2000, 2000)
        layer(data).square().mean().backward()
    link.send(b"trained" if torch.isfinite(layer.weight.grad).all() else b"broken")

with LocalEngine().start(2, body, warm=warm) as crew:
    for _ in range(4):
        event = crew.next(20)
        print(event.header.decode() if isinstance(event, Message) else event.code)
layer(torch.randn(500, 2000)).sum().backward()
print("done")
"""


def test_workers_compute_after_a_backward_on_several_threads_in_the_parent() -> None:
    done = subprocess.run([sys.executable, "-c", TORCH], capture_output=True, text=True, timeout=40)
    assert sorted(done.stdout.split()) == ["0", "0", "done", "trained", "trained"], done.stderr


def test_the_room_does_not_import_torch() -> None:
    script = "import sys, shoal.engines.local, shoal.engines.world; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE)
    assert done.stdout == "False\n", done.stderr


def test_a_child_that_is_born_stuck_is_born_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under CPython 3.11 when another thread holds the interpreter's list of threads at the moment of the fork."""
    real, forks = os.fork, []

    def stuck_at_first() -> int:
        forks.append(0)
        pid = real()
        if pid == 0 and len(forks) == 1:
            signal.pause()
        return pid

    monkeypatch.setattr(zygote, "_PATIENCE", (0.3, 5.0))
    monkeypatch.setattr(os, "fork", stuck_at_first)
    with LocalEngine().start(1, lambda rank, link, scratch: link.send(b"alive")) as crew:
        assert headers(crew) == {0: b"alive"}
    assert len(forks) == 2


def test_children_that_are_all_born_stuck_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fork

    def stuck() -> int:
        pid = real()
        if pid == 0:
            signal.pause()
        return pid

    monkeypatch.setattr(zygote, "_PATIENCE", (0.1, 0.1))
    monkeypatch.setattr(os, "fork", stuck)
    with pytest.raises(WorkerError, match="did not come to life"):
        LocalEngine().start(1, lambda rank, link, scratch: None)


def test_the_collector_of_a_child_leaves_alone_what_it_inherits() -> None:
    def inherit() -> None:
        # 100: what the child has made itself since it was born
        os._exit(gc.get_freeze_count() > 10_000 and len(gc.get_objects()) < 100)

    born: list[int] = []
    before = gc.get_freeze_count()
    zygote.fork(inherit, born)
    assert os.waitstatus_to_exitcode(os.waitpid(born[0], 0)[1]) == 1
    assert gc.get_freeze_count() == before


def test_a_pool_of_threads_that_compile_is_made_anew_in_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.compile keeps one: in a fork, an idle thread of it counts, and is not there."""

    class AsyncCompile:
        @staticmethod
        @functools.lru_cache(1)
        def pool() -> ThreadPoolExecutor:
            return ThreadPoolExecutor(2)

    monkeypatch.setitem(sys.modules, "torch._inductor.async_compile", SimpleNamespace(AsyncCompile=AsyncCompile))
    assert AsyncCompile.pool().submit(lambda: 1).result() == 1
    born: list[int] = []
    fork(lambda: sys.exit(AsyncCompile.pool().submit(lambda: 3).result(timeout=5)), born)
    assert os.waitstatus_to_exitcode(os.waitpid(born[0], 0)[1]) == 3
    assert AsyncCompile.pool().submit(lambda: 2).result(timeout=5) == 2
    AsyncCompile.pool().shutdown()
