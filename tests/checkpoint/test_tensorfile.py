"""The file of tensors: what the safetensors library reads is what was written, and what is wrong is found."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
import xxhash
from torch import Tensor

from shoal.checkpoint.tensorfile import (
    CHUNK_BYTES,
    DTYPE_NAMES,
    ChecksummedFile,
    Unstorable,
    bytes_of,
    plan,
    read_tensors,
    refuse_unstorable,
)
from shoal.core.errors import CorruptCheckpoint


def write(path: Path, tensors: dict[str, Tensor]) -> str:
    planned = plan(tensors)
    file = ChecksummedFile(path)
    file.write(planned.header)
    for name in planned.order:
        file.write(bytes_of(tensors[name]))
    file.close()
    assert file.size == planned.size == path.stat().st_size
    return file.checksum


def read(path: Path) -> dict[str, Tensor]:
    data = path.read_bytes()
    return read_tensors(path, size=len(data), checksum=xxhash.xxh3_128_hexdigest(data))


def bits(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tuple(tensor.shape), bytes(bytes_of(tensor))


def random_bits(dtype: torch.dtype, *shape: int) -> Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) > 0.5
    return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
def test_every_dtype_is_read_by_the_library_and_by_us(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"matrix": random_bits(dtype, 3, 5), "number": random_bits(dtype), "empty": random_bits(dtype, 0, 4)}
    write(tmp_path / "t.safetensors", tensors)
    expected = {name: bits(tensor) for name, tensor in tensors.items()}
    assert {name: bits(tensor) for name, tensor in read(tmp_path / "t.safetensors").items()} == expected
    theirs = safetensors.torch.load_file(tmp_path / "t.safetensors")
    assert {name: bits(tensor) for name, tensor in theirs.items()} == expected


def test_a_file_that_takes_few_bytes_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write_all(fd, data[:100]))
    tensor = random_bits(torch.float32, 1000)
    write(tmp_path / "t.safetensors", {"a": tensor})
    assert bits(read(tmp_path / "t.safetensors")["a"]) == bits(tensor)


def test_mixed_widths_are_aligned_and_large_tensors_come_in_chunks(tmp_path: Path) -> None:
    tensors = {
        "odd bytes": random_bits(torch.uint8, 7),
        "große Gewichte": random_bits(torch.float32, CHUNK_BYTES // 4 + 3),
        "double": random_bits(torch.float64, 3),
    }
    write(tmp_path / "t.safetensors", tensors)
    expected = {name: bits(tensor) for name, tensor in tensors.items()}
    assert {name: bits(tensor) for name, tensor in read(tmp_path / "t.safetensors").items()} == expected
    theirs = safetensors.torch.load_file(tmp_path / "t.safetensors")
    assert {name: bits(tensor) for name, tensor in theirs.items()} == expected
    data = (tmp_path / "t.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert all(header[name]["data_offsets"][0] % tensor.itemsize == 0 for name, tensor in tensors.items())
    with safetensors.safe_open(tmp_path / "t.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize(
    "view",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0)[1::3],
        torch.ones(1).expand(4),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch._neg_view(torch.arange(3.0)),
        torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "strided", "expanded", "conjugate", "negative", "channels last"],
)
def test_views_are_stored_as_their_values(tmp_path: Path, view: Tensor) -> None:
    write(tmp_path / "t.safetensors", {"view": view})
    assert read(tmp_path / "t.safetensors")["view"].equal(view)
    assert safetensors.torch.load_file(tmp_path / "t.safetensors")["view"].equal(view)


def test_contiguous_memory_is_not_copied() -> None:
    tensor = torch.zeros(4, dtype=torch.bfloat16)
    bytes_of(tensor)[1] = 0x3F
    assert tensor[0] == 0.5


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (torch.empty(2, device="meta"), "on meta"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(tensor: Tensor, reason: str) -> None:
    with pytest.raises(Unstorable, match=reason):
        refuse_unstorable(tensor)


def test_each_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    checksum = write(path, {"a": torch.arange(3.0), "b": torch.tensor(True)})
    sound = path.read_bytes()
    for bit in range(8 * len(sound)):
        data = bytearray(sound)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with pytest.raises(CorruptCheckpoint, match=r"t\.safetensors is corrupt"):
            read_tensors(path, size=len(sound), checksum=checksum)


def file_with_header(path: Path, header: object, data: bytes = bytes(8), *, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"", "header cannot be read"),
        (b"\xff\xfe", "header cannot be read"),
        ([1], "header cannot be read"),
        ({"a": 1}, "header cannot be read"),
        ({"a": entry([2], 0, 8, "F99")}, "unknown type 'F99'"),
        ({"a": entry([2], 0, 4)}, "cannot be bytes 0 to 4"),
        ({"a": entry([2**40], 0, 2**42)}, "its tensors take"),
        ({"a": entry([-2], 0, -8)}, "cannot be"),
        ({"a": entry([-1, -2], 0, 8)}, "cannot be"),
        ({"a": entry([1], 4, 8)}, "cannot be"),
        ({"a": entry([1], 0, 4), "b": entry([2], 0, 8)}, "cannot be"),
        ({"a": entry([1], 0, 4)}, "take 4 bytes, and 8 are there"),
        ({}, "take 0 bytes, and 8 are there"),
    ],
    ids=str,
)
def test_a_wrong_header_is_refused_before_anything_is_allocated(tmp_path: Path, header: object, reason: str) -> None:
    path = tmp_path / "t.safetensors"
    file_with_header(path, header)
    with pytest.raises(CorruptCheckpoint, match=reason):
        read(path)


def test_a_header_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    file_with_header(path, {}, length=2**62)
    with pytest.raises(CorruptCheckpoint, match="claims 4611686018427387904 bytes"):
        read(path)
    path.write_bytes(b"abc")
    with pytest.raises(CorruptCheckpoint, match="too few for a header"):
        read(path)


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"none\.safetensors is missing"):
        read_tensors(tmp_path / "none.safetensors", size=1, checksum="")
    with pytest.raises(CorruptCheckpoint, match="cannot be read: Is a directory"):
        read_tensors(tmp_path, size=1, checksum="")
