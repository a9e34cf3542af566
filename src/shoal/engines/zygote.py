"""The zygote: a process of one thread that forks workers on request, reaps them and says how they ended.

It is forked from the supervisor, so whatever the supervisor has in memory (a model, a lambda, a notebook's cells) is
there without pickling. What heavy imports remain are made once, in the zygote, and each worker starts in milliseconds.

Between the two runs one stream socket. Requests are 5 bytes, with the worker's socket attached to `START`; reports
are frames. `END`, or the end of the stream, means: kill all workers, reap them, leave. A zygote with a `grace` of some
seconds does so at once only on `END`: if the stream ends without it, the supervisor has died, and the workers, who see
the end of their own links, are waited for that long.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import gc
import itertools
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeAlias

from shoal.engines.lifeline import die_with_parent
from shoal.engines.openfiles import OpenFile, open_files, separate
from shoal.wire.link import Frame, Link, LinkClosed, milliseconds

Body: TypeAlias = Callable[[int, Link, Path], None]
"""What a worker runs: (its rank, its link to the supervisor, the crew's scratch folder)."""

EXIT_RAISED = 70
"""Exit code of a worker whose body raised (EX_SOFTWARE); the traceback is on its stderr."""

_IGNORED = (signal.SIGINT,)  # Ctrl-C reaches the whole process group; what it means is the supervisor's to decide
_DEFAULT = (signal.SIGTERM, signal.SIGCHLD)  # a parent may ignore these, and children would inherit it

_PATIENCE = (2.0, 4.0, 8.0)  # seconds for a child to say that it lives; measured: 1 to 3 ms

_REQUEST = struct.Struct("<BI")
_REPORT = struct.Struct("<BIq")


class Ask(enum.IntEnum):
    """What the supervisor asks of the zygote."""

    START = 0
    KILL = 1
    END = 2
    """The crew is closed."""


class Tell(enum.IntEnum):
    """What the zygote tells the supervisor."""

    WARM = 0
    """The warm-up is done; requests are served from now on."""
    COLD = 1
    """The warm-up raised: `text` is the traceback, and the zygote is about to leave."""
    STARTED = 2
    """`value` is the process id."""
    REFUSED = 3
    """The worker could not be forked: `text` says why."""
    ENDED = 4
    """`value` is the wait status."""


@dataclass(frozen=True)
class Report:
    """One thing that the zygote tells the supervisor."""

    tell: Tell
    worker: int = 0
    value: int = 0
    text: str = ""

    def send(self, link: Link) -> None:
        link.send(_REPORT.pack(self.tell, self.worker, self.value), [self.text.encode(errors="replace")])

    @classmethod
    def parse(cls, frame: Frame) -> Report:
        header, (text,) = frame
        tell, worker, value = _REPORT.unpack(header)
        return cls(Tell(tell), worker, value, text.decode())


def ask(control: socket.socket, request: Ask, worker: int, sock: socket.socket | None = None) -> None:
    """Send a request to the zygote, with a socket attached where it needs one. Raises OSError if it is gone."""
    descriptors = [] if sock is None else [sock.fileno()]
    socket.send_fds(control, [_REQUEST.pack(request, worker)], descriptors, getattr(socket, "MSG_NOSIGNAL", 0))


def fork(run: Callable[[], None], born: list[int]) -> None:
    """Fork a child that does `run` and ends there; appends its process id to `born`.

    The id is there even if a signal handler raises (Ctrl-C) before this returns. OSError if it cannot be forked.

    The child has none of the parent's Python signal handlers nor its wakeup descriptor, ignores SIGINT, dies of
    SIGTERM, and leaves by `os._exit`, so exit handlers of the parent never run in it: with 0 after `run`, with its
    code if `run` raises SystemExit, with `EXIT_RAISED` and the traceback on stderr for any other exception.

    Safe beside other threads. A child may be born with a lock held by a thread that it does not have: CPython 3.11
    itself waits for one such lock in the new child, before any Python code runs in it, and any thread that enters or
    leaves the interpreter takes that lock, as those of torch's backends may. So each child says that it lives, and
    one that does not is killed and born again.
    """
    flush_stdio()
    for patience in _PATIENCE:
        files = open_files()
        heard, says = os.pipe()
        # A signal that came before the child has shed the handlers would run one of the parent's in it.
        held = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of forking beside threads; the child uses none of theirs until `run` says so
                warnings.simplefilter("ignore", DeprecationWarning)
                # Without a step of the interpreter between the fork and the list, where a handler could run and raise.
                born.extend(itertools.starmap(os.fork, [()]))
            if born[-1] == 0:
                os.close(heard)
                _run_and_exit(run, says, files)
            if select.select([heard], [], [], patience)[0]:
                return
            os.kill(born[-1], signal.SIGKILL)
            os.waitpid(born.pop(), 0)
        finally:
            os.close(heard)
            os.close(says)
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
    raise OSError(errno.EDEADLK, f"{len(_PATIENCE)} children in a row did not come to life")


def run_zygote(
    control: socket.socket, body: Body, scratch: Path, warm: Callable[[], None] | None, grace: float = 0.0
) -> None:
    """What the zygote does from its first moment to its last, tied to the supervisor through `control`."""
    reports = Link(control)
    try:
        if warm is not None:
            warm()
    except BaseException:
        with contextlib.suppress(LinkClosed):
            Report(Tell.COLD, text=traceback.format_exc()).send(reports)
        return
    zygote = Zygote(control, reports, body, scratch)
    try:
        zygote.serve()
    except LinkClosed:
        # the supervisor is gone, or has closed the crew
        if not zygote.closing:
            zygote.await_workers(grace)
    finally:
        zygote.end_workers()


class Zygote:
    """The serving half of a zygote. Lives in its process only."""

    def __init__(self, control: socket.socket, reports: Link, body: Body, scratch: Path) -> None:
        self._control = control
        self._reports = reports
        self._body = body
        self._scratch = scratch
        self._ranks: dict[int, int] = {}  # by process id
        self._woken, self._waker = socket.socketpair()
        self.closing = False
        """Whether the supervisor has asked for the end."""

    def serve(self) -> None:
        """Fork, reap and report. Leaves only by LinkClosed, when the supervisor's end is closed."""
        self._wake_when_children_end()
        Report(Tell.WARM).send(self._reports)
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        poller.register(self._woken, select.POLLIN)
        while True:
            for descriptor, _ in poller.poll():
                if descriptor == self._control.fileno():
                    self._obey()
                else:
                    self._woken.recv(4096)
            self._reap()

    def await_workers(self, seconds: float) -> None:
        """Wait until all workers have ended by themselves, for so long at most."""
        deadline = time.monotonic() + seconds
        poller = select.poll()
        poller.register(self._woken, select.POLLIN)
        while self._ranks and (left := deadline - time.monotonic()) > 0:
            if poller.poll(milliseconds(left)):
                self._woken.recv(4096)
            self._collect()

    def end_workers(self) -> None:
        """Kill and reap every worker that still lives."""
        for pid in self._ranks:
            os.kill(pid, signal.SIGKILL)
        for pid in self._ranks:
            os.waitpid(pid, 0)
        self._ranks.clear()

    def _wake_when_children_end(self) -> None:
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _only_wake)

    def _obey(self) -> None:
        request, descriptors = self._receive()
        kind, rank = _REQUEST.unpack(request)
        if kind == Ask.START:
            with socket.socket(fileno=descriptors[0]) as sock:
                sock.set_inheritable(False)
                self._start(rank, sock)
        elif kind == Ask.KILL:
            self._kill(rank)
        else:
            self.closing = True
            raise LinkClosed("the supervisor has closed the crew")

    def _receive(self) -> tuple[bytes, list[int]]:
        try:
            request, descriptors, _, _ = socket.recv_fds(self._control, _REQUEST.size, 1)
        except ConnectionError as error:
            raise LinkClosed("the supervisor is gone") from error
        if len(request) < _REQUEST.size:
            raise LinkClosed("the supervisor is gone")
        return request, descriptors

    def _start(self, rank: int, sock: socket.socket) -> None:
        parent = os.getpid()
        born: list[int] = []
        try:
            fork(lambda: self._be_worker(rank, sock, parent), born)
        except OSError as error:
            Report(Tell.REFUSED, rank, text=str(error)).send(self._reports)
            return
        self._ranks[born[0]] = rank
        Report(Tell.STARTED, rank, born[0]).send(self._reports)

    def _be_worker(self, rank: int, sock: socket.socket, parent: int) -> None:
        die_with_parent(parent)
        self._reports.close()
        self._woken.close()
        self._waker.close()
        self._body(rank, Link(sock), self._scratch)

    def _kill(self, rank: int) -> None:
        # only this process reaps, so a process id in the table is still that worker's
        for pid, owner in self._ranks.items():
            if owner == rank:
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        for rank, status in self._collect():
            Report(Tell.ENDED, rank, status).send(self._reports)

    def _collect(self) -> list[tuple[int, int]]:
        """Reap those that have ended: the rank and the wait status of each."""
        ended = []
        while self._ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            rank = self._ranks.pop(pid, None)  # None: a child that the warm-up left
            if rank is not None:
                ended.append((rank, status))
        return ended


