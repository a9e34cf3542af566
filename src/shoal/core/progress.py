"""What a run tells people of its steps, and the sums that this takes. Events are values: who has them sends them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from shoal.core.atoms import Course, StepSpan
from shoal.core.events import AnyEvent, EpochDone, EvalDone, RunEnded, StepDone
from shoal.core.following import Facts, ended_early
from shoal.core.traffic import Traffic

Sums = dict[str, tuple[float, float]]
"""Of what was logged: by name a sum, and the weight that it is divided by."""

_COMPLETE = "complete"


class Update(NamedTuple):
    """What an applied step comes to: figures over the whole global batch, equal on every worker."""

    loss: float
    weight: float
    norm: float | None
    """Norm of the gradient before clipping, where clipping was asked for."""
    logs: dict[str, float]


class Progress:
    """Of one loop through the data. What it sums is in every checkpoint."""

    def __init__(self, log_names: Iterable[str] = (), epoch: Sequence[float] = (0.0, 0.0)) -> None:
        self.log_names = list(log_names)
        """All that were ever logged, in the order in which they came."""
        self.epoch = list(epoch)
        """Sum of the losses of the current epoch, and their weight."""

    @property
    def epoch_loss(self) -> float:
        """Mean loss over what was trained of the current epoch, or of the last one if none of it was."""
        total, weight = self.epoch
        return total / weight if weight else float("nan")

    def weigh_in(self, unit: float) -> None:
        """From now on weights are in so many of what they were in."""
        self.epoch = [figure / unit for figure in self.epoch]

    def means(self, logs: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """Of what was logged in a step. Names that are new are known from now on."""
        # another list: this one may be on its way into a checkpoint
        self.log_names = [*self.log_names, *sorted(logs.keys() - set(self.log_names))]
        return {name: logs[name][0] / logs[name][1] for name in self.log_names if name in logs and logs[name][1]}

    def committed(
        self,
        course: Course,
        span: StepSpan,
        update: Update | None,
        rates: Sequence[float],
        traffic: Traffic | None = None,
        unit: float = 1.0,
    ) -> list[AnyEvent]:
        """A step is done; what there is to tell. Without an `update` nothing was applied in it.

        `rates`: those that it was applied with. `unit`: that of the update's weight, see `weigh_in`.
        """
        told: list[AnyEvent] = []
        step, epoch = span.step + 1, span.epoch
        if span.start == 0:
            self.epoch = [0.0, 0.0]
        if update is not None:
            loss, weight, norm, logs = update
            self.epoch = [self.epoch[0] + loss * weight / unit, self.epoch[1] + weight / unit]
            told.append(
                StepDone(
                    step=step,
                    epoch=epoch,
                    loss=loss,
                    samples=span.samples,
                    rates=list(rates),
                    norm=norm,
                    logs=logs,
                    traffic=traffic,
                )
            )
        if span.stop == course.size:
            told.append(EpochDone(step=step, epoch=epoch, loss=self.epoch_loss))
        return told

    def ended(self, facts: Facts, metrics: dict[str, float]) -> RunEnded:
        reason = ended_early(facts) or _COMPLETE
        return RunEnded(step=facts.step, loss=self.epoch_loss, metrics=metrics, reason=reason)


def evaluated(course: Course, step: int, metrics: dict[str, float]) -> EvalDone:
    return EvalDone(step=step, epoch=course.step(step - 1).epoch, metrics=metrics)


def figures_of(ended: RunEnded) -> dict[str, Any]:
    """For the result of a run."""
    stopping = None if ended.reason == _COMPLETE else ended.reason
    return {"loss": ended.loss, "metrics": ended.metrics, "steps": ended.step, "stopping": stopping}


def summed(logs: Iterable[tuple[str, float, float]]) -> Sums:
    """What several have logged: names, sums and weights."""
    sums: Sums = {}
    for name, total, weight in logs:
        before = sums.get(name, (0.0, 0.0))
        sums[name] = before[0] + total, before[1] + weight
    return sums
