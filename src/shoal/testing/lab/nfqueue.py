"""A client of the kernel's netfilter queue, for one purpose: every packet of a queue waits, and then goes on.

The protocol is netlink's (linux/netfilter/nfnetlink_queue.h). Only the numbers of packets come here, not their content.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from collections import deque
from contextlib import suppress

from shoal.core.errors import LabUnavailable

_NETLINK_NETFILTER = 12
_SOL_NETLINK, _NO_ENOBUFS = 270, 5
_SO_RCVBUFFORCE = 33
_QUEUE_SUBSYSTEM = 3 << 8
_PACKET, _CONFIG, _VERDICT_BATCH = (_QUEUE_SUBSYSTEM | number for number in (0, 2, 3))
_REQUEST, _ACK, _ERROR = 1, 4, 2
_CFG_COMMAND, _CFG_PARAMS, _CFG_MAXLEN, _CFG_MASK, _CFG_FLAGS = 1, 2, 3, 4, 5
_COMMAND_BIND, _COPY_META, _KEEP_BUNDLES = 1, 1, 4  # the last: NFQA_CFG_F_GSO
_VERDICT_HEADER, _PACKET_HEADER = 2, 1
_ACCEPT = 1
_MOST_WAITING = 1 << 16  # packets

_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_GENERAL = struct.Struct(">BBH")  # family, version, number of the queue
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_FIRST_ATTRIBUTE = _HEADER.size + _GENERAL.size


class DelayQueue:
    """Holds back the packets of queue `number` of the network namespace it is made in. For one thread.

    The packets keep their order. When this is closed, or its process dies, the kernel drops those that wait, and lets
    later ones pass if their rule says `--queue-bypass`.
    """

    def __init__(self, number: int) -> None:
        """Raises LabUnavailable if the kernel has no such queues."""
        self.delay = 0.0
        """Seconds, for packets that come from now on."""
        self._number = number
        self._waiting: deque[tuple[float, int]] = deque()  # when due, number of the packet
        try:
            self._sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER)
        except OSError as error:
            raise _missing(error) from error
        try:
            self._sock.bind((0, 0))
            self._sock.setsockopt(_SOL_NETLINK, _NO_ENOBUFS, 1)
            with suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 16 << 20)
            self._configure(_CFG_COMMAND, struct.pack(">BxH", _COMMAND_BIND, 0))
            self._configure(_CFG_PARAMS, struct.pack(">IB", 0, _COPY_META))
            self._configure(_CFG_MAXLEN, struct.pack(">I", _MOST_WAITING))
            self._configure(_CFG_FLAGS, struct.pack(">I", _KEEP_BUNDLES), (_CFG_MASK, struct.pack(">I", _KEEP_BUNDLES)))
        except OSError as error:
            self._sock.close()
            raise _missing(error) from error
        self._sock.setblocking(False)

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()

    def seconds_to_next(self) -> float | None:
        """How long until `serve` has something to let go; None if nothing waits."""
        return max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None

    def serve(self) -> None:
        """Take in what has come, and let go what is due. Never waits."""
        with suppress(BlockingIOError):
            for _ in range(256):  # then the due ones have their turn
                self._take_in(self._sock.recv(65536))
        last = self._take_due(time.monotonic())
        if last is not None:
            verdict = struct.pack(">II", _ACCEPT, last)
            # ENOENT: the kernel dropped them meanwhile (the link went down)
            with suppress(FileNotFoundError):
                self._sock.send(self._message(_VERDICT_BATCH, _REQUEST, _attribute(_VERDICT_HEADER, verdict)))

    def _take_in(self, messages: bytes) -> None:
        due = time.monotonic() + self.delay
        self._waiting.extend((due, number) for number in _packets(messages))

    def _take_due(self, now: float) -> int | None:
        last = None
        while self._waiting and self._waiting[0][0] <= now:
            last = self._waiting.popleft()[1]
        return last

    def _configure(self, kind: int, value: bytes, *more: tuple[int, bytes]) -> None:
        attributes = b"".join(_attribute(*pair) for pair in ((kind, value), *more))
        self._sock.send(self._message(_CONFIG, _REQUEST | _ACK, attributes))
        while True:
            if not select.select([self._sock], [], [], 2.0)[0]:
                raise TimeoutError(errno.ETIMEDOUT, "no answer from the kernel")
            answer = self._sock.recv(65536)
            _, what, _, _, _ = _HEADER.unpack_from(answer)
            if what == _ERROR:
                (code,) = struct.unpack_from("=i", answer, _HEADER.size)
                if code:
                    raise OSError(-code, os.strerror(-code))
                return
            self._take_in(answer)

    def _message(self, kind: int, flags: int, attributes: bytes) -> bytes:
        body = _GENERAL.pack(socket.AF_UNSPEC, 0, self._number) + attributes
        return _HEADER.pack(_HEADER.size + len(body), kind, flags, 0, 0) + body


def _attribute(kind: int, value: bytes) -> bytes:
    padding = b"\0" * (-len(value) % 4)
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + padding


def _packets(data: bytes) -> list[int]:
    """The numbers of the packets that `data`, one or more netlink messages, tells of."""
    found = []
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, _, _, _ = _HEADER.unpack_from(data, at)
        if length < _HEADER.size:
            break
        if kind == _PACKET and _ATTRIBUTE.unpack_from(data, at + _FIRST_ATTRIBUTE)[1] == _PACKET_HEADER:
            (number,) = struct.unpack_from(">I", data, at + _FIRST_ATTRIBUTE + _ATTRIBUTE.size)
            found.append(number)
        at += (length + 3) & ~3
    return found


def _missing(error: OSError) -> LabUnavailable:
    return LabUnavailable(
        f"delay needs the kernel's netfilter queues, and they do not answer ({error.strerror}); "
        "load them with `modprobe -a nfnetlink_queue xt_NFQUEUE`, or leave delay out"
    )
