"""What the doctor found, as text for a person and as plain data for a machine."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import typer

from shoal.cli.doctor.checks import Outcome, Status, fix_first

_MARKS = {Status.OK: "✓", Status.WARN: "!", Status.FAIL: "✗"}
_ASCII_MARKS = {Status.OK: "+", Status.WARN: "!", Status.FAIL: "x"}
_COLOURS = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red"}
_NAME_WIDTH = 12
_INDENT = " " * (4 + _NAME_WIDTH + 1)


@dataclass(frozen=True)
class Diagnosis:
    """All outcomes, in the order in which to read them."""

    outcomes: tuple[Outcome, ...]
    versions: Mapping[str, str | None]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing failed. Warnings are fine."""
        return all(outcome.finding.status is not Status.FAIL for outcome in self.outcomes)

    @property
    def first(self) -> Outcome | None:
        """What to fix first."""
        return fix_first(self.outcomes)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        first = self.first
        return {
            "ok": self.ok,
            "fix_first": None if first is None else {key: first.as_json()[key] for key in ("name", "status", "fix")},
            "versions": dict(self.versions),
            "seconds": round(self.seconds, 3),
            "checks": [outcome.as_json() for outcome in self.outcomes],
        }


def render(diagnosis: Diagnosis, *, width: int, encoding: str, colour: bool = False) -> str:
    """The table, and what to do first. Every line fits `width`, but for a word that is longer; `encoding` can write it.

    Where that encoding lacks ✓ and ✗, they are + and x.
    """
    marks = _MARKS if _can_write("".join(_MARKS.values()), encoding) else _ASCII_MARKS
    lines: list[str] = []
    group = ""
    for outcome in diagnosis.outcomes:
        if outcome.group != group:
            lines += [*([""] if group else []), _styled(outcome.group, colour, bold=True)]
            group = outcome.group
        lines += _row(outcome, marks, width, colour)
    lines += ["", *_end(diagnosis, marks, colour)]
    return "\n".join(lines).encode(encoding, errors="replace").decode(encoding) + "\n"


def _row(outcome: Outcome, marks: Mapping[Status, str], width: int, colour: bool) -> Iterator[str]:
    finding = outcome.finding
    mark = _styled(marks[finding.status], colour, fg=_COLOURS[finding.status], bold=True)
    found = _wrapped(finding.found, width - len(_INDENT)) or [""]
    yield f"  {mark} {outcome.name:<{_NAME_WIDTH}} {found[0]}".rstrip()
    yield from (_INDENT + line for line in found[1:])
    if finding.status is not Status.OK:
        for number, line in enumerate(_wrapped(finding.fix, width - len(_INDENT) - 3)):
            yield _INDENT + ("-> " if number == 0 else "   ") + line


def _end(diagnosis: Diagnosis, marks: Mapping[Status, str], colour: bool) -> Iterator[str]:
    first = diagnosis.first
    if first is None:
        yield _styled("All is well.", colour, fg="green", bold=True) + f" ({diagnosis.seconds:.1f} s)"
        yield "What to try next:  shoal demo            train on real images, on 2 workers"
        yield "                   shoal run train.py    your own script"
        return
    failed, warned = (
        sum(outcome.finding.status is status for outcome in diagnosis.outcomes) for status in (Status.FAIL, Status.WARN)
    )
    yield f"{_count(failed, 'failure')}, {_count(warned, 'warning')} ({diagnosis.seconds:.1f} s)"
    title = _styled("Fix first:", colour, fg=_COLOURS[first.finding.status], bold=True)
    yield f"{title} {first.name} (marked {marks[first.finding.status]} above)"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number or 'no'} {noun}s"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 20), break_long_words=False, break_on_hyphens=False)


def _styled(text: str, colour: bool, *, fg: str | None = None, bold: bool = False) -> str:
    return typer.style(text, fg=fg, bold=bold) if colour else text


def _can_write(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
