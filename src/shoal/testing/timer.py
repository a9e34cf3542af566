"""A signal to this process at a moment, sent by the kernel whatever it is doing then: also while it is stopped."""

from __future__ import annotations

import ctypes
import time


class _When(ctypes.Structure):
    _fields_ = (("again", ctypes.c_long * 2), ("at", ctypes.c_long * 2))


class _Event(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("_", ctypes.c_int * 12),
    )


def signal_at(moment: float, number: int) -> None:
    """Have the kernel send signal `number` to this process at `moment` of `time.monotonic`.

    The timer ends with the process, and is not inherited by children. Raises OSError where none can be set.
    """
    libc, absolute, timer = ctypes.CDLL(None, use_errno=True), 1, ctypes.c_void_p()
    event = _Event(None, number, 0)
    when = _When((0, 0), (int(moment), int(moment % 1 * 1e9)))
    if libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) or libc.timer_settime(
        timer, absolute, ctypes.byref(when), None
    ):
        raise OSError(ctypes.get_errno(), "no timer could be set")
