"""What must outlive a server and its machine's power, with `durability=disk`.

A folder with one *snapshot* (the states of all shards of the server) and the *log* of what was closed and applied
since. When the log has grown, both are begun anew under the next number; the old pair goes when the new snapshot is
whole on the disk. Both are files of records:

    8 bytes   SHJOURN1
    u64       bytes of the head
    u64       bytes of head and buffers, each filled up to a multiple of 64
    u64       XXH3-64 of these
    and zeros up to 64; then the head (msgpack) and the buffers (raw)

Numbers are little-endian. A record that is torn ends the log: it was not told to anybody. Nothing is pickled; files are
mapped, not read, so no number in them can make a reader take memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash
from torch import Tensor

from shoal.core.errors import RunDirError
from shoal.data.parcel import seal, sizes, unseal
from shoal.syncs.server.messages import MOST_KEPT, Apply, Record
from shoal.syncs.server.shard import Holding

GROWN = 4
"""Times the snapshot's size that a log may have before it should be compacted."""

_MAGIC = b"SHJOURN1"
_HEAD = struct.Struct("<8sQQQ")
_ALIGNMENT = 64
_SNAPSHOT = re.compile(r"snapshot-(\d{1,18})")
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


class Closing(NamedTuple):
    """A shard's part of a step (of one lease, with `apply=arrival`); `total` is the sum, or the gradient, as bytes."""

    shard: int
    record: Record
    total: Tensor


class Replayed(NamedTuple):
    """What a journal holds. Tensors lie in the mapped files: they are read from the disk when they are used."""

    states: dict[int, dict[str, Any]]
    closed: list[Closing]
    orders: list[Apply]
    entries: list[Closing | Apply]
    """Both again, in the order in which they were written."""


class _State(msgspec.Struct, tag=True, array_like=True):
    shards: list[int]
    header: bytes


class _Closed(msgspec.Struct, tag=True, array_like=True):
    parts: list[tuple[int, Record, int]]
    """Shard, record and bytes."""


class _Applied(msgspec.Struct, tag=True, array_like=True):
    order: Apply


_decoder = msgspec.msgpack.Decoder(_State | _Closed | _Applied)


