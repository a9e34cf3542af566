"""The coordinator's journal: what was written is found again, whatever happened to the file's end."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from shoal.cluster.coordinator.journal import MOST_FILE, MOST_RECORD, Journal
from shoal.core.errors import RunDirError


def last(folder: Path) -> bytes | None:
    journal = Journal(folder)
    try:
        return journal.last()
    finally:
        journal.close()


def written(folder: Path, *records: bytes) -> None:
    journal = Journal(folder)
    for record in records:
        journal.write(record)
        assert journal.last() == record
    journal.close()


def test_the_last_record_is_found(tmp_path: Path) -> None:
    assert last(tmp_path) is None
    written(tmp_path, b"one", b"", b"three")
    assert last(tmp_path) == b"three"
    written(tmp_path, b"four")
    assert last(tmp_path) == b"four"
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o600


def test_a_torn_end_is_left_out(tmp_path: Path) -> None:
    written(tmp_path, b"first", b"second")
    whole = (tmp_path / "journal").read_bytes()
    for size in range(len(whole) - len(b"second") - 7, len(whole)):
        (tmp_path / "journal").write_bytes(whole[:size])
        assert last(tmp_path) == b"first"
    (tmp_path / "journal").write_bytes(whole[: len(whole) - 1])
    written(tmp_path, b"third")  # must not stand behind the torn one
    assert last(tmp_path) == b"third"


def test_changed_bytes_are_left_out(tmp_path: Path) -> None:
    written(tmp_path, b"first", b"second")
    content = bytearray((tmp_path / "journal").read_bytes())
    content[-1] ^= 1
    (tmp_path / "journal").write_bytes(content)
    assert last(tmp_path) == b"first"


def test_an_announced_length_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(struct.pack("<II", MOST_RECORD + 1, 0) + b"x" * 64)
    assert last(tmp_path) is None
    with pytest.raises(RunDirError, match="at most"):
        written(tmp_path, b"x" * (MOST_RECORD + 1))


def test_it_does_not_grow_without_end(tmp_path: Path) -> None:
    record = os.urandom(100_000)
    written(tmp_path, *(record + bytes([at]) for at in range(50)))
    assert (tmp_path / "journal").stat().st_size <= MOST_FILE
    assert last(tmp_path) == record + bytes([49])
    large = os.urandom(MOST_FILE + 1)  # larger than the file should be, but allowed
    written(tmp_path, large, large[::-1])
    assert last(tmp_path) == large[::-1]


def test_one_process_at_a_time(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(RunDirError, match="another coordinator"):
        Journal(tmp_path)
    journal.write(b"mine")
    journal.close()
    journal.close()
    assert last(tmp_path) == b"mine"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="cannot be opened"):
        Journal(tmp_path / "missing")
