"""`shoal rm`: removing runs and their folders."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.folder import bytes_in, files_of_run, remove_files
from shoal.cli.output import write
from shoal.cli.pace import steps_of
from shoal.cli.references import Runs, open_store
from shoal.core.errors import ConfigError, RunDirError
from shoal.monitor.wording import size

if TYPE_CHECKING:
    from shoal.store.values import RunInfo

ABOUT = """\
Remove runs from the store, and their folders with checkpoints and logs, after
saying what and asking. A run that is running stays. What a run did not write
stays too.

[bold]Examples[/bold]
  [cyan]shoal rm digits-20261115-a1[/cyan]
  [cyan]shoal rm last --keep-folder[/cyan]   forget it, and keep its files
  [cyan]shoal rm a b c --yes[/cyan]          without asking
"""


def register(app: typer.Typer) -> None:
    """Add `shoal rm`."""
    app.command(name="rm", help=ABOUT, short_help="Remove runs and their folders.")(rm)


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
    from shoal.store.values import RUNNING

    if info.status == RUNNING:
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
