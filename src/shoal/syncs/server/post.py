"""Letters with large frames between workers and servers: ZeroMQ with CURVE, as in `shoal.wire.curve`.

A `Port` hears all `Line`s that lead to it. A message is a letter, which is small, and any number of frames, which are
raw bytes. It arrives whole or not at all.

On the wire a frame is cut into chunks. CURVE encrypts, sends and decrypts one of them at a time, so with chunks that
fit into the kernel's buffers both ends work at once; a frame of 64 MB in one piece takes more than twice as long.

**Receiving.** ZeroMQ decrypts into memory of its own, and there is no way to give it another. So a frame of one chunk
is handed out as it lies there, without a copy. A larger one has to be put together, which is a copy: into the buffers
that `room` gives, if the caller has a place for it, else into new memory.

**Sending.** A line sends frames from where they lie: who sends leaves them unchanged until the answer has come. A port
copies them, because weights change as soon as the next step is applied and nobody tells when an answer has left.

**Limits.** A chunk that is announced as larger than `CHUNK` ends the connection before there is memory for it. Messages
of another form, with too many frames or more bytes than the limit are dropped, and counted in `dropped`; nothing is
allocated by what they announce. ZeroMQ itself keeps the chunks of a message until its last has come, however many they
are, and has no option against that: so who has the keys of the run, and nobody else, could fill the memory.

Nothing is dropped because the other side is slow: a queue for sending has no bound, since answers are as many as
requests, and a full one for receiving stops the sender.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import zmq
from zmq.utils.garbage import gc as lent

from shoal.core.errors import ConfigError, ShoalError
from shoal.wire.curve import ClientSide, Endpoint, Keys, ServerSide, has_message

CHUNK = 512 << 10
"""Bytes of a frame that travel at once; measured, see benchmarks/serverbytes.py."""
MOST_FRAMES = 4096
"""In one message."""

_MOST_LIMIT = 1 << 40
_MOST_LETTER = 1 << 20
_SIZE = struct.Struct("<Q")
_QUEUED = 64
"""Messages of one peer that wait here to be received; then it has to wait."""
_PATIENCE = 60_000
"""Milliseconds without progress that end a connection: a busy receiver is not a dead one."""
_OPTIONS: Mapping[int, int] = {zmq.SNDHWM: 0, zmq.RCVHWM: _QUEUED, zmq.TCP_MAXRT: _PATIENCE}

Bytes = bytes | bytearray | memoryview
Room = Callable[[bytes, list[int]], Sequence[memoryview | None] | None]
"""Gets a letter and the sizes of its frames, and gives a writable buffer of that size for each; None: there is none."""


class Message(NamedTuple):
    letter: bytes
    frames: list[memoryview]
    """Not for writing: they may lie in ZeroMQ's memory, which lives as long as they do."""


class Arrival(NamedTuple):
    peer: bytes
    """Who sent it, as `Port.send` takes it; another one after a connection broke."""
    letter: bytes
    frames: list[memoryview]


