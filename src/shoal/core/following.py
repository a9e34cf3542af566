"""What follows a step: whether it is evaluated and checkpointed, and whether the run ends with it.

One pure function for every sync: whoever has the same facts comes to the same.
"""

from __future__ import annotations

from typing import NamedTuple

PREEMPTED = "preempted"
INTERRUPTED = "interrupted"
STOPPED = "stopped"
REASONS = (PREEMPTED, INTERRUPTED, STOPPED)
"""Why a run may end early. Each has a flag in every step's exchange, so that all workers stop after the same step."""


class Facts(NamedTuple):
    """Of a run when a step is done."""

    step: int
    """Steps done."""
    total: int
    eval_every: int | None = None
    """None where nothing is evaluated."""
    evaluated: int = 0
    """The last step that was."""
    save_every: int | None = None
    """None where checkpoints go by time: see `overdue`."""
    overdue: bool = False
    """Whether a checkpoint is wanted whatever the step is."""
    best: bool = False
    """Whether its evaluation was the best so far."""
    stopping: str | None = None
    """Why the run ends with this step, if it was asked to: one of `REASONS`."""


class Following(NamedTuple):
    """What is to be done, in this order."""

    evaluate: bool
    save: bool
    ends: bool

    @property
    def kept(self) -> bool:
        """Whether its weights are still needed when the next step is applied."""
        return self.evaluate or self.save


def follows(facts: Facts) -> Following:
    step, total = facts.step, facts.total
    ends = facts.stopping is not None or step >= total
    # a signal wants an end soon: then evaluating is left to the run that resumes
    hurry = facts.stopping in (PREEMPTED, INTERRUPTED) and step < total
    evaluate = 0 < step != facts.evaluated and not hurry and _falls_on(step, total, facts.eval_every)
    due = facts.overdue or (facts.save_every is not None and step % facts.save_every == 0)
    return Following(evaluate, due or facts.best or ends, ends)


def _falls_on(step: int, total: int, every: int | None) -> bool:
    return every is not None and (step % every == 0 or step == total)


def is_best(loss: float, best: float | None) -> bool:
    """Whether an evaluation with this loss is better than the best one so far. Anything is better than NaN."""
    return best is None or not best <= loss


def ended_early(facts: Facts) -> str | None:
    """Why, or None: asked for at the very last step, an end is no early one."""
    return None if facts.stopping == STOPPED and facts.step >= facts.total else facts.stopping
