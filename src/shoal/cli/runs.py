"""`shoal runs`, `shoal show`, `shoal tag` and `shoal rm`: what is in the run store."""

from __future__ import annotations

import math
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.compare import Column, Screen, ago, grid, shown_value
from shoal.cli.export import (
    AsJson,
    Run,
    Runs,
    clean,
    duration,
    figure,
    moment,
    one_line,
    open_store,
    run_as_page,
    runs_as_lines,
    samples_done,
    size,
    speed,
    steps_of,
    write,
    write_file,
    write_json,
)
from shoal.cli.logs import bytes_in, files_of_run, remove_files
from shoal.core.errors import ConfigError, RunDirError
from shoal.core.settings import DEFAULT

if TYPE_CHECKING:
    from shoal.store.values import CheckpointRow, EventRow, RunInfo, StepRow, WorkerRow

RUNS_ABOUT = """\
List the runs in the store, newest first. In a pipe: every column, separated by
tabs, nothing cut.

[bold]Examples[/bold]
  [cyan]shoal runs[/cyan]                          the newest 20
  [cyan]shoal runs --status failed --all[/cyan]    every run that failed
  [cyan]shoal runs --name digits --tag best[/cyan]
  [cyan]shoal runs --all | cut -f1,6[/cyan]        ids and losses, for another program
"""
SHOW_ABOUT = """\
Show one run: how it went, where time went, how it was configured, what it left
and how to go on with it. Of a run that failed, the traceback comes last.

[bold]Examples[/bold]
  [cyan]shoal show last[/cyan]                     the newest run
  [cyan]shoal show digits-2026 --config[/cyan]     with every default
  [cyan]shoal show last --html report.html[/cyan]  as a page for the browser
"""
TAG_ABOUT = """\
Give a run tags, or take some away, and say which it has. A tag that only one run
has can be used wherever a run is asked for.

[bold]Examples[/bold]
  [cyan]shoal tag last baseline paper/table-2[/cyan]
  [cyan]shoal tag last paper/table-2 --remove[/cyan]
  [cyan]shoal runs --tag baseline[/cyan]
"""
RM_ABOUT = """\
Remove runs from the store, and their folders with checkpoints and logs, after
saying what and asking. A run that is running stays. What a run did not write
stays too.

[bold]Examples[/bold]
  [cyan]shoal rm digits-20261115-a1[/cyan]
  [cyan]shoal rm last --keep-folder[/cyan]   forget it, and keep its files
  [cyan]shoal rm a b c --yes[/cyan]          without asking
"""

_TAG = re.compile(r"[\w.:/-]{1,64}")
_CURVE_HEIGHT = 4


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
    """Add `shoal runs`, `show`, `tag` and `rm`."""
    app.command(name="runs", help=RUNS_ABOUT, short_help="List the runs in the store.")(runs)
    app.command(name="show", help=SHOW_ABOUT, short_help="Show everything about one run.")(show)
    app.command(name="tag", help=TAG_ABOUT, short_help="Give a run tags.")(tag)
    app.command(name="rm", help=RM_ABOUT, short_help="Remove runs and their folders.")(rm)


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


_FIRST_STEPS = """\
No runs yet. Every training is kept here. To make the first:
  shoal demo            a small network on real data
  shoal run train.py    your own script
"""


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


