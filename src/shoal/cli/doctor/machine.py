"""Checks of the machine: cores, memory, limits, threads, folders and the clock. All inputs are arguments."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from shoal.cli.doctor.checks import Finding, fail, ok, size_text, warn

GIB = 1 << 30
MIB = 1 << 20

LEAST_FILES = 1024
LEAST_SHM = 256 * MIB
LEAST_TEMP = 256 * MIB
LEAST_HOME = GIB
_EARLIEST_YEAR, _LATEST_YEAR = 2025, 2100
_MOST_SKEW = 2.0
_MOST_JUMP = 0.25
"""Seconds."""
_SAMPLE_SECONDS = 0.05

_THREADS = re.compile(r"\s*[1-9]\d{0,5}\s*(,\s*[1-9]\d{0,5}\s*)*", re.ASCII)


def usable_cores(affinity: int, quota: float | None) -> int:
    """Workers that can compute at the same time."""
    return affinity if quota is None else max(1, min(affinity, int(quota + 0.01)))


def check_cores(*, affinity: int, count: int | None, quota: float | None) -> Finding:
    """`affinity`: cores that this process may run on; `count`: those of the machine; `quota`: a container's limit."""
    details = {"usable": usable_cores(affinity, quota), "affinity": affinity, "machine": count, "quota": quota}
    shown = _plural(affinity, "core") + (f" of {count}" if count is not None and count != affinity else "")
    if quota is not None and quota + 0.01 < affinity:
        return warn(
            f"{shown}, but a control group (container) limits this process to {quota:g} CPUs",
            f"Shoal starts one worker per core it sees. Give workers={details['usable']} yourself, or raise the limit "
            "(docker run --cpus=N, or resources.limits.cpu in Kubernetes).",
            **details,
        )
    if affinity == 1:
        return ok(f"{shown}: use workers=1; more are for trying things out, not for speed", **details)
    return ok(f"{shown}: one worker each by default", **details)


def memory_figures(meminfo: str) -> dict[str, int]:
    """Bytes by name, from the text of /proc/meminfo."""
    figures = {}
    for line in meminfo.splitlines():
        found = re.match(r"(\w+):\s+(\d+) kB", line)
        if found:
            figures[found[1]] = int(found[2]) * 1024
    return figures


def check_memory(*, meminfo: str, limit: tuple[int, int] | None, workers: int) -> Finding:
    """`limit`: of the control group, and how much of it is left."""
    figures = memory_figures(meminfo)
    total, available = figures["MemTotal"], figures["MemAvailable"]
    limited = limit is not None and limit[0] < total
    if limit is not None and limited:
        total, available = limit[0], min(available, limit[1])
    details = {"total": total, "available": available, "machine_total": figures["MemTotal"], "limited": limited}
    where = " allowed by the control group (container)" if limited else ""
    found = f"{size_text(available)} available of {size_text(total)}{where}"
    fix = (
        "End what you do not need, use fewer workers, or set micro_batch= to compute fewer samples at once. A worker "
        "that asks for more than there is gets killed."
    )
    if available < 256 * MIB:
        return fail(f"{found}: too little to train", fix, **details)
    if available < max(GIB, workers * 256 * MIB):
        return warn(f"{found}: little for {_plural(workers, 'worker')}", fix, **details)
    return ok(found, **details)


def check_swap(*, meminfo: str) -> Finding:
    figures = memory_figures(meminfo)
    total, free = figures.get("SwapTotal", 0), figures.get("SwapFree", 0)
    details = {"total": total, "used": total - free}
    if total == 0:
        return ok("none", **details)
    found = f"{size_text(total - free)} used of {size_text(total)}"
    if total - free > total // 2:
        return warn(
            f"{found}: this machine is, or was, short of memory",
            "Training that swaps is many times slower. End what you do not need (free -h; top, then M).",
            **details,
        )
    return ok(found, **details)


def check_shared_memory(folder: Path) -> Finding:
    """`folder`: /dev/shm."""
    who = "workers of one host sum their gradients there, and NCCL and torch's own DataLoader processes exchange data"
    fix = "In a container: docker run --shm-size=2g, or an emptyDir of medium Memory at /dev/shm in Kubernetes."
    if not folder.is_dir():
        return warn(f"{folder} is not there; {who}", fix)
    usage = shutil.disk_usage(folder)
    details = {"total": usage.total, "free": usage.free}
    found = f"{size_text(usage.free)} free of {size_text(usage.total)}"
    refused = write_error(folder)
    if refused:
        return warn(f"{folder} cannot be written ({refused}); {who}", f"chmod 1777 {folder} as root. {fix}", **details)
    if usage.total < LEAST_SHM:
        return warn(f"{found}: small; {who}", fix, **details)
    if usage.free < LEAST_SHM // 4:
        return warn(
            f"{found}: nearly full; {who}",
            f"See what is left over there and remove what is yours: ls -la {folder}",
            **details,
        )
    return ok(found, **details)


def check_open_files(*, soft: int, hard: int, workers: int) -> Finding:
    """Limits as `resource.getrlimit` gives them: -1 is none."""
    # measured: a worker has 10 open and one more for each of the others; the supervisor 2 or 3 for each worker
    needed = 48 + 4 * workers
    details = {"soft": soft, "hard": hard, "needed": needed}
    if soft < 0:
        return ok("no limit", **details)
    wanted = max(4096, needed)
    if 0 <= hard < wanted:
        fix = f"Put '* - nofile {wanted}' into /etc/security/limits.conf as root and log in again"
    else:
        fix = f"Before training: ulimit -n {wanted}"
    fix += "  (a container: docker run --ulimit nofile=65536)."
    if soft < needed:
        return fail(
            f"at most {soft}: too few for {_plural(workers, 'worker')}, about {needed} are needed", fix, **details
        )
    if soft < LEAST_FILES:
        return warn(f"at most {soft}: few; data sets of many files run into it", fix, **details)
    return ok(f"at most {soft}", **details)


