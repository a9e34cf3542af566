"""What must outlive the coordinator's process, on disk.

A file of records, appended one by one; only the last whole one counts:

    u32  length of the record, at most 4 MiB
    u32  its CRC-32
    the record

Numbers are little-endian. It is not forced to the disk: it must survive the process, not the machine, with which the
run's other processes end too.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from pathlib import Path

from shoal.core.errors import RunDirError

MOST_RECORD = 4 << 20
MOST_FILE = 1 << 20
"""Bytes beyond which the file is begun anew with the last record."""

_HEAD = struct.Struct("<II")
_MOST_READ = MOST_FILE + MOST_RECORD + _HEAD.size
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


class Journal:
    """The journal of one run, held by one process at a time.

    Raises `RunDirError` if another process holds it, or if the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "journal"
        self._lock = _opened(folder / "journal.lock", _FLAGS)
        self._file = -1
        try:
            self._take_lock()
            self._file = _opened(self._path, _FLAGS)
            self._last, self._size = _scan(self._file)
            os.ftruncate(self._file, self._size)  # a torn record must not stand before a whole one
        except BaseException:
            self.close()
            raise

    def last(self) -> bytes | None:
        """The record that was written last; None if there is none."""
        return self._last

    def write(self, record: bytes) -> None:
        """Once this returns, a later `Journal` of the folder finds the record, whatever becomes of this process."""
        if len(record) > MOST_RECORD:
            raise RunDirError(f"a record of {len(record)} bytes for {self._path}; at most {MOST_RECORD} are allowed")
        frame = _HEAD.pack(len(record), zlib.crc32(record)) + record
        try:
            if self._size + len(frame) > MOST_FILE:
                self._begin_anew(frame)
            else:
                _write_at(self._file, frame, self._size)
        except OSError as error:
            raise RunDirError(f"{self._path} cannot be written: {error.strerror}") from None
        self._size += len(frame)
        self._last = record

    def close(self) -> None:
        for descriptor in (self._file, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._lock = -1

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirError(
                f"{self._path} is in use by another coordinator; a run has one at a time: wait until it has ended"
            ) from None

    def _begin_anew(self, frame: bytes) -> None:
        fresh = self._path.with_suffix(".new")
        descriptor = _opened(fresh, _FLAGS | os.O_TRUNC)
        try:
            _write_at(descriptor, frame, 0)
            os.replace(fresh, self._path)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(self._file)
        self._file, self._size = descriptor, 0


def _opened(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        raise RunDirError(f"{path} cannot be opened: {error.strerror}") from None


def _write_at(descriptor: int, frame: bytes, offset: int) -> None:
    view = memoryview(frame)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def _scan(descriptor: int) -> tuple[bytes | None, int]:
    """The last whole record, and where it ends. What follows it is torn."""
    content = os.pread(descriptor, _MOST_READ, 0)
    last, end = None, 0
    while end + _HEAD.size <= len(content):
        length, check = _HEAD.unpack_from(content, end)
        record = content[end + _HEAD.size : end + _HEAD.size + length]
        if length > MOST_RECORD or len(record) < length or zlib.crc32(record) != check:
            break
        last, end = record, end + _HEAD.size + length
    return last, end
