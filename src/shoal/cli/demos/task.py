"""What a demo is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from shoal.trainer.result import Result
    from shoal.trainer.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task with its data loaded. Made by the `prepare()` of its module, which raises ConfigError without data."""

    title: str
    about: str
    """What there is to train on, one sentence."""
    model: str
    """What is trained, as in "A CNN"; its size is told behind it."""
    arguments: dict[str, Any]
    """Of the Trainer: all but workers, epochs, name and resume."""
    epochs: int
    """By default: under 40 seconds on two cores."""
    example: str
    """The script in examples/ that does the same, to be changed."""
    before: Callable[[nn.Module], str] | None = None
    """What the model can do untrained, if that says something."""
    after: Callable[[Trainer, Result], str]
    """The outcome, for someone who does not know what a loss is."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The installed package that a demo reads its data from."""

    what: str
    """What is read, in a word."""
    package: str
    """As pip knows it."""
    module: str
    """As Python knows it."""
    install: str
    """The command, which begins with `pip install`."""
    note: str

    @property
    def installed(self) -> bool:
        """Found out without importing it."""
        return find_spec(self.module) is not None

    def folder(self) -> Path:
        """Where the package is, found without importing it. Raises ConfigError if it is not installed."""
        found = find_spec(self.module)
        if found is None or not found.submodule_search_locations:
            raise self.missing()
        return Path(found.submodule_search_locations[0])

    def missing(self) -> ConfigError:
        return ConfigError(
            f"The demo reads its {self.what} from the package {self.package}, which is not installed. "
            f"Install it with: {self.install}   ({self.note})"
        )
