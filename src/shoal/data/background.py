"""A loader process: forked from the worker, asked for requests over a socket pair, answering with raw tensors.

Both ends of the wire are here. A message is a msgpack header and raw buffers (indices in requests, tensors in
answers); nothing is pickled. The process lives until its socket closes, and dies with the worker.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from queue import SimpleQueue
from typing import Any, Literal, Protocol, TypeAlias

import msgspec
import torch

from shoal.core.errors import DataError
from shoal.core.traces import own_traceback, place_of
from shoal.data.fetch import Positions, Request
from shoal.data.parcel import seal, unseal
from shoal.data.tree import Unpackable
from shoal.engines.activity import Activity
from shoal.engines.lifeline import die_with_parent
from shoal.engines.zygote import fork
from shoal.wire.link import Frame, FrameError, Link, LinkClosed

_GRACE_SECONDS = 1.0
"""How long a loader process may finish what it is doing when its socket was closed, before it is killed."""
_LOOK_SECONDS = 1.0
"""How often to look whether a silent process lives: its end closes the socket, unless a child of it has a copy."""
_MOST_PENDING = 8
"""Requests in one process: two for each of the streams that share it, and some that nobody waits for any more."""
_SWITCH_SECONDS = 0.0001
"""In a loader process: how long pure Python code may keep the interpreter from the thread that sends."""

_Outgoing: TypeAlias = tuple[bytes, Sequence[memoryview]]


class Source(Protocol):
    """What a loader process fetches from."""

    activity: Activity
    """Where it notes what it is at."""

    def fetch(self, request: Request) -> list[Any]:
        """For each `Positions` of `request` what is wanted of it. Whatever it raises is told to who has asked."""


class _Ask(msgspec.Struct, frozen=True, array_like=True):
    """The indices of all batches are one buffer of 64-bit numbers."""

    source: str
    batches: list[tuple[int, int, int]]
    """Each batch: the number of its indices, its key and its first position."""


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    kind: Literal["batches", "error", "unpackable"]
    parcel: bytes = b""
    text: str = ""
    traceback: str = ""
    place: str = ""


class Ticket:
    """One request that a loader process was asked for. Whoever asked may forget it; so is then the answer."""

    __slots__ = ("_process", "answer", "failure", "request", "source")

    def __init__(self, process: LoaderProcess, source: str, request: Request) -> None:
        self._process = process
        self.source = source
        self.request = request
        self.answer: Frame | None = None
        self.failure: DataError | None = None

    def wait(self) -> list[Any]:
        """The batches; their tensors live in the buffers that were received.

        Raises `DataError` for what went wrong in the process, `Unpackable` for batches that cannot leave it.
        """
        while self.answer is None and self.failure is None:
            self._process.receive()
        if self.failure is not None:
            raise self.failure
        assert self.answer is not None
        return _opened(*self.answer)


class LoaderProcess:
    """The worker's end of one loader process. One thread uses it, and that thread must outlive the process:
    the kernel ends the process with the thread that forked it. Raises OSError if the process cannot be forked.
    While the worker waits for it, `waiting` says what it does."""

    def __init__(
        self,
        sources: Mapping[str, Source],
        siblings: Iterable[LoaderProcess],
        close_fds: Iterable[int],
        waiting: Activity,
    ) -> None:
        self.alive = True
        self._waiting, self._activity = waiting, Activity.shared()
        self._pending: deque[Ticket] = deque()
        self._exit_code: int | None = None
        self._link, theirs = Link.pair()
        foreign_links = [self._link, *(process._link for process in siblings)]
        foreign_fds = list(close_fds)
        parent = os.getpid()

        def live() -> None:
            die_with_parent(parent)
            _shed(foreign_links, foreign_fds)
            _serve(theirs, sources, self._activity)

        born: list[int] = []
        try:
            fork(live, born)
        except BaseException:
            # a process that was born all the same finds its link closed and ends
            self._link.close()
            raise
        finally:
            theirs.close()
        self.pid = born[0]

    def ask(self, source: str, request: Request) -> Ticket:
        """Queue a request. If the process is gone, the ticket says so in its turn."""
        self._make_room()
        ticket = Ticket(self, source, request)
        self._pending.append(ticket)
        batches = [(len(wanted.indices), wanted.key, wanted.first) for wanted in request]
        indices = array("q", _indices(request))
        # answers that came before the process ended are still there to be received
        with contextlib.suppress(LinkClosed):
            self._link.send(msgspec.msgpack.encode(_Ask(source, batches)), (indices,))
        return ticket

    def receive(self) -> None:
        """Wait for the answer to the oldest request asked here, or for the end of the process."""
        try:
            while (frame := self._link.try_recv()) is None:
                self._waiting.show(self.pid, self._activity)
                if not self._link.poll(_LOOK_SECONDS) and self._has_ended():
                    raise LinkClosed("the process has ended")
        except LinkClosed:
            self._lost()
            return
        finally:
            self._waiting.leave_to(0)
            self._waiting.done()
        self._pending.popleft().answer = frame

    def answers_within(self, seconds: float) -> bool:
        """Whether an answer begins to come by then, or the process has ended."""
        return self._link.poll(seconds)

    def close(self) -> None:
        """Close the link; the process ends as soon as it has fetched what it is fetching."""
        if self.alive:
            self.alive = False
            # shutdown, not only close: a process that was forked meanwhile may hold a copy of the descriptor
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._link.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)
            self._link.close()

    def reap(self, deadline: float) -> int | None:
        """Wait for the end of the process, kill it at `deadline` (of `time.monotonic`).

        Returns its exit code, negative for a signal; None if somebody else has reaped it.
        """
        killed = False
        pause = 0.0002
        while not self._has_ended():
            if not killed and time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                killed = True
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        return self._exit_code

    def _has_ended(self) -> bool:
        if self._exit_code is not None:
            return True
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid:
            self._exit_code = os.waitstatus_to_exitcode(status)
        return bool(pid)

    def _make_room(self) -> None:
        """Requests that were forgotten must not pile up."""
        while len(self._pending) >= _MOST_PENDING:
            self.receive()

    def _lost(self) -> None:
        """The process ended by itself: every ticket that waits for it fails."""
        self.close()
        code = self.reap(time.monotonic() + _GRACE_SECONDS)
        # which of them it was at is not known: an answer may be lost on its way
        obituary = _obituary(code, [ticket.request for ticket in self._pending])
        for ticket in self._pending:
            ticket.failure = DataError(f"{obituary} of {ticket.source!r}; data_workers=0 loads in the worker itself")
        self._pending.clear()


def end_all(processes: Sequence[LoaderProcess]) -> None:
    """Close all, then reap all: together they get one grace period."""
    for process in processes:
        process.close()
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in processes:
        process.reap(deadline)


def _indices(request: Request) -> list[int]:
    return [index for wanted in request for index in wanted.indices]


def _obituary(code: int | None, requests: Iterable[Request]) -> str:
    if code is None:
        end = "ended"
    elif code >= 0:
        end = f"ended with exit code {code}"
    else:
        memory = " (often out of memory: lower data_workers or the size of items)" if -code == signal.SIGKILL else ""
        end = f"was killed by {signal.Signals(-code).name}{memory}"
    spans = [f"{indices[0]} ... {indices[-1]}" for request in requests if (indices := _indices(request))]
    return f"a loader process {end} while it was to load items {', '.join(spans)}"


def _opened(header: bytes, buffers: list[bytearray]) -> list[Any]:
    answer = msgspec.msgpack.decode(header, type=_Answer)
    if answer.kind == "error":
        error = DataError(answer.text)
        error.worker_traceback, error.place = answer.traceback, answer.place
        raise error
    if answer.kind == "unpackable":
        raise Unpackable(answer.text)
    try:
        batches: list[Any] = unseal(answer.parcel, buffers, objects=True)
    except (TypeError, ValueError) as error:
        # for example an object whose class was made after the fork
        raise Unpackable(f"it cannot be put together again in the worker: {error}") from error
    return batches


# ---- in the loader process


def _shed(links: Iterable[Link], descriptors: Iterable[int]) -> None:
    """Leave the worker's things alone: its signals, its sockets, its threads."""
    # the worker decides what a signal to the whole group means, and needs its data until then
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for link in links:
        link.close()
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    torch.set_num_threads(1)
    sys.setswitchinterval(_SWITCH_SECONDS)


