"""The workers that one start has made, seen from the supervisor."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from shoal.core.errors import ConfigError, WorkerError
from shoal.engines.lifeline import die_with_parent
from shoal.engines.openfiles import let_go_of_files
from shoal.engines.scratch import make_scratch
from shoal.engines.zygote import Ask, Body, Report, Tell, ask, fork, run_zygote
from shoal.wire.link import FrameError, Link, LinkClosed, milliseconds

if TYPE_CHECKING:
    from typing_extensions import Buffer

_READ_AT_ONCE = 8 << 20  # bytes of one worker before the others have their turn
_FAREWELL = 5.0  # seconds for the zygote to kill and reap; more than 0.1 only if workers hold much memory
_ORPHANS_DIE_WITHIN = 1.0  # seconds from the zygote's death to the end of its workers; measured: below 0.05

# The ends that belong to supervisors in this process. A zygote must not keep those it inherits: neither its own
# crew's nor another's would then see the end of its stream. The lock keeps a fork out of the moment in which ends
# that are meant for children are open here.
_forking = threading.Lock()
_supervisor_ends: set[socket.socket] = set()


@dataclass(frozen=True)
class Message:
    """A frame that a worker sent; the buffers belong to whoever takes it."""

    worker: int
    header: bytes
    buffers: list[bytearray]


@dataclass(frozen=True)
class Ended:
    """A worker's process is gone: either it left with an exit code or a signal killed it.

    With neither, a process that was to be added could not be started, and `why` says what was in the way.
    """

    worker: int
    code: int | None
    signal: int | None
    why: str = ""
    pid: int = field(default=0, compare=False)


@dataclass
class _Seat:
    """What the supervisor knows of one worker."""

    rank: int
    sock: socket.socket
    link: Link
    pid: int | None = None
    readable: bool = True
    ended: bool = False


class Crew:
    """The workers of one start, seen from the supervisor; made by `LocalEngine.start`.

    For one thread at a time. A context manager; leaving it closes the crew. A process forked from the supervisor
    that closes its copy closes nothing.
    """

    workers: int
    """Of the start; those that were added later are not counted."""
    scratch: Path
    """A folder of mode 0700 for this crew alone, removed by `close`."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.scratch = make_scratch()
        self._owner = os.getpid()
        self._zygote: list[int] = []  # its process id, once it is born and until it is reaped
        self._warm = False
        self._control: socket.socket | None = None
        self._reports: Link | None = None
        self._orphaned_at: float | None = None
        self._seats: dict[int, _Seat] = {}
        self._filled = False  # from then on, what cannot be started is no error of the start
        self._inbox: deque[Message | Ended] = deque()
        self._poller = select.poll()
        self._closed = False

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def next(self, timeout: float | None) -> Message | Ended | None:
        """Wait for the next message, or the end, of any worker.

        None after `timeout` seconds (None: wait without end), and at once when every worker's end has been given out.
        All messages of a worker come before its Ended, and after that nothing more; a message it was killed in the
        middle of is dropped. Raises FrameError if a worker wrote something else than frames to its link; that worker
        is killed and the call may be repeated.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._inbox and any(not seat.ended for seat in self._seats.values()):
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._gather(remaining)
            if remaining == 0.0:
                break
        return self._inbox.popleft() if self._inbox else None

    def send(self, worker: int, header: bytes, buffers: Sequence[Buffer] = ()) -> None:
        """Send a frame to a worker; does nothing if it has ended.

        Waits while the worker's socket is full, and takes in what that worker sends meanwhile, so that two large
        messages cannot block each other. Raises FrameError if the frame is too large.
        """
        seat = self._seat(worker)
        if seat.ended:
            return
        # A worker that is gone: the zygote reports its end.
        with contextlib.suppress(LinkClosed):
            seat.link.send(header, buffers, when_full=lambda: self._wait_for_room(seat))

    def pids(self) -> dict[int, int]:
        """The process ids of the workers that are not known to have ended."""
        return {seat.rank: seat.pid for seat in self._seats.values() if seat.pid is not None and not seat.ended}

    def add(self, seat: int) -> None:
        """Start a process in a seat that is new, or whose process has ended. Does not wait for it.

        It runs the body of the start, with `seat` for its rank, on memory as it was then. Messages may be sent to it at
        once. If it cannot be started, that comes through `next`, as an Ended with neither code nor signal. Raises
        ConfigError if the seat's process has not ended.
        """
        known = self._seats.get(seat)
        if self._closed or (known is not None and not known.ended):
            raise ConfigError(f"seat {seat}: its process lives, or the crew is closed; wait for its Ended")
        try:
            self._fill_seat(seat)
        except WorkerError as error:
            self._refuse(seat, str(error))

    def kill(self, worker: int) -> None:
        """SIGKILL a worker; its end comes through `next`. Does nothing if it has ended."""
        if self._seat(worker).ended or self._control is None:
            return
        with contextlib.suppress(OSError):
            # not by process id from here: the zygote may have reaped it, and the number may be another's by now
            ask(self._control, Ask.KILL, worker)

    def close(self) -> None:
        """Kill and reap whatever lives, and remove the scratch folder. Calling it again does nothing.

        What was not taken by `next` is dropped.
        """
        if self._closed or os.getpid() != self._owner:
            return
        self._end_zygote()
        for seat in self._seats.values():
            seat.ended = True
            seat.link.close()
            _supervisor_ends.discard(seat.sock)
        if self._control is not None:
            self._control.close()
            _supervisor_ends.discard(self._control)
        self._inbox.clear()
        shutil.rmtree(self.scratch, ignore_errors=True)
        self._closed = True

    # starting

    def _fork_zygote(self, body: Body, warm: Callable[[], None] | None, grace: float, lasting: bool) -> None:
        supervisor = os.getpid()
        # See die_with_parent: tied to a thread that may end before its crew, the zygote relies on its control socket.
        # It does so as well if it is to outlive the supervisor for a while.
        tie = threading.get_native_id() == supervisor and not grace

        def be_zygote() -> None:
            if tie:
                die_with_parent(supervisor)
            _drop_supervisor_ends()
            if lasting:
                let_go_of_files(theirs.fileno())
            run_zygote(theirs, body, self.scratch, warm, grace)

        with _forking:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            _supervisor_ends.add(ours)
            self._control, self._reports = ours, Link(ours)
            with theirs:
                try:
                    fork(be_zygote, self._zygote)
                except OSError as error:
                    raise self._not_started(0, str(error)) from error
        self._poller.register(ours, select.POLLIN)

    def _fill_seats(self) -> None:
        while not self._warm:
            self._await_report()
        for rank in range(self.workers):
            self._fill_seat(rank)
        while any(seat.pid is None for seat in self._seats.values()):
            self._await_report()
        self._filled = True

    def _fill_seat(self, rank: int) -> None:
        assert self._control is not None
        try:
            with _forking:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                _supervisor_ends.add(ours)
                self._seats[rank] = _Seat(rank, ours, Link(ours))
                with theirs:
                    ask(self._control, Ask.START, rank, theirs)
        except OSError as error:
            raise self._not_started(rank, str(error)) from error
        self._poller.register(ours, select.POLLIN)

    def _await_report(self) -> None:
        assert self._reports is not None
        try:
            frame = self._reports.recv()
        except LinkClosed as error:
            what = "while workers were started" if self._warm else "during the warm-up"
            raise WorkerError(f"the process that workers are forked from {self._reap_zygote()} {what}") from error
        self._heed(Report.parse(frame))

    def _not_started(self, rank: int, why: str) -> WorkerError:
        which = f"worker {rank}" if self._filled else f"worker {rank} of {self.workers}"
        return WorkerError(
            f"{which} could not be started: {why}; "
            "lower workers=, or raise the limits on processes and open files (ulimit -u, ulimit -n)",
            worker=rank,
        )

    # listening

    def _gather(self, timeout: float | None) -> None:
        """Wait for anything to come, and put it into the inbox: at most one message of each worker."""
        if self._orphaned_at is not None:
            patience = max(0.0, self._orphaned_at + _ORPHANS_DIE_WITHIN - time.monotonic())
            timeout = patience if timeout is None else min(timeout, patience)
        by_descriptor = {seat.link.fileno(): seat for seat in self._seats.values()}
        for descriptor, _ in self._poller.poll(milliseconds(timeout)):
            seat = by_descriptor.get(descriptor)
            if seat is None:
                self._take_reports()
            elif seat.readable:
                self._take_from(seat)
        self._bury_orphans()

    def _take_from(self, seat: _Seat) -> None:
        try:
            frame = seat.link.try_recv(_READ_AT_ONCE)
        except LinkClosed:
            self._stop_reading(seat)
        except FrameError as error:
            self._stop_reading(seat)
            self.kill(seat.rank)
            raise FrameError(f"from worker {seat.rank}: {error}") from error
        else:
            if frame is not None:
                self._inbox.append(Message(seat.rank, *frame))

    def _take_reports(self) -> None:
        assert self._control is not None and self._reports is not None
        try:
            while (frame := self._reports.try_recv()) is not None:
                self._heed(Report.parse(frame))
        except LinkClosed:
            self._poller.unregister(self._control)
            self._orphaned_at = time.monotonic()

    def _heed(self, report: Report) -> None:
        if report.tell is Tell.WARM:
            self._warm = True
        elif report.tell is Tell.COLD:
            raise WorkerError(f"the warm-up of the workers failed:\n\n{report.text}")
        elif report.tell is Tell.STARTED:
            self._seats[report.worker].pid = report.value
        elif report.tell is Tell.REFUSED:
            error = self._not_started(report.worker, report.text)
            if not self._filled:
                raise error
            self._refuse(report.worker, str(error))
        else:
            self._end(self._seats[report.worker], report.value)

    def _end(self, seat: _Seat, status: int) -> None:
        """Give out what the worker had sent before it ended, then its end."""
        with contextlib.suppress(LinkClosed, FrameError):
            while seat.readable and (frame := seat.link.try_recv()) is not None:
                self._inbox.append(Message(seat.rank, *frame))
        self._stop_reading(seat)
        seat.ended = True
        seat.link.close()
        _supervisor_ends.discard(seat.sock)
        code, pid = os.waitstatus_to_exitcode(status), seat.pid or 0
        end = Ended(seat.rank, code, None, pid=pid) if code >= 0 else Ended(seat.rank, None, -code, pid=pid)
        self._inbox.append(end)

    def _refuse(self, rank: int, why: str) -> None:
        """Give out the end of a process that never began."""
        seat = self._seats.get(rank)
        if seat is not None and not seat.ended:
            self._stop_reading(seat)
            seat.ended = True
            seat.link.close()
            _supervisor_ends.discard(seat.sock)
        self._inbox.append(Ended(rank, None, None, why=why))

    def _bury_orphans(self) -> None:
        """After the zygote's death, the end of a worker's stream is its end: the kernel kills it."""
        if self._orphaned_at is None:
            return
        late = time.monotonic() >= self._orphaned_at + _ORPHANS_DIE_WITHIN
        for seat in self._seats.values():
            if not seat.ended and (late or not seat.readable):
                self._end(seat, signal.SIGKILL)  # as a wait status: killed by signal 9

    def _stop_reading(self, seat: _Seat) -> None:
        if seat.readable:
            seat.readable = False
            with contextlib.suppress(KeyError):  # not registered: it could not be started
                self._poller.unregister(seat.link.fileno())

    def _wait_for_room(self, seat: _Seat) -> None:
        """Wait until it is worth trying again to send; if the worker ends meanwhile, its link is closed then."""
        assert self._control is not None
        poller = select.poll()
        poller.register(seat.link.fileno(), select.POLLOUT | (select.POLLIN if seat.readable else 0))
        if self._orphaned_at is None:
            poller.register(self._control, select.POLLIN)
        poller.poll()
        if self._orphaned_at is None:
            self._take_reports()
        if seat.readable:
            self._take_from(seat)

    # ending

    def _end_zygote(self) -> None:
        if self._warm and self._orphaned_at is None:
            self._let_zygote_clean_up()
        if self._zygote:
            self._reap_zygote()

    def _let_zygote_clean_up(self) -> None:
        """Have the workers killed and reaped by their parent, so that no dead process is left to pid 1."""
        assert self._control is not None and self._reports is not None
        deadline = time.monotonic() + _FAREWELL
        with contextlib.suppress(LinkClosed, OSError):
            ask(self._control, Ask.END, 0)
            self._control.shutdown(socket.SHUT_WR)
            while self._reports.poll(max(0.0, deadline - time.monotonic())):
                self._reports.try_recv()

    def _reap_zygote(self) -> str:
        """Make sure that the zygote is gone; returns how it ended, for a message."""
        try:
            os.kill(self._zygote[0], signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(self._zygote[0], 0)[1])
        except (ProcessLookupError, ChildProcessError):
            return "is gone"  # reaped by someone else in this process, e.g. SIGCHLD is ignored
        finally:
            self._zygote.clear()
        return f"left with code {code}" if code >= 0 else f"was killed by signal {-code}"

    def _seat(self, worker: int) -> _Seat:
        if worker not in self._seats:
            raise ConfigError(
                f"worker {worker!r}: this crew has workers 0 to {self.workers - 1}, and those added to it"
            )
        return self._seats[worker]


def _drop_supervisor_ends() -> None:
    """In a zygote just forked: let go of what belongs to the supervisor, so that the child can start crews itself."""
    for end in _supervisor_ends:
        end.close()
    _supervisor_ends.clear()
    _forking.release()
