"""Ports and lines: large frames arrive whole, limits hold, and strangers do not get in."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from shoal.core.errors import ConfigError, ShoalError
from shoal.syncs.server import post
from shoal.syncs.server.post import CHUNK, MOST_FRAMES, Arrival, Line, Message, Port
from shoal.wire import curve
from shoal.wire.curve import Keys
from shoal.wire.gate import guest_address

MB = 1 << 20
LIMIT = 100_000
LARGE = 80 * MB
SECONDS = 20.0
SHORT = 0.15
"""Long enough for what must not come to have come."""


@pytest.fixture
def keys() -> Keys:
    return Keys.make()


@pytest.fixture
def port(keys: Keys) -> Iterator[Port]:
    with Port(keys, "127.0.0.1", limit=LIMIT) as port:
        yield port


@pytest.fixture
def line(port: Port, keys: Keys) -> Iterator[Line]:
    with Line(port.endpoint, keys, limit=LIMIT) as line:
        yield line


def number_of(port: Port) -> int:
    return int(port.endpoint.rpartition(":")[2])


def heard(port: Port, seconds: float = SECONDS, room: post.Room | None = None) -> Arrival:
    deadline = time.monotonic() + seconds
    while (arrival := port.receive(room)) is None:
        assert time.monotonic() < deadline, "nothing came"
        port.wait(deadline - time.monotonic())
    return arrival


def answered(port: Port, line: Line, letter: bytes = b"there") -> None:
    """The two speak with each other."""
    assert line.send(letter, [b"frame", b""])
    arrival = heard(port)
    assert (arrival.letter, [bytes(frame) for frame in arrival.frames]) == (letter, [b"frame", b""])
    assert port.send(arrival.peer, letter[::-1], [b"other"])
    answer = line.receive(SECONDS)
    assert answer is not None
    assert (answer.letter, [bytes(frame) for frame in answer.frames]) == (letter[::-1], [b"other"])


def own_address() -> str | None:
    """An IPv4 address of this machine that is not on the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("198.51.100.1", 9))  # nothing is sent
        return str(probe.getsockname()[0])
    return None


