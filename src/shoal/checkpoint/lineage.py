"""Which run `resume="last"` means: the newest one of the same script, model and data. A name alone is not enough."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

_SHOWN = 3
"""How many runs a message names."""
UNMARKED = ""
"""In place of the mark of an item that cannot be compared."""


@dataclass(frozen=True)
class Lineage:
    """What a run has in common with the one that it goes on from. None is what an older version did not record."""

    script: str | None = None
    """What `shoal.engines.program.origin` says."""
    model: str | None = None
    """See `model_digest`."""
    samples: int | None = None
    batch_size: int | None = None
    seed: int | None = None
    data: tuple[str, ...] | None = None
    """See `shoal.checkpoint.marks`."""

    def differing(self, other: Lineage) -> list[str]:
        """What is recorded of both and differs, but for the script: a run that goes on must have the same."""
        pairs = [(field.name, getattr(self, field.name), getattr(other, field.name)) for field in fields(self)]
        return [name for name, one, two in pairs if name != "script" and None not in (one, two) and _differ(one, two)]


class Known(NamedTuple):
    """A run that has checkpoints."""

    folder: Path
    lineage: Lineage


class Choice(NamedTuple):
    """The folder of the run to go on with, if there is one, and what a person should know of it."""

    folder: Path | None
    said: str = ""


def _differ(one: Any, two: Any) -> bool:
    return first_differing(one, two) is not None if isinstance(one, tuple) else one != two


def first_differing(marks: Sequence[str], kept: Sequence[str]) -> int | None:
    """The place of the first mark that differs from the one kept; None where there is none, or nothing to compare."""
    if len(marks) != len(kept):  # of data of another length, which is told elsewhere
        return None
    pairs = enumerate(zip(marks, kept, strict=True))
    return next((place for place, (one, two) in pairs if UNMARKED not in (one, two) and one != two), None)


def model_digest(state: Mapping[str, Any]) -> str:
    """Of the names and shapes in a model's `state_dict`."""
    shapes = sorted((name, list(getattr(value, "shape", ()))) for name, value in state.items())
    return hashlib.blake2b(msgspec.json.encode(shapes), digest_size=8).hexdigest()


def read_lineage(about: Mapping[str, Any]) -> Lineage:
    """From what a run's folder says about it."""
    known: dict[str, Any] = {field.name: about.get(field.name) for field in fields(Lineage)}
    return Lineage(**{**known, "data": None if known["data"] is None else tuple(known["data"])})


def choose(wanted: Lineage, runs: Sequence[Known]) -> Choice:
    """Which of these runs of one name, newest first, is meant.

    Where this script has runs and none fits, the newest is chosen all the same: what has changed is then refused in
    words, and no reason to start all over. Unless it is nothing but the items of the data, which nobody refuses: then
    there is none. A run of another script is not, because going on would overwrite its
    checkpoints; unless that script is gone: then it most likely is this one, moved.
    """
    mine = [run for run in runs if _is_same(run.lineage.script, wanted.script)]
    if mine:
        return _of_this_script(wanted, mine)
    for folder, lineage in runs:
        if lineage.differing(wanted):
            continue
        if lineage.script is None:
            return Choice(folder, f"{folder.name} is of an older version, which did not record its script")
        if not Path(lineage.script).exists():
            same = "its model and data are those of this one"
            return Choice(folder, f"{folder.name} was started from {lineage.script}, which is gone; {same}")
    return Choice(None, _candidates(runs))


def _of_this_script(wanted: Lineage, mine: Sequence[Known]) -> Choice:
    newest = mine[0]
    fitting = next((run.folder for run in mine if not run.lineage.differing(wanted)), None)
    if fitting is None and newest.lineage.differing(wanted) == ["data"]:
        name = newest.folder.name
        return Choice(None, f"{name} was trained on other data of the same length; resume={name!r} goes on with it")
    folder = fitting or newest.folder
    if folder != newest.folder:
        other = ", ".join(newest.lineage.differing(wanted))
        return Choice(folder, f"{newest.folder.name} is newer than {folder.name}, but differs in {other}")
    if Path(wanted.script or "").is_dir():
        return Choice(folder, f"{folder.name} is the newest run from the folder {wanted.script}; there is no script")
    return Choice(folder)


def _is_same(script: str | None, other: str | None) -> bool:
    if script is None or other is None or script == other:
        return script == other is not None
    try:
        return Path(script).samefile(other)
    except OSError:
        return False


def _candidates(runs: Sequence[Known]) -> str:
    if not runs:
        return ""
    named = ", ".join(f"{run.folder.name} of {run.lineage.script or 'an older version'}" for run in runs[:_SHOWN])
    more = f" and {len(runs) - _SHOWN} more" if len(runs) > _SHOWN else ""
    which = "it" if len(runs) == 1 else "the first"
    return f"Of the same name there is {named}{more}; resume={runs[0].folder.name!r} goes on with {which}"
