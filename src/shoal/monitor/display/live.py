"""Progress in a terminal: a few lines at its end, drawn anew several times a second. Imports Rich: import it late."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.console import Console
from rich.text import Text

from shoal.core.events import Preparing
from shoal.monitor.display import phrases
from shoal.monitor.display.outlet import is_terminal, put
from shoal.monitor.display.phrases import Item
from shoal.monitor.display.redrawn import RedrawnView
from shoal.monitor.display.region import Line, Region, beneath, tamed
from shoal.monitor.display.tally import Tally
from shoal.monitor.wording import one_line, percent

_MOST_COLUMNS = 120
_BAR_COLUMNS = 40
_ROOM_TO_GROW = 12
_SHORT_HEADS = ("#", "smp/s", "comp", "exch", "data", "rest", "memory")
_HEADS = ("worker", "samples/s", "compute", "exchange", "data wait", "rest", "memory")


class LiveView(RedrawnView):
    """On `stream`, which is a terminal. `verbose` adds the run's folder and a line per worker."""

    def __init__(self, stream: TextIO | None, *, verbose: bool, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._stream = beneath(stream or sys.stderr)
        self._verbose = verbose
        self._region: Region | None = None
        self._console = Console(
            file=self._stream, force_terminal=True, force_jupyter=False, highlight=False, markup=False, emoji=False
        )

    def say(self, text: str) -> None:
        self._print(self._stream, f"shoal: {text}\n")

    def output(self, worker: int, stream: str, text: str) -> None:
        target = beneath(sys.stdout if stream == "out" else sys.stderr)
        if not is_terminal(target):
            put(target, text)
            return
        several = self._tally.run is not None and self._tally.run.workers > 1
        self._print(target, tamed(text, f"[{worker}] " if several else ""))

    def _print(self, target: TextIO, text: str) -> None:
        if self._region is None:
            put(target, text)
        else:
            self._region.above(target, text)

    def _begin(self) -> None:
        self._region = Region(self._stream)
        self._region.open()

    def _draw(self) -> None:
        if self._region is None:
            return
        columns, rows = self._region.size()
        width = min(columns, _MOST_COLUMNS)
        ascii_only = not self._console.encoding.startswith("utf")
        lines = list(run_lines(self._tally, width, verbose=self._verbose, ascii_only=ascii_only))
        if self._verbose:
            lines += worker_lines(self._tally, width, rows - len(lines))
        self._region.draw(self._written(lines[:rows], width))

    def _leave(self, *, keep: bool) -> None:
        region, self._region = self._region, None
        if region is not None:
            region.close(keep=keep)

    def _written(self, lines: list[Text], width: int) -> list[Line]:
        for line in lines:
            line.truncate(width)
        self._console.width = width
        with self._console.capture() as captured:
            self._console.print(Text("\n").join(lines), end="", no_wrap=True)
        texts = captured.get().split("\n")
        return [Line(text, line.cell_len) for text, line in zip(texts, lines, strict=True)]


def run_lines(tally: Tally, width: int, *, verbose: bool, ascii_only: bool) -> Iterator[Text]:
    """The run in a few lines of at most `width` columns; what is being prepared comes last."""
    if tally.run is not None:
        yield from _apart(_styled(phrases.title(tally)), _styled(phrases.position(tally)), width)
        if tally.total > 0:
            yield _bar(tally.step / tally.total, width, ascii_only)
        yield from _together(_styled(phrases.quality(tally)), _styled(phrases.evaluation(tally)), width)
        yield from _together(_styled(phrases.pace(tally)), _styled(phrases.shares(tally.shares)), width)
        if verbose and tally.run.run_dir:
            yield Text.assemble(("folder ", "dim"), one_line(tally.run.run_dir))
        if verbose and tally.settled is not None:
            yield Text(phrases.settled(tally.settled), style="dim")
        if verbose and tally.servers is not None:
            yield Text(phrases.served(tally.servers), style="dim")
    if tally.preparing is not None:
        yield _preparing(tally.preparing, tally.elapsed_preparing, width, ascii_only)


def worker_lines(tally: Tally, width: int, rows: int) -> list[Text]:
    """A line per worker under a heading, in at most `rows`; says how many more there are."""
    if not tally.workers or rows < 2:
        return []
    short = width < 68
    heads = _SHORT_HEADS if short else _HEADS
    cells = list(phrases.worker_rows(tally))
    room = rows - 1 if len(cells) < rows else rows - 2
    shown = cells[:room]
    widths = [max(map(len, column)) for column in zip(heads, *shown, strict=True)]
    gap = " " if short else "  "
    lines = [Text(gap.join(head.rjust(w) for head, w in zip(heads, widths, strict=True)), style="dim")]
    lines += [Text(gap.join(cell.rjust(w) for cell, w in zip(row, widths, strict=True))) for row in shown]
    if len(cells) > len(shown):
        lines.append(Text(f"and {len(cells) - len(shown)} more workers", style="dim"))
    return lines


def _styled(items: list[Item]) -> list[Text]:
    return [Text.assemble((item.before, "dim"), (item.value, "bold"), (item.after, "dim")) for item in items]


def _apart(left: list[Text], right: list[Text], width: int) -> Iterator[Text]:
    """Both on one line, at its two ends, if they fit."""
    first, last = Text("  ").join(left), Text("  ").join(right)
    space = width - first.cell_len - last.cell_len
    if space >= 2:
        yield Text.assemble(first, " " * space, last)
    else:
        yield from _flowing(left, width)
        yield from _flowing(right, width)


def _together(left: list[Text], right: list[Text], width: int) -> Iterator[Text]:
    """Both on one line if they fit, with room for figures to grow; otherwise one after the other."""
    first, last = Text("  ").join(left), Text("  ").join(right)
    if left and right and first.cell_len + 4 + last.cell_len + _ROOM_TO_GROW <= width:
        yield Text.assemble(first, "    ", last)
    else:
        yield from _flowing(left, width)
        yield from _flowing(right, width)


def _flowing(items: list[Text], width: int) -> Iterator[Text]:
    """As many on a line as fit."""
    line = Text()
    for item in items:
        if line and line.cell_len + 2 + item.cell_len > width:
            yield line
            line = Text()
        line = Text.assemble(line, "  ", item) if line else item
    if line:
        yield line


def _bar(fraction: float, width: int, ascii_only: bool) -> Text:
    told = f" {percent(min(1.0, fraction)):>4}"
    return Text.assemble(_stroke(fraction, max(5, width - len(told)), ascii_only), told)


def _stroke(fraction: float, width: int, ascii_only: bool) -> Text:
    full = int(min(1.0, max(0.0, fraction)) * width)
    done, open_ = ("#", "-") if ascii_only else ("━", "━")
    tip = "" if ascii_only or full in (0, width) else "╸"
    colour = "green" if full == width else "cyan"
    # without colours the two parts must look different
    rest = (open_ if ascii_only else "─") * (width - full)
    return Text.assemble((done * (full - len(tip)) + tip, colour), (rest, "dim"))


def _preparing(event: Preparing, since: float, width: int, ascii_only: bool) -> Text:
    what, told = phrases.shortened(event.what, 60), phrases.prepared(event)
    if event.total > 0:
        room = min(_BAR_COLUMNS, width - len(what) - len(told) - 4)
        stroke = _stroke(event.done / event.total, room, ascii_only) if room >= 5 else Text()
        return Text("  ").join([part for part in (Text(what), stroke, Text(told)) if part])
    frames = "|/-\\" if ascii_only else "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
    spinner = frames[int(since * 8) % len(frames)]
    parts = [Text.assemble((spinner, "cyan"), " ", what), Text(told), Text(phrases.clock(since), style="dim")]
    return Text("  ").join([part for part in parts if part])
