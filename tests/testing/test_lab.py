"""Lab hosts have a name, an address and memory of their own, and links that can be slowed and cut."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.core.errors import ConfigError
from shoal.engines.namespaces import join
from shoal.engines.places import Place
from shoal.testing.lab import Lab, why_no_lab

needs_lab = pytest.mark.skipif(why_no_lab() is not None, reason=str(why_no_lab()))
SECONDS = 10.0
"""For what should take none."""


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(hosts=2) as made:
        yield made


def socket_in(place: Place, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """A socket of this process in the network of a host: made by a thread that goes there and ends."""
    made: list[socket.socket] = []

    def make() -> None:
        join(place.pid, ("net",))
        made.append(socket.socket(socket.AF_INET, kind))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    made[0].settimeout(SECONDS)
    return made[0]


def connection(a: Place, b: Place) -> tuple[socket.socket, socket.socket]:
    """A TCP connection that `a` has opened to `b`."""
    with socket_in(b) as listener:
        listener.bind((b.address, 0))
        listener.listen()
        here = socket_in(a)
        here.connect(listener.getsockname())
        there, _ = listener.accept()
    there.settimeout(SECONDS)
    return here, there


def datagrams(a: Place, b: Place) -> tuple[socket.socket, socket.socket]:
    """A UDP socket in `a` and one in `b`, each the other's peer."""
    pair = [socket_in(place, socket.SOCK_DGRAM) for place in (a, b)]
    for sock, place in zip(pair, (a, b), strict=True):
        sock.bind((place.address, 0))
    pair[0].connect(pair[1].getsockname())
    pair[1].connect(pair[0].getsockname())
    return pair[0], pair[1]


def arrives(sender: socket.socket, receiver: socket.socket, within: float) -> bool:
    receiver.settimeout(within)
    sender.send(b"x")
    try:
        return receiver.recv(10) == b"x"
    except TimeoutError:
        return False


def megabits_per_second(a: Place, b: Place, size: int) -> float:
    here, there = connection(a, b)
    with here, there:
        sending = threading.Thread(target=lambda: here.sendall(bytes(size)))
        sending.start()
        left, first = size, None
        while left:
            left -= len(there.recv(1 << 20))
            first = first or time.monotonic()
        assert first is not None
        seconds = time.monotonic() - first
        sending.join()
    return size * 8 / seconds / 1e6


def said_in(lab: Lab, host: str, script: str) -> str:
    process = lab.run(host, ["sh", "-c", script], stdout=subprocess.PIPE, text=True)
    return str(process.communicate(timeout=SECONDS)[0])


@needs_lab
def test_each_host_has_a_name_an_address_and_memory_of_its_own(lab: Lab, tmp_path: Path) -> None:
    assert [(host.name, host.address) for host in lab.hosts] == [("a", "10.77.0.2"), ("b", "10.77.0.3")]
    assert said_in(lab, "a", "hostname; touch /dev/shm/of-a; ls /dev/shm").split() == ["a", "of-a"]
    assert said_in(lab, "b", "hostname; ls /dev/shm; getent hosts a").split() == ["b", "10.77.0.2", "a"]
    assert not Path("/dev/shm/of-a").exists()
    # all other files are the machine's, and programs start where they are started
    lab.run(0, ["touch", "made-inside"], cwd=tmp_path).wait(SECONDS)
    assert (tmp_path / "made-inside").exists()
    assert said_in(lab, "a", "pwd").strip() == os.getcwd()


@needs_lab
def test_hosts_reach_each_other_and_nothing_else(lab: Lab) -> None:
    assert lab.check() == []
    with socket_in(lab.hosts[0]) as sock, pytest.raises(OSError, match="unreachable"):
        sock.connect(("192.0.2.1", 9))
    with socket_in(lab.hosts[1]) as sock:  # the loopback of a host is up
        sock.bind(("127.0.0.1", 0))
        sock.listen()


@needs_lab
def test_rates_hold_within_a_tenth_and_the_kernel_counts_what_was_sent(lab: Lab) -> None:
    a, b = lab.hosts
    lab.shape(rate="100mbit")
    before, size = lab.counters("a"), 3_000_000
    measured = [megabits_per_second(a, b, size) for _ in range(3)]
    assert 90 < statistics.median(measured) < 110, measured
    sent = (lab.counters(0) - before).sent
    assert size * 3 < sent < size * 3 * 1.02
    assert lab.counters(b).received >= sent - 2000  # acknowledgements of the end may be under way
    lab.shape("a", rate="none")
    assert 90 < megabits_per_second(a, b, size) < 110  # b's own link is as slow as before
    lab.shape("b", rate="none")
    assert megabits_per_second(a, b, 20_000_000) > 300


