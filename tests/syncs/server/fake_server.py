"""A server in a thread, as simple as can be: it takes gradients and gives weights, and does what a test tells it to."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from shoal.syncs.server.messages import (
    Lease,
    Letter,
    Part,
    Pull,
    Push,
    Refused,
    Said,
    Took,
    Weights,
    decode_letter,
    encode,
)
from shoal.syncs.server.post import Port
from shoal.syncs.server.pushcodec import decode_part
from shoal.syncs.server.setup import Memory, Setup

SECONDS = 20.0


class FakeServer:
    """Holds all shards in `held`. Attributes may be changed from the test's thread through `do`."""

    def __init__(self, setup: Setup, number: int, held: Iterable[int], *, memory: Memory | None = None) -> None:
        self.setup, self.number = setup, number
        self.held = list(held)
        self.memory = memory
        self.term = 1
        self.version = 0
        self.answers = True
        """Whether it answers pushes."""
        self.refusing = ""
        self.weights = torch.zeros(setup.cut.size, dtype=torch.uint8)
        self.kept: dict[int, Tensor] = {}
        self.taken: dict[tuple[Lease, int], Tensor] = {}
        self.pushes: list[Push] = []
        self.pulls: list[Pull] = []
        self.parts: list[tuple[Part, bytes]] = []
        self.came: queue.Queue[Any] = queue.Queue()
        """Every letter's body, as it comes."""
        self._waiting: list[tuple[bytes, Pull]] = []
        self._late: list[tuple[bytes, Push]] = []
        self._orders: queue.Queue[tuple[Callable[[], object], threading.Event]] = queue.Queue()
        self._wake, self._woken = os.pipe()
        self._started = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(SECONDS)

    # -- for tests -----------------------------------------------------------------------------------------------------

    def do(self, order: Callable[[], object]) -> None:
        """Have this done in the server's thread, between two letters."""
        done = threading.Event()
        self._orders.put((order, done))
        os.write(self._woken, b"x")
        assert done.wait(SECONDS)

    def set(self, **values: object) -> None:
        self.do(lambda: vars(self).update(values))

    def advance(self, version: int, weights: Tensor) -> None:
        """Have these weights, of this version, and answer who waits for it."""

        def order() -> None:
            self.version = version
            for shard in self.held:
                place = self.setup.cut.shards[shard]
                source = weights[place.start : place.stop]
                self.weights[place.start : place.stop].copy_(source)
                if self.memory is not None:
                    self.memory.state[shard, 0] += 1
                    self.memory.weights[place.start : place.stop].copy_(source)
                    self.memory.state[shard, 1] = version
                    self.memory.state[shard, 0] += 1
            self._answer_pulls()

        self.do(order)

    def wait_for(self, kind: type[Any]) -> Any:
        """The next letter of this kind."""
        while not isinstance(body := self.came.get(timeout=SECONDS), kind):
            pass
        return body

    def gradient(self, lease: Lease) -> Tensor:
        """What it has of a lease, where it holds it."""
        area = torch.zeros(self.setup.cut.size, dtype=torch.uint8)
        for (of, shard), gradient in self.taken.items():
            if of == lease:
                place = self.setup.cut.shards[shard]
                area[place.start : place.stop] = gradient
        return area

    def end(self) -> None:
        self.set(_ended=True)
        self._thread.join(SECONDS)
        os.close(self._wake)
        os.close(self._woken)

    # -- in its thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with Port(self.setup.keys, "127.0.0.1", limit=self.setup.cut.size + (1 << 20)) as port:
            self.port = port
            self.endpoint = port.endpoint
            self._started.set()
            while not self._ended:
                port.wait(1.0, self._wake)
                while not self._orders.empty():
                    order, done = self._orders.get()
                    os.read(self._wake, 1)
                    order()
                    done.set()
                while not self._ended and (arrival := port.receive()) is not None:
                    letter = decode_letter(arrival.letter)
                    self._handle(arrival.peer, letter, [bytes(frame) for frame in arrival.frames])
                    self.came.put(letter.body)

    def _send(self, peer: bytes, body: Said, frames: Iterable[memoryview] = ()) -> None:
        letter = Letter(self.setup.run, self.term, f"server-{self.number}", body)
        self.port.send(peer, encode(letter), list(frames))

    def _handle(self, peer: bytes, letter: Letter, frames: list[bytes]) -> None:
        if letter.term != self.term or self.refusing:
            self._send(peer, Refused(self.term, self.refusing or f"term {letter.term} is not {self.term}"))
            return
        match letter.body:
            case Part() as part:
                self.parts.append((part, frames[0]))
            case Push() as push:
                self.pushes.append(push)
                for shard in push.shards:
                    assert shard in self.held
                    self.taken.setdefault((push.lease, shard), self._gradient(letter.sender, push, shard))
                self._late.append((peer, push))
                if self.answers:
                    self.answer_late()
            case Pull() as pull:
                self.pulls.append(pull)
                self._waiting.append((peer, pull))
                self._answer_pulls()
            case other:
                raise AssertionError(other)

    def _gradient(self, sender: str, push: Push, shard: int) -> Tensor:
        place = self.setup.cut.shards[shard]
        if push.slot is not None:
            assert self.memory is not None
            return self.memory.gradient(int(sender.split("-")[1]), push.slot)[place.start : place.stop].clone()
        out = torch.zeros(place.stop - place.start, dtype=torch.uint8)
        for part, frame in self.parts:
            if part.lease == push.lease and part.shard == shard:
                here = out[part.start - place.start : part.stop - place.start]
                if part.encoded:
                    decode_part(self.setup.codec, memoryview(frame), here)
                else:
                    here.copy_(torch.frombuffer(bytearray(frame), dtype=torch.uint8))
        return out

    def answer_late(self) -> None:
        """Answer all pushes that were not."""
        while self._late:
            peer, push = self._late.pop(0)
            self._send(peer, Took(push.lease, push.shards))

    def _answer_pulls(self) -> None:
        for peer, pull in list(self._waiting):
            if not pull.exact and pull.version > self.version:
                continue
            self._waiting.remove((peer, pull))
            source = self.kept[pull.version] if pull.exact else self.weights
            frames = []
            if not pull.near:
                for shard in self.held:
                    place = self.setup.cut.shards[shard]
                    frames.append(source[place.start : place.stop].numpy().data)
            version = pull.version if pull.exact else self.version
            self._send(peer, Weights(pull.number, version, self.held), frames)
