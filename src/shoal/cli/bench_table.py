"""The table of `shoal bench comm`, and its sizes and times in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from shoal.cli.text import Column, Screen, grid
from shoal.core.linkfit import LinkModel, Point, Segment
from shoal.core.profile import Measured, Profile
from shoal.monitor.wording import counted

_TITLES = {
    "sum": "Sum in place, of a buffer that the group has made",
    "sum_any": "Sum of any tensor",
    "broadcast": "Broadcast",
    "gather": "Gather",
    "scatter_sum": "Scatter-sum",
    "barrier": "Barrier",
}
_BUS: dict[str, Callable[[int], float]] = {
    "sum": lambda members: 2 * (members - 1) / members,
    "sum_any": lambda members: 2 * (members - 1) / members,
    "gather": lambda members: members - 1,
    "scatter_sum": lambda members: (members - 1) / members,
}
"""Bytes that each member must send at least, for each byte of the message."""
_BASELINE = "gloo"


def short_size(size: int) -> str:
    """4 B, 64 KiB, 100 MB: exact where it is a round number of either kind, else to three digits."""
    for power, unit in ((3, "G"), (2, "M"), (1, "K")):
        if size >= 1000**power and size % 1000**power == 0:
            return f"{size // 1000**power} {unit}B"
        if size >= 1024**power:
            value = size / 1024**power
            return f"{value:.0f} {unit}iB" if value >= 100 else f"{value:.3g} {unit}iB"
    return f"{size} B"


def short_time(seconds: float) -> str:
    """Three digits, in the unit that suits."""
    for limit, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= limit:
            return f"{_three(seconds / limit)} {unit}"
    return f"{_three(seconds * 1e9)} ns"


def _three(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def profile_as_text(profile: Profile, reasons: Mapping[str, str], largest: int, screen: Screen) -> str:
    """A table for each operation, with the collectives side by side, and what the fit says of each.

    `largest` is the size that should have been come to.
    """
    hosts = counted(len(set(profile.hosts)), "host")
    lines = [f"{counted(profile.workers, 'worker')} on {hosts}, {counted(profile.machine.cores, 'core')} here\n"]
    for collective in profile.collectives:
        reason = reasons.get(collective)
        lines.append(f"{collective}: {reason}\n" if reason else "")
    for operation in dict.fromkeys(found.operation for found in profile.measured):
        measured = sorted(
            (found for found in profile.measured if found.operation == operation),
            key=lambda found: found.collective != _BASELINE,
        )
        lines.append("\n" + screen.heading(_TITLES.get(operation, operation)) + "\n")
        lines.append(_table(operation, measured, profile.workers, screen))
        lines.append(_fits(measured, screen))
        lines += [_missing(found, largest) for found in measured if operation != "barrier"]
    memory = _rate(profile.machine.memory_bandwidth)
    lines.append(f"\nFor comparison: one core copies memory at {memory} GB/s (16 MiB at a time).\n")
    return "".join(lines)


def _table(operation: str, measured: Sequence[Measured], workers: int, screen: Screen) -> str:
    sizes = sorted({point.bytes for found in measured for point in found.points})
    columns = [Column("size", [short_size(size) for size in sizes], right=True)]
    for found in measured:
        columns += _columns(found, sizes, workers, alone=len(measured) == 1)
    for found in measured[1:]:
        columns.append(_ratio(measured[0], found, sizes))
    if operation == "barrier":
        columns = [column for column in columns if column.title != "size" and "GB/s" not in column.title]
    return grid(columns, screen, indent="  ")


def _columns(found: Measured, sizes: Sequence[int], workers: int, *, alone: bool) -> list[Column]:
    points = {point.bytes: point for point in found.points}

    def cells(cell: Callable[[Point], str]) -> list[str]:
        return [cell(points[size]) if size in points else "" for size in sizes]

    name = "" if alone else f"{found.collective} "
    columns = [
        Column(f"{name}time", cells(lambda point: short_time(point.seconds)), right=True),
        Column("spread", cells(_spread), rank=3, right=True),
        Column(f"{name}GB/s", cells(lambda point: _rate(point.bytes / point.seconds)), rank=1, right=True),
    ]
    bus = _BUS[found.operation](workers) if found.operation in _BUS else 1.0
    if bus != 1:
        cells_of_bus = cells(lambda point: _rate(bus * point.bytes / point.seconds))
        columns.append(Column("bus GB/s", cells_of_bus, rank=2, right=True))
    return columns


def _ratio(base: Measured, other: Measured, sizes: Sequence[int]) -> Column:
    """How many times faster than the first."""
    times = [{point.bytes: point.seconds for point in found.points} for found in (base, other)]
    cells = [f"{times[0][size] / times[1][size]:.3g}×" if all(size in of for of in times) else "" for size in sizes]
    return Column(f"{other.collective} is faster by", cells, right=True)


def _spread(point: Point) -> str:
    """The quartiles relative to the median."""
    below, above = 1 - point.low / point.seconds, point.high / point.seconds - 1
    return f"-{100 * below:.0f} +{100 * above:.0f}%"


def _rate(bytes_per_second: float) -> str:
    """In GB/s. Three digits, but no more than three after the point: 0.000 is next to nothing."""
    value = bytes_per_second / 1e9
    return f"{value:.3f}" if value < 1 else _three(value)


def _fits(measured: Sequence[Measured], screen: Screen) -> str:
    lines = []
    for found in measured:
        name = f"{found.collective}: " if len(measured) > 1 else ""
        lines.append(f"  {name}{model_in_words(found.model)}\n")
        if math.isfinite(found.model.bandwidth):
            summary = f"latency {short_time(found.model.latency)}, bandwidth {_rate(found.model.bandwidth)} GB/s"
            lines.append(screen.style(f"  {' ' * len(name)}{summary}", dim=True) + "\n")
    return "".join(lines)


def _missing(found: Measured, largest: int) -> str:
    come_to = found.points[-1].bytes
    if come_to >= largest:
        return ""
    return f"  {found.collective}: sizes above {short_size(come_to)} did not fit into the time; --seconds gives more\n"


def model_in_words(model: LinkModel) -> str:
    """`up to 64 KiB: 11 µs + 0.21 ns/B; above: 20 µs + 0.15 ns/B`."""
    if len(model.segments) == 1:
        return line_in_words(model.segments[0])
    said = []
    for segment, after in zip(model.segments, [*model.segments[1:], None], strict=True):
        where = "above" if after is None else f"up to {short_size(after.from_bytes)}"
        said.append(f"{where}: {line_in_words(segment)}")
    return "; ".join(said)


def line_in_words(segment: Segment) -> str:
    per_byte = f"{_three(segment.seconds_per_byte * 1e9)} ns/B"
    if segment.seconds_per_byte == 0:
        return short_time(segment.latency)
    if segment.latency < 0:
        return f"{per_byte} - {short_time(-segment.latency)}"
    return f"{short_time(segment.latency)} + {per_byte}"
