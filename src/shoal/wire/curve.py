"""Messages between the processes of one run over TCP: encrypted, and only from those who hold the run's key.

ZeroMQ with CURVE. The client knows the server's public key beforehand, and the server lets in one client key: that of
the run. Who has neither gets the greeting of the protocol, which is the same everywhere, and nothing else.

`Server` and `Client` exchange small messages. What they are made of, `ServerSide` and `ClientSide`, has keys, gate,
connections and waiting, and leaves the form of a message to whoever builds on it.
"""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import zmq
from zmq.utils import z85

from shoal.core.errors import ConfigError, ShoalError
from shoal.wire.gate import Gate, Listener, guest_address, is_loopback
from shoal.wire.runkeys import Keys, check_keys, read_client_keys

__all__ = ["Client", "ClientSide", "Endpoint", "Keys", "Server", "ServerSide", "has_message", "read_client_keys"]

MOST_QUEUED = 1000
"""Messages that wait for one peer; more are dropped."""
HANDSHAKE = 2.0
"""Seconds that a connection may take to prove who it is."""

_OVERHEAD = 64
"""Bytes that encryption adds to a message (33), and some."""
_LEAST_LIMIT = 1024
"""A handshake needs about 300 bytes."""
_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"shoal"


class Endpoint:
    """What server and client have in common: a context of their own, a socket, the process that they belong to."""

    def __init__(self, kind: int, limit: int, options: Mapping[int, int] | None = None) -> None:
        if not 1 <= limit < 1 << 31:
            raise ConfigError(f"limit={limit} bytes for one message; it must be between 1 and 2147483647")
        self._limit = self._most_sent = limit
        self._pid = os.getpid()
        self._closed = False
        self._context = zmq.Context()
        self._context.set(zmq.BLOCKY, 0)
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        for option, value in {**_options(limit), **(options or {})}.items():
            self._socket.setsockopt(option, value)

    def _mine(self) -> None:
        if os.getpid() != self._pid:
            raise ShoalError(
                f"this {type(self).__name__} was made by process {self._pid} and is used in process {os.getpid()}, "
                "which was forked from it; it must be made in the process that uses it"
            )
        if self._closed:
            raise ShoalError(f"this {type(self).__name__} was closed; make another one")

    def _may_send(self, payload: bytes) -> None:
        self._mine()
        if len(payload) > self._most_sent:
            raise ShoalError(f"a message of {len(payload)} bytes; at most {self._most_sent} may be sent at once")

    def _take(self, parts: int) -> list[bytes] | None:
        """The next message that has this form; others are dropped. None, if there is none."""
        while True:
            try:
                message = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return None
            if len(message) == parts and len(message[-1]) <= self._limit:
                return message

    def _attend(self) -> float | None:
        """Do what has to be done besides messages. Seconds until it has to be done again at the latest."""
        return None

    def _own_sockets(self) -> list[zmq.Socket[bytes]]:
        return [self._socket]

    def wait(self, timeout: float | None, *more: int) -> list[int]:
        """Wait until a message is there, or one of the descriptors in `more` is readable or hung up.

        Answers with those descriptors, and `fileno()` of this object first if `receive` will find a message. Nothing,
        after `timeout` seconds; None is without end. The way to poll: it never misses what came in the meantime.
        """
        self._mine()
        end = None if timeout is None else time.monotonic() + max(timeout, 0.0)
        poller = zmq.Poller()
        for socket in self._own_sockets():
            poller.register(socket, zmq.POLLIN)
        for descriptor in more:
            poller.register(descriptor, zmq.POLLIN)
        while True:
            attend_in = self._attend()
            left = None if end is None else max(end - time.monotonic(), 0.0)
            ready = {found for found, _ in poller.poll(_milliseconds(left, attend_in))}
            found = [self.fileno()] if self._socket in ready else []
            found += [descriptor for descriptor in more if descriptor in ready]
            if found or (end is not None and time.monotonic() >= end):
                self._attend()
                return found

    def fileno(self) -> int:
        """A descriptor that becomes readable when something has come. Prefer `wait`.

        It tells of changes, not of a state: before each wait for it, call `receive` until it answers None, also after
        a `send`. Readable does not mean that there is a message.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the connection; what was not sent is lost. In a forked process, and a second time: nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._release()
        self._context.destroy(linger=0)

    def _release(self) -> None:
        """What has to be let go besides the sockets."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether receiving from it would find one; also has ZeroMQ look again, as its descriptor demands."""
    return bool(cast(int, socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return cast(int, socket.getsockopt(zmq.FD))


def _milliseconds(*seconds: float | None) -> int | None:
    """The shortest of these, rounded up so that waiting for the rest never spins; None, if all are."""
    known = [one for one in seconds if one is not None]
    return -int(-min(min(known), 1e6) * 1000 // 1) if known else None


def _options(limit: int) -> dict[int, int]:
    return {
        zmq.LINGER: 0,
        zmq.MAXMSGSIZE: max(limit, _LEAST_LIMIT) + _OVERHEAD,
        zmq.SNDHWM: MOST_QUEUED,
        zmq.RCVHWM: MOST_QUEUED,
        zmq.HANDSHAKE_IVL: int(HANDSHAKE * 1000),
        zmq.HEARTBEAT_IVL: 0,  # the processes have their own
        zmq.CONNECT_TIMEOUT: 300,
        zmq.RECONNECT_IVL: 20,
        zmq.RECONNECT_IVL_MAX: 300,
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: 10,
        zmq.TCP_KEEPALIVE_INTVL: 5,
        zmq.TCP_KEEPALIVE_CNT: 3,
        zmq.TCP_MAXRT: 5000,  # what is not acknowledged for so long ends the connection, and a new one is tried
    }


class ServerSide(Endpoint):
    """Listens, and lets in clients of the run. What they say is read by those who build on this, from `_socket`.

    Strangers are attended to in `_attend`: without a call of it for seconds, nobody new comes in.
    """

    def __init__(
        self,
        keys: Keys,
        address: str,
        *,
        port: int = 0,
        limit: int,
        clock: Callable[[], float] = time.monotonic,
        options: Mapping[int, int] | None = None,
    ) -> None:
        """Listen at an address of this machine; port 0 takes a free one. `limit` is of the bytes of one frame.

        `options` are of the ZeroMQ socket, instead of the usual ones.

        Raises ConfigError if that cannot be, or the keys lack the server's part.
        """
        check_keys(keys.server_public, keys.server_secret, keys.client_public)
        guests = guest_address(keys.server_public, keys.client_public) if is_loopback(address) else None
        super().__init__(zmq.ROUTER, limit, options)
        try:
            self._listener = Listener(address, port, guests=guests)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._clock = clock
        self._gate = Gate(clock())
        self._allowed = z85.decode(keys.client_public)
        self._asked: zmq.Socket[bytes] = self._context.socket(zmq.REP)
        self._asked.linger = 0
        self._asked.bind(_ZAP)  # before anybody can connect
        socket = self._socket
        socket.curve_server = True
        socket.curve_publickey = keys.server_public
        socket.curve_secretkey = keys.server_secret
        socket.zap_domain = _DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._arrivals = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        socket.setsockopt(zmq.IPV6, int(":" in address))
        socket.setsockopt(zmq.USE_FD, self._listener.descriptor())
        host = f"[{address}]" if ":" in address else address
        self.endpoint = f"tcp://{host}:{self._listener.port}"
        socket.bind(self.endpoint)
        self._polled = select.epoll()
        for own in self._own_sockets():
            self._polled.register(_descriptor(own), select.EPOLLIN)

    def fileno(self) -> int:
        return -1 if self._closed else self._polled.fileno()

    def _own_sockets(self) -> list[zmq.Socket[bytes]]:
        return [self._socket, self._asked, self._arrivals]

    def _attend(self) -> float | None:
        while has_message(self._arrivals):
            self._count(self._arrivals.recv_multipart(zmq.DONTWAIT))
        while has_message(self._asked):
            self._answer(self._asked.recv_multipart(zmq.DONTWAIT))
        look_again = self._gate.look(self._clock())
        self._listener.let_in(self._gate.is_open)
        return look_again

    def _count(self, event: list[bytes]) -> None:
        if int.from_bytes(event[0][:2], "little") == zmq.EVENT_ACCEPTED:
            self._gate.came(self._clock())
        else:
            self._gate.known()

    def _answer(self, question: list[bytes]) -> None:
        """Whether a client is let in (ZeroMQ's RFC 27): it has proved to have the secret of the key it names."""
        version, number, domain, _address, _identity, mechanism, *proof = question
        allowed = mechanism == b"CURVE" and domain == _DOMAIN and proof == [self._allowed]
        verdict = [b"200", b"OK"] if allowed else [b"400", b"no"]
        self._asked.send_multipart([version, number, *verdict, b"", b""], zmq.DONTWAIT)

    def _release(self) -> None:
        self._listener.let_in(False)
        while has_message(self._arrivals):  # ZeroMQ's thread must not wait for room here while we wait for it
            self._arrivals.recv_multipart(zmq.DONTWAIT)
        self._socket.disable_monitor()
        self._listener.close()
        self._polled.close()


class Server(ServerSide):
    """Hears all clients of a run. Belongs to one thread of the process that made it.

    Strangers are attended to inside `receive` and `wait`: without a call for seconds, nobody new comes in.
    """

    def __init__(
        self,
        keys: Keys,
        address: str,
        *,
        port: int = 0,
        limit: int,
        answers: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """As `ServerSide`. `answers` is of the bytes of one message that is sent, where that is more than `limit`."""
        super().__init__(keys, address, port=port, limit=limit, clock=clock)
        self._most_sent = max(limit, answers or 0)

    def receive(self) -> tuple[bytes, bytes] | None:
        """The next message: who sent it, as `send` takes it, and its bytes. None, if there is none; never waits."""
        self._mine()
        self._attend()
        message = self._take(parts=2)
        return None if message is None else (message[0], message[1])

    def send(self, peer: bytes, payload: bytes) -> None:
        """Send to whom `receive` named. Never waits: if that one is gone, or does not read, the message is dropped.

        Raises ShoalError if it is larger than the limit.
        """
        self._may_send(payload)
        try:
            self._socket.send_multipart([peer, payload], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, errno.EHOSTUNREACH):
                raise


class ClientSide(Endpoint):
    """Connects to a server, and finds it again when it was away. Those who build on this speak through `_socket`."""

    def __init__(self, endpoint: str, keys: Keys, *, limit: int, options: Mapping[int, int] | None = None) -> None:
        """Returns at once, whether the server is there or not. Raises ConfigError if `endpoint` is not an address."""
        check_keys(keys.server_public, keys.client_public, keys.client_secret)
        super().__init__(zmq.DEALER, limit, options)
        socket = self._socket
        socket.curve_serverkey = keys.server_public
        socket.curve_publickey = keys.client_public
        socket.curve_secretkey = keys.client_secret
        self._guest = guest_address(keys.server_public, keys.client_public)
        self._endpoint = ""
        try:
            self.reconnect(endpoint)
        except ConfigError:
            self.close()
            raise

    def reconnect(self, endpoint: str) -> None:
        """Leave the connection and make a new one, to the same endpoint or another. What was not sent is lost.

        Raises ConfigError, and stays where it was, if `endpoint` is not an address.
        """
        self._mine()
        if not endpoint.startswith("tcp://"):
            raise ConfigError(f"{endpoint!r} is not an endpoint; it must be like tcp://127.0.0.1:4096")
        host = endpoint.removeprefix("tcp://")
        target = f"tcp://{self._guest}:0;{host}" if is_loopback(host) else endpoint
        if self._endpoint == target:
            self._socket.disconnect(self._endpoint)
            self._endpoint = ""
        try:
            self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
            self._socket.connect(target)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"{endpoint!r} cannot be connected to ({error}); it must be like tcp://127.0.0.1:4096"
            ) from None
        if self._endpoint:
            self._socket.disconnect(self._endpoint)
        self._endpoint = target

    def fileno(self) -> int:
        return -1 if self._closed else _descriptor(self._socket)


class Client(ClientSide):
    """Speaks with a server, and finds it again when it was away. Belongs to one thread of the process that made it."""

    def send(self, payload: bytes) -> bool:
        """Send, or keep until the server is there; never waits. False: too many wait already, and it is dropped.

        Raises ShoalError if it is larger than the limit.
        """
        self._may_send(payload)
        try:
            self._socket.send(payload, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def receive(self, timeout: float) -> bytes | None:
        """The next message; None, if none comes within `timeout` seconds."""
        self._mine()
        message = self._take(parts=1)
        if message is None and timeout > 0 and self.wait(timeout):
            message = self._take(parts=1)
        return None if message is None else message[0]
