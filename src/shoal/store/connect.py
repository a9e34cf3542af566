"""From the address of a run store to an engine of SQLAlchemy."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import QueuePool, StaticPool

from shoal.core.errors import ConfigError, StoreError
from shoal.store.home import NO_STORE, shoal_home

BUSY_SECONDS = 30.0
"""How long SQLite waits for a lock."""
CONNECT_SECONDS = 5
"""How long a server may take to answer."""

_SQLITE = "sqlite:///"
_WRITING = "shoal_writing"


@dataclass(frozen=True)
class Address:
    """Of a store: a file, or a server. `where` is for messages and holds no password."""

    where: str
    file: Path | None = None
    server: URL | None = None

    @property
    def password(self) -> str | None:
        return str(self.server.password) if self.server is not None and self.server.password else None


def parse(url: str) -> Address:
    """Raises StoreError, without the URL in it: it may hold a password."""
    if url == NO_STORE:
        raise StoreError("No record of runs is kept: SHOAL_STORE is none. Unset it, or set it to the URL of a store.")
    if url.startswith(_SQLITE):
        path = _expanded(Path(url.removeprefix(_SQLITE)))
        if not path.name:
            raise _wrong("it names no file")
        return Address(where=str(path), file=path)
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise _wrong("it cannot be read as a URL") from None
    if parsed.get_backend_name() != "postgresql":
        raise _wrong(f"it begins with {parsed.drivername}:")
    return Address(where=_without_secrets(parsed), server=parsed.set(drivername="postgresql+psycopg"))


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:
        raise _wrong(f"{path} cannot be found, because that home folder is not known") from None


def _wrong(reason: str) -> StoreError:
    return StoreError(
        f"The URL of the run store is not one that Shoal knows: {reason}. "
        "Set SHOAL_STORE to sqlite:////path/to/file.db, postgresql://user@host/database or none."
    )


def _without_secrets(url: URL) -> str:
    # The query goes too: it may hold a password as well.
    return URL.create(
        "postgresql", username=url.username, host=url.host, port=url.port, database=url.database
    ).render_as_string()


def engine_of(address: Address) -> Engine:
    """Does not connect yet, and makes no file."""
    if address.file is not None:
        return _file_engine(address.file, "mode=rwc")
    assert address.server is not None
    return _server_engine(address.server)


def reading_engine(file: Path) -> Engine:
    """For a file on a medium that cannot be written. It must not be changed by others meanwhile."""
    return _file_engine(file, "immutable=1")


def memory_engine() -> Engine:
    """An empty store that nobody else sees."""
    engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    _own_transactions(engine)
    return engine


def look_for_room(file: Path) -> None:
    """Raises StoreError where the folder of the file is not there, and is not Shoal's home, or cannot be made."""
    folder = file.parent
    at_home = _is_home(folder)
    nearest = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    if nearest.exists() and not nearest.is_dir():
        raise StoreError(
            f"The run store {file} cannot be made: {nearest} is not a folder. "
            f"Correct {'SHOAL_HOME' if at_home else 'SHOAL_STORE'}, or move it away."
        )
    if nearest != folder and not at_home:
        raise StoreError(f"The folder of the run store {file} does not exist. Make it, or correct SHOAL_STORE.")


def _is_home(folder: Path) -> bool:
    try:
        return folder.absolute() == shoal_home().absolute()
    except ConfigError:  # there is none
        return False


def make_room(file: Path) -> None:
    """Make Shoal's home if that is where the file goes. Any other folder must be there: a slip is no reason for one."""
    folder = file.parent
    if folder.is_dir():
        return
    look_for_room(file)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"Shoal's home {folder} cannot be made: {error.strerror}. "
            "Set SHOAL_HOME to a folder that you may write, or SHOAL_STORE=none to keep no record."
        ) from error


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """A transaction that holds the right to write from its beginning: SQLite never lets a reader wait to become one."""
    with engine.connect().execution_options(**{_WRITING: True}) as connection, connection.begin():
        yield connection


def _file_engine(file: Path, how: str) -> Engine:
    uri = f"file:{quote(str(file.absolute()))}?{how}"

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(
            uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=64
        )
        try:
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA synchronous = NORMAL")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool, pool_size=1)
    _own_transactions(engine)
    return engine


def _server_engine(url: URL) -> Engine:
    arguments: dict[str, Any] = {"application_name": "shoal"}
    if "connect_timeout" not in url.query:
        arguments["connect_timeout"] = CONNECT_SECONDS
    try:
        return create_engine(url, connect_args=arguments, pool_size=1, max_overflow=4)
    except ImportError as error:
        raise StoreError(
            "A run store on PostgreSQL needs psycopg, which is not installed. Run: pip install 'shoal[postgres]'"
        ) from error


def _own_transactions(engine: Engine) -> None:
    """The sqlite3 module would begin transactions late, and as readers; they are begun here instead."""

    @event.listens_for(engine, "connect")
    def _(connection: sqlite3.Connection, record: object) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def _(connection: Connection) -> None:
        how = "IMMEDIATE" if connection.get_execution_options().get(_WRITING) else "DEFERRED"
        connection.exec_driver_sql(f"BEGIN {how}")