@contextlib.contextmanager
def raw_line(port: Port, keys: Keys) -> Iterator[zmq.Socket[bytes]]:
    """One who has the keys, and says what it likes."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger = raw.sndhwm = 0
        raw.curve_serverkey = keys.server_public
        raw.curve_publickey, raw.curve_secretkey = keys.client_public, keys.client_secret
        guest = guest_address(keys.server_public, keys.client_public)
        raw.connect(f"tcp://{guest}:0;127.0.0.1:{number_of(port)}")
        yield raw


def test_letters_and_frames_keep_their_order(port: Port, line: Line) -> None:
    for number in range(100):
        line.send(b"%d" % number, [bytes([number])] * (number % 3))
    got = [heard(port) for _ in range(100)]
    assert [arrival.letter for arrival in got] == [b"%d" % number for number in range(100)]
    assert [[bytes(f) for f in arrival.frames] for arrival in got] == [[bytes([n])] * (n % 3) for n in range(100)]
    assert port.receive() is None and line.receive() is None


def test_64_mb_arrive_intact_both_ways(keys: Keys) -> None:
    there = bytearray(random.Random(1).randbytes(64 * MB))
    back = [there[: 5 * MB + 1], there[7 : 7 + CHUNK], bytearray(), there[9 : 9 + 58 * MB]]
    with Port(keys, "127.0.0.1", limit=LARGE) as port, Line(port.endpoint, keys, limit=LARGE) as line:
        line.send(b"push", [there])
        arrival = heard(port)
        assert arrival.letter == b"push" and [frame == there for frame in arrival.frames] == [True]
        kept = [bytes(frame) for frame in back]
        port.send(arrival.peer, b"pull", back)
        for frame in back:
            frame[:] = bytes(len(frame))  # a port has copied them
        answer = line.receive(SECONDS)
        assert answer is not None
        assert [frame == was for frame, was in zip(answer.frames, kept, strict=True)] == [True] * 4
        assert port.received == line.sent == 4 + 64 * MB
        assert port.sent == line.received == 4 + sum(map(len, back))


@pytest.mark.parametrize("size", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_frames_at_the_edges_of_chunks(keys: Keys, size: int) -> None:
    data = random.Random(size).randbytes(size)
    with Port(keys, "127.0.0.1", limit=LARGE) as port, Line(port.endpoint, keys, limit=LARGE) as line:
        line.send(b"x", [data, b"", data])
        assert [bytes(frame) for frame in heard(port).frames] == [data, b"", data]


def test_frames_are_put_where_there_is_room(keys: Keys) -> None:
    data = random.Random(3).randbytes(3 * CHUNK + 5)
    place = bytearray(len(data))
    asked: list[tuple[bytes, list[int]]] = []

    def room(letter: bytes, sizes: list[int]) -> list[memoryview | None]:
        asked.append((letter, sizes))
        return [None, memoryview(place)]

    with Port(keys, "127.0.0.1", limit=LARGE) as port, Line(port.endpoint, keys, limit=LARGE) as line:
        line.send(b"part", [b"small", data])
        arrival = heard(port, room=room)
        assert asked == [(b"part", [5, len(data)])]
        assert bytes(arrival.frames[0]) == b"small" and place == data and arrival.frames[1].obj is place
        port.send(arrival.peer, b"back", [data])
        assert line.receive(SECONDS, lambda *_: None) is not None
        for wrong in ([memoryview(place)], [None, memoryview(place)[1:]]):
            line.send(b"part", [b"small", data])
            with pytest.raises(ShoalError, match="give"):
                heard(port, room=lambda *_, wrong=wrong: wrong)
        line.send(b"still")
        assert heard(port).letter == b"still"


def test_two_lines_at_once_are_told_apart(keys: Keys) -> None:
    frames = {name: random.Random(name).randbytes(9 * MB) for name in (b"one", b"two")}
    answers: dict[bytes, Message | None] = {}

    def speak(endpoint: str, name: bytes) -> None:
        with Line(endpoint, keys, limit=LARGE) as line:
            line.send(name, [frames[name]] * 2)
            answers[name] = line.receive(SECONDS)

    with Port(keys, "127.0.0.1", limit=LARGE) as port:
        threads = [threading.Thread(target=speak, args=(port.endpoint, name)) for name in frames]
        for thread in threads:
            thread.start()
        for _ in threads:
            peer, letter, got = heard(port)
            assert [frame == frames[letter] for frame in got] == [True, True]
            port.send(peer, letter, [frames[letter]])
        deadline = time.monotonic() + SECONDS
        while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
            port.wait(0.02)
    for name, data in frames.items():
        answer = answers[name]
        assert answer is not None and answer.letter == name and answer.frames[0] == data


def test_nothing_is_dropped_when_the_other_side_is_slow(keys: Keys) -> None:
    count, block = 3000, bytes(10_000)
    with Port(keys, "127.0.0.1", limit=LIMIT) as port, Line(port.endpoint, keys, limit=LIMIT) as line:
        assert all(line.send(b"%d" % number, [block]) for number in range(count))
        for number in range(count):
            peer, letter, frames = heard(port)
            assert letter == b"%d" % number and len(frames[0]) == len(block)
            assert port.send(peer, letter, frames)
        for number in range(count):
            answer = line.receive(SECONDS)
            assert answer is not None and answer.letter == b"%d" % number


def test_what_is_too_large_is_not_sent(port: Port, line: Line) -> None:
    answered(port, line, b"a" * (LIMIT - 5))
    for wrong in ([b"a" * LIMIT], [b"a" * (LIMIT // 2)] * 2, [b""] * (MOST_FRAMES + 1)):
        with pytest.raises(ShoalError, match="at most"):
            line.send(b"x", wrong)
        with pytest.raises(ShoalError, match="at most"):
            port.send(b"peer", b"x", wrong)
    with Line(port.endpoint, Keys.make(), limit=LARGE) as other, pytest.raises(ShoalError, match="letter"):
        other.send(bytes(2 * MB))
    answered(port, line)


def most_memory() -> int:
    """The most that this process had, in KB, since it was last set back."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def test_a_chunk_that_is_too_large_does_not_arrive_and_takes_no_memory(port: Port, line: Line, keys: Keys) -> None:
    answered(port, line)
    Path("/proc/self/clear_refs").write_text("5")  # sets it back
    before = most_memory()
    child = os.fork()
    if child == 0:
        with raw_line(port, keys) as raw:
            big = bytes(60 * MB)
            raw.send_multipart([b"before"])
            raw.send_multipart([b"x", struct.pack("<Q", len(big)), big])
            raw.send_multipart([b"after"])
            os._exit(0 if raw.poll(SECONDS * 1000) else 1)
    try:
        assert heard(port).letter == b"before"
        peer, letter, _ = heard(port)
        assert letter == b"after", "over a new connection: the first was ended"
        assert most_memory() - before < 20 * 1024
        port.send(peer, b"enough")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        child = 0
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    answered(port, line)


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([b"x", b"123"], id="sizes that are not sizes"),
        pytest.param([b"x", b""], id="no sizes"),
        pytest.param([b"x", struct.pack("<Q", 3)], id="a frame that does not come"),
        pytest.param([b"x", struct.pack("<Q", 3), b"12"], id="too short"),
        pytest.param([b"x", struct.pack("<Q", 3), b"1234"], id="too long"),
        pytest.param([b"x", struct.pack("<Q", 3), b"12", b"3"], id="cut elsewhere"),
        pytest.param([b"x", struct.pack("<QQ", 1, 2), b"12", b"3"], id="cut elsewhere, as many"),
        pytest.param([b"x", struct.pack("<Q", 1 << 63), b"12"], id="a size without end"),
        pytest.param([b"x", struct.pack("<QQ", (1 << 64) - 1, 3), b"12"], id="sizes that would overflow"),
        pytest.param([b"x", struct.pack("<QQQ", 40_000, 40_000, 40_000), *[bytes(40_000)] * 3], id="beyond the limit"),
        pytest.param([b"x", bytes(8 * (MOST_FRAMES + 1))], id="too many frames"),
        pytest.param([b""] * 20_000, id="far too many parts"),
    ],
)
def test_what_has_another_form_is_dropped_and_the_port_goes_on(
    port: Port, line: Line, keys: Keys, parts: list[bytes]
) -> None:
    asked: list[object] = []
    with raw_line(port, keys) as raw:
        raw.send_multipart(parts)
        raw.send_multipart([b"sound"])
        arrival = heard(port, room=lambda *about: asked.append(about))
    assert arrival.letter == b"sound" and arrival.frames == []
    assert asked == [(b"sound", [])], "nothing is asked for what is dropped"
    assert port.dropped == 1
    answered(port, line)


