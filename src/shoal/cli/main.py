"""The command line: what can be said, and what it leads to.

Only what is needed to show help is imported here; torch is imported by the command that trains.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from shoal import __version__
from shoal.core.errors import ShoalError

ABOUT = """\
[bold]Shoal trains any PyTorch model on many workers.[/bold]

Keep your model, loss, optimizer and data set, and say how many workers.
The batch is that of all workers together, so one worker, two or eight
give the same result.

[bold]First commands[/bold]
  [cyan]shoal demo[/cyan]              train on 1,797 real images, on 2 workers
  [cyan]shoal demo --workers 4[/cyan]  the same batches on 4 workers
  [cyan]shoal demo --help[/cyan]       everything the demo can do

[bold]Your own model[/bold] is a plain script, started by [cyan]python train.py[/cyan]:
  from shoal import Trainer
  trainer = Trainer(model=net, loss=loss, optimizer=optimizer,
                    data=train_set, batch_size=256, epochs=3, workers=2)
  result = trainer.fit()
"""

DEMO_ABOUT = """\
Train a small network on real data, then say what happened and what to
try next.

[bold]digits[/bold]: 1,797 images of handwritten digits (8×8 pixels), one in five
kept for the test. They come with scikit-learn; if it is missing:
[cyan]pip install 'shoal\\[demo]'[/cyan]

[bold]Examples[/bold]
  [cyan]shoal demo[/cyan]                           2 workers
  [cyan]shoal demo -w 4 --epochs 20[/cyan]          more workers, more epochs
  [cyan]shoal demo --resume last --epochs 20[/cyan] go on from the last run
"""

app = typer.Typer(
    name="shoal",
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Task(StrEnum):
    """What the demo can train."""

    DIGITS = "digits"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shoal {__version__}")
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
    workers: Annotated[int, typer.Option("--workers", "-w", help="Processes that train together.")] = 2,
    epochs: Annotated[int, typer.Option("--epochs", "-e", help="Passes over the training images.")] = 10,
    resume: Annotated[
        str | None, typer.Option(help="Go on from a checkpoint: 'last', the id of a run, or a path.")
    ] = None,
) -> None:
    """Train one of the demo's tasks."""
    from shoal.cli.demo import train_digits

    match task:
        case Task.DIGITS:
            train_digits(workers=workers, epochs=epochs, resume=resume)


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 an error of Shoal, 2 wrong usage, 75 and 130 stopped by a signal."""
    try:
        app(prog_name="shoal")
    except ShoalError as error:
        typer.echo(f"shoal: {error}", err=True)
        sys.exit(1)
