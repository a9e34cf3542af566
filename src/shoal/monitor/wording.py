"""Numbers, times and foreign text as a person reads them: on a display, in a report and from the command line.

The command line imports it for its quickest commands, so it needs nothing but the standard library.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from typing import Any

NOTHING = "–"
"""Stands where there is no value."""
_NOT_FOR_READERS = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours and cursor movements
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # titles and links
    r"|(?P<odd>[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069])"
)
"""Terminal sequences, which are left out, and control characters, lone surrogates and reversals of writing, which are
replaced."""


def clean(text: str) -> str:
    """Text from a run, safe to show: it cannot move a cursor, hide what follows, or fail to be encoded."""
    return _NOT_FOR_READERS.sub(lambda found: "\ufffd" if found["odd"] else "", text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """As `clean`, and on one line."""
    return " ".join(clean(text).split())


def figure(value: float | None) -> str:
    """Four digits, in a form that fits a table: 0.1234, 12.34, 12,340, 1.234e-05. Whole numbers are whole."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 or isinstance(value, int) else f"{value:.4g}"


def short(value: float) -> str:
    """For the ticks of an axis: 250, 1k, 2.5M, 1e-05."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if limit <= abs(value) < 1e15:
            return f"{value / limit:.4g}{unit}"
    return f"{value:.4g}"


def size(count: float | None) -> str:
    """Bytes, by powers of 1024 as memory is counted."""
    if count is None:
        return NOTHING
    if count < 1024:
        return "1 byte" if round(count) == 1 else f"{count:.0f} bytes"
    power = min(4, int(math.log2(count) // 10))
    count, unit = count / 1024**power, ("KiB", "MiB", "GiB", "TiB")[power - 1]
    return f"{count:,.0f} {unit}" if count >= 100 else f"{count:.1f} {unit}"


def duration(seconds: float) -> str:
    """3.2 s, 42 s, 4 min 12 s, 2 h 05 min, 3 d 04 h."""
    if not math.isfinite(seconds) or seconds < 0:
        return NOTHING
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600:02d} h"


def span(seconds: float) -> str:
    """A time that may be very short: 11 µs, 4.2 ms, 0.31 s, and as `duration` from a second on."""
    if not math.isfinite(seconds) or seconds < 0:
        return NOTHING
    if seconds == 0:
        return "0 s"
    if seconds >= 0.9995:
        return duration(seconds)
    if seconds >= 0.09995:
        return f"{seconds:.2f} s"
    scaled, unit = (seconds * 1e3, "ms") if seconds >= 0.9995e-3 else (seconds * 1e6, "µs")
    return f"{scaled:.0f} {unit}" if scaled >= 9.95 else f"{scaled:.1f} {unit}"


def percent(share: float) -> str:
    """0%, <1%, 42%."""
    return "<1%" if 0 < share < 0.005 else f"{share * 100:.0f}%"


def times(ratio: float, digits: int = 2) -> str:
    """How many times as much, to so many significant digits: 0.0042, 0.85, 1.2, 13."""
    return figure(float(f"{ratio:.{digits}g}"))


def moment(when: float | None) -> str:
    """In local time, with its offset."""
    return NOTHING if when is None else time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(when))


def counted(number: int, one: str, many: str = "") -> str:
    """1 worker, 2 workers."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def environment_words(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a run ran on, a line for each part; what is empty is left out."""
    lines = []
    for name, value in environment.items():
        if name == "memory" and isinstance(value, (int, float)):
            text = size(value)
        elif isinstance(value, Mapping):
            joint = " " if name == "packages" else "="
            text = ", ".join(f"{key}{joint}{part}" for key, part in value.items())
        else:
            text = str(value)
        if text and value is not None:
            lines.append((str(name), text))
    return lines
