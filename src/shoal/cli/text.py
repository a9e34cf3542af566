"""Text for a terminal: what fits its width, tables, and wording that only the command line has."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
"""Seconds in each, the largest first."""
_STATUS = {
    "running": ("●", "cyan"),
    "complete": ("✓", "green"),
    "stopped": ("■", "yellow"),
    "interrupted": ("■", "yellow"),
    "preempted": ("↻", "yellow"),
    "failed": ("✗", "red"),
    "killed": ("✗", "red"),
    "lost": ("?", "magenta"),
}


@dataclass(frozen=True)
class Screen:
    """Where text goes: `width` is None where it must not be cut, as in a pipe."""

    width: int | None
    color: bool

    @staticmethod
    def now() -> Screen:
        terminal = sys.stdout.isatty()
        plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        return Screen(shutil.get_terminal_size().columns if terminal else None, terminal and not plain)

    def style(self, text: str, **style: Any) -> str:
        return typer.style(text, **style) if self.color else text

    def status(self, status: str) -> str:
        glyph, color = _STATUS.get(status, ("·", "white"))
        return self.style(f"{glyph} {status}", fg=color)

    def heading(self, text: str) -> str:
        return self.style(text, bold=True)


@dataclass(frozen=True)
class Column:
    """`rank` says which columns stay when there is no room for all: the lowest. One of rank 0 always stays."""

    title: str
    cells: Sequence[str]
    rank: int = 0
    right: bool = False

    @property
    def width(self) -> int:
        return max(map(visible, (self.title, *self.cells)))


def visible(text: str) -> int:
    """How many places `text` takes on a screen."""
    return len(_ESCAPE.sub("", text))


def grid(columns: Sequence[Column], screen: Screen, *, indent: str = "") -> str:
    """Columns side by side, two spaces between them: as many as the screen has room for, the lowest ranks first."""
    kept: list[Column] = []
    for column in sorted(columns, key=lambda column: column.rank):
        if column.rank == 0 or screen.width is None or _width([*kept, column]) + len(indent) <= screen.width:
            kept.append(column)
    kept.sort(key=columns.index)
    rows = [[_place(column, cell) for column, cell in zip(kept, cells, strict=True)] for cells in _cells(kept)]
    if any(column.title for column in kept):
        rows.insert(0, [screen.style(_place(column, column.title), dim=True) for column in kept])
    return "".join(f"{indent}{'  '.join(row)}".rstrip() + "\n" for row in rows)


def _cells(columns: Sequence[Column]) -> list[tuple[str, ...]]:
    return list(zip(*(column.cells for column in columns), strict=True))


def _width(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns) + 2 * (len(columns) - 1)


def _place(column: Column, cell: str) -> str:
    space = " " * (column.width - visible(cell))
    return space + cell if column.right else cell + space


def ago(seconds: float) -> str:
    """`just now`, `3 min ago`. A clock that is ahead counts as now."""
    if seconds < 5:
        return "just now"
    unit, name = next(pair for pair in UNITS if seconds >= pair[0])
    return f"{int(seconds // unit)} {name} ago"


def shown_value(value: Any) -> str:
    """A setting as one would write it, on one line."""
    return value if isinstance(value, str) and value and value.isprintable() else repr(value)
