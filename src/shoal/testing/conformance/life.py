"""Cases: signals, and the end of buffers and of a group."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from shoal.comm.group import Group
from shoal.core.errors import GroupError

_LATE = 0.3  # seconds


OPERATIONS: dict[str, Callable[[Group], object]] = {
    "sum": lambda group: group.sum(torch.ones(1000)).wait(),
    "scatter_sum": lambda group: group.scatter_sum(torch.ones(group.size, 1000)),
    "swap": lambda group: group.swap(torch.ones(group.size, 1000)),
    "gather": lambda group: group.gather(torch.ones(1000)),
    "gather_bytes": lambda group: group.gather_bytes(b"x" * 1000),
    "broadcast": lambda group: group.broadcast(torch.ones(1000)),
    "barrier": lambda group: group.barrier(),
}


def raises(operation: Callable[[], object]) -> str:
    """What the `GroupError` of `operation` says; empty if it raised none."""
    said = ""
    try:
        operation()
    except GroupError as error:
        said = str(error) or "GroupError"
    return said


def signals(group: Group) -> None:
    """Handlers run while an operation waits for a member that is late."""
    if group.size == 1:
        return
    waiting: list[Callable[[], object]] = [
        group.barrier,
        lambda: group.sum(torch.ones(1000)).wait(),
        lambda: group.gather(torch.ones(1000)),
        lambda: group.swap(torch.ones(group.size, 1000)),
    ]
    for wait in waiting:
        seen: list[float] = []
        group.barrier()
        begun = time.monotonic()
        if group.rank == group.size - 1:
            time.sleep(_LATE)
            wait()
            continue
        before = signal.signal(signal.SIGALRM, lambda *_, seen=seen: seen.append(time.monotonic()))
        signal.setitimer(signal.ITIMER_REAL, _LATE / 10)
        try:
            wait()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert seen, "the handler of a signal did not run during an operation"
        assert seen[0] - begun < 0.8 * _LATE, f"it ran {seen[0] - begun:.3f} s after the start, not {_LATE / 10:.3f} s"


def released_buffers(group: Group) -> None:
    """What is released can be read while it is held, and its memory goes with the last tensor that shows it."""
    floats, before = 1 << 18, _shared_memory()
    held = group.buffer(1000, torch.float32)
    for number in range(1, 31):
        buffer = group.buffer(floats, torch.float32)
        buffer.fill_(float(number))
        group.sum(buffer).wait()
        assert (buffer == number * group.size).all()
        group.release(buffer)
        assert (buffer == number * group.size).all(), "what was released is gone"
        del buffer
    held.fill_(1.0)
    group.sum(held).wait()
    assert (held == group.size).all()
    group.release(held)
    group.barrier()
    grown = _shared_memory() - before
    # each member may hold what all members share
    assert grown < 4 * floats * group.size * 5, f"30 buffers were released, and {grown} bytes of shared memory stay"


def closing(group: Group) -> None:
    """The last case. Everything raises from then on, buffers stay readable, descriptors and threads are gone."""
    buffer = group.buffer(1000, torch.float32)
    buffer.fill_(1.0)
    group.sum(buffer).wait()
    threads = _native_threads()
    held = {number: os.readlink(f"/proc/self/fd/{number}") for number in group.descriptors()}
    group.barrier()
    with suppress(GroupError):  # a member that has left this one may have closed
        group.barrier()
    group.close()
    group.close()
    for name, operation in OPERATIONS.items():
        assert raises(partial(operation, group)), f"{name} after close() did not raise GroupError"
    assert (buffer == group.size).all(), "a buffer keeps its values after close()"
    buffer.fill_(2.0)
    until = time.monotonic() + 1.0
    while _native_threads() > min(threads, 1) and time.monotonic() < until:
        time.sleep(0.005)
    assert _native_threads() <= threads
    assert threading.enumerate() == [threading.current_thread()], "threads are left after close()"
    left = [number for number, name in held.items() if _names(number) == name]
    assert not left, f"descriptors {left} are open after close()"
    assert group.account.now().bytes >= 0


def _shared_memory() -> int:
    """Bytes of shared memory that this process has touched."""
    with open("/proc/self/status") as status:
        return sum(1024 * int(line.split()[1]) for line in status if line.startswith("RssShmem:"))


def _native_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _names(descriptor: int) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return ""
