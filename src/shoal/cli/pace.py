"""How far a run came, and how fast it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.store.values import RunInfo


def steps_of(run: RunInfo) -> str:
    """Done and to do."""
    return f"{run.step}/{run.total_steps}" if run.total_steps else str(run.step)


def samples_done(run: RunInfo) -> int:
    """Those of all steps done; the last batch of an epoch may be short."""
    if not run.steps_per_epoch:
        return run.step * run.batch_size
    epochs, steps = divmod(run.step, run.steps_per_epoch)
    return epochs * run.samples_per_epoch + steps * run.batch_size


def speed(run: RunInfo) -> float | None:
    """Samples per second, over all its starts."""
    return samples_done(run) / run.seconds if run.seconds > 0 and run.step else None
