"""One end of a stream socket between two processes of one run, carrying frames.

A frame is a header (bytes that mean something to the two ends) and any number of buffers (tensors, files), which
are sent from where they lie and received into memory made for them:

    4 bytes  magic "SHL1"
    u32      length of the header, at most 16 MiB
    u32      number of buffers, at most 65536
    u64 ...  length of each buffer; their sum is at most the limit of the receiving link
    header, then the buffers, back to back

Numbers are little-endian. Every length is checked before memory is taken for it.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import threading
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from shoal.core.errors import ShoalError

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = b"SHL1"
MAX_HEADER = 16 << 20
MAX_BUFFERS = 1 << 16

Frame: TypeAlias = tuple[bytes, list[bytearray]]

_PREAMBLE = struct.Struct("<4sII")
_MAX_PIECES = 512  # of one sendmsg; Linux refuses more than 1024
_MAX_POLL = (1 << 31) - 1  # milliseconds
_DONTWAIT = socket.MSG_DONTWAIT
_NOSIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # elsewhere we rely on Python's ignoring SIGPIPE


class LinkClosed(ShoalError):
    """The other end is gone, or this end was closed."""


class FrameError(ShoalError):
    """The bytes are not a frame, or the frame is larger than allowed. Nothing was allocated for it."""


class Link:
    """One end of a stream socket between two processes; owns the socket.

    Any number of threads may send; one thread at a time may receive. A link may be used in a process forked after it
    was made, but by one of the two processes only. `close` must not race with another call.
    """

    def __init__(self, sock: socket.socket, *, limit: int = 1 << 34) -> None:
        """Take over `sock`, a connected stream socket. `limit` bounds the bytes of the buffers of a received frame."""
        self._sock = sock
        self._limit = limit
        self._sending = threading.Lock()
        self._torn: str | None = None  # why nothing more can be sent
        self._lost: str | None = None  # why nothing more can be received
        self._parsing = _parse(limit)
        self._hole = next(self._parsing)  # where the next bytes go
        self._midway = False  # whether part of a frame has come

    @classmethod
    def pair(cls) -> tuple[Link, Link]:
        """Two links that are each other's other end."""
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(left), cls(right)

    def fileno(self) -> int:
        """The descriptor, for polling; -1 once closed."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close this process's hold on the socket. Calling it again does nothing."""
        self._sock.close()

    def poll(self, timeout: float | None) -> bool:
        """Wait up to `timeout` seconds (None: without end) until bytes, or the end of the stream, can be received."""
        return self._wait_for(select.POLLIN, timeout)

    def send(
        self,
        header: bytes,
        buffers: Sequence[Buffer] = (),
        *,
        when_full: Callable[[], None] | None = None,
    ) -> None:
        """Write one frame; returns when the kernel has taken all of it. Thread-safe.

        Buffers must be C-contiguous and must not change meanwhile; they are not copied. `when_full` is called
        instead of waiting each time the socket takes no more: it returns when it is worth trying again, or raises.

        Raises LinkClosed if the other end is gone, and FrameError, with nothing written, if the frame is too large.
        An exception that leaves a frame half written ends the link: the other end finds it closed.
        """
        views = [_bytes_of(buffer) for buffer in buffers]
        pieces = [_prefix(header, views), memoryview(header), *views]
        with self._sending:
            if self._torn is not None:
                raise LinkClosed(self._torn)
            try:
                self._write([piece for piece in pieces if piece.nbytes], when_full or self._wait_until_writable)
            except BaseException as error:
                self._tear(f"an earlier frame was not sent whole ({type(error).__name__})")
                raise

    def recv(self) -> Frame:
        """Wait for one frame: its header and its buffers, which are the caller's.

        Raises LinkClosed at the end of the stream, also in the middle of a frame, and FrameError if the bytes are not
        a frame or it is too large; after a FrameError the stream has lost its step and only LinkClosed follows.
        """
        while (frame := self.try_recv()) is None:
            self.poll(None)
        return frame

    def try_recv(self, budget: int | None = None) -> Frame | None:
        """Like `recv`, but None instead of waiting; what has come of an unfinished frame is kept for the next call.

        With `budget`, also None once that many bytes were read, so that one long frame does not keep the caller.
        """
        if self._lost is not None:
            raise LinkClosed(self._lost)
        read = 0
        while budget is None or read < budget:
            try:
                count = self._sock.recv_into(self._hole, 0, _DONTWAIT)
            except BlockingIOError:
                return None
            except OSError as error:
                raise self._lose(self._why_gone(error)) from error
            if count == 0:
                raise self._lose("the other end has closed the link" + (" inside a frame" if self._midway else ""))
            read += count
            frame = self._fill(count)
            if frame is not None:
                return frame
        return None

    def _fill(self, count: int) -> Frame | None:
        self._midway = True
        self._hole = self._hole[count:]
        if self._hole.nbytes:
            return None
        try:
            self._hole = next(self._parsing)
        except StopIteration as done:
            self._begin_frame()
            frame: Frame = done.value
            return frame
        except FrameError:
            self._lose("an earlier frame could not be read")
            raise
        return None

    def _begin_frame(self) -> None:
        self._parsing = _parse(self._limit)
        self._hole = next(self._parsing)
        self._midway = False

    def _lose(self, why: str) -> LinkClosed:
        self._lost = why
        return LinkClosed(why)

    def _write(self, pieces: list[memoryview], when_full: Callable[[], None]) -> None:
        first = 0
        while first < len(pieces):
            try:
                sent = self._sock.sendmsg(pieces[first : first + _MAX_PIECES], (), _DONTWAIT | _NOSIGNAL)
            except BlockingIOError:
                when_full()
                continue
            except OSError as error:
                raise LinkClosed(self._why_gone(error)) from error
            while first < len(pieces) and sent >= pieces[first].nbytes:
                sent -= pieces[first].nbytes
                first += 1
            if sent:
                pieces[first] = pieces[first][sent:]

    def _tear(self, why: str) -> None:
        self._torn = why
        with contextlib.suppress(OSError):  # it may be closed already
            self._sock.shutdown(socket.SHUT_WR)

    def _wait_until_writable(self) -> None:
        self._wait_for(select.POLLOUT, None)

    def _wait_for(self, event: int, timeout: float | None) -> bool:
        if self.fileno() < 0:
            raise LinkClosed("this end of the link was closed")
        poller = select.poll()
        poller.register(self.fileno(), event)
        return bool(poller.poll(milliseconds(timeout)))

    def _why_gone(self, error: OSError) -> str:
        return "this end of the link was closed" if self.fileno() < 0 else f"the other end is gone ({error})"


