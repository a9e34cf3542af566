"""Runs programs, each in a fork of a process that has already imported what most of their time would go into.

    with Warm() as warm:
        done = warm.run("train.py", "--quick", folder=folder, environment=environment)

The process is this file as a script: one line of JSON on stdin for each program, one exit code on stdout when it ended.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn


class Warm:
    """Runs programs as `subprocess.run` does, one at a time, sooner. One thread."""

    def __init__(self, *modules: str, deadline: float = 90) -> None:
        """Has imported these modules besides. A program that takes longer than the deadline, in seconds, is killed, and
        the process with it."""
        self._deadline = deadline
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Warm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=self._deadline)

    def run(self, *arguments: str, folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """What `python` does with these arguments, a file's or `-m` and a module's, in a folder."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.TemporaryDirectory() as name:
            outputs = [Path(name, "stdout"), Path(name, "stderr")]
            program = {"arguments": arguments, "folder": str(folder), "environment": dict(environment)}
            program["outputs"] = [str(path) for path in outputs]
            print(json.dumps(program), file=self._process.stdin, flush=True)
            overdue = threading.Timer(self._deadline, self._kill)
            overdue.start()
            code = self._process.stdout.readline().strip()
            overdue.cancel()
            overdue.join()
            told = [path.read_text(encoding="utf-8", errors="replace") if path.exists() else "" for path in outputs]
        assert code, f"not done after {self._deadline} s\n{told[0]}\n{told[1]}"
        return subprocess.CompletedProcess(arguments, int(code), *told)

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def main() -> None:
    from hugepages import ready_to_fork

    import shoal.cli.main
    from shoal import Trainer
    from shoal.trainer.workers.start import import_for_training

    assert shoal.cli.main.app and Trainer is not None
    import_for_training()
    for module in sys.argv[1:]:
        import_module(module)
    ready_to_fork()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            leave_with(code_of(json.loads(line)))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def code_of(program: dict[str, Any]) -> int:
    """The exit code of a program, run here."""
    try:
        be(program)
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def leave_with(code: int) -> NoReturn:
    """Without taking all objects apart: that would first copy every page of them."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def be(program: dict[str, Any]) -> None:
    """What `python` would do with these arguments."""
    os.chdir(program["folder"])
    os.environ.clear()
    os.environ.update(program["environment"])
    create = os.O_WRONLY | os.O_CREAT
    for number, descriptor in enumerate(
        [os.open(os.devnull, os.O_RDONLY), *(os.open(path, create, 0o600) for path in program["outputs"])]
    ):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = os.fdopen(0)
    first, *rest = program["arguments"]
    if first == "-m":
        sys.argv, sys.path[0] = ["-m", *rest[1:]], program["folder"]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [first, *rest], str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main()
