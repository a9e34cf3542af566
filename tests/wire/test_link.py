from __future__ import annotations

import array
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from shoal.wire.link import MAGIC, MAX_BUFFERS, MAX_HEADER, FrameError, Link, LinkClosed, milliseconds

DEADLINE = 20.0


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    left, right = Link.pair()
    yield left, right
    left.close()
    right.close()


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def joined(thread: threading.Thread) -> None:
    thread.join(DEADLINE)
    assert not thread.is_alive(), "the thread is still blocked"


def raw_frame(header: bytes, buffers: list[bytes], magic: bytes = MAGIC) -> bytes:
    sizes = struct.pack(f"<{len(buffers)}Q", *map(len, buffers))
    return magic + struct.pack("<II", len(header), len(buffers)) + sizes + header + b"".join(buffers)


@contextmanager
def fed(data: bytes, *, limit: int = 1 << 20) -> Iterator[Link]:
    """A link whose other end wrote `data` and closed."""
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        assert left.send(data) == len(data)
        left.close()
        yield Link(right, limit=limit)


def test_frames_arrive_whole_and_in_order(ends: tuple[Link, Link]) -> None:
    left, right = ends
    left.send(b"one")
    left.send(b"", [b"", b"abc", bytearray(5)])
    left.send(b"", [])
    assert right.recv() == (b"one", [])
    assert right.recv() == (b"", [bytearray(), bytearray(b"abc"), bytearray(5)])
    assert right.recv() == (b"", [])
    right.send(b"back")
    assert left.recv() == (b"back", [])


def test_the_format_on_the_wire(ends: tuple[Link, Link]) -> None:
    left, right = ends
    left.send(b"head", [b"ab", b"c"])
    expected = raw_frame(b"head", [b"ab", b"c"])
    with socket.socket(fileno=socket.dup(right.fileno())) as raw:
        assert raw.recv(1000) == expected


def test_any_contiguous_buffer_is_sent_as_its_bytes(ends: tuple[Link, Link]) -> None:
    left, right = ends
    numbers = array.array("d", [1.0, 2.0])
    grid = memoryview(bytes(range(6))).cast("B", (2, 3))
    left.send(b"", [numbers, grid])
    _, buffers = right.recv()
    assert buffers == [bytearray(numbers.tobytes()), bytearray(range(6))]
    with pytest.raises(TypeError):
        left.send(b"", [memoryview(bytes(10))[::2]])
    left.send(b"still in step")
    assert right.recv() == (b"still in step", [])


def test_more_buffers_than_one_system_call_takes(ends: tuple[Link, Link]) -> None:
    left, right = ends
    buffers = [index.to_bytes(4, "little") * (index % 3) for index in range(5000)]
    sender = in_thread(lambda: left.send(b"many", buffers))
    assert right.recv() == (b"many", [bytearray(buffer) for buffer in buffers])
    joined(sender)


def test_a_large_buffer_is_neither_copied_by_the_sender_nor_torn(ends: tuple[Link, Link]) -> None:
    left, right = ends
    size = 64 << 20
    big = bytearray(random.Random(0).randbytes(1 << 20) * (size >> 20))
    received: list[bytearray] = []
    receiver = in_thread(lambda: received.extend(right.recv()[1]))
    tracemalloc.start()
    try:
        left.send(b"big", [big])
        joined(receiver)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert received == [big]
    assert peak < size + (8 << 20), "more than the receiver's one buffer was allocated"


def test_threads_may_send_at_the_same_time(ends: tuple[Link, Link]) -> None:
    left, right = ends
    senders = [
        in_thread(lambda name=name: [left.send(name, [name * 100_000]) for _ in range(20)])
        for name in (b"a", b"b", b"c")
    ]
    counts = dict.fromkeys((b"a", b"b", b"c"), 0)
    for _ in range(60):
        header, buffers = right.recv()
        assert buffers == [header * 100_000]
        counts[header] += 1
    assert set(counts.values()) == {20}
    for sender in senders:
        joined(sender)


def test_poll_says_whether_something_can_be_received(ends: tuple[Link, Link]) -> None:
    left, right = ends
    assert not right.poll(0)
    assert not right.poll(0.01)
    left.send(b"x")
    assert right.poll(None)
    right.recv()
    assert not right.poll(0)
    left.close()
    assert right.poll(DEADLINE)


def test_try_recv_keeps_an_unfinished_frame(ends: tuple[Link, Link]) -> None:
    left, right = ends
    frame = raw_frame(b"head", [b"body" * 10])
    with socket.socket(fileno=socket.dup(left.fileno())) as raw:
        for index in range(len(frame)):
            assert right.try_recv() is None
            raw.sendall(frame[index : index + 1])
    assert right.try_recv() == (b"head", [bytearray(b"body" * 10)])
    assert right.try_recv() is None


def test_try_recv_stops_at_its_budget(ends: tuple[Link, Link]) -> None:
    left, right = ends
    left.send(b"", [bytes(50_000)])
    assert right.try_recv(1) is None
    assert right.try_recv() == (b"", [bytearray(50_000)])


def test_the_other_end_is_gone(ends: tuple[Link, Link]) -> None:
    left, right = ends
    left.send(b"last words")
    left.close()
    left.close()
    assert left.fileno() == -1
    assert right.recv() == (b"last words", [])
    for _ in range(2):
        with pytest.raises(LinkClosed, match="closed"):
            right.recv()
        with pytest.raises(LinkClosed):
            right.send(b"x")
    for use in (left.recv, lambda: left.send(b"x"), lambda: left.poll(0)):
        with pytest.raises(LinkClosed, match="this end"):
            use()


