"""Which workers are on which host, and whether hosts can reach each other."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec

from shoal.comm.gathering import gather
from shoal.core.errors import GroupError

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SHARED = Path("/dev/shm")
_MOST_NAMED = 8
"""Hosts out of reach of one, of which people are told why: everybody hears what all have to say."""
REACH_SECONDS = 10.0
"""How long a host may take to answer before it counts as out of reach."""


class HostsApart(GroupError):
    """Hosts that cannot reach each other, as all workers learn it who hear the store."""

    def __init__(self, message: str, pairs: Sequence[tuple[int, int]]) -> None:
        super().__init__(message)
        self.pairs = list(pairs)
        """Workers of which one cannot reach the other, the lower one first: all of the two hosts."""


@dataclass(frozen=True)
class Place:
    """Where a worker is."""

    host: int
    """Hosts are numbered in order of their first worker."""
    name: str
    address: str


def host_identity() -> str:
    """Equal for two processes if and only if they can share memory: one boot of one machine, one /dev/shm.

    Containers that have a /dev/shm of their own are hosts of their own.
    """
    try:
        boot = _BOOT.read_text().strip()
    except OSError:
        boot = socket.gethostname()
    try:
        found = os.stat(_SHARED)
        return f"{boot}/{found.st_dev}:{found.st_ino}"
    except OSError:
        return f"{boot}/{socket.gethostname()}"


def own_address(host: str | None) -> str:
    """The address to be reached at: that of `host`, or where this machine's name points. Raises `GroupError`."""
    name = socket.gethostname() if host is None else host
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise GroupError(
            f"this machine's name, {name!r}, has no address ({error}); add it to the hosts file or the name service"
        ) from None


def where_all_are(store: Any, rank: int, size: int, host: str | None) -> list[Place]:
    """The place of each worker, as all workers see it."""
    mine = [host_identity(), socket.gethostname(), own_address(host)]
    told = [text.decode().split("\n") for text in gather(store, "place", rank, size, "\n".join(mine).encode())]
    numbers: dict[str, int] = {}
    return [Place(numbers.setdefault(host, len(numbers)), name, address) for host, name, address in told]


def refuse_unreachable(store: Any, rank: int, places: Sequence[Place], reach: float = REACH_SECONDS) -> None:
    """Raises `HostsApart`, the same on every worker, if the first worker of a host cannot connect to that of another.

    `reach` is how many seconds the others may take to answer.
    """
    first = {place.host: worker for worker, place in reversed(list(enumerate(places)))}
    if len(first) == 1:
        return
    me = places[rank]
    with ExitStack() as stack:
        answer = _Answer()
        if first[me.host] == rank:
            listener = stack.enter_context(_listener(me.address))
            doors = gather(store, "door", me.host, len(first), str(listener.getsockname()[1]).encode())
            others = [(places[first[host]], int(doors[host])) for host in first if host != me.host]
            answer = _knock(me, others, reach)
        told = gather(store, "reach", rank, len(places), msgspec.json.encode(answer))
    answers = [msgspec.json.decode(told[worker], type=_Answer) for worker in first.values()]
    apart = {frozenset([host, other]) for host, answer in zip(first, answers, strict=True) for other in answer.missed}
    if apart:
        hosts = [place.host for place in places]
        pairs = [pair for pair in combinations(range(len(places)), 2) if frozenset(hosts[at] for at in pair) in apart]
        raise HostsApart("; ".join(answer.said for answer in answers if answer.said), pairs)


def _listener(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(256)
    except OSError as error:
        listener.close()
        raise GroupError(f"no connection can be taken at this host's address {address}: {error}") from None
    return listener


class _Answer(msgspec.Struct, array_like=True):
    """What came of knocking at the other hosts."""

    missed: list[int] = []
    """Hosts that did not answer."""
    said: str = ""
    """The same for people; empty if all answered."""


def _knock(me: Place, others: Sequence[tuple[Place, int]], reach: float) -> _Answer:
    """Which of the others cannot be reached. All are asked at once: one that is silent costs the others nothing."""
    deadline = time.monotonic() + reach
    failed: dict[int, str] = {}

    def knock(place: Place, port: int) -> None:
        try:
            # the kernel accepts it: the other side needs to do nothing
            socket.create_connection((place.address, port), max(0.1, deadline - time.monotonic())).close()
        except OSError as error:
            failed[place.host] = (
                f"{place.address} (host {place.name}) cannot be reached from {me.address} (host {me.name}): {error}"
            )

    knocks = [threading.Thread(target=knock, args=other, name="knock") for other in others]
    for thread in knocks:
        thread.start()
    for thread in knocks:
        thread.join()
    if not failed:
        return _Answer()
    texts = [failed[host] for host in sorted(failed)[:_MOST_NAMED]]
    if len(failed) > _MOST_NAMED:
        texts.append(f"and {len(failed) - _MOST_NAMED} more")
    texts[-1] += "; look at routes and firewalls between them, and whether the names point to the right addresses"
    return _Answer(sorted(failed), "; ".join(texts))
