"""What a run tells of its steps."""

from __future__ import annotations

from math import isnan
from typing import Any

import pytest

from shoal.core.atoms import Course
from shoal.core.events import EpochDone, Event, StepDone
from shoal.core.following import INTERRUPTED, STOPPED, Facts
from shoal.core.progress import Progress, Update, evaluated, figures_of, summed
from shoal.core.traffic import Traffic

COURSE = Course(size=10, batch=4)
"""Steps of 4, 4 and 2 samples."""


def told(progress: Progress, step: int, update: Update | None, **more: Any) -> list[Event]:
    return list(progress.committed(COURSE, COURSE.step(step), update, [0.1], **more))


def test_a_step_tells_its_figures_and_the_last_of_an_epoch_the_mean_of_all() -> None:
    progress = Progress()
    (done,) = told(progress, 3, Update(2.0, 4.0, 0.5, {"acc": 0.25}), traffic=Traffic())
    assert isinstance(done, StepDone)
    assert (done.step, done.epoch, done.samples, done.loss, done.norm) == (4, 1, 4, 2.0, 0.5)
    assert (done.rates, done.logs, done.traffic) == ([0.1], {"acc": 0.25}, Traffic())
    (second,) = told(progress, 4, Update(1.0, 12.0, None, {}))
    assert isinstance(second, StepDone) and second.norm is None and second.traffic is None
    last, epoch = told(progress, 5, Update(5.0, 4.0, None, {}))
    assert isinstance(last, StepDone) and last.samples == 2
    assert isinstance(epoch, EpochDone)
    assert (epoch.step, epoch.epoch, epoch.loss) == (6, 1, (2.0 * 4 + 1.0 * 12 + 5.0 * 4) / 20)
    assert progress.epoch_loss == epoch.loss, "until the next epoch has a step"
    told(progress, 6, Update(7.0, 1.0, None, {}))
    assert progress.epoch_loss == 7.0


def test_a_step_that_applied_nothing_tells_only_of_the_end_of_its_epoch() -> None:
    progress = Progress(epoch=[6.0, 3.0])
    assert told(progress, 1, None) == []
    (epoch,) = told(progress, 2, None)
    assert isinstance(epoch, EpochDone) and epoch.loss == 2.0
    assert told(progress, 3, None) == [] and isnan(progress.epoch_loss)


def test_the_mean_of_an_epoch_stays_when_weights_get_another_unit() -> None:
    progress = Progress()
    told(progress, 0, Update(2.0, 8.0, None, {}))
    progress.weigh_in(4.0)
    told(progress, 1, Update(4.0, 8.0, None, {}), unit=4.0)  # this one was still weighed in the old one
    assert progress.epoch == [2.0 * 2 + 4.0 * 2, 4.0]
    told(progress, 2, Update(0.0, 2.0, None, {}))
    assert progress.epoch_loss == 12.0 / 6.0


def test_logs_are_means_in_the_order_in_which_their_names_came() -> None:
    progress = Progress(["z"])
    before = progress.log_names
    sums = summed([("b", 1.0, 2.0), ("a", 3.0, 4.0), ("b", 2.0, 2.0), ("none", 0.0, 0.0)])
    assert sums == {"b": (3.0, 4.0), "a": (3.0, 4.0), "none": (0.0, 0.0)}
    assert list(progress.means(sums).items()) == [("a", 0.75), ("b", 0.75)]
    assert progress.log_names == ["z", "a", "b", "none"] and before == ["z"]
    assert progress.means({"b": (1.0, 1.0), "z": (4.0, 2.0)}) == {"z": 2.0, "b": 1.0}


@pytest.mark.parametrize(("step", "epoch"), [(1, 0), (3, 0), (4, 1)])
def test_an_evaluation_belongs_to_the_epoch_of_its_step(step: int, epoch: int) -> None:
    event = evaluated(COURSE, step, {"loss": 1.0})
    assert (event.step, event.epoch, event.metrics) == (step, epoch, {"loss": 1.0})


@pytest.mark.parametrize(
    ("step", "stopping", "reason"),
    [(6, None, "complete"), (6, STOPPED, "complete"), (5, STOPPED, STOPPED), (6, INTERRUPTED, INTERRUPTED)],
)
def test_a_run_ends_with_a_reason(step: int, stopping: str | None, reason: str) -> None:
    ended = Progress(epoch=[3.0, 2.0]).ended(Facts(step, 6, stopping=stopping), {"loss": 0.5})
    assert (ended.step, ended.loss, ended.metrics, ended.reason) == (step, 1.5, {"loss": 0.5}, reason)
    early = None if reason == "complete" else reason
    assert figures_of(ended) == {"loss": 1.5, "metrics": {"loss": 0.5}, "steps": step, "stopping": early}
