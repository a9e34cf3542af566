"""The process that is a lab host: it holds the host's namespaces open, and the host's late packets back."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.core.errors import LabUnavailable
from shoal.engines.lifeline import die_with_parent
from shoal.engines.namespaces import MOUNT, NET, UTS, bind, keep_mounts_here, mount_tmpfs, unshare
from shoal.testing.lab.nfqueue import DelayQueue
from shoal.testing.lab.shape import QUEUE

_DELAY = struct.Struct("=d")
_ANSWER_SECONDS = 10.0
_OK = b"ok"


@dataclass
class HostProcess:
    """A host's process, seen from the keeper."""

    pid: int
    control: socket.socket

    def set_delay(self, seconds: float) -> None:
        """Packets in the host's queue wait that long from now on. Raises LabUnavailable."""
        self.control.send(_DELAY.pack(seconds))
        self.hear()

    def hear(self) -> None:
        try:
            answer = self.control.recv(4096)
        except OSError as error:
            raise LabUnavailable(f"a lab host does not answer ({error}); take the lab down and up again") from error
        if answer != _OK:
            raise LabUnavailable(answer.decode(errors="replace") or "a lab host ended; take the lab down and up again")

    def end(self) -> None:
        self.control.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def start_host(name: str, names: dict[str, str]) -> HostProcess:
    """Fork a host with no link yet. `names` are the addresses of all hosts by name. Call it from the main thread."""
    keeper = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            die_with_parent(keeper)
            signal.set_wakeup_fd(-1)
            _close_all_but(theirs.fileno())
            _be_host(name, names, theirs)
            code = 0
        finally:
            os._exit(code)
    theirs.close()
    ours.settimeout(_ANSWER_SECONDS)
    host = HostProcess(pid, ours)
    try:
        host.hear()
    except LabUnavailable:
        host.end()
        raise
    return host


def _close_all_but(kept: int) -> None:
    """What the keeper has open would otherwise outlive it for a moment: the lock that says that it lives, above all."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor != kept:
            with suppress(OSError):  # that of the listing itself
                os.close(descriptor)


def _be_host(name: str, names: dict[str, str], control: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        _settle(name, names)
    except OSError as error:
        control.send(f"the lab host {name} cannot be made: {error}".encode())
        return
    control.send(_OK)
    _hold_back(control)


def _settle(name: str, names: dict[str, str]) -> None:
    unshare(NET | UTS | MOUNT)
    socket.sethostname(name)
    keep_mounts_here()
    mount_tmpfs("/dev/shm")
    # A bound file is reached by its mount, so its name may go, and /dev/shm is empty for who comes.
    hosts = Path("/dev/shm/hosts")
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {other}\n" for other, address in names.items()))
    hosts.chmod(0o644)
    if Path("/etc/hosts").exists():
        bind(str(hosts), "/etc/hosts")
    hosts.unlink()
    for default in Path("/proc/sys/net/ipv6/conf").glob("default"):
        # the link's own chatter (neighbours, routers, listeners) would be in its counters
        (default / "disable_ipv6").write_text("1")


def _hold_back(control: socket.socket) -> None:
    """Serve the host's queue until the keeper closes its end."""
    queue: DelayQueue | None = None
    while True:
        watched: list[socket.socket | DelayQueue] = [control] if queue is None else [control, queue]
        ready, _, _ = select.select(watched, [], [], None if queue is None else queue.seconds_to_next())
        if queue is not None:
            queue.serve()
        if control not in ready:
            continue
        message = control.recv(_DELAY.size)
        if len(message) < _DELAY.size:
            return
        try:
            queue = queue or DelayQueue(QUEUE)
        except LabUnavailable as error:
            control.send(str(error).encode())
            continue
        (queue.delay,) = _DELAY.unpack(message)
        control.send(_OK)
