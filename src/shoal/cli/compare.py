"""`shoal compare`, and how figures of runs are written and set side by side."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.export import (
    NOTHING,
    AsJson,
    Runs,
    duration,
    figure,
    open_store,
    size,
    speed,
    write,
    write_file,
    write_json,
)
from shoal.core.errors import ConfigError

if TYPE_CHECKING:
    from shoal.store.store import Store
    from shoal.store.values import RunInfo, StepRow

ABOUT = """\
Say in what runs differ: their configuration, and what came of it. Differences
are to the first run.

[bold]Examples[/bold]
  [cyan]shoal compare last digits-a1[/cyan]                     two runs
  [cyan]shoal compare last digits-a1 --plot loss.png[/cyan]     and their curves (also .svg, .pdf)
  [cyan]shoal compare a b c --plot a.svg --metric accuracy[/cyan]
"""

POINTS = 2000
"""Steps per curve, evenly thinned out."""
_BY_SHARE = ("seconds", "samples/s", "bytes sent")
_ENDINGS = (".png", ".svg", ".pdf")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C564B")
"""Told apart also by those who do not see all colours."""
STATUS = {
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
        glyph, color = STATUS.get(status, ("·", "white"))
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
    unit, name = next(pair for pair in _UNITS if seconds >= pair[0])
    return f"{int(seconds // unit)} {name} ago"


def shown_value(value: Any) -> str:
    """A setting as one would write it, on one line."""
    return value if isinstance(value, str) and value and value.isprintable() else repr(value)


def register(app: typer.Typer) -> None:
    """Add `shoal compare`."""
    app.command(name="compare", help=ABOUT, short_help="Say in what runs differ, and plot them.")(compare)


def compare(
    runs: Runs,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the runs to a .png, .svg or .pdf.")
    ] = None,
    metric: Annotated[
        str, typer.Option("--metric", help="What to plot: the loss, a logged figure or a metric of the evaluation.")
    ] = "loss",
    force: Annotated[bool, typer.Option("--force", help="Write over FILE if it is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two runs or more."""
    if len(runs) < 2:
        raise ConfigError(f"compare needs two runs or more, and got only {runs[0]!r}; `shoal runs` lists them")
    if plot is not None and plot.suffix.lower() not in _ENDINGS:
        raise ConfigError(f"--plot {plot}: the file must end in {', '.join(_ENDINGS)}")
    with open_store() as store:
        found = [store.find(ref) for ref in runs]
        curves = [curve_of(store, run, metric) for run in found] if plot is not None else []
        if curves and not any(curve.y or curve.evaluations for curve in curves):
            raise ConfigError(_no_such_metric(store, found, metric))
    if as_json:
        write_json({"runs": found, "config": differing(found), "figures": figures(found)})
    else:
        write(render(found, Screen.now()))
    if plot is not None:
        write_file(plot, lambda path: draw(curves, found, metric, path), force=force)
        typer.echo(f"Wrote {plot}", err=as_json)


def differing(runs: Sequence[RunInfo]) -> dict[str, list[Any]]:
    """The settings that are not the same in all runs: one `Setting` per run, None where a run does not have it."""
    names = sorted({name for run in runs for name in run.config})
    rows = {name: [run.config.get(name) for run in runs] for name in names}
    return {
        name: row
        for name, row in rows.items()
        if any(setting is None or row[0] is None or setting.value != row[0].value for setting in row)
    }


def figures(runs: Sequence[RunInfo]) -> dict[str, list[float | None]]:
    """What came of the runs, by name: the loss, every metric, and what it took."""
    metrics = list(dict.fromkeys(name for run in runs for name in run.metrics))
    return {
        "loss": [run.loss for run in runs],
        **{f"eval {name}" if name == "loss" else name: [run.metrics.get(name) for run in runs] for name in metrics},
        "steps": [run.step for run in runs],
        "seconds": [run.seconds for run in runs],
        "samples/s": [speed(run) for run in runs],
        "bytes sent": [run.bytes_sent for run in runs],
        "workers": [run.workers for run in runs],
    }


