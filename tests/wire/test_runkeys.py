"""The keys of a run: never shown, and in a file for their owner alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from shoal.core.errors import ConfigError
from shoal.wire.runkeys import CLIENT_FILE, Keys, read_client_keys


@pytest.fixture
def keys() -> Keys:
    return Keys.make()


def test_keys_differ_and_are_never_shown(keys: Keys) -> None:
    everything = [*Keys.make().__struct_fields__]
    values = [getattr(each, name) for each in (keys, Keys.make()) for name in everything]
    assert len(set(values)) == 8
    shown = f"{keys} {keys!r} {[keys]} {list(keys.__rich_repr__())}"
    for name in everything:
        assert getattr(keys, name).decode() not in shown


def test_the_file_of_clients_is_for_its_owner_alone_and_lacks_the_servers_secret(keys: Keys, tmp_path: Path) -> None:
    folder = tmp_path / "control"
    before = os.umask(0)
    try:
        keys.write(folder)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.name for path in folder.iterdir()] == [CLIENT_FILE]
    assert stat.S_IMODE((folder / CLIENT_FILE).stat().st_mode) == 0o600
    assert keys.server_secret not in (folder / CLIENT_FILE).read_bytes()
    found = read_client_keys(folder)
    assert found == Keys(keys.server_public, b"", keys.client_public, keys.client_secret)


def test_an_open_folder_is_taken_from_others_and_old_keys_are_replaced(keys: Keys, tmp_path: Path) -> None:
    folder = tmp_path / "control"
    folder.mkdir(mode=0o755)
    Keys.make().write(folder)
    keys.write(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert read_client_keys(folder).client_public == keys.client_public


def test_a_folder_that_is_a_link_or_cannot_be_written_is_refused(keys: Keys, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="not a folder of this user"):
        keys.write(tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        keys.write(tmp_path / "file")


def test_a_file_that_others_may_read_is_refused(keys: Keys, tmp_path: Path) -> None:
    keys.write(tmp_path)
    for mode in (0o640, 0o604, 0o620, 0o666):
        (tmp_path / CLIENT_FILE).chmod(mode)
        with pytest.raises(ConfigError, match=f"read by others .mode {mode:04o}"):
            read_client_keys(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_or_folder_of_somebody_else_is_refused(keys: Keys, tmp_path: Path) -> None:
    keys.write(tmp_path)
    os.chown(tmp_path / CLIENT_FILE, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        read_client_keys(tmp_path)
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, 12345, -1)
    with pytest.raises(ConfigError, match="not a folder of this user"):
        keys.write(folder)


def test_a_file_that_is_missing_or_no_file_is_refused(keys: Keys, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_client_keys(tmp_path)
    os.mkfifo(tmp_path / CLIENT_FILE, 0o600)
    with pytest.raises(ConfigError, match="not a file"):
        read_client_keys(tmp_path)
    (tmp_path / CLIENT_FILE).unlink()
    (tmp_path / CLIENT_FILE).symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_client_keys(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"secret" * 2000,
        b'{"server_public":"a","client_public":"b","client_secret":"secret"}',
        b"\xff",
    ],
)
def test_a_file_with_something_else_is_refused_and_not_shown(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / CLIENT_FILE
    path.touch(mode=0o600)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="does not hold the keys") as refused:
        read_client_keys(tmp_path)
    assert "secret" not in str(refused.value).replace(str(path), "")
