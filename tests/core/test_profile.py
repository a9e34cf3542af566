"""Profiles on disk: whole or not there, private, and with a clear word about what cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from shoal.core.errors import ConfigError
from shoal.core.linkfit import Point, fit
from shoal.core.profile import Machine, Measured, Profile, load, profile_path, save

POINTS = [Point(4 << power, 1e-5 + 1e-9 * (4 << power), 1e-6, 1e-3, 7) for power in range(12)]
PROFILE = Profile(
    made=1000.0,
    host="node7",
    workers=4,
    hosts=[0, 0, 1, 1],
    machine=Machine(cores=2, memory_bandwidth=1.2e10, torch="2.13.0"),
    measured=[
        Measured("gloo", "sum", POINTS, fit(POINTS)),
        Measured("shm", "sum", POINTS[:5], fit(POINTS[:5])),
        Measured("shm", "barrier", [Point(0, 1e-5)], fit([Point(0, 1e-5)])),
    ],
)


def test_there_and_back(tmp_path: Path) -> None:
    path = save(PROFILE, tmp_path / "home", "local-4")
    assert path == tmp_path / "home" / "profiles" / "local-4.json"
    assert load(tmp_path / "home", "local-4") == PROFILE


def test_only_the_owner_may_read_it_and_nothing_else_is_left(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = save(PROFILE, tmp_path, "a")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [found.name for found in path.parent.iterdir()] == ["a.json"]


def test_a_new_one_takes_the_place_of_the_old(tmp_path: Path) -> None:
    save(PROFILE, tmp_path, "a")
    newer = msgspec.structs.replace(PROFILE, made=2000.0)
    save(newer, tmp_path, "a")
    assert load(tmp_path, "a") == newer


def test_a_write_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(PROFILE, tmp_path, "a")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"No space left on device.*SHOAL_HOME"):
        save(msgspec.structs.replace(PROFILE, made=2000.0), tmp_path, "a")
    assert load(tmp_path, "a") == PROFILE
    assert [found.name for found in path.parent.iterdir()] == ["a.json"]


def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written.*SHOAL_HOME"):
        save(PROFILE, tmp_path / "file", "a")


def test_one_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no profile 'b'; `shoal bench comm --save b`"):
        load(tmp_path, "b")
    save(PROFILE, tmp_path, "a")
    with pytest.raises(ConfigError, match=r"no profile 'b' \(there are a\)"):
        load(tmp_path, "b")


def test_a_damaged_one(tmp_path: Path) -> None:
    path = save(PROFILE, tmp_path, "a")
    whole = path.read_bytes()
    for damaged in (
        b"",
        whole[: len(whole) // 2],
        b"[]",
        b"\xff",
        whole.replace(b'"from_bytes": 0', b'"from_bytes": 9'),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"a\.json is damaged.*makes it anew"):
            load(tmp_path, "a")


def test_hosts_that_do_not_match_the_workers(tmp_path: Path) -> None:
    path = save(PROFILE, tmp_path, "a")
    path.write_bytes(path.read_bytes().replace(b'"workers": 4', b'"workers": 5'))
    with pytest.raises(ConfigError, match="every worker must have a host"):
        load(tmp_path, "a")


def test_one_of_another_version(tmp_path: Path) -> None:
    path = save(PROFILE, tmp_path, "a")
    path.write_bytes(b'{"version": 2, "everything": "else"}')
    with pytest.raises(ConfigError, match="of version 2; this version of Shoal reads version 1"):
        load(tmp_path, "a")


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = save(PROFILE, tmp_path, "a")
    os.truncate(path, 1 << 30)
    with pytest.raises(ConfigError, match="larger than a profile can be"):
        load(tmp_path, "a")


@pytest.mark.parametrize("name", ["", "..", "../a", "a/b", "/a", ".a", "-a", "a b", "a\n", "x" * 65])
def test_what_cannot_be_a_name(tmp_path: Path, name: str) -> None:
    for use in (
        lambda: profile_path(tmp_path, name),
        lambda: save(PROFILE, tmp_path, name),
        lambda: load(tmp_path, name),
    ):
        with pytest.raises(ConfigError, match="cannot be the name of a profile"):
            use()
    assert not list(tmp_path.iterdir())


def test_what_is_in_it() -> None:
    assert PROFILE.collectives == ["gloo", "shm"]
    assert PROFILE.find("barrier", "shm") is PROFILE.measured[2]
    with pytest.raises(ConfigError, match="no gather over gloo; it has sum over gloo, sum over shm, barrier over shm"):
        PROFILE.find("gather", "gloo")