def show(
    run: Run,
    config: Annotated[bool, typer.Option("--config", help="Every setting, defaults too.")] = False,
    events: Annotated[bool, typer.Option("--events", help="What happened, in order.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the report as a page to FILE instead.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over FILE if it is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show one run."""
    with open_store() as store:
        info = store.find(run)
        if html is not None:
            page = run_as_page(store, info)
            write_file(html, lambda path: path.write_text(page, encoding="utf-8"), force=force)
            typer.echo(f"Wrote {html}", err=as_json)
            return
        screen = Screen.now()
        checkpoints, workers = store.checkpoints(info.id), store.workers(info.id)
        happened = store.events(info.id) if events else []
        steps = [] if as_json else store.steps(info.id, most=8 * _curve_width(screen))
    if as_json:
        rows = {"run": info, "checkpoints": checkpoints, "workers": workers}
        write_json({**rows, "events": happened} if events else rows)
    else:
        write(_run_as_text(info, steps, workers, checkpoints, happened, screen, defaults=config))


def _run_as_text(
    run: RunInfo,
    steps: Sequence[StepRow],
    workers: Sequence[WorkerRow],
    checkpoints: Sequence[CheckpointRow],
    events: Sequence[EventRow],
    screen: Screen,
    *,
    defaults: bool,
) -> str:
    sections = [
        ("", _figures(run, screen)),
        ("Loss", _loss_curve([step.loss for step in steps], screen)),
        ("Where time went", _workers(workers, screen)),
        (_config_title(run, defaults), _config(run, defaults, screen)),
        ("Environment", _facts([(key, shown_value(value)) for key, value in run.environment.items()], screen)),
        ("What it left", _facts(_left(run, checkpoints), screen)),
        ("Events", "".join(_event(event) for event in events)),
        ("Traceback", clean(run.traceback.rstrip()) + "\n" if run.traceback else ""),
    ]
    parts = [f"{screen.heading(title)}\n{body}" if title else body for title, body in sections if body]
    return f"{screen.heading(clean(run.id))}  {screen.status(run.status)}\n" + "\n".join(parts)


def _figures(run: RunInfo, screen: Screen) -> str:
    rate = speed(run)
    facts = [
        ("error", screen.style(run.error.splitlines()[0], fg="red") if run.error else ""),
        ("name", run.name),
        ("tags", ", ".join(run.tags)),
        ("started", f"{moment(run.created)} ({ago(time.time() - run.created)})"),
        ("took", duration(run.seconds) + (f", resumed {run.resumes}×" if run.resumes else "")),
        ("steps", f"{run.step:,} of {run.total_steps:,}, batches of {run.batch_size:,}"),
        ("loss", figure(run.loss)),
        *((f"eval {name}" if name == "loss" else name, figure(value)) for name, value in run.metrics.items()),
        ("speed", f"{figure(rate)} samples/s, {samples_done(run):,} samples in all" if rate else ""),
        ("workers", str(run.workers)),
        ("sent", f"{size(run.bytes_sent)} between workers" if run.bytes_sent else ""),
        ("command", shlex.join(run.command)),
        ("ran on", f"{run.user}@{run.host}" if run.user and run.host else run.host),
        ("git", f"{run.git_commit}{', with changes not committed' if run.git_dirty else ''}" if run.git_commit else ""),
        ("shoal", run.version),
    ]
    return _facts(facts, screen)


def _facts(facts: Sequence[tuple[str, str]], screen: Screen) -> str:
    """Names and values below each other; values are never cut, so that they can be copied."""
    told = [
        (clean(name), value if "\x1b" in value and screen.color else clean(value)) for name, value in facts if value
    ]
    if not told:
        return ""
    return grid([Column("", [name for name, _ in told]), Column("", [value for _, value in told])], screen, indent="  ")


def _config_title(run: RunInfo, defaults: bool) -> str:
    hidden = sum(setting.origin == DEFAULT for setting in run.config.values())
    return "Configuration" + (
        f" ({hidden} default{'s'[: hidden != 1]} not shown: --config)" if hidden and not defaults else ""
    )


def _config(run: RunInfo, defaults: bool, screen: Screen) -> str:
    kept = {name: setting for name, setting in run.config.items() if defaults or setting.origin != DEFAULT}
    if not kept:
        return "  everything is as by default\n" if run.config else ""
    rows = [(clean(name), setting.origin, clean(shown_value(setting.value))) for name, setting in kept.items()]
    return grid([Column("", cells) for cells in zip(*rows, strict=True)], screen, indent="  ")


def _workers(workers: Sequence[WorkerRow], screen: Screen) -> str:
    if not workers:
        return ""
    parts = list(dict.fromkeys(part for worker in workers for part in worker.seconds))
    totals = [sum(worker.seconds.values()) or math.inf for worker in workers]
    columns = [
        Column("worker", [str(worker.worker) for worker in workers], right=True),
        Column("samples", [f"{worker.samples:,}" for worker in workers], rank=2, right=True),
    ]
    for part in parts:
        shares = [f"{worker.seconds.get(part, 0) / total:.0%}" for worker, total in zip(workers, totals, strict=True)]
        columns.append(Column(part, shares, rank=1, right=True))
    columns.append(Column("memory", [size(worker.memory) for worker in workers], rank=3, right=True))
    columns.append(Column("sent", [size(worker.bytes_sent) for worker in workers], rank=4, right=True))
    return grid(columns, screen, indent="  ")


def _left(run: RunInfo, checkpoints: Sequence[CheckpointRow]) -> list[tuple[str, str]]:
    facts = []
    kept = [row for row in checkpoints if Path(row.path).exists()]
    for name, rows in (("newest", kept), ("best", [row for row in kept if row.best])):
        newest = max(rows, key=lambda row: (row.step, row.time), default=None)
        facts.append((name, f"step {newest.step}: {newest.path}" if newest else ""))
    if run.run_dir:
        folder = Path(run.run_dir)
        facts.append(("folder", run.run_dir if folder.is_dir() else f"{run.run_dir} (gone)"))
        facts.append(("report", str(folder / "report.html") if (folder / "report.html").is_file() else ""))
    if kept and run.status != Status.RUNNING:
        script = f"shoal run {shlex.quote(run.script)} --resume {run.id}"
        facts.append(("go on", script if run.script else f"resume={run.id!r} in the script"))
    return facts


def _event(event: EventRow) -> str:
    told = " ".join(f"{name}={shown_value(value)}" for name, value in event.data.items() if name != "traceback")
    return f"  {moment(event.time)}  step {event.step}  {event.kind}  {clean(told)}".rstrip() + "\n"


def _curve_width(screen: Screen) -> int:
    return max(10, min(72, (screen.width or 80) - 12))


def _loss_curve(losses: Sequence[float], screen: Screen) -> str:
    """A small picture of the losses, the highest and the lowest beside it. A cross is a loss that is not finite."""
    width = min(_curve_width(screen), len(losses))
    groups = [losses[len(losses) * at // width : len(losses) * (at + 1) // width] for at in range(width)]
    means = [sum(group) / len(group) for group in groups]
    finite = [mean for mean in means if math.isfinite(mean)]
    if len(means) < 2 or not finite:
        return ""
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0
    heights = [1 + (8 * _CURVE_HEIGHT - 1) * (mean - low) / span if math.isfinite(mean) else None for mean in means]
    edge = {_CURVE_HEIGHT - 1: figure(high), 0: figure(low)}
    lines = []
    for row in reversed(range(_CURVE_HEIGHT)):
        blocks = "".join(_block(height, row) for height in heights)
        lines.append(f"  {edge.get(row, ''):>8}  {screen.style(blocks, fg='cyan')}".rstrip() + "\n")
    return "".join(lines)


def _block(height: float | None, row: int) -> str:
    if height is None:
        return "×" if row == 0 else " "
    return " ▁▂▃▄▅▆▇█"[max(0, min(8, round(height - 8 * row)))]


def tag(
    run: Run,
    tags: Annotated[list[str], typer.Argument(metavar="TAG", help="Letters, digits and . _ : / -, 64 at most.")],
    remove: Annotated[bool, typer.Option("--remove", help="Take these tags away.")] = False,
) -> None:
    """Change the tags of one run."""
    for name in tags:
        if not _TAG.fullmatch(name):
            raise ConfigError(f"{name!r} cannot be a tag: it must be 1 to 64 letters, digits or . _ : / -")
    with open_store() as store:
        info = store.find(run)
        left = store.tag(info.id, remove=tags) if remove else store.tag(info.id, add=tags)
    write(f"{info.id}: {', '.join(left) or 'no tags'}\n")


def rm(
    refs: Runs,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    keep_folder: Annotated[bool, typer.Option("--keep-folder", help="Remove only what the store knows.")] = False,
) -> None:
    """Remove runs."""
    with open_store() as store:
        chosen = {info.id: info for info in map(store.find, refs)}
        for info in chosen.values():
            _refuse_running(info)
        doomed = {info.id: [] if keep_folder else files_of_run(info) for info in chosen.values()}
        for info in chosen.values():
            write(_what_goes(info, doomed[info.id], keep_folder))
        if not yes and not _confirmed(len(chosen)):
            write("Nothing was removed.\n")
            raise typer.Exit(1)
        for run_id, files in doomed.items():
            _refuse_running(store.find(run_id))  # it may have been resumed while the question stood
            # Files first: as long as the row is there, what could not be removed can be found.
            remove_files(run_id, files)
            store.remove(run_id)
            write(f"Removed {run_id}\n")


def _refuse_running(info: RunInfo) -> None:
    if info.status == Status.RUNNING:
        raise RunDirError(f"{info.id} is running (process {info.pid} on {info.host}); stop it first, then remove it")


def _confirmed(count: int) -> bool:
    if not _is_answered():
        raise ConfigError("rm asks before it removes, and there is no terminal to answer from; say --yes to go ahead")
    return typer.confirm(f"Remove {'this run' if count == 1 else f'these {count} runs'}?", default=False)


def _what_goes(info: RunInfo, files: Sequence[Path], keep_folder: bool) -> str:
    line = f"{info.id}  {info.status}  {steps_of(info)} steps\n"
    if files:
        where = files[0] if files[0].name == info.id else f"{files[0].parent}: {', '.join(file.name for file in files)}"
        return f"{line}  and {where} ({size(sum(map(bytes_in, files)))})\n"
    if info.run_dir and not keep_folder and Path(info.run_dir).exists():
        return f"{line}  {info.run_dir} stays: it holds no run.json of this run\n"
    return line


def _is_answered() -> bool:
    """Whether there is somebody to answer a question."""
    return sys.stdin.isatty()
