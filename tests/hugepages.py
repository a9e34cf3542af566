"""Makes forks of a process cheap."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

HUGE, MADV_COLLAPSE = 2 << 20, 25


def ready_to_fork() -> None:
    """What this process holds by now is to be shared with forks of it, not copied to them.

    No pass of the garbage collector touches it any more. And it is moved into huge pages where Linux can do so (6.1 or
    newer), since a fork copies the table of pages: forking and ending a copy of 220 MB take 5 ms so, 15 ms without.
    """
    gc.collect()
    gc.freeze()
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, inode, *name = line.split()
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            for page in range(-(-start // HUGE) * HUGE, end // HUGE * HUGE, HUGE):
                madvise(page, HUGE, MADV_COLLAPSE)
