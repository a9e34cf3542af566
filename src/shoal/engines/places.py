"""Where on this machine a worker runs: in a lab host, which has a network address, a name and a /dev/shm of its own.

A lab that is up is described by a state file in `LABS`, which only root can read. Its keeper, the process that holds
the hosts, has the file locked for as long as it lives, so a file without a lock is one that a killed keeper left.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from shoal.core.errors import ConfigError
from shoal.engines.namespaces import join

LABS = Path("/run/shoal/labs")
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,19}")
_MOST_BYTES = 1 << 20


class Place(msgspec.Struct, frozen=True):
    """One lab host."""

    name: str
    address: str
    pid: int
    """A process that lives in the host for as long as the lab is up."""
    cgroup: str | None = None
    """The folder of the control group that bounds the host's CPU time; None where there is none."""


class LabState(msgspec.Struct, frozen=True):
    """What the state file of a lab holds."""

    name: str
    keeper: int
    hosts: tuple[Place, ...]


def check_lab_name(name: str) -> str:
    """`name`, if a lab may be called that. Raises ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"lab={name!r}: the name of a lab is 1 to 20 of a-z, 0-9 and -")
    return name


def state_file(name: str) -> Path:
    """Where the state of the lab `name` is. Raises ConfigError for what is no name of a lab."""
    return LABS / f"{check_lab_name(name)}.json"


def read_lab(name: str) -> list[Place]:
    """The hosts of the lab `name`, in order. Raises ConfigError, with the labs that are up, if it is none of them."""
    return list(find_lab(name).hosts)


def find_lab(name: str) -> LabState:
    """What is known of the lab `name`. Raises ConfigError as `read_lab` does."""
    path = state_file(name)
    if os.geteuid() != 0:
        raise ConfigError(f"lab={name!r}: labs belong to root, and this process is not root's; run it with sudo")
    state = _read(path)
    if state is None:
        up = ", ".join(labs_up()) or "none"
        raise ConfigError(f"lab={name!r} is not up; labs that are up: {up}. Start it with `shoal lab up {name}`")
    return state


def labs_up() -> list[str]:
    """The names of the labs whose keeper lives, sorted; those that this process may see."""
    return sorted(state.name for path in _state_files() if (state := _read(path)) is not None)


def labs_left() -> list[Path]:
    """The state files whose keeper is gone."""
    return [path for path in _state_files() if not _is_held(path)]


def _state_files() -> list[Path]:
    with suppress(OSError):
        return sorted(path for path in LABS.glob("*.json") if _NAME.fullmatch(path.stem))
    return []


def _read(path: Path) -> LabState | None:
    """None if there is no such lab, or nobody keeps it any more."""
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid != 0 or found.st_mode & 0o022:
                raise ConfigError(f"{path} can be written by others than root, so it is not believed; remove it")
            content = file.read(_MOST_BYTES)
    except OSError:
        return None
    if not content or not _is_held(path):  # empty: the lab is coming up
        return None
    try:
        return msgspec.json.decode(content, type=LabState)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not the state of a lab ({error}); take it down and up again") from None


def _is_held(path: Path) -> bool:
    """Whether a keeper has the file locked. False also if there is no such file."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def enter(place: Place) -> None:
    """Move this process into a lab host, for good: its network, host name, /dev/shm, /etc/hosts and share of the CPU.

    All other files stay the machine's, and so does the working directory. For a process with one thread, which should
    be a new one: what it has open stays open. Raises ConfigError if the host is gone.
    """
    folder = os.getcwd()
    try:
        if place.cgroup is not None:
            Path(place.cgroup, "cgroup.procs").write_text(str(os.getpid()))
        join(place.pid)
        os.chdir(folder)
    except OSError as error:
        raise ConfigError(
            f"the lab host {place.name} ({place.address}) cannot be entered: {error.strerror or error}; "
            "is the lab still up? `shoal lab status` tells"
        ) from error


def spread(places: Sequence[Place], workers: int) -> list[Place]:
    """The place of each worker, in blocks: 8 workers on 2 hosts are 0-3 on the first and 4-7 on the second.

    Where it does not come out even, the first hosts have one more.
    """
    if not places:
        raise ConfigError("the lab has no hosts; take it down, and up again with --hosts of at least 1")
    share, more = divmod(workers, len(places))
    return [place for index, place in enumerate(places) for _ in range(share + (index < more))]
