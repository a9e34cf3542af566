"""The share of the CPU that the processes of a lab host get, by a control group of the kernel (version 1 or 2)."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from shoal.core.errors import LabUnavailable

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "shoal-lab-"
_PERIOD = 20_000  # microseconds: short, so that a host looks slow rather than halting
_GONE_WITHIN = 5.0


def make_group(lab: str, host: str) -> Path | None:
    """A new control group for a host; None where this machine gives none."""
    parent = _parent()
    if parent is None:
        return None
    folder = parent / f"{_PREFIX}{lab}" / host
    try:
        folder.mkdir(parents=True)
        if not _is_v1(parent):
            (folder.parent / "cgroup.subtree_control").write_text("+cpu")
        _quota_file(folder)
    except OSError:
        with suppress(OSError):
            folder.rmdir()
        return None
    return folder


def set_quota(folder: Path | None, cpu: float | None) -> None:
    """Give the group `cpu` cores' worth of time; None: as much as there is."""
    if folder is None:
        if cpu is None:
            return
        raise LabUnavailable(
            f"cpu={cpu:g}: there is no cpu controller of control groups to write to in {_ROOT}; "
            "leave cpu out, or mount it (mount -t cgroup -o cpu cpu /sys/fs/cgroup/cpu)"
        )
    quota = None if cpu is None else max(1000, round(cpu * _PERIOD))
    try:
        if (folder / "cpu.max").exists():
            (folder / "cpu.max").write_text(f"{'max' if quota is None else quota} {_PERIOD}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(_PERIOD))
            (folder / "cpu.cfs_quota_us").write_text(str(-1 if quota is None else quota))
    except OSError as error:
        raise LabUnavailable(f"cpu={cpu}: {folder} does not take it ({error.strerror}); leave cpu out") from error


def remove_groups(lab: str) -> None:
    """Kill what is still in the groups of a lab, and remove them. Does nothing where there are none."""
    for parent in (_ROOT / "cpu", _ROOT):
        top = parent / f"{_PREFIX}{lab}"
        if not top.is_dir():
            continue
        folders = [*(path for path in top.iterdir() if path.is_dir()), top]
        deadline = time.monotonic() + _GONE_WITHIN
        while any(not _removed(folder) for folder in folders) and time.monotonic() < deadline:
            time.sleep(0.005)


def _removed(folder: Path) -> bool:
    with suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    with suppress(OSError):
        folder.rmdir()
    return not folder.exists()


def _parent() -> Path | None:
    if (_ROOT / "cpu" / "cpu.cfs_quota_us").exists() or (_ROOT / "cpu" / "cpu.shares").exists():
        return _ROOT / "cpu"
    with suppress(OSError):
        if "cpu" in (_ROOT / "cgroup.controllers").read_text().split():
            (_ROOT / "cgroup.subtree_control").write_text("+cpu")
            return _ROOT
    return None


def _is_v1(parent: Path) -> bool:
    return parent.name == "cpu"


def _quota_file(folder: Path) -> Path:
    for name in ("cpu.max", "cpu.cfs_quota_us"):
        if (folder / name).exists():
            return folder / name
    raise FileNotFoundError(folder)
