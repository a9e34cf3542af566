"""The keys of one run, and the file in which its clients find theirs.

Whoever has that file may take part in the run, so it is written for the owner alone, and not read if others could have.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from shoal.core.errors import ConfigError

CLIENT_FILE = "client.keys"

_KEY_LETTERS = 40
_MOST_FILE = 4096
_CLIENT_FIELDS = ("server_public", "client_public", "client_secret")


class Keys(msgspec.Struct, frozen=True):
    """The keys of one run, as Z85 text. Never shown."""

    server_public: bytes
    server_secret: bytes
    """Empty where only the client's part is known."""
    client_public: bytes
    client_secret: bytes

    @classmethod
    def make(cls) -> Keys:
        """New ones, from the system's source of randomness."""
        return cls(*zmq.curve_keypair(), *zmq.curve_keypair())

    def __repr__(self) -> str:
        return "Keys(not shown)"

    def __rich_repr__(self) -> Any:
        yield "not shown"

    def write(self, folder: Path) -> None:
        """Write what a client needs into `folder`, for its owner alone. The server's secret is not among it.

        Makes the folder if it is not there, and takes it from everybody else. Raises ConfigError.
        """
        text = msgspec.json.encode({name: getattr(self, name).decode() for name in _CLIENT_FIELDS})
        beside = folder / f".{CLIENT_FILE}.{os.getpid()}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            _take_for_oneself(folder)
            beside.unlink(missing_ok=True)
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(text)
            beside.replace(folder / CLIENT_FILE)
        except OSError as error:
            raise ConfigError(
                f"the keys of the run cannot be written to {folder} ({error.strerror or error}); "
                "give a run folder that is yours and can be written"
            ) from None


def _take_for_oneself(folder: Path) -> None:
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        raise OSError(errno.EPERM, "it is not a folder of this user")
    if stat.S_IMODE(about.st_mode) != 0o700:
        folder.chmod(0o700)


def read_client_keys(folder: Path) -> Keys:
    """What `Keys.write` has written; `server_secret` is empty.

    Raises ConfigError if there is nothing, it is not of that form, belongs to somebody else, or others may read it.
    """
    path = folder / CLIENT_FILE
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            _refuse_what_others_had(path, os.fstat(file.fileno()))
            text = file.read(_MOST_FILE + 1)
    except OSError as error:
        raise ConfigError(
            f"the keys of the run cannot be read from {path} ({error.strerror or error}); they are there while the run "
            "is under way, for the user who started it"
        ) from None
    try:
        found = msgspec.json.decode(text[:_MOST_FILE], type=dict[str, str])
        values = {name: found[name].encode("ascii") for name in _CLIENT_FIELDS}
        check_keys(*values.values())
    except (msgspec.MsgspecError, KeyError, UnicodeEncodeError, ConfigError):
        # nothing of the content may come into the message
        raise ConfigError(f"{path} does not hold the keys of a run; start the run again to have it written") from None
    return Keys(server_secret=b"", **values)


def _refuse_what_others_had(path: Path, about: os.stat_result) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise ConfigError(f"{path} is not a file; it must be the file of keys that the run has written")
    if about.st_uid != os.geteuid():
        raise ConfigError(
            f"{path} belongs to user {about.st_uid}, and this is user {os.geteuid()}: keys are only read by the user "
            "who started the run; give the command as that user"
        )
    if about.st_mode & 0o077:
        raise ConfigError(
            f"{path} may be read by others (mode {stat.S_IMODE(about.st_mode):04o}, must be 0600), so its keys are no "
            "secret; start the run again to have new ones"
        )


def check_keys(*keys: bytes) -> None:
    """Raise ConfigError unless each could be a key."""
    for key in keys:
        try:
            sound = len(key) == _KEY_LETTERS and len(z85.decode(key)) == 32
        except (ValueError, KeyError):
            sound = False
        if not sound:
            raise ConfigError(f"a key must be {_KEY_LETTERS} letters of Z85; make keys with Keys.make()")
