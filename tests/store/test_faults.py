"""Stores that cannot be used: a clear word each, and nothing is changed."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.core.errors import ConfigError, StoreError
from shoal.store.faults import told_clearly
from shoal.store.store import Store
from shoal.store.values import NewRun
from shoal.store.writing import RunWriter

NOBODY = 65534


def add_run(url: str) -> None:
    with Store.open(url) as store:
        RunWriter(store, NewRun(id="r1", name="n", created=1.0, workers=1)).begin()


@pytest.mark.parametrize(
    "content", [b"not a database" * 100, b"SQLite format 3\0" + b"\xff" * 5000], ids=["text", "head"]
)
def test_a_corrupt_file(tmp_path: Path, file_url: str, content: bytes) -> None:
    file = tmp_path / "shoal.db"
    file.write_bytes(content)
    for create in (True, False):
        with pytest.raises(StoreError) as raised:
            Store.open(file_url, create=create)
        told = str(raised.value)
        assert str(file) in told and "Nothing was changed" in told and "Move the file away" in told
    assert file.read_bytes() == content and list(tmp_path.iterdir()) == [file]


def test_a_file_that_is_damaged_further_in(tmp_path: Path, file_url: str) -> None:
    add_run(file_url)
    file = tmp_path / "shoal.db"
    damaged = file.read_bytes()[:4096] + b"\xff" * (file.stat().st_size - 4096)
    file.write_bytes(damaged)
    with pytest.raises(StoreError, match=r"shoal\.db is damaged.*Nothing was changed"), Store.open(file_url) as store:
        store.runs()


def test_a_folder_in_the_place_of_the_file(tmp_path: Path, file_url: str) -> None:
    (tmp_path / "shoal.db").mkdir()
    with pytest.raises(StoreError, match="cannot be opened"):
        Store.open(file_url)


def test_a_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match=r"folder of the run store .* does not exist"):
        Store.open(f"sqlite:///{tmp_path / 'typo' / 'shoal.db'}")
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "new" / "home?"))
    monkeypatch.delenv("SHOAL_STORE", raising=False)
    Store.open().close()
    assert (tmp_path / "new" / "home?" / "shoal.db").is_file(), "Shoal's home is made, whatever its name"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(StoreError, match=r"cannot be made.*SHOAL_HOME"):
        Store.open()


def test_looking_finds_what_is_wrong_with_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a home that nobody has made yet is an empty store."""
    monkeypatch.delenv("SHOAL_STORE", raising=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"folder of the run store .* does not exist.*SHOAL_STORE"):
        Store.open(f"sqlite:///{tmp_path / 'typo' / 'shoal.db'}", create=False)
    for home in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("SHOAL_HOME", str(home))
        with pytest.raises(StoreError, match=r"file is not a folder.*SHOAL_HOME"):
            Store.open(create=False)
    with pytest.raises(StoreError, match=r"file is not a folder.*SHOAL_STORE"):
        Store.open(f"sqlite:///{tmp_path / 'file' / 'shoal.db'}", create=False)
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "new" / "home"))
    with Store.open(create=False) as store:
        assert store.runs() == []
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unknown(_: int) -> None:
        raise KeyError

    for name in ("HOME", "SHOAL_HOME", "SHOAL_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    for create in (True, False):
        with pytest.raises(ConfigError, match="SHOAL_HOME"):
            Store.open(create=create)
        with pytest.raises(StoreError, match="home folder is not known"):
            Store.open("sqlite:///~/shoal.db", create=create)
        with pytest.raises(StoreError, match="does not exist"):
            Store.open(f"sqlite:///{tmp_path / 'typo' / 'shoal.db'}", create=create)


def test_a_disk_that_reports_errors_may_be_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(error: sqlite3.Error) -> str:
        with pytest.raises(StoreError) as raised, told_clearly(str(tmp_path / "shoal.db")):
            raise error
        return str(raised.value)

    def of(code: int, words: str) -> sqlite3.Error:
        error = sqlite3.OperationalError(words)
        error.sqlite_errorcode = code
        return error

    assert "the disk is full" in told(of(sqlite3.SQLITE_FULL, "database or disk is full"))
    assert "the disk is full" in told(sqlite3.OperationalError("database or disk is full"))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=12 << 20))
    said = told(of(sqlite3.SQLITE_IOERR | 19 << 8, "disk I/O error"))
    assert f"reports an error. Most often it is full: 12.0 MiB are free in {tmp_path}" in said

    def gone(folder: Path) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("shutil.disk_usage", gone)
    assert "reports an error. Most often it is full" in told(of(sqlite3.SQLITE_IOERR, "disk I/O error"))


