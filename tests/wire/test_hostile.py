"""Strangers at a server's port: they get nothing, learn nothing, and take nothing from those of the run."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from shoal.wire import curve
from shoal.wire.curve import Client, Keys, Server
from shoal.wire.gate import guest_address

LIMIT = 10_000
SECONDS = 10.0
SHORT = 0.2
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
GREETING = SIGNATURE + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


class Served:
    """A server in a thread of its own, which keeps what it hears and answers it."""

    def __init__(self, keys: Keys) -> None:
        self.heard: list[bytes] = []
        self.keys = keys
        self._stop = False
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        assert self._ready.wait(SECONDS)

    def _serve(self) -> None:
        with Server(self.keys, "127.0.0.1", limit=LIMIT) as server:
            self.endpoint = server.endpoint
            self._ready.set()
            while not self._stop:
                server.wait(0.02)
                while (message := server.receive()) is not None:
                    self.heard.append(message[1])
                    server.send(message[0], b"answer to " + message[1])

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    @property
    def guest(self) -> str:
        return guest_address(self.keys.server_public, self.keys.client_public)

    def close(self) -> None:
        self._stop = True
        self._thread.join(SECONDS)

    def still_serves(self) -> None:
        with Client(self.endpoint, self.keys, limit=LIMIT) as client:
            client.send(b"friend")
            assert client.receive(SECONDS) == b"answer to friend"
        self.heard.remove(b"friend")


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served(Keys.make())
    yield served
    served.close()


def connected(served: Served) -> socket.socket:
    """As one who has seen where clients of the run come from; others are not even let in."""
    return socket.create_connection(("127.0.0.1", served.port), timeout=SECONDS, source_address=(served.guest, 0))


def all_it_says(one: socket.socket, seconds: float = SECONDS) -> tuple[bytes, bool]:
    """What comes until the other end closes, and whether it did."""
    said, deadline = b"", time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        one.settimeout(left)
        try:
            more = one.recv(65536)
        except TimeoutError:
            break
        except ConnectionError:
            return said, True
        if not more:
            return said, True
        said += more
    return said, False


def test_a_stranger_who_has_not_seen_a_client_does_not_even_connect(served: Served) -> None:
    with pytest.raises(TimeoutError):
        socket.create_connection(("127.0.0.1", served.port), timeout=SHORT)
    served.still_serves()


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda keys: Keys.make(), id="keys of another run"),
        pytest.param(
            lambda keys: Keys(keys.server_public, b"", *zmq.curve_keypair()), id="the server's key, and one of its own"
        ),
        pytest.param(
            lambda keys: Keys(keys.server_public, b"", keys.client_public, Keys.make().client_secret),
            id="the client's public key without its secret",
        ),
        pytest.param(
            lambda keys: Keys(Keys.make().server_public, b"", keys.client_public, keys.client_secret),
            id="the client's key, and another server's",
        ),
    ],
)
def test_a_client_with_a_wrong_key_is_not_heard(served: Served, make: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve, "guest_address", lambda *_: served.guest)
    with Client(served.endpoint, make(served.keys), limit=LIMIT) as stranger:  # type: ignore[operator]
        stranger.send(b"let me in")
        assert stranger.receive(SHORT) is None
    served.still_serves()
    assert served.heard == []


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ, zmq.SUB, zmq.PUSH])
def test_a_client_without_encryption_is_not_heard(served: Served, kind: int) -> None:
    context = zmq.Context()
    with context.socket(kind) as plain:
        plain.linger = 0
        plain.connect(f"tcp://{served.guest}:0;127.0.0.1:{served.port}")
        if kind == zmq.SUB:
            plain.subscribe(b"")
        else:
            with contextlib.suppress(zmq.Again):
                plain.send(b"let me in", zmq.DONTWAIT)
        if kind != zmq.PUSH:
            assert plain.poll(SHORT * 1000) == 0
    context.term()
    served.still_serves()
    assert served.heard == []


def test_strangers_learn_nothing_that_depends_on_the_run(served: Served) -> None:
    other = Served(Keys.make())
    chance = random.Random(5)
    openings = [
        b"GET / HTTP/1.1\r\n\r\n",
        GREETING + b"\x04\xc8\x05HELLO\x01\x00" + chance.randbytes(192),
        GREETING + b"\x04\x06\x05READY",
        GREETING + b"\x00\x05hello",
        GREETING + b"\x02" + (1 << 62).to_bytes(8, "big") + bytes(100),
        GREETING + b"\x06" + (LIMIT * 2).to_bytes(8, "big"),
        chance.randbytes(300),
    ]
    try:
        for opening in openings:
            answers = []
            for one in (served, other):
                with connected(one) as stranger:
                    stranger.sendall(opening)
                    said, ended = all_it_says(stranger, 4.0)
                assert ended, f"still open after {opening[:80]!r}"
                answers.append(said)
            assert answers[0] == answers[1]
            assert len(answers[0]) <= 64
        served.still_serves()
        assert served.heard == other.heard == []
    finally:
        other.close()


def test_who_says_nothing_or_too_slowly_is_cut_off(served: Served) -> None:
    """All at once, so that it is waited for once: nothing, a part of the greeting, all of it, a byte at a time."""
    silent, partial, greeted, slow = (connected(served) for _ in range(4))
    with silent, partial, greeted, slow:
        began = time.monotonic()
        partial.sendall(GREETING[:11])
        greeted.sendall(GREETING)
        sent = 0
        with contextlib.suppress(OSError):
            for byte in GREETING + b"\x04\xc8\x05HELLO" + bytes(2000):
                slow.sendall(bytes([byte]))
                sent += 1
                time.sleep(0.03)
                if time.monotonic() - began > 4.0:
                    break
        assert sent < 110, "a slow client must be cut off after two seconds, whatever it sends"
        for stranger in (silent, partial, greeted):
            _, ended = all_it_says(stranger, 3.0)
            assert ended
        assert time.monotonic() - began < 6.0
    served.still_serves()


def test_recorded_bytes_are_worth_nothing_on_another_connection(served: Served) -> None:
    recorded: list[bytes] = []
    proxy = socket.create_server(("127.0.0.1", 0))
    proxy.settimeout(SECONDS)

    def pump(source: socket.socket, target: socket.socket, record: list[bytes] | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if record is not None:
                    record.append(data)
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def relay() -> None:
        inner, _ = proxy.accept()
        with inner, connected(served) as outer:
            back = threading.Thread(target=pump, args=(outer, inner, None))
            back.start()
            pump(inner, outer, recorded)
            back.join()

    thread = threading.Thread(target=relay)
    thread.start()
    with proxy:
        with Client(f"tcp://127.0.0.1:{proxy.getsockname()[1]}", served.keys, limit=LIMIT) as client:
            client.send(b"once")
            assert client.receive(SECONDS) == b"answer to once"
        thread.join(SECONDS)
    everything = b"".join(recorded)
    assert served.heard == [b"once"] and len(everything) > 400, "the recording has the whole connection"
    assert b"once" not in everything
    for chunks in ([everything], recorded):
        with connected(served) as replay:
            for chunk in chunks:
                with contextlib.suppress(OSError):
                    replay.sendall(chunk)
                    time.sleep(0.02)
            _, ended = all_it_says(replay)
            assert ended
    served.still_serves()
    assert served.heard == [b"once"]


def test_a_message_changed_on_the_way_is_not_heard(served: Served) -> None:
    proxy = socket.create_server(("127.0.0.1", 0))
    proxy.settimeout(SECONDS)

    def relay() -> None:
        inner, _ = proxy.accept()
        with inner, connected(served) as outer:
            for source in (inner, outer):
                source.setblocking(False)
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline:
                for source, target in ((inner, outer), (outer, inner)):
                    try:
                        data = bytearray(source.recv(65536))
                    except BlockingIOError:
                        continue
                    except OSError:
                        return
                    if not data:
                        return
                    if b"MESSAGE" in data:
                        data[-1] ^= 1
                    target.sendall(data)
                time.sleep(0.001)

    thread = threading.Thread(target=relay)
    thread.start()
    with proxy, Client(f"tcp://127.0.0.1:{proxy.getsockname()[1]}", served.keys, limit=LIMIT) as client:
        client.send(b"changed")
        assert client.receive(SHORT) is None
    thread.join(SECONDS)
    served.still_serves()
    assert served.heard == []


def test_a_flood_costs_few_descriptors_and_the_run_goes_on(served: Served) -> None:
    """Strangers come as fast as they can and stay: those of the run are heard, and newcomers of the run let in."""
    open_now = len(os.listdir("/proc/self/fd"))
    strangers: list[socket.socket] = []
    try:
        with Client(served.endpoint, served.keys, limit=LIMIT) as standing:
            standing.send(b"before")
            assert standing.receive(SECONDS) == b"answer to before"
            for number in range(1000):
                one = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                strangers.append(one)
                one.bind((served.guest if number % 2 else "127.0.0.1", 0))
                with contextlib.suppress(BlockingIOError):
                    one.connect(("127.0.0.1", served.port))
                if number % 5 == 0:
                    time.sleep(0.002)
                with contextlib.suppress(OSError):
                    one.send(GREETING)
            accepted = len(os.listdir("/proc/self/fd")) - open_now - len(strangers)
            assert accepted < 400, f"{accepted} of 1000 strangers were let in at once"
            began = time.monotonic()
            standing.send(b"during")
            assert standing.receive(SECONDS) == b"answer to during"
            served.still_serves()
            assert time.monotonic() - began < 6.0
    finally:
        for one in strangers:
            one.close()
    served.still_serves()
    assert served.heard == [b"before", b"during"]


def test_announced_sizes_take_no_memory(served: Served) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    strangers = [connected(served) for _ in range(30)]
    try:
        for number, one in enumerate(strangers):
            size = (1 << 40) if number % 2 else LIMIT
            with contextlib.suppress(OSError):
                one.sendall(GREETING + b"\x06" + size.to_bytes(8, "big") + b"x" * 100)
        served.still_serves()
    finally:
        for one in strangers:
            one.close()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 20_000, f"{grown} KB"
