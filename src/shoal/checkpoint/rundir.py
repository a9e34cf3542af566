"""A run's folder: made, locked against a second run, found again to resume."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from shoal.checkpoint.lineage import Choice, Known, Lineage, choose, read_lineage
from shoal.core.errors import CheckpointError, ConfigError, RunDirError
from shoal.store.home import shoal_home
from shoal.store.liveness import is_there

if TYPE_CHECKING:
    from shoal.checkpoint import Loaded

Progress = Callable[[float, float], None]
"""Told how many bytes have been read, and of how many."""

_ABOUT = "run.json"
_CHECKPOINTS = "checkpoints"
_EARLIER = "earlier"
_DYING_SECONDS = 5.0
"""How long the workers of a killed run may take to be gone."""


def runs_root() -> Path:
    """Where runs live that were given no folder."""
    return shoal_home() / "runs"


def default_name() -> str:
    """The name of the script that runs."""
    stem = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] not in ("", "-", "-c", "-m") else ""
    return stem or "run"


def new_run_id(name: str) -> str:
    word = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
    return f"{word}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


class RunDir:
    """The folder of one run, locked by this process until `close`."""

    def __init__(self, path: Path, run_id: str, *, keep_checkpoints: bool) -> None:
        """Make or take the folder. Checkpoints of an earlier run in it are moved aside unless they are resumed."""
        self.path = path
        self.run_id = run_id
        self._made: list[Path] = []
        self._new: list[Path] = []
        self._aside: tuple[Path, bytes] | None = None
        self._former = b""
        self._lock = -1
        try:
            self._made = [folder for folder in (path, *path.parents) if not folder.exists()]
            path.mkdir(parents=True, exist_ok=True)
            self._new = [file for file in (path / ".lock", path / _ABOUT) if not file.exists()]
            self._lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._take_lock()
            if not keep_checkpoints:
                self._move_aside()
        except OSError as error:
            self.close()
            raise RunDirError(
                f"run_dir={str(path)!r} cannot be written ({error.strerror}); give run_dir= a folder that you "
                "may write to, or set SHOAL_HOME to one for all runs"
            ) from None

    def _take_lock(self) -> None:
        deadline = time.monotonic() + _DYING_SECONDS
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
                # workers share the lock: those of a run that was killed hold it for the moment in which they die
                if (holder.isdecimal() and is_there(int(holder))) or time.monotonic() > deadline:
                    self._refuse(holder)
                time.sleep(0.02)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    def _refuse(self, holder: str) -> NoReturn:
        self._made, self._new = [], []
        self.close()
        raise RunDirError(
            f"run_dir={str(self.path)!r} is in use by another run (process {holder}); wait for it, or give "
            "this run its own folder"
        ) from None

    def _move_aside(self) -> None:
        old = self.path / _CHECKPOINTS
        if old.is_dir() and any(old.iterdir()):
            about = read_about(self.path)
            place = self.path / _EARLIER / str(about.get("run_id") or new_run_id("run"))
            place.parent.mkdir(exist_ok=True)
            while place.exists():
                place = place.with_name(place.name + "x")
            old.rename(place)
            self._aside = place, (self.path / _ABOUT).read_bytes() if about else b""

    def _move_back(self, place: Path, about: bytes) -> None:
        """This run has left nothing: what was here before it is to be found again."""
        shutil.rmtree(self.path / _CHECKPOINTS, ignore_errors=True)
        with suppress(OSError):
            place.rename(self.path / _CHECKPOINTS)
            place.parent.rmdir()
        if about:
            with suppress(OSError):
                (self.path / _ABOUT).write_bytes(about)

    def write_about(self, about: dict[str, Any]) -> None:
        """What this run is, for people and for finding it again."""
        target = self.path / _ABOUT
        try:
            self._former = target.read_bytes() if target.exists() else b""
            temporary = target.with_suffix(".new")
            temporary.write_bytes(msgspec.json.format(msgspec.json.encode(about), indent=2))
            temporary.rename(target)
        except OSError as error:
            raise RunDirError(f"{target} cannot be written ({error.strerror}); make room, or set run_dir=") from None

    def take_back_about(self) -> None:
        """What was to go on here was refused: the folder says again what it said before."""
        if self._former:
            with suppress(OSError):
                (self.path / _ABOUT).write_bytes(self._former)

    def has_checkpoints(self) -> bool:
        return _has_checkpoints(self.path)

    def close(self, *, keep: bool = False) -> None:
        """Let go of the folder. Unless it is to be kept or has a checkpoint, it is again as it was before."""
        keep = keep or self.has_checkpoints()
        if self._made and not keep:
            shutil.rmtree(self.path, ignore_errors=True)
            for folder in self._made:
                with suppress(OSError):
                    folder.rmdir()
        if not keep:
            for file in self._new:
                file.unlink(missing_ok=True)
        if self._aside is not None and not self.has_checkpoints():
            self._move_back(*self._aside)
        self._made, self._new, self._aside = [], [], None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def read_about(path: Path) -> dict[str, Any]:
    with suppress(OSError, msgspec.DecodeError):
        about = msgspec.json.decode((path / _ABOUT).read_bytes())
        if isinstance(about, dict):
            return about
    return {}


def find_checkpoint(
    resume: str | os.PathLike[str],
    *,
    run_dir: Path | None,
    name: str,
    warn: Callable[[str], None],
    progress: Progress | None = None,
    lineage: Lineage | None = None,
    otherwise: str = "starting from the beginning",
) -> tuple[Loaded | None, Path | None]:
    """The checkpoint that `resume` means, and the folder of the run it is of.

    "last": the newest checkpoint in `run_dir`, or of the run of this name that `lineage` has most in common with; None
    where there is none yet, and what is done then is told in the words of `otherwise`. Else a run's id or the path of a
    run, of its checkpoints, or of one checkpoint: that must exist. The folder is None for checkpoints that lie outside
    a run: what resumes from them is a run of its own.
    """
    from shoal.checkpoint import load_newest

    if str(resume) == "last":
        folder, said = _last_run(name, lineage) if run_dir is None else Choice(run_dir)
        loaded = None if folder is None else load_newest(folder / _CHECKPOINTS, warn, progress)
        if loaded is not None:
            if said:
                warn(f"resume='last' means {loaded.path}: {said}")
            return loaded, folder
        where = str(run_dir) if run_dir is not None else f"runs named {name!r} in {runs_root()}"
        if lineage is not None and said:
            where = f"runs of {lineage.script}{' on this data' if lineage.data else ''}"
        warn(f"resume='last': no checkpoint in {where}; {otherwise}{said and f'. {said}'}")
        return None, None
    path = Path(resume).expanduser()
    if not path.exists() and len(path.parts) == 1:
        path = runs_root() / path
    if not path.exists():
        raise ConfigError(
            f"resume={str(resume)!r} is neither 'last', nor a path, nor a run in {runs_root()}{_some_runs()}"
        )
    return _load_from(path.resolve(), warn, progress)


def _load_from(path: Path, warn: Callable[[str], None], progress: Progress | None) -> tuple[Loaded, Path | None]:
    from shoal.checkpoint import load, load_newest

    if (path / "manifest.json").is_file():
        return load(path, progress), _run_of(path.parent)
    folder = path / _CHECKPOINTS if (path / _CHECKPOINTS).is_dir() else path
    loaded = load_newest(folder, warn, progress)
    if loaded is None:
        raise CheckpointError(
            f"resume: there is no sound checkpoint in {folder}; give another run, or leave resume= out"
        )
    return loaded, _run_of(folder)


def _run_of(checkpoints: Path) -> Path | None:
    return checkpoints.parent if checkpoints.name == _CHECKPOINTS else None


def newest_checkpoint(folder: Path | None) -> Path | None:
    """The checkpoint of the highest step in a run's folder; it is not looked into."""
    found = sorted((folder / _CHECKPOINTS).glob("step-*/manifest.json")) if folder is not None else []
    return found[-1].parent if found else None


def _last_run(name: str, lineage: Lineage | None) -> Choice:
    runs = [Known(path, read_lineage(read_about(path))) for path in _runs_named(name) if _has_checkpoints(path)]
    return choose(lineage or Lineage(), runs)


def _has_checkpoints(run: Path) -> bool:
    folder = run / _CHECKPOINTS
    return folder.is_dir() and any(entry.name.startswith("step-") for entry in folder.iterdir())


def _runs_named(name: str) -> list[Path]:
    root = runs_root()
    runs = [path for path in root.iterdir() if read_about(path).get("name") == name] if root.is_dir() else []
    return sorted(runs, key=lambda path: (read_about(path).get("started", 0.0), path.name), reverse=True)


def _some_runs() -> str:
    root = runs_root()
    runs = list(root.iterdir()) if root.is_dir() else []
    names = [path.name for path in sorted(runs, key=lambda path: float(read_about(path).get("started") or 0.0))]
    return f"; the newest there: {', '.join(names[-3:])}" if names else ""
