"""`shoal runs`: a list of the runs in the store."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.output import write, write_json
from shoal.cli.pace import speed, steps_of
from shoal.cli.references import AsJson, open_store
from shoal.cli.text import Column, Screen, ago, grid
from shoal.monitor.wording import duration, figure, moment, one_line

if TYPE_CHECKING:
    from shoal.store.values import RunInfo

ABOUT = """\
List the runs in the store, newest first. In a pipe: every column, separated by
tabs, nothing cut.

[bold]Examples[/bold]
  [cyan]shoal runs[/cyan]                          the newest 20
  [cyan]shoal runs --status failed --all[/cyan]    every run that failed
  [cyan]shoal runs --name digits --tag best[/cyan]
  [cyan]shoal runs --all | cut -f1,6[/cyan]        ids and losses, for another program
"""

_FIRST_STEPS = """\
No runs yet. Every training is kept here. To make the first:
  shoal demo            a small network on real data
  shoal run train.py    your own script
"""


class Status(StrEnum):
    """The states of a run."""

    RUNNING = "running"
    COMPLETE = "complete"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"
    PREEMPTED = "preempted"
    FAILED = "failed"
    KILLED = "killed"
    LOST = "lost"


def register(app: typer.Typer) -> None:
    """Add `shoal runs`."""
    app.command(name="runs", help=ABOUT, short_help="List the runs in the store.")(runs)


def runs(
    name: Annotated[str | None, typer.Option("--name", help="Only runs of this name.")] = None,
    tag: Annotated[str | None, typer.Option("--tag", help="Only runs with this tag.")] = None,
    status: Annotated[Status | None, typer.Option("--status", help="Only runs in this state.")] = None,
    limit: Annotated[int, typer.Option("-n", min=1, help="How many at most.")] = 20,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    as_json: AsJson = False,
) -> None:
    """List runs."""
    with open_store() as store:
        found = store.runs(
            limit=None if every else limit + 1, name=name, tag=tag, status=None if status is None else status.value
        )
    listed = found if every else found[:limit]
    if as_json:
        write_json(listed)
    elif not listed:
        asked = any(wanted is not None for wanted in (name, tag, status))
        write("No run is like that; `shoal runs` lists all.\n" if asked else _FIRST_STEPS)
    else:
        screen = Screen.now()
        write(list_as_text(listed, screen, now=time.time()))
        if len(found) > len(listed) and screen.width is not None:
            write(screen.style(f"The newest {limit}; --all shows all.", dim=True) + "\n")


def list_as_text(runs: Sequence[RunInfo], screen: Screen, *, now: float) -> str:
    """A table that fits the screen, or, where there is none, lines with tabs that have everything."""
    if screen.width is None:
        return runs_as_lines(runs)

    def cells(cell: Callable[[RunInfo], str]) -> list[str]:
        return [one_line(cell(run)) for run in runs]

    columns = [
        Column("id", cells(lambda run: run.id)),
        Column("name", cells(lambda run: run.name), rank=9),
        Column("status", [screen.status(run.status) for run in runs], rank=1),
        Column("when", [ago(now - run.created) for run in runs], rank=2),
        Column("steps", [steps_of(run) for run in runs], rank=4, right=True),
        Column("loss", [figure(run.loss) for run in runs], rank=3, right=True),
        Column("metrics", cells(_metrics), rank=5),
        Column("workers", [str(run.workers) for run in runs], rank=6, right=True),
        Column("samples/s", [figure(speed(run)) for run in runs], rank=8, right=True),
        Column("took", [duration(run.seconds) for run in runs], rank=7, right=True),
        Column("tags", cells(lambda run: ",".join(run.tags)), rank=5),
    ]
    return grid([column for column in columns if any(column.cells)], screen)


def _metrics(run: RunInfo) -> str:
    return " ".join(f"{name}={figure(value)}" for name, value in list(run.metrics.items())[:2])


def runs_as_lines(runs: Sequence[RunInfo]) -> str:
    """A header and a line per run, with tabs between the columns: for `cut`, `sort` and spreadsheets."""
    rows = [["id", "name", "status", "created", "steps", "loss", "metrics", "workers", "samples/s", "seconds", "tags"]]
    for run in runs:
        metrics = " ".join(f"{name}={value:.6g}" for name, value in run.metrics.items())
        numbers = ("" if value is None else f"{value:.6g}" for value in (run.loss, speed(run), run.seconds))
        loss, rate, seconds = numbers
        row = [run.id, run.name, run.status, moment(run.created), steps_of(run), loss, metrics, str(run.workers)]
        rows.append([*row, rate, seconds, ",".join(run.tags)])
    return "".join("\t".join(map(one_line, row)) + "\n" for row in rows)
