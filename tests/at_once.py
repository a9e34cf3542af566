"""Runs all tests, in two processes at once: most of them wait for others to start, which leaves half of a core idle.

    python tests/at_once.py [options of pytest]

What the first one prints is seen at once, what the second prints when it is done. The exit code is that of one which
failed, or 0. Which process runs a test changes nothing else: each has its own home for runs, and looks for what its own
tests leave behind. Ctrl-C and SIGTERM interrupt both, and wait until they have cleaned up.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent
FIRST = ("trainer",)
"""Folders that take about half of the time."""


def main() -> int:
    first = [HERE / name for name in FIRST]
    tests = {path.parent if path.parent != HERE else path for path in HERE.rglob("test_*.py")}
    second = sorted(path for path in tests if not any(path.is_relative_to(folder) for folder in first))
    command = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    running: list[subprocess.Popen[bytes]] = []

    def interrupt(*_: object) -> None:
        for half in running:
            with suppress(ProcessLookupError):
                half.send_signal(signal.SIGINT)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    with tempfile.TemporaryFile() as output:
        # in sessions of their own: a terminal's Ctrl-C reaches each of them once, from here
        running.append(subprocess.Popen([*command, *map(str, first)], start_new_session=True))
        running.append(
            subprocess.Popen(
                [*command, *map(str, second)], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        )
        code = running[0].wait()
        if running[1].poll() is None:
            print("Waiting for the other half", flush=True)
        code = running[1].wait() or code
        output.seek(0)
        sys.stdout.buffer.write(output.read())
        sys.stdout.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())