def flush_stdio() -> None:
    """Write out what stdout and stderr hold, as far as they are open."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()


def _run_and_exit(run: Callable[[], None], says: int, files: list[OpenFile]) -> NoReturn:
    code = EXIT_RAISED
    try:
        _shed_signals()
        _shed_compilers()
        os.write(says, b".")
        os.close(says)
        separate(files)
        # a pass over what the parent has would copy every page of it
        gc.freeze()
        run()
        code = 0
    except SystemExit as leaving:
        code = _exit_code(leaving)
    except BaseException:
        traceback.print_exc()
    finally:
        # whatever goes wrong here, the child must not run on into the parent's code
        try:
            flush_stdio()
        finally:
            os._exit(code)


def _shed_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    for number in _DEFAULT:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _shed_compilers() -> None:
    """Leave the threads behind in which torch.compile compiles: it would wait for them, and they are not here.

    It makes new ones at need. Compilers in processes of their own, for GPUs, are not started ahead of any need.
    """
    os.environ.setdefault("TORCH_WARM_POOL", "0")
    compiling = sys.modules.get("torch._inductor.async_compile")
    forget = getattr(getattr(getattr(compiling, "AsyncCompile", None), "pool", None), "cache_clear", None)
    if forget is not None:
        forget()


def _exit_code(leaving: SystemExit) -> int:
    """The code that the interpreter itself would leave with."""
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF
    print(leaving.code, file=sys.stderr)
    return 1


def _only_wake(number: int, frame: object) -> None:
    """A handler must exist for the wakeup descriptor to be written; the reaping is done by the loop."""
