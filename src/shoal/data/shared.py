"""Files, sockets and connections of a data set that all processes share if they were open before the fork."""

from __future__ import annotations

import io
import socket
import sys
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

from shoal.engines.openfiles import why_shared

_FILES = (io.FileIO, io.BufferedReader, io.BufferedRandom, io.TextIOWrapper)
_OF_A_CONNECTION = ("cursor", "commit", "rollback", "close")
"""What every connection to a database has (PEP 249)."""

_met: WeakValueDictionary[int, Any] = WeakValueDictionary()
_kept: dict[int, Any] = {}
"""Those that no weak reference can be made to."""


def is_new(thing: Any) -> bool:
    """Whether this process is asked about this object for the first time."""
    if _met.get(id(thing)) is thing or id(thing) in _kept:
        return False
    try:
        _met[id(thing)] = thing
    except TypeError:
        _kept[id(thing)] = thing
    return True


def what_is_shared(thing: Any) -> str:
    """What a person should know of this object, to be read after its name; empty for nearly all."""
    kind = type(thing)
    if issubclass(kind, _FILES):
        why = _why_shared(thing)
        return why and (
            f"is a file in which all processes that load data have one position, because {why}: one may read "
            "what another has looked for; open a regular file for reading only (mode 'rb')"
        )
    if _is_stream(thing) or _is_pipe(thing) or _is_connection(kind):
        return (
            f"is a {kind.__module__}.{kind.__qualname__}, which processes share if it was made before they were "
            "forked: one may get the answer that another waits for; make it in __getitem__, again whenever "
            "os.getpid() has changed"
        )
    return ""


def _why_shared(file: Any) -> str:
    if any(file is stream for stream in (sys.stdin, sys.stdout, sys.stderr)):
        return ""
    # one that is closed, or has no descriptor
    with suppress(OSError, ValueError):
        return why_shared(file.fileno())
    return ""


def _is_stream(thing: Any) -> bool:
    return (
        issubclass(type(thing), socket.socket) and socket.socket.fileno(thing) >= 0 and thing.type == socket.SOCK_STREAM
    )


def _is_pipe(thing: Any) -> bool:
    """An end of a `multiprocessing.Pipe` that can be read from."""
    pipes: Any = sys.modules.get("multiprocessing.connection")  # not imported for this: then there is none
    return pipes is not None and issubclass(type(thing), pipes.Connection) and not thing.closed and thing.readable


def _is_connection(kind: type) -> bool:
    return all(any(name in vars(base) for base in kind.__mro__) for name in _OF_A_CONNECTION)
