"""Who reaches whom: an ICMP echo from each host to each other one."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from shoal.engines.namespaces import join, join_handle
from shoal.engines.places import Place

_ECHO = struct.Struct(">BBHHH")  # type, code, checksum, identifier, sequence
_REQUEST, _REPLY = 8, 0
_AGAIN_SECONDS = 0.2


def silent_pairs(places: Sequence[Place], seconds: float) -> list[tuple[str, str]]:
    """The pairs (from, to) of host names without an echo within `seconds`. For a process with one thread.

    Asks again every fifth of a second, so a packet lost here and there is no silence.
    """
    with ExitStack() as stack:
        socks = {place.name: stack.enter_context(_socket_in(place)) for place in places}
        missing = {(a.name, b.name) for a in places for b in places if a is not b}
        addresses = {place.name: place.address for place in places}
        names = {place.address: place.name for place in places}
        deadline = time.monotonic() + seconds
        while missing and (now := time.monotonic()) < deadline:
            _ask(socks, addresses, missing)
            _listen(socks, names, missing, min(now + _AGAIN_SECONDS, deadline))
    return sorted(missing)


@contextmanager
def _socket_in(place: Place) -> Iterator[socket.socket]:
    """A socket belongs to the network it was made in, wherever it is used."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        join(place.pid, ("net",))
        try:
            sock = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
        finally:
            join_handle(home, "net")
    finally:
        os.close(home)
    with sock:
        sock.setblocking(False)
        yield sock


def _ask(socks: dict[str, socket.socket], addresses: dict[str, str], missing: set[tuple[str, str]]) -> None:
    for source, target in missing:
        # unreachable: no route, no neighbour, or a link that is down; silence says the same
        with suppress(OSError):
            socks[source].sendto(_echo(), (addresses[target], 0))


def _echo() -> bytes:
    identifier = os.getpid() & 0xFFFF
    total = (_REQUEST << 8) + identifier
    checksum = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
    return _ECHO.pack(_REQUEST, 0, checksum, identifier, 0)


def _listen(
    socks: dict[str, socket.socket], names: dict[str, str], missing: set[tuple[str, str]], until: float
) -> None:
    by_socket = {sock: name for name, sock in socks.items()}
    while missing and (left := until - time.monotonic()) > 0:
        ready, _, _ = select.select(list(by_socket), [], [], left)
        for sock in ready:
            with suppress(OSError):
                packet, (address, _) = sock.recvfrom(2048)
                header = (packet[0] & 0xF) * 4
                kind, _, _, identifier, _ = _ECHO.unpack_from(packet, header)
                if kind == _REPLY and identifier == os.getpid() & 0xFFFF and address in names:
                    missing.discard((by_socket[sock], names[address]))
