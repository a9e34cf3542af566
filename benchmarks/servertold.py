"""Workers that push and pull at a word, and exchanges without a server of Shoal: for serverexchange.py."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import zmq
from torch import Tensor

from shoal.syncs.server.setup import shared
from shoal.wire.curve import Keys

WORKERS = 2
HERE = "127.0.0.1"
RATE = 1e-3
SECONDS = 60.0
GO, DONE, HAVE = b"g", b"d", b"h"

Exchange = Callable[[], None]


class Stopped(Exception):
    """A process of an arm has ended, or says nothing."""


# ---- processes


class Worker:
    """A forked process that does as it is told, a byte at a time."""

    def __init__(self, body: Callable[[socket.socket], None]) -> None:
        self.line, theirs = socket.socketpair()
        self.line.settimeout(SECONDS)
        self.pid = os.fork()
        if self.pid == 0:
            self.line.close()
            be(lambda: body(theirs))
        theirs.close()

    def tell(self) -> None:
        self.line.sendall(GO)

    def hear(self, wanted: bytes) -> None:
        if (got := self.line.recv(1)) != wanted:
            raise Stopped(f"a worker said {got!r} instead of {wanted!r}")

    def end(self) -> None:
        self.line.close()
        end_process(self.pid)


def be(body: Callable[[], None]) -> None:
    """The rest of a forked process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = 1
    try:
        torch.set_num_threads(1)
        body()
        code = 0
    except (ConnectionError, BrokenPipeError):
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def end_process(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def told(line: socket.socket) -> Iterator[int]:
    """Counts the exchanges that this worker is told to do."""
    count = 0
    while line.recv(1) == GO:
        yield count
        count += 1


@contextmanager
def workers(bodies: Sequence[Callable[[socket.socket], None]]) -> Iterator[list[Worker]]:
    started: list[Worker] = []
    try:
        for body in bodies:
            started.append(Worker(body))
        yield started
    finally:
        for one in started:
            one.end()


def both(started: Sequence[Worker], between: Callable[[], None] | None = None) -> None:
    """One exchange. `between` is done when both have pushed."""
    for one in started:
        one.tell()
    for one in started:
        one.hear(DONE)
    if between is not None:
        between()
    for one in started:
        one.hear(HAVE)


def numbers(size: int, seed: int) -> Tensor:
    return torch.randn(size // 4, generator=torch.Generator().manual_seed(seed))


# ---- what others do


@contextmanager
def raw(size: int, chunk: int) -> Iterator[Exchange]:
    """pyzmq alone, with CURVE: each worker sends such frames, and when all have come, as many go back to each."""
    keys = Keys.make()
    listening = socket.socketpair()

    def server(line: socket.socket) -> None:
        weights = memoryview(bytearray(size))
        frames = [weights[start : start + chunk] for start in range(0, size, chunk)]
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.set_hwm(0)
            router.curve_server = True
            router.curve_publickey, router.curve_secretkey = keys.server_public, keys.server_secret
            port = router.bind_to_random_port(f"tcp://{HERE}")
            listening[1].sendall(f"tcp://{HERE}:{port}".encode())
            while True:
                peers = [router.recv_multipart(copy=False)[0] for _ in range(WORKERS)]
                for peer in peers:
                    router.send_multipart([peer, *frames], copy=False)

    def seat(line: socket.socket) -> None:
        gradient, place = memoryview(bytearray(size)), memoryview(bytearray(size))
        starts = range(0, size, chunk)
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.set_hwm(0)
            dealer.curve_serverkey = keys.server_public
            dealer.curve_publickey, dealer.curve_secretkey = keys.client_public, keys.client_secret
            dealer.connect(endpoint)
            for _ in told(line):
                dealer.send_multipart([gradient[start : start + chunk] for start in starts], copy=False)
                line.sendall(DONE)
                for start, frame in zip(starts, dealer.recv_multipart(copy=False), strict=True):
                    place[start : start + chunk] = frame.buffer
                line.sendall(HAVE)

    with workers([server]):
        listening[0].settimeout(SECONDS)
        endpoint = listening[0].recv(1000).decode()
        with workers([seat] * WORKERS) as started:
            yield lambda: both(started)
    for one in listening:
        one.close()


@contextmanager
def copies(size: int, *, sums: bool) -> Iterator[Exchange]:
    """Both workers copy into shared memory, and then out of it. With `sums` a third one adds and applies between."""
    slots, weights = [shared(size).view(torch.float32) for _ in range(WORKERS)], shared(size).view(torch.float32)

    def seat(number: int) -> Callable[[socket.socket], None]:
        def body(line: socket.socket) -> None:
            gradient, place = numbers(size, number), numbers(size, 3)
            for _ in told(line):
                slots[number].copy_(gradient)
                line.sendall(DONE)
                if line.recv(1) != GO:
                    return
                place.copy_(weights)
                line.sendall(HAVE)

        return body

    def server(line: socket.socket) -> None:
        total = torch.zeros(size // 4)
        for _ in told(line):
            torch.add(*slots, out=total)
            weights.add_(total, alpha=-RATE)
            line.sendall(DONE)

    with workers([server]) as (adding,), workers([seat(number) for number in range(WORKERS)]) as started:

        def between() -> None:
            if sums:
                adding.tell()
                adding.hear(DONE)
            for one in started:
                one.tell()

        yield lambda: both(started, between)


@contextmanager
def ray(size: int, python: str) -> Iterator[Exchange]:
    """A parameter server as Ray's documentation has it, run by another interpreter; see arms/ray_server.py."""
    script = str(Path(__file__).parent / "arms" / "ray_server.py")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with subprocess.Popen(
        (python, script, str(size)),
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def hear() -> None:
            assert process.stdout is not None
            while (line := process.stdout.readline()) != b"done\n":
                if not line:
                    raise Stopped("the arm of Ray has ended")

        def exchange() -> None:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
            hear()

        try:
            hear()
            yield exchange
        finally:
            process.stdin.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
