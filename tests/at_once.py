"""Runs all tests, in two processes at once: most of them wait for others to start, which leaves half of a core idle.

    python tests/at_once.py [options of pytest]

What the first one prints is seen at once, what the second prints when it is done. The exit code is that of one which
failed, or 0. Which process runs a test changes nothing else: each has its own home for runs, and looks for what its own
tests leave behind.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
FIRST = ("trainer", "elastic", "syncs")
"""Folders that take about half of the time."""


def main() -> int:
    first = [HERE / name for name in FIRST]
    tests = {path.parent if path.parent != HERE else path for path in HERE.rglob("test_*.py")}
    second = sorted(path for path in tests if not any(path.is_relative_to(folder) for folder in first))
    command = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    with tempfile.TemporaryFile() as output:
        other = subprocess.Popen([*command, *map(str, second)], stdout=output, stderr=subprocess.STDOUT)
        try:
            code = subprocess.run([*command, *map(str, first)], check=False).returncode
            if other.poll() is None:
                print("Waiting for the other half", flush=True)
            code = other.wait() or code
        finally:
            if other.poll() is None:
                other.terminate()
                other.wait()
            output.seek(0)
            sys.stdout.flush()
            sys.stdout.buffer.write(output.read())
            sys.stdout.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())