def milliseconds(timeout: float | None) -> int | None:
    """A timeout in seconds as `select.poll` wants it: rounded up, so that waiting for the rest never spins."""
    return None if timeout is None else min(math.ceil(max(timeout, 0.0) * 1000), _MAX_POLL)


def _bytes_of(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    # an empty array of several dimensions cannot be cast
    return view.cast("B") if view.nbytes else memoryview(b"")


def _prefix(header: bytes, views: Sequence[memoryview]) -> memoryview:
    if len(header) > MAX_HEADER:
        raise FrameError(f"a header of {len(header)} bytes; at most {MAX_HEADER} fit: put large things into buffers")
    if len(views) > MAX_BUFFERS:
        raise FrameError(f"{len(views)} buffers; at most {MAX_BUFFERS} fit into one frame: send several")
    sizes = struct.pack(f"<{len(views)}Q", *(view.nbytes for view in views))
    return memoryview(_PREAMBLE.pack(MAGIC, len(header), len(views)) + sizes)


def _parse(limit: int) -> Generator[memoryview, None, Frame]:
    """Yield the places that the next bytes of the stream belong into, never an empty one; return the frame."""
    preamble = bytearray(_PREAMBLE.size)
    yield memoryview(preamble)
    magic, header_size, count = _PREAMBLE.unpack(preamble)
    if magic != MAGIC:
        raise FrameError(f"a frame begins with {MAGIC!r}, received {magic!r}: the other end speaks something else")
    if header_size > MAX_HEADER:
        raise FrameError(f"a header of {header_size} bytes was announced; at most {MAX_HEADER} are allowed")
    if count > MAX_BUFFERS:
        raise FrameError(f"{count} buffers were announced; at most {MAX_BUFFERS} are allowed")
    raw_sizes = bytearray(8 * count)
    yield from _places(raw_sizes)
    sizes = struct.unpack(f"<{count}Q", raw_sizes)
    if sum(sizes) > limit:
        raise FrameError(f"buffers of {sum(sizes)} bytes were announced; the limit of this link is {limit}")
    header = bytearray(header_size)
    yield from _places(header)
    buffers = []
    for size in sizes:
        buffers.append(bytearray(size))
        yield from _places(buffers[-1])
    return bytes(header), buffers


def _places(memory: bytearray) -> Generator[memoryview, None, None]:
    if memory:
        yield memoryview(memory)
