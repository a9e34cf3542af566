"""A run on one worker to compare with: the same name, batch, data and size, on the same machine."""

from __future__ import annotations

from shoal.monitor.report.summary import Baseline
from shoal.store.store import Store
from shoal.store.values import COMPLETE, RunInfo

_LOOK_AT = 50


def find_baseline(store: Store, run: RunInfo) -> Baseline | None:
    """The newest complete run that differs from `run` in having one worker; None where there is none."""
    if run.workers == 1:
        return None
    for other in store.runs(name=run.name, status=COMPLETE, limit=_LOOK_AT):
        if other.workers == 1 and other.seconds > 0 and _is_comparable(store, other, run):
            samples = other.step * other.batch_size
            return Baseline(run_id=other.id, workers=1, samples_per_second=samples / other.seconds)
    return None


def _is_comparable(store: Store, one: RunInfo, other: RunInfo) -> bool:
    same = (one.batch_size, one.samples_per_epoch, one.host) == (other.batch_size, other.samples_per_epoch, other.host)
    return same and _parameters(store, one) == _parameters(store, other)


def _parameters(store: Store, run: RunInfo) -> int:
    """How many the run trained, as its newest start told; 0 where that is not known."""
    starts = [event.data for event in store.events(run.id) if event.kind == "RunStarted"]
    return int(starts[-1].get("parameters") or 0) if starts else 0
