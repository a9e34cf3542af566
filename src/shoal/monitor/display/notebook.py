"""Progress in a notebook: one output of the cell, updated in place. Needs no widgets. Used inside a kernel only."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from importlib import import_module
from typing import Any

from shoal.core.events import Preparing
from shoal.monitor.display import phrases
from shoal.monitor.display.outlet import pass_on
from shoal.monitor.display.phrases import Item
from shoal.monitor.display.redrawn import RedrawnView
from shoal.monitor.display.tally import Tally
from shoal.monitor.wording import one_line

_BOX = "font-family:monospace;font-size:13px;line-height:1.5;max-width:60em"
_TRACK = "height:6px;border-radius:3px;background:rgba(128,128,128,.3);margin:4px 0"
_FILL = "height:6px;border-radius:3px;background:#2a9d8f"
_CELL = "text-align:right;padding:0 .8em"
_HEADS = ("worker", "samples/s", "compute", "exchange", "data wait", "rest", "memory")


class NotebookView(RedrawnView):
    """Warnings are part of the output. What workers print goes to the cell as it is."""

    # every drawing is a message to the browser, and is kept there until the next
    seconds_apart = 0.25
    _most_said = 50

    def __init__(self, *, verbose: bool, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._verbose = verbose
        self._handle: Any = None
        self._left = False
        self._said: list[str] = []

    def say(self, text: str) -> None:
        self._said = [*self._said[1 - self._most_said :], f"shoal: {text}"]
        self._draw()

    def output(self, worker: int, stream: str, text: str) -> None:
        pass_on(stream, text)

    def _begin(self) -> None:
        if self._left:
            self._left, self._handle, self._said = False, None, []

    def _draw(self) -> None:
        bundle = {"text/html": page(self._tally, self._said, verbose=self._verbose), "text/plain": self._plain()}
        if self._handle is None:
            # there is one wherever a kernel runs; without it, this file must still be checked
            self._handle = import_module("IPython.display").display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def _leave(self, *, keep: bool) -> None:
        self._left = True
        if not keep:
            self._draw()

    def _plain(self) -> str:
        return "\n".join([*map(phrases.joined, _rows(self._tally)), *self._said])


def page(tally: Tally, said: list[str], *, verbose: bool) -> str:
    """The state as HTML without scripts; everything that comes from outside is escaped."""
    parts = []
    if tally.run is not None and tally.total > 0:
        parts.append(_bar(tally.step / tally.total))
    parts += [f"<div>{_html(items)}</div>" for items in _rows(tally)]
    if tally.preparing is not None and tally.end is None:
        parts.append(_preparing(tally.preparing))
    if verbose and tally.settled is not None:
        parts.append(f"<div>{escape(phrases.settled(tally.settled))}</div>")
    if verbose and tally.servers is not None:
        parts.append(f"<div>{escape(phrases.served(tally.servers))}</div>")
    if verbose and tally.workers:
        parts.append(_workers(tally))
    parts += [f'<div style="white-space:pre-wrap">{escape(text)}</div>' for text in said]
    return f'<div style="{_BOX}">{"".join(parts)}</div>'


def _rows(tally: Tally) -> list[list[Item]]:
    if tally.run is None:
        return []
    rows = [
        [*phrases.title(tally), *phrases.position(tally)],
        phrases.quality(tally),
        phrases.evaluation(tally),
        phrases.pace(tally),
        phrases.shares(tally.shares),
    ]
    return [row for row in rows if row]


def _html(items: list[Item]) -> str:
    return " &nbsp;".join(f"{escape(item.before)}<b>{escape(item.value)}</b>{escape(item.after)}" for item in items)


def _bar(fraction: float) -> str:
    filled = 100 * min(1.0, max(0.0, fraction))
    return f'<div style="{_TRACK}"><div style="{_FILL};width:{filled:.1f}%"></div></div>'


def _preparing(event: Preparing) -> str:
    bar = _bar(event.done / event.total) if event.total > 0 else ""
    return f"<div>{escape(one_line(event.what))} {escape(phrases.prepared(event))}</div>{bar}"


def _workers(tally: Tally) -> str:
    head = "".join(f'<th style="{_CELL}">{name}</th>' for name in _HEADS)
    rows = (
        "".join(f'<td style="{_CELL}">{escape(cell)}</td>' for cell in cells) for cells in phrases.worker_rows(tally)
    )
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
