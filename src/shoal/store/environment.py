"""What a run ran on: versions, machine, settings, and the state of the code."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

GIT_SECONDS = 2.0
"""How long git may take; on a slow disk the answer is that it is not known."""

_PACKAGES = ("shoal", "torch", "numpy")
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "MASTER_ADDR",
    "MKL_NUM_THREADS",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "SLURM_JOB_ID",
    "SLURM_JOB_NODELIST",
    "SLURM_NTASKS",
)
"""Those that change how a run behaves. A list of what is kept, not of what is left out: others may be secrets."""


def environment() -> dict[str, Any]:
    """Plain data. Imports none of the packages that it gives the versions of."""
    return {
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        "memory": _memory(),
        "host": socket.gethostname(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def git_state(folder: str | os.PathLike[str]) -> tuple[str | None, bool | None]:
    """The commit that is checked out in `folder`, and whether tracked files differ from it.

    None for what is not known: no git, no repository, no commit yet, or no answer in time.
    """
    if not Path(folder).is_dir():
        return None, None
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if not commit:
        return None, None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules")
    return commit, None if changes is None else bool(changes)


def _git(folder: str | os.PathLike[str], *arguments: str) -> str | None:
    # Without optional locks it only reads, and cannot get in the way of a git that the user runs.
    command = ["git", "--no-optional-locks", "-C", os.fspath(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=GIT_SECONDS, stdin=subprocess.DEVNULL, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _memory() -> int:
    """Bytes in this machine; 0 if that cannot be found out."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return 0
