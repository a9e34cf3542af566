"""The report at the end of a run, for a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from shoal.core.events import ServersSeen
from shoal.monitor.display.outlet import in_notebook
from shoal.monitor.report.advice import advice
from shoal.monitor.report.summary import PARTS, Summary
from shoal.monitor.report.words import balance_words, memory_words, outcome_words
from shoal.monitor.servers import servers_words, staleness_words
from shoal.monitor.traffic import exchange_words, sent_words
from shoal.monitor.wording import clean, counted, duration, figure, one_line, percent, size, times
from shoal.store.values import COMPLETE, FAILED, RUNNING, STOPPED

BAR_WIDTH = 30
LABEL_WIDTH = 11
MOST_METRICS = 8
NOTEBOOK_WIDTH = 100
MOST_LINE = 300
"""Characters of a foreign text on one line."""

_SIGNS = dict(zip(PARTS, "█▓▒░▚·", strict=True))
_PLAIN_SIGNS = dict(zip(PARTS, "#=~ec.", strict=True))
_PLAIN = str.maketrans("–·…µ", "-|.u")
_STYLES = dict(zip(PARTS, ("blue", "yellow", "red", "cyan", "magenta", "bright_black"), strict=True))


_COPIED = ("Report", "Resume", "Look")
"""What is copied from the screen is not broken, however long."""


def print_report(summary: Summary, console: Console) -> None:
    """A dozen lines or two, no wider than the console, but for what is to be copied.

    In a notebook it goes to standard output instead, all at once: each print would be an output of its own.

    Whatever came from the run is printed as text, never as markup or terminal sequences.
    """
    if in_notebook():
        text = io.StringIO()
        _print(summary, Console(file=text, width=NOTEBOOK_WIDTH, color_system=None, force_jupyter=False))
        print(text.getvalue(), end="", flush=True)
    else:
        _print(summary, console)


def _print(summary: Summary, console: Console) -> None:
    plain = not (console.encoding or "").lower().startswith("utf")
    room = max(20, console.width - LABEL_WIDTH)
    for label, text in _lines(summary, _PLAIN_SIGNS if plain else _SIGNS, room):
        rows = [text] if label in _COPIED else text.wrap(console, room, overflow="fold")
        for number, row in enumerate(rows):
            line = Text.assemble((f"{'' if number else label:<{LABEL_WIDTH}}", "bold"), row)
            line.rstrip()
            if plain:
                line.plain = line.plain.translate(_PLAIN).encode("ascii", "replace").decode()
            console.print(line, soft_wrap=True, highlight=False)


def _lines(summary: Summary, signs: dict[str, str], room: int) -> Iterator[tuple[str, Text]]:
    """Labels, and what stands beside them in `room` columns."""
    yield "Run", _outcome(summary)
    if summary.error:
        yield "Error", Text(_one_line(summary.error), style="red")
    if summary.loss.last is not None or summary.metrics:
        yield "Loss", Text(_loss(summary))
    if summary.samples_per_second is not None:
        yield "Speed", Text(_speed(summary))
    if summary.shares:
        yield "Time", _bar(summary.shares, signs, room)
    if summary.bytes_sent:
        yield "Sent", Text(_sent(summary))
    if summary.account and (words := exchange_words(summary.account)):
        yield "Exchange", Text(_one_line(words))
    if summary.workers:
        yield "Workers", Text(_workers(summary))
    if summary.servers is not None:
        yield "Servers", Text(_servers(summary.servers))
    hint = advice(summary)
    if summary.cost is not None and summary.cost.words not in hint:
        yield "Samples", Text(_one_line(summary.cost.words))
    if summary.counts["notice"]:
        yield "Notices", Text(f"{counted(summary.counts['notice'], 'notice')}, listed in the report")
    if hint:
        yield "Advice", Text(hint, style="bold")
    if summary.run_dir:
        yield "Report", Text(clean(summary.report_path))
    if summary.outcome not in (COMPLETE, RUNNING) and summary.how_to_resume and summary.has_checkpoint:
        yield "Resume", Text(_one_line(summary.how_to_resume))
    if summary.run_id and summary.recorded:
        yield "Look", Text(f"shoal show {_one_line(summary.run_id)}")


def _one_line(text: str) -> str:
    line = one_line(text)
    return line if len(line) <= MOST_LINE else line[: MOST_LINE - 1] + "…"


def _outcome(summary: Summary) -> Text:
    style = {COMPLETE: "green", STOPPED: "green", RUNNING: "blue", FAILED: "red"}.get(summary.outcome, "yellow")
    name = _one_line(summary.name or summary.run_id)
    resumes = summary.counts["resume"]
    again = f", resumed {counted(resumes, 'time')}" if resumes else ""
    workers = counted(summary.planned_workers, "worker")
    return Text.assemble(
        f"{name}: ", (outcome_words(summary), style), f" in {duration(summary.wall_seconds)} on {workers}{again}"
    )


def _loss(summary: Summary) -> str:
    first, last = summary.loss.first, summary.loss.last
    parts = []
    if first is not None and last is not None:
        end = summary.final_loss if summary.final_loss is not None else last.value
        parts.append(
            f"{figure(end)} (step {first.step:,}: {figure(first.value)})" if first is not last else figure(end)
        )
    evaluated = list(summary.metrics.items())
    if evaluated:
        shown = ", ".join(f"{_one_line(name)} {figure(value)}" for name, value in evaluated[:MOST_METRICS])
        more = f" and {len(evaluated) - MOST_METRICS} more" if len(evaluated) > MOST_METRICS else ""
        parts.append(f"evaluation: {shown}{more}")
    return " · ".join(parts)


def _speed(summary: Summary) -> str:
    text = f"{figure(summary.samples_per_second)} samples/s, {figure(summary.steps_per_second)} steps/s"
    if summary.speedup is not None and summary.efficiency is not None and summary.baseline is not None:
        against = "one worker" if summary.baseline.workers == 1 else counted(summary.baseline.workers, "worker")
        text += (
            f" · {times(summary.speedup, 3)} times {against} (efficiency {percent(summary.efficiency)}, "
            f"against {_one_line(summary.baseline.run_id)})"
        )
    return text


def _bar(shares: dict[str, float], signs: dict[str, str], room: int) -> Text:
    """The bar and what its signs mean: beside it if there is room for all, else on lines below it."""
    bar = Text()
    for part, cells in cells_of(shares, min(BAR_WIDTH, room)).items():
        bar.append(signs[part] * cells, style=_STYLES[part])
    legend = [
        Text.assemble((signs[part], _STYLES[part]), f" {part} {percent(shares[part])}")
        for part in PARTS
        if shares[part] >= 0.005
    ]
    if len(bar) + sum(2 + len(entry) for entry in legend) <= room:
        return Text("  ").join([bar, *legend])
    rows = [bar, Text()]
    for entry in legend:
        if rows[-1] and len(rows[-1]) + 2 + len(entry) > room:
            rows.append(Text())
        rows[-1].append("  " if rows[-1] else "").append(entry)
    return Text("\n").join(rows)


def cells_of(shares: dict[str, float], width: int) -> dict[str, int]:
    """Whole cells for shares that add up to 1, `width` in all, each within one cell of its share."""
    ends, total = [], 0.0
    for part in PARTS:
        total += shares[part]
        ends.append(round(total * width))
    return {part: end - begin for part, begin, end in zip(PARTS, [0, *ends], ends, strict=False)}


def _sent(summary: Summary) -> str:
    total = f"{size(summary.bytes_sent)} in all"
    if summary.account:
        total += f": {_one_line(sent_words(summary.account))}"
    if not summary.bytes_per_step:
        return total
    return f"{size(summary.bytes_per_step)} per step, {total}"


def _workers(summary: Summary) -> str:
    return " · ".join(words for words in (balance_words(summary), memory_words(summary)) if words)


def _servers(seen: ServersSeen) -> str:
    return " · ".join(words for words in (servers_words(seen), staleness_words(seen)) if words)
