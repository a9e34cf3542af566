"""Whether the process of a run is still there. Looks into /proc and never waits."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path

import msgspec

from shoal.store.values import KILLED, LOST, RUNNING

LOST_AFTER = 60.0
"""Seconds without a sign of life after which a run on another machine counts as lost."""


class Process(msgspec.Struct, frozen=True):
    """A process that cannot be taken for another one: process ids are used again, and start anew with the machine."""

    host: str
    pid: int
    started: float
    """In seconds after the machine started; 0 where that cannot be found out."""
    boot: str
    """Names the start of the machine and the set of process ids (containers have their own); may be empty."""


def this_process() -> Process:
    pid = os.getpid()
    return Process(host=socket.gethostname(), pid=pid, started=_started(pid) or 0.0, boot=boot())


def status_now(stored: str, process: Process, updated: float, now: float) -> str:
    """What to show for a run that says `stored` of itself and was last heard of at `updated`."""
    if stored != RUNNING:
        return stored
    quiet = now - updated > LOST_AFTER
    if process.host != socket.gethostname():
        return LOST if quiet else RUNNING
    if process.boot and process.boot != boot():
        # Another machine of the same name is possible, so a sign of life counts for more than the name.
        rebooted = _kernel(process.boot) != _kernel(boot())
        return (KILLED if rebooted else LOST) if quiet else RUNNING
    return RUNNING if _is_alive(process) else KILLED


@cache
def boot() -> str:
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{kernel} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _kernel(boot: str) -> str:
    return boot.partition(" ")[0]


def _is_alive(process: Process) -> bool:
    if process.pid <= 0:
        return False
    started = _started(process.pid)
    if started is None:
        return is_there(process.pid)
    if started < 0:
        return False
    return not process.started or abs(started - process.started) < 0.005  # less than one tick


def _started(pid: int) -> float | None:
    """In seconds after boot. None if it cannot be seen, negative if it has ended (a zombie)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The second field is a name in parentheses, which may hold anything.
    fields = stat.rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):
        return -1.0
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def is_there(pid: int) -> bool:
    """Whether there is a process of that number. True also where that cannot be told."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
