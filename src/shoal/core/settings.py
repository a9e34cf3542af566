"""What the command line has said, for the Trainer that a script makes, and where each value of a run came from.

The command line sets it (`using`) before it runs a script; a script that is started by `python` finds the defaults.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

import msgspec

from shoal.core.errors import ConfigError
from shoal.core.events import Callback

FLAG, SCRIPT, DEFAULT = "flag", "script", "default"
"""Where a value came from. The first of these that says something wins."""

PROGRESS = ("auto", "rich", "plain", "json", "quiet")
"""How progress is shown. `auto` is rich in a terminal, a cell's output in a notebook, plain lines elsewhere."""


class Setting(msgspec.Struct, frozen=True):
    """A value of a run, as plain data, and its origin."""

    value: Any
    origin: str


@dataclass
class Settings:
    """One for the process. The overrides are of arguments that `Trainer` and `launch` have, by name."""

    overrides: Mapping[str, Any] = field(default_factory=dict)
    progress: str | None = None
    """One of `PROGRESS`; None is $SHOAL_PROGRESS, or auto."""
    verbose: bool = False
    show_config: bool = False
    stream: TextIO | None = None
    """Where progress goes; None is where its mode puts it."""
    command: tuple[str, ...] = ()
    """What was typed after `shoal`, where a script runs under it."""
    store: str | None = None
    """The URL of the run store; None is $SHOAL_STORE or a file in Shoal's home; "none" keeps no record."""
    listeners: tuple[Callable[[], Callback], ...] = ()
    """Each makes a listener for one run, with a `close()` if it needs one."""
    report: bool = True
    """Whether a run ends with a report on the screen."""
    made: int = 0
    """How many Trainers a script has made."""
    entered: int = 0
    """How many times a script has begun to train, evaluate or predict."""


def current() -> Settings:
    return _current


def progress_mode() -> str:
    """How progress is to be shown. Raises ConfigError for a word that $SHOAL_PROGRESS cannot have."""
    mode = _current.progress or os.environ.get("SHOAL_PROGRESS") or "auto"
    if mode not in PROGRESS:
        raise ConfigError(f"SHOAL_PROGRESS={mode!r} is not known; use {', '.join(PROGRESS)}")
    return mode


@contextmanager
def using(settings: Settings) -> Iterator[Settings]:
    """Within: `settings` are current."""
    global _current
    before, _current = _current, settings
    try:
        yield settings
    finally:
        _current = before


@contextmanager
def without_reports() -> Iterator[None]:
    """Within: runs end without a report on the screen, for whoever starts many of them."""
    before, _current.report = _current.report, False
    try:
        yield
    finally:
        _current.report = before


_current = Settings()
