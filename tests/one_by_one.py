"""A plugin of pytest that runs the files it is told of, each in a fork, and tells what came of them: see at_once.py.

On the socket whose number is in `SHOAL_TESTS_FROM`: a list of files in, messages out, a line of JSON each. The last
message of a list is `ended`, with the exit code of the fork.

In a fork, since a test that forks copies the page tables of all that its process holds. So a file sees what was
imported here, and nothing of what the files before it made.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from itertools import zip_longest
from typing import Any, TextIO

import pytest

from tests.hugepages import ready_to_fork

_child: list[int] = []


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGINT, interrupt)
    number = int(os.environ.pop("SHOAL_TESTS_FROM"))
    os.set_inheritable(number, False)
    stream = socket.socket(fileno=number).makefile("rw", encoding="utf-8")
    config.pluginmanager.register(OneByOne(config, stream))


class OneByOne:
    def __init__(self, config: pytest.Config, stream: TextIO) -> None:
        self._config = config
        self._stream = stream
        self._deselected = 0

    def pytest_collection(self) -> bool:
        return True  # when a file is asked for

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if "torch" in sys.modules:  # conftest.py has imported it
            import_for_all()
        ready_to_fork()
        # the folder for temporary files is one for all forks
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        for line in self._stream:
            self._tell(ended=self._in_fork(session, json.loads(line)))
        return True

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK  # not here, but in forks

    def _in_fork(self, session: pytest.Session, files: list[str]) -> int:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        child = os.fork()
        if child == 0:
            self._be_fork(session, files)
        _child.append(child)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        _, status = os.waitpid(child, 0)
        _child.clear()
        return os.waitstatus_to_exitcode(status)

    def _be_fork(self, session: pytest.Session, files: list[str]) -> None:
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            self._run(session, files)
            session.config._ensure_unconfigure()  # where pytest looks for the last unraisable exceptions
            code = 0
        except KeyboardInterrupt:
            pass
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _run(self, session: pytest.Session, files: list[str]) -> None:
        try:
            items = list(session.perform_collect(files))
            self._tell(collected=len(items), deselected=self._deselected)
            for item, following in zip_longest(items, items[1:]):
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.shouldfail or session.shouldstop:
                    break
        finally:
            session._setupstate.teardown_exact(None)

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._tell(started=nodeid, location=location)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tell_report(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._tell_report(report)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self._deselected += len(items)

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str) -> None:
        text = f"{warning_message.category.__name__}: {warning_message.message}"
        self._tell(warning=[text, warning_message.filename, warning_message.lineno, when, nodeid])

    def _tell_report(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        hook = self._config.hook
        self._tell(report=hook.pytest_report_to_serializable(config=self._config, report=report))

    def _tell(self, **message: Any) -> None:
        print(json.dumps(message), file=self._stream, flush=True)


def interrupt(*_: object) -> None:
    """Ctrl-C is for the test that runs. This process leaves when the socket is closed, with or without it."""
    for child in _child:
        os.kill(child, signal.SIGINT)


def import_for_all() -> None:
    """What nearly every test needs, so that not every fork imports it."""
    import shoal.cli.main
    from shoal import Trainer
    from shoal.trainer.workers.start import import_for_training

    assert shoal.cli.main.app and Trainer is not None
    import_for_training()
