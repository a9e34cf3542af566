"""What follows a step, as a table."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from shoal.core.following import INTERRUPTED, PREEMPTED, REASONS, STOPPED, Facts, ended_early, follows, is_best

NOTHING: dict[str, bool] = {}


def done(step: int, **facts: Any) -> Facts:
    """In a run of thirty steps."""
    return Facts(step, 30, **facts)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (done(7), NOTHING),
        (done(30), {"save": True, "ends": True}),
        # evaluations
        (done(0, eval_every=5), NOTHING),
        (done(4, eval_every=5), NOTHING),
        (done(5, eval_every=5), {"evaluate": True}),
        (done(5, eval_every=5, evaluated=5), NOTHING),
        (done(10, eval_every=5, evaluated=5), {"evaluate": True}),
        (done(10, eval_every=20), NOTHING),
        (done(30, eval_every=7, evaluated=28), {"evaluate": True, "save": True, "ends": True}),
        (done(30, eval_every=7, evaluated=30), {"save": True, "ends": True}),
        # checkpoints
        (done(3, save_every=4), NOTHING),
        (done(4, save_every=4), {"save": True}),
        (done(3, overdue=True), {"save": True}),
        (done(3, save_every=4, overdue=True), {"save": True}),
        (done(5, eval_every=5, evaluated=5, best=True), {"save": True}),
        # ends that were asked for: a decision leaves time for an evaluation, a signal does not
        (done(5, stopping=STOPPED), {"save": True, "ends": True}),
        (done(5, eval_every=5, stopping=STOPPED), {"evaluate": True, "save": True, "ends": True}),
        (done(4, eval_every=5, stopping=STOPPED), {"save": True, "ends": True}),
        (done(5, eval_every=5, stopping=PREEMPTED), {"save": True, "ends": True}),
        (done(5, eval_every=5, stopping=INTERRUPTED), {"save": True, "ends": True}),
        # nobody would resume a run that is over
        (
            done(30, eval_every=5, stopping=PREEMPTED),
            {"evaluate": True, "save": True, "ends": True},
        ),
    ],
)
def test_what_follows_a_step(facts: Facts, expected: dict[str, bool]) -> None:
    told = follows(facts)
    assert {name: value for name, value in told._asdict().items() if value} == expected
    assert told.kept == (told.evaluate or told.save)


def test_every_step_of_a_run_is_evaluated_once_and_saved_where_it_should_be() -> None:
    evaluated, evaluations, saved = 0, [], []
    for step in range(1, 31):
        told = follows(done(step, eval_every=8, evaluated=evaluated, save_every=9))
        if told.evaluate:
            evaluations.append(step)
            evaluated = step
        saved += [step] if told.save else []
        assert told.ends == (step == 30)
        assert not follows(done(step, eval_every=8, evaluated=evaluated)).evaluate
    assert (evaluations, saved) == ([8, 16, 24, 30], [9, 18, 27, 30])


@pytest.mark.parametrize(
    ("loss", "best", "better"),
    [(2.0, None, True), (1.0, 2.0, True), (2.0, 2.0, False), (3.0, 2.0, False), (inf, 2.0, False), (nan, None, True)],
)
def test_the_best_evaluation_is_the_first_of_the_lowest(loss: float, best: float | None, better: bool) -> None:
    assert is_best(loss, best) is better


def test_an_end_that_is_asked_for_at_the_last_step_is_no_early_one() -> None:
    assert [ended_early(done(29, stopping=reason)) for reason in REASONS] == list(REASONS)
    assert [ended_early(done(30, stopping=reason)) for reason in REASONS] == [PREEMPTED, INTERRUPTED, None]
    assert ended_early(done(30)) is None
