"""`shoal show`: everything about one run."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.circumstances import Trained, trained, typed, user_name
from shoal.cli.output import write, write_file, write_json
from shoal.cli.pace import samples_done, speed
from shoal.cli.references import AsJson, Run, open_store
from shoal.cli.text import Column, Screen, ago, grid, shown_value
from shoal.core.settings import DEFAULT
from shoal.monitor.report.convergence import Cost, find_cost
from shoal.monitor.resuming import stored_resume_command
from shoal.monitor.servers import (
    SERVER_TITLES,
    mean_staleness,
    on_one_host,
    server_facts,
    server_rows,
    stored_servers,
    sync_words,
)
from shoal.monitor.traffic import TITLES, Account, exchange_facts, flow_rows, stored_account
from shoal.monitor.wording import clean, counted, duration, environment_words, figure, moment, percent, size

if TYPE_CHECKING:
    from shoal.core.events import ServersSeen
    from shoal.store.store import Store
    from shoal.store.values import CheckpointRow, EventRow, RunInfo, StepRow, WorkerRow

ABOUT = """\
Show one run: how it went, where time went, how it was configured, what it left
and how to go on with it. Of a run that failed, the traceback comes last.

[bold]Examples[/bold]
  [cyan]shoal show last[/cyan]                     the newest run
  [cyan]shoal show digits-2026 --config[/cyan]     with every default
  [cyan]shoal show last --html report.html[/cyan]  as a page for the browser
