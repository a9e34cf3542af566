"""`shoal doctor`: looks this machine over and says what to fix first."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from shoal.cli.output import write

ABOUT = """\
Look this machine over, and say what to fix first.

Checks versions, cores, memory, limits, network and storage, then trains a
small network on 2 workers and compares it with 1. Nothing is changed, and
nothing is written to your run store. It takes about 5 seconds, of which
importing torch is most; longer the first time.

[bold]How to read it[/bold]
  [green]✓[/green] fine   [yellow]![/yellow] works, but you should know   [red]✗[/red] training will run into this
  A line that begins with -> says what to do. The last lines name the one
  thing to fix first.

[bold]Examples[/bold]
  [cyan]shoal doctor[/cyan]                   everything
  [cyan]shoal doctor --workers 16[/cyan]      are the limits enough for 16 workers?
  [cyan]shoal doctor --no-self-test[/cyan]    only look, do not train
  [cyan]shoal doctor --json[/cyan]            one JSON object, for a script or a bug report

Exit code 0 if nothing failed (warnings are fine), 1 if something did.
"""

_MOST_COLUMNS = 100


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("doctor", help=ABOUT, short_help="Look this machine over, and say what to fix first.")(doctor)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, and nothing else.")] = False,
    self_test: Annotated[
        bool, typer.Option("--self-test/--no-self-test", help="Train a small network on 2 workers (under 5 s).")
    ] = True,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "-w",
            min=1,
            show_default="one per core",
            help="How many workers the limits must be enough for.",
        ),
    ] = None,
) -> None:
    """Examine this machine; leave with 1 if a check failed."""
    from shoal.cli.doctor.diagnosis import render
    from shoal.cli.doctor.examination import examine

    progress = Progress(shown=not as_json)
    try:
        diagnosis = examine(workers=workers, self_test=self_test, tell=progress)
    finally:
        progress.clear()
    if as_json:
        write(json.dumps(diagnosis.as_json(), indent=2) + "\n")
    else:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        width = min(shutil.get_terminal_size().columns, _MOST_COLUMNS)
        encoding = sys.stdout.encoding or "ascii"
        write(render(diagnosis, width=width, encoding=encoding, colour=colour))
    raise typer.Exit(0 if diagnosis.ok else 1)


class Progress:
    """What is being done, on stderr: one line that is rewritten in a terminal, else a line for each thing."""

    def __init__(self, *, shown: bool, write: Callable[[str], object] | None = None, live: bool | None = None) -> None:
        self._shown = shown
        self._write = write or _to_stderr
        self._live = sys.stderr.isatty() if live is None else live
        self._last = ""

    def __call__(self, what: str) -> None:
        if not self._shown or what == self._last:
            return
        if self._live:
            self.clear()
            self._write(f"{what} ...")
        else:
            self._write(f"shoal doctor: {what}\n")
        self._last = what

    def clear(self) -> None:
        """Take the line away."""
        if self._shown and self._live and self._last:
            self._write("\r" + " " * (len(self._last) + 4) + "\r")
            self._last = ""


def _to_stderr(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
