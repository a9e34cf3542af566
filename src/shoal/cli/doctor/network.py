"""Checks of what workers meet through: this machine's name, the loopback interface, and what a launcher has said."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable, Mapping

from shoal.cli.doctor.checks import Call, Finding, fail, ok, warn
from shoal.core.errors import ConfigError
from shoal.engines.world import World

LOOK_UP_SECONDS = 2.0
_SLOW_SECONDS = 0.5
_LOOPBACK = "127.0.0.1"

LAUNCHER_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
)
"""Variables by which launchers tell a process its place."""

_DECIDING = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID")
"""Those of them that make Shoal wait for other workers."""


def check_hostname(
    name: str,
    *,
    resolve: Callable[[str], list[str]],
    owns: Callable[[str], bool],
    seconds: float = LOOK_UP_SECONDS,
) -> Finding:
    """Whether `name`, that of this machine, leads to this machine.

    `resolve` gives the addresses of a name or raises OSError; `owns` says whether an address is this machine's. Workers
    that Shoal starts itself meet on the loopback interface, so this is a warning.
    """
    line = f"{_LOOPBACK} {name}"
    needed = "Workers started by torchrun or Slurm meet by this name, and gloo hangs without it"
    fix = f"Put this line into /etc/hosts as root:  {line}"
    call = Call(lambda: resolve(name), "hostname")
    try:
        addresses = call.result(seconds)
    except TimeoutError:
        return warn(f"looking up {name!r} took more than {seconds:g} s. {needed}", fix, hosts_line=line)
    except OSError as error:
        return warn(f"{name!r} does not resolve ({error.strerror or error}). {needed}", fix, hosts_line=line)
    details = {"addresses": addresses, "seconds": round(call.seconds, 3)}
    strange = [address for address in addresses if not owns(address)]
    if strange:
        return warn(
            f"{name!r} resolves to {', '.join(strange)}, which is not an address of this machine. {needed}",
            f"In /etc/hosts, as root, correct or remove the line that gives {name} another address, and put:  {line}",
            hosts_line=line,
            **details,
        )
    if call.seconds > _SLOW_SECONDS:
        return warn(
            f"looking up {name!r} took {call.seconds:.1f} s",
            f"A name server is slow. {fix}",
            hosts_line=line,
            **details,
        )
    shown = f"{name!r} is {', '.join(addresses)}"
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        shown += " (for one machine; several need an address that others reach)"
    return ok(shown, **details)


def resolve_name(name: str) -> list[str]:
    """The addresses of `name`, without repetition. Raises OSError if there are none; may take as long as it likes."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def is_own_address(address: str) -> bool:
    """Whether this machine has `address`: the kernel lets a socket have only its own."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(socket.getaddrinfo(address, 0, family, socket.SOCK_STREAM)[0][4])
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.ENETUNREACH)
    return True


def check_loopback(address: str = _LOOPBACK, *, seconds: float = 1.0) -> Finding:
    """Whether two sockets of this machine can talk at `address`."""
    try:
        with (
            socket.create_server((address, 0)) as server,
            socket.create_connection(server.getsockname()[:2], timeout=seconds) as ours,
        ):
            server.settimeout(seconds)
            theirs, _ = server.accept()
            with theirs:
                theirs.settimeout(seconds)
                ours.sendall(b"ping")
                arrived = theirs.recv(4)
    except OSError as error:
        return fail(
            f"no connection at {address} ({error.strerror or error})",
            "Workers talk over the loopback interface. Bring it up (ip link set lo up), and let the firewall or "
            "sandbox allow connections from this machine to itself.",
        )
    if arrived != b"ping":
        return fail(f"a connection at {address} lost what was sent", "Look for a proxy or firewall on the interface.")
    return ok(f"{address} can be bound and reached")


def check_launcher(*, env: Mapping[str, str]) -> Finding:
    """Variables of a launcher: wanted under one, and a trap when they are left over."""
    given = [name for name in LAUNCHER_NAMES if env.get(name, "").strip()]
    if not given:
        return ok("no variables of torchrun, Slurm or MPI are set")
    unset = f"unset {' '.join(given)}"
    shown = ", ".join(f"{name}={env[name].strip()[:20]}" for name in given if name in _DECIDING)
    try:
        world = World.detect(env)
    except ConfigError as error:
        return fail(
            f"{shown}: Shoal will refuse to train. {error}",
            f"If you have not started this under a launcher, they are left over: {unset}",
            variables=given,
        )
    if world is None:
        return ok(f"{', '.join(given)} set; they do not make Shoal wait for others", variables=given)
    return warn(
        f"{shown}: Shoal will take itself for worker {world.rank} of {world.size} and wait for the others "
        f"({world.launcher})",
        f"If you have not started this under a launcher, they are left over: {unset}",
        variables=given,
    )