def test_random_messages_do_not_stop_a_port(port: Port, line: Line, keys: Keys) -> None:
    chance = random.Random(11)
    pieces = [b"", b"x", struct.pack("<Q", 1), struct.pack("<QQ", 0, 2), bytes(9), b"\xff" * 8]
    with raw_line(port, keys) as raw:
        for _ in range(2000):
            raw.send_multipart([chance.choice(pieces) for _ in range(chance.randint(1, 5))])
        raw.send_multipart([b"last"])
        while heard(port).letter != b"last":
            pass
    assert port.dropped > 100
    answered(port, line)


@pytest.mark.parametrize("which", ["all", "client", "server"])
def test_a_wrong_key_is_refused(
    port: Port, line: Line, keys: Keys, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Keys.make()
    wrong = {
        "all": other,
        "client": Keys(keys.server_public, b"", other.client_public, other.client_secret),
        "server": Keys(other.server_public, b"", keys.client_public, keys.client_secret),
    }[which]
    guest = guest_address(keys.server_public, keys.client_public)
    monkeypatch.setattr(curve, "guest_address", lambda *_: guest)
    with Line(port.endpoint, wrong, limit=LIMIT) as stranger:
        stranger.send(b"let me in", [bytes(1000)])
        assert port.wait(SHORT) == [] and port.receive() is None
        answered(port, line)
        assert stranger.receive() is None
    assert port.dropped == 0


def test_a_crowd_of_strangers_does_not_take_the_port(port: Port, line: Line, keys: Keys) -> None:
    answered(port, line)
    guest = guest_address(keys.server_public, keys.client_public)
    open_now = len(os.listdir("/proc/self/fd"))
    crowd: list[socket.socket] = []
    try:
        for number in range(600):
            one = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            crowd.append(one)
            one.bind((guest, 0))
            with contextlib.suppress(BlockingIOError):
                one.connect(("127.0.0.1", number_of(port)))
            with contextlib.suppress(OSError):
                one.send(random.Random(number).randbytes(64))
            if number % 5 == 0:
                port.wait(0.002)
        accepted = len(os.listdir("/proc/self/fd")) - open_now - len(crowd)
        assert accepted < 300, f"{accepted} of 600 strangers were let in at once"
        answered(port, line, b"standing")
        with Line(port.endpoint, keys, limit=LIMIT) as newcomer:
            answered(port, newcomer, b"new")
    finally:
        for one in crowd:
            one.close()
    answered(port, line)


def test_a_port_that_goes_away_and_comes_back_is_found_again(keys: Keys) -> None:
    with Port(keys, "127.0.0.1", limit=LARGE) as first:
        number = number_of(first)
        line = Line(first.endpoint, keys, limit=LARGE)
        answered(first, line)
        assert line.breaks == 0
    with line:
        data = bytes(5 * MB)
        line.send(b"meanwhile", [data])
        with Port(keys, "127.0.0.1", port=number, limit=LARGE) as second:
            line.send(b"then", [data])
            got = {heard(second).letter}  # what was sent before the line knew may be lost
            if got == {b"meanwhile"}:
                got.add(heard(second).letter)
            assert b"then" in got
            answered(second, line)
            assert line.breaks == 1


def test_one_who_is_gone_is_told_of(port: Port, line: Line, keys: Keys) -> None:
    assert not port.send(b"nobody", b"x", [bytes(1000)])
    with Line(port.endpoint, keys, limit=LIMIT) as leaving:
        leaving.send(b"x")
        peer = heard(port).peer
    deadline = time.monotonic() + SECONDS
    while port.send(peer, b"y", [bytes(1000)]):
        assert time.monotonic() < deadline
        port.wait(0.01)
    answered(port, line)


def test_waiting_also_for_other_descriptors(port: Port, line: Line) -> None:
    answered(port, line)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert port.wait(0.0, ours.fileno()) == [] == line.wait(0.0, ours.fileno())
        theirs.send(b"x")
        assert port.wait(SECONDS, ours.fileno()) == [ours.fileno()] == line.wait(SECONDS, ours.fileno())
        line.send(b"x")
        assert port.wait(SECONDS) == [port.fileno()]
        began = time.monotonic()
        assert line.receive(0.05) is None and 0.05 <= time.monotonic() - began < 2.0


def test_an_address_that_is_not_on_the_loopback(keys: Keys) -> None:
    address = own_address()
    if address is None or address.startswith("127."):
        pytest.skip("this machine has no other address")
    with Port(keys, address, limit=LARGE) as port, Line(port.endpoint, keys, limit=LARGE) as line:
        assert port.endpoint.startswith(f"tcp://{address}:")
        answered(port, line)
        with Line(port.endpoint, Keys.make(), limit=LARGE) as stranger:
            stranger.send(b"let me in")
            assert port.wait(SHORT) == [] and port.receive() is None
        line.send(b"large", [bytes(9 * MB)])
        assert len(heard(port).frames[0]) == 9 * MB


def test_a_forked_copy_is_refused_and_a_child_may_have_its_own(keys: Keys) -> None:
    with Port(keys, "127.0.0.1", limit=LARGE) as port, Line(port.endpoint, keys, limit=LARGE) as line:
        line.send(b"lent", [bytes(3 * MB)])
        heard(port)
        child = os.fork()
        if child == 0:
            refused = 0
            uses = (port.receive, lambda: port.wait(0.0), lambda: port.send(b"p", b"x"), lambda: line.send(b"x"))
            for use in (*uses, line.receive):
                try:
                    use()
                except ShoalError as error:
                    refused += "forked" in str(error)
            port.close()
            line.close()
            with Line(port.endpoint, keys, limit=LARGE) as own:
                own.send(b"child", [bytes(3 * MB)])
                refused += own.receive(SECONDS) is not None
            os._exit(refused)
        peer, letter, frames = heard(port)
        assert letter == b"child" and len(frames[0]) == 3 * MB
        port.send(peer, b"yes")
        deadline = time.monotonic() + SECONDS
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
            assert time.monotonic() < deadline
            port.wait(0.02)
        assert os.waitstatus_to_exitcode(ended[1]) == 6
        answered(port, line)  # the child's closing was nothing to us
    with pytest.raises(ShoalError, match="closed"):
        port.receive()
    with pytest.raises(ShoalError, match="closed"):
        line.send(b"x")
    port.close()


def test_closing_leaves_no_threads_and_no_descriptors(keys: Keys) -> None:
    def there() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def once() -> None:
        port = Port(keys, "127.0.0.1", limit=LARGE)
        with port, Line(port.endpoint, keys, limit=LARGE) as line, Line(port.endpoint, keys, limit=LARGE) as other:
            line.send(b"x", [bytes(3 * MB)])
            assert len(heard(port).frames[0]) == 3 * MB
            other.send(b"never read", [bytes(30 * MB)])

    before = there()
    for _ in range(3):
        once()
    deadline = time.monotonic() + SECONDS
    while there() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert there() == before


def test_wrong_arguments_are_named(keys: Keys, port: Port) -> None:
    with pytest.raises(ConfigError, match="free"):
        Port(keys, "127.0.0.1", port=number_of(port), limit=LIMIT)
    with pytest.raises(ConfigError, match="limit=0"):
        Port(keys, "127.0.0.1", limit=0)
    with pytest.raises(ConfigError, match="limit=0"):
        Line("tcp://127.0.0.1:1", keys, limit=0)
    with pytest.raises(ConfigError, match="endpoint"):
        Line("ipc:///tmp/x", keys, limit=LIMIT)
