"""What runs keep in a folder: reading what it says, holding it against a run, and removing it."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.core.errors import RunDirError

if TYPE_CHECKING:
    from shoal.store.values import RunInfo

_LOCK = ".lock"
_CHECKPOINTS = "checkpoints"
_LOGS = "logs"
# run.json comes late: as long as it is there, what is left can be removed by another try. The lock is the very last.
_SINGLE_FILES = ("report.html", ".report.html.new", "run.new", "run.json", _LOCK)
_CHECKPOINT = re.compile(r"step-\d{9,}")
_UNFINISHED = re.compile(r"\.(writing|replaced|removing)-(\.\w+-)*step-\d{9,}")
_NOTES = ("best.json", ".writing-best.json")
_LOG = re.compile(r"(?:worker|server)-\d{1,9}\.(out|err)")
_DYING_SECONDS = 1.0
"""How long the workers of a killed run may take to be gone: they hold its lock."""


@dataclass(frozen=True)
class RunFiles:
    """What of a folder belongs to a run."""

    folder: Path
    whole: bool
    """The folder was made for the run and goes with it."""
    paths: list[Path]
    """In the order in which they are removed."""

    def names(self) -> list[str]:
        """As they stand in the folder, each once."""
        return list(dict.fromkeys(path.relative_to(self.folder).parts[0] for path in self.paths))

    def bytes(self) -> int:
        return sum(map(_bytes_in, self.paths))


def read_about(folder: Path) -> dict[str, Any]:
    """What `run.json` in a run's folder says, or nothing if there is none that can be read."""
    import msgspec

    try:
        about = msgspec.json.decode((folder / "run.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}
    return about if isinstance(about, dict) else {}


def files_of_run(info: RunInfo) -> RunFiles | None:
    """The run's own files: the whole of a folder made for it, else only what runs write into a folder.

    None, if it is not the folder of this run (any more). Never checkpoints moved aside for an earlier run. Raises
    RunDirError if the folder cannot be read.
    """
    folder = Path(info.run_dir) if info.run_dir else None
    if folder is None or folder.is_symlink() or read_about(folder).get("run_id") != info.id:
        return None
    whole = folder.name == info.id
    try:
        paths = _everything(folder) if whole else _written_by_runs(folder)
    except OSError as error:
        raise RunDirError(f"{error.filename or folder} cannot be read ({error.strerror}); {info.id} stays") from None
    return RunFiles(folder, whole, paths)


def _everything(folder: Path) -> list[Path]:
    late = [folder / "run.json", folder / _LOCK]
    return [*sorted(path for path in folder.iterdir() if path not in late), *(path for path in late if path.exists())]


def _written_by_runs(folder: Path) -> list[Path]:
    return [
        *(path for path in _inside(folder / _CHECKPOINTS) if _is_of_checkpoints(path)),
        *(path for path in _inside(folder / _LOGS) if _LOG.fullmatch(path.name) and path.is_file()),
        *(folder / name for name in _SINGLE_FILES if (folder / name).is_file()),
    ]


def _inside(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []


def _is_of_checkpoints(path: Path) -> bool:
    """Whether a run has put it among its checkpoints, where a person may keep files too."""
    if path.is_symlink() or not path.is_dir():
        return path.name in _NOTES
    if _CHECKPOINT.fullmatch(path.name):
        return (path / "manifest.json").is_file()
    return _UNFINISHED.fullmatch(path.name) is not None


def _bytes_in(path: Path) -> int:
    """The sizes of the files in a folder, or of one file."""
    inside = path.rglob("*") if path.is_dir() and not path.is_symlink() else [path]
    return sum(file.lstat().st_size for file in inside if file.is_symlink() or file.is_file())


@contextmanager
def held(info: RunInfo) -> Iterator[None]:
    """Within: no run can take the folder of this one. Raises RunDirError if one has it already.

    A folder that is gone, or of another run by now, needs no holding.
    """
    folder = Path(info.run_dir) if info.run_dir else None
    if folder is None or read_about(folder).get("run_id") != info.id:
        yield
        return
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunDirError(
            f"{folder} cannot be written ({error.strerror}), so nothing of {info.id} was removed. Mend that first"
        ) from None
    try:
        _take(lock, info.id)
        yield
    finally:
        os.close(lock)


def _take(lock: int, run_id: str) -> None:
    from shoal.store.liveness import is_there

    deadline = time.monotonic() + _DYING_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
            if (holder.isdecimal() and is_there(int(holder))) or time.monotonic() > deadline:
                raise RunDirError(
                    f"{run_id} is in use by process {holder or 'unknown'}: it is being run or resumed. Nothing was "
                    "removed; stop it first"
                ) from None
        time.sleep(0.02)
    # a run that comes now sees that somebody living holds the folder, and does not wait
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)


def remove_files(run_id: str, files: RunFiles) -> None:
    """Remove what belongs to a run, and folders of which nothing is left. Raises RunDirError, with what is left."""
    try:
        for path in files.paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        if files.whole:
            files.folder.rmdir()
        else:
            _remove_if_empty(files.folder / _CHECKPOINTS, files.folder / _LOGS, files.folder)
    except OSError as error:
        left = RunFiles(files.folder, files.whole, [path for path in files.paths if path.exists()]).names()
        raise RunDirError(
            f"{error.filename or files.folder} cannot be removed ({error.strerror}); {run_id} stays in the store. "
            f"Of its files these are left in {files.folder}: {', '.join(left) or 'none'}. "
            "Mend that and try again, or use --keep-folder"
        ) from None


def _remove_if_empty(*folders: Path) -> None:
    for folder in folders:
        # what is not empty holds files of somebody else
        with suppress(OSError):
            folder.rmdir()
