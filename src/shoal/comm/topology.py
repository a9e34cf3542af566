"""Which workers are on which host, and whether hosts can reach each other."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.errors import GroupError

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SHARED = Path("/dev/shm")
_REACH_SECONDS = 10.0
"""How long a host may take to answer before it counts as out of reach."""


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
    store.set(f"place/{rank}", "\n".join(mine).encode())
    told = [store.get(f"place/{member}").decode().split("\n") for member in range(size)]
    numbers: dict[str, int] = {}
    return [Place(numbers.setdefault(host, len(numbers)), name, address) for host, name, address in told]


def refuse_unreachable(store: Any, rank: int, places: Sequence[Place]) -> None:
    """Raises `GroupError`, on every worker, if the first worker of a host cannot connect to that of another."""
    first = {place.host: worker for worker, place in reversed(list(enumerate(places)))}
    if len(first) == 1:
        return
    me = places[rank]
    with ExitStack() as stack:
        if first[me.host] == rank:
            listener = stack.enter_context(_listener(me.address))
            store.set(f"door/{me.host}", str(listener.getsockname()[1]).encode())
            others = [
                (places[worker], int(store.get(f"door/{host}"))) for host, worker in first.items() if host != me.host
            ]
            store.set(f"reach/{me.host}", _knock(me, others).encode())
        troubles = [store.get(f"reach/{host}").decode() for host in first]
    if any(troubles):
        raise GroupError("; ".join(filter(None, troubles)))


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


def _knock(me: Place, others: Sequence[tuple[Place, int]]) -> str:
    """Which of the others cannot be reached, for people; empty if all can."""
    failed = []
    deadline = time.monotonic() + _REACH_SECONDS
    for place, port in others:
        try:
            # the kernel accepts it: the other side needs to do nothing
            socket.create_connection((place.address, port), max(0.1, deadline - time.monotonic())).close()
        except OSError as error:
            failed.append(
                f"{place.address} (host {place.name}) cannot be reached from {me.address} (host {me.name}): {error}"
            )
    if failed:
        failed[-1] += "; look at routes and firewalls between them, and whether the names point to the right addresses"
    return "; ".join(failed)