def _serve(link: Link, sources: Mapping[str, Source], activity: Activity) -> None:
    """Answer in order until the link closes.

    A thread sends, so that the next request is fetched while an answer waits to be taken, and so that an
    answer on its way never keeps the worker from asking (each would wait for the other). There are never more
    answers in the queue than requests asked.
    """
    for source in sources.values():
        source.activity = activity
    answers: SimpleQueue[_Outgoing] = SimpleQueue()
    threading.Thread(target=_send_all, args=(link, answers), daemon=True).start()
    while True:
        try:
            header, (indices,) = link.recv()
        except LinkClosed:
            return
        answers.put(_answer(header, indices, sources))


def _send_all(link: Link, answers: SimpleQueue[_Outgoing]) -> None:
    try:
        while True:
            header, buffers = answers.get()
            try:
                link.send(header, buffers)
            except FrameError as error:
                link.send(msgspec.msgpack.encode(_Answer("unpackable", text=str(error))))
    except LinkClosed:
        return
    except BaseException:
        traceback.print_exc()
        # without its sender the process would leave the worker waiting
        os._exit(1)


def _answer(header: bytes, indices: bytearray, sources: Mapping[str, Source]) -> _Outgoing:
    ask = msgspec.msgpack.decode(header, type=_Ask)
    try:
        batches = sources[ask.source].fetch(_requested(ask, indices))
    except BaseException as error:
        text = str(error) if isinstance(error, DataError) else f"{ask.source!r} raised {type(error).__name__}: {error}"
        told = _Answer("error", text=text, traceback=own_traceback(error), place=place_of(error))
        return msgspec.msgpack.encode(told), ()
    try:
        parcel, buffers = seal(batches, objects=True)
    except (TypeError, ValueError, RuntimeError) as error:
        return msgspec.msgpack.encode(_Answer("unpackable", text=str(error))), ()
    return msgspec.msgpack.encode(_Answer("batches", parcel)), buffers


def _requested(ask: _Ask, indices: bytearray) -> Request:
    rest = iter(memoryview(indices).cast("q").tolist())
    return tuple(Positions(list(islice(rest, count)), key, first) for count, key, first in ask.batches)