"""

_CURVE_HEIGHT = 4
_STEPS_OF_A_PAGE = 5000


def register(app: typer.Typer) -> None:
    """Add `shoal show`."""
    app.command(name="show", help=ABOUT, short_help="Show everything about one run.")(show)


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
        happened = store.events(info.id)
        steps = [] if as_json else store.steps(info.id, most=8 * _curve_width(screen))
        cost = find_cost(store, info)
    account, seen = stored_account(info, workers, happened), stored_servers(happened)
    if as_json:
        told = {"run": info, "traffic": account.figures(), "servers": _servers_as_data(seen, cost)}
        told |= {"checkpoints": checkpoints, "workers": workers}
        write_json({**told, "events": happened} if events else told)
    else:
        what = trained(happened, steps)
        listed = [event for event in happened if event.kind != "ServersSeen"] if events else []  # they have a section
        rest = checkpoints, listed, screen
        served = _servers(info, seen, cost, screen)
        write(_run_as_text(info, what, steps, workers, account, *rest, defaults=config, servers=served))


def run_as_page(store: Store, run: RunInfo) -> str:
    """The report of a run, as one HTML file."""
    from shoal.monitor.report.page import render_html
    from shoal.monitor.report.summary import Summary

    steps = store.steps(run.id, most=_STEPS_OF_A_PAGE)
    others = store.events(run.id), store.checkpoints(run.id), store.workers(run.id)
    summary = Summary.from_store(run, steps, *others)
    summary.cost = find_cost(store, run)
    return render_html(summary)


def _run_as_text(
    run: RunInfo,
    what: Trained,
    steps: Sequence[StepRow],
    workers: Sequence[WorkerRow],
    account: Account,
    checkpoints: Sequence[CheckpointRow],
    events: Sequence[EventRow],
    screen: Screen,
    *,
    defaults: bool,
    servers: str = "",
) -> str:
    sections = [
        ("", _figures(run, what, screen)),
        ("Loss", _loss_curve([step.loss for step in steps], screen)),
        ("Where time went", _workers(workers, screen)),
        ("Traffic", _traffic(account, screen)),
        ("Servers", servers),
        (_config_title(run, defaults), _config(run, defaults, screen)),
        ("Environment", _facts(environment_words(run.environment), screen)),
        ("What it left", _facts(_left(run, checkpoints), screen)),
        ("Events", "".join(_event(event) for event in events)),
        ("Traceback", clean(run.traceback.rstrip()) + "\n" if run.traceback else ""),
    ]
    parts = [f"{screen.heading(title)}\n{body}" if title else body for title, body in sections if body]
    return f"{screen.heading(clean(run.id))}  {screen.status(run.status)}\n" + "\n".join(parts)


def _figures(run: RunInfo, what: Trained, screen: Screen) -> str:
    rate = speed(run)
    facts = [
        ("name", run.name),
        ("tags", ", ".join(run.tags)),
        ("started", f"{moment(run.created)} ({ago(time.time() - run.created)})"),
        ("took", duration(run.seconds) + (f", resumed {run.resumes}×" if run.resumes else "")),
        ("steps", f"{run.step:,} of {run.total_steps:,}, batches of {run.batch_size:,}"),
        ("loss", figure(run.loss)),
        *((f"eval {name}" if name == "loss" else name, figure(value)) for name, value in run.metrics.items()),
        ("speed", f"{figure(rate)} samples/s, {samples_done(run):,} samples in all" if rate else ""),
        ("optimizer", what.optimizer),
        ("parameters", what.parameters),
        ("rate", f"{what.rate} in the first step" if what.rate else ""),
        ("workers", str(run.workers)),
        ("sent", f"{size(run.bytes_sent)} between workers" if run.bytes_sent else ""),
        ("command", typed(run.command)),
        ("ran on", f"{user_name(run.user)}@{run.host}" if run.user and run.host else run.host),
        ("git", f"{run.git_commit}{', with changes not committed' if run.git_dirty else ''}" if run.git_commit else ""),
        ("shoal", run.version),
    ]
    return _facts(facts, screen, error=run.error.splitlines()[0] if run.error else "")


def _facts(facts: Sequence[tuple[str, str]], screen: Screen, *, error: str = "") -> str:
    """Names and values below each other, an error first; values are never cut, so that they can be copied."""
    told = [(clean(name), clean(value)) for name, value in facts if value]
    if error:
        told.insert(0, ("error", screen.style(clean(error), fg="red")))
    if not told:
        return ""
    return grid([Column("", [name for name, _ in told]), Column("", [value for _, value in told])], screen, indent="  ")


def _config_title(run: RunInfo, defaults: bool) -> str:
    hidden = sum(setting.origin == DEFAULT for setting in run.config.values())
    return "Configuration" + (f" ({counted(hidden, 'default')} not shown: --config)" if hidden and not defaults else "")


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
        shares = [percent(worker.seconds.get(part, 0) / total) for worker, total in zip(workers, totals, strict=True)]
        columns.append(Column(part, shares, rank=1, right=True))
    columns.append(Column("memory", [size(worker.memory) for worker in workers], rank=3, right=True))
    columns.append(Column("sent", [size(worker.bytes_sent) for worker in workers], rank=4, right=True))
    return grid(columns, screen, indent="  ")


def _traffic(account: Account, screen: Screen) -> str:
    """Nothing for one worker, and for runs that kept no account."""
    if not account:
        return ""
    columns = zip(TITLES, zip(*flow_rows(account), strict=True), (0, 2, 1, 0, 3, 1), strict=True)
    table = [Column(title, cells, rank, right=place > 2) for place, (title, cells, rank) in enumerate(columns)]
    return f"{grid(table, screen, indent='  ')}\n{_facts(exchange_facts(account), screen)}"


def _servers(run: RunInfo, seen: ServersSeen | None, cost: Cost | None, screen: Screen) -> str:
    """Nothing for a run without servers."""
    if seen is None and cost is None:
        return ""
    facts = [("sync", sync_words(run.config)), *(server_facts(seen) if seen else [])]
    facts.append(("samples", cost.words if cost else ""))
    if seen is None or not seen.servers:
        return _facts(facts, screen)
    rows = server_rows(seen, near=on_one_host(run.config))
    columns = zip(SERVER_TITLES, zip(*rows, strict=True), (0, 0, 1, 3, 1, 2, 4, 4, 2), strict=True)
    table = [Column(title, cells, rank, right=True) for title, cells, rank in columns]
    return f"{grid(table, screen, indent='  ')}\n{_facts(facts, screen)}"


def _servers_as_data(seen: ServersSeen | None, cost: Cost | None) -> dict[str, Any] | None:
    if seen is None and cost is None:
        return None
    told = {"servers": seen.servers, "staleness": seen.staleness, "replaced": seen.replaced} if seen else {}
    return {**told, "mean_staleness": mean_staleness(seen) if seen else None, "samples": cost}


def _left(run: RunInfo, checkpoints: Sequence[CheckpointRow]) -> list[tuple[str, str]]:
    from shoal.store.values import RUNNING

    facts = []
    kept = [row for row in checkpoints if Path(row.path).exists()]
    for name, rows in (("newest", kept), ("best", [row for row in kept if row.best])):
        newest = max(rows, key=lambda row: (row.step, row.time), default=None)
        facts.append((name, f"step {newest.step}: {newest.path}" if newest else ""))
    if run.run_dir:
        folder = Path(run.run_dir)
        facts.append(("folder", run.run_dir if folder.is_dir() else f"{run.run_dir} (gone)"))
        facts.append(("report", str(folder / "report.html") if (folder / "report.html").is_file() else ""))
    if kept and run.status != RUNNING:
        facts.append(("go on", stored_resume_command(run)))
    return facts


def _event(event: EventRow) -> str:
    told = " ".join(
        f"{name}={shown_value(value)}"
        for name, value in event.data.items()
        if name != "traceback" and (value or event.kind != "ExchangeSettled")  # there 0 means: not measured
    )
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
    margin = max(8, *map(len, edge.values()))
    lines = []
    for row in reversed(range(_CURVE_HEIGHT)):
        blocks = "".join(_block(height, row) for height in heights)
        lines.append(f"  {edge.get(row, ''):>{margin}}  {screen.style(blocks, fg='cyan')}".rstrip() + "\n")
    return "".join(lines)


def _block(height: float | None, row: int) -> str:
    if height is None:
        return "×" if row == 0 else " "
    return " ▁▂▃▄▅▆▇█"[max(0, min(8, round(height - 8 * row)))]