def render(runs: Sequence[RunInfo], screen: Screen) -> str:
    """The whole comparison as text."""
    letters = [chr(ord("A") + index) if index < 26 else f"#{index + 1}" for index in range(len(runs))]
    parts = [
        f"{screen.heading('Runs')}\n",
        _table(letters, [[run.id, screen.status(run.status), ",".join(run.tags)] for run in runs], screen),
    ]
    settings = differing(runs)
    if settings:
        longest = max(map(len, settings))
        room = None if screen.width is None else max(12, (screen.width - longest - 2) // len(runs) - 2)
        rows = [[name, *(_setting(setting, screen, room) for setting in row)] for name, row in settings.items()]
        parts += [f"\n{screen.heading('Configuration, where it differs')}\n", _table_of_rows(rows, letters, screen)]
    else:
        parts.append("\nThe configurations are the same.\n")
    rows = [[name, *_side_by_side(name, row, screen)] for name, row in figures(runs).items()]
    parts += [f"\n{screen.heading('Figures')}\n", _table_of_rows(rows, letters, screen)]
    return "".join(parts)


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], screen: Screen) -> str:
    columns = [Column("", names), *(Column("", cells) for cells in zip(*rows, strict=True))]
    return grid(columns, screen, indent="  ")


def _table_of_rows(rows: Sequence[Sequence[str]], letters: Sequence[str], screen: Screen) -> str:
    titles = ["", *letters]
    return grid(
        [Column(title, cells) for title, cells in zip(titles, zip(*rows, strict=True), strict=True)],
        screen,
        indent="  ",
    )


def _setting(setting: Any, screen: Screen, room: int | None) -> str:
    """A value and its origin, in `room` places."""
    if setting is None:
        return NOTHING
    value = shown_value(setting.value)
    most = len(value) if room is None else max(4, room - len(setting.origin) - 3)
    value = value if len(value) <= most else value[: most - 1] + "…"
    return f"{value} {screen.style(f'({setting.origin})', dim=True)}"


def _side_by_side(name: str, row: Sequence[float | None], screen: Screen) -> list[str]:
    written: Callable[[float], str] = {"seconds": duration, "bytes sent": size}.get(name, figure)
    cells = []
    for value in row:
        change = _change(row[0], value, share=name in _BY_SHARE)
        cell = NOTHING if value is None else written(value)
        cells.append(f"{cell} {screen.style(change, dim=True)}" if change else cell)
    return cells


def _change(before: float | None, after: float | None, *, share: bool) -> str:
    """`(+3.1%)` or `(-0.02)`, or nothing where there is no difference to speak of."""
    if before is None or after is None or not math.isfinite(before) or not math.isfinite(after) or before == after:
        return ""
    if share:
        return f"({(after - before) / before:+.1%})" if before else ""
    return f"({after - before:+,})" if isinstance(after - before, int) else f"({after - before:+.3g})"


@dataclass(frozen=True)
class Curve:
    """One figure of one run: `x` are steps, `seconds` the time since the run started, pauses left out."""

    x: list[int]
    seconds: list[float]
    y: list[float]
    evaluations: list[tuple[int, float, float]]
    """Step, seconds, value."""


def curve_of(store: Store, run: RunInfo, metric: str) -> Curve:
    """What the run's steps and evaluations say about `metric`; empty where they say nothing."""
    steps = store.steps(run.id, most=POINTS)
    events = store.events(run.id)
    clock = _clock(run, steps, [event.time for event in events if event.kind == "RunStarted"])
    points = [(step, step.loss if metric == "loss" else step.logs.get(metric)) for step in steps]
    kept = [(step, float(value)) for step, value in points if value is not None]
    evaluations = [
        (event.step, clock(event.time), float(event.data["metrics"][metric]))
        for event in events
        if event.kind == "EvalDone" and event.data.get("metrics", {}).get(metric) is not None
    ]
    return Curve(
        [step.step for step, _ in kept],
        [clock(step.time) for step, _ in kept],
        [value for _, value in kept],
        evaluations,
    )