class Journal:
    """The journal of one server, held by one process at a time. Call `begin`, or `replay`, before anything is added.

    Raises `RunDirError` if another process holds it, or if the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = -1
        self._number = 0
        self._size = self._snapshot = 0
        with _told(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", _FLAGS, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise RunDirError(f"{folder} is in use by another server; wait until that one has ended") from None

    def begin(self, states: Mapping[int, dict[str, Any]]) -> None:
        """Begin with these states of shards (`Holding.state`); what was there before goes."""
        numbers = self._numbers()
        number = max([self._number, *numbers]) + 1
        shards = sorted(states)
        header, buffers = seal([states[shard] for shard in shards])
        writing = self._folder / "writing"
        with _told(self._folder):
            file = os.open(writing, _FLAGS | os.O_TRUNC, 0o600)
            try:
                size = _write(file, 0, msgspec.msgpack.encode(_State(shards, header)), buffers)
                os.fsync(file)
            finally:
                os.close(file)
            log = os.open(self._folder / f"log-{number}", _FLAGS | os.O_TRUNC, 0o600)
            self._continue(log, number, size, 0)
            os.replace(writing, self._folder / f"snapshot-{number}")
            _sync(self._folder)
            for old in numbers:
                self._remove(old)

    def closed(self, step: int, parts: Sequence[tuple[int, Record, Tensor]]) -> None:
        """These shards have their sums of the step. On the disk when this returns."""
        for shard, record, _ in parts:
            if record.step != step:
                raise ValueError(f"a record of step {record.step} of shard {shard} is not of step {step}")
        head = _Closed([(shard, record, total.numel()) for shard, record, total in parts])
        self._append(head, [_bytes(total) for _, _, total in parts])

    def applied(self, order: Apply) -> None:
        """The step is applied on all shards here. On the disk when this returns."""
        self._append(_Applied(order), [])

    @property
    def grown(self) -> bool:
        """Whether it is time to `compact`."""
        return self._size > GROWN * self._snapshot

    def compact(self, states: Mapping[int, dict[str, Any]]) -> None:
        """These states have all that was added so far: begin anew with them."""
        self.begin(states)

    def replay(self) -> Replayed | None:
        """What was written; None if there is no whole snapshot. What is added from now on follows it."""
        for number in sorted(self._numbers(), reverse=True):
            with _told(self._folder):
                whole = next(_read(self._folder / f"snapshot-{number}"), None)
                if whole is None or not isinstance(whole.head, _State):
                    continue
                states = _states(whole.head, whole.body)
                if states is None:
                    continue
                path = self._folder / f"log-{number}"
                entries, size = _entries(path)
                log = os.open(path, _FLAGS, 0o600)
                self._continue(log, number, whole.end, size)
                os.ftruncate(log, size)  # a torn record must not stand before a whole one
                os.fsync(log)
            closed = [entry for entry in entries if isinstance(entry, Closing)]
            return Replayed(states, closed, [entry for entry in entries if isinstance(entry, Apply)], entries)
        return None

    def close(self) -> None:
        for file in (self._log, self._lock):
            if file >= 0:
                os.close(file)
        self._log = self._lock = -1

    def _append(self, head: _Closed | _Applied, buffers: Sequence[memoryview]) -> None:
        if self._log < 0:
            raise ValueError("nothing can be added to a journal before begin() or replay()")
        with _told(self._folder):
            try:
                end = _write(self._log, self._size, msgspec.msgpack.encode(head), buffers)
                os.fdatasync(self._log)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._log, self._size)
                raise
        self._size = end

    def _continue(self, log: int, number: int, snapshot: int, size: int) -> None:
        if self._log >= 0:
            os.close(self._log)
        self._log, self._number, self._snapshot, self._size = log, number, snapshot, size

    def _numbers(self) -> list[int]:
        with _told(self._folder):
            found = [_SNAPSHOT.fullmatch(path.name) for path in self._folder.iterdir()]
        return [int(match[1]) for match in found if match]

    def _remove(self, number: int) -> None:
        for kind in ("snapshot", "log"):
            (self._folder / f"{kind}-{number}").unlink(missing_ok=True)


def recover(replayed: Replayed, holdings: Mapping[int, Holding]) -> None:
    """Bring the holdings to where the journal ends. Of the versions that were kept, they keep the last ones again.

    For `apply=step` and `apply=arrival` alike. What is closed and not applied is closed again.
    """
    for shard, state in replayed.states.items():
        holdings[shard].load(state)
    for entry in replayed.entries:
        if isinstance(entry, Closing):
            holdings[entry.shard].restore(entry.record, entry.total)
            continue
        for holding in holdings.values():
            holding.apply(entry)
            # that others were let go is not in the journal
            holding.let_go_but(MOST_KEPT)


class _Whole(NamedTuple):
    head: _State | _Closed | _Applied
    body: memoryview
    """What follows the head."""
    end: int
    """Where the next record begins."""


def _entries(path: Path) -> tuple[list[Closing | Apply], int]:
    """What the log has, and where its last whole record ends."""
    entries: list[Closing | Apply] = []
    size = 0
    for whole in _read(path):
        if isinstance(whole.head, _Applied):
            entries.append(whole.head.order)
        elif isinstance(whole.head, _Closed):
            buffers = _buffers(whole.body, [count for _, _, count in whole.head.parts])
            if buffers is None:
                break
            for (shard, record, _), buffer in zip(whole.head.parts, buffers, strict=True):
                entries.append(Closing(shard, record, torch.frombuffer(buffer, dtype=torch.uint8)))
        else:
            break
        size = whole.end
    return entries, size


def _states(head: _State, body: memoryview) -> dict[int, dict[str, Any]] | None:
    try:
        buffers = _buffers(body, sizes(head.header))
        return None if buffers is None else dict(zip(head.shards, unseal(head.header, buffers), strict=True))
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError, IndexError):
        return None


def _buffers(body: memoryview, counts: Sequence[int]) -> list[memoryview] | None:
    """The body's buffers; None if they are not exactly these."""
    if any(count < 0 for count in counts) or sum(map(_filled, counts)) != len(body):
        return None
    buffers, at = [], 0
    for count in counts:
        buffers.append(body[at : at + count])
        at += _filled(count)
    return buffers


def _read(path: Path) -> Iterator[_Whole]:
    """The whole records of a file, up to the first that is not."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        size = os.fstat(file).st_size
        if not size:
            return
        # private: who is given a tensor in it may write there, and the file stays as it is
        content = memoryview(mmap.mmap(file, size, access=mmap.ACCESS_COPY))
    finally:
        os.close(file)
    at = 0
    while at + _ALIGNMENT <= size:
        magic, head, length, check = _HEAD.unpack_from(content, at)
        start = at + _ALIGNMENT
        if magic != _MAGIC or length > size - start or _filled(head) > length:
            return
        whole = content[start : start + length]
        if xxhash.xxh3_64_intdigest(whole) != check:
            return
        try:
            told = _decoder.decode(whole[:head])
        except msgspec.MsgspecError:
            return
        at = start + length
        yield _Whole(told, whole[_filled(head) :], at)


def _write(file: int, at: int, head: bytes, buffers: Sequence[memoryview]) -> int:
    """Write a record there; where it ends. A part at a time: nothing is copied."""
    parts: list[bytes | memoryview] = []
    for buffer in (memoryview(head), *buffers):
        parts += [buffer, bytes(_filled(len(buffer)) - len(buffer))]
    check = xxhash.xxh3_64()
    for part in parts:
        check.update(part)
    length = sum(map(len, parts))
    first = _HEAD.pack(_MAGIC, len(head), length, check.intdigest()).ljust(_ALIGNMENT, b"\0")
    for part in (first, *parts):
        view = memoryview(part)
        while view:
            count = os.pwrite(file, view, at)
            view, at = view[count:], at + count
    return at


def _bytes(memory: Tensor) -> memoryview:
    array: Any = memory.detach().contiguous().view(torch.uint8).numpy()
    return memoryview(array)


def _filled(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _sync(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextlib.contextmanager
def _told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunDirError(
            f"the journal in {folder} cannot be used: {error.strerror}; free space, or check it"
        ) from None
