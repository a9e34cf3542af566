"""The one writer of a run's checkpoints.

A save is written from the live tensors by a thread while the next forward and backward run: the copy into the page
cache is the only copy, and takes no memory of the process. Only if the tensors are wanted back (`wait_copied`) before
that is done and the disk is slow, the rest is copied into memory first; at worst that takes as much memory as the
checkpoint has bytes, until it is written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.checkpoint import folder as folders
from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.live import LiveTensors
from shoal.checkpoint.parts import TreeParts, plain_meta, shield, take_apart
from shoal.checkpoint.tensorfile import ChecksummedFile, Plan, Unstorable, plan
from shoal.core.errors import CheckpointWriteError, ConfigError, CorruptCheckpoint

_NICENESS = 10
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_ALLOWED = (errno.EROFS, errno.EACCES, errno.EPERM)
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete on disk. `seconds` is from `begin` to there."""

    step: int
    path: Path
    bytes: int
    seconds: float
    best: bool


class Checkpoints:
    """Saves into one folder, keeping the last `keep` and the best. All methods are for one thread.

    The folder is made at the first save, which also removes what a killed writer left. Nothing is deleted before the
    new checkpoint is complete, so there is room needed for `keep` + 2 of them.
    """

    def __init__(self, folder: Path, *, keep: int = 3, warn: Callable[[str], None]) -> None:
        if not isinstance(keep, int) or keep < 1:
            raise ConfigError(f"keep={keep!r}: the number of checkpoints to keep must be an int of at least 1")
        self._folder = Path(folder)
        self._keep = keep
        self._warn = warn
        self._shelf: folders.Shelf | None = None
        self._save: _Save | None = None
        self._lent: LiveTensors | None = None
        self._unseen: Saved | None = None

    def begin(
        self,
        step: int,
        trees: Mapping[str, Any],
        meta: Mapping[str, Any],
        *,
        volatile: Sequence[Tensor] = (),
        best: bool = False,
    ) -> float:
        """Begin to save, at a step boundary. Returns the seconds it took.

        The tensors in `trees` must stay as they are until `wait_copied` has returned, except those that begin where a
        `volatile` one does: they are copied here. Plain values are taken now. If the save before is still being
        written, waits for it. Raises `CheckpointWriteError` if the save before failed, or if a tree holds what a file
        cannot; then nothing was begun.
        """
        begun = time.perf_counter()
        self.finish()
        _check_names(step, trees)
        parts = {name: take_apart(name, tree) for name, tree in trees.items()}
        shield(list(parts.values()), volatile)
        save = _Save(self._folder, step, parts, plain_meta(meta), best)
        self._save, self._lent = save, save.live
        save.thread = threading.Thread(target=self._run, args=(save,), name=f"shoal-checkpoint-{step}", daemon=True)
        save.thread.start()
        return time.perf_counter() - begun

    def wait_copied(self) -> float:
        """Wait until the tensors of the last `begin` may be changed; seconds waited. Call it before they are."""
        lent = self._lent
        if lent is None:
            return 0.0
        self._lent = None
        return lent.reclaim()

    def finish(self) -> None:
        """Wait until what was begun is on disk. Raises `CheckpointWriteError` if it is not."""
        if self._save is not None and self._save.thread is not None:
            self._save.thread.join()
        self._collect()

    def check(self) -> Saved | None:
        """The newest save completed since last asked, without waiting. Raises `CheckpointWriteError` if one failed."""
        if self._save is not None and self._save.thread is not None and not self._save.thread.is_alive():
            self._collect()
        saved, self._unseen = self._unseen, None
        return saved

    def close(self) -> None:
        """Wait for the last save. If it failed and nobody has asked, that is said through `warn`."""
        try:
            self.finish()
        except CheckpointWriteError as error:
            self._warn(str(error))

    def latest(self) -> Path | None:
        """The complete checkpoint that was saved last. Its manifest is sound; its tensors are not looked at."""
        newest = folders.newest_first(self._folder, lambda error: self._warn(str(error)))
        return newest[0].path if newest else None

    def best(self) -> Path | None:
        """The checkpoint last saved as the best."""
        try:
            return folders.read_best(self._folder)
        except CorruptCheckpoint as error:
            self._warn(f"the best checkpoint is not known: {error}")
            return None

    def _collect(self) -> None:
        """Take over the result of a save whose thread has ended."""
        save, self._save, self._lent = self._save, None, None
        if save is None:
            return
        if save.error is not None:
            raise save.error
        self._unseen = save.saved

    def _run(self, save: _Save) -> None:
        """The thread: it alone touches the folder, and the shelf, while it lives."""
        try:
            if self._shelf is None:
                self._shelf = folders.Shelf(self._folder)
            save.saved = save.write(self._shelf)
        except BaseException as error:
            save.error = save.explain(error)
        finally:
            save.live.release()
        if save.saved is not None and self._shelf is not None:
            self._delete([*save.replaced, *self._surplus(self._shelf)])

    def _surplus(self, shelf: folders.Shelf) -> list[Path]:
        try:
            return shelf.take_surplus(self._keep, folders.read_best(self._folder))
        except CorruptCheckpoint as error:
            # Which one is the best is not known, so any of them may be.
            self._warn(f"no checkpoint is deleted until the next best one is saved: {error}")
            return []

    def _delete(self, paths: list[Path]) -> None:
        for path in paths:
            try:
                folders.remove(path)
            except OSError as error:
                self._warn(f"the old checkpoint {path} could not be deleted: {error}")


