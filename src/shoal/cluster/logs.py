"""What workers print: into files of the run's folder, and from there to the screen.

Files and not pipes: a worker that prints never waits for whoever reads, and what it said last is there after any end.
"""

from __future__ import annotations

import faulthandler
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.core.seats import name_of

OUT, ERR = "out", "err"
EXIT_FAILED = 1
"""Exit code of a process of a run that has told its supervisor why it failed."""
_MARK = "=== shoal: the traceback of the error that ended"
_READ_AT_ONCE = 1 << 20
_LONGEST_LINE = 1 << 16


def log_path(folder: Path, worker: int, stream: str) -> Path:
    return folder / f"{name_of(worker).replace(' ', '-')}.{stream}"


def begin_log(folder: Path | None, worker: int) -> None:
    """In a worker: stdout and stderr go to its files from now on, also those of libraries and loader processes.

    Where the files cannot be written (a full disk), they stay what they were.
    """
    if folder is None:
        return
    with suppress(OSError):
        for number, stream in ((1, OUT), (2, ERR)):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            file = os.open(log_path(folder, worker, stream), flags, 0o644)
            os.dup2(file, number)
            os.close(file)
        # New ones: those of a notebook lead elsewhere, and these may hold what the parent has not written yet.
        sys.stdout, sys.stderr = _text_on(1), _text_on(2)
        faulthandler.enable(2)


def _text_on(descriptor: int) -> io.TextIOWrapper:
    raw = open(descriptor, "wb", buffering=0, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True, write_through=True
    )


def log_failure(worker: int, text: str) -> None:
    """In a worker that logs: keep its whole traceback in the log. It is not repeated on the screen."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{_MARK} {name_of(worker)} ===\n{text}\n")
        sys.stderr.flush()


@dataclass
class _File:
    worker: int
    stream: str
    path: Path
    descriptor: int
    pending: bytes = b""
    ended: bool = False


class Tail:
    """Follows the workers' files in the supervisor. A context manager; leaving it gives out what is left."""

    def __init__(self, folder: Path | None, workers: int, output: Callable[[int, str, str], None]) -> None:
        """Makes the files; only what comes after that is given out. Without a folder there is nothing to follow."""
        self.folder = folder
        self._output = output
        self._files: list[_File] = []
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for worker in range(workers):
                self._open(folder, worker)
        except OSError:
            # the run's folder will be found full or gone by whoever needs it
            self.folder = None

    def __enter__(self) -> Tail:
        return self

    def __exit__(self, *error: object) -> None:
        while self.look():
            pass
        for file in self._files:
            self._give(file, file.pending)
            os.close(file.descriptor)
            with suppress(OSError):
                if not file.path.stat().st_size:
                    file.path.unlink()
        self._files = []
        if self.folder is not None:
            with suppress(OSError):
                self.folder.rmdir()

    def follow(self, worker: int) -> None:
        """A process is about to be started for this worker: the first one, or one that writes on into the same files.

        Where its files cannot be opened, what it prints is not followed.
        """
        if self.folder is None:
            return
        while self.look():
            pass
        known = [file for file in self._files if file.worker == worker]
        for file in known:
            file.ended = False
        if not known:
            with suppress(OSError):
                self._open(self.folder, worker)

    def _open(self, folder: Path, worker: int) -> None:
        for stream in (OUT, ERR):
            path = log_path(folder, worker, stream)
            descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.lseek(descriptor, 0, os.SEEK_END)
            self._files.append(_File(worker, stream, path, descriptor))

    def look(self) -> bool:
        """Give out what has come, a part of it if it is much; whether there was anything."""
        found = False
        for file in self._files:
            data = b""
            with suppress(OSError):
                data = os.read(file.descriptor, _READ_AT_ONCE)
            if data:
                found = True
                self._take(file, file.pending + data)
        return found

    def _take(self, file: _File, data: bytes) -> None:
        # a progress bar ends its lines with a carriage return
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end and len(data) > _LONGEST_LINE:
            end = len(data)
        file.pending = data[end:]
        self._give(file, data[:end])

    def _give(self, file: _File, data: bytes) -> None:
        text = data.decode(errors="replace")
        if file.ended or not text:
            return
        before, mark, _ = text.partition(_MARK)
        file.ended = bool(mark)
        if before:
            self._output(file.worker, file.stream, before)


def flush_output() -> None:
    """What user code printed: the process may be killed, not left to end by itself."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
