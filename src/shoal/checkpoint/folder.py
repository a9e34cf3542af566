"""The folder of a run's checkpoints: names, order, and the operations that a kill at any moment must not tear.

step-000000012/             a complete checkpoint; it only ever appears by a rename
best.json                   names the best one
.writing-step-000000012/    being written; removed by the next writer if its own was killed
.replaced-step-000000012/   the former one of the same step, for the moment in which the new one takes its place
.removing-step-000000012/   being deleted
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from shoal.checkpoint.manifest import Manifest, read_manifest
from shoal.core.errors import CorruptCheckpoint

_STEP = re.compile(r"step-\d{9,}")
_WRITING = ".writing-"
_REPLACED = ".replaced-"
_REMOVING = ".removing-"
_BEST = "best.json"


class _Best(msgspec.Struct):
    checkpoint: str


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step belongs."""
    return folder / f"step-{step:09d}"


def make_writing_folder(final: Path) -> Path:
    """A new, empty folder beside `final`."""
    writing = _beside(final, _WRITING)
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir()
    return writing


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints, by step. One that was being replaced when its writer was killed counts."""
    try:
        names = {entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)}
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = {name: folder / name for name in names if _STEP.fullmatch(name)}
    for name in names:
        original = name.removeprefix(_REPLACED)
        if name.startswith(_REPLACED) and _STEP.fullmatch(original):
            found.setdefault(original, folder / name)
    return [found[name] for name in sorted(found, key=lambda name: int(name.removeprefix("step-")))]


def newest_first(folder: Path, report: Callable[[CorruptCheckpoint], None]) -> list[Manifest]:
    """The manifests in the folder, the one saved last first. Those that cannot be read are reported and left out."""
    manifests = []
    for path in reversed(complete(folder)):
        try:
            manifests.append(read_manifest(path))
        except CorruptCheckpoint as error:
            report(error)
    return sorted(manifests, key=lambda manifest: -manifest.content.serial)


def publish(writing: Path, final: Path) -> list[Path]:
    """Give a finished folder its name. At any moment either the former one or the new one of that name is found.

    Returns where the former one is now, if there was one, for the caller to `remove`.
    """
    sync_folder(writing)
    replaced = [_beside(final, _REPLACED)] if final.exists() else []
    for aside in replaced:
        remove(aside)
        final.rename(aside)
    try:
        writing.rename(final)
    except OSError:
        for aside in replaced:
            aside.rename(final)
        raise
    sync_folder(final.parent)
    return replaced


class Shelf:
    """What the one writer of a folder knows about it: the complete checkpoints, the one saved last at the end."""

    def __init__(self, folder: Path) -> None:
        """Make the folder if it is not there, clean up after a writer that was killed, and look what there is."""
        folder.mkdir(parents=True, exist_ok=True)
        _recover(folder)
        manifests = newest_first(folder, lambda _: None)
        self._paths = [manifest.path for manifest in reversed(manifests)]
        self._corrupt = [path for path in complete(folder) if path not in self._paths]
        self.next_serial = 1 + max((manifest.content.serial for manifest in manifests), default=0)

    def add(self, path: Path) -> None:
        """`path` is complete, and the newest."""
        self._corrupt = [other for other in self._corrupt if other != path]
        self._paths = [*(other for other in self._paths if other != path), path]
        self.next_serial += 1

    def take_surplus(self, keep: int, best: Path | None) -> list[Path]:
        """Forget and return all but the last `keep` and the best. Corrupt ones count as the oldest."""
        everything = self._corrupt + self._paths
        surplus = [path for path in everything[:-keep] if path != best]
        self._corrupt = [path for path in self._corrupt if path not in surplus]
        self._paths = [path for path in self._paths if path not in surplus]
        return surplus


def _recover(folder: Path) -> None:
    """Clean up after a writer that was killed: finish or undo what its leftovers tell of."""
    for entry in list(folder.iterdir()):
        if entry.name.startswith(_REPLACED):
            original = folder / entry.name.removeprefix(_REPLACED)
            if not original.exists():
                entry.rename(original)
        if entry.name.startswith((_WRITING, _REPLACED, _REMOVING)):
            _delete(entry)


def remove(path: Path) -> None:
    """Delete a checkpoint, if it is there. Under its name it is whole or gone, never half deleted."""
    removing = _beside(path, _REMOVING)
    shutil.rmtree(removing, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        path.rename(removing)
        shutil.rmtree(removing)


def write_best(checkpoint: Path) -> None:
    """Note `checkpoint` as the best one of its folder."""
    folder = checkpoint.parent
    writing = folder / f"{_WRITING}{_BEST}"
    with writing.open("wb") as file:
        file.write(msgspec.json.encode(_Best(checkpoint.name)))
        file.flush()
        os.fsync(file.fileno())
    writing.rename(folder / _BEST)
    sync_folder(folder)


def read_best(folder: Path) -> Path | None:
    """The best checkpoint, if one was noted and is there. Raises `CorruptCheckpoint` if the note cannot be read."""
    note = folder / _BEST
    try:
        name = msgspec.json.decode(note.read_bytes(), type=_Best).checkpoint
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptCheckpoint(f"{note} cannot be read: {error}") from error
    return next((path for path in complete(folder) if path.name.removeprefix(_REPLACED) == name), None)


def sync_folder(folder: Path) -> None:
    """Return when the names in the folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def free_bytes(folder: Path) -> int | None:
    """Bytes that may still be written there; None where the system does not say."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    with contextlib.suppress(OSError):
        stat = os.statvfs(existing)
        if stat.f_blocks:
            return stat.f_bavail * stat.f_frsize
    return None


def _beside(path: Path, prefix: str) -> Path:
    return path.with_name(prefix + path.name)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
