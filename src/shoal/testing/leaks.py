"""Finds what a test leaves behind: processes, threads, shared memory and, on request, sockets.

    with LeakCheck():
        ...                     # raises LeakError, naming each thing left, if something outlives the block

A look costs well under a millisecond when there is nothing to find, so it can surround every test.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

DESCENDANT_MARK = "SHOAL_TESTING_DESCENDANT_OF"
"""Environment variable by which a process is known as started from here, even after its parent has gone."""

_SHM = Path("/dev/shm")
_PROC = Path("/proc")

# Helpers of the standard library and of torch that serve a whole process and end with it.
_SERVICES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch_shm_manager")


class LeakError(AssertionError):
    """Something outlived the block that made it; the message names each thing."""


def mark_descendants() -> None:
    """Write the mark into this process's environment, so that processes started from now on carry it.

    Without it, a process that was started by a program under test and lost its parent is taken for a stranger.
    """
    os.environ[DESCENDANT_MARK] = f"{os.getpid()}-{time.time_ns()}"


@dataclass(frozen=True)
class _Snapshot:
    pids: frozenset[int]
    threads: frozenset[threading.Thread]
    shm: frozenset[str]
    sockets: frozenset[str]

    @classmethod
    def take(cls, sockets: bool) -> _Snapshot:
        return cls(
            pids=frozenset(_all_pids()),
            # A dummy stands for a thread of C++ that once called into Python; such threads belong to torch's pools.
            threads=frozenset(t for t in threading.enumerate() if not isinstance(t, threading._DummyThread)),
            shm=frozenset(_names(_SHM)),
            sockets=frozenset(open_sockets()) if sockets else frozenset(),
        )


class LeakCheck:
    """Compares what exists when the block ends with what existed when it began.

    Used from one thread; blocks may be nested. Something that is still on its way out has `grace` seconds to go.
    An exception that leaves the block is never replaced by a LeakError. `sockets=True` also looks at this process's
    sockets.
    """

    def __init__(self, *, grace: float = 2.0, sockets: bool = False) -> None:
        self._grace = grace
        self._sockets = sockets
        self._before: _Snapshot | None = None

    def __enter__(self) -> LeakCheck:
        self._before = _Snapshot.take(self._sockets)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.check()

    def check(self) -> None:
        """Raise LeakError if something made since the block began is still there after the grace."""
        found = self.leaks()
        if not found:
            return
        # A reference cycle may be all that keeps a pool or a mapping alive.
        gc.collect()
        deadline = time.monotonic() + self._grace
        while (found := self.leaks()) and time.monotonic() < deadline:
            time.sleep(0.01)
        if found:
            listing = "\n".join(f"  {leak}" for leak in found)
            raise LeakError(f"{len(found)} left behind {self._grace:g} s after the end:\n{listing}")

    def leaks(self) -> list[str]:
        """What is there now and was not when the block began, one line each, without waiting."""
        if self._before is None:
            raise RuntimeError("LeakCheck.leaks() was called before the block began; use `with LeakCheck() as check:`")
        before, now = self._before, _Snapshot.take(self._sockets)
        return [
            *_process_leaks(now.pids - before.pids),
            *(_describe_thread(thread) for thread in now.threads - before.threads if thread.is_alive()),
            *(f"shared memory {_SHM / name}" for name in sorted(now.shm - before.shm) if not _is_of_strangers(name)),
            *(f"socket {name}" for name in sorted(now.sockets - before.sockets)),
        ]


def open_sockets() -> Iterator[str]:
    """The sockets this process has open, as `socket:[inode]`; nothing where there is no /proc."""
    return (target for target in _open_files("self") if target.startswith("socket:"))


def _describe_thread(thread: threading.Thread) -> str:
    return f"{'daemon ' if thread.daemon else ''}thread {thread.name!r}"


def _process_leaks(new_pids: frozenset[int]) -> list[str]:
    found = []
    for pid in sorted(new_pids):
        if not _is_ours(pid):
            continue
        try:
            process = psutil.Process(pid)
            status, command = process.status(), " ".join(process.cmdline()) or process.name()
        except psutil.Error:
            continue
        # A zombie has ended; its parent just has not asked yet.
        if status == psutil.STATUS_ZOMBIE or any(service in command for service in _SERVICES):
            continue
        found.append(f"process {pid} ({status}): {command[:200]}")
    return found


def _is_ours(pid: int) -> bool:
    """Whether `pid` comes from this process: by its parents, its mark, or its memory."""
    return _descends_from_here(pid) or _carries_mark(pid) or _is_forked_from_here(pid)


def _descends_from_here(pid: int) -> bool:
    try:
        return os.getpid() in (parent.pid for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False


def _carries_mark(pid: int) -> bool:
    mark = os.environ.get(DESCENDANT_MARK)
    if mark is None:
        return False
    return f"{DESCENDANT_MARK}={mark}".encode() in _read(_PROC / str(pid) / "environ").split(b"\0")


def _is_forked_from_here(pid: int) -> bool:
    """True for a copy of this process that never called exec.

    Its environment block shows what *we* were started with, so it has no mark; but it lies at the same address, which
    the kernel draws at random for every program it starts.
    """
    ours = _environment_address(os.getpid())
    return ours is not None and ours == _environment_address(pid)


def _environment_address(pid: int) -> tuple[bytes, bytes] | None:
    # proc(5): fields from the third on follow the command's closing parenthesis; env_start and env_end are 50 and 51.
    fields = _read(_PROC / str(pid) / "stat").rpartition(b")")[2].split()
    if len(fields) < 49 or fields[47] == b"0":
        return None
    return fields[47], fields[48]


def _is_of_strangers(name: str) -> bool:
    """Whether somebody else uses this shared memory, and nobody of ours does.

    Looks through every process, which takes milliseconds; only called for entries that appeared during a test.
    """
    holders = [pid for pid in _all_pids() if _holds(pid, str(_SHM / name))]
    return bool(holders) and not any(pid == os.getpid() or _is_ours(pid) for pid in holders)


def _holds(pid: int, path: str) -> bool:
    return path.encode() in _read(_PROC / str(pid) / "maps") or path in _open_files(pid)


def _all_pids() -> Iterator[int]:
    if _PROC.is_dir():
        return (int(name) for name in _names(_PROC) if name.isdigit())
    return iter(psutil.pids())


def _open_files(pid: int | str) -> Iterator[str]:
    folder = _PROC / str(pid) / "fd"
    for name in _names(folder):
        # The file may be closed, or the process end, while we look.
        with contextlib.suppress(OSError):
            yield os.readlink(folder / name)


def _names(folder: Path) -> list[str]:
    """What `folder` lists; nothing where it has gone or is not ours to see."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read(path: Path) -> bytes:
    """The bytes of `path`; none where it has gone or is not ours to see."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
