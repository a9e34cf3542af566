"""What a process needs to take part in a run: its folder, where its coordinator listens, and its keys."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from shoal.core.errors import ConfigError
from shoal.wire.curve import Keys

_FILE = "endpoint"
_MOST_CHARACTERS = 300
_ENDPOINT = re.compile(r"tcp://(?P<host>[A-Za-z0-9._-]{1,255}|\[[0-9a-fA-F:.]{2,64}\]):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True)
class Access:
    """The way into one run. The folder belongs to one user alone (0700)."""

    run: str
    folder: Path
    keys: Keys = field(repr=False)

    def endpoint(self) -> str | None:
        """Where the coordinator listens, or did when it last started; None before that.

        Raises `ConfigError` if the file holds something else.
        """
        try:
            with open(self.folder / _FILE, "rb") as file:
                raw = file.read(_MOST_CHARACTERS + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"{self.folder / _FILE} cannot be read: {error.strerror}") from None
        return checked(raw.decode("ascii", "replace").strip(), self.folder / _FILE)

    def publish(self, endpoint: str) -> None:
        """Tell those who read this folder where the coordinator listens. They see the old or the new, never a part."""
        checked(endpoint, self.folder / _FILE)
        fresh = self.folder / f"{_FILE}.{os.getpid()}"
        fresh.unlink(missing_ok=True)
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(f"{endpoint}\n")
        os.replace(fresh, self.folder / _FILE)


def control_folder(run_dir: Path | None, scratch: Path) -> Path:
    """Where a run's keys, its coordinator's journal and its endpoint are."""
    return (scratch if run_dir is None else run_dir) / "control"


def port_of(endpoint: str) -> int:
    """The port of a well-formed endpoint."""
    return int(endpoint.rpartition(":")[2])


def checked(endpoint: str, where: Path) -> str:
    """The endpoint itself; raises `ConfigError` if it is none."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or not 0 < int(match["port"]) < 1 << 16:
        raise ConfigError(
            f"{where} holds {endpoint[:_MOST_CHARACTERS]!r}; it must name the coordinator as tcp://host:port: "
            "it is written when a run starts, and should not be edited"
        )
    return endpoint
