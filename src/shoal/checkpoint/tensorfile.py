"""One file of named tensors in the safetensors format, written from live memory and read with its checksum checked.

The format: the header's length (8 bytes, little endian), the header (JSON, padded with blanks), then the raw bytes of
all tensors without gaps. It is written here and not by the safetensors library so that the bytes go from a tensor's
own memory to the file in one pass, are hashed while they are in the cache, and the interpreter lock is free meanwhile.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
import xxhash
from torch import Tensor

from shoal.core.errors import CorruptCheckpoint

CHUNK_BYTES = 1 << 20
"""What is hashed and written, or read and hashed, at a time: fits the second-level cache of common processors."""

MAX_HEADER_BYTES = 100_000_000
"""The limit that the safetensors library has as well."""

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class Unstorable(TypeError):
    """A tensor whose bytes the format cannot hold."""


@dataclass(frozen=True)
class Plan:
    """What a file will hold: its first bytes, then the tensors of these names in this order."""

    header: bytes
    order: tuple[str, ...]
    size: int


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def refuse_unstorable(tensor: Tensor) -> None:
    """Raise `Unstorable`, saying why, if the format cannot hold `tensor`."""
    if tensor.layout != torch.strided:
        raise Unstorable(f"a tensor of layout {tensor.layout}; only strided (dense) tensors can be stored")
    if tensor.dtype not in DTYPE_NAMES:
        raise Unstorable(f"a tensor of {tensor.dtype}; one of {', '.join(map(str, DTYPE_NAMES))} can be stored")
    if tensor.numel() and tensor.data_ptr() == 0:
        raise Unstorable(f"a {type(tensor).__name__} on {tensor.device} without memory of its own; store its values")


def plan(tensors: Mapping[str, Tensor]) -> Plan:
    """Lay out a file for these tensors. Wider elements come first, which keeps each tensor aligned in the file."""
    order = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = _Entry(DTYPE_NAMES[tensor.dtype], list(tensor.shape), (begin, end))
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    if len(encoded) > MAX_HEADER_BYTES:
        raise Unstorable(f"{len(tensors)} tensors, a header of {len(encoded)} bytes; the limit is {MAX_HEADER_BYTES}")
    return Plan(len(encoded).to_bytes(8, "little") + encoded, tuple(order), 8 + len(encoded) + end)


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of `tensor`, as the format wants them: its own memory if it is contiguous and on the CPU, or a copy."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


class ChecksummedFile:
    """A new file that is hashed as it is written. Used by one thread; errors of the system come out as `OSError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._hash = xxhash.xxh3_128()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`. The interpreter lock is free while it is hashed and written."""
        self._hash.update(data)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        self.size += len(data)

    def sync(self) -> None:
        """Return when the bytes are on the disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def checksum(self) -> str:
        """xxh3_128 of everything written so far, in hexadecimal."""
        return self._hash.hexdigest()


def read_tensors(path: Path, *, size: int, checksum: str) -> dict[str, Tensor]:
    """The tensors of a file, each in memory of its own, if the file has this size and checksum.

    Raises `CorruptCheckpoint` naming the file and what is wrong. Nothing is allocated beyond the size of the file.
    """
    try:
        with path.open("rb", buffering=0) as file:
            return _Reader(path, file, size).read(checksum)
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{path} is missing") from None
    except OSError as error:
        raise CorruptCheckpoint(f"{path} cannot be read: {error.strerror}") from error


class _Reader:
    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path = path
        self._file = file
        self._size = size
        self._hash = xxhash.xxh3_128()

    def read(self, checksum: str) -> dict[str, Tensor]:
        found = os.fstat(self._file.fileno()).st_size
        if found != self._size:
            raise self._corrupt(f"it has {found} bytes, and the manifest says {self._size}")
        tensors = {name: self._tensor(entry) for name, entry in self._header()}
        if self._hash.hexdigest() != checksum:
            raise self._corrupt(f"its checksum is {self._hash.hexdigest()}, and the manifest says {checksum}")
        return tensors

    def _header(self) -> list[tuple[str, _Entry]]:
        """The entries in the order of their bytes, which are sure to fill the rest of the file exactly."""
        if self._size < 8:
            raise self._corrupt(f"it has {self._size} bytes, too few for a header")
        length = int.from_bytes(self._take(8), "little")
        if length > min(self._size - 8, MAX_HEADER_BYTES):
            raise self._corrupt(f"its header claims {length} bytes")
        try:
            raw = msgspec.json.decode(self._take(length), type=dict[str, msgspec.Raw])
            raw.pop("__metadata__", None)
            entries = [(name, msgspec.json.decode(entry, type=_Entry)) for name, entry in raw.items()]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._corrupt(f"its header cannot be read ({error})") from error
        entries.sort(key=lambda named: named[1].data_offsets)
        self._check_extent(entries, self._size - 8 - length)
        return entries

    def _check_extent(self, entries: list[tuple[str, _Entry]], data_bytes: int) -> None:
        at = 0
        for name, entry in entries:
            begin, end = entry.data_offsets
            dtype = _DTYPES.get(entry.dtype)
            if dtype is None:
                raise self._corrupt(f"tensor {name!r} has the unknown type {entry.dtype!r}")
            if begin != at or min(entry.shape, default=1) < 0 or end - begin != math.prod(entry.shape) * dtype.itemsize:
                raise self._corrupt(f"tensor {name!r} of shape {entry.shape} cannot be bytes {begin} to {end}")
            at = end
        if at != data_bytes:
            raise self._corrupt(f"its tensors take {at} bytes, and {data_bytes} are there")

    def _tensor(self, entry: _Entry) -> Tensor:
        tensor = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
        self._fill(bytes_of(tensor))
        return tensor

    def _take(self, count: int) -> bytearray:
        data = bytearray(count)
        self._fill(memoryview(data))
        return data

    def _fill(self, target: memoryview) -> None:
        while target:
            count = self._file.readinto(target[:CHUNK_BYTES])  # type: ignore[attr-defined]
            if not count:
                raise self._corrupt("it ends too early")
            self._hash.update(target[:count])
            target = target[count:]

    def _corrupt(self, reason: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"{self._path} is corrupt: {reason}")
