"""`shoal compare`: in what runs differ, and their curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.circumstances import circumstances
from shoal.cli.output import write, write_file, write_json
from shoal.cli.pace import speed
from shoal.cli.plot import curve_of, draw
from shoal.cli.references import AsJson, Runs, open_store
from shoal.cli.text import Column, Screen, grid, shown_value
from shoal.core.errors import ConfigError
from shoal.monitor.servers import mean_staleness, stored_servers, sync_words
from shoal.monitor.wording import NOTHING, clean, duration, figure, one_line, size, span

if TYPE_CHECKING:
    from shoal.core.events import ServersSeen
    from shoal.core.traffic import Traffic
    from shoal.store.store import Store
    from shoal.store.values import RunInfo

ABOUT = """\
Say in what runs differ: their configuration, command, code and versions, and
what came of it. Differences of figures are to the first run.

[bold]Examples[/bold]
  [cyan]shoal compare last digits-a1[/cyan]                     two runs
  [cyan]shoal compare last digits-a1 --plot loss.png[/cyan]     and their curves (also .svg, .pdf)
  [cyan]shoal compare a b c --plot a.svg --metric accuracy[/cyan]
"""

_BY_SHARE = ("seconds", "samples/s", "bytes sent", "exchange seconds", "exposed seconds")
_WRITTEN = {"seconds": duration, "bytes sent": size, "exchange seconds": span, "exposed seconds": span}
_ENDINGS = (".png", ".svg", ".pdf")


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
        around = [circumstances(store, run) for run in found]
        seen = [stored_servers(store.events(run.id)) for run in found]
        curves = [curve_of(store, run, metric) for run in found] if plot is not None else []
        if curves and not any(curve.y or curve.evaluations for curve in curves):
            raise ConfigError(_no_such_metric(store, found, metric))
    if as_json:
        differences = differing_circumstances(found, around)
        told = {"runs": found, "config": differing(found), "differences": differences}
        write_json({**told, "figures": figures(found, seen)})
    else:
        write(render(found, around, Screen.now(), seen))
    if plot is not None:
        write_file(plot, lambda path: draw(curves, found, metric, path), force=force)
        typer.echo(f"Wrote {plot}", err=as_json)


def _no_such_metric(store: Store, runs: Sequence[RunInfo], metric: str) -> str:
    names = {name for run in runs for name in run.metrics}
    names |= {name for run in runs for step in store.steps(run.id, most=50) for name in step.logs}
    if metric == "loss" and not names:
        return "There is nothing to plot: none of these runs has done a step"
    return f"--metric {metric}: none of these runs has it; there is {', '.join(sorted(names | {'loss'}))}"


def differing(runs: Sequence[RunInfo]) -> dict[str, list[Any]]:
    """The settings that are not the same in all runs: one `Setting` per run, None where a run does not have it."""
    names = sorted({name for run in runs for name in run.config})
    rows = {name: [run.config.get(name) for run in runs] for name in names}
    return {
        name: row
        for name, row in rows.items()
        if any(setting is None or row[0] is None or setting.value != row[0].value for setting in row)
    }


def differing_circumstances(
    runs: Sequence[RunInfo], around: Sequence[Mapping[str, str]]
) -> dict[str, list[str | None]]:
    """What else is not the same in all runs; None where a run does not have it. What `differing` has is left out."""
    names = [name for name in dict.fromkeys(name for one in around for name in one) if name not in differing(runs)]
    rows: dict[str, list[str | None]] = {name: [one.get(name) or None for one in around] for name in names}
    return {name: row for name, row in rows.items() if len(set(row)) > 1}


def figures(runs: Sequence[RunInfo], seen: Sequence[ServersSeen | None]) -> dict[str, list[float | None]]:
    """What came of the runs, by name: the loss, every metric, and what it took."""
    metrics = list(dict.fromkeys(name for run in runs for name in run.metrics))
    accounts = [run.traffic if run.traffic.flows else None for run in runs]
    return {
        "loss": [run.loss for run in runs],
        **{f"eval {name}" if name == "loss" else name: [run.metrics.get(name) for run in runs] for name in metrics},
        "steps": [run.step for run in runs],
        "seconds": [run.seconds for run in runs],
        "samples/s": [speed(run) for run in runs],
        "bytes sent": [run.bytes_sent for run in runs],
        **(_times(accounts) if any(accounts) else {}),
        **({"mean staleness": [None if one is None else mean_staleness(one) for one in seen]} if any(seen) else {}),
        "workers": [run.workers for run in runs],
    }


def _times(accounts: Sequence[Traffic | None]) -> dict[str, list[float | None]]:
    """Over all workers; None for a run that sent nothing, kept no account, or has servers."""
    summed = [account if account is not None and account.operations else None for account in accounts]
    return {
        "exchange seconds": [None if account is None else account.exchange for account in summed],
        "exposed seconds": [None if account is None else account.exposed for account in summed],
    }


def render(
    runs: Sequence[RunInfo],
    around: Sequence[Mapping[str, str]],
    screen: Screen,
    seen: Sequence[ServersSeen | None] = (),
) -> str:
    """The whole comparison as text. Where a run has servers, it is said of each how its workers agreed."""
    agreed = [[sync_words(run.config)] if any(seen) else [] for run in runs]
    letters = [chr(ord("A") + index) if index < 26 else f"#{index + 1}" for index in range(len(runs))]
    parts = [
        f"{screen.heading('Runs')}\n",
        _table(
            letters,
            [
                [one_line(run.id), screen.status(run.status), *words, one_line(",".join(run.tags))]
                for run, words in zip(runs, agreed, strict=True)
            ],
            screen,
        ),
    ]
    settings, others = differing(runs), differing_circumstances(runs, around)
    if settings:
        room = _room(settings, screen, len(runs))
        rows = [
            [one_line(name), *(_setting(setting, screen, room) for setting in row)] for name, row in settings.items()
        ]
        parts += [f"\n{screen.heading('Configuration, where it differs')}\n", _table_of_rows(rows, letters, screen)]
    if others:
        room = _room(others, screen, len(runs))
        rows = [[one_line(name), *(_cut(clean(word or NOTHING), room) for word in row)] for name, row in others.items()]
        title = "What else differs" if settings else "What differs"
        parts += [f"\n{screen.heading(title)}\n", _table_of_rows(rows, letters, screen)]
    if not settings and not others:
        parts.append("\nNothing that Shoal knows of differs.\n")
    rows = [[one_line(name), *_side_by_side(name, row, screen)] for name, row in figures(runs, seen).items()]
    parts += [f"\n{screen.heading('Figures')}\n", _table_of_rows(rows, letters, screen)]
    return "".join(parts)


def _room(rows: Mapping[str, Any], screen: Screen, runs: int) -> int | None:
    """For each run's cell, beside the longest of the names."""
    return None if screen.width is None else max(12, (screen.width - max(map(len, rows)) - 2) // runs - 2)


def _cut(text: str, most: int | None) -> str:
    return text if most is None or len(text) <= most else text[: most - 1] + "…"


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
    value = _cut(value, None if room is None else max(4, room - len(setting.origin) - 3))
    return f"{value} {screen.style(f'({setting.origin})', dim=True)}"


def _side_by_side(name: str, row: Sequence[float | None], screen: Screen) -> list[str]:
    written: Callable[[float], str] = _WRITTEN.get(name, figure)
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
