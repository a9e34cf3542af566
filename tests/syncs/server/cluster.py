"""Servers in processes of their own, and a test that is their clerk and their workers."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor, nn

from shoal.core.atoms import Course
from shoal.core.spec import NoCodec, Server
from shoal.syncs.server.cutting import cut
from shoal.syncs.server.frames import as_frame
from shoal.syncs.server.messages import (
    Applied,
    Apply,
    Begin,
    Close,
    Closed,
    End,
    Holder,
    Holds,
    Lease,
    Letter,
    Part,
    Placement,
    Pull,
    Push,
    Said,
    Serving,
    Took,
    Up,
    Weights,
    decode_letter,
    encode,
)
from shoal.syncs.server.post import Line
from shoal.syncs.server.serving import serve
from shoal.syncs.server.setup import Memory, Setup
from shoal.syncs.server.used import pack_used
from shoal.syncs.updating import update
from shoal.wire.curve import Keys
from shoal.wire.link import Link

HERE, THERE = "127.0.0.1", "127.0.0.2"
SECONDS = 20.0
HALVES = ((0, 4), (4, 8))
"""Of a step of 8 samples."""
Kind = TypeVar("Kind")
_up = msgspec.msgpack.Decoder(Up)


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(33, 40), nn.Linear(40, 25))


def optimizer_of(params: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def schedule_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def make_setup(spec: Server, **extra: Any) -> Setup:
    params: list[tuple[str, Tensor]] = list(model().named_parameters())
    layout = cut(params, shards=4)
    return Setup(
        run="run",
        keys=Keys.make(),
        spec=spec,
        course=Course(32, 8),
        total=12,
        version=0,
        cut=layout,
        params=params,
        optimizer=optimizer_of([param for _, param in params]),
        make_schedule=schedule_of,
        schedule_state=None,
        clip=None,
        codec=NoCodec(),
        memory={host: Memory(layout.size, len(layout.shards), seats=4, steps=3) for host in (HERE, THERE)},
        journals=extra.pop("journals", None),
        extra=extra,
    )


def gradient(setup: Setup, lease: Lease) -> Tensor:
    """An area with the gradient of a lease, the same whoever computes it."""
    random = torch.Generator().manual_seed(1000 * lease.step + lease.start)
    area = torch.zeros(setup.cut.size, dtype=torch.uint8)
    for number, shape in enumerate(setup.cut.shapes):
        setup.cut.view(area, number).copy_(torch.randn(shape, generator=random))
    return area


def reference(setup: Setup, steps: int, scale: float = 1.0) -> Tensor:
    """The area of weights after so many steps in one process."""
    params = [nn.Parameter(param.detach().clone()) for _, param in setup.params]
    optimizer = optimizer_of(params)
    schedule = schedule_of(optimizer)
    for step in range(steps):
        first, second = (gradient(setup, Lease(step, *half)) for half in HALVES)
        for number, param in enumerate(params):
            param.grad = (setup.cut.view(first, number) + setup.cut.view(second, number)) * scale
        update(optimizer)
        schedule.step()
    area = torch.zeros(setup.cut.size, dtype=torch.uint8)
    for number, param in enumerate(params):
        setup.cut.view(area, number).copy_(param.detach())
    return area


def used(setup: Setup) -> bytes:
    return pack_used([True] * len(setup.params))


class Cluster:
    """Use as a context: all processes are gone at its end."""

    def __init__(self, setup: Setup) -> None:
        self._turns: dict[str, int] = {}  # workers use their two slots in turn
        self.setup = setup
        self.term = 0
        self.links: dict[int, Link] = {}
        self.pids: dict[int, int] = {}
        self.hosts: dict[int, str] = {}
        self.endpoints: dict[int, str] = {}
        self._heard: dict[int, deque[tuple[Any, list[bytearray]]]] = {}
        self._lines: dict[tuple[str, str], Line] = {}
        self.placement: Placement | None = None

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for line in self._lines.values():
            line.close()
        for number in list(self.pids):
            self.kill(number)

    # -- processes -----------------------------------------------------------------------------------------------------

    def start(self, number: int, host: str = HERE) -> None:
        """Fork a server, and hear where it listens."""
        ours, theirs = Link.pair()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                ours.close()
                for link in self.links.values():
                    link.close()
                serve(self.setup, number, theirs, host)
                code = 0
            except BaseException as error:
                traceback.print_exc()
                code = 3 if type(error).__name__ == "AuditError" else 4
            finally:
                os._exit(code)
        theirs.close()
        self.links[number], self.pids[number], self.hosts[number] = ours, pid, host
        self._heard[number] = deque()
        self.endpoints[number] = self.hear(number, Serving).endpoint

    def kill(self, number: int) -> None:
        os.kill(self.pids[number], signal.SIGKILL)
        self.wait(number)

    def wait(self, number: int) -> int:
        """Until it has left; its exit code."""
        end = time.monotonic() + SECONDS
        pid, link = self.pids.pop(number), self.links.pop(number)
        self.endpoints.pop(number, None)
        while time.monotonic() < end:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                link.close()
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        link.close()
        raise AssertionError(f"server {number} did not leave")

    # -- control -------------------------------------------------------------------------------------------------------

    def tell(self, message: msgspec.Struct, *numbers: int) -> None:
        for number in numbers or list(self.links):
            self.links[number].send(encode(message))

    def hear(self, number: int, kind: type[Kind], fits: Callable[[Kind], bool] = lambda message: True) -> Kind:
        return self.hear_all(number, kind, fits)[0]

    def hear_all(
        self, number: int, kind: type[Kind], fits: Callable[[Kind], bool] = lambda message: True
    ) -> tuple[Kind, list[bytearray]]:
        """The next message of this kind; others wait."""
        heard, end = self._heard[number], time.monotonic() + SECONDS
        while True:
            for entry in heard:
                if isinstance(entry[0], kind) and fits(entry[0]):
                    heard.remove(entry)
                    return entry
            if not self.links[number].poll(max(0.0, end - time.monotonic())):
                raise AssertionError(f"server {number} did not say {kind.__name__}; it said {list(heard)}")
            header, buffers = self.links[number].recv()
            heard.append((_up.decode(header), buffers))

    def place(self, holders: Sequence[tuple[int, int | None]]) -> None:
        """Tell all servers, and wait until they know."""
        self.tell(self.next_placement(holders))
        for number in self.links:
            self.hear(number, Holds, lambda holds: holds.term == self.term)

    def next_placement(self, holders: Sequence[tuple[int, int | None]]) -> Placement:
        self.term += 1
        live = {number: self.hosts[number] for number in self.links}
        self.placement = Placement(self.term, [Holder(*one) for one in holders], dict(self.endpoints), live)
        return self.placement

    def begin(self, holders: Sequence[tuple[int, int | None]]) -> None:
        for number in self.links:
            shards = [shard for shard, one in enumerate(holders) if number in one]
            self.tell(Begin(shards, "start", self.setup.version), number)
            self.hear(number, Holds)
        self.place(holders)

    def close(self, step: int) -> float:
        self.tell(Close(step))
        return sum(self.hear(number, Closed, lambda closed: closed.step == step).norm for number in self.links)

    def apply(self, step: int, scale: float = 1.0, **more: Any) -> list[Applied]:
        self.tell(Apply(step, scale, 0.0, **more))
        return [self.hear(number, Applied, lambda done: done.version == step + 1) for number in self.links]

    def end(self) -> None:
        self.tell(End())
        assert not any([self.wait(number) for number in list(self.pids)])

    # -- a worker ------------------------------------------------------------------------------------------------------

    def say(
        self, number: int, body: Said, frames: Sequence[Tensor] = (), *, sender: str = "worker-0", **other: Any
    ) -> None:
        letter = Letter(other.get("run", self.setup.run), other.get("term", self.term), sender, body)
        self.line(number, sender).send(encode(letter), [as_frame(frame) for frame in frames], copy=True)

    def line(self, number: int, sender: str = "worker-0") -> Line:
        endpoint = self.endpoints[number]
        if (endpoint, sender) not in self._lines:
            self._lines[endpoint, sender] = Line(endpoint, self.setup.keys, limit=1 << 26)
        return self._lines[endpoint, sender]

    def answer(self, number: int, kind: type[Kind], sender: str = "worker-0") -> tuple[Kind, list[memoryview]]:
        message = self.line(number, sender).receive(SECONDS)
        assert message is not None, f"server {number} did not answer with {kind.__name__}"
        body = decode_letter(message.letter).body
        assert isinstance(body, kind), body
        return body, message.frames

    def held(self) -> dict[int, list[int]]:
        assert self.placement is not None
        found: dict[int, list[int]] = {}
        for shard, holder in enumerate(self.placement.holders):
            found.setdefault(holder.server, []).append(shard)
        return found

    def push(self, lease: Lease, *, near: bool, sender: str = "worker-0") -> None:
        """Send a gradient to all servers, and wait until it counts."""
        area = gradient(self.setup, lease)
        turn = self._turns[sender] = 1 - self._turns.get(sender, 1)
        if near:
            self.setup.memory[HERE].gradient(int(sender[-1]), turn).copy_(area)
        for number, shards in self.held().items():
            parts = 0 if near else self.send_parts(number, lease, area, shards, sender)
            slot = turn if near else None
            self.say(number, Push(lease, shards, lease.step, used(self.setup), slot, parts), sender=sender)
        for number, shards in self.held().items():
            took: set[int] = set()
            while took != set(shards):
                took |= set(self.answer(number, Took, sender)[0].shards)

    def send_parts(self, number: int, lease: Lease, area: Tensor, shards: Sequence[int], sender: str) -> int:
        """In two parts for each shard, the second one first; how many there were."""
        for shard in shards:
            place = self.setup.cut.shards[shard]
            middle = (place.start + place.stop) // 128 * 64
            for start, stop in ((middle, place.stop), (place.start, middle)):
                self.say(number, Part(lease, shard, start, stop), [area[start:stop]], sender=sender)
        return 2 * len(shards)

    def step(self, step: int, *, near: bool = True, closing: bool = True, **order: Any) -> None:
        """One whole step."""
        for seat, half in enumerate(HALVES):
            self.push(Lease(step, *half), near=near, sender=f"worker-{seat}")
        if closing:
            self.close(step)
        self.apply(step, **order)

    def weights(self, version: int, *, exact: bool = False) -> Tensor:
        """All of them, over the network."""
        area = torch.zeros(self.setup.cut.size, dtype=torch.uint8)
        for number in self.held():
            self.say(number, Pull(1, version, False, exact))
            body, frames = self.answer(number, Weights)
            assert body.version == version if exact else body.version >= version
            for shard, frame in zip(body.shards, frames, strict=True):
                place = self.setup.cut.shards[shard]
                area[place.start : place.stop] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        return area
