"""What the store knows of how a run was made, besides the Trainer's arguments: its command, and what it trained."""

from __future__ import annotations

import pwd
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.monitor.wording import figure

if TYPE_CHECKING:
    from shoal.store.store import Store
    from shoal.store.values import EventRow, RunInfo, StepRow

_PYTHON = re.compile(r"python[\d.]*$")
_SHORT_COMMIT = 12


@dataclass(frozen=True)
class Trained:
    """What a run trains, in words; empty where it is not known, as before the first step."""

    optimizer: str = ""
    parameters: str = ""
    rate: str = ""
    """The learning rate of the first step."""


def trained(events: Sequence[EventRow], steps: Sequence[StepRow]) -> Trained:
    """As its newest start told. `steps` may have been thinned out, but not of the first one."""
    starts = [event.data for event in events if event.kind == "RunStarted"]
    told = starts[-1] if starts else {}
    count, rate = told.get("parameters") or 0, steps[0].rate if steps else None
    return Trained(
        optimizer=", ".join(told.get("optimizers") or []),
        parameters=f"{count:,}" if count else "",
        rate="" if rate is None else figure(rate),
    )


def circumstances(store: Store, run: RunInfo) -> dict[str, str]:
    """By name, in words that are equal where the runs are."""
    what = trained(store.events(run.id), store.steps(run.id, most=2))
    packages = run.environment.get("packages") or {}
    return {
        "script": Path(run.script).name if run.script else "",
        "script's arguments": shlex.join(script_arguments(run.command, run.script)),
        "optimizer": what.optimizer,
        "parameters": what.parameters,
        "learning rate": what.rate,
        "workers": str(run.workers),
        "git commit": _commit(run),
        "python": str(run.environment.get("python") or ""),
        **{str(name): str(version) for name, version in packages.items()},
    }


def _commit(run: RunInfo) -> str:
    if not run.git_commit:
        return ""
    return run.git_commit[:_SHORT_COMMIT] + (" with changes" if run.git_dirty else "")


def typed(command: Sequence[str]) -> str:
    """A command as one would type it: without the folders in which Python and Shoal are installed."""
    words = list(command)
    if words and _PYTHON.match(Path(words[0]).name):
        words[0] = Path(words[0]).name
        if len(words) > 1 and Path(words[1]).name == "shoal":
            words[:2] = ["shoal"]
    return shlex.join(words)


def script_arguments(command: Sequence[str], script: str) -> list[str]:
    """What the script found in `sys.argv`: all that follows it, or under `shoal run` what follows `--`."""
    words = list(command)
    if any(Path(word).name == "shoal" for word in words[:2]) or words[1:3] == ["-m", "shoal.cli"]:
        return words[words.index("--") + 1 :] if "--" in words else []
    if "-m" in words[1:]:
        return words[words.index("-m", 1) + 2 :]
    names = [Path(word).name for word in words]
    name = Path(script).name
    return words[names.index(name) + 1 :] if script and name in names else []


def user_name(user: str) -> str:
    """Of a user who is known by a number only, the name that this machine has for it."""
    if not user.isascii() or not user.isdigit():
        return user
    try:
        return pwd.getpwuid(int(user)).pw_name
    except (KeyError, OverflowError):
        return user
