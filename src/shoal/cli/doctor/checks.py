"""What `shoal doctor` looks at: checks as values, run side by side, each with a time bound.

A check's `look` returns a `Finding` and knows nothing of the others. One that raises or does not come back in time is a
failed check, not the end of the doctor.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

T = TypeVar("T")

FIX_ORDER = (
    "python",
    "torch",
    "numpy",
    "temp folder",
    "memory",
    "loopback",
    "processes",
    "open files",
    "home",
    "run store",
    "launcher",
    "self-test",
    "hostname",
    "cores",
    "clock",
    "/dev/shm",
    "gpus",
    "backends",
    "threads",
    "swap",
    "extras",
    "git",
)
"""Names of checks, what breaks most first: of two that failed, the earlier one is to be fixed first."""


class Status(StrEnum):
    """How a check ended. A warning is something to know; a failure is something that training will run into."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """What a check saw."""

    status: Status
    found: str
    """In words, for a person."""
    fix: str = ""
    """What to do about it; empty if all is well."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Figures behind the words, as plain data for `--json`."""


@dataclass(frozen=True)
class Check:
    """Something to look at."""

    name: str
    group: str
    look: Callable[[], Finding]
    seconds: float = 3.0
    """How long `look` may take."""


@dataclass(frozen=True)
class Outcome:
    """A check that was made."""

    name: str
    group: str
    finding: Finding
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "group": self.group,
            "status": str(self.finding.status),
            "found": self.finding.found,
            "fix": self.finding.fix,
            "details": dict(self.finding.details),
            "seconds": round(self.seconds, 3),
        }


def ok(found: str, /, **details: Any) -> Finding:
    return Finding(Status.OK, found, "", details)


def warn(found: str, fix: str, /, **details: Any) -> Finding:
    return Finding(Status.WARN, found, fix, details)


def fail(found: str, fix: str, /, **details: Any) -> Finding:
    return Finding(Status.FAIL, found, fix, details)


class Call(Generic[T]):
    """A call under way on a daemon thread of its own, which is left behind if it never returns."""

    def __init__(self, what: Callable[[], T], name: str) -> None:
        self._what = what
        self._value: list[T] = []
        self._error: Exception | None = None
        self._begun = time.monotonic()
        self.seconds = 0.0
        """How long the call took, once it has returned or raised."""
        self._thread = threading.Thread(target=self._run, name=f"doctor: {name}", daemon=True)
        self._thread.start()

    def result(self, seconds: float) -> T:
        """What the call returns or raises; TimeoutError if it is not back `seconds` after it began."""
        self._thread.join(max(0.0, self._begun + seconds - time.monotonic()))
        if self._error is not None:
            raise self._error
        if not self._value:
            self.seconds = time.monotonic() - self._begun
            raise TimeoutError(f"no answer within {seconds:g} s")
        return self._value[0]

    def _run(self) -> None:
        try:
            value = self._what()
        except Exception as error:
            self._end()
            self._error = error
        else:
            self._end()
            self._value.append(value)

    def _end(self) -> None:
        self.seconds = time.monotonic() - self._begun


def run_checks(checks: Sequence[Check], *, meanwhile: Callable[[], None] | None = None) -> list[Outcome]:
    """Make all checks at the same time; their outcomes in the order given. Never raises for what a check does.

    `meanwhile` runs on the calling thread while the checks are under way.
    """
    calls = [Call(check.look, check.name) for check in checks]
    if meanwhile is not None:
        meanwhile()
    return [_outcome(check, call) for check, call in zip(checks, calls, strict=True)]


def _outcome(check: Check, call: Call[Finding]) -> Outcome:
    try:
        finding = call.result(check.seconds)
    except TimeoutError:
        finding = fail(
            f"no answer within {check.seconds:g} s",
            "Something that this check reads hangs: a network file system, a name server or a busy disk. "
            "Look at the machine's log (dmesg) and at mounts that do not answer.",
        )
    except Exception as error:
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        finding = fail(
            f"the check itself failed: {shorten(said)}",
            "Mend what the message names. If it names nothing of yours, please report it with the output of "
            "`shoal doctor --json`.",
            error=said,
        )
    return Outcome(check.name, check.group, finding, call.seconds)


def fix_first(outcomes: Iterable[Outcome]) -> Outcome | None:
    """The one thing to fix first: a failure before a warning, then by what breaks most. None if all is well."""

    def urgency(outcome: Outcome) -> tuple[bool, int]:
        known = outcome.name in FIX_ORDER
        return outcome.finding.status is not Status.FAIL, FIX_ORDER.index(outcome.name) if known else len(FIX_ORDER)

    return min((outcome for outcome in outcomes if outcome.finding.status is not Status.OK), key=urgency, default=None)


def shorten(text: str, most: int = 300) -> str:
    """`text` on one line, cut in the middle where it is longer than `most`."""
    line = " ".join(text.split())
    if len(line) <= most:
        return line
    half = (most - 5) // 2
    return f"{line[:half]} ... {line[-half:]}"


def size_text(size: float) -> str:
    """`1.5 GB`: bytes as a person reads them (1 GB = 10^9)."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}" if size < 100 * scale else f"{size / scale:.0f} {unit}"
    return f"{size:.0f} bytes"
