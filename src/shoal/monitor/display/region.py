"""The last lines of a terminal, redrawn in place, with whatever is printed meanwhile above them. Starts no thread."""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TextIO

from shoal.monitor.display.outlet import is_terminal, put

_HIDE, _SHOW = "\x1b[?25l", "\x1b[?25h"
_ERASE_LINE, _ERASE_BELOW = "\x1b[K", "\x1b[J"
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])|[\x00-\x08\x0b-\x1f\x7f]")


class Line(NamedTuple):
    """A line as it is written, with its colours, and how many columns it takes."""

    text: str
    width: int


class Region:
    """Between `open` and `close`, `stream` ends with the lines drawn last and the cursor is hidden.

    `print`, `logging` and warnings of this process that go to a terminal appear above, also from other threads. A
    process that is forked meanwhile writes to its own streams as if there were no region.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = beneath(stream)
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._lines: list[Line] = []
        self._redirected: list[_Above] = []
        self.is_open = False

    @property
    def is_here(self) -> bool:
        """Whether there is something to redraw, in this process."""
        return self.is_open and os.getpid() == self._pid

    def size(self) -> tuple[int, int]:
        """Columns and rows that lines may take now."""
        try:
            columns, rows = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            columns, rows = 80, 24
        # the last column is left free: some terminals move on when it is written, some do not
        return max(10, (columns or 80) - 1), max(1, (rows or 24) - 1)

    def open(self) -> None:
        self.is_open = True
        atexit.register(self.close)
        put(self._stream, _HIDE)
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if is_terminal(stream) and not isinstance(stream, _Above):
                self._redirected.append(_Above(stream, name, self))

    def draw(self, lines: list[Line]) -> None:
        """Replace the lines. None may be wider than `size()` says, and no more may be given."""
        if not self.is_here:
            return
        with self._lock:
            start = self._to_start()
            self._lines = lines
            put(self._stream, start + self._frame())

    def above(self, target: TextIO, text: str) -> None:
        """Print whole lines above. `target` is another name for the terminal, or the same."""
        with self._lock:
            if target is self._stream:
                put(target, f"{self._to_start()}{_ERASE_BELOW}{text}{self._frame()}")
                return
            put(self._stream, self._to_start() + _ERASE_BELOW)
            put(target, text)
            put(self._stream, self._frame())

    def close(self, *, keep: bool = True) -> None:
        """Leave the lines as they are, or erase them; the terminal is as it was before. May be called again."""
        if not self.is_here:
            return
        with self._lock:
            end = "\n" if keep and self._lines else self._to_start() + _ERASE_BELOW
            self.is_open = False
            put(self._stream, end + _SHOW)
            for redirected in self._redirected:
                redirected.restore()
        atexit.unregister(self.close)

    def _to_start(self) -> str:
        """Moves the cursor from the end of the lines to their start."""
        columns = self.size()[0] + 1
        # a terminal that was made narrower has broken the wider lines
        rows = sum(max(1, -(-line.width // columns)) for line in self._lines)
        broken = _ERASE_BELOW if rows > len(self._lines) else ""
        return (f"\r\x1b[{rows - 1}A" if rows > 1 else "\r") + broken

    def _frame(self) -> str:
        return f"{_ERASE_LINE}\n".join(line.text for line in self._lines) + _ERASE_LINE + _ERASE_BELOW


class _Above:
    """Stands for a standard stream and prints whole lines above the region; all else is the stream's own."""

    def __init__(self, stream: TextIO, name: str, region: Region) -> None:
        self._stream = stream
        self._name = name
        self._region = region
        self._begun = ""
        put(stream, "")
        setattr(sys, name, self)
        self._handlers = [handler for handler in _log_handlers() if handler.stream is stream]
        for handler in self._handlers:
            handler.setStream(self)

    def write(self, text: str) -> int:
        if not self._region.is_here:
            return self._stream.write(text)
        with self._region._lock:
            whole, newline, begun = (self._begun + text).rpartition("\n")
            # of a line that is written over and over, only the last state is kept
            self._begun = begun[begun.rfind("\r", 0, -1) + 1 :]
            if newline:
                self._region.above(self._stream, tamed(whole + newline))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def restore(self) -> None:
        """The stream itself again; what was begun and had no end of line yet is written to it."""
        for handler in self._handlers:
            if handler.stream is self:
                handler.setStream(self._stream)
        if getattr(sys, self._name) is self:
            setattr(sys, self._name, self._stream)
        begun, self._begun = self._begun, ""
        if begun:
            put(self._stream, begun)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def beneath(stream: Any) -> TextIO:
    """The stream that is really written to."""
    while isinstance(stream, _Above):
        stream = stream._stream
    result: TextIO = stream
    return result


def is_in_use() -> bool:
    """Whether a region is open in this process."""
    return any(isinstance(stream, _Above) and stream._region.is_here for stream in (sys.stdout, sys.stderr))


def tamed(text: str, prefix: str = "") -> str:
    """`text` as whole lines, in its colours but without what would move the cursor."""
    return "".join(f"{prefix}{_tamed_line(line)}\n" for line in text.removesuffix("\n").split("\n"))


def _tamed_line(line: str) -> str:
    line = line.rstrip("\r").rpartition("\r")[2]
    plain = _ESCAPE.sub(lambda found: found[0] if _COLOUR.fullmatch(found[0]) else "", line)
    return f"{plain}\x1b[0m" if "\x1b" in plain else plain


def _log_handlers() -> Iterator[logging.StreamHandler[Any]]:
    """Those that write to a stream; they remember the stream they were made with."""
    known = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in known:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler):
                yield handler
