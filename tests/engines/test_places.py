"""Where workers are put: labs are found by name, and only those that are up and root's."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from shoal.core import spec
from shoal.core.errors import ConfigError
from shoal.engines import places
from shoal.engines.places import LabState, Place, enter, labs_left, labs_up, read_lab, spread

A, B, C = (Place(name, f"10.77.0.{index}", 1) for index, name in enumerate("abc", start=2))
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="labs belong to root; run the tests as root")


@pytest.fixture
def labs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(places, "LABS", tmp_path)
    return tmp_path


def left(labs: Path, name: str, mode: int = 0o600) -> Path:
    """A state file as a killed keeper leaves it."""
    path = labs / f"{name}.json"
    path.write_bytes(msgspec.json.encode(LabState(name, 1, (A, B))))
    path.chmod(mode)
    return path


@contextmanager
def kept(labs: Path, name: str, mode: int = 0o600) -> Iterator[Path]:
    """The same with a keeper that lives."""
    path = left(labs, name, mode)
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield path


@pytest.mark.parametrize(
    ("workers", "counts"), [(8, [4, 4]), (5, [3, 2]), (2, [1, 1]), (1, [1, 0])], ids=lambda value: str(value)
)
def test_workers_are_spread_in_blocks(workers: int, counts: list[int]) -> None:
    assert spread([A, B], workers) == [A] * counts[0] + [B] * counts[1]


def test_uneven_shares_differ_by_one() -> None:
    assert spread([A, B, C], 7) == [A, A, A, B, B, C, C]
    with pytest.raises(ConfigError, match="no hosts"):
        spread([], 2)


@needs_root
def test_a_lab_is_found_while_its_keeper_lives(labs: Path) -> None:
    with kept(labs, "two"):
        assert read_lab("two") == [A, B] and labs_up() == ["two"] and labs_left() == []
    assert labs_up() == [] and labs_left() == [labs / "two.json"]
    with pytest.raises(
        ConfigError, match=r"lab='two' is not up; labs that are up: none\. Start it with `shoal lab up two`"
    ):
        read_lab("two")


@needs_root
def test_an_unknown_lab_is_refused_with_those_that_are_up(labs: Path) -> None:
    left(labs, "dead")
    with kept(labs, "one"), kept(labs, "two"), pytest.raises(ConfigError, match="labs that are up: one, two"):
        read_lab("three")


@pytest.mark.parametrize("name", ["", "../two", "a/b", "Two", "a" * 21, "a.json", "a\n"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="1 to 20 of a-z, 0-9 and -"):
        read_lab(name)


@needs_root
def test_a_file_that_others_can_write_is_not_believed(labs: Path) -> None:
    with kept(labs, "two", 0o602), pytest.raises(ConfigError, match="can be written by others"):
        read_lab("two")
    with kept(labs, "one") as path:
        os.chown(path, 65534, 65534)
        with pytest.raises(ConfigError, match="can be written by others"):
            read_lab("one")


@needs_root
def test_a_file_that_says_something_else_is_refused(labs: Path) -> None:
    with kept(labs, "two") as path:
        path.write_text('{"name": 5}')
        with pytest.raises(ConfigError, match="is not the state of a lab"):
            read_lab("two")
        path.write_text("")  # it is coming up
        with pytest.raises(ConfigError, match="is not up"):
            read_lab("two")


def test_a_host_that_is_gone_cannot_be_entered() -> None:
    gone = Place("a", "10.77.0.2", 2**22 + 1)
    with pytest.raises(ConfigError, match=r"lab host a \(10.77.0.2\) cannot be entered: No such file .* still up"):
        enter(gone)


def test_the_engine_names_a_lab_and_then_forks() -> None:
    engine = spec.parse("engine", "local:lab=two")
    assert (engine.lab, engine.start) == ("two", "fork")
    assert spec.parse("engine", "local").start == "auto"
    with pytest.raises(ConfigError, match="leave start=script out"):
        spec.parse("engine", "local:lab=two,start=script")
