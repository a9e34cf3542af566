"""Where another process is: its Python stack, which it writes when a signal asks for it.

`faulthandler` writes it in the signal's handler: that needs no thread of the process, nor the interpreter's lock, which
a call into C may hold for ever. And no ptrace, which is often forbidden.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
from contextlib import suppress
from pathlib import Path

from shoal.core.traces import dumped_stack
from shoal.wire.link import milliseconds

SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
"""One that neither Python nor people use, where there is such. Elsewhere nobody is asked: there is no /proc."""
_FIRST_SECONDS = 0.5
"""For the first line to come. From a process that can take signals it does within a millisecond."""
_NEXT_SECONDS = 0.05
_MOST_BYTES = 1 << 16
_AT_ONCE = os.O_NONBLOCK | os.O_CLOEXEC


class Stacks:
    """Made by who asks, before it forks those that may be asked. `answer` is for these; their children answer, too.

    With `path`, a pipe of that name: those that are not forked answer there (`answer_at`).
    """

    def __init__(self, path: Path | None = None) -> None:
        if path is None:
            self._read, self._write = os.pipe()
        else:
            os.mkfifo(path, 0o600)
            self._read, self._write = (os.open(path, end | _AT_ONCE) for end in (os.O_RDONLY, os.O_WRONLY))
        for end in (self._read, self._write):
            os.set_blocking(end, False)  # what does not fit is lost: the handler of a signal must not wait

    def answer(self) -> None:
        """In a process that may be asked: from now on, it answers."""
        _answer(self._write)

    @staticmethod
    def answer_at(path: Path) -> None:
        """The same, in a process that was not forked from the one that asks."""
        _answer(os.open(path, os.O_WRONLY | _AT_ONCE))

    def ask(self, pid: int) -> str:
        """The stack of the main thread of a process, innermost last; "" if it cannot be had. Waits half a second."""
        if not _answers(pid):
            return ""
        self._receive(0.0)  # a late answer to an earlier question
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, SIGNAL)
            return dumped_stack(self._receive(_FIRST_SECONDS))
        return ""

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)

    def _receive(self, seconds: float) -> str:
        poller = select.poll()
        poller.register(self._read, select.POLLIN)
        data = b""
        while len(data) < _MOST_BYTES and poller.poll(milliseconds(seconds)):
            data += os.read(self._read, _MOST_BYTES)
            seconds = _NEXT_SECONDS  # it comes in many small pieces
        return data.decode(errors="replace")


def _answer(descriptor: int) -> None:
    if SIGNAL != signal.SIGUSR2:
        faulthandler.register(SIGNAL, file=descriptor, all_threads=False)


def _answers(pid: int) -> bool:
    """Whether the main thread of a process takes the signal: it would end one that does not know it."""
    try:
        lines = Path(f"/proc/{pid}/task/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return False
    masks = {name: text for name, _, text in (line.partition(":") for line in lines)}
    bit = 1 << (SIGNAL - 1)
    return bool(int(masks.get("SigCgt", "0"), 16) & bit) and not int(masks.get("SigBlk", "0"), 16) & bit