def test_the_other_end_goes_while_we_are_blocked_in_send(ends: tuple[Link, Link]) -> None:
    left, right = ends
    outcome: list[BaseException] = []

    def send() -> None:
        try:
            left.send(b"", [bytes(10 << 20)])
        except LinkClosed as error:
            outcome.append(error)

    sender = in_thread(send)
    assert right.poll(DEADLINE)
    right.close()
    joined(sender)
    assert len(outcome) == 1


def test_eof_inside_a_frame_is_a_closed_link() -> None:
    whole = raw_frame(b"head", [b"body"])
    for length in range(1, len(whole)):
        with fed(whole[:length]) as link, pytest.raises(LinkClosed, match="inside a frame"):
            link.recv()


def test_a_frame_that_was_cut_short_by_an_exception_ends_the_link(ends: tuple[Link, Link]) -> None:
    left, right = ends

    def give_up() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        left.send(b"", [bytes(10 << 20)], when_full=give_up)
    with pytest.raises(LinkClosed, match="KeyboardInterrupt"):
        left.send(b"next")
    with pytest.raises(LinkClosed, match="inside a frame"):
        right.recv()
    right.send(b"the other way still works")
    assert left.recv() == (b"the other way still works", [])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (raw_frame(b"", [], magic=b"HTTP"), "HTTP"),
        (MAGIC + struct.pack("<II", MAX_HEADER + 1, 0), str(MAX_HEADER + 1)),
        (MAGIC + struct.pack("<II", 0, MAX_BUFFERS + 1), str(MAX_BUFFERS + 1)),
        (MAGIC + struct.pack("<IIQ", 0, 1, (1 << 20) + 1), str(1 << 20)),
        (MAGIC + struct.pack("<IIQQ", 0, 2, 1 << 19, (1 << 19) + 1), str(1 << 20)),
        (MAGIC + struct.pack("<IIQQ", 0, 2, (1 << 64) - 1, 1), "limit"),
    ],
    ids=["magic", "header", "count", "one buffer", "sum of buffers", "sum beyond 64 bits"],
)
def test_bad_frames_are_refused_before_allocating(data: bytes, said: str) -> None:
    with fed(data) as link:
        tracemalloc.start()
        try:
            with pytest.raises(FrameError, match=said):
                link.recv()
            assert tracemalloc.get_traced_memory()[1] < 1 << 18
        finally:
            tracemalloc.stop()
        with pytest.raises(LinkClosed, match="earlier frame"):
            link.recv()


def test_a_frame_of_exactly_the_limit_is_fine() -> None:
    with fed(raw_frame(b"", [bytes(600), bytes(400)]), limit=1000) as link:
        assert link.recv() == (b"", [bytearray(600), bytearray(400)])


def test_too_large_a_frame_is_not_begun(ends: tuple[Link, Link]) -> None:
    left, right = ends
    with pytest.raises(FrameError, match="header"):
        left.send(bytes(MAX_HEADER + 1))
    with pytest.raises(FrameError, match="buffers"):
        left.send(b"", [b""] * (MAX_BUFFERS + 1))
    left.send(b"fine")
    assert right.recv() == (b"fine", [])


def mutated(frame: bytes, dice: random.Random) -> bytes:
    data = bytearray(frame)
    for _ in range(dice.randrange(4)):
        # the first 28 bytes are the lengths
        data[dice.randrange(min(len(data), dice.choice((28, 1 << 20))))] = dice.choice(
            (0, 1, 127, 255, dice.randrange(256))
        )
    return bytes(data[: dice.choice((len(data), dice.randrange(len(data) + 1)))])


def test_fuzzed_frames_only_ever_raise_the_two_errors() -> None:
    dice = random.Random(20260730)
    limit = 4096
    outcomes = {FrameError: 0, LinkClosed: 0}
    whole = 0
    tracemalloc.start()
    try:
        for _ in range(3000):
            buffers = [dice.randbytes(dice.randrange(40)) for _ in range(dice.randrange(4))]
            data = mutated(raw_frame(dice.randbytes(dice.randrange(40)), buffers), dice)
            if dice.random() < 0.2:
                data = dice.randbytes(dice.randrange(60))
            try:
                with fed(data, limit=limit) as link:
                    while True:
                        _, received = link.recv()
                        assert sum(map(len, received)) <= limit
                        whole += 1
            except (FrameError, LinkClosed) as error:
                outcomes[type(error)] += 1
        # at most one header, the table of lengths, and the buffers
        assert tracemalloc.get_traced_memory()[1] < MAX_HEADER + 8 * MAX_BUFFERS + limit + (1 << 20)
    finally:
        tracemalloc.stop()
    assert min(whole, *outcomes.values()) > 200


def test_a_signal_handler_does_not_break_a_blocked_recv(ends: tuple[Link, Link]) -> None:
    left, right = ends
    before = signal.signal(signal.SIGALRM, lambda *_: left.send(b"from the handler"))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        assert right.recv() == (b"from the handler", [])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_sending_to_nobody_does_not_raise_sigpipe() -> None:
    script = """
import signal
from shoal.wire.link import Link, LinkClosed
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
left, right = Link.pair()
right.close()
try:
    left.send(b"x", [b"y"])
except LinkClosed:
    print("closed")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr


def test_milliseconds_are_rounded_up_and_bounded() -> None:
    assert milliseconds(None) is None
    assert [milliseconds(seconds) for seconds in (-1.0, 0.0, 0.0001, 1.0)] == [0, 0, 1, 1000]
    assert milliseconds(1e12) == (1 << 31) - 1
