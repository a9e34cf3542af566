"""The gate for strangers: how many come in, and from where."""

from __future__ import annotations

import socket

import pytest

from shoal.wire.gate import Gate, Listener, guest_address

SECONDS = 10.0
SHORT = 0.15
"""Long enough for a connection to come to stand."""


def test_the_gate_lets_so_many_strangers_in_then_some_in_each_second() -> None:
    gate = Gate(0.0, burst=10, rate=4.0)
    for _ in range(9):
        gate.came(0.0)
    assert gate.is_open and gate.look(0.0) is None
    gate.came(0.0)
    assert not gate.is_open
    pause = gate.look(0.0)
    assert pause is not None and 1.9 < pause < 2.1
    assert gate.look(1.9) is not None
    assert gate.look(0.1 + pause) is None and gate.is_open
    gate.look(1000.0)
    for _ in range(10):
        gate.came(1000.0)
    assert not gate.is_open, "time without strangers must not add up beyond the burst"


def test_those_of_the_run_do_not_count() -> None:
    gate = Gate(0.0, burst=10, rate=1.0)
    for _ in range(1000):
        gate.came(0.0)
        gate.known()
    assert gate.is_open


def test_the_gate_never_stays_shut_for_long() -> None:
    gate = Gate(0.0)
    for _ in range(100_000):
        gate.came(0.0)
    pause = gate.look(0.0)
    assert pause is not None and pause < 6.0
    assert gate.look(pause) is None and gate.is_open


def test_a_listener_keeps_strangers_out_and_what_stands() -> None:
    guest = guest_address(b"a", b"b")
    listener = Listener("127.0.0.1", 0, guests=guest)
    taken = socket.socket(fileno=listener.descriptor())

    def comes(source: str) -> bool:
        with socket.socket() as one:
            one.bind((source, 0))
            one.settimeout(SHORT)
            try:
                one.connect(("127.0.0.1", listener.port))
            except TimeoutError:
                return False
            return True

    try:
        assert comes(guest) and not comes("127.0.0.1")
        listener.let_in(False)
        assert not comes(guest) and not comes("127.0.0.1")
        listener.let_in(True)
        assert comes(guest) and not comes("127.0.0.1")
    finally:
        taken.close()
        listener.close()


def test_elsewhere_everybody_may_try() -> None:
    listener = Listener("127.0.0.1", 0)
    try:
        socket.create_connection(("127.0.0.1", listener.port), SECONDS).close()
        listener.let_in(False)
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", listener.port), SHORT)
        listener.let_in(True)
        socket.create_connection(("127.0.0.1", listener.port), SECONDS).close()
    finally:
        listener.close()


def test_guests_of_two_runs_come_from_different_addresses() -> None:
    assert guest_address(b"a", b"b") == guest_address(b"a", b"b") != guest_address(b"a", b"c")
