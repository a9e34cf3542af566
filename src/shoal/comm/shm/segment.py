"""Segments of shared memory: files of mode 0600 in /dev/shm, named by run, that exist for as long as workers meet.

Whoever has mapped a segment keeps it; its name is removed as soon as all members have. So nothing is left behind,
however the members end: what a run leaves that was killed while it met is removed by the next one that comes along.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import mmap
import os
import re
import secrets
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

FOLDER = Path("/dev/shm")
PREFIX = "shoal-"
_MODE = 0o600
_NAME = re.compile(rf"{PREFIX}[A-Za-z0-9_.-]+-[0-9a-f]{{16}}")
"""All that this module makes is named so, and nothing else is swept away."""

_ALLOCATED_AT_ONCE = 64 << 20
_SWEEPS = 10
_SWEEP_SECONDS = 0.01

_own: set[tuple[int, int]] = set()
"""Segments whose file is open here. Opening one again and closing that would drop this process's locks on it."""


class SegmentRefused(OSError):
    """A segment that is not what it should be."""


class Segment:
    """A segment that is mapped here. A page comes to the map when it is touched: members use few of the others' rows.

    Each member holds a lock on a byte of its own for as long as it lives and has not closed. Locks are of the process:
    the kernel takes them away at its death, and children that it forks do not have them.
    """

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self.path = path
        self.size = size
        self._descriptor = descriptor
        self._closing = threading.RLock()  # a number that was closed may mean another segment, with locks like these
        found = os.fstat(descriptor)
        self._identity = found.st_dev, found.st_ino
        _own.add(self._identity)
        try:
            self._map = mmap.mmap(descriptor, size)
        except BaseException:
            _own.discard(self._identity)
            raise
        self.show()
        self.address = self.bytes.data_ptr()

    @property
    def identity(self) -> str:
        """Equal for two processes that have the same segment open."""
        return "{}:{}".format(*self._identity)

    @property
    def offer(self) -> str:
        """For `borrow`, in another process, while this one has it open."""
        return f"{os.getpid()}/{self._descriptor}/{self.identity}"

    def show(self) -> None:
        self.bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        """All of it. The memory stays mapped for as long as a tensor shows it."""
        self.words = memoryview(self._map).cast("q")
        """The same as whole numbers of 8 bytes."""

    def hide(self) -> None:
        """Until `show`, only tensors that others hold show the memory."""
        del self.bytes, self.words

    def is_hidden(self) -> bool:
        """Whether no tensor shows it, after `hide`: they all keep the map."""
        return sys.getrefcount(self._map) == 2  # this object's reference, and that of the call

    def hold(self, member: int) -> None:
        """Show that this process is alive and takes part as `member`."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, member)

    def let_go(self, member: int) -> None:
        """The others see `member` as gone from now on. From any thread, also after `close`."""
        with self._closing, suppress(OSError):
            if self._descriptor >= 0:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, member)

    def is_held(self, member: int) -> bool:
        """Whether the process that takes part as `member`, not this one, is alive."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, member)
        except OSError:
            return True
        self.let_go(member)
        return False

    def let_go_of_all(self) -> None:
        """This process takes no part any longer."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def is_held_by_another(self) -> bool:
        """Whether any other process takes part; this one must not. Several may ask at the same time."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        self.let_go_of_all()
        return False

    def unlink(self) -> None:
        """Remove the name."""
        with suppress(FileNotFoundError):
            self.path.unlink()

    def close(self) -> None:
        """Close the file and with it give up the locks. The memory stays mapped while tensors show it."""
        with self._closing:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
                _own.discard(self._identity)


def create(run: str, size: int, *, look: Callable[[], None] = lambda: None) -> Segment:
    """A new segment of zeros, all of its memory allocated. OSError if there is not so much.

    `look` is called now and then, and may raise.
    """
    while True:
        path = FOLDER / f"{_begins(run)}{secrets.token_hex(8)}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)
        except FileExistsError:
            continue
        try:
            # A lock at once, for what nobody holds is swept away; if that was done already, the name is gone.
            fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, size)
            if not os.fstat(descriptor).st_nlink:
                os.close(descriptor)
                continue
            os.fchmod(descriptor, _MODE)
            # allocated now, not at the first touch, which could only end in SIGBUS
            _refuse_too_large(descriptor, size)
            for at in range(0, size, _ALLOCATED_AT_ONCE):
                look()
                os.posix_fallocate(descriptor, at, min(_ALLOCATED_AT_ONCE, size - at))
            return Segment(path, descriptor, size)
        except BaseException:
            with suppress(OSError):
                path.unlink()
            with suppress(OSError):
                os.close(descriptor)
            raise


def _refuse_too_large(descriptor: int, size: int) -> None:
    """OSError if there is not so much room. Before anything is taken: piece by piece it would be all that there is."""
    found = os.fstatvfs(descriptor)
    if found.f_blocks and size > found.f_bavail * found.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _begins(run: str) -> str:
    """How the names of a run's segments begin."""
    readable = re.sub(r"[^A-Za-z0-9_.]+", "-", run)[:48].strip("-") or "run"
    return f"{PREFIX}{readable}-"


def attach(name: str, size: int) -> Segment:
    """The segment that another member has created. `SegmentRefused` if it is not this user's alone."""
    if not name.startswith(PREFIX) or "/" in name:
        raise SegmentRefused(f"{name!r} is not the name of a segment")
    path = FOLDER / name
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise SegmentRefused(
                f"{path} belongs to user {found.st_uid}, not to user {os.geteuid()} who runs this worker: refused"
            )
        if stat.S_IMODE(found.st_mode) != _MODE:
            raise SegmentRefused(f"{path} has mode {stat.S_IMODE(found.st_mode):o}, not {_MODE:o}: refused")
        if found.st_size != size:
            raise SegmentRefused(f"{path} has {found.st_size} bytes where {size} were expected: refused")
        return Segment(path, descriptor, size)
    except BaseException:
        with suppress(OSError):
            os.close(descriptor)
        raise


def borrow(offer: str) -> Segment:
    """The segment that a process of this user has `offered`, though its name is gone. OSError if it cannot be had."""
    pid, number, identity = (int(part) if part.isdecimal() else part for part in offer.split("/"))
    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if f"{found.st_dev}:{found.st_ino}" != identity or found.st_uid != os.geteuid():
            raise SegmentRefused(f"what process {pid} offers is not the segment that it named: refused")
        return Segment(FOLDER / "", descriptor, found.st_size)
    except BaseException:
        with suppress(OSError):
            os.close(descriptor)
        raise


def sweep() -> list[str]:
    """Remove this user's segments that no process holds; their names."""
    with suppress(OSError):
        return [path.name for path in FOLDER.glob(f"{PREFIX}*") if _NAME.fullmatch(path.name) and _swept(path)]
    return []


def sweep_after_death(run: str) -> None:
    """Remove what a member of the run leaves that has just died while it made a segment.

    The kernel takes its locks away one after the other: those that the others look at may go a little earlier.
    """
    for _ in range(_SWEEPS):
        sweep()
        if not any(FOLDER.glob(f"{glob.escape(_begins(run))}*")):
            return
        time.sleep(_SWEEP_SECONDS)


def _swept(path: Path) -> bool:
    try:
        found = path.lstat()
        if (found.st_dev, found.st_ino) in _own or found.st_uid != os.geteuid():
            return False
        if not stat.S_ISREG(found.st_mode) or stat.S_IMODE(found.st_mode) != _MODE:
            return False
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
