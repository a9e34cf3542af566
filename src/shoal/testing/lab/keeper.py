"""The process that keeps a lab: it makes the hosts, does what it is asked over a socket, and cleans up at the end.

The lab ends with the process that owns it, when that ends in whatever way; a lab without an owner ends by SIGTERM.
Its argument is the plan; its first line of output says whether the lab is up.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import stat
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from shoal.core.errors import ConfigError, ShoalError
from shoal.engines.places import LABS, LabState, labs_left, state_file
from shoal.testing.lab.messages import (
    Answer,
    Cut,
    Heal,
    Look,
    Plan,
    Probe,
    Reached,
    Request,
    Reshape,
    Up,
    decode_request,
    encode,
    refusal,
)
from shoal.testing.lab.network import Network
from shoal.testing.lab.quota import remove_groups
from shoal.wire.link import FrameError, Link, LinkClosed

_REQUEST_SECONDS = 5.0
_MOST_CALLERS = 16


def control_file(name: str) -> Path:
    """The socket at which the keeper of the lab `name` is asked."""
    return state_file(name).with_suffix(".sock")


def sweep() -> None:
    """Remove what killed keepers left: state files, sockets, control groups and the processes in them."""
    for path in labs_left():
        with suppress(OSError):
            remove_groups(path.stem)
            path.with_suffix(".sock").unlink(missing_ok=True)
            path.unlink(missing_ok=True)


class _Keeper:
    """One lab, from its beginning to its end. For the main thread."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._network = Network(plan.name)
        self._woken, self._waker = socket.socketpair()
        self._listener: socket.socket | None = None
        self._state: int | None = None  # the descriptor that has the state file locked

    def keep(self, started: int) -> None:
        """Bring the lab up, say so on the descriptor `started`, and keep it until it is to end."""
        self._heed_signals()
        owner = _watch(self._plan.owner)
        try:
            self._bring_up()
            _say(started, Up())
            self._serve(owner)
        except (ShoalError, OSError) as error:
            _say(started, refusal(error))
        finally:
            self._take_down()

    def _heed_signals(self) -> None:
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, _only_wake)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    def _bring_up(self) -> None:
        LABS.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = LABS.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != 0 or found.st_mode & 0o077:
            raise ConfigError(f"{LABS} must be a folder that only root can enter (mode 0700); remove it")
        sweep()
        self._claim()
        self._network.make(self._plan.hosts)
        for place in self._network.places:
            self._network.set_shape(place.name, self._plan.shape)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(control_file(self._plan.name)))
        self._listener.listen(_MOST_CALLERS)
        assert self._state is not None
        os.pwrite(self._state, msgspec.json.encode(LabState(self._plan.name, os.getpid(), self._network.places)), 0)

    def _claim(self) -> None:
        """Take the name: the state file appears locked, and is empty until the lab is up."""
        path = state_file(self._plan.name)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        self._state = os.open(beside, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._state, fcntl.LOCK_EX)
            os.link(beside, path)
        except FileExistsError:
            os.close(self._state)
            self._state = None
            raise ConfigError(
                f"the lab {path.stem} is up already; take another name, or `shoal lab down {path.stem}`"
            ) from None
        finally:
            beside.unlink()

    def _serve(self, owner: int | None) -> None:
        assert self._listener is not None
        watched: list[int | socket.socket] = [self._woken, self._listener, *([] if owner is None else [owner])]
        while True:
            ready, _, _ = select.select(watched, [], [])
            if ready != [self._listener]:
                return
            caller, _ = self._listener.accept()
            # a caller that leaves, or says what cannot be understood, harms only itself
            with caller, suppress(LinkClosed, FrameError, ValueError, RecursionError):  # all that decoding raises
                link = Link(caller, limit=0)
                if link.poll(_REQUEST_SECONDS) and (frame := link.try_recv()) is not None:
                    link.send(encode(self._answer(decode_request(frame[0]))))

    def _answer(self, request: Request) -> Answer:
        try:
            if isinstance(request, Probe):
                return Reached(tuple(self._network.silent()))
            self._obey(request)
        except (ShoalError, OSError) as error:
            return refusal(error)
        return self._network.status()

    def _obey(self, request: Reshape | Cut | Heal | Look) -> None:
        if isinstance(request, Reshape):
            before = self._network.shape_of(request.host)
            self._network.set_shape(request.host, request.change.of(before))
        elif isinstance(request, Cut):
            self._network.cut(request)
        elif isinstance(request, Heal):
            self._network.heal(request)

    def _take_down(self) -> None:
        if self._state is None:  # the name is another's, and so is what is called by it
            return
        self._network.close()
        control_file(self._plan.name).unlink(missing_ok=True)
        state_file(self._plan.name).unlink(missing_ok=True)


def _watch(owner: int | None) -> int | None:
    """A descriptor that becomes readable when the process `owner`, this one's parent, ends."""
    if owner is None:
        return None
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(owner)
        if os.getppid() == owner:
            return handle
    sys.exit(1)  # it has ended; what has its number now, if anything, is another process


def _say(descriptor: int, answer: Answer) -> None:
    with suppress(OSError):  # nobody listens any more
        os.write(descriptor, encode(answer) + b"\n")


def _only_wake(number: int, frame: object) -> None:
    """A handler must exist for the wakeup descriptor to be written; the loop ends by that."""


def main() -> None:
    """Keep the lab of the plan in the first argument."""
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    if plan.owner is None and os.fork():
        os._exit(0)  # so that the lab is nobody's child, and nobody has to wait for it
    started = os.dup(1)
    os.set_inheritable(started, False)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    os.chdir("/")
    _Keeper(plan).keep(started)
