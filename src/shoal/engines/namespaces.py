"""Namespaces of the Linux kernel: leaving those of this process, and joining those of another.

Python 3.11 has no names for these calls. They change the calling thread alone, so they are for
processes with one thread.
"""

from __future__ import annotations

import ctypes
import os
import sys

NET = 0x40000000
UTS = 0x04000000
MOUNT = 0x00020000
_NAMES = {"net": NET, "uts": UTS, "mnt": MOUNT}

_MS_BIND, _MS_REC, _MS_SLAVE = 0x1000, 0x4000, 0x80000
_MS_NOSUID, _MS_NODEV = 0x2, 0x4

# Looked up here, not in a child: the loader's lock may be held by another thread at the moment of a fork.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def unshare(kinds: int) -> None:
    """Leave the namespaces of `kinds` for new ones. Raises OSError, with the reason of the kernel."""
    _call("unshare", ctypes.c_int(kinds))


def join(pid: int, names: tuple[str, ...] = ("net", "uts", "mnt")) -> None:
    """Join the named namespaces of process `pid`. Joining "mnt" makes `/` the working directory.

    Raises OSError: the process is gone, or this one is not root, or has more than one thread (for "mnt").
    """
    # all opened before the first is joined: /proc is looked up in the file tree that is left
    handles: list[tuple[int, str]] = []
    try:
        for name in names:
            handles.append((os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC), name))
        for handle, name in handles:
            join_handle(handle, name)
    finally:
        for handle, _ in handles:
            os.close(handle)


def join_handle(handle: int, name: str) -> None:
    """Join the namespace that the descriptor `handle` is open on."""
    _call("setns", ctypes.c_int(handle), ctypes.c_int(_NAMES[name]))


def keep_mounts_here() -> None:
    """Mounts made from now on stay in this namespace; those made outside still come in."""
    _mount(None, "/", None, _MS_REC | _MS_SLAVE)


def mount_tmpfs(where: str) -> None:
    """Put an empty file system in memory, with the limits of a common /dev/shm, over the folder `where`."""
    _mount("tmpfs", where, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777")


def bind(what: str, where: str) -> None:
    """Have the file `what` seen at `where`, over the file that is there."""
    _mount(what, where, None, _MS_BIND)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    source_, target_, kind_, data_ = (ctypes.c_char_p(word) for word in words)
    _call("mount", source_, target_, kind_, ctypes.c_ulong(flags), data_)


def _call(name: str, *arguments: object) -> None:
    if _LIBC is None:
        raise OSError(f"{name}: {sys.platform} has no namespaces")
    if getattr(_LIBC, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
