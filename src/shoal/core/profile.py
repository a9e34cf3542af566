"""Profiles: what operations over a group cost on some machines, measured once and kept for whoever plans a run.

A profile is one JSON file, `profiles/NAME.json` in Shoal's home, that only its owner may read.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import msgspec

from shoal.core.errors import ConfigError
from shoal.core.linkfit import LinkModel, Point

VERSION = 1
_FOLDER = "profiles"
_MOST_BYTES = 16 << 20
"""A file larger than this is not a profile."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Machine(msgspec.Struct, frozen=True):
    """What a profile was measured on."""

    cores: int
    memory_bandwidth: float
    """Bytes per second that one core copies from memory to memory."""
    torch: str
    """Its version."""


class Measured(msgspec.Struct, frozen=True):
    """One operation over one kind of group."""

    collective: str
    operation: str
    points: list[Point]
    model: LinkModel


class Profile(msgspec.Struct, frozen=True):
    """What was measured, where and when."""

    made: float
    """In seconds since 1970."""
    host: str
    workers: int
    hosts: list[int]
    """For each worker the number of its host."""
    machine: Machine
    measured: list[Measured]
    version: int = VERSION

    def __post_init__(self) -> None:
        """Raises ValueError, which msgspec turns into its ValidationError where a profile is read from a file."""
        if self.workers < 1 or len(self.hosts) != self.workers:
            raise ValueError(f"{self.workers} workers on hosts {self.hosts}; every worker must have a host")

    @property
    def collectives(self) -> list[str]:
        return list(dict.fromkeys(found.collective for found in self.measured))

    def find(self, operation: str, collective: str) -> Measured:
        """Raises ConfigError if that was not measured."""
        for found in self.measured:
            if (found.operation, found.collective) == (operation, collective):
                return found
        there = ", ".join(f"{found.operation} over {found.collective}" for found in self.measured)
        raise ConfigError(
            f"the profile has no {operation} over {collective}; it has {there or 'nothing'}. Measure it with "
            "`shoal bench comm`"
        )


class _Version(msgspec.Struct):
    version: int


def profile_path(home: Path, name: str) -> Path:
    """Where the profile of that name is, or would be. Raises ConfigError for what cannot be a name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a profile; use up to 64 letters, digits, '.', '_' and '-', of which the "
            "first is a letter or a digit"
        )
    return home / _FOLDER / f"{name}.json"


def save(profile: Profile, home: Path, name: str) -> Path:
    """Write it under `home`, in place of one that has the name already; readers see either. Raises ConfigError."""
    path = profile_path(home, name)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    text = msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.unlink(missing_ok=True)  # of a process that had this number and was killed
        try:
            _write_privately(beside, text)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror or error}); set SHOAL_HOME to a folder that you may write"
        ) from None
    return path


def load(home: Path, name: str) -> Profile:
    """Raises ConfigError if there is none of that name, or if the file is damaged or of another version."""
    path = profile_path(home, name)
    again = f"`shoal bench comm --save {name}` makes it anew"
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{path} is larger than a profile can be ({_MOST_BYTES:,} bytes); {again}")
        data = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"there is no profile {name!r}{_others(path.parent)}; {again}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}); {again}") from None
    try:
        version = msgspec.json.decode(data, type=_Version).version
        if version != VERSION:
            raise ConfigError(
                f"{path} is a profile of version {version}; this version of Shoal reads version {VERSION}. {again}"
            )
        return msgspec.json.decode(data, type=Profile)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is damaged ({error}); {again}") from None


def _write_privately(path: Path, text: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(fd)


def _others(folder: Path) -> str:
    with suppress(OSError):
        names = sorted(path.stem for path in folder.glob("*.json") if not path.name.startswith("."))
        if names:
            return f" (there are {', '.join(names[:10])})"
    return ""
