"""`shoal rm`: removing runs and their folders."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.folder import RunFiles, files_of_run, held, remove_files
from shoal.cli.output import write
from shoal.cli.pace import steps_of
from shoal.cli.references import Runs, open_store
from shoal.core.errors import ConfigError, RunDirError, StoreError
from shoal.monitor.wording import one_line, size

if TYPE_CHECKING:
    from shoal.store.store import Store
    from shoal.store.values import RunInfo

ABOUT = """\
Remove runs from the store, and their folders with checkpoints and logs, after
saying what and asking. A run that is running or being resumed stays. What a run
did not write stays too.

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
        for info in chosen.values():
            write(_what_goes(info, None if keep_folder else files_of_run(info), keep_folder))
        if not yes and not _confirmed(len(chosen)):
            write("Nothing was removed.\n")
            raise typer.Exit(1)
        with ExitStack() as holding:
            for info in chosen.values():
                holding.enter_context(held(info))
                _refuse_running(store.find(info.id))  # it may have been resumed while the question stood
            for info in chosen.values():
                _remove(store, info, keep_folder)
                write(f"Removed {one_line(info.id)}\n")


def _remove(store: Store, info: RunInfo, keep_folder: bool) -> None:
    """The row goes with the files or not at all: a store that refuses does so before the first file is touched."""
    gone = False
    try:
        with store.removing(info.id):
            # anew: what is in the folder may have changed while the question stood
            files = None if keep_folder else files_of_run(info)
            if files is not None:
                remove_files(info.id, files)
                gone = True
    except StoreError as error:
        if not gone:
            raise
        raise StoreError(
            f"{error} The files of {info.id} are gone, and it is still in the store: once that is mended, "
            f"`shoal rm {info.id}` takes it out"
        ) from error


def _refuse_running(info: RunInfo) -> None:
    from shoal.store.values import RUNNING

    if info.status == RUNNING:
        raise RunDirError(f"{info.id} is running (process {info.pid} on {info.host}); stop it first, then remove it")


def _confirmed(count: int) -> bool:
    if not _is_answered():
        raise ConfigError("rm asks before it removes, and there is no terminal to answer from; say --yes to go ahead")
    return typer.confirm(f"Remove {'this run' if count == 1 else f'these {count} runs'}?", default=False)


def _what_goes(info: RunInfo, files: RunFiles | None, keep_folder: bool) -> str:
    line = f"{one_line(info.id)}  {info.status}  {steps_of(info)} steps\n"
    if files is not None:
        where = str(files.folder) if files.whole else f"{files.folder}: {', '.join(files.names())}"
        return f"{line}  and {one_line(where)} ({size(files.bytes())})\n"
    if info.run_dir and not keep_folder and Path(info.run_dir).exists():
        return f"{line}  {one_line(info.run_dir)} stays: it holds no run.json of this run\n"
    return line


def _is_answered() -> bool:
    """Whether there is somebody to answer a question."""
    return sys.stdin.isatty()
