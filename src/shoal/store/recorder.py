"""Writes a run into the run store while it goes on, without making it wait.

Events are put into a list; a thread takes them out and writes them, many at a time. The store may be slow, locked, full
or gone: the run does not notice, and its owner is warned once.

The thread starts with the first event, not before: processes are forked between the making of a recorder and the first
event, and a connection or a lock must not come along into a child. Only the thread imports SQLAlchemy, which takes a
while, and only it asks git.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from shoal.core.errors import StoreError
from shoal.core.events import AnyEvent, CheckpointSaved, Preparing, ServersSeen, StepDone, WorkerSeen
from shoal.store.environment import environment, git_state
from shoal.store.home import NO_STORE, store_url
from shoal.store.liveness import this_process
from shoal.store.values import NewRun, RunEnd

if TYPE_CHECKING:
    from shoal.store.writing import RunWriter

WRITE_SECONDS = 1.0
"""Between two writes while events come."""
WRITE_ROWS = 500
"""So many events are written at once, without waiting."""
HEARTBEAT_SECONDS = 4.0
"""Between two signs of life while nothing happens."""
MOST_WAITING = 100_000
"""Events kept in memory while the store cannot be written; beyond it the oldest steps are dropped."""
CLOSE_SECONDS = 10.0
"""How long the end of a run waits for the store."""
PATIENCE_SECONDS = 15.0
"""How long a store may be out of reach before there is a warning; it is tried again after that all the same."""
RETRY_SECONDS = 0.5

_Value = TypeVar("_Value")


class Recorder:
    """A listener for one start of one run. Called and closed by one thread.

    `warn` is called on that thread, in a call or in `close`, at most once for each thing that goes wrong. Neither
    raises, and a call takes no longer than it takes to append to a list. In a forked child both do nothing.
    """

    def __init__(self, new: NewRun, *, url: str | None = None, warn: Callable[[str], None]) -> None:
        self._new = new
        self._url = store_url() if url is None else url
        self._warn = warn
        self._pid = os.getpid()
        self._off = self._url == NO_STORE
        self._waiting = _Waiting()
        self._wake = threading.Event()
        self._end: RunEnd | None = None
        self._close_by: float | None = None
        self._warnings: list[str] = []  # appended to by the thread, emptied by the caller
        self._thread: threading.Thread | None = None

    @property
    def recording(self) -> bool:
        """False once the store was given up, or where none was asked for."""
        return not self._off

    def __call__(self, event: AnyEvent) -> None:
        if self._off or os.getpid() != self._pid or isinstance(event, Preparing):
            self._deliver()
            return
        many = self._waiting.add(event) >= WRITE_ROWS
        # With a checkpoint a run can go on from here: what came before it must not be missing then.
        if (many or isinstance(event, CheckpointSaved)) and not self._wake.is_set():
            self._wake.set()
        if self._thread is None:
            self._start()
        self._deliver()

    def close(self, end: RunEnd) -> None:
        """Say how the run ended, and wait until it is written, for CLOSE_SECONDS at most. Again: does nothing."""
        if self._close_by is not None or os.getpid() != self._pid:
            return
        self._close_by = time.monotonic() + CLOSE_SECONDS
        self._end = end
        if not self._off and self._thread is None:
            self._start()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                self._warnings.append(
                    f"The run store has not taken the end of this run within {CLOSE_SECONDS:.0f} s: not waiting for it."
                )
        if self._waiting.dropped:
            self._warnings.append(
                f"{self._waiting.dropped} steps of this run are missing in the run store: it could not be written for "
                "too long."
            )
        self._deliver()

    def _start(self) -> None:
        # A daemon: a store that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="shoal-recorder", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads, or the interpreter is ending
            self._thread = None
            self._give_up(str(error))

    def _deliver(self) -> None:
        while self._warnings and os.getpid() == self._pid:
            self._warn(self._warnings.pop(0))

    # In the thread

    def _run(self) -> None:
        try:
            self._record()
        except StoreError as error:
            self._give_up(str(error))
        except Exception as error:  # whatever it is, the run goes on
            self._give_up(f"{type(error).__name__}: {error}")

    def _give_up(self, reason: str) -> None:
        self._off = True
        self._waiting.take()
        self._warnings.append(f"This run is not recorded, or not any further. {reason}")

    def _record(self) -> None:
        from shoal.store.store import Store
        from shoal.store.writing import RunWriter

        with self._patiently(lambda: Store.open(self._url)) as store:
            writer = RunWriter(store, _completed(self._new))
            self._patiently(writer.begin)
            self._add_code_state(writer)
            written = time.monotonic()
            while True:
                self._wake.wait(WRITE_SECONDS)
                self._wake.clear()
                end = self._end  # read before the events are taken: those that came before it are among them
                happened = self._waiting.take()
                if happened or end is not None or time.monotonic() - written >= HEARTBEAT_SECONDS:
                    self._write(writer, happened, end)
                    written = time.monotonic()
                if end is not None:
                    return

    def _write(self, writer: RunWriter, happened: list[AnyEvent], end: RunEnd | None) -> None:
        self._patiently(lambda: writer.write(happened, end))

    def _add_code_state(self, writer: RunWriter) -> None:
        if self._new.git_commit is None:
            commit, dirty = git_state(_folder(self._new.script))
            if commit is not None:
                self._patiently(lambda: writer.describe(commit, dirty))

    def _patiently(self, action: Callable[[], _Value]) -> _Value:
        """Do it, again and again while what is in the way may pass: a lock, a server that cannot be reached."""
        from shoal.store.faults import may_pass

        begun, warned = time.monotonic(), False
        while True:
            try:
                return action()
            except StoreError as error:
                now = time.monotonic()
                if not may_pass(error) or (self._close_by is not None and now > self._close_by - 2 * RETRY_SECONDS):
                    raise
                if not warned and now - begun > PATIENCE_SECONDS:
                    warned = True
                    self._warnings.append(f"{error} This is tried again until the run ends.")
            time.sleep(RETRY_SECONDS)


class _Waiting:
    """Events that are not written yet, in the order in which they came. A bounded number."""

    def __init__(self) -> None:
        self.dropped = 0
        """Steps that had to go."""
        self._lock = threading.Lock()
        self._events: list[AnyEvent] = []

    def add(self, event: AnyEvent) -> int:
        """How many there are now."""
        with self._lock:
            self._events.append(event)
            if len(self._events) > MOST_WAITING:
                self._drop_oldest()
            return len(self._events)

    def take(self) -> list[AnyEvent]:
        with self._lock:
            taken, self._events = self._events, []
            return taken

    def _drop_oldest(self) -> None:
        """A tenth, and steps rather than what happens seldom."""
        surplus = len(self._events) - MOST_WAITING * 9 // 10
        kept = []
        for event in self._events:
            if surplus > 0 and isinstance(event, StepDone | WorkerSeen | ServersSeen):
                surplus -= 1
                self.dropped += isinstance(event, StepDone)
            else:
                kept.append(event)
        self._events = kept[max(surplus, 0) :]


def _completed(new: NewRun) -> NewRun:
    """With what the maker of a run may leave to the recorder."""
    changes: dict[str, object] = {}
    if new.pid in (0, os.getpid()):
        here = this_process()
        changes = {"host": here.host, "pid": here.pid, "pid_started": here.started, "boot": here.boot}
    if not new.environment:
        changes["environment"] = environment()
    return msgspec.structs.replace(new, **changes)


def _folder(script: str) -> Path:
    """Where the code of a run is, as far as can be told."""
    path = Path(script) if script else Path.cwd()
    return path if path.is_dir() else path.absolute().parent
