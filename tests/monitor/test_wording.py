"""Numbers, times and foreign text as a person reads them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shoal.monitor.wording import clean, counted, duration, figure, one_line, percent, short, size, span


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.12345, "0.1235"),
        (1234.5, "1,234"),
        (1e-5, "1e-05"),
        (1e10, "1e+10"),
        (10**10, "10,000,000,000"),
        (float("nan"), "NaN"),
        (float("-inf"), "-inf"),
        (None, "–"),
    ],
)
def test_figures(value: float | None, text: str) -> None:
    assert figure(value) == text


def test_ticks() -> None:
    assert [short(value) for value in (0, 250, 1000, 2.5e6, 1e-5)] == ["0", "250", "1k", "2.5M", "1e-05"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1.4, "1 byte"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (300 << 20, "300 MiB"),
        (5 << 40, "5.0 TiB"),
        (1 << 60, "1,048,576 TiB"),
        (None, "–"),
    ],
)
def test_sizes(count: float | None, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (12.3, "12 s"),
        (59.6, "1 min 00 s"),
        (61, "1 min 01 s"),
        (3700, "1 h 01 min"),
        (90_000, "1 d 01 h"),
        (-1, "–"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1.14e-5, "11 µs"),
        (9.96e-6, "10 µs"),
        (4.25e-6, "4.2 µs"),
        (0.0042, "4.2 ms"),
        (0.00999, "10 ms"),
        (0.31, "0.31 s"),
        (0.9999, "1.0 s"),
        (75, "1 min 15 s"),
        (-1, "–"),
        (float("nan"), "–"),
    ],
)
def test_short_times(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_shares_and_counts() -> None:
    assert [percent(share) for share in (0, 0.001, 0.5)] == ["0%", "<1%", "50%"]
    assert [counted(number, "step") for number in (0, 1, 1200)] == ["0 steps", "1 step", "1,200 steps"]


def test_foreign_text_is_made_safe() -> None:
    assert clean("a\x1b[31mb\x00\ud800\n") == "ab\ufffd\ufffd\n"
    assert one_line(" a\r\n\tb\x1b]0;title\x07\u202e ") == "a b\ufffd"


def test_it_is_light() -> None:
    code = "import sys, shoal.monitor.wording; print({'rich', 'msgspec', 'sqlalchemy', 'torch'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout == "set()\n"
