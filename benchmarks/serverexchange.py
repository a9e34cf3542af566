"""Exchanges of a step with two workers: both push a gradient, it is applied, both pull the weights. For serverbytes.py.

Each arm is a context that gives a function: one exchange. Workers and servers are processes of their own; the caller is
the clerk. An exchange begins when the workers are told to push, and ends when both have all weights in memory of their
own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import torch
from servertold import (
    DONE,
    HAVE,
    HERE,
    RATE,
    SECONDS,
    WORKERS,
    Exchange,
    Stopped,
    be,
    both,
    copies,
    end_process,
    numbers,
    raw,
    ray,
    told,
    workers,
)
from torch import Tensor, nn

from shoal.core.atoms import Course
from shoal.core.spec import NoCodec, Server
from shoal.syncs.server.client import Client
from shoal.syncs.server.cutting import cut
from shoal.syncs.server.messages import (
    Applied,
    Apply,
    Begin,
    Close,
    Closed,
    Holder,
    Holds,
    Lease,
    Placement,
    Serving,
    Up,
    encode,
)
from shoal.syncs.server.placing import place
from shoal.syncs.server.serving import serve
from shoal.syncs.server.setup import Memory, Setup
from shoal.wire.curve import Keys
from shoal.wire.link import Link

THERE, MIRROR = "127.0.0.2", "127.0.0.3"  # addresses of this machine, as is HERE, that count as different hosts
HALVES = ((0, 4), (4, 8))  # atoms of a step of 16 samples

_up = msgspec.msgpack.Decoder(Up)


# ---- ours


def make_setup(size: int, durability: str, servers: int) -> Setup:
    params = [("weight", nn.Parameter(numbers(size, 0)))]
    layout = cut(params)
    return Setup(
        run="bench",
        keys=Keys.make(),
        spec=Server(servers=servers, durability=durability),
        course=Course(1 << 20, 16),
        total=1 << 20,
        version=0,
        cut=layout,
        params=list(params),
        optimizer=torch.optim.SGD([param for _, param in params], lr=RATE),
        make_schedule=None,
        schedule_state=None,
        clip=None,
        codec=NoCodec(),
        memory={
            host: Memory(layout.size, len(layout.shards), seats=WORKERS, steps=2) for host in (HERE, THERE, MIRROR)
        },
    )


class Clerk:
    """Starts servers, says who holds what, and has steps applied; all by the messages of a real run."""

    def __init__(self, setup: Setup, hosts: Sequence[str], holders: Sequence[Holder]) -> None:
        self._setup = setup
        self._links: list[Link] = []
        self._pids: list[int] = []
        try:
            for number, host in enumerate(hosts):
                self._start(number, host)
            endpoints = {number: self._hear(number, Serving).endpoint for number in range(len(hosts))}
            self.placement = Placement(1, list(holders), endpoints, dict(enumerate(hosts)))
            for number in endpoints:
                mine = [shard for shard, one in enumerate(holders) if number in (one.server, one.mirror)]
                self._links[number].send(encode(Begin(mine, "start", 0)))
                self._links[number].send(encode(self.placement))
            for number in endpoints:
                while self._hear(number, Holds).term < 1:
                    pass
        except BaseException:
            self.end()
            raise

    def _start(self, number: int, host: str) -> None:
        ours, theirs = Link.pair()
        pid = os.fork()
        if pid == 0:
            for link in (ours, *self._links):
                link.close()
            be(lambda: serve(self._setup, number, theirs, host))
        theirs.close()
        self._links.append(ours)
        self._pids.append(pid)

    def step(self, number: int) -> None:
        """Have a step applied whose gradients count on all servers."""
        if self._setup.spec.durability != "none":
            self._all(Close(number), Closed)
        self._all(Apply(number, 1.0, 0.0), Applied)

    def _all(self, order: msgspec.Struct, answer: type[Any]) -> None:
        for link in self._links:
            link.send(encode(order))
        for number in range(len(self._links)):
            self._hear(number, answer)

    def _hear(self, number: int, kind: type[Any]) -> Any:
        link = self._links[number]
        while link.poll(SECONDS):
            message = _up.decode(link.recv()[0])
            if isinstance(message, kind):
                return message
        raise Stopped(f"server {number} did not say {kind.__name__} within {SECONDS:.0f} s")

    def end(self) -> None:
        for link in self._links:
            link.close()
        for pid in self._pids:
            end_process(pid)


@contextmanager
def ours(size: int, *, near: bool, durability: str, servers: int = 1) -> Iterator[Exchange]:
    """Real servers, real clients. Far workers have another address than servers, and each mirror another one again."""
    setup = make_setup(size, durability, servers)
    sizes = [shard.stop - shard.start for shard in setup.cut.shards]
    if durability == "peer" and servers == 1:
        holders, hosts = [Holder(0, 1) for _ in sizes], [HERE, HERE if near else MIRROR]
    else:
        holders = place(sizes, range(servers), mirrors=durability == "peer")
        hosts = [HERE if near or number % 2 == 0 else MIRROR for number in range(servers)]
    clerk = Clerk(setup, hosts, holders)
    try:
        seats = [_seat(setup, clerk.placement, seat, HERE if near else THERE) for seat in range(WORKERS)]
        with workers(seats) as started:
            steps = iter(range(setup.total))
            yield lambda: both(started, lambda: clerk.step(next(steps)))
    finally:
        clerk.end()


def _seat(setup: Setup, placement: Placement, seat: int, host: str) -> Callable[[socket.socket], None]:
    def body(line: socket.socket) -> None:
        gradient = numbers(setup.cut.size, 1 + seat)
        param = nn.Parameter(torch.zeros_like(gradient))
        quiet, _kept = socket.socketpair()  # in place of the link to the clerk: nothing ever comes there
        client = Client(setup, seat, host, [("weight", param)], fd=quiet.fileno(), hear=lambda: None)
        client.place(placement)
        for step in told(line):
            client.open(Lease(step, *HALVES[seat]), step)
            param.grad = gradient
            client.push(used=[True])
            client.prefetch(step + 1)
            line.sendall(DONE)
            client.pull(step + 1)
            if step == 0:
                check(param, setup)
            line.sendall(HAVE)

    return body


def check(param: Tensor, setup: Setup) -> None:
    """The weights after one step must be what one process makes of them."""
    total = sum((numbers(setup.cut.size, 1 + seat) for seat in range(WORKERS)), torch.zeros(()))
    torch.testing.assert_close(param.detach(), numbers(setup.cut.size, 0) - RATE * total)


def arms(
    stack: ExitStack, size: int, *, near: bool, far: bool, servers: int, python: str | None
) -> dict[str, Exchange]:
    """All of them, by name, alive until the stack ends."""
    found: dict[str, Exchange] = {}
    if near:
        found["copies"] = stack.enter_context(copies(size, sums=False))
        found["sums"] = stack.enter_context(copies(size, sums=True))
    if far:
        found["raw"] = stack.enter_context(raw(size, size))
        found["raw-1MB"] = stack.enter_context(raw(size, 1 << 20))
    for where, wanted in (("near", near), ("far", far)):
        for durability in ("none", "peer") if wanted else ():
            one = ours(size, near=where == "near", durability=durability, servers=servers)
            found[f"{where}-{durability}"] = stack.enter_context(one)
    if python is not None:
        found["ray"] = stack.enter_context(ray(size, python))
    return found
