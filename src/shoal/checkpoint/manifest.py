"""The manifest: what a checkpoint consists of, under its own checksum.

`manifest.json` is `{"xxh3_128":"<hex>","content":{...}}`; the checksum is that of the bytes of `content` as they stand.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from shoal.core.errors import CheckpointMismatch, CorruptCheckpoint
from shoal.data.tree import unpack

NAME = "manifest.json"
FORMAT = 1
MAX_BYTES = 1 << 30

_HEAD = b'{"xxh3_128":"%s","content":'
_HEAD_BYTES = len(_HEAD % (b"0" * 32))
_TAIL = b"}\n"
_TREE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


class FileEntry(msgspec.Struct, frozen=True):
    """A file of a checkpoint, as it must be."""

    size: int
    xxh3_128: str


class TreeEntry(msgspec.Struct, frozen=True):
    """A tree, taken apart: `names[i]` is the name, in the tree's file, of tensor i of the structure."""

    structure: Any
    names: list[str]


class Content(msgspec.Struct, frozen=True):
    """What the file says. `serial` counts the saves into a folder: the newest has the highest."""

    format: int
    step: int
    serial: int
    meta: Any
    trees: dict[str, TreeEntry]
    files: dict[str, FileEntry]


class _Version(msgspec.Struct):
    format: int


class Manifest(msgspec.Struct, frozen=True):
    """A verified manifest. `bytes` is the size of all files on disk."""

    path: Path
    step: int
    meta: dict[str, Any]
    bytes: int
    content: Content


def is_tree_name(name: str) -> bool:
    """Whether `name` can be the name of a tree, and so of a file."""
    return _TREE_NAME.fullmatch(name) is not None


def file_of(tree: str) -> str:
    """The name of the file that holds the tensors of a tree."""
    return f"{tree}.safetensors"


def encode(content: Content) -> bytes:
    """The bytes of `manifest.json`."""
    body = msgspec.json.encode(content)
    return _HEAD % xxhash.xxh3_128_hexdigest(body).encode() + body + _TAIL


def read_manifest(checkpoint: Path) -> Manifest:
    """What a checkpoint is, without its tensors: a few kilobytes are read.

    Raises `CorruptCheckpoint` if the manifest is missing, torn or changed, `CheckpointMismatch` if it is of another
    format.
    """
    path = Path(checkpoint) / NAME
    body = _checked_body(path, _read(path))
    try:
        version = msgspec.json.decode(body, type=_Version).format
        if version != FORMAT:
            raise CheckpointMismatch(
                f"{path} is of format {version}, and this version of shoal reads format {FORMAT}: "
                "load it with the version of shoal that wrote it, or a newer one"
            )
        content = msgspec.json.decode(body, type=Content)
        meta = unpack(content.meta, [])
    except (msgspec.DecodeError, ValueError, TypeError, IndexError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path} is corrupt: {error}") from error
    _refuse_strange_names(path, content)
    size = sum(entry.size for entry in content.files.values()) + _HEAD_BYTES + len(body) + len(_TAIL)
    return Manifest(Path(checkpoint), content.step, meta, size, content)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_BYTES:
                raise CorruptCheckpoint(f"{path} is corrupt: it has {size} bytes, and {MAX_BYTES} is the limit")
            return file.read(size)
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{path} is missing") from None
    except OSError as error:
        raise CorruptCheckpoint(f"{path} cannot be read: {error.strerror}") from error


def _checked_body(path: Path, data: bytes) -> bytes:
    body = data[_HEAD_BYTES : -len(_TAIL)]
    if data != _HEAD % xxhash.xxh3_128_hexdigest(body).encode() + body + _TAIL:
        raise CorruptCheckpoint(f"{path} is corrupt: its {len(data)} bytes do not match the checksum they begin with")
    return body


def _refuse_strange_names(path: Path, content: Content) -> None:
    for name, tree in content.trees.items():
        if not is_tree_name(name) or (tree.names and file_of(name) not in content.files):
            raise CorruptCheckpoint(f"{path} is corrupt: it names no file for its tree {name!r}")
