"""Strangers at a port: connections that say nothing, nonsense, too much, or the right words with the wrong key.

    python benchmarks/hostile.py RATE

Reads lines from standard input: a port of 127.0.0.1 to work on from now on, or 0 for rest, and the address that every
second connection comes from. Each line is answered by one line: connections begun, and those of them that came to
stand, since the one before. Ends with its input.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable

import zmq

LOOPBACK = "127.0.0.1"
MOST_OPEN = 2000
HELD = 2.5
"""Seconds after which a stranger gives a connection up, longer than a server should wait."""
IMPOSTORS = 2
"""Real clients with keys of another run, which try again and again by themselves."""

_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_GREETING = _SIGNATURE + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
_NULL = _SIGNATURE + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
_TOO_LARGE = b"\x02" + (1 << 62).to_bytes(8, "big")
_JUST_FITS = b"\x06" + (1 << 20).to_bytes(8, "big")


def words(chance: random.Random) -> list[Callable[[], bytes]]:
    """What strangers say, one after the other."""
    return [
        lambda: b"",
        lambda: chance.randbytes(256),
        lambda: _GREETING[: chance.randrange(1, 64)],
        lambda: _GREETING,
        lambda: _NULL,
        lambda: _GREETING + b"\x04\xc8" + b"\x05HELLO\x01\x00" + chance.randbytes(192),
        lambda: _GREETING + _TOO_LARGE + chance.randbytes(512),
        lambda: _GREETING + _JUST_FITS + chance.randbytes(16_384),
    ]


class Strangers:
    """Begins connections at a steady rate; belongs to one thread."""

    def __init__(self, rate: float, seed: int = 0) -> None:
        self.rate = rate
        self.begun = self.stood = 0
        self._port, self._source = 0, LOOPBACK
        self._words = words(random.Random(seed))
        self._waiting: dict[int, socket.socket] = {}  # for their connection
        self._open: deque[tuple[float, socket.socket]] = deque()
        self._poll = select.epoll()
        self._next = 0.0

    def aim(self, port: int, source: str) -> tuple[int, int]:
        """Leave the port of before, and work on this one. What was begun there, and what came to stand."""
        while self._open:
            self._give_up()
        counted, self.begun, self.stood = (self.begun, self.stood), 0, 0
        self._port, self._source, self._next = port, source, time.monotonic()
        return counted

    def turn(self) -> float:
        """Do what is due. Seconds until more is."""
        now = time.monotonic()
        while self._port and self._next <= now:
            self._begin(now)
            self._next += 1 / self.rate
        for descriptor, _ in self._poll.poll(0):
            self._speak(descriptor)
        while self._open and (self._open[0][0] < now - HELD or len(self._open) > MOST_OPEN):
            self._give_up()
        return max(0.002, self._next - time.monotonic()) if self._port else 0.1

    def _begin(self, now: float) -> None:
        self.begun += 1
        one = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        one.bind((self._source if self.begun % 2 else LOOPBACK, 0))
        try:
            one.connect((LOOPBACK, self._port))
        except BlockingIOError:
            pass
        except OSError:
            one.close()
            return
        self._waiting[one.fileno()] = one
        self._poll.register(one.fileno(), select.EPOLLOUT)
        self._open.append((now, one))

    def _speak(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        one = self._waiting.pop(descriptor)
        if one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            return
        self.stood += 1
        with contextlib.suppress(OSError):
            one.send(self._words[self.stood % len(self._words)]())

    def _give_up(self) -> None:
        _, one = self._open.popleft()
        if self._waiting.pop(one.fileno(), None) is not None:
            self._poll.unregister(one.fileno())
        one.close()


class Impostors:
    """ZeroMQ clients with CURVE, as the run's own, but with keys of their own making."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._clients: list[zmq.Socket[bytes]] = []

    def aim(self, port: int, source: str) -> None:
        for client in self._clients:
            client.close(linger=0)
        self._clients = [self._client(port, source) for _ in range(IMPOSTORS)] if port else []

    def _client(self, port: int, source: str) -> zmq.Socket[bytes]:
        client = self._context.socket(zmq.DEALER)
        client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
        client.curve_serverkey, _ = zmq.curve_keypair()
        client.setsockopt(zmq.RECONNECT_IVL, 20)
        client.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        client.connect(f"tcp://{source}:0;{LOOPBACK}:{port}")
        return client

    def close(self) -> None:
        self.aim(0, LOOPBACK)
        self._context.destroy(linger=0)


def main() -> int:
    strangers, impostors = Strangers(float(sys.argv[1])), Impostors()
    pause = 0.0
    while True:
        if select.select([sys.stdin], [], [], pause)[0]:
            line = sys.stdin.readline()
            if not line:
                impostors.close()
                return 0
            port, source = line.split()
            impostors.aim(int(port), source)
            print(*strangers.aim(int(port), source), flush=True)
        pause = strangers.turn()


if __name__ == "__main__":
    sys.exit(main())
