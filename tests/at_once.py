"""Runs all tests, a file at a time in each of a few processes: most tests wait for others, which leaves cores idle.

    python tests/at_once.py [options of pytest] [files and folders]

The processes take files from one queue, those that take longest first, so they end together. What they report is
printed here, a line per file, as pytest prints it: failures in full at the end, then the slowest tests if asked for,
then the counts. The exit code is pytest's; a process that dies while it runs tests is a failure of the test it was at.
Ctrl-C and SIGTERM interrupt all of them, and wait until they have cleaned up.

Why not pytest-xdist: each of its processes collects every test (20 s of a core and 270 MB, which every fork of a test
copies), has a thread of its own beside the tests, and does not wait for their clean-up when interrupted.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import IO, Any

import pytest

Message = dict[str, Any]
"""What a process tells of the files that it runs: one key says what it is. See one_by_one.py."""

HERE = Path(__file__).parent
PROCESSES = 2
TOGETHER = ("store",)
"""Folders whose files share a fixture that takes long, a server."""
LONG = (
    "test_docs.py",
    "trainer/test_server_deaths.py",
    "trainer/test_parity.py",
    "trainer/test_server.py",
    "trainer/test_launch.py",
    "comm/test_conformance.py",
    "cli/test_run.py",
    "trainer/test_elastic.py",
    "trainer/test_codecs.py",
    "trainer/test_resume.py",
    "trainer/test_spmd.py",
    "trainer/test_server_tables.py",
    "trainer/test_signals.py",
    "trainer/test_bad_input.py",
    "trainer/test_server_scale.py",
    "trainer/test_edges.py",
    "comm/test_relay.py",
    "engines/test_local_engine.py",
    "syncs/server/test_server_optimizers.py",
    "syncs/server/test_clerk_scale.py",
    "trainer/test_chaos.py",
    "data/test_loader.py",
    "comm/test_choose.py",
    "syncs/server/test_shard.py",
    "trainer/test_draws.py",
    "store",
)
"""What takes longest, the longest first. The others follow by their size."""


def main(arguments: list[str]) -> int:
    # what conftest.py is for is done where tests run; a percentage would need the number of all tests before the first
    here = ["--noconftest", "-o", "console_output_style=classic"]
    return int(pytest.main([*here, *arguments], plugins=[AtOnce(arguments)]))


def units(paths: list[Path]) -> list[list[str]]:
    """The files there, as lists that one process each runs, the longest first."""
    files = [file for path in paths for file in (path.rglob("test_*.py") if path.is_dir() else [path])]
    by_name: dict[str, list[str]] = {}
    for path in sorted(files, key=lambda path: -path.stat().st_size):
        name = path.relative_to(HERE).as_posix() if path.is_relative_to(HERE) else str(path)
        folder = name.partition("/")[0]
        by_name.setdefault(folder if folder in TOGETHER else name, []).append(str(path))
    return [by_name[name] for name in sorted(by_name, key=lambda name: LONG.index(name) if name in LONG else len(LONG))]


class AtOnce:
    """The plugin of a pytest that runs no tests itself: it hands files out and reports what comes back."""

    def __init__(self, options: list[str]) -> None:
        self._options = options

    def pytest_collection(self) -> bool:
        return True  # by those who run them

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        terminal: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        terminal.showfspath = True
        waiting: SimpleQueue[list[str]] = SimpleQueue()
        for unit in units([session.config.invocation_params.dir / name for name in session.config.args]):
            waiting.put(unit)
        living = min(PROCESSES, waiting.qsize())
        heard: SimpleQueue[list[Message] | None] = SimpleQueue()  # None: a process has ended
        with ExitStack() as stack:
            stack.enter_context(sigterm_interrupts())
            for _ in range(living):
                output = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
                stack.enter_context(Runner(self._options, output, waiting, heard))
            while living:
                messages = heard.get()
                living -= messages is None
                for message in messages or ():
                    pass_on(session, message)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
        return True


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def pass_on(session: pytest.Session, message: Message) -> None:
    """Do with what a process told what pytest would have done with it there."""
    hook, config = session.config.hook, session.config
    match message:
        case {"started": nodeid, "location": location}:
            hook.pytest_runtest_logstart(nodeid=nodeid, location=tuple(location))
        case {"report": data}:
            made = hook.pytest_report_from_serializable(config=config, data=data)
            if isinstance(made, pytest.CollectReport):
                hook.pytest_collectreport(report=made)
            else:
                hook.pytest_runtest_logreport(report=made)
        case {"warning": [text, file, line, when, nodeid]}:
            warned = warnings.WarningMessage(text, UserWarning, file, line)
            told = {"warning_message": warned, "when": when, "nodeid": nodeid, "location": (file, line, "")}
            hook.pytest_warning_recorded.call_historic(kwargs=told)
        case {"collected": collected, "deselected": deselected}:
            session.testscollected += collected
            hook.pytest_deselected(items=[SimpleNamespace() for _ in range(deselected)])  # they are only counted
        case {"died": [nodeid, text]}:
            where = (nodeid.partition("::")[0], None, nodeid)
            hook.pytest_runtest_logreport(report=pytest.TestReport(nodeid, where, {}, "failed", text, "call"))


class Runner:
    """A process that runs files (see one_by_one.py), and the thread that hands them to it and hears of them."""

    def __init__(
        self,
        options: list[str],
        output: IO[str],
        waiting: SimpleQueue[list[str]],
        heard: SimpleQueue[list[Message] | None],
    ) -> None:
        self._output, self._waiting, self._heard = output, waiting, heard
        self._stopped = threading.Event()
        self._ours, theirs = socket.socketpair()
        # in a session of its own: a terminal's Ctrl-C reaches it once, from here
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "tests.one_by_one", *options],
            cwd=HERE.parent,
            env={**os.environ, "SHOAL_TESTS_FROM": str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            start_new_session=True,
        )
        theirs.close()
        self._threads = [threading.Thread(target=each) for each in (self._hand_out, self._notice_its_end)]

    def __enter__(self) -> Runner:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._stopped.set()
            self._process.send_signal(signal.SIGINT)
        for thread in self._threads:
            thread.join()
        self._ours.close()

    def _notice_its_end(self) -> None:
        """What a test has left behind may hold the other end of the socket, so the process's end does not close it."""
        self._process.wait()
        with suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)

    def _hand_out(self) -> None:
        stream = self._ours.makefile("rw", encoding="utf-8")
        at = "tests"
        try:
            while not self._stopped.is_set():
                unit = self._waiting.get_nowait()
                at = unit[0]
                print(json.dumps(unit), file=stream, flush=True)
                self._heard.put(list(self._listen(stream, at)))
        except Empty:
            pass
        except OSError as error:
            self._heard.put([{"died": [at, f"the process that runs tests does not listen: {error!r}"]}])
        finally:
            with suppress(OSError):
                self._ours.shutdown(socket.SHUT_WR)  # lets it leave
            if self._process.wait() and not self._stopped.is_set():
                self._heard.put([{"died": ["tests", self._last_words()]}])
            self._heard.put(None)

    def _listen(self, stream: IO[str], at: str) -> Iterator[Message]:
        """What is told of a unit, until it is done. Its first test is `at`, or a file."""
        message: Message = {}
        for line in stream:
            message = json.loads(line)
            at = message.get("started", at)
            if "ended" not in message:
                yield message
            elif not message["ended"]:
                return
            else:
                break
        if not self._stopped.is_set():
            how = how_it_ended(message["ended"]) if "ended" in message else "ended"
            yield {"died": [at, f"the process that ran it {how}; tests after this one in its file have not run"]}

    def _last_words(self) -> str:
        self._output.seek(0)
        return f"a process that runs tests {how_it_ended(self._process.returncode)}:\n{self._output.read()[-10_000:]}"


def how_it_ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
