"""The demo: train something small on real data, and say in human terms what came of it."""

from __future__ import annotations

import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.core.errors import ConfigError

if TYPE_CHECKING:
    from shoal.cli.demos.task import Source, Task
    from shoal.trainer.result import Result

TASKS = {
    "digits": "shoal.cli.demos.digits",
    "shakespeare": "shoal.cli.demos.shakespeare",
    "movies": "shoal.cli.demos.movies",
}
"""What can be trained, and the module of each."""


def run_demo(task: str = "digits", *, workers: int = 2, epochs: int | None = None, resume: str | None = None) -> Result:
    """Train one of TASKS on `workers` processes, and print what is trained, what came of it and what to try next.

    `epochs` None is what the task finds enough. Raises ConfigError if there is no such task or if the package with its
    data is missing, and whatever the Trainer refuses.
    """
    from shoal.trainer.trainer import Trainer

    if task not in TASKS:
        raise ConfigError(f"there is no demo called {task!r}; it must be one of {', '.join(TASKS)}")
    prepared: Task = import_module(TASKS[task]).prepare()
    epochs = prepared.epochs if epochs is None else epochs
    trainer = Trainer(**prepared.arguments, workers=workers, epochs=epochs, name=f"demo-{task}", resume=resume)

    console = Console(highlight=False)
    size = sum(parameter.numel() for parameter in trainer.model.parameters())
    batch = f"batches of {prepared.arguments['batch_size']} shared by {_count(workers, 'worker')}"
    console.print(f"[bold]{prepared.title}[/bold]: {prepared.about}")
    console.print(f"{prepared.model}: {size:,} parameters, {_count(epochs, 'epoch')}, {batch}.")
    if prepared.before is not None:
        console.print(escape(prepared.before(trainer.model)))
    console.print()
    result = trainer.fit()
    console.print()
    console.print(escape(prepared.after(trainer, result)))
    console.print("\n[bold]What to try next[/bold]")
    console.print(_next_steps(task, prepared.example, result))
    return result


def _next_steps(task: str, example: str, result: Result) -> Table:
    steps = Table.grid(padding=(0, 2), pad_edge=True)
    steps.add_column(style="cyan", no_wrap=True)
    steps.add_column()
    shoal, python = _commands()
    steps.add_row(f"{shoal} demo {task} --workers {result.workers + 1}", "one worker more")
    steps.add_row(f"{shoal} demo {task} --resume last --epochs {2 * max(1, result.epochs)}", "go on from here")
    names = list(TASKS)
    place = names.index(task)
    others = {name: _source(name) for name in names[place + 1 :] + names[:place]}
    ready = [name for name, source in others.items() if source.installed]
    if ready:
        steps.add_row(f"{shoal} demo {ready[0]}", "something else")
    else:
        name, source = next(iter(others.items()))
        install = source.install if python == "python" else f"{python} -m {source.install}"
        steps.add_row(escape(install), f"the {source.what} for {shoal} demo {name}")
    if Path("examples", example).exists():
        steps.add_row(f"{python} examples/{example}", "a script to change")
    return steps


def _source(task: str) -> Source:
    source: Source = import_module(TASKS[task]).SOURCE
    return source


def _commands() -> tuple[str, str]:
    """How to call `shoal` and its Python from the user's shell, where the environment may not be activated."""
    if shutil.which("shoal"):
        return "shoal", "python"
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    script = python.with_name("shoal")
    return (str(script) if script.exists() else f"{python} -m shoal.cli"), str(python)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
