"""What stale gradients cost in samples: a run with mode ssp or async beside an earlier one without staleness.

Both losses are smoothed over the same number of steps, and the samples are counted that each run took to the lowest
loss that both reached. As a noisy curve touches its lowest point by chance, and late, so much of the way is left out as
noise can make.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.core.settings import Setting
from shoal.core.spec import Server
from shoal.monitor.servers import sync_of
from shoal.monitor.wording import figure, one_line

if TYPE_CHECKING:
    from shoal.store.store import Store
    from shoal.store.values import RunInfo, StepRow

WORTH_SAYING = 1.3
"""So many times the samples is too much: then there is advice."""
_LOOK_AT = 50
_MOST_ROWS = 4_000
_LEAST_ROWS = 50
"""In fewer steps curves are mostly noise."""
_WINDOW_SHARE = 25
"""A mean is over one in so many of the shorter run's rows, and at least over `_LEAST_WINDOW`."""
_LEAST_WINDOW = 5
_LEFT_OUT = 0.02
"""Of the way from the first loss to the lowest, at least."""
_DEVIATIONS = 4.0
"""So many standard deviations of a mean are noise."""
_MOST_ID = 80


class Cost(msgspec.Struct, frozen=True):
    """How many times the samples of another run were needed to reach `loss`."""

    run_id: str
    """Of the other run."""
    sync: str
    """How its workers agreed: bsp or allreduce."""
    loss: float
    ratio: float
    remedy: str = ""
    """What to change if that is too much."""

    @property
    def words(self) -> str:
        """In one line, with what to change where it is worth it."""
        other = f"run {one_line(self.run_id)[:_MOST_ID]} ({self.sync})"
        told = f"needed {self.ratio:.2f} times the samples of {other} to reach loss {figure(self.loss)}"
        return f"{told}: {self.remedy}" if self.is_large else told

    @property
    def is_large(self) -> bool:
        return self.ratio > WORTH_SAYING


def find_cost(store: Store, run: RunInfo) -> Cost | None:
    """Against the newest earlier run without staleness that is comparable; None where there is none, where `run` has
    no staleness, and where the curves are too short to say."""
    if not is_stale(run.config):
        return None
    mine = _told(store, run)
    for other in store.runs(name=run.name, limit=_LOOK_AT):
        if other.id == run.id or other.created > run.created or _without_staleness(other.config) is None:
            continue
        if _shape(other) != _shape(run) or _told(store, other) != mine:
            continue
        found = _compared(store, run, other)
        if found is not None:
            return found
    return None


def is_stale(config: Mapping[str, Setting]) -> bool:
    """Whether gradients may be computed with weights that lack steps."""
    sync = sync_of(config)
    return isinstance(sync, Server) and sync.bound != 0


def _without_staleness(config: Mapping[str, Setting]) -> str | None:
    """The name of such a sync; None if it is another one."""
    sync = sync_of(config)
    if not isinstance(sync, Server):
        return None if sync is None else sync.name
    return "bsp" if sync.bound == 0 and sync.apply == "step" else None


def _shape(run: RunInfo) -> tuple[int, int]:
    return run.batch_size, run.samples_per_epoch


def _told(store: Store, run: RunInfo) -> tuple[Any, ...]:
    """What has to be the same for losses to be comparable: the model's size, the optimizers, the first rate."""
    starts = [event.data for event in store.events(run.id) if event.kind == "RunStarted"]
    told = starts[-1] if starts else {}
    first = store.steps(run.id, most=2)[:1]
    return told.get("parameters"), told.get("optimizers"), first[0].rate if first else None


def _compared(store: Store, run: RunInfo, other: RunInfo) -> Cost | None:
    every = max(1, math.ceil(max(run.step, other.step) / _MOST_ROWS))
    mine, theirs = (_losses(store.steps(one.id, most=max(1, one.step // every))) for one in (run, other))
    needed = steps_needed(mine, theirs)
    if needed is None:
        return None
    loss, steps, their_steps = needed
    mode = sync_of(run.config)
    bounded = isinstance(mode, Server) and mode.mode == "ssp"
    return Cost(
        run_id=other.id,
        sync=_without_staleness(other.config) or "",
        loss=loss,
        ratio=steps / their_steps,  # the batches are equal
        remedy="lower staleness=, or use mode=bsp" if bounded else "use mode=ssp with a low staleness=, or mode=bsp",
    )


def _losses(rows: Sequence[StepRow]) -> list[tuple[int, float]]:
    return [(row.step, row.loss) for row in rows if math.isfinite(row.loss)]


def steps_needed(
    mine: Sequence[tuple[int, float]], theirs: Sequence[tuple[int, float]]
) -> tuple[float, float, float] | None:
    """A loss that both reached, and the steps that each took to it; of (step, loss) at equal distances. None where the
    curves are too short, or one of them does not fall."""
    shorter = min(len(mine), len(theirs))
    if shorter < _LEAST_ROWS:
        return None
    window = max(_LEAST_WINDOW, shorter // _WINDOW_SHARE)
    curves = [_smoothed(mine, window), _smoothed(theirs, window)]
    lowest = max(min(loss for _, loss in curve) for curve in curves)
    start = min(curve[0][1] for curve in curves)
    noise = _DEVIATIONS * max(_deviation(mine), _deviation(theirs)) / math.sqrt(window)
    target = lowest + max(noise, _LEFT_OUT * (start - lowest))
    if target >= start:
        return None
    first, second = (next(step for step, loss in curve if loss <= target) for curve in curves)
    return target, first, second


def _deviation(rows: Sequence[tuple[int, float]]) -> float:
    """Of a single loss from its neighbours, in the second half, where the curve itself falls little."""
    late = [loss for _, loss in rows[len(rows) // 2 :]]
    return math.sqrt(sum((after - before) ** 2 for before, after in pairwise(late)) / (2 * (len(late) - 1)))


def _smoothed(rows: Sequence[tuple[int, float]], window: int) -> list[tuple[float, float]]:
    """The mean of each `window` neighbours, at the middle of them, so that smoothing makes no curve later."""
    sums = [0.0, *accumulate(loss for _, loss in rows)]
    return [
        ((rows[at][0] + rows[at + window - 1][0]) / 2, (sums[at + window] - sums[at]) / window)
        for at in range(len(rows) - window + 1)
    ]
