"""What the report says in the same words in a terminal and on a page."""

from __future__ import annotations

from shoal.monitor.report.summary import Summary
from shoal.monitor.wording import counted, percent, size
from shoal.store.values import COMPLETE, RUNNING

WORTH_NAMING = 1.01
"""A worker that computed so many times as long as the mean is named."""


def outcome_words(summary: Summary) -> str:
    """How it ended and how far it came: "complete, 1,200 steps"; "failed after 120 of 1,200 steps"."""
    whole = summary.total_steps
    if summary.outcome == COMPLETE or not whole or summary.step >= whole:
        return f"{summary.outcome}, {counted(summary.step, 'step')}"
    joint = "at" if summary.outcome == RUNNING else "after"
    return f"{summary.outcome} {joint} {summary.step:,} of {counted(whole, 'step')}"


def balance_words(summary: Summary) -> str:
    """Who computed longest, where that is worth a word."""
    if summary.slowest is None:
        return ""
    worker, ratio = summary.slowest
    if ratio < WORTH_NAMING:
        return "evenly loaded (within 1%)"
    return f"worker {worker} computed longest, {percent(ratio - 1)} above the mean"


def memory_words(summary: Summary) -> str:
    if not any(summary.peak_memory.values()):
        return ""
    worker = max(summary.peak_memory, key=lambda number: summary.peak_memory[number])
    of = f" (worker {worker})" if len(summary.peak_memory) > 1 else ""
    return f"peak memory {size(summary.peak_memory[worker])}{of}"
