"""Files that are open when a process is forked.

A child shares more with its parent than descriptors: there is one position in the file for both, and whoever reads
moves it for the other. Two workers that seek and read, each for an item of its own, then get each other's bytes. So a
child opens again what it has inherited for reading, at the same position and under the same number: all objects that
know the number go on as before, with what they have buffered.

That is done for all files that are open for nothing but reading, because libraries keep theirs where nobody finds
them. One that is written to keeps its common position: without it, processes would write over each other's lines.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

_TABLE = "/proc/self/fd"
_ACCESS = os.O_RDONLY | os.O_WRONLY | os.O_RDWR
_KEPT = getattr(os, "O_DIRECT", 0) | getattr(os, "O_NOATIME", 0)
_LAST_STANDARD = 2
"""Standard input, output and error belong to whoever started the program."""


@dataclass(frozen=True)
class OpenFile:
    """One that is open for reading alone, as it was at one moment."""

    descriptor: int
    identity: tuple[int, int]
    flags: int
    position: int


_failures: dict[str, str] = {}


def open_files() -> list[OpenFile]:
    """Those of this process, for `separate` in its child. Empty where the system does not tell (no /proc)."""
    found = []
    with suppress(OSError):
        for name in os.listdir(_TABLE):
            descriptor = int(name)
            # the one that the listing itself had open is closed by now
            with suppress(OSError):
                status = os.fstat(descriptor)
                if descriptor <= _LAST_STANDARD or not stat.S_ISREG(status.st_mode):
                    continue
                flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
                if flags & _ACCESS == os.O_RDONLY:
                    position = os.lseek(descriptor, 0, os.SEEK_CUR)
                    found.append(OpenFile(descriptor, (status.st_dev, status.st_ino), flags, position))
    return found


def separate(files: Iterable[OpenFile]) -> None:
    """In a child just forked: have positions of its own in these. Those that cannot be opened again stay shared."""
    for file in files:
        if not _is_still(file):
            continue
        table_entry = f"{_TABLE}/{file.descriptor}"
        try:
            fresh = os.open(table_entry, os.O_RDONLY | os.O_CLOEXEC | file.flags & _KEPT)
        except OSError as error:
            with suppress(OSError):
                _failures[os.readlink(table_entry)] = error.strerror or str(error)
            continue
        os.lseek(fresh, file.position, os.SEEK_SET)
        os.dup2(fresh, file.descriptor, inheritable=os.get_inheritable(file.descriptor))
        os.close(fresh)


def take_failures() -> dict[str, str]:
    """The paths of files that this process shares with its parent, and why. Each is told of once."""
    taken = dict(_failures)
    _failures.clear()
    return taken


def why_shared(descriptor: int) -> str:
    """Why forked processes have one position in what they read here; empty if each has its own, or none reads."""
    mode, access = os.fstat(descriptor).st_mode, fcntl.fcntl(descriptor, fcntl.F_GETFL) & _ACCESS
    if descriptor <= _LAST_STANDARD or access == os.O_WRONLY or stat.S_ISCHR(mode):
        return ""
    if not stat.S_ISREG(mode):
        return "it is no regular file"
    if access == os.O_RDWR:
        return "it is open for writing too"
    return "" if os.path.isdir(_TABLE) else "this system has no /proc to open it again"


def _is_still(file: OpenFile) -> bool:
    """Whether it is what it was: another thread may have closed it before the fork, and opened another one."""
    try:
        status = os.fstat(file.descriptor)
    except OSError:
        return False
    return (status.st_dev, status.st_ino) == file.identity


def let_go_of_files(*kept: int) -> None:
    """In a process just forked: have nothing open but these and the standard streams.

    The numbers stay taken, by nothing: an object of the parent that closes its own must not close another one's.
    """
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    with suppress(OSError):  # no /proc
        for number in [int(name) for name in os.listdir("/proc/self/fd")]:
            if number > 2 and number not in (nothing, *kept):
                os.dup2(nothing, number, inheritable=False)
