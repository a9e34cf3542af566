"""Reading checkpoints back, verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.checkpoint import folder as folders
from shoal.checkpoint.manifest import Manifest, file_of, read_manifest
from shoal.checkpoint.tensorfile import read_tensors
from shoal.core.errors import CheckpointError, CorruptCheckpoint
from shoal.data.tree import unpack


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory. Tensors are on the CPU; those that were one tensor when saved are one object again."""

    step: int
    trees: dict[str, Any]
    meta: dict[str, Any]
    path: Path


Progress = Callable[[float, float], None]


def load(path: Path, progress: Progress | None = None) -> Loaded:
    """The checkpoint in the folder `path`, every byte verified. `progress` is told bytes read and bytes in all.

    Raises `CorruptCheckpoint` naming the file and what is wrong with it, `CheckpointMismatch` if it is of another
    format, `CheckpointError` if it is not there.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint at {path}: it must be a folder such as step-000000012")
    return _load(read_manifest(path), progress)


def load_newest(folder: Path, warn: Callable[[str], None], progress: Progress | None = None) -> Loaded | None:
    """The newest sound checkpoint in `folder`; None if there is none at all.

    Newest means saved last, which after going back to an earlier step is not the one of the highest step. Whatever is
    found corrupt is reported through `warn` and the one before it is taken. Raises `CorruptCheckpoint` if there are
    checkpoints and none of them is sound: to start afresh then is not for a function to decide.
    """
    broken: list[str] = []

    def report(error: CorruptCheckpoint) -> None:
        broken.append(str(error))
        warn(f"a corrupt checkpoint is left aside, and the one before it is used: {error}")

    for manifest in folders.newest_first(Path(folder), report):
        try:
            return _load(manifest, progress)
        except CorruptCheckpoint as error:
            report(error)
    if broken:
        raise CorruptCheckpoint(
            f"none of the checkpoints in {folder} is sound: {'; '.join(broken)}. "
            "To start from the beginning, set resume=None and another run_dir, or remove that folder"
        )
    return None


def _load(manifest: Manifest, progress: Progress | None) -> Loaded:
    content = manifest.content
    total, done, trees = sum(file.size for file in content.files.values()), 0, {}
    for name in content.trees:
        if progress is not None:
            progress(done, total)
        trees[name] = _load_tree(manifest, name)
        done += content.files[file_of(name)].size if file_of(name) in content.files else 0
    return Loaded(content.step, trees, manifest.meta, manifest.path)


def _load_tree(manifest: Manifest, name: str) -> Any:
    entry = manifest.content.trees[name]
    stored = {}
    if entry.names:
        file = manifest.content.files[file_of(name)]
        stored = read_tensors(manifest.path / file_of(name), size=file.size, checksum=file.xxh3_128)
    try:
        return unpack(entry.structure, [stored[tensor] for tensor in entry.names])
    except (KeyError, ValueError, TypeError, IndexError, RecursionError) as error:
        raise CorruptCheckpoint(f"{manifest.path}: the tree {name!r} cannot be put together: {error}") from error
