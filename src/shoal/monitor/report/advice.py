"""One sentence of advice where the figures of a run clearly say something; docs/report.md lists the thresholds."""

from __future__ import annotations

from shoal.monitor.report.summary import Summary
from shoal.monitor.wording import percent, times

LEAST_SECONDS = 10.0
"""A shorter run is mostly start-up: its shares say nothing about a long one."""
DATA_SHARE = 0.2
EXCHANGE_SHARE = 0.4
EVAL_SHARE = 0.3
CHECKPOINT_SHARE = 0.1
IMBALANCE = 1.25
"""Compute time of the slowest worker divided by the mean."""
EFFICIENCY = 0.5


def advice(summary: Summary) -> str:
    """What to change first, or nothing. A loss that is not finite comes first, then stale gradients that cost many
    samples, then what costs most time."""
    broken = _not_finite(summary) or _too_stale(summary)
    if broken or summary.wall_seconds < LEAST_SECONDS:
        return broken
    costs = [cost for cost in _costs(summary) if cost[1]]
    if costs:
        return max(costs)[1]
    return _too_many_workers(summary)


def _not_finite(summary: Summary) -> str:
    loss = summary.loss
    if not loss.not_finite:
        return ""
    steps = "1 step" if loss.not_finite == 1 else f"{loss.not_finite:,} steps"
    return (
        f"The loss was not finite in {steps}, the first of them step {loss.first_not_finite:,}: lower the learning "
        "rate, set clip=, or look at the samples of that step."
    )


def _too_stale(summary: Summary) -> str:
    return f"It {summary.cost.words}." if summary.cost is not None and summary.cost.is_large else ""


def _costs(summary: Summary) -> list[tuple[float, str]]:
    """Shares of time that could be won, each with its sentence, or with none where it is small."""
    shares = summary.shares
    if not shares:
        return []
    return [
        (shares["data"], _if(shares["data"] >= DATA_SHARE, _data(summary, shares["data"]))),
        (
            shares["exchange"],
            _if(
                shares["exchange"] >= EXCHANGE_SHARE and len(summary.workers) > 1 and not _uneven(summary),
                f"{percent(shares['exchange'])} of the time went into exchanging gradients: a larger batch_size= "
                "exchanges less often, and fewer workers= may be as fast.",
            ),
        ),
        (
            shares["eval"],
            _if(
                shares["eval"] >= EVAL_SHARE,
                f"{percent(shares['eval'])} of the time went into evaluation: raise eval_every=, or evaluate on less.",
            ),
        ),
        (
            shares["checkpoint"],
            _if(
                shares["checkpoint"] >= CHECKPOINT_SHARE,
                f"{percent(shares['checkpoint'])} of the time went into checkpoints: raise checkpoint_every=, or put "
                "run_dir= on a faster disk.",
            ),
        ),
        _slow_worker(summary),
    ]


def _if(holds: bool, text: str) -> str:
    return text if holds else ""


def _data(summary: Summary, share: float) -> str:
    setting = summary.config.get("data_workers")
    now = "" if setting is None or setting.value is None else f" (now {setting.value})"
    return (
        f"{percent(share)} of the time workers waited for data: raise data_workers={now}, or make the data set's items "
        "cheaper to read."
    )


def _uneven(summary: Summary) -> bool:
    return summary.slowest is not None and summary.slowest[1] >= IMBALANCE


def _slow_worker(summary: Summary) -> tuple[float, str]:
    """What the others could win: they wait while the slowest computes."""
    if summary.slowest is None or not _uneven(summary):
        return 0.0, ""
    worker, ratio = summary.slowest
    return summary.shares["compute"] * (ratio - 1), (
        f"Worker {worker} computed {ratio:.2f} times as long as the mean and the others waited for it: see what else "
        "uses its cores, or whether its samples are larger."
    )


def _too_many_workers(summary: Summary) -> str:
    if summary.efficiency is None or summary.speedup is None or summary.efficiency >= EFFICIENCY:
        return ""
    return (
        f"{summary.planned_workers} workers were {times(summary.speedup)} times as fast as "
        f"{_baseline_workers(summary)}: fewer may do, or the machine has fewer free cores than workers."
    )


def _baseline_workers(summary: Summary) -> str:
    number = summary.baseline.workers if summary.baseline else 1
    return "one" if number == 1 else str(number)
