"""How fast bytes get to a server and back: lines and ports alone, and whole steps with real servers.

examples
  python benchmarks/serverbytes.py                         lines: 64 MB each way, over the loopback
  python benchmarks/serverbytes.py --size 16 --address 192.0.2.7
  python benchmarks/serverbytes.py --chunk 256 1024 4096   also with chunks of other sizes, in KB
  python benchmarks/serverbytes.py steps                   steps: 2 workers push 64 MB, SGD, both pull 64 MB
  python benchmarks/serverbytes.py steps --ray ~/rayvenv/bin/python    also against Ray, with an interpreter that has it
  python benchmarks/serverbytes.py steps --check           exit code 1 if a figure is missed

lines: a push of so many bytes by one worker, then a pull of as many
  raw       pyzmq alone, DEALER and ROUTER with CURVE, all bytes as one frame without a copy
  post      the same bytes through a line and a port: pushed from where they lie, pulled into memory that is there
  parts     as post, but the push is many messages of one chunk each, as gradients leave while a backward goes on
  memory    the same bytes copied into shared memory and out of it, by one process
The figure: post has 0.6 of the speed of raw.

steps: two workers push a gradient each, the sum is applied, and both pull the weights into memory of their own
  near-none, near-peer    servers and clients of a run, on one host: shared memory. peer: another server applies it too
  far-none, far-peer      the same with workers and servers at different addresses: all goes over ZeroMQ with CURVE
  raw, raw-1MB            pyzmq alone with CURVE moves the same bytes, as one frame or in frames of 1 MB; weights leave
                          when both gradients have come
  copies                  both workers copy their bytes into shared memory and then out of it, and nothing else is done
  sums                    as copies, and a third process adds both and applies them: the arithmetic without a protocol
  ray                     Ray's documented parameter server, numpy arrays, one call that applies and returns the weights
The figures: near-none has 0.6 of the speed of sums and far-none of that of both raws, with peer 0.35; near-none has
1.5 times that of ray. Its processes do a little now and then while others have their turn: leave it out for the other
figures. Whoever adds anything cannot come near copies: sums itself, which has no protocol, has about half its speed.

The other end of each arm is a process of its own. Arms take turns; a round is one exchange of each, in an order that is
drawn anew, and ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import serverexchange
import torch
import zmq
from ratios import FEWEST, Interval, median_interval

from shoal.syncs.server import post
from shoal.syncs.server.post import Line, Port
from shoal.wire.curve import Keys

KB, MB = 1 << 10, 1 << 20
SEED = 6
SPARE = 1 << 20  # bytes of a message besides its frames
SECONDS = 60.0
WARM = 2  # rounds that do not count
LINE_FIGURES = (("post", "raw", 0.6),)  # an arm, another one, and the least speed relative to it, median
STEP_FIGURES = (
    ("near-none", "sums", 0.6),
    ("near-peer", "sums", 0.35),
    ("far-none", "raw", 0.6),
    ("far-none", "raw-1MB", 0.6),
    ("far-peer", "raw", 0.35),
    ("far-peer", "raw-1MB", 0.35),
    ("near-none", "ray", 1.5),
)

Exchange = Callable[[], None]


def some_bytes(size: int, seed: int) -> memoryview:
    return memoryview(bytearray(np.random.default_rng(seed).bytes(size)))


@contextmanager
def beside(serve: Callable[[Callable[[str], None]], None]) -> Iterator[str]:
    """Have a forked process serve, and give what it tells: where it is."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            serve(lambda told: print(told, end="", file=os.fdopen(writing, "w"), flush=True))
        finally:
            os._exit(1)
    os.close(writing)
    try:
        yield os.read(reading, 1000).decode()
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# ---- arms


@contextmanager
def raw(size: int, address: str) -> Iterator[Exchange]:
    keys = Keys.make()

    def serve(tell: Callable[[str], None]) -> None:
        weights = some_bytes(size, 2)
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = keys.server_public, keys.server_secret
            tell(f"tcp://{address}:{socket.bind_to_random_port(f'tcp://{address}')}")
            while True:
                peer, _ = socket.recv_multipart(copy=False)
                socket.send_multipart([peer, weights], copy=False)

    gradient = some_bytes(size, 1)
    with beside(serve) as endpoint, zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvtimeo = int(SECONDS * 1000)
        socket.curve_serverkey = keys.server_public
        socket.curve_publickey, socket.curve_secretkey = keys.client_public, keys.client_secret
        socket.connect(endpoint)

        def exchange() -> None:
            socket.send(gradient, copy=False)
            if len(socket.recv(copy=False)) != size:
                raise RuntimeError("another number of bytes came back")

        yield exchange


@contextmanager
def posted(size: int, address: str, chunk: int, *, parts: bool = False) -> Iterator[Exchange]:
    """With `parts`, each chunk of the push is a message of its own, and put in its place when it has come."""
    keys = Keys.make()
    usual, post.CHUNK = post.CHUNK, chunk
    step = chunk if parts else size

    def serve(tell: Callable[[str], None]) -> None:
        weights, place = some_bytes(size, 2), memoryview(bytearray(size))

        def room(letter: bytes, sizes: list[int]) -> list[memoryview]:
            start = int(letter)
            return [place[start : start + sizes[0]]]

        with Port(keys, address, limit=size + SPARE) as port:
            tell(port.endpoint)
            while True:
                while (arrival := port.receive(room)) is not None:
                    if int(arrival.letter) + step >= size:
                        port.send(arrival.peer, b"weights", [weights])
                port.wait(None)

    gradient, place = some_bytes(size, 1), memoryview(bytearray(size))
    with beside(serve) as endpoint, Line(endpoint, keys, limit=size + SPARE) as line:
        post.CHUNK = usual

        def exchange() -> None:
            post.CHUNK = chunk
            for start in range(0, size, step):
                line.send(b"%d" % start, [gradient[start : start + step]])
            if line.receive(SECONDS, lambda *_: [place]) is None:
                raise RuntimeError(f"nothing came back within {SECONDS:.0f} s")
            post.CHUNK = usual

        exchange()
        if place != some_bytes(size, 2):
            raise RuntimeError("other bytes came back")
        yield exchange