@needs_lab
def test_a_connection_survives_a_cut(lab: Lab) -> None:
    a, b = lab.hosts
    here, there = connection(a, b)
    with here, there:
        assert arrives(here, there, SECONDS)
        for other in (b, None):
            lab.cut("a", other)
            assert not arrives(here, there, 0.1)
            lab.heal("a", other)
            there.settimeout(SECONDS)
            assert there.recv(10) == b"x"
            assert arrives(there, here, SECONDS)


@needs_lab
def test_a_cut_can_be_one_way() -> None:
    with Lab(hosts=3) as lab:
        a, b, c = lab.hosts
        ab, ba = datagrams(a, b)
        ac, ca = datagrams(a, c)
        with ab, ba, ac, ca:
            lab.cut("a", "b", one_way=True)
            assert not arrives(ab, ba, 0.1)
            assert arrives(ba, ab, SECONDS) and arrives(ac, ca, SECONDS)
            assert lab.status().cuts == (("a", "b"),)
            lab.cut("a", one_way=True)
            assert not arrives(ac, ca, 0.1) and arrives(ca, ac, SECONDS)
            lab.heal("a", "c", one_way=True)
            assert lab.status().cuts == (("a", "b"),) and arrives(ac, ca, SECONDS)
            lab.heal()
            assert lab.status().cuts == () and arrives(ab, ba, SECONDS)


@needs_lab
def test_who_cannot_be_reached_is_named_with_address_and_from_where(lab: Lab) -> None:
    lab.cut(0)
    assert lab.check() == [
        "10.77.0.3 (host b) cannot be reached from host a",
        "10.77.0.2 (host a) cannot be reached from host b",
    ]
    assert lab.status().hosts[0].unplugged
    lab.heal(0)
    assert lab.check() == [] and not lab.status().hosts[0].unplugged


def round_trip(here: socket.socket, there: socket.socket) -> float:
    began = time.monotonic()
    assert arrives(here, there, SECONDS) and arrives(there, here, SECONDS)
    return time.monotonic() - began


@needs_lab
def test_packets_wait_in_both_directions_and_keep_the_rate(lab: Lab) -> None:
    here, there = datagrams(*lab.hosts)
    with here, there:
        assert min(round_trip(here, there) for _ in range(5)) < 0.005
        lab.shape(delay="10ms")
        assert 0.020 <= min(round_trip(here, there) for _ in range(5)) < 0.030
        lab.shape("b", delay=0.03)
        assert 0.040 <= min(round_trip(here, there) for _ in range(3)) < 0.055
        lab.shape(delay=0)
        assert min(round_trip(here, there) for _ in range(5)) < 0.005
    lab.shape(delay="2ms", rate="100mbit")
    assert 80 < megabits_per_second(lab.hosts[0], lab.hosts[1], 3_000_000) < 110


@needs_lab
def test_packets_get_lost(lab: Lab) -> None:
    lab.shape("b", loss="50%")
    here, there = datagrams(*lab.hosts)
    with here, there:
        there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        for _ in range(400):
            here.send(b"x")
        there.setblocking(False)
        received = 0
        try:
            while there.recv(10):
                received += 1
        except BlockingIOError:
            pass
    assert 130 < received < 270  # seven standard deviations


BUSY = """
import time
began, used = time.monotonic(), time.process_time()
while time.monotonic() < began + 0.5: pass
print((time.process_time() - used) / (time.monotonic() - began))
"""


@needs_lab
def test_a_host_gets_its_share_of_the_cpu() -> None:
    with Lab(hosts=1, cpu=0.2) as lab:
        process = lab.run(0, [sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
        assert 0.1 < float(process.communicate(timeout=SECONDS)[0]) < 0.3


@needs_lab
def test_hosts_that_are_not_there_are_refused(lab: Lab) -> None:
    for wrong in ("c", 2, "A"):
        with pytest.raises(ConfigError, match="it has a, b"):
            lab.cut(wrong)
    with pytest.raises(ConfigError, match="cannot be cut from itself"):
        lab.cut("a", "a")
    with pytest.raises(ConfigError, match="rate='slow' is not understood"):
        lab.shape(rate="slow")
    with pytest.raises(ConfigError, match="no command was given"):
        lab.run("a", [])
