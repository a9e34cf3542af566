"""A store on each database, and a PostgreSQL server for the time of the tests."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.store.store import Store

OWNER = "postgres"
"""Who runs the server where the tests are run by root, which it refuses to be."""
DEADLINE = 30.0

_numbers = itertools.count()


def server_programs() -> Path | None:
    """The folder of Debian's newest server, or of one on the path."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("postgres")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


def as_owner(command: list[str]) -> list[str]:
    if os.getuid() != 0:
        return command
    return ["setpriv", f"--reuid={OWNER}", f"--regid={OWNER}", "--clear-groups", "--", *command]


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[str]:
    """The URL of a database on a server of our own, which trusts those who reach its loopback port."""
    programs = server_programs()
    if programs is None:
        pytest.skip("no PostgreSQL server is installed (Debian: apt install postgresql)")
    with tempfile.TemporaryDirectory(prefix="shoal-pg-") as name:
        folder = Path(name)
        if os.getuid() == 0:
            owner = pwd.getpwnam(OWNER)
            os.chown(folder, owner.pw_uid, owner.pw_gid)
        data = folder / "data"
        make = [str(programs / "initdb"), "-D", str(data), "-U", "shoal", "-A", "trust", "-E", "UTF8", "--no-sync"]
        subprocess.run(as_owner([*make, "--locale=C"]), check=True, capture_output=True, cwd=folder, timeout=DEADLINE)
        port = free_port()
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": port,
            "unix_socket_directories": folder,
            "fsync": "off",
            "max_connections": 30,
            "shared_buffers": "16MB",
        }
        options = " ".join(f"-c {key}={value}" for key, value in settings.items())
        control = [str(programs / "pg_ctl"), "-D", str(data), "-w", "-t", str(int(DEADLINE))]
        log = folder / "log"
        # As a stranger, without our environment: its processes come and go as connections do, and are no leaks.
        plain = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
        quiet = {"cwd": folder, "env": plain, "stdout": subprocess.DEVNULL, "check": True, "timeout": 2 * DEADLINE}
        subprocess.run(as_owner([*control, "-l", str(log), "-o", options, "start"]), **quiet)
        try:
            yield f"postgresql://shoal@127.0.0.1:{port}/postgres"
        finally:
            subprocess.run(as_owner([*control, "-m", "fast", "stop"]), **quiet)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session", params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> str | None:
    """Each database in turn: None for SQLite, else a server. Of the session, so that it is there before leaks count."""
    return request.getfixturevalue("postgresql_server") if request.param == "postgresql" else None


@pytest.fixture
def url(database: str | None, tmp_path: Path) -> str:
    """Of a store that is not there yet."""
    if database is None:
        return f"sqlite:///{tmp_path / 'shoal.db'}"
    return own_schema(database)


def own_schema(server: str) -> str:
    """A part of the database that no other test sees."""
    import psycopg

    name = f"test_{next(_numbers)}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}")
    return f"{server}?options=-csearch_path%3D{name}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as opened:
        yield opened


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'shoal.db'}"


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], None]:
    """Waits for a condition, with a deadline."""

    def wait(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.01)

    return wait
