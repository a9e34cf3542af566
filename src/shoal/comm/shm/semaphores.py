"""Counting semaphores in shared memory: how processes of one host tell each other that memory is ready.

They are POSIX semaphores that several processes share (`sem_init` with `pshared`), called in the C library. What they
are relied on for is what POSIX promises of `sem_post` and of a successful `sem_wait` (Base Definitions 4.12, memory
synchronization): what a process wrote before it posted is seen by the process that the post let through, on any
processor, however weakly it orders memory. No flag is ever read or written by plain loads and stores.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import time
from collections.abc import Callable
from functools import cache

SLOT = 64
"""Bytes from one semaphore to the next: a cache line each, and room for the C library's `sem_t` (32 bytes or less)."""

SLICE = 0.005
"""Seconds to sleep at most before looking whether the wait still makes sense."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Functions:
    def __init__(self) -> None:
        # calls that return at once keep the interpreter lock; the one that sleeps lets go of it
        quick, slow = ctypes.PyDLL(None, use_errno=True), ctypes.CDLL(None, use_errno=True)
        self.init = quick.sem_init
        self.init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
        self.post = quick.sem_post
        self.post.argtypes = [ctypes.c_void_p]
        self.trywait = quick.sem_trywait
        self.trywait.argtypes = [ctypes.c_void_p]
        # by a clock that nobody sets, where the C library has that (glibc since 2.30)
        self.monotonic = hasattr(slow, "sem_clockwait")
        self.sleep = slow.sem_clockwait if self.monotonic else slow.sem_timedwait
        clock = [ctypes.c_int] if self.monotonic else []
        self.sleep.argtypes = [ctypes.c_void_p, *clock, ctypes.POINTER(_Timespec)]


@cache
def _functions() -> _Functions:
    return _Functions()


def why_not() -> str | None:
    """Why semaphores cannot be shared on this system; None where they can."""
    if not sys.platform.startswith("linux"):
        return f"processes cannot share semaphores on {sys.platform}"
    try:
        functions = _functions()
    except (OSError, AttributeError) as error:
        return f"the C library has no semaphores ({error})"
    slot = ctypes.create_string_buffer(SLOT)
    if functions.init(ctypes.addressof(slot), 1, 0) != 0:
        return f"the C library refuses semaphores for several processes ({os.strerror(ctypes.get_errno())})"
    return None


def create(address: int) -> None:
    """Make a semaphore with the value 0 of the `SLOT` bytes at `address`."""
    if _functions().init(address, 1, 0) != 0:
        raise OSError(ctypes.get_errno(), "sem_init")


def poster() -> Callable[[int], int]:
    """A function that adds one to the semaphore at an address."""
    post: Callable[[int], int] = _functions().post
    return post


def taker() -> Callable[[int], int]:
    """A function that takes one from the semaphore at an address and returns 0, or not 0 if it has none."""
    trywait: Callable[[int], int] = _functions().trywait
    return trywait


def sleep_for(address: int, seconds: float = SLICE) -> bool:
    """Take one from the semaphore at `address`, waiting for it so long; whether there was one.

    Returns early, with False, when a signal has been handled.
    """
    functions = _functions()
    clock = time.CLOCK_MONOTONIC if functions.monotonic else time.CLOCK_REALTIME
    until = time.clock_gettime_ns(clock) + int(seconds * 1e9)
    moment = _Timespec(until // 1_000_000_000, until % 1_000_000_000)
    given = (clock,) if functions.monotonic else ()
    if functions.sleep(address, *given, ctypes.byref(moment)) == 0:
        return True
    if ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
        raise OSError(ctypes.get_errno(), "sem_timedwait")
    return False
