"""The command line: what can be said, and what it leads to.

Only what is needed to show help is imported here; torch is imported by the command that trains.
"""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress
from enum import StrEnum
from typing import Annotated

import typer

from shoal import __version__
from shoal.cli import bench, compare, export, lab, logs, rm, run, runs, scale, show, tag
from shoal.cli.doctor import command as doctor
from shoal.cli.output import stdout_fault, write
from shoal.core.errors import EXIT_INTERRUPTED, ShoalError
from shoal.monitor.wording import clean

ABOUT = """\
[bold]Shoal trains any PyTorch model on many workers.[/bold]

Keep your model, loss, optimizer and data set, and say how many workers.
The batch is that of all workers together, so one worker, two or eight
give the same result.

[bold]First commands[/bold]
  [cyan]shoal doctor[/cyan]                    is this machine ready?
  [cyan]shoal demo[/cyan]                      train on 1,797 real images, on 2 workers
  [cyan]shoal run train.py --workers 4[/cyan]  your own script
  [cyan]shoal runs[/cyan]                      what was run, and what came of it

[bold]Your own model[/bold] is a plain script; [cyan]python train.py[/cyan] works as well:
  from shoal import Trainer
  trainer = Trainer(model=net, loss=loss, optimizer=optimizer,
                    data=train_set, batch_size=256, epochs=3, workers=2)
  result = trainer.fit()
"""

DEMO_ABOUT = """\
Train a small network on real data, then say what happened and what to
try next.

[bold]digits[/bold]       1,797 images of handwritten digits, from scikit-learn
[bold]shakespeare[/bold]  a character model that learns to write like him
[bold]movies[/bold]       100,000 ratings: which films would a viewer like?

If its data is missing, a demo says what to install.

[bold]Examples[/bold]
  [cyan]shoal demo[/cyan]                           digits on 2 workers
  [cyan]shoal demo movies -w 4[/cyan]               more workers
  [cyan]shoal demo --resume last --epochs 20[/cyan] go on from the last run
"""

app = typer.Typer(
    name="shoal",
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Task(StrEnum):
    """What the demo can train."""

    DIGITS = "digits"
    SHAKESPEARE = "shakespeare"
    MOVIES = "movies"


def _show_version(wanted: bool) -> None:
    if wanted:
        write(f"shoal {__version__}\n")
        raise typer.Exit


@app.callback(help=ABOUT)
def shoal(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of `shoal` itself."""


@app.command(help=DEMO_ABOUT, short_help="Train a small network on real data and see what happens.")
def demo(
    task: Annotated[Task, typer.Argument(help="What to train.")] = Task.DIGITS,
    workers: Annotated[int, typer.Option("--workers", "-w", min=1, help="Processes that train together.")] = 2,
    epochs: Annotated[
        int | None, typer.Option("--epochs", "-e", min=1, help="Passes over the data; each demo has its own default.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="Go on from a checkpoint: 'last', the id of a run, or a path.")
    ] = None,
) -> None:
    """Train one of the demo's tasks."""
    from shoal.cli.demo import run_demo

    run_demo(task.value, workers=workers, epochs=epochs, resume=resume)


for module in (run, runs, show, scale, tag, rm, compare, export, logs, bench, lab, doctor):
    module.register(app)

_QUICK = ("runs", "show", "tag", "export", "logs")
"""Commands that read and print. They leave without taking the interpreter down, a tenth of a second with SQLAlchemy."""


def main() -> None:
    """Run the command line. Exit codes are in `shoal.core.errors`: 0, 1, 2 wrong usage, 3 no such run, 4, 75, 130."""
    if sys.stdout is None:  # started with `>&-`: output goes nowhere, as with print
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    quick = len(sys.argv) > 1 and sys.argv[1] in _QUICK
    if quick:
        # what these import stays until the end: looking for garbage in it takes longer than their work
        gc.disable()
    code = _main()
    if quick:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _main() -> int:
    try:
        app(prog_name="shoal")
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except ShoalError as error:
        return _say(error)
    except OSError:
        fault = stdout_fault()
        if fault is None:
            raise
        return _say(fault)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _say(error: ShoalError) -> int:
    typer.echo(f"shoal: {clean(str(error))}", err=True)
    return error.exit_code