@contextmanager
def memory(size: int) -> Iterator[Exchange]:
    slot, weights = (np.frombuffer(mmap.mmap(-1, size), np.uint8) for _ in range(2))
    gradient, place = (np.frombuffer(some_bytes(size, seed), np.uint8) for seed in (1, 2))

    def exchange() -> None:
        np.copyto(slot, gradient)
        np.copyto(place, weights)

    yield exchange


# ---- rounds


def lines(stack: ExitStack, size: int, address: str, chunks: Sequence[int]) -> dict[str, Exchange]:
    arms: dict[str, Exchange] = {"raw": stack.enter_context(raw(size, address))}
    arms["post"] = stack.enter_context(posted(size, address, post.CHUNK))
    arms["parts"] = stack.enter_context(posted(size, address, post.CHUNK, parts=True))
    for chunk in chunks:
        arms[f"post {chunk} KB"] = stack.enter_context(posted(size, address, chunk * KB))
    arms["memory"] = stack.enter_context(memory(size))
    return arms


def measure(arms: dict[str, Exchange], rounds: int) -> dict[str, list[float]]:
    """Seconds of each arm in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    shuffle = random.Random(SEED)
    for number in range(rounds + WARM):  # the first do not count: memory that was never touched
        for name in shuffle.sample(list(arms), len(arms)):
            begun = time.perf_counter()
            arms[name]()
            if number >= WARM:
                seconds[name].append(time.perf_counter() - begun)
    return seconds


def speed(seconds: dict[str, list[float]], arm: str, base: str) -> Interval:
    """Of an arm relative to another one, in the same rounds."""
    return median_interval([theirs / own for theirs, own in zip(seconds[base], seconds[arm], strict=True)])


def show(seconds: dict[str, list[float]], moved: int, bases: Sequence[str]) -> None:
    bases = [base for base in bases if base in seconds]
    print(f"  {'arm':<14}{'ms':>8}{'middle half':>18}{'GB/s':>8}" + "".join(f"{'times ' + base:>24}" for base in bases))
    for name, values in seconds.items():
        low, middle, high = (1e3 * value for value in np.percentile(values, [25, 50, 75]))
        relative = [speed(seconds, name, base) for base in bases]
        words = "".join(f"{f'{one.median:.2f} ({one.low:.2f} .. {one.high:.2f})':>24}" for one in relative)
        print(f"  {name:<14}{middle:>8.1f}{f'{low:.1f} .. {high:.1f}':>18}{moved / middle / 1e6:>8.2f}{words}")


def missed(seconds: dict[str, list[float]], figures: Sequence[tuple[str, str, float]]) -> list[str]:
    said = []
    for arm, base, least in figures:
        if arm in seconds and base in seconds and (got := speed(seconds, arm, base).median) < least:
            said.append(f"{arm}: {got:.2f} times the speed of {base} instead of {least}")
    return said


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("what", choices=["lines", "steps"], nargs="?", default="lines", help="default lines")
    add("--size", type=int, default=64, metavar="MB", help="each way (default 64)")
    add("--address", default="127.0.0.1", help="lines: of this machine (default 127.0.0.1)")
    add("--chunk", type=int, nargs="*", default=[], metavar="KB", help="lines: also measure chunks of these sizes")
    add("--where", choices=["near", "far", "both"], default="both", help="steps: default both")
    add("--servers", type=int, default=1, help="steps: default 1; with peer there is one more then, for the copy")
    add("--ray", metavar="PYTHON", help="steps: an interpreter that can import ray")
    add("--rounds", type=int, default=15, help=f"at least {FEWEST} (default 15)")
    add("--json", type=Path, metavar="FILE", help="also write all that was measured there")
    add("--check", action="store_true", help="exit with code 1 if a figure is missed")
    return parser.parse_args()


def run(given: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the other ends are ended too
    size = given.size * MB
    near, far = given.where != "far", given.where != "near"
    with ExitStack() as stack:
        if given.what == "lines":
            arms = lines(stack, size, given.address, given.chunk)
            bases, figures, moved = ("raw",), LINE_FIGURES, 2 * size
        else:
            torch.set_num_threads(1)
            arms = serverexchange.arms(stack, size, near=near, far=far, servers=given.servers, python=given.ray)
            bases, figures, moved = (
                ("copies", "sums", "raw", "raw-1MB", "ray"),
                STEP_FIGURES,
                2 * serverexchange.WORKERS * size,
            )
        seconds = measure(arms, given.rounds)
    workers = "one worker" if given.what == "lines" else f"each of {serverexchange.WORKERS} workers"
    print(f"push and pull of {given.size} MB by {workers}, {given.rounds} rounds; speeds relative to others by round")
    show(seconds, moved, bases)
    if given.json:
        given.json.write_text(json.dumps({"what": given.what, "size": size, "seconds": seconds}, indent=1))
    said = missed(seconds, figures)
    for line in said:
        print(f"missed: {line}")
    return int(bool(said) and given.check)


def main() -> int:
    given = arguments()
    try:
        return run(given)
    except (serverexchange.Stopped, TimeoutError) as error:
        print(f"nothing was measured: {error}; what went wrong is above", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