class _Mail(Endpoint):
    """What port and line have in common: the form of a message."""

    received: int
    """Bytes of letters and frames so far."""
    sent: int
    dropped: int
    """Messages that were not of this form."""
    _most: int
    _lends: bool

    def _begin(self, limit: int) -> None:
        self.received = self.sent = self.dropped = 0
        self._most = limit
        self._lends = False

    def _write(self, lead: list[bytes], letter: bytes, frames: Sequence[Bytes], copy: bool) -> bool:
        self._mine()
        views = [_flat(frame) for frame in frames]
        total = self._may_write(letter, views)
        parts: list[bytes | memoryview] = [*lead, letter]
        if views:
            parts.append(b"".join(_SIZE.pack(len(view)) for view in views))
        small = len(parts)
        for view in views:
            parts += [view[start : start + CHUNK] for start in range(0, len(view), CHUNK)]
        if not copy and not self._lends and any(len(part) >= zmq.COPY_THRESHOLD for part in parts[small:]):
            self._lends = True
            _lenders.begin(self)
        for number, part in enumerate(parts):
            flags = zmq.DONTWAIT | (zmq.SNDMORE if number + 1 < len(parts) else 0)
            try:
                self._socket.send(part, flags, copy=copy or number < small)
            except zmq.ZMQError as error:
                if number == 0 and error.errno in (zmq.EAGAIN, errno.EHOSTUNREACH):
                    return False
                raise
        self.sent += total
        return True

    def _may_write(self, letter: bytes, views: Sequence[memoryview]) -> int:
        """All its bytes. Raises ShoalError if the other side would not take them."""
        total = len(letter) + sum(map(len, views))
        if len(letter) > _MOST_LETTER:
            raise ShoalError(f"a letter of {len(letter)} bytes; at most {_MOST_LETTER} may be sent, put more in frames")
        if len(views) > MOST_FRAMES:
            raise ShoalError(f"a message of {len(views)} frames; at most {MOST_FRAMES} may be sent at once")
        if total > self._most:
            raise ShoalError(f"a message of {total} bytes; at most {self._most} may be sent at once")
        return total

    def _read(self, lead: int, room: Room | None) -> tuple[list[zmq.Frame], Message] | None:
        """The next message that has this form, and what stands before it. None, if there is none."""
        while (parts := self._parts(lead)) is not None:
            sizes = _sizes(parts[lead:]) if len(parts) > lead else None
            if sizes is None or len(parts[lead]) + sum(sizes) > self._most:
                self.dropped += 1
                continue
            letter, chunks = parts[lead].bytes, parts[lead + 2 :]
            self.received += len(letter) + sum(sizes)
            return parts[:lead], Message(letter, _joined(chunks, sizes, room(letter, sizes) if room else None))
        return None

    def _parts(self, lead: int) -> list[zmq.Frame] | None:
        """All parts of one message of ZeroMQ; none of them, if they are more than may come. None: nothing has come."""
        parts: list[zmq.Frame] = []
        most_parts = lead + 2 + MOST_FRAMES + self._most // CHUNK
        most_bytes = self._most + lead * _MOST_LETTER + _SIZE.size * MOST_FRAMES
        count = total = 0
        more = True
        while more:
            try:
                part = self._socket.recv(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return None  # only before the first: ZeroMQ hands out what is complete
            more = part.more
            count += 1
            total += len(part)
            if count > most_parts or total > most_bytes:
                parts.clear()
            else:
                parts.append(part)
        return parts if len(parts) == count else []

    def close(self) -> None:
        mine = not self._closed and os.getpid() == self._pid
        super().close()
        if mine and self._lends:
            _lenders.end(self)


def _flat(frame: Bytes) -> memoryview:
    view = memoryview(frame)
    return view.cast("B") if view.nbytes else memoryview(b"")


def _cuts(size: int) -> int:
    """Chunks of a frame."""
    return -(-size // CHUNK)


def _sizes(parts: Sequence[zmq.Frame]) -> list[int] | None:
    """Of the frames of a message, checked against what has come. None: it is not one."""
    if len(parts) == 1:
        return []
    heads, chunks = parts[1], parts[2:]
    if len(heads) % _SIZE.size or not 1 <= len(heads) // _SIZE.size <= MOST_FRAMES:
        return None
    sizes = [size for (size,) in _SIZE.iter_unpack(heads.buffer)]
    if sum(sizes) != sum(map(len, chunks)) or sum(map(_cuts, sizes)) != len(chunks):
        return None
    lengths = (min(CHUNK, size - start) for size in sizes for start in range(0, size, CHUNK))
    return sizes if all(length == len(chunk) for length, chunk in zip(lengths, chunks, strict=True)) else None


def _joined(
    chunks: Sequence[zmq.Frame], sizes: list[int], given: Sequence[memoryview | None] | None
) -> list[memoryview]:
    """The frames: in the buffers that are given, else as they lie, or in new memory."""
    if given is not None and len(given) != len(sizes):
        raise ShoalError(
            f"room for {len(given)} frames was given and {len(sizes)} have come; give one for each, or None"
        )
    return list(_frames(iter(chunks), sizes, given or [None] * len(sizes)))


def _frames(chunks: Iterator[zmq.Frame], sizes: list[int], given: Sequence[memoryview | None]) -> Iterator[memoryview]:
    for size, buffer in zip(sizes, given, strict=True):
        if buffer is None and size <= CHUNK:
            yield next(chunks).buffer if size else memoryview(b"")
            continue
        target = memoryview(bytearray(size)) if buffer is None else _flat(buffer)
        if len(target) != size:
            raise ShoalError(f"room of {len(target)} bytes was given for a frame of {size}; give exactly as much")
        for start in range(0, size, CHUNK):
            target[start : start + CHUNK] = next(chunks).buffer
        yield target


class _Lenders:
    """Ends pyzmq's thread that hears which memory is free again, when the last who lent any has closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[tuple[int, int]] = set()

    def begin(self, one: Endpoint) -> None:
        with self._lock:
            self._open.add((os.getpid(), id(one)))

    def end(self, one: Endpoint) -> None:
        with self._lock:
            self._open.discard((os.getpid(), id(one)))
            if any(pid == os.getpid() for pid, _ in self._open):
                return
            deadline = time.monotonic() + 1.0
            while lent.refs and time.monotonic() < deadline:
                time.sleep(0.001)
            if not lent.refs:  # else somebody else's are on their way
                lent.stop()


_lenders = _Lenders()


def _of_a_frame(limit: int) -> int:
    """What ZeroMQ lets through at most, for messages of so many bytes."""
    if not 1 <= limit <= _MOST_LIMIT:
        raise ConfigError(f"limit={limit} bytes for one message; it must be between 1 and {_MOST_LIMIT}")
    return max(min(limit, CHUNK), _SIZE.size * MOST_FRAMES)


class Port(_Mail, ServerSide):
    """Where a server hears workers and other servers. Belongs to one thread of the process that made it.

    Newcomers are let in inside `receive` and `wait`: without a call for two seconds they have to try again.
    """

    def __init__(
        self,
        keys: Keys,
        address: str,
        *,
        limit: int,
        port: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listen at an address of this machine; port 0 takes a free one. `limit` is of all bytes of one message.

        Raises ConfigError if that cannot be, or the keys lack the server's part.
        """
        options = {**_OPTIONS, zmq.ROUTER_MANDATORY: 1}
        self._begin(limit)
        super().__init__(keys, address, port=port, limit=_of_a_frame(limit), clock=clock, options=options)

    def receive(self, room: Room | None = None) -> Arrival | None:
        """The next message; None, if there is none. Never waits."""
        self._mine()
        self._attend()
        found = self._read(1, room)
        return None if found is None else Arrival(found[0][0].bytes, *found[1])

    def send(self, peer: bytes, letter: bytes, frames: Sequence[Bytes] = (), *, copy: bool = True) -> bool:
        """Send to whom `receive` named. Never waits. False: that one is gone.

        With copy=False frames are sent from where they lie, and must not change for as long as that may take. Raises
        ShoalError for what is larger than may be sent.
        """
        return self._write([peer], letter, frames, copy)


class Line(_Mail, ClientSide):
    """Leads to a port, and finds it again when it was away. Belongs to one thread of the process that made it."""

    def __init__(self, endpoint: str, keys: Keys, *, limit: int) -> None:
        """Returns at once, whether the port is there or not. `limit` is of all bytes of one message.

        Raises ConfigError if `endpoint` is not an address.
        """
        self._begin(limit)
        self._breaks = 0
        self._ends: zmq.Socket[bytes] | None = None
        super().__init__(endpoint, keys, limit=_of_a_frame(limit), options=_OPTIONS)
        self._ends = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    @property
    def breaks(self) -> int:
        """Connections that have broken so far: after another one, what is not answered may have been lost."""
        self._mine()
        self._attend()
        return self._breaks

    def _own_sockets(self) -> list[zmq.Socket[bytes]]:
        return [self._socket] if self._ends is None else [self._socket, self._ends]

    def _attend(self) -> float | None:
        while self._ends is not None and has_message(self._ends):
            self._ends.recv_multipart(zmq.DONTWAIT)
            self._breaks += 1
        return None

    def _release(self) -> None:
        if self._ends is not None:
            self._attend()
            self._socket.disable_monitor()

    def send(self, letter: bytes, frames: Sequence[Bytes] = (), *, copy: bool = False) -> bool:
        """Send, or keep until the port is there. Never waits.

        Frames are sent from where they lie, unless copy=True: leave them unchanged until an answer has come, or the
        line is closed. What was on its way when a connection broke is lost: look at `breaks`, and send it again.
        Raises ShoalError for what is larger than may be sent.
        """
        return self._write([], letter, frames, copy)

    def receive(self, timeout: float = 0.0, room: Room | None = None) -> Message | None:
        """The next message; None, if none comes within `timeout` seconds."""
        self._mine()
        deadline = time.monotonic() + timeout
        while True:
            found = self._read(0, room)
            left = deadline - time.monotonic()
            if found is not None or left <= 0:
                return None if found is None else found[1]
            self.wait(left)