def check_processes(*, soft: int, used: int, group: tuple[int, int] | None, root: bool, workers: int) -> Finding:
    """`soft`: ulimit -u, -1 is none; `used`: threads of this user now; `group`: control group's limit and what is left.

    The first limit does not hold for root.
    """
    # measured: 4 threads in a worker; the rest is for loader processes and what else the script starts
    needed = 16 + 8 * workers
    details = {"soft": soft, "used": used, "group": None if group is None else group[0], "needed": needed}
    room = [] if soft < 0 or root else [(soft - used, f"ulimit -u is {soft}, {used} are in use")]
    room += [] if group is None else [(group[1], f"the control group allows {group[0]}, {group[1]} are left")]
    if not room:
        return ok("no limit" if soft < 0 else f"ulimit -u is {soft}, which does not hold for root", **details)
    left, said = min(room)
    if left >= needed:
        return ok(said, **details)
    fix = (
        f"About {needed} processes and threads are needed for {_plural(workers, 'worker')}. Raise the limit: "
        f"ulimit -u {max(4096, used + needed)}  (a container: docker run --pids-limit 4096), or use fewer workers."
    )
    return fail(said, fix, **details) if left < needed // 2 else warn(f"{said}: tight", fix, **details)


def check_threads(*, env: Mapping[str, str], cores: int) -> Finding:
    """OMP_NUM_THREADS and its relatives: not needed by Shoal, and easily too large."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    given = {name: env[name] for name in names if env.get(name, "").strip()}
    rule = "Shoal computes with 1 thread per CPU worker"
    unset = f"unset {' '.join(given)}"
    if not given:
        return ok(f"OMP_NUM_THREADS is not set; {rule}")
    shown = ", ".join(f"{name}={value[:40]}" for name, value in given.items())
    bad = [name for name, value in given.items() if not _THREADS.fullmatch(value)]
    if bad:
        return warn(f"{shown}: must be a whole number of at least 1", f"{unset}  ({rule}).", **given)
    most = max(int(value.split(",")[0]) for value in given.values())
    if most > cores:
        return warn(
            f"{shown}, but there are {_plural(cores, 'core')}",
            f"{unset}  ({rule} whatever these say, but numpy in every worker obeys them and would fight for the "
            "cores).",
            **given,
        )
    return ok(f"{shown}; {rule} whatever these say", **given)


def check_temp_folder(find: Callable[[], str] = tempfile.gettempdir) -> Finding:
    try:
        folder = Path(find())
    except OSError as error:
        return fail(
            f"there is none that can be written ({error.strerror or error})",
            "Make one and name it: mkdir -p ~/tmp && export TMPDIR=~/tmp",
        )
    refused = write_error(folder)
    if refused:
        return fail(
            f"{folder} cannot be written ({refused})",
            "Workers meet there. Free some space, or name another folder: mkdir -p ~/tmp && export TMPDIR=~/tmp",
        )
    free = shutil.disk_usage(folder).free
    if free < LEAST_TEMP:
        return warn(
            f"{folder} has only {size_text(free)} free",
            f"Remove what is old there, or name another folder: export TMPDIR=...  (du -sh {folder}/* shows what is "
            "large).",
            free=free,
        )
    return ok(f"{folder}, {size_text(free)} free", free=free)


def check_clock(
    folder: Path,
    *,
    wall: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Finding:
    """The year, whether the clock is being set, and whether files in `folder` are stamped by the same clock."""
    begun, begun_steady = wall(), monotonic()
    pause(_SAMPLE_SECONDS)
    jump = (wall() - begun) - (monotonic() - begun_steady)
    year = time.gmtime(begun).tm_year
    skew = _file_skew(folder, wall)
    details = {"year": year, "jump": round(jump, 3), "file_skew": None if skew is None else round(skew, 3)}
    set_it = "Set the clock: sudo timedatectl set-ntp true"
    if not _EARLIEST_YEAR <= year <= _LATEST_YEAR:
        return fail(
            f"it says {year}: runs would be stored in the wrong order, and certificates refused", set_it, **details
        )
    if abs(jump) > _MOST_JUMP:
        return warn(f"it jumped by {jump:+.1f} s while watched: it is being set", f"Wait until it is. {set_it}")
    if skew is not None and abs(skew) > _MOST_SKEW:
        return warn(
            f"files in {folder} are stamped {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this clock",
            f"Another machine serves this folder, and one of the two clocks is wrong. {set_it}  (on both)",
            **details,
        )
    stamped = "" if skew is None else ", and files are stamped alike"
    return ok(f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime(begun))} UTC, steady{stamped}", **details)


def _file_skew(folder: Path, wall: Callable[[], float]) -> float | None:
    """Seconds by which a file written now is stamped later than now; None where none can be written."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".shoal-doctor-") as probe:
            before = wall()
            probe.write(b"now")
            probe.flush()
            stamped = os.fstat(probe.fileno()).st_mtime
            after = wall()
    except OSError:
        return None
    return min(stamped - before, 0.0) if stamped < before else max(stamped - after, 0.0)


def write_error(folder: Path) -> str:
    """Why nothing can be written into `folder`, in words; empty if something can. Nothing stays there."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".shoal-doctor-") as probe:
            probe.write(b"x" * 4096)
            probe.flush()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def threads_of_user(proc: Path, user: int) -> int:
    """Threads of all processes of `user`; those that cannot be read count as none."""
    total = 0
    for folder in proc.iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            if folder.stat().st_uid == user:
                total += int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[17])
        except (OSError, ValueError, IndexError):
            continue
    return total


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
