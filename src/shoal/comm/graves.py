"""Gloo's process groups that broke, until they can be destroyed.

Gloo's destructor waits for operations under way, with the interpreter's lock held, and one that overlooked a death
would keep it waiting for good. So a broken group is kept while one of its works is not complete. Afterwards it is kept
a little longer: the thread that has completed a work still holds it for a moment, and to destroy the tensors of a work
takes the interpreter's lock. Here they are destroyed, not there.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterable
from typing import Any

_REST_SECONDS = 0.05

_kept: list[_Grave] = []
_lock = threading.Lock()


class _Grave:
    def __init__(self, backend: Any, works: Iterable[Any]) -> None:
        self._backend = backend
        self._works = list(works)
        self._complete_since: float | None = None
        # one that is still kept when the interpreter ends is never destroyed
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))

    def is_at_rest(self) -> bool:
        """Whether all works have been complete for a while."""
        if self._complete_since is None and all(work.is_completed() for work in self._works):
            self._complete_since = time.monotonic()
        return self._complete_since is not None and time.monotonic() - self._complete_since >= _REST_SECONDS

    def open(self) -> Any:
        """Give up the works, and hand over what is to be destroyed."""
        self._works = []
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._backend))
        return self._backend


def keep_until_complete(backend: Any, works: Iterable[Any]) -> None:
    """`backend` has broken, and these of its works may not have ended. Whoever calls gives up its own reference."""
    if backend is not None:
        with _lock:
            _kept.append(_Grave(backend, works))


def bury() -> int:
    """Destroy what has come to rest; how many broken groups are still kept. Called when a group is made, or closed."""
    with _lock:
        rested = [grave for grave in _kept if grave.is_at_rest()]
        _kept[:] = [grave for grave in _kept if grave not in rested]
        left = len(_kept)
    for grave in rested:
        grave.open()
    return left