def _clock(run: RunInfo, steps: Sequence[StepRow], starts: Sequence[float]) -> Callable[[float], float]:
    """Turns a time into seconds since the start, without the pauses before each resume."""
    begun = starts[0] if starts else steps[0].time if steps else run.created
    pauses = [
        (start, start - max((step.time for step in steps if step.time <= start), default=start)) for start in starts[1:]
    ]
    return lambda moment: max(0.0, moment - begun - sum(pause for start, pause in pauses if moment >= start))


def _no_such_metric(store: Store, runs: Sequence[RunInfo], metric: str) -> str:
    names = {name for run in runs for name in run.metrics}
    names |= {name for run in runs for step in store.steps(run.id, most=50) for name in step.logs}
    if metric == "loss" and not names:
        return "There is nothing to plot: none of these runs has done a step"
    return f"--metric {metric}: none of these runs has it; there is {', '.join(sorted(names | {'loss'}))}"


def draw(curves: Sequence[Curve], runs: Sequence[RunInfo], metric: str, path: Path) -> None:
    """Draw the curves against steps and against time. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "Plots are drawn by matplotlib, which is not installed. Install it with: pip install 'shoal[plot]'   "
            "(or: pip install matplotlib)"
        ) from error
    drawing = Figure(figsize=(11, 5), dpi=150, layout="constrained")
    by_step, by_time = drawing.subplots(1, 2, sharey=True)
    longest = max(
        (time for curve in curves for time in (*curve.seconds, *(at[1] for at in curve.evaluations))), default=0
    )
    unit, name = next(((unit, name) for unit, name in _UNITS[1:] if longest >= 3 * unit), _UNITS[-1])
    for index, (curve, run) in enumerate(zip(curves, runs, strict=True)):
        color, label = _COLORS[index % len(_COLORS)], f"{run.id} ({run.workers} worker{'s'[: run.workers != 1]})"
        steps, times = [float(step) for step in curve.x], [second / unit for second in curve.seconds]
        _draw_curve(by_step, steps, curve.y, color, label)
        _draw_curve(by_time, times, curve.y, color, "")
        marks = {"color": color, "marker": "o", "markersize": 5, "markeredgecolor": "white"}
        marks["linestyle"] = "none" if curve.y else "-"
        values = [value for _, _, value in curve.evaluations]
        label = f"{run.id}, evaluation" if values else ""
        by_step.plot([step for step, _, _ in curve.evaluations], values, label=label or "_", **marks)
        by_time.plot([time / unit for _, time, _ in curve.evaluations], values, **marks)
    by_step.set(xlabel="step", ylabel=metric)
    by_time.set(xlabel=f"time in {name}, pauses left out")
    for axes in (by_step, by_time):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    drawing.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    drawing.savefig(path)


def _draw_curve(axes: Any, x: list[float], y: list[float], color: str, label: str) -> None:
    """Many points: every one faintly, and their mean over 2 % of the curve on top. NaN is a gap."""
    if not y:
        return
    if len(y) < 100:
        axes.plot(x, y, color=color, linewidth=1.6, label=label or "_", marker="." if len(y) == 1 else None)
        return
    axes.plot(x, y, color=color, linewidth=0.8, alpha=0.25)
    axes.plot(x, _smoothed(y, len(y) // 50), color=color, linewidth=1.8, label=label or "_")


def _smoothed(values: list[float], window: int) -> list[float]:
    """Each value's mean with those around it. What is not finite stays a gap, and does not spread."""
    half = window // 2
    means = []
    for place, value in enumerate(values):
        near = [other for other in values[max(0, place - half) : place + half + 1] if math.isfinite(other)]
        means.append(sum(near) / len(near) if math.isfinite(value) else math.nan)
    return means
