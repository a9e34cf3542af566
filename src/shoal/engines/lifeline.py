"""A child that does not outlive its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
# Looked up here, not in the child: the loader's lock may be held by another thread at the moment of a fork.
_PRCTL = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None


def die_with_parent(parent: int) -> None:
    """Have the kernel SIGKILL this process when its parent ends, however that happens. Call first thing after fork.

    `parent` is `os.getpid()` of the parent, taken before the fork: if the parent has ended in between, this process
    ends here and now. Children forked later do not inherit this; a second call replaces the first.

    To the kernel the parent is the *thread* that forked: fork from one that lives as long as the child should, the
    main thread at best. Where there is no such call (not Linux) only the check for `parent` is made.
    """
    if _PRCTL is not None and _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
