"""A child process with a hard time bound, of which nothing stays: for what may crash or hang.

What it writes goes to files, not pipes: neither can a child fill one and wait, nor can a grandchild hold one open.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_MOST_READ = 64 << 10
_POLL_SECONDS = 0.05
_DYING_SECONDS = 10.0
"""How long the kernel may take to end what was killed: it has to give back its memory first."""


@dataclass(frozen=True)
class Ran:
    """How a child ended."""

    code: int | None
    """Its exit code, negative for a signal; None if it was ended because its time was up."""
    output: str
    """The end of what it wrote to stdout."""
    errors: str
    """The end of what it wrote to stderr."""
    seconds: float

    def how(self) -> str:
        """In words."""
        if self.code is None:
            return f"did not end within {self.seconds:.0f} s"
        if self.code >= 0:
            return f"left with exit code {self.code}"
        return f"was killed by {signal.Signals(-self.code).name}"

    def last_lines(self, most: int = 6) -> list[str]:
        """The last lines that it wrote to stderr, or to stdout if there are none."""
        lines = [line.rstrip() for line in (self.errors.strip() or self.output.strip()).splitlines() if line.strip()]
        return [line[:300] for line in lines[-most:]]


def run_child(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    seconds: float,
    folder: Path | None = None,
    watch: Callable[[str], None] | None = None,
) -> Ran:
    """Run `command` in a process group of its own; after `seconds`, or if this raises, the whole group is killed.

    `watch` gets the end of stderr from time to time. Call it from the main thread: a child may tie itself to that.
    Raises OSError if the command cannot be started.
    """
    begun = time.monotonic()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            list(command),
            env=dict(env),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            while (code := process.poll()) is None and time.monotonic() - begun < seconds:
                if watch is not None:
                    watch(_end_of(errors))
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)
        finally:
            _end_group(process)
        return Ran(code, _end_of(output), _end_of(errors), time.monotonic() - begun)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Whatever lives of the child's group, also when the child itself has ended: nobody else has that number yet."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        # the child's own children are not ours to wait for, only to look at
        deadline = time.monotonic() + _DYING_SECONDS
        while living_in_group(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
    process.wait()


def living_in_group(group: int) -> list[int]:
    """The processes of a process group. Those that have ended do not count, though nobody may have asked for them."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with suppress(OSError):
            # The second field is a name in parentheses, which may hold anything; state, parent and group come next.
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if len(fields) > 2 and fields[2] == str(group) and fields[0] not in ("Z", "X"):
                found.append(int(entry.name))
    return found


def _end_of(file: IO[bytes]) -> str:
    size = os.fstat(file.fileno()).st_size
    # not by seek: the child writes at the same position of the same open file
    return os.pread(file.fileno(), _MOST_READ, max(0, size - _MOST_READ)).decode(errors="replace")
