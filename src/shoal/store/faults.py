"""What a database says when something is wrong, in words that say what to do."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from shoal.core.errors import StoreError

_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_SAYS_FULL = "disk is full"
_NOTHING_CHANGED = "Nothing was changed."
_SQLITE_ADVICE = {
    sqlite3.SQLITE_NOTADB: "is not an SQLite database",
    sqlite3.SQLITE_CORRUPT: "is damaged",
    sqlite3.SQLITE_FULL: "cannot be written: the disk is full. Make room and try again",
    sqlite3.SQLITE_READONLY: (
        "cannot be written: the file or its folder is read-only. "
        "Make it writable, or name another place with SHOAL_HOME or SHOAL_STORE"
    ),
    sqlite3.SQLITE_CANTOPEN: (
        "cannot be opened: look at whether its folder exists and whether you may write into it, "
        "or name another place with SHOAL_HOME or SHOAL_STORE"
    ),
    sqlite3.SQLITE_BUSY: "is in use by other processes and did not become free in time. Try again",
    sqlite3.SQLITE_LOCKED: "is in use by other processes and did not become free in time. Try again",
    sqlite3.SQLITE_IOERR: "cannot be read or written: the disk reports an error. Most often it is full",
    sqlite3.SQLITE_PERM: "cannot be used: access is denied",
}
_MOVE_AWAY = (
    "Move the file away, together with the files beside it that end in -wal and -shm, and a new store is begun. "
    "The folders of runs are not touched by this."
)


@contextmanager
def told_clearly(where: str, *, password: str | None = None) -> Iterator[None]:
    """Within: what the database raises leaves as StoreError, with the original as its cause."""
    try:
        yield
    except SQLAlchemyError as error:
        raise _explained(error, where, password) from error
    except sqlite3.Error as error:
        raise StoreError(_of_sqlite(error, where)) from error


def may_pass(error: BaseException) -> bool:
    """Whether it makes sense to try again: a lock, or a server that cannot be reached at the moment."""
    cause = error.__cause__ if isinstance(error, StoreError) else error
    original = cause.orig if isinstance(cause, DBAPIError) else cause
    if isinstance(original, sqlite3.Error):
        return _primary_code(original) in _BUSY
    if isinstance(cause, DBAPIError):
        return cause.connection_invalidated or type(cause).__name__ == "OperationalError"
    return False


def is_unopenable(error: BaseException) -> bool:
    """Whether SQLite could not open a file, or the files that it wants to make beside it."""
    original = error.orig if isinstance(error, DBAPIError) else error
    return isinstance(original, sqlite3.Error) and _primary_code(original) in (
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_READONLY,
    )


def _explained(error: SQLAlchemyError, where: str, password: str | None) -> StoreError:
    original = error.orig if isinstance(error, DBAPIError) else None
    if isinstance(original, sqlite3.Error):
        return StoreError(_of_sqlite(original, where))
    words = _first_line(original or error)
    if password:
        words = words.replace(password, "***")
    if isinstance(error, DBAPIError) and may_pass(error):
        return StoreError(
            f"The run store {where} cannot be reached: {words}. "
            "Look at whether the server runs and whether the address in SHOAL_STORE is right."
        )
    return StoreError(f"The run store {where} cannot be used: {words}")


def _of_sqlite(error: sqlite3.Error, where: str) -> str:
    code = sqlite3.SQLITE_FULL if _SAYS_FULL in str(error) else _primary_code(error)
    advice = _SQLITE_ADVICE.get(code, "cannot be used")
    if code == sqlite3.SQLITE_IOERR:
        advice += _free_space(Path(where).parent)
    told = f"The run store {where} {advice} ({_first_line(error)})."
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return f"{told} {_NOTHING_CHANGED} {_MOVE_AWAY}"
    return told


def _free_space(folder: Path) -> str:
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    return f": {free / 2**20:,.1f} MiB are free in {folder}"


def _primary_code(error: sqlite3.Error) -> int:
    """Without the details that SQLite puts in the higher bits; 0 for errors of the module itself."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
