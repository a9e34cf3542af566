"""A door for strangers: how many connections that never prove who they are may come in.

A connection costs the process that accepts it some memory, a descriptor and a fraction of a millisecond, before
anything is known of the other end. Whoever may reach the port could take the machine from the training with nothing
else. So strangers come in at a bounded rate. What comes beyond it is dropped by the kernel, before it is a connection.

On the loopback, clients of a run come from an address of 127.0.0.0/8 that is made of its keys, and nobody else is let
in at all. That is no proof, for other users of the machine can see the addresses of connections: who comes from there
is still a stranger until it has proved to have the keys. Elsewhere everybody may come, and in a crowd clients of the
run have to try until their turn comes. A connection that stands is never touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import socket
import struct
import sys

from shoal.core.errors import ConfigError

BURST = 64
"""Strangers that may come at once."""
RATE = 50.0
"""And from then on, in each second."""
_REOPEN = 8
"""So many may come when the gate opens again: not one at a time, which would be opening and shutting all the time."""
_BACKLOG = 128
_MOST_DEBT = 2.0 * _BACKLOG
"""Strangers that came beyond the allowance, before the gate was shut, and are counted."""
_DEFER = 1  # second

_IS_LINUX = sys.platform == "linux"
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # SO_ATTACH_FILTER, SO_DETACH_FILTER of Linux


def _instruction(code: int, if_true: int, if_false: int, value: int) -> bytes:
    """Of the kernel's classic packet filter."""
    return struct.pack("HBBI", code, if_true, if_false, value)


_DROP = _instruction(0x06, 0, 0, 0)  # keep 0 bytes
_KEEP = _instruction(0x06, 0, 0, 0xFFFFFFFF)
_LOAD_SOURCE = _instruction(0x20, 0, 0, 0xFFF00000 + 12)  # the 12th byte of the IPv4 header


def _only_from(address: str) -> bytes:
    source = int.from_bytes(socket.inet_aton(address), "big")
    return _LOAD_SOURCE + _instruction(0x15, 0, 1, source) + _KEEP + _DROP


class Gate:
    """Decides whether strangers may come in. Pure: whoever asks says what time it is, in seconds."""

    def __init__(self, now: float, *, burst: int = BURST, rate: float = RATE) -> None:
        self._burst = float(burst)
        self._rate = rate
        self._reopen = float(min(_REOPEN, burst))
        self._allowance = self._burst
        self._since = now
        self.is_open = True

    def came(self, now: float) -> None:
        """Somebody came in, of whom nothing is known yet."""
        self._refill(now)
        self._allowance = max(self._allowance - 1.0, -_MOST_DEBT)
        if self._allowance < 1.0:
            self.is_open = False

    def known(self) -> None:
        """One of them has proved to be of this run, and does not count."""
        self._allowance = min(self._allowance + 1.0, self._burst)

    def look(self, now: float) -> float | None:
        """Open the gate again if it is time to. Seconds until the next look is worth it; None, if it is open."""
        if self.is_open:
            return None
        self._refill(now)
        self.is_open = self._allowance >= self._reopen
        return None if self.is_open else (self._reopen - self._allowance) / self._rate + 0.001

    def _refill(self, now: float) -> None:
        self._allowance = min(self._allowance + max(now - self._since, 0.0) * self._rate, self._burst)
        self._since = now


def guest_address(*words: bytes) -> str:
    """The loopback address from which clients of a run come to a server on the loopback, made of keys of the run."""
    digest = hashlib.sha256(b"shoal guest" + b"".join(words)).digest()
    first, second, third = (1 + byte % 254 for byte in digest[:3])
    return f"127.{first}.{second}.{third}"


def is_loopback(address: str) -> bool:
    """Whether `guest_address` can be a source address of connections to it."""
    return _IS_LINUX and address.startswith("127.")


class Listener:
    """A listening TCP socket whose port stays its own while nobody is let in."""

    def __init__(self, address: str, port: int, *, guests: str | None = None) -> None:
        """With `guests`, an IPv4 address, who comes from elsewhere does not come in.

        Raises ConfigError if the address is not of this machine, or the port is taken.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._guests = guests
        self._lets_in = True
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if _IS_LINUX:  # who connects and says nothing stays with the kernel
                self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _DEFER)
                self._apply()
            self._sock.bind((address, port))
            self._sock.listen(_BACKLOG)
        except (OSError, OverflowError) as error:
            self._sock.close()
            raise ConfigError(
                f"cannot listen at {address} port {port or 'of any number'} ({error}); give an address of this "
                "machine, and a port that is free"
            ) from None
        self.port: int = self._sock.getsockname()[1]

    def descriptor(self) -> int:
        """Another descriptor of the same socket, which is the caller's."""
        return os.dup(self._sock.fileno())

    def let_in(self, wanted: bool) -> None:
        """Whether new connections are accepted from now on. Those that stand are not touched."""
        if wanted != self._lets_in:
            self._lets_in = wanted
            self._apply()

    def _apply(self) -> None:
        program = _DROP if not self._lets_in else _only_from(self._guests) if self._guests else None
        # a kernel without packet filters lets everybody in: slower under a flood, and no less safe
        with contextlib.suppress(OSError):
            self._filter(program)

    def _filter(self, program: bytes | None) -> None:
        if program is None:
            self._sock.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
            return
        memory = ctypes.create_string_buffer(program, len(program))
        about = struct.pack("HxxxxxxP", len(program) // len(_DROP), ctypes.addressof(memory))
        self._sock.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, about)

    def close(self) -> None:
        self._sock.close()
