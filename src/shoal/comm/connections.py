"""The sockets that gloo has opened, which it does not tell about."""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress


class Connections:
    """Sockets of this process that were opened by someone else, and may be closed by them at any time.

    They are known by number and identity: a number may come to mean another file.
    """

    def __init__(self, sockets: dict[int, int] | None = None) -> None:
        self._sockets = sockets or {}

    @classmethod
    def opened_by(cls, call: Callable[[], object]) -> Connections:
        """What there is after `call` that was not there before."""
        before = _sockets()
        call()
        return cls({number: identity for number, identity in _sockets().items() if before.get(number) != identity})

    def ports(self) -> set[int]:
        """Where those of them listen that listen."""
        return {at.getsockname()[1] for at in self._opened() if at.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}

    def between(self, mine: set[int], all_ports: set[int]) -> Connections:
        """Those that belong to members who listen at these ports; other threads may have opened sockets meanwhile."""
        kept = {}
        for opened in self._opened():
            with suppress(OSError):
                listens = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if opened.getsockname()[1] in mine or (not listens and opened.getpeername()[1] in all_ports):
                    kept[os.fstat(opened.fileno()).st_ino] = True
        return Connections({number: identity for number, identity in self._sockets.items() if identity in kept})

    def _opened(self) -> Iterator[socket.socket]:
        """Copies of those that speak TCP, each open until the next is asked for."""
        for descriptor in self.descriptors():
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as opened:
                if opened.family in (socket.AF_INET, socket.AF_INET6):
                    yield opened

    def descriptors(self) -> Iterator[int]:
        """Those that are still what they were."""
        for number, identity in self._sockets.items():
            with suppress(OSError):
                if os.fstat(number).st_ino == identity:
                    yield number

    def any_ended(self) -> bool:
        """Whether a peer has closed one of them, or the owner has, who does that when a peer is gone."""
        still = list(self.descriptors())
        look = select.poll()
        for descriptor in still:
            look.register(descriptor, select.POLLRDHUP)
        return len(still) < len(self._sockets) or bool(look.poll(0))

    def end(self) -> None:
        """End all connections, so that whoever waits at either end is told. From any thread."""
        for descriptor, identity in self._sockets.items():
            with suppress(OSError), _copy_of(descriptor, identity) as connection:
                # not the listener: gloo ends the process if that goes
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)


def _copy_of(descriptor: int, identity: int) -> socket.socket:
    """Of the socket that was meant. OSError if the number means something else by now."""
    copy = os.dup(descriptor)
    if os.fstat(copy).st_ino != identity:
        os.close(copy)
        raise OSError(errno.EBADF, "not the socket that it was")
    return socket.socket(fileno=copy)


def _sockets() -> dict[int, int]:
    found: dict[int, int] = {}
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    found[int(name)] = os.fstat(int(name)).st_ino
    return found