class _Save:
    """One save: made by the training thread, then written by a thread of its own."""

    def __init__(self, folder: Path, step: int, parts: dict[str, TreeParts], meta: Any, best: bool) -> None:
        self.thread: threading.Thread | None = None
        self.saved: Saved | None = None
        self.error: CheckpointWriteError | None = None
        self.replaced: list[Path] = []
        self._begun = time.perf_counter()
        self._folder = folder
        self._final = folders.step_folder(folder, step)
        self._step = step
        self._meta = meta
        self._best = best
        self._trees = {name: manifests.TreeEntry(part.structure, part.names) for name, part in parts.items()}
        self._plans = {name: _plan(name, part) for name, part in parts.items() if part.tensors}
        self.live = LiveTensors([parts[name].tensors[key] for name, plan in self._plans.items() for key in plan.order])

    def write(self, shelf: folders.Shelf) -> Saved:
        """Everything, up to the note about the best one. What is half written is removed if something fails."""
        self._refuse_full_disk()
        writing = folders.make_writing_folder(self._final)
        try:
            files = self._write_tensors(writing)
            content = manifests.Content(manifests.FORMAT, self._step, shelf.next_serial, self._meta, self._trees, files)
            size = sum(entry.size for entry in files.values()) + _write_manifest(writing, content)
            self.replaced = folders.publish(writing, self._final)
        except BaseException:
            shutil.rmtree(writing, ignore_errors=True)
            raise
        shelf.add(self._final)
        if self._best:
            folders.write_best(self._final)
        return Saved(self._step, self._final, size, time.perf_counter() - self._begun, self._best)

    def explain(self, error: BaseException) -> CheckpointWriteError:
        """What to tell the user. Made in the thread, raised in the training loop."""
        number = error.errno if isinstance(error, OSError) else None
        reason = os.strerror(number) if number is not None else f"{type(error).__name__}: {error}"
        free = folders.free_bytes(self._folder)
        explained = CheckpointWriteError(
            f"the checkpoint of step {self._step} could not be written to {self._final}: {reason}. "
            f"It needs {self._needed()} bytes, and {'an unknown number of' if free is None else free} bytes are free "
            f"there. {_advice(number)} Earlier checkpoints are intact"
        )
        explained.__cause__ = error
        return explained

    def _needed(self) -> int:
        return sum(plan.size for plan in self._plans.values())

    def _refuse_full_disk(self) -> None:
        """Fail before a disk is filled to the brim, which would hurt everybody who writes there."""
        free = folders.free_bytes(self._folder)
        if free is not None and free < self._needed():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _write_tensors(self, writing: Path) -> dict[str, manifests.FileEntry]:
        with contextlib.ExitStack() as stack:
            files: list[ChecksummedFile] = []
            for name, plan in self._plans.items():
                file = ChecksummedFile(writing / manifests.file_of(name))
                stack.callback(file.close)
                files.append(file)
                file.write(plan.header)
                for chunk in self.live.chunks(len(plan.order)):
                    file.write(chunk)
            self.live.release()
            _yield_to_compute()
            for file in files:
                file.sync()
        return {file.path.name: manifests.FileEntry(file.size, file.checksum) for file in files}


def _plan(name: str, part: TreeParts) -> Plan:
    try:
        return plan(part.tensors)
    except Unstorable as error:
        raise CheckpointWriteError(f"the tree {name!r} cannot be put into a checkpoint: it holds {error}") from error


def _write_manifest(writing: Path, content: manifests.Content) -> int:
    """Returns its size."""
    file = ChecksummedFile(writing / manifests.NAME)
    try:
        file.write(manifests.encode(content))
        file.sync()
        return file.size
    finally:
        file.close()


def _yield_to_compute() -> None:
    """Let the rest of this thread, for which nobody waits, lose against threads that compute."""
    # Only Linux has priorities of single threads.
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _advice(number: int | None) -> str:
    if number in _NO_SPACE:
        return "Free some space, set run_dir to a folder on a larger disk, or set keep lower."
    if number in _NOT_ALLOWED:
        return "Set run_dir to a folder that this process may write to."
    if number in _GONE:
        return "The folder went away during the run: set run_dir to one that stays."
    return "Set run_dir to a folder that can be written to."


def _check_names(step: int, trees: Mapping[str, Any]) -> None:
    if not isinstance(step, int) or step < 0:
        raise ConfigError(f"step={step!r}: it must be an int of at least 0")
    for name in trees:
        if not manifests.is_tree_name(name):
            raise ConfigError(f"a tree is called {name!r}: a name must consist of letters, digits, _, - and .")
