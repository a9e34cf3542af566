"""Validation curves: what an arm writes down while it trains, and when it reached a loss, in seconds.

A *phase* is a stretch of steps in which gradients travel by one codec, such as the steps of a hook before it begins to
compress, or those of `onebit` before Adam's variance is held still.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

SMOOTH = 3  # evaluations whose mean is a point of the smoothed curve: the last so many


@dataclass
class Curve:
    """Losses on the validation set, by step; and the first step (from 0) of each phase with its codec."""

    evals: list[tuple[int, float]] = field(default_factory=list)
    phases: list[tuple[int, str]] = field(default_factory=list)

    def smoothed(self) -> list[tuple[int, float]]:
        return smoothed(self.evals)

    def at(self, step: int) -> float:
        """The smoothed loss after so many steps. Raises KeyError where there was no evaluation."""
        return dict(self.smoothed())[step]

    def steps_to(self, loss: float) -> float | None:
        """After how many steps the smoothed curve first was at `loss`, between two evaluations by a straight line."""
        before: tuple[int, float] | None = None
        for step, value in self.smoothed():
            if value <= loss:
                if before is None or before[1] <= value:
                    return float(step)
                return before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - value)
            before = step, value
        return None

    def seconds(self, steps: float, per_step: Mapping[str, float]) -> float:
        """That so many steps take, if a step of each phase takes what `per_step` says."""
        total = 0.0
        per_step = _with_joint({codec for _, codec in self.phases}, per_step)
        ends = [begin for begin, _ in self.phases[1:]] + [math.inf]
        for (begin, codec), end in zip(self.phases, ends, strict=True):
            total += max(0.0, min(steps, end) - begin) * per_step[codec]
        return total

    def codec_at(self, step: int) -> str:
        """Of the step with this number, from 0; "" before anything is known."""
        return next((codec for begin, codec in reversed(self.phases) if begin <= step), "")


def _with_joint(codecs: set[str], per_step: Mapping[str, float]) -> dict[str, float]:
    """A step with two codecs that was never timed takes what a step of each takes, which is too much."""
    joint = {codec: codec.split("+") for codec in codecs if "+" in codec and codec not in per_step}
    return {**per_step, **{codec: sum(per_step[part] for part in parts) for codec, parts in joint.items()}}


@dataclass(frozen=True)
class Turn:
    """What the steps of a turn took that are on its clock, how many of them went by each codec; and the bytes that left
    the busiest host for these and the ones before the clock."""

    seconds: float
    timed: Counter[str]
    sent: float
    all: Counter[str]


def by_codec(early: Sequence[Turn], late: Sequence[Turn]) -> dict[str, dict[str, list[float]]]:
    """Seconds and bytes of a step with each codec, by turn. Early turns tell only of codecs that late ones lack."""
    return {
        "seconds": _each(early, late, lambda turn: (turn.seconds, turn.timed)),
        "bytes": _each(early, late, lambda turn: (turn.sent, turn.all)),
    }


def _each(
    early: Sequence[Turn], late: Sequence[Turn], of: Callable[[Turn], tuple[float, Counter[str]]]
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for turns in (late, early):
        pure: dict[str, list[float]] = {}
        for total, counts in map(of, turns):
            if len(counts) == 1:
                (codec, count), *_ = counts.items()
                pure.setdefault(codec, []).append(total / count)
        found = pure | found
    known = {codec: statistics.median(values) for codec, values in found.items()}
    mixed = [_rest(total, counts, known) for total, counts in map(of, [*early, *late])]
    for total, unknown in mixed:
        if len(unknown) == 1:
            (codec, count), *_ = unknown.items()
            found.setdefault(codec, []).append(total / count)
    return found | _told_apart([(total, unknown) for total, unknown in mixed if unknown.keys() - found.keys()])


def _rest(total: float, counts: Counter[str], known: Mapping[str, float]) -> tuple[float, dict[str, int]]:
    """Of a turn with several codecs: what is left for those of which nothing is known, and their steps."""
    unknown = {codec: count for codec, count in counts.items() if codec not in known}
    return max(0.0, total - sum(counts[codec] * known[codec] for codec in counts if codec in known)), unknown


def _told_apart(mixed: Sequence[tuple[float, Mapping[str, int]]]) -> dict[str, list[float]]:
    """Codecs that were only met together, by least squares; as one and the same if their steps do not tell."""
    codecs = sorted({codec for _, counts in mixed for codec in counts})
    if not codecs:
        return {}
    steps = np.array([[counts.get(codec, 0) for codec in codecs] for _, counts in mixed], dtype=float)
    totals = np.array([total for total, _ in mixed])
    values, _, rank, _ = np.linalg.lstsq(steps, totals, rcond=None)
    if rank < len(codecs) or values.min() <= 0:
        values = np.full(len(codecs), totals.sum() / steps.sum())
    return {codec: [float(value)] for codec, value in zip(codecs, values, strict=True)}


def smoothed(evals: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Means over the last evaluations; of the first ones, over those that there are."""
    tail = [[value for _, value in evals[max(0, at + 1 - SMOOTH) : at + 1]] for at in range(len(evals))]
    return [(step, sum(values) / len(values)) for (step, _), values in zip(evals, tail, strict=True)]


class Notebook:
    """An arm's side: appends to a file, a line at a time."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._codec: str | None = None
        self.evals: list[tuple[int, float]] = []

    def evaluated(self, step: int, loss: float) -> None:
        self.evals.append((step, loss))
        self._write({"eval": [step, loss]})

    def travelled(self, step: int, codec: str) -> None:
        """The gradients of this step (from 0) went by this codec."""
        if codec != self._codec:
            self._codec = codec
            self._write({"phase": [step, codec]})

    def done(self, steps: int, until: float | None) -> bool:
        """Whether `steps` have been done, and the smoothed loss is at `until` if that is given."""
        if not self.evals or self.evals[-1][0] < steps:
            return False
        return until is None or smoothed(self.evals)[-1][1] <= until

    def _write(self, line: dict[str, object]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read_curve(file: Path) -> Curve:
    """What a notebook has so far."""
    curve = Curve()
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    for line in map(json.loads, lines):
        if "eval" in line:
            curve.evals.append((int(line["eval"][0]), float(line["eval"][1])))
        else:
            curve.phases.append((int(line["phase"][0]), str(line["phase"][1])))
    return curve
