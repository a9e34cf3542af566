"""Random and mutated frames into everything that reads bytes of others: only the errors it promises may come out.

examples
  python benchmarks/fuzz.py                          1,000,000 frames
  python benchmarks/fuzz.py --frames 20000 --seed 7  a few, of another kind

Ends with 1 if anything else came out, or if memory was taken for what a frame only announces.
"""

from __future__ import annotations

import argparse
import random
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from shoal.cluster import messages
from shoal.cluster.coordinator.coordinator import Coordinator
from shoal.cluster.roster.terms import Plan
from shoal.testing.lab import messages as lab
from shoal.wire.link import MAGIC, MAX_HEADER, FrameError, Link, LinkClosed

LIMIT = 1 << 16
"""Bytes of the buffers of a frame of a link."""
MOST_GROWTH = MAX_HEADER + (64 << 20)
"""Bytes that the process may grow by: one header that may be announced, caches, and what mutated samples hold."""
RUN = "fuzz-1"

Feed = Callable[[bytes], None]
"""Gives a frame to what is tested. Raises if anything happens that must not."""


class Finding(Exception):
    """Something came out that must not."""


@dataclass(frozen=True)
class Target:
    """Something that reads frames, samples of what it should get, and its part of the frames."""

    name: str
    feed: Feed
    samples: Sequence[bytes]
    share: float


# -- frames ------------------------------------------------------------------------------------------------------------

