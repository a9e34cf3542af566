"""What of a data set cannot be had by each process is named in a notice."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from shoal.data.fetch import Fetcher, Positions
from shoal.engines import openfiles


class Holding:
    """A data set that has something."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


class Connecting(Holding):
    def __getitem__(self, index: int) -> int:
        if self.thing != os.getpid():
            self.thing = os.getpid()
            self.database = sqlite3.connect(":memory:")
        return index


def notices(thing: Any) -> list[str]:
    return Fetcher(Holding(thing), None).notices


class Wire:
    """As the drivers of databases have it."""

    cursor = commit = rollback = close = None


def test_connections_are_named_once() -> None:
    with sqlite3.connect(":memory:") as database:
        (text,) = notices([database])
        assert "data.thing[0] is a sqlite3.Connection" in text and "os.getpid()" in text
        assert notices(database) == []
    assert "data.thing['wire'] is a " in notices({"wire": Wire()})[0]
    assert "data.thing[0] (and 2 more) is a " in notices([Wire(), Wire(), Wire()])[0]


def test_a_connection_that_is_made_with_the_first_item_is_fine() -> None:
    data = Connecting(0)
    fetcher = Fetcher(data, None)
    fetcher.fetch((Positions((0, 1), 0, 0),))
    assert fetcher.notices == [] and Fetcher(data, None).notices == []
    data.database.close()


def test_streams_are_named_and_what_is_closed_is_not() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        assert "data.thing is a socket.socket" in notices(ours)[0]
        assert notices(datagrams) == []
        theirs.close()
        assert notices(theirs) == []


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("r+b", "is open for writing too"),
        ("r+", "is open for writing too"),
        ("w+", "is open for writing too"),
        ("rb", ""),
        ("r", ""),
        ("a", ""),
    ],
)
def test_files_that_are_written_to_are_named(tmp_path: Path, mode: str, why: str) -> None:
    (tmp_path / "data").touch()
    with open(tmp_path / "data", mode) as file:
        found = notices(file)
        assert len(found) == bool(why) and all(f"because it {why}" in text for text in found)
    assert notices(file) == []


def test_other_kinds_of_files() -> None:
    heard, says = os.pipe()
    with open(heard, "rb") as end, open(os.devnull) as device, open(says, "wb") as other_end:
        assert "because it is no regular file" in notices({"pipe": end})[0]
        assert [notices(file) for file in (device, other_end, sys.stdin, sys.stdout, sys.stderr)] == [[]] * 5


def test_a_file_that_was_refused_after_the_fork_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openfiles, "_failures", {"/data/rows": "Permission denied"})
    (text,) = notices(None)
    assert text.startswith("/data/rows was open before") and "(Permission denied)" in text
    assert notices(None) == []


log: Any = None


class Logging(Holding):
    """Its attribute has the name of something else."""

    def __getitem__(self, index: int) -> int:
        return int(self.thing.log) + index


def test_what_only_has_the_name_of_an_attribute_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / "log", "w+") as file:
        monkeypatch.setitem(globals(), "log", file)
        assert Fetcher(Logging(3), None).notices == []


def test_ends_of_a_pipe_that_can_be_read_from_are_named() -> None:
    for duplex in (True, False):
        reads, writes = multiprocessing.Pipe(duplex)
        with reads, writes:
            assert "data.thing is a multiprocessing.connection.Connection" in notices(reads)[0]
            assert len(notices(writes)) == duplex
        assert notices(reads) == []


def test_a_queue_that_is_made_to_be_shared_is_not_named() -> None:
    one, other = multiprocessing.SimpleQueue(), multiprocessing.Queue()
    assert notices([one, other]) == []
    one.close()
    other.close()
    other.join_thread()


base: Any = None


class Counted(Holding):
    def __init__(self) -> None:
        super().__init__(base)
        self.thing = len(self.thing.execute("select 1").fetchall())


class Asking(Counted):
    """Its items ask, too."""

    def __getitem__(self, index: int) -> int:
        return int(base.execute("select 1").fetchone()[0])


class Row:
    def __init__(self, index: int) -> None:
        self.index, self.value = index, base.execute("select 1").fetchone()[0]


class Making(Holding):
    """Its items run a constructor, of a class of which there is an object already."""

    def __getitem__(self, index: int) -> int:
        return int(Row(index).value)


def test_what_only_a_constructor_that_has_run_mentions_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(make: Any) -> list[str]:
        with closing(sqlite3.connect(":memory:")) as database:
            monkeypatch.setitem(globals(), "base", database)
            return [text.partition(" is a sqlite3.Connection")[0] for text in Fetcher(make(), None).notices]

    assert named(Counted) == []
    assert named(lambda: Holding(Row(0))) == []
    assert named(Asking) == ["data.__getitem__.base"]
    assert named(lambda: Making(Row(0))) == ["data.__getitem__.Row.__init__.base"]