def as_nobody(action: Callable[[], str]) -> str:
    """What `action` returns or raises, in a process without the rights of root."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()

    def work() -> None:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        try:
            theirs.send(action())
        except Exception as error:
            theirs.send(f"{type(error).__name__}: {error}")

    process = context.Process(target=work)
    process.start()
    try:
        assert mine.poll(30), "no answer"
        return str(mine.recv())
    finally:
        process.join(30)
        mine.close()
        theirs.close()


@pytest.fixture
def closed_folder() -> Iterator[Path]:
    """One that is not under a folder of root alone."""
    with tempfile.TemporaryDirectory(prefix="shoal-closed-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
        folder.chmod(0o755)


def test_a_read_only_home(closed_folder: Path) -> None:
    file = closed_folder / "shoal.db"
    url = f"sqlite:///{file}"
    add_run(url)
    file.chmod(0o444)
    closed_folder.chmod(0o555)

    def read() -> str:
        with Store.open(url) as store:
            return store.find("last").id

    def change() -> str:
        with Store.open(url) as store:
            return str(store.tag("r1", ["x"]))

    def make() -> str:
        Store.open(f"sqlite:///{closed_folder / 'other.db'}").close()
        return "made"

    assert as_nobody(read) == "r1"
    told = as_nobody(change)
    assert told.startswith("StoreError") and "read-only" in told and str(file) in told
    told = as_nobody(make)
    assert told.startswith("StoreError") and "other.db cannot be opened" in told and "SHOAL_HOME" in told
    assert [path.name for path in closed_folder.iterdir()] == ["shoal.db"]


def test_a_writer_has_the_right_to_write_from_its_beginning(tmp_path: Path, file_url: str) -> None:
    other = sqlite3.connect(tmp_path / "shoal.db", timeout=0, isolation_level=None)
    with Store.open(file_url) as store:
        with store.writing(), pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
        other.execute("BEGIN IMMEDIATE")
        assert store.runs() == [], "readers do not wait"
    other.close()


def test_a_full_disk(file_url: str) -> None:
    with Store.open(file_url) as store:
        writer = RunWriter(store, NewRun(id="r1", name="n", created=1.0, workers=1, script="x" * 90_000))
        with store.writing() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(StoreError, match="the disk is full"):
            writer.begin()
        assert store.runs() == []


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("none", "SHOAL_STORE is none"),
        ("mysql://u:geheim@h/d", "begins with mysql:"),
        ("geheim", "cannot be read as a URL"),
        ("sqlite:///", "names no file"),
        ("sqlite:////", "names no file"),
        ("sqlite:///.", "names no file"),
        ("postgresql://u:geheim@h:port/d", "cannot be read as a URL"),
        ("postgresql://ada:geheim@127.0.0.1:1/d?password=geheim", "ada@127.0.0.1:1/d cannot be reached"),
        ("postgresql+psycopg://ada:geheim@127.0.0.1:1/d", "cannot be reached"),
    ],
)
def test_addresses_that_cannot_be_used(url: str, told: str) -> None:
    with pytest.raises(StoreError) as raised:
        Store.open(url)
    assert told in str(raised.value) and "geheim" not in str(raised.value) and "SHOAL_STORE" in str(raised.value)


def test_without_psycopg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StoreError, match=r"pip install 'shoal\[postgres\]'"):
        Store.open("postgresql://h/d")
