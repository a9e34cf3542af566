"""The demo: handwritten digits on a few workers, and a report of what happened."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from shoal.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import TensorDataset

    from shoal.trainer.result import Result

BATCH_SIZE = 64
TEST_SHARE = 0.2


def train_digits(*, workers: int = 2, epochs: int = 10, resume: str | None = None) -> Result:
    """Train a small CNN on scikit-learn's digits on `workers` processes, and print what happened.

    Raises ConfigError if scikit-learn is missing, and whatever the Trainer refuses.
    """
    import torch
    from torch.nn import functional

    from shoal.trainer.trainer import Trainer

    torch.manual_seed(0)
    train, test = load_digits()
    net = build_net()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def predict(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, labels = batch
        return model(images), labels

    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=3e-3)

    trainer = Trainer(
        model=net,
        loss=loss,
        optimizer=optimizer,
        data=train,
        eval_data=test,
        predict=predict,
        metrics=["accuracy"],
        batch_size=BATCH_SIZE,
        epochs=epochs,
        workers=workers,
        name="demo-digits",
        resume=resume,
    )
    console = Console(highlight=False)
    size = sum(parameter.numel() for parameter in net.parameters())
    console.print(
        f"[bold]Handwritten digits[/bold]: {len(train):,} images to train on, {len(test):,} to test with.\n"
        f"A CNN of {size:,} parameters, {_count(epochs, 'epoch')}, "
        f"batches of {BATCH_SIZE} shared by {_count(workers, 'worker')}.\n"
    )
    result = trainer.fit()
    report(console, result, tested_on=len(test), resumed=resume is not None)
    return result


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """The training and the test set: pairs of an image (1×8×8, from 0 to 1) and its label. Always the same split."""
    import torch
    from torch.utils.data import TensorDataset

    try:
        from sklearn import datasets
    except ImportError as error:
        raise ConfigError(
            "The demo reads its images from scikit-learn, which is not installed. "
            "Install it with: pip install 'shoal[demo]'   (or: pip install scikit-learn)"
        ) from error
    bunch = datasets.load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    tested = round(TEST_SHARE * len(labels))
    test, train = order[:tested], order[tested:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def build_net() -> nn.Module:
    """A CNN for 8×8 images."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def report(console: Console, result: Result, *, tested_on: int, resumed: bool = False) -> None:
    """Print what a run achieved, what it cost, and what to try next."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    facts.add_row("accuracy", f"{result.metrics['accuracy']:.1%} on {tested_on} images that training never saw")
    facts.add_row("trained", _amount(result))
    if not resumed:
        # After a resume the samples are those of all its parts, but the seconds only of the last.
        facts.add_row("speed", f"{result.samples / max(result.wall_seconds, 1e-9):,.0f} samples/s")
    facts.add_row("time went to", _shares(result.seconds))
    facts.add_row("sent", f"{result.bytes_sent / 1e6:,.1f} MB between workers")
    facts.add_row("run folder", str(result.run_dir))
    console.print()
    console.print(facts)
    console.print("\n[bold]What to try next[/bold]")
    console.print(_next_steps(result))


def _next_steps(result: Result) -> Table:
    steps = Table.grid(padding=(0, 2), pad_edge=True)
    steps.add_column(style="cyan", no_wrap=True)
    steps.add_column()
    shoal, python = _commands()
    steps.add_row(f"{shoal} demo --workers {result.workers + 1}", "one worker more")
    steps.add_row(f"{shoal} demo --resume last --epochs {2 * max(1, result.epochs)}", "go on from here")
    if Path("examples/digits.py").exists():
        steps.add_row(f"{python} examples/digits.py", "a script to change")
    return steps


def _commands() -> tuple[str, str]:
    """How to call `shoal` and its Python from the user's shell, where the environment may not be activated."""
    if shutil.which("shoal"):
        return "shoal", "python"
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    script = python.with_name("shoal")
    return (str(script) if script.exists() else f"{python} -m shoal.cli"), str(python)


def _amount(result: Result) -> str:
    amounts = (_count(result.samples, "sample"), _count(result.steps, "step"), _count(result.workers, "worker"))
    return f"{', '.join(amounts)}; {result.wall_seconds:.1f} s"


def _shares(seconds: dict[str, float]) -> str:
    """`compute 61%, exchange 20%`: every part of at least 1%, the largest first."""
    total = sum(seconds.values())
    parts = sorted(seconds.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {spent / total:.0%}" for name, spent in parts if spent >= 0.01 * total > 0) or "nothing"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
