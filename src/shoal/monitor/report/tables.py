"""Tables of the report's page, each within a limit. Whatever they are given is escaped here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from shoal.core.settings import FLAG, SCRIPT, Setting
from shoal.monitor.report.charts import escape

MOST_TABLE = 20_000
"""Characters of the configuration, and of the environment, once escaped."""
MOST_VALUE = 400
"""Of one value."""


def cut(text: str, most: int) -> str:
    """As much as fits, with a sign that there was more."""
    return text if len(text) <= most else text[: most - 1] + "…"


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values."""
    found = (f"<tr><th>{escape(cut(key, 80))}</th><td>{escape(value)}</td></tr>" for key, value in rows)
    return (
        f"<table><tbody>{''.join(within(found, MOST_TABLE, '<tr><td colspan=2>… and more</td></tr>'))}</tbody></table>"
    )


def columns_table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, words: int) -> str:
    """Rows under titles; all columns but the first `words` are of numbers."""
    looks = [""] * words + [' class="number"'] * (len(titles) - words)
    head = "".join(f"<th{look}>{escape(title)}</th>" for look, title in zip(looks, titles, strict=True))
    found = (
        f"<tr>{''.join(f'<td{look}>{escape(cut(cell, 80))}</td>' for look, cell in zip(looks, row, strict=True))}</tr>"
        for row in rows
    )
    rest = f"<tr><td colspan={len(titles)}>… and more</td></tr>"
    return (
        f'<table class="columns"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(within(found, MOST_TABLE, rest))}</tbody></table>"
    )


def within(rows: Iterable[str], most: int, rest: str) -> Iterator[str]:
    """As many rows as fit; `rest` instead of the others."""
    for row in rows:
        most -= len(row)
        if most < 0:
            yield rest
            return
        yield row


def _value(value: Any) -> str:
    """A plain value as text: strings as they are, the rest as JSON, what is not JSON as Python shows it."""
    if isinstance(value, str):
        return cut(value, MOST_VALUE)
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = f"({type(value).__name__})"
    return cut("none" if value is None else text, MOST_VALUE)


def settings_table(settings: Mapping[str, Setting]) -> str:
    """Arguments, their values and where these come from."""
    rows = within(
        (_setting(key, setting) for key, setting in settings.items()),
        MOST_TABLE // 2,
        "<tr><td colspan=3>… and more</td></tr>",
    )
    return (
        '<table class="settings"><thead><tr><th>argument</th><th class="value">value</th>'
        f'<th class="from">from</th></tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )


def _setting(key: str, setting: Setting) -> str:
    look = setting.origin if setting.origin in (FLAG, SCRIPT) else "origin"
    origin = escape(cut(setting.origin, 20))
    return (
        f'<tr><th>{escape(cut(str(key), 80))}</th><td class="mono">{escape(_value(setting.value))}</td>'
        f'<td class="{look}">{origin}</td></tr>'
    )
