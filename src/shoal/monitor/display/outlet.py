"""Where a display writes: what it is connected to, and writing that never ends a run."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, Protocol, TextIO

from shoal.core.events import AnyEvent

WORKER_STREAMS = ("out", "err")


class View(Protocol):
    """One way to show runs. Called by `Display` alone, on one thread; never raises for what it shows or writes to."""

    tells_all: bool
    """Whether warnings are passed on each time, rather than counted."""

    def event(self, event: AnyEvent) -> None: ...

    def tick(self) -> None: ...

    def say(self, text: str) -> None:
        """A line for a person."""

    def output(self, worker: int, stream: str, text: str) -> None: ...

    def close(self) -> None:
        """Leave the final state. Nothing is called afterwards."""


def put(stream: TextIO, text: str) -> None:
    """Write `text` now. A stream that has gone (a closed pipe, a terminal that hung up) is no reason to end a run."""
    with contextlib.suppress(OSError):
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except ValueError:
            # a closed file
            return
        stream.flush()


def pass_on(stream: str, text: str) -> None:
    """What a worker printed, exactly."""
    put(sys.stdout if stream == "out" else sys.stderr, text)


def is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def can_redraw(stream: Any) -> bool:
    """Whether `stream` is a terminal that can move its cursor."""
    return is_terminal(stream) and os.environ.get("TERM", "") not in ("dumb", "unknown")


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this process. IPython is not imported to find out."""
    find = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = find() if find is not None else None
    return getattr(shell, "kernel", None) is not None
