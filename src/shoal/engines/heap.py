"""Memory that a process has freed and will want again."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = (1 << 31) - 1
_LARGE = 1 << 28
"""Bytes from which a block has pages of its own, which go back when it is freed."""

_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
"""Each of them is a choice of the user's that this would undo."""


def _find() -> Callable[[int, int], int] | None:
    """glibc's; other libraries have none."""
    if sys.platform != "linux":
        return None
    found: Any = getattr(ctypes.CDLL(None), "mallopt", None)
    return found  # type: ignore[no-any-return]


# Looked up here, not in the child: the loader's lock may be held by another thread at the moment of a fork.
_MALLOPT = _find()


def keep_freed_memory(environment: Mapping[str, str] | None = None) -> None:
    """Have this process, and those that it forks, keep what they free for what they allocate next.

    A training step frees all of its activations and allocates them again in the next one. glibc gives what is free at
    the end of its heap back to the kernel, and the next step meets every page anew, for about 2 µs each: the CNN of
    PyTorch's examples took a fifth longer for it. A process then stays as large as it has once been.

    Does nothing where the user has given glibc settings of their own.
    """
    given = os.environ if environment is None else environment
    if _MALLOPT is None or "glibc.malloc." in given.get("GLIBC_TUNABLES", "") or any(name in given for name in _OWN):
        return
    _MALLOPT(_M_TRIM_THRESHOLD, _NEVER)
    _MALLOPT(_M_MMAP_THRESHOLD, _LARGE)
