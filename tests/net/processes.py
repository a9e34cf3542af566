"""Commands with a deadline, after which nothing that they have started is left."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

DEADLINE = 100.0
"""Ten times what they take on an idle machine."""
_OF_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "GROUP_")


def ended(
    command: Sequence[str], folder: Path, *, given: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """What came of a command that runs in `folder`, in an environment without a launcher."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**_environment(), "SHOAL_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1", **variables},
    )
    try:
        said, complained = process.communicate(given, timeout=DEADLINE)
    except BaseException:  # the test's own deadline, too
        _kill(process)
        raise
    return subprocess.CompletedProcess(command, process.returncode, said, complained)


def _environment() -> Mapping[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid)
        for member in [*family.children(recursive=True), family]:
            with suppress(psutil.NoSuchProcess):
                member.kill()
    process.communicate()
