"""A crew's folder for files: its own, under the machine's temporary folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from shoal.store.liveness import is_there

_SCRATCH = "shoal-"
_ABANDONED_SECONDS = 600.0


def make_scratch() -> Path:
    """A new folder of mode 0700; those that killed supervisors have left are removed."""
    _sweep()
    return Path(tempfile.mkdtemp(prefix=f"{_SCRATCH}{os.getpid()}-"))


def _sweep() -> None:
    """Remove what supervisors left behind that were killed before they could."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*-*"):
        owner = folder.name.removeprefix(_SCRATCH).partition("-")[0]
        with contextlib.suppress(OSError):
            found = folder.stat()
            # The age: a process of another container that shares this folder has a number that means nothing here.
            old = time.time() - found.st_mtime > _ABANDONED_SECONDS
            if old and found.st_uid == os.getuid() and owner.isdecimal() and not is_there(int(owner)):
                shutil.rmtree(folder, ignore_errors=True)