_PROMISES = [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9", b"\xdc", b"\xde", b"\xda", b"\xc5", b"\xc8"]
"""Of msgpack: an array, a map, a text, bytes of a length that follows."""


class Frames:
    """An endless stream of frames from samples, the same for the same seed."""

    def __init__(self, samples: Sequence[bytes], seed: int) -> None:
        self._chance = random.Random(seed)
        self._samples = list(samples)

    def next(self) -> bytes:
        chance = self._chance
        if chance.random() < 0.15:
            return chance.randbytes(chance.randrange(200))
        frame = bytearray(chance.choice(self._samples))
        for _ in range(1 + int(chance.expovariate(1.0))):
            _MUTATIONS[int(chance.random() * len(_MUTATIONS))](frame, chance, self._samples)
        return bytes(frame)


def _place(frame: bytearray, chance: random.Random) -> int:
    return int(chance.random() * (len(frame) + 1))


def _flip(frame: bytearray, chance: random.Random, _: Sequence[bytes]) -> None:
    if frame:
        frame[int(chance.random() * len(frame))] ^= 1 << int(chance.random() * 8)


def _put(frame: bytearray, chance: random.Random, _: Sequence[bytes]) -> None:
    if frame:
        frame[int(chance.random() * len(frame))] = int(chance.random() * 256)


def _cut(frame: bytearray, chance: random.Random, _: Sequence[bytes]) -> None:
    del frame[_place(frame, chance) :]


def _drop(frame: bytearray, chance: random.Random, _: Sequence[bytes]) -> None:
    at = _place(frame, chance)
    del frame[at : at + 1 + int(chance.random() * 8)]


def _insert(frame: bytearray, chance: random.Random, _: Sequence[bytes]) -> None:
    at = _place(frame, chance)
    frame[at:at] = chance.randbytes(1 + int(chance.random() * 8))


def _repeat(frame: bytearray, chance: random.Random, _: Sequence[bytes]) -> None:
    at = _place(frame, chance)
    frame[at:at] = frame[at : at + 16] * int(chance.random() * 8)


def _splice(frame: bytearray, chance: random.Random, samples: Sequence[bytes]) -> None:
    other = chance.choice(samples)
    frame[_place(frame, chance) :] = other[int(chance.random() * (len(other) + 1)) :]


def _promise(frame: bytearray, chance: random.Random, _: Sequence[bytes]) -> None:
    at = _place(frame, chance)
    size = chance.choice([0xFFFFFFFF, 0x7FFFFFFF, 0xFFFF, 1 << 24, 1 << 20])
    frame[at : at + 5] = chance.choice(_PROMISES) + size.to_bytes(4, chance.choice(["big", "little"]))  # type: ignore[arg-type]


def _nest(frame: bytearray, chance: random.Random, _: Sequence[bytes]) -> None:
    at = _place(frame, chance)
    frame[at : at + 1] = chance.choice([b"\x91", b"\x81", b"[", b'{"a":']) * int(2 ** (chance.random() * 13))


_MUTATIONS = [_flip, _flip, _put, _put, _cut, _drop, _insert, _repeat, _splice, _promise, _promise]
_MUTATIONS += [*_MUTATIONS, _nest]  # rarely: these are long


# -- what reads them ---------------------------------------------------------------------------------------------------


def decoder(decode: Callable[[bytes], Any], encode: Callable[[Any], bytes], kind: Any) -> Feed:
    """What decodes must be of the kind, and come back the same from its own encoding."""

    def feed(frame: bytes) -> None:
        try:
            message = decode(frame)
        except (
            msgspec.DecodeError,
            UnicodeDecodeError,
            RecursionError,
        ):  # what msgspec raises for bytes that are wrong
            return
        if not isinstance(message, kind):
            raise Finding(f"decoded to {type(message).__name__}")
        if len(frame) < 4096 and encode(decode(encode(message))) != encode(message):
            raise Finding(f"{message!r} comes back as something else")

    return feed


def into_link(frame: bytes) -> None:
    """A frame or a FrameError, or the end of the stream inside one; within the limit."""
    ours, theirs = socket.socketpair()
    link = Link(ours, limit=LIMIT)
    with theirs:
        try:
            theirs.sendall(frame[:LIMIT])
            theirs.shutdown(socket.SHUT_WR)
            while True:
                header, buffers = link.recv()
                if len(header) > MAX_HEADER or sum(map(len, buffers)) > LIMIT:
                    raise Finding("a frame beyond the limit")
        except (FrameError, LinkClosed):
            pass
        finally:
            link.close()


class _Silence:
    """Stands for the server of a coordinator: frames come in, answers go nowhere."""

    endpoint = "tcp://127.0.0.1:1"

    def __init__(self, frames: Iterator[bytes], end: Callable[[], None]) -> None:
        self._frames, self._end = frames, end

    def receive(self) -> tuple[bytes, bytes] | None:
        frame = next(self._frames, None)
        if frame is None:
            self._end()
            return None
        return b"peer" + frame[:1], frame

    def send(self, peer: bytes, payload: bytes) -> None:
        messages.decode_down(payload)

    def wait(self, timeout: float, *descriptors: int) -> list[int]:
        return []


class _Forgetful:
    """Stands for a journal."""

    def last(self) -> None:
        return None

    def write(self, record: bytes) -> None:
        pass


def coordinate(frames: Iterator[bytes]) -> None:
    """A coordinator hears all of the frames as letters, and must still be there to hear that the run is over."""
    link, engine = Link.pair()
    done = False

    def end() -> None:
        nonlocal done
        if not done:
            engine.send(messages.encode(messages.Closing()))
        done = True

    def listened() -> Iterator[bytes]:
        for frame in frames:
            while engine.poll(0):
                messages.decode_to_engine(engine.recv()[0])
            yield frame

    plan = Plan(workers=3, least=1, most=6, version="1", run=RUN)
    try:
        Coordinator(RUN, plan, _Silence(listened(), end), link, _Forgetful()).run()  # type: ignore[arg-type]
        if not done:
            raise Finding("the coordinator ended before the run")
    finally:
        link.close()
        engine.close()


# -- samples -----------------------------------------------------------------------------------------------------------


def ups() -> list[messages.Up]:
    m = messages
    return [
        m.Hello("1", b"signature", 4000), m.Beat(1, 7, 2, 0.25, 1.5), m.Beat(1, 7, 2, 9.0, 1.5, "File x, line 3\n" * 9),
        m.Ready(0, 0, False), m.Ready(2, 14, True), m.Formed(1), m.Unreached(1, ["worker-1", "worker-2"]), m.Done(),
        m.Put(1, 1, "key", b"value" * 20), m.Add(2, 1, "counter", -3), m.Get(3, 1, "key", False), m.Get(4, 1, "later"),
        m.Scale(4),
    ]  # fmt: skip


def letters() -> list[bytes]:
    names = ["worker-0", "worker-1", "worker-2", messages.OPERATOR]
    return [
        messages.encode(messages.Letter(RUN, name, 7, number, body))
        for name in names
        for number, body in enumerate(ups(), start=1)
    ]


def downs() -> list[bytes]:
    m = messages
    said: list[messages.Down] = [
        m.Welcome(), m.Refused("another version"), m.Term(3, ["worker-0", "worker-2"]), m.Regroup(3, True),
        m.Hold("too few", False), m.Leave("not needed"), m.Finish(), m.Held(3, b"value"), m.Held(4, None, True),
    ]  # fmt: skip
    return [messages.encode(one) for one in said]


def to_engine() -> list[bytes]:
    m = messages
    said: list[messages.ToEngine] = [
        m.Serving("tcp://127.0.0.1:4000"), m.Start(3), m.Kill(3, "it is stopped"), m.Look(2), m.Say("worker-1 waits"),
        m.Changed(2, ["worker-0"], [], ["worker-1"]), m.Fail("too many", True, (3, 9), 4),
    ]  # fmt: skip
    return [messages.encode(one) for one in said]


def from_engine() -> list[bytes]:
    m = messages
    said: list[messages.FromEngine] = [
        m.Present([0, 1, 4]), m.Ended(1, "was killed by SIGKILL", True, 7, (100, 131)), m.Looked(1, m.STOPPED, "T"),
        m.Rescale(5), m.Closing(),
    ]  # fmt: skip
    return [messages.encode(one) for one in said]


def link_frames() -> list[bytes]:
    def frame(header: bytes, *buffers: bytes) -> bytes:
        sizes = b"".join(len(buffer).to_bytes(8, "little") for buffer in buffers)
        lengths = len(header).to_bytes(4, "little") + len(buffers).to_bytes(4, "little")
        return MAGIC + lengths + sizes + header + b"".join(buffers)

    return [frame(b""), frame(b"header"), frame(b"h" * 300, b"b" * 100, b"", b"c"), frame(b"", b"x") + frame(b"y")]


def lab_requests() -> list[bytes]:
    requests: list[lab.Request] = [lab.Cut("a", "b", True), lab.Heal("a"), lab.Look(), lab.Probe()]
    return [lab.encode(one) for one in requests]


def targets() -> list[Target]:
    m = messages
    return [
        Target("letters", decoder(m.decode_letter, m.encode, m.Letter), letters(), 0.30),
        Target("answers", decoder(m.decode_down, m.encode, get_args(m.Down)), downs(), 0.15),
        Target("to the engine", decoder(m.decode_to_engine, m.encode, get_args(m.ToEngine)), to_engine(), 0.10),
        Target("from the engine", decoder(m.decode_from_engine, m.encode, get_args(m.FromEngine)), from_engine(), 0.10),
        Target("to a lab", decoder(lab.decode_request, lab.encode, get_args(lab.Request)), lab_requests(), 0.05),
        Target("frames of a link", into_link, link_frames(), 0.20),
    ]  # fmt: skip


COORDINATOR = "a coordinator"
_COORDINATOR_SHARE = 0.10


# -- running -----------------------------------------------------------------------------------------------------------


def peak() -> int:
    """Bytes that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def try_target(target: Target, count: int, seed: int) -> None:
    """Raises Finding, with the frame."""
    frames = Frames(target.samples, seed)
    for number in range(count):
        frame = frames.next()
        try:
            target.feed(frame)
        except Exception as error:
            raise Finding(f"frame {number} of {target.name}: {error!r} from {frame[:200].hex()}") from error


def try_coordinator(count: int, seed: int) -> None:
    """Half of the letters are sound but of any kind in any order. Raises Finding, with the last frame."""
    chance = random.Random(seed)
    mutated, bodies = Frames(letters(), seed), ups()
    last = b""

    def frames() -> Iterator[bytes]:
        nonlocal last
        for number in range(1, count + 1):
            last = mutated.next() if number % 2 else sound(number)
            yield last

    def sound(number: int) -> bytes:
        name = chance.choice(["worker-0", "worker-1", "worker-2", "worker-9", "worker-77", messages.OPERATOR, "other"])
        body = chance.choice(bodies)
        if isinstance(body, messages.Ready | messages.Formed | messages.Unreached):
            body = msgspec.structs.replace(body, term=chance.randrange(6))
        return messages.encode(messages.Letter(RUN, name, chance.randrange(3), number, body))

    try:
        coordinate(frames())
    except Exception as error:
        raise Finding(f"{COORDINATOR}: {error!r} after {last[:200].hex()}") from error


def fuzz(frames: int, seed: int, say: Callable[[str], None]) -> int:
    """Try everything, and tell each. Returns the number of findings."""
    before, findings = peak(), 0
    trials: list[tuple[str, float, Callable[[int, int], None]]] = [
        (target.name, target.share, lambda count, seed, target=target: try_target(target, count, seed))  # type: ignore[misc]
        for target in targets()
    ]
    trials.append((COORDINATOR, _COORDINATOR_SHARE, try_coordinator))
    for at, (name, share, attempt) in enumerate(trials):
        count, began = max(1, round(frames * share)), time.monotonic()
        try:
            attempt(count, seed * 1000 + at)
            result = "sound"
        except Finding as finding:
            result, findings = f"FOUND {finding}", findings + 1
        say(f"  {name:<18} {count:>9,} frames  {count / (time.monotonic() - began):>9,.0f}/s  {result}")
    grown = peak() - before
    say(f"  memory grew by {grown / 2**20:.0f} MB at most (allowed: {MOST_GROWTH / 2**20:.0f})")
    return findings + (grown > MOST_GROWTH)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000, help="in all (default 1000000)")
    parser.add_argument("--seed", type=int, default=1, help="another one gives other frames (default 1)")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    began = time.monotonic()
    print(f"{given.frames:,} frames, seed {given.seed}")
    findings = fuzz(given.frames, given.seed, lambda line: print(line, flush=True))
    print(f"{findings or 'no'} findings in {time.monotonic() - began:.0f} s")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
