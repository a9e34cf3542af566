"""Short runs that take turns: a *lap* is one training of some steps by one arm, from its first process to its last.

For arms that cannot be halted between steps: servers lease work by what each worker took for the last lease, and by the
clock, so that a worker that waits for its turn would count as slow. Every arm writes down when each step was done, and
its loss; starting up is not part of any figure.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from codecrace import run_to_end
from curves import Curve, read_curve
from turns import HERE, _machine_cpu, rank_environments

LEAD = 4  # steps of a lap that are not on the clock: lease sizes, caches and connections settle


@dataclass(frozen=True)
class Racer:
    """How to start an arm: its script, which gets the file to write to before these options."""

    name: str
    script: str
    options: tuple[str, ...]
    ranks: int | None = None
    """Processes to start, as torchrun does; None: one, which makes its own workers."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of that one, besides ours."""


@dataclass(frozen=True)
class Lap:
    """When each step was done, in seconds since some moment, and the loss of its batch."""

    done: list[float]
    losses: list[float]
    used: float
    """The share of the machine that this arm used from its start to its end."""
    elsewhere: float
    """And that other processes used meanwhile."""
    curve: Curve | None = None
    """Its evaluations, if it wrote them into a file `notebook` in its folder."""

    def step_seconds(self, lead: int = LEAD) -> float:
        """The mean over the steps after the first `lead`, by the clock."""
        return (self.done[-1] - self.done[lead - 1]) / (len(self.done) - lead)

    def smoothed(self, last: int) -> list[float]:
        """Means over the last so many steps; of the first ones, over those that there are."""
        return [statistics.fmean(self.losses[max(0, at + 1 - last) : at + 1]) for at in range(len(self.losses))]


def lap(racer: Racer) -> Lap:
    """Have it train. Raises ArmFailed, with the last lines that it wrote, if it fails."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        command = (sys.executable, str(HERE / "arms" / racer.script), str(folder / "steps"), *racer.options)
        environments: Sequence[Mapping[str, str]] = (
            [racer.environment] if racer.ranks is None else rank_environments(racer.ranks)
        )
        before, machine, began = _children_cpu(), _machine_cpu(), time.monotonic()
        run_to_end(racer.name, command, environments, folder)
        available = (time.monotonic() - began) * (psutil.cpu_count() or 1)
        own = _children_cpu() - before
        others = max(0.0, _machine_cpu() - machine - own)
        done, losses = read_steps(sorted(folder.glob("steps*")))
        notebook = folder / "notebook"
        curve = read_curve(notebook) if notebook.exists() else None
        return Lap(done, losses, own / available, others / available, curve)


def read_steps(files: Sequence[Path]) -> tuple[list[float], list[float]]:
    """Of one file, or of one for each rank: when the last of them had done a step, and the mean of their losses."""
    ranks = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    steps = list(zip(*ranks, strict=True))
    return [max(time for time, _ in step) for step in steps], [
        statistics.fmean(loss for _, loss in step) for step in steps
    ]


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Steps:
    """An arm's side: notes each step, and writes all down at the end, or when enough of them are there."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("w")
        self._losses: list[float] = []

    def done(self, time: float, loss: float) -> None:
        self._losses.append(loss)
        self._file.write(json.dumps([time, loss]) + "\n")
        self._file.flush()

    def reached(self, loss: float, last: int) -> bool:
        """Whether the mean of the last so many steps is at this loss."""
        return statistics.fmean(self._losses[-last:]) <= loss
