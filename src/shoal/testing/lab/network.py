"""The hosts of a lab and the switch between them, held by the process that made them.

The switch is a bridge in a network namespace of that process. Nothing of the machine's own network is touched, and when
the process ends, however that happens, the kernel ends its hosts and removes namespaces, links, rules and mounts.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.core.errors import ConfigError
from shoal.engines.namespaces import NET, unshare
from shoal.engines.places import Place
from shoal.testing.lab.commands import run_tool
from shoal.testing.lab.host import HostProcess, start_host
from shoal.testing.lab.messages import Cut, Heal, HostStatus, Status
from shoal.testing.lab.probe import silent_pairs
from shoal.testing.lab.quota import make_group, remove_groups, set_quota
from shoal.testing.lab.shape import Shape, firewall, rate_commands

MOST_HOSTS = 26
_NETWORK = "10.77.0"
_FIRST = 2
_PROBE_SECONDS = 1.0
_GONE_WITHIN = 5.0


def host_names(count: int) -> list[str]:
    """a, b, c and so on. Raises ConfigError."""
    if not 1 <= count <= MOST_HOSTS:
        raise ConfigError(f"hosts={count}: a lab has 1 to {MOST_HOSTS} hosts")
    return [chr(ord("a") + index) for index in range(count)]


@dataclass
class _Host:
    place: Place
    process: HostProcess
    shape: Shape
    unplugged: bool = False
    rules: str = firewall(Shape(), ())


class Network:
    """The hosts, the switch, and what is cut. For the main thread of a process that does nothing else."""

    def __init__(self, lab: str) -> None:
        self._lab = lab
        self._hosts: dict[str, _Host] = {}
        self._cuts: set[tuple[str, str]] = set()  # what the first sends to the second is dropped

    def make(self, count: int) -> None:
        """Make and connect the hosts. Raises ConfigError, LabUnavailable or OSError; `close` removes what is there."""
        unshare(NET)
        _silence_ipv6()
        addresses = {name: f"{_NETWORK}.{_FIRST + index}" for index, name in enumerate(host_names(count))}
        for name, address in addresses.items():
            process = start_host(name, addresses)
            group = make_group(self._lab, name)
            place = Place(name, address, process.pid, None if group is None else str(group))
            self._hosts[name] = _Host(place, process, Shape())
        self._connect()

    def _connect(self) -> None:
        lines = ["link add switch type bridge mcast_snooping 0", "link set switch up"]
        for name, host in self._hosts.items():
            lines += [
                f"link add port-{name} type veth peer name eth0 address {_mac(host.place)} netns {host.place.pid}",
                f"link set port-{name} master switch",
                f"link set port-{name} up",
            ]
        run_tool("ip", lines)
        for host in self._hosts.values():
            # Neighbours are known: searching for them takes seconds after a cut, and would be in the counters.
            others = [other.place for other in self._hosts.values() if other is not host]
            own = [
                "link set lo up",
                f"addr add {host.place.address}/24 dev eth0",
                "link set eth0 up",
                *(f"neigh replace {place.address} lladdr {_mac(place)} dev eth0 nud permanent" for place in others),
            ]
            run_tool("ip", own, inside=host.place.pid)

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(host.place for host in self._hosts.values())

    def status(self) -> Status:
        hosts = tuple(HostStatus(host.place, host.shape, host.unplugged) for host in self._hosts.values())
        return Status(hosts, tuple(sorted(self._cuts)))

    def shape_of(self, name: str) -> Shape:
        return self._host(name).shape

    def set_shape(self, name: str, shape: Shape) -> None:
        """Raises ConfigError for a host that is not there, LabUnavailable for what this machine cannot do."""
        host = self._host(name)
        if shape.rate != host.shape.rate:
            run_tool("tc", rate_commands("eth0", shape.rate), inside=host.place.pid)
            run_tool("tc", rate_commands(f"port-{name}", shape.rate))
        if shape.delay:
            host.process.set_delay(shape.delay)  # before there is a rule: it has to be awaited by somebody
        if shape.cpu != host.shape.cpu:
            set_quota(None if host.place.cgroup is None else Path(host.place.cgroup), shape.cpu)
        host.shape = shape
        self._filter(host)

    def cut(self, cut: Cut) -> None:
        if cut.b is None and not cut.one_way:
            self._plug(self._host(cut.a), False)
            return
        self._cuts |= set(self._pairs(cut))
        self._filter_all()

    def heal(self, heal: Heal) -> None:
        self._cuts -= self._cuts.copy() if heal.a is None else set(self._pairs(Cut(heal.a, heal.b, heal.one_way)))
        self._filter_all()
        for name, host in self._hosts.items():
            if host.unplugged and (heal.a is None or (name == heal.a and heal.b is None and not heal.one_way)):
                self._plug(host, True)

    def silent(self) -> list[tuple[str, str]]:
        """The pairs of hosts (from, to) between which no echo comes back."""
        slowest = max(host.shape.delay for host in self._hosts.values())
        return silent_pairs(self.places, _PROBE_SECONDS + 4 * slowest)

    def close(self) -> None:
        """End whatever runs in the hosts, and remove them."""
        for host in self._hosts.values():
            _kill_all_in(host.place.pid)
            host.process.end()
        self._hosts.clear()
        remove_groups(self._lab)

    def _host(self, name: str) -> _Host:
        if name not in self._hosts:
            raise ConfigError(f"the lab {self._lab} has no host {name!r}; it has {', '.join(self._hosts)}")
        return self._hosts[name]

    def _pairs(self, cut: Cut) -> Iterator[tuple[str, str]]:
        self._host(cut.a)
        if cut.b is not None and self._host(cut.b).place.name == cut.a:
            raise ConfigError(f"{cut.a} cannot be cut from itself; name two hosts, or one to cut it from all others")
        for other in [cut.b] if cut.b is not None else [name for name in self._hosts if name != cut.a]:
            yield cut.a, other
            if not cut.one_way:
                yield other, cut.a

    def _plug(self, host: _Host, connected: bool) -> None:
        run_tool("ip", [f"link set port-{host.place.name} {'up' if connected else 'down'}"])
        host.unplugged = not connected

    def _filter_all(self) -> None:
        for host in self._hosts.values():
            self._filter(host)

    def _filter(self, host: _Host) -> None:
        cut_from = [self._hosts[a].place.address for a, b in self._cuts if b == host.place.name]
        rules = firewall(host.shape, cut_from)
        if rules != host.rules:
            run_tool("iptables-restore", rules.splitlines(), inside=host.place.pid)
            host.rules = rules


def _mac(place: Place) -> str:
    """The hardware address of a host, made from its own: 02 says that it is nobody's product."""
    return ":".join(["02", "00", *(f"{int(part):02x}" for part in place.address.split("."))])


def _silence_ipv6() -> None:
    with suppress(FileNotFoundError):
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")


def _kill_all_in(host: int) -> None:
    """SIGKILL the processes in the network namespace of `host`, but that one, until there are none."""
    deadline = time.monotonic() + _GONE_WITHIN
    while (found := _processes_in(host)) and time.monotonic() < deadline:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def _processes_in(host: int) -> list[int]:
    network = _network_of(host)
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [pid for pid in pids if pid != host and network is not None and _network_of(pid) == network]


def _network_of(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None
