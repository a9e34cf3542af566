"""Server and client of a run: messages, limits, and who may use them."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.core.errors import ConfigError, ShoalError
from shoal.wire.curve import Client, Keys, Server, read_client_keys

LIMIT = 10_000
SECONDS = 10.0
SHORT = 0.15
"""Long enough for what must not come to have come."""


@pytest.fixture
def keys() -> Keys:
    return Keys.make()


@pytest.fixture
def server(keys: Keys) -> Iterator[Server]:
    with Server(keys, "127.0.0.1", limit=LIMIT) as server:
        yield server


@pytest.fixture
def client(server: Server, keys: Keys) -> Iterator[Client]:
    with Client(server.endpoint, keys, limit=LIMIT) as client:
        yield client


def heard(server: Server, seconds: float = SECONDS) -> tuple[bytes, bytes]:
    assert server.wait(seconds) == [server.fileno()], "nothing came"
    message = server.receive()
    assert message is not None
    return message


def answered(server: Server, client: Client, payload: bytes = b"there") -> None:
    """Wait until the two speak with each other."""
    client.send(payload)
    peer, got = heard(server)
    assert got == payload
    server.send(peer, payload[::-1])
    assert client.receive(SECONDS) == payload[::-1]


def test_client_and_server_speak_and_keep_the_order(server: Server, client: Client) -> None:
    answered(server, client)
    for number in range(50):
        client.send(b"%d" % number)
    got = [heard(server)[1] for _ in range(50)]
    assert got == [b"%d" % number for number in range(50)]
    assert server.receive() is None and client.receive(0.0) is None


def test_the_server_tells_clients_apart(server: Server, keys: Keys) -> None:
    with Client(server.endpoint, keys, limit=LIMIT) as one, Client(server.endpoint, keys, limit=LIMIT) as two:
        one.send(b"one")
        two.send(b"two")
        for _ in range(2):
            peer, payload = heard(server)
            server.send(peer, b"for " + payload)
        assert (one.receive(SECONDS), two.receive(SECONDS)) == (b"for one", b"for two")


def test_a_message_may_be_as_large_as_the_limit_and_no_larger(server: Server, client: Client) -> None:
    answered(server, client, b"a" * LIMIT)
    with pytest.raises(ShoalError, match="at most 10000"):
        client.send(b"a" * (LIMIT + 1))
    with pytest.raises(ShoalError, match="at most 10000"):
        server.send(b"peer", b"a" * (LIMIT + 1))
    answered(server, client, b"")


def test_what_a_client_of_the_run_says_too_largely_does_not_arrive(server: Server, keys: Keys) -> None:
    with Client(server.endpoint, keys, limit=50 * LIMIT) as client:
        client.send(b"b" * (LIMIT + 30))  # within what the protocol lets through, with its own overhead
        client.send(b"a" * 20 * LIMIT)
        assert server.wait(SHORT) in ([], [server.fileno()])
        assert server.receive() is None
        answered(server, client)  # the connection was ended, and made anew


def test_a_message_to_somebody_unknown_or_gone_is_dropped(server: Server, client: Client, keys: Keys) -> None:
    server.send(b"nobody", b"x")
    with Client(server.endpoint, keys, limit=LIMIT) as leaving:
        leaving.send(b"x")
        peer, _ = heard(server)
    for _ in range(3000):
        server.send(peer, b"y" * 1000)
    answered(server, client)


def test_sending_never_waits_for_one_who_does_not_read(server: Server, client: Client) -> None:
    client.send(b"x")
    peer, _ = heard(server)
    began = time.monotonic()
    for _ in range(5000):
        server.send(peer, b"y" * LIMIT)
    assert time.monotonic() - began < SECONDS


def test_a_client_without_a_server_keeps_what_fits_and_drops_the_rest(keys: Keys) -> None:
    with Server(keys, "127.0.0.1", limit=LIMIT) as server:
        endpoint, port = server.endpoint, int(server.endpoint.rpartition(":")[2])
    with Client(endpoint, keys, limit=LIMIT) as client:
        taken = sum(client.send(b"x") for _ in range(5000))
        assert 0 < taken < 5000
        with Server(keys, "127.0.0.1", port=port, limit=LIMIT) as server:
            assert heard(server)[1] == b"x"


def test_a_client_finds_a_server_that_was_away(keys: Keys) -> None:
    with Server(keys, "127.0.0.1", limit=LIMIT) as first:
        port = int(first.endpoint.rpartition(":")[2])
        client = Client(first.endpoint, keys, limit=LIMIT)
        answered(first, client)
    with client, Server(keys, "127.0.0.1", port=port, limit=LIMIT) as second:
        began = time.monotonic()
        answered(second, client)
        assert time.monotonic() - began < 2.0


def test_a_client_follows_to_another_endpoint(server: Server, client: Client, keys: Keys) -> None:
    answered(server, client)
    with Server(keys, "127.0.0.1", limit=LIMIT) as other:
        client.reconnect(other.endpoint)
        answered(other, client)
        with pytest.raises(ConfigError, match="endpoint"):
            client.reconnect("ipc:///tmp/x")
        with pytest.raises(ConfigError, match="nonsense"):
            client.reconnect("tcp://nonsense")
        answered(other, client)
        client.reconnect(other.endpoint)
        answered(other, client)


def test_another_address_of_this_machine_and_version_of_the_protocol(keys: Keys) -> None:
    if not Path("/proc/net/if_inet6").exists() or "lo" not in Path("/proc/net/if_inet6").read_text():
        pytest.skip("no IPv6 here")
    with Server(keys, "::1", limit=LIMIT) as server, Client(server.endpoint, keys, limit=LIMIT) as client:
        assert server.endpoint.startswith("tcp://[::1]:")
        answered(server, client)


def test_waiting_also_for_other_descriptors(server: Server, client: Client) -> None:
    answered(server, client)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert server.wait(0.0, ours.fileno()) == [] == client.wait(0.0, ours.fileno())
        theirs.send(b"x")
        assert server.wait(SECONDS, ours.fileno()) == [ours.fileno()] == client.wait(SECONDS, ours.fileno())
        client.send(b"x")
        assert server.wait(SECONDS) == [server.fileno()]
        assert server.wait(SECONDS, ours.fileno()) == [server.fileno(), ours.fileno()]
        ours.recv(1)
        theirs.close()
        assert client.wait(SECONDS, ours.fileno()) == [ours.fileno()]  # hung up


def test_waiting_ends_in_time(server: Server, client: Client) -> None:
    answered(server, client)
    for one in (server, client):
        began = time.monotonic()
        assert one.wait(0.1) == []
        assert 0.1 <= time.monotonic() - began < 2.0


def test_the_descriptor_alone_is_enough_to_serve(server: Server, keys: Keys) -> None:
    """As a loop of somebody else polls: newcomers are let in, and every message is heard."""
    got: list[bytes] = []

    def speak() -> None:
        with Client(server.endpoint, keys, limit=LIMIT) as client:
            for _ in range(100):
                client.send(b"x")
                if client.receive(SECONDS) is None:
                    return
                got.append(b"x")

    thread = threading.Thread(target=speak)
    thread.start()
    poller = select.poll()
    poller.register(server.fileno(), select.POLLIN)
    deadline = time.monotonic() + SECONDS
    while thread.is_alive() and time.monotonic() < deadline:
        while (message := server.receive()) is not None:
            server.send(*message)
        poller.poll(SECONDS * 1000 if not got else 100)
    thread.join()
    assert len(got) == 100


def test_it_is_refused_in_a_forked_process_and_after_closing(keys: Keys) -> None:
    with Server(keys, "127.0.0.1", limit=LIMIT) as server, Client(server.endpoint, keys, limit=LIMIT) as client:
        child = os.fork()
        if child == 0:
            refused = 0
            for use in (server.receive, lambda: server.wait(0.0), lambda: client.send(b"x"), lambda: client.receive(0)):
                try:
                    use()
                except ShoalError as error:
                    refused += "forked" in str(error)
            server.close()
            client.close()
            os._exit(refused)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 4
        answered(server, client)  # the child's closing was nothing to us
    with pytest.raises(ShoalError, match="closed"):
        server.receive()
    with pytest.raises(ShoalError, match="closed"):
        client.send(b"x")
    assert server.fileno() == client.fileno() == -1
    server.close()


def test_wrong_arguments_are_named(keys: Keys, server: Server) -> None:
    port = int(server.endpoint.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"{port}.*free"):
        Server(keys, "127.0.0.1", port=port, limit=LIMIT)
    with pytest.raises(ConfigError, match="of this machine"):
        Server(keys, "192.0.2.1", limit=LIMIT)
    with pytest.raises(ConfigError, match="limit=0"):
        Client("tcp://127.0.0.1:1", keys, limit=0)
    with pytest.raises(ConfigError, match="limit=0"):
        Server(keys, "127.0.0.1", limit=0)
    with pytest.raises(ConfigError, match="Z85"):
        Server(Keys(keys.server_public, b"", keys.client_public, keys.client_secret), "127.0.0.1", limit=LIMIT)


def test_a_client_with_the_file_takes_part(server: Server, keys: Keys, tmp_path: Path) -> None:
    keys.write(tmp_path)
    with Client(server.endpoint, read_client_keys(tmp_path), limit=LIMIT) as client:
        answered(server, client)
