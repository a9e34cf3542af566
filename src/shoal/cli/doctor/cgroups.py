"""What the control groups of this process allow it: the limits of a container, version 1 and 2.

A limit may be set on the group of the process or on any group above it; the smallest one holds. In a container the path
of the group is often one of the host's that cannot be seen inside; then the top of what is mounted holds the limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")

_UNLIMITED = 1 << 60  # version 1 says "no limit" by a number near 2**63, rounded to pages


class Cgroups:
    """Reads limits below `root`, for the process whose groups are listed in `membership`."""

    def __init__(self, root: Path = ROOT, membership: Path = MEMBERSHIP) -> None:
        self._root = root
        self._paths = _memberships(_read(membership))

    def cpus(self) -> float | None:
        """How many CPUs' worth of time the process may use, 1.5 for example; None if there is no such limit."""
        quotas = []
        for folder in self._unified():
            quota, _, period = _read(folder / "cpu.max").partition(" ")
            quotas.append(_quotient(quota, period))
        for folder in self._classic("cpu"):
            quotas.append(_quotient(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")))
        return min((quota for quota in quotas if quota is not None), default=None)

    def memory(self) -> tuple[int, int] | None:
        """The limit on memory in bytes, and how much below it is left; None if there is no limit."""
        found = []
        for folder in self._unified():
            found.append(_memory(folder, "memory.max", "memory.current", "inactive_file"))
        for folder in self._classic("memory"):
            found.append(_memory(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))
        limits = [pair for pair in found if pair is not None]
        return (min(limit for limit, _ in limits), min(left for _, left in limits)) if limits else None

    def processes(self) -> tuple[int, int] | None:
        """The limit on processes and threads, and how many more may be started; None if there is no limit."""
        found = []
        for folder in [*self._unified(), *self._classic("pids")]:
            limit, used = _number(_read(folder / "pids.max")), _number(_read(folder / "pids.current"))
            if limit is not None:
                found.append((limit, max(0, limit - (used or 0))))
        return min(found, key=lambda pair: pair[1], default=None)

    def _unified(self) -> Iterator[Path]:
        for top in (self._root, self._root / "unified"):
            if (top / "cgroup.controllers").exists() or (top / "cpu.max").exists() or (top / "memory.max").exists():
                yield from _upwards(top, self._paths.get("", "/"))

    def _classic(self, controller: str) -> Iterator[Path]:
        if controller not in self._paths:
            return
        for top in sorted({self._root / controller, *self._root.glob(f"*{controller},*"), *self._root.glob("*,*")}):
            if controller in top.name.split(",") and top.is_dir():
                yield from _upwards(top, self._paths[controller])


def _memberships(text: str) -> dict[str, str]:
    """Paths by controller, from lines like `4:cpu,cpuacct:/path`; version 2 is the controller ""."""
    paths = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def _upwards(top: Path, path: str) -> Iterator[Path]:
    """The folder of a group and those of all groups above it; also those that cannot be seen from here."""
    inside = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    for length in range(len(inside), -1, -1):
        yield top.joinpath(*inside[:length])


def _memory(folder: Path, limit_name: str, used_name: str, cache_name: str) -> tuple[int, int] | None:
    limit = _number(_read(folder / limit_name))
    if limit is None or limit >= _UNLIMITED:
        return None
    stat = dict(line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
    # what was read from files and not used since is given back when somebody wants the memory
    used = (_number(_read(folder / used_name)) or 0) - (_number(stat.get(cache_name, "")) or 0)
    return limit, max(0, limit - max(0, used))


def _quotient(quota: str, period: str) -> float | None:
    above, below = _number(quota), _number(period)
    return above / below if above and below else None


def _number(text: str) -> int | None:
    """None for "max", -1 and what is not there."""
    text = text.strip()
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str:
    text = ""
    with suppress(OSError, UnicodeDecodeError):
        text = path.read_text(encoding="ascii").strip()
    return text
