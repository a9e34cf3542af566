"""What runs keep in a folder: reading what it says, and removing it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.core.errors import RunDirError

if TYPE_CHECKING:
    from shoal.store.values import RunInfo

_WRITTEN_BY_RUNS = ("checkpoints", "logs", "report.html", "run.json", "run.new", ".lock")


def read_about(folder: Path) -> dict[str, Any]:
    """What `run.json` in a run's folder says, or nothing if there is none that can be read."""
    import msgspec

    try:
        about = msgspec.json.decode((folder / "run.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}
    return about if isinstance(about, dict) else {}


def files_of_run(info: RunInfo) -> list[Path]:
    """The run's own files: the whole of a folder made for it, else only what runs write into a folder.

    Nothing, if it is not the folder of this run (any more), and never checkpoints moved aside for an earlier run.
    """
    folder = Path(info.run_dir) if info.run_dir else None
    if folder is None or folder.is_symlink() or read_about(folder).get("run_id") != info.id:
        return []
    if folder.name == info.id:
        return [folder]
    return [folder / name for name in _WRITTEN_BY_RUNS if (folder / name).exists()]


def bytes_in(path: Path) -> int:
    """The sizes of the files in a folder, or of one file."""
    inside = path.rglob("*") if path.is_dir() and not path.is_symlink() else [path]
    return sum(file.lstat().st_size for file in inside if file.is_symlink() or file.is_file())


def remove_files(run_id: str, files: Sequence[Path]) -> None:
    """Remove files and folders of a run, and the folder they were in if nothing is left. Raises RunDirError."""
    try:
        for path in files:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        if files and files[0].name != run_id and not any(files[0].parent.iterdir()):
            files[0].parent.rmdir()
    except OSError as error:
        raise RunDirError(
            f"{error.filename or files[0]} cannot be removed ({error.strerror}); {run_id} stays in the store. "
            "Mend that and try again, or use --keep-folder"
        ) from None
