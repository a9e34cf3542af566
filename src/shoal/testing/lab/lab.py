"""The lab, as a program or a person handles it."""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

import shoal
from shoal.core.errors import ConfigError, LabUnavailable
from shoal.engines.places import Place, check_lab_name, find_lab
from shoal.testing.lab.counters import Counters, read_counters
from shoal.testing.lab.keeper import control_file
from shoal.testing.lab.messages import (
    Cut,
    Heal,
    Look,
    Plan,
    Probe,
    Reached,
    Refused,
    Request,
    Reshape,
    Status,
    Up,
    decode_answer,
    encode,
)
from shoal.testing.lab.needs import find, require_lab
from shoal.testing.lab.network import host_names
from shoal.testing.lab.shape import Change, Shape
from shoal.wire.link import Link, LinkClosed

Where = int | str | Place
"""A host: by its index, its name, or itself."""

_UP_WITHIN = 30.0
_ANSWER_WITHIN = 60.0
_DOWN_WITHIN = 15.0
_KEEPER = "from shoal.testing.lab.keeper import main; main()"
_INTO_GROUP = 'echo $$ > "$1" && shift && exec "$@"'


class Lab:
    """Hosts on this machine that meet over a network of their own. Up when it is made, gone when it is closed.

        with Lab(hosts=2, rate="1gbit", cpu=0.5, delay=0.005, loss=0.01) as lab:
            lab.run("a", ["python", "serve.py"])

    `rate` (bits per second, or "100mbit") bounds each host's link in each direction; `cpu` the cores' worth of time of
    all that runs in one host; every packet waits `delay` seconds (or "5ms") on its way to a host, and is lost with
    the probability `loss` (or "1%").

    A lab ends with the process that made it, also if that is killed; what runs in the hosts is killed then. For one
    thread at a time. A forked child that closes its copy closes nothing. Raises LabUnavailable where this machine
    cannot hold a lab (see `why_no_lab`), and ConfigError for a wrong argument.
    """

    name: str
    hosts: list[Place]

    def __init__(
        self,
        hosts: int = 2,
        *,
        rate: str | float | None = None,
        cpu: str | float | None = None,
        delay: str | float = 0.0,
        loss: str | float = 0.0,
        name: str | None = None,
    ) -> None:
        shape = Change(rate, delay, loss, cpu).of(Shape())
        self.name = check_lab_name(name if name is not None else f"lab-{secrets.token_hex(4)}")
        self._owner = os.getpid()
        self._keeper: subprocess.Popen[bytes] | None = _start(Plan(self.name, hosts, shape, self._owner))
        try:
            self.hosts = list(find_lab(self.name).hosts)
        except BaseException:
            self.close()
            raise

    @classmethod
    def attach(cls, name: str) -> Self:
        """The lab `name` that another process has brought up; closing this leaves it up. Raises ConfigError."""
        lab = cls.__new__(cls)
        lab.name = name
        lab.hosts = list(find_lab(name).hosts)
        lab._owner, lab._keeper = os.getpid(), None
        return lab

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the lab down, and kill what runs in its hosts. Calling it again does nothing."""
        if self._keeper is None or os.getpid() != self._owner:
            return
        keeper, self._keeper = self._keeper, None
        keeper.terminate()
        try:
            keeper.wait(_DOWN_WITHIN)
        except subprocess.TimeoutExpired:
            keeper.kill()
            keeper.wait()

    def place(self, host: Where) -> Place:
        """The host that `host` means. Raises ConfigError."""
        if isinstance(host, Place):
            return host
        for index, place in enumerate(self.hosts):
            if host in (index, place.name):
                return place
        names = ", ".join(place.name for place in self.hosts)
        raise ConfigError(f"the lab {self.name} has no host {host!r}; it has {names}")

    def run(self, host: Where, argv: Sequence[str], **popen: Any) -> subprocess.Popen[Any]:
        """Start a program in a host; further arguments are those of `subprocess.Popen`. The caller waits for it."""
        return subprocess.Popen(command_in(self.place(host), argv, popen.get("cwd")), **popen)

    def shape(
        self,
        host: Where | None = None,
        *,
        rate: str | float | None = None,
        delay: str | float | None = None,
        loss: str | float | None = None,
        cpu: str | float | None = None,
    ) -> None:
        """Change what a host is like (None: every host) in what is given; "none" takes a limit of rate or cpu away."""
        change = Change(rate, delay, loss, cpu)
        change.of(Shape())  # what is wrong is refused before the first host is changed
        for place in self.hosts if host is None else [self.place(host)]:
            self._ask(Reshape(place.name, change))

    def cut(self, a: Where, b: Where | None = None, *, one_way: bool = False) -> None:
        """Let nothing through between `a` and `b`; without `b` pull out the cable of `a`.

        With `one_way` only what `a` sends is cut: `a` still hears the others. Connections are not told; they go on
        after `heal`, unless somebody gave up meanwhile.
        """
        self._ask(Cut(self.place(a).name, None if b is None else self.place(b).name, one_way))

    def heal(self, a: Where | None = None, b: Where | None = None, *, one_way: bool = False) -> None:
        """Undo what `cut` with the same arguments does; without arguments every cut."""
        names = [None if host is None else self.place(host).name for host in (a, b)]
        self._ask(Heal(names[0], names[1], one_way))

    def counters(self, host: Where) -> Counters:
        """What the kernel has counted on the link of a host so far."""
        return read_counters(self.place(host))

    def status(self) -> Status:
        """Shapes and cuts as they stand."""
        return self._ask(Look())

    def check(self) -> list[str]:
        """Have every host call every other one; a sentence for each that gets no answer. Takes a second then."""
        answer = self._exchange(Probe())
        assert isinstance(answer, Reached)
        addresses = {place.name: place.address for place in self.hosts}
        return [f"{addresses[b]} (host {b}) cannot be reached from host {a}" for a, b in answer.silent]

    def _ask(self, request: Request) -> Status:
        answer = self._exchange(request)
        assert isinstance(answer, Status)
        return answer

    def _exchange(self, request: Request) -> Status | Reached:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            try:
                sock.connect(str(control_file(self.name)))
                link = Link(sock)
                link.send(encode(request))
                if not link.poll(_ANSWER_WITHIN):
                    raise TimeoutError(f"no answer in {_ANSWER_WITHIN:g} s")
                answer = decode_answer(link.recv()[0])
            except (OSError, LinkClosed) as error:
                raise ConfigError(f"the lab {self.name} does not answer ({error}); is it still up?") from error
        if isinstance(answer, Refused):
            raise answer.error()
        assert not isinstance(answer, Up)
        return answer


def command_in(place: Place, argv: Sequence[str], folder: object = None) -> list[str]:
    """The command that runs `argv` in a host, in `folder` or else where it is started."""
    if not argv:
        raise ConfigError("no command was given to run in the lab host; say one, as in `python train.py`")
    inside = [find("nsenter") or "nsenter", f"--target={place.pid}", "--net", "--uts", "--mount"]
    inside += [f"--wdns={os.path.abspath(str(folder)) if folder is not None else os.getcwd()}", "--", *argv]
    if place.cgroup is None:
        return inside
    return ["/bin/sh", "-c", _INTO_GROUP, "sh", str(Path(place.cgroup, "cgroup.procs")), *inside]


def bring_up(name: str, hosts: int, shape: Shape) -> Lab:
    """A lab that stays when this process ends, until `take_down`."""
    _start(Plan(check_lab_name(name), hosts, shape, None)).wait()  # only its first process, which has left
    return Lab.attach(name)


def take_down(name: str) -> None:
    """End the lab `name`, whoever brought it up, and wait until it is gone. Raises ConfigError if it is not up."""
    state = find_lab(name)
    try:
        handle = os.pidfd_open(state.keeper)
    except ProcessLookupError:
        return
    try:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGTERM)
        if not select.select([handle], [], [], _DOWN_WITHIN)[0]:
            raise LabUnavailable(f"the keeper of the lab {name}, process {state.keeper}, does not end; kill it")
    finally:
        os.close(handle)


def _start(plan: Plan) -> subprocess.Popen[bytes]:
    require_lab()
    host_names(plan.hosts)
    source = str(Path(shoal.__file__).parent.parent)
    searched = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    keeper = subprocess.Popen(
        [sys.executable, "-c", _KEEPER, msgspec.json.encode(plan).decode()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        # a lab that stays must not hold the pipes of the one who brought it up
        stderr=subprocess.DEVNULL if plan.owner is None else None,
        env={**os.environ, "PYTHONPATH": searched},
        start_new_session=True,
    )
    assert keeper.stdout is not None
    try:
        with keeper.stdout as said:
            answered, _, _ = select.select([said], [], [], _UP_WITHIN)
            line = said.readline() if answered else b""
        answer = decode_answer(line) if line else Refused("its keeper ended or said nothing", wrong=False)
        if isinstance(answer, Refused):
            raise (
                ConfigError(answer.text)
                if answer.wrong
                else LabUnavailable(f"the lab {plan.name} did not come up: {answer.text}")
            )
    except BaseException:
        keeper.terminate()
        keeper.wait()
        raise
    return keeper
