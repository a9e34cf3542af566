"""Curves of runs: read from the store, drawn by matplotlib."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.text import UNITS
from shoal.core.errors import ConfigError
from shoal.monitor.wording import counted

if TYPE_CHECKING:
    from shoal.store.store import Store
    from shoal.store.values import EventRow, RunInfo, StepRow

POINTS = 2000
"""Steps per curve, evenly thinned out."""
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C564B")
"""Told apart also by those who do not see all colours."""


@dataclass(frozen=True)
class Curve:
    """One figure of one run: `x` are steps, `seconds` the time since the run started, pauses left out."""

    x: list[int]
    seconds: list[float]
    y: list[float]
    evaluations: list[tuple[int, float, float]]
    """Step, seconds, value."""


def curve_of(store: Store, run: RunInfo, metric: str) -> Curve:
    """What the run's steps and evaluations say about `metric`; empty where they say nothing."""
    steps = store.steps(run.id, most=POINTS)
    events = store.events(run.id)
    clock = _clock(run, steps, events)
    points = [(step, step.loss if metric == "loss" else step.logs.get(metric)) for step in steps]
    kept = [(step, float(value)) for step, value in points if value is not None]
    evaluations = [
        (event.step, clock(event.time), float(event.data["metrics"][metric]))
        for event in events
        if event.kind == "EvalDone" and event.data.get("metrics", {}).get(metric) is not None
    ]
    return Curve(
        [step.step for step, _ in kept],
        [clock(step.time) for step, _ in kept],
        [value for _, value in kept],
        evaluations,
    )


def _clock(run: RunInfo, steps: Sequence[StepRow], events: Sequence[EventRow]) -> Callable[[float], float]:
    """Turns a time into seconds since the start, without the pauses before each resume: from the last that was heard
    of the run to its next start."""
    starts = [event.time for event in events if event.kind == "RunStarted"]
    begun = starts[0] if starts else steps[0].time if steps else run.created
    heard = sorted([*(step.time for step in steps), *(event.time for event in events)])
    pauses = [(start, start - heard[max(0, bisect_left(heard, start) - 1)]) for start in starts[1:]]
    return lambda moment: max(0.0, moment - begun - sum(pause for start, pause in pauses if moment >= start))


def draw(curves: Sequence[Curve], runs: Sequence[RunInfo], metric: str, path: Path) -> None:
    """Draw the curves against steps and against time. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "Plots are drawn by matplotlib, which is not installed. Install it with: pip install 'shoal[plot]'   "
            "(or: pip install matplotlib)"
        ) from error
    drawing = Figure(figsize=(11, 5), dpi=150, layout="constrained")
    by_step, by_time = drawing.subplots(1, 2, sharey=True)
    longest = max(
        (time for curve in curves for time in (*curve.seconds, *(at[1] for at in curve.evaluations))), default=0
    )
    unit, name = next(((unit, name) for unit, name in UNITS[1:] if longest >= 3 * unit), UNITS[-1])
    for index, (curve, run) in enumerate(zip(curves, runs, strict=True)):
        color, label = _COLORS[index % len(_COLORS)], f"{run.id} ({counted(run.workers, 'worker')})"
        steps, times = [float(step) for step in curve.x], [second / unit for second in curve.seconds]
        _draw_curve(by_step, steps, curve.y, color, label)
        _draw_curve(by_time, times, curve.y, color, "")
        marks = {"color": color, "marker": "o", "markersize": 5, "markeredgecolor": "white"}
        marks["linestyle"] = "none" if curve.y else "-"
        values = [value for _, _, value in curve.evaluations]
        label = f"{run.id}, evaluation" if values else ""
        by_step.plot([step for step, _, _ in curve.evaluations], values, label=label or "_", **marks)
        by_time.plot([time / unit for _, time, _ in curve.evaluations], values, **marks)
    by_step.set(xlabel="step", ylabel=metric)
    by_time.set(xlabel=f"time in {name}, pauses left out")
    for axes in (by_step, by_time):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    drawing.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    drawing.savefig(path)


def _draw_curve(axes: Any, x: list[float], y: list[float], color: str, label: str) -> None:
    """Many points: every one faintly, and their mean over 2 % of the curve on top. NaN is a gap."""
    if not y:
        return
    if len(y) < 100:
        axes.plot(x, y, color=color, linewidth=1.6, label=label or "_", marker="." if len(y) == 1 else None)
        return
    axes.plot(x, y, color=color, linewidth=0.8, alpha=0.25)
    axes.plot(x, _smoothed(y, len(y) // 50), color=color, linewidth=1.8, label=label or "_")


def _smoothed(values: list[float], window: int) -> list[float]:
    """Each value's mean with those around it. What is not finite stays a gap, and does not spread."""
    half = window // 2
    means = []
    for place, value in enumerate(values):
        near = [other for other in values[max(0, place - half) : place + half + 1] if math.isfinite(other)]
        means.append(sum(near) / len(near) if math.isfinite(value) else math.nan)
    return means
