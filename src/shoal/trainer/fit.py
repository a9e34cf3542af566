"""What `Trainer.fit` does on every worker: the training loop."""

from __future__ import annotations

from math import nan
from typing import Any

import torch
from torch import nn

from shoal.checkpoint.replan import new_length
from shoal.cluster.board import Phase
from shoal.core.errors import NotFiniteError
from shoal.core.events import Notice
from shoal.core.following import follows
from shoal.core.progress import evaluated, figures_of
from shoal.syncs.applying import Applier, Average, averaged
from shoal.syncs.recipe import Recipe, Record, first_words, make_optimizer, make_schedule
from shoal.trainer.after_step import do_after_step
from shoal.trainer.evaluate import Evaluator, Part, part_of
from shoal.trainer.saying import say
from shoal.trainer.session import Session
from shoal.trainer.together import samples_together


def train(session: Session, model: nn.Module, recipe: Recipe) -> tuple[dict[str, Any], Average | None]:
    """Train `model` on this worker. Returns figures for the result, and the average of weights if one was asked for."""
    session.standing.whole = True  # nothing but the loop asks other workers
    session.standing.redo(False)
    model.to(session.device)
    for text in first_words(model, recipe, workers=session.workers, deterministic=session.deterministic):
        session.channel.emit(Notice(step=0, text=text))
    for text in recipe.doubts:
        say(session, text)
    # first: what is made from the weights, here and in an optimizer, must find those that all workers start from
    session.track(model=model)
    optimizer = make_optimizer(recipe, model)
    schedule = make_schedule(recipe, optimizer)
    made = None if schedule is None else schedule.state_dict()
    average = Average(model, recipe.ema) if recipe.ema is not None else None
    record = Record()
    parts = {"optimizer": optimizer, "schedule": schedule, "average": average, "record": record}
    session.track(**{name: part for name, part in parts.items() if part is not None})
    session.overlap_backward()
    session.compares_untrained = recipe.after_step is not None
    session.together = samples_together(session, model, recipe, start=max(0, session.resumed_step))
    session.most_workers = recipe.most_workers
    if schedule is not None:
        words = new_length(schedule, made, schedule.state_dict(), record.planned, recipe.total_steps)
        if words is not None:
            say(session, words)
    record.planned = recipe.total_steps
    session.evaluated = record.evaluated or -1
    if session.resumed_step >= recipe.total_steps:
        text = f"there is nothing left to train: the checkpoint is at step {session.resumed_step} of "
        text += f"{recipe.total_steps}; for more, raise epochs= or steps="
        session.channel.emit(Notice(step=session.resumed_step, text=text))
    applier = Applier(optimizer, schedule, average)
    by_evaluations = applier.by_loss and recipe.eval_data is not None
    if recipe.eval_data is not None:
        session.compare_data(recipe.eval_data, "eval_data")
    evaluation = _Evaluation(session, model, recipe, applier, record)
    try:
        for step in session.steps(
            recipe.data,
            recipe.batch_size,
            steps=recipe.total_steps,
            collate=recipe.collate,
            data_workers=recipe.data_workers,
            micro_batch=recipe.micro_batch,
            buffers=recipe.buffers,
        ):
            if evaluation.due(None):  # a signal left it to the run that resumes: this one
                evaluation.run()
                if session.standing.redoes and session.stopping is not None:
                    break  # those who evaluated at the end of the step before have left the loop there
            for batch in step:
                step.compute(recipe.loss, model, batch)
            if not step.overtaken:
                update = step.apply(applier, clip=recipe.clip)
                if recipe.after_step is not None:
                    # before the average: what it changes is what counts
                    do_after_step(recipe.after_step, model, seed=session.seed, step=step.number)
                applier.end(nan if by_evaluations else update.loss)
            step.commit()
            if session.step == recipe.total_steps:
                # before this step is checkpointed
                _refuse_not_finite(model, session)
            if evaluation.due(session.stopping):
                evaluation.run()
        if evaluation.due(session.stopping):
            # a worker that came when the last step was done
            evaluation.run()
    finally:
        evaluation.close()
    optimizer.zero_grad()  # they are of the last step, and nothing of a next run
    facts = recipe.facts(session.step, record.evaluated, session.stopping)
    ended = session.progress.ended(facts, record.metrics)
    session.channel.emit(ended)
    return figures_of(ended), average


def _refuse_not_finite(model: nn.Module, session: Session) -> None:
    for name, param in model.named_parameters():
        if param.is_floating_point() and not torch.isfinite(param).all():
            raise NotFiniteError(
                f"parameter {name!r} is not finite after the last step ({session.step}); lower the learning "
                "rate or set clip=",
                step=session.step,
            )


class _Evaluation:
    """When to evaluate during training, and what follows from it."""

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        recipe: Recipe,
        applier: Applier,
        record: Record,
    ) -> None:
        self._session = session
        self._model = model
        self._recipe = recipe
        self._applier = applier
        self._record = record
        self._part: Part | None = None

    def due(self, stopping: str | None) -> bool:
        """Whether to evaluate now, in a run that ends here for this reason, or does not end."""
        return follows(self._recipe.facts(self._session.step, self._record.evaluated, stopping)).evaluate

    def run(self) -> None:
        recipe, record, session = self._recipe, self._record, self._session
        if self._part is None:
            self._part = part_of(session, recipe, recipe.eval_data, "eval_data", session.workers)
        evaluator = Evaluator(session, self._part, recipe.loss, recipe.predict, recipe.metrics)
        metrics = None
        while metrics is None:
            metrics = session.guard(lambda: self._evaluate(evaluator))
            session.evaluating = False
            if record.evaluated == session.step:
                return  # members changed, and another one had evaluated already: this worker has its result
        session.confirm(session.step)
        session.evaluated = session.step
        self._forget_lost_bests()
        if record.take(session.step, metrics):
            session.checkpoint_best()
        self._applier.evaluated(metrics["loss"])
        assert session.course is not None
        session.channel.decide(evaluated(session.course, session.step, metrics))
        session.guard(session.agree_on_stop)

    def _evaluate(self, evaluator: Evaluator) -> dict[str, float]:
        session = self._session
        session.evaluating = True
        session.enter(Phase.EVALUATE)
        session.standing.fault("evaluate", session.step - 1)
        with averaged(self._applier.average):
            return evaluator.run(self._model)

    def _forget_lost_bests(self) -> None:
        """One that was being saved when the worker that saved it died is not there: the one before it counts again."""
        record, kept = self._record, self._session.lost_best()
        if kept is not None:
            while record.bests and record.bests[-1][0] != kept:
                record.bests.pop()
            record.best = record.bests[-1][1] if record.bests else None

    def close(self) -> None:
        if self._part is not None:
            self._part.close()
