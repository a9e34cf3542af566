"""What `Trainer.fit` does on every worker: the training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch import nn

from shoal.core import settings
from shoal.core.errors import ConfigError, NotFiniteError
from shoal.core.events import Notice
from shoal.core.following import Facts, follows, is_best
from shoal.core.progress import evaluated, figures_of
from shoal.elastic.board import Phase
from shoal.layouts.single import uses_batch_statistics
from shoal.syncs.applying import Applier, Average, averaged
from shoal.trainer.after_step import AfterStep, do_after_step
from shoal.trainer.evaluate import Evaluator, LossFn, Part, PredictFn
from shoal.trainer.metrics import Metric
from shoal.trainer.replan import new_length
from shoal.trainer.saying import say
from shoal.trainer.session import Session
from shoal.trainer.together import samples_together


@dataclass(frozen=True)
class Recipe:
    """How to train: the Trainer's arguments, checked."""

    loss: LossFn
    optimizer: Callable[[Any], torch.optim.Optimizer]
    schedule: Callable[[torch.optim.Optimizer, int], Any] | None
    data: Any
    eval_data: Any
    collate: Any
    data_workers: int | None
    predict: PredictFn | None
    metrics: Sequence[str | Metric]
    batch_size: int
    exact_steps: int | None
    """What `steps=` said; None if the length of the run is a number of epochs."""
    total_steps: int
    steps_per_epoch: int
    clip: float | None
    micro_batch: int | None
    ema: float | None
    eval_every: int | None
    after_step: AfterStep | None = None
    doubts: tuple[str, ...] = ()
    """What was seen before the start, and would not be as in one process."""
    buffers: Mapping[str, str] | None = None
    """How buffers are merged, by name."""
    most_workers: int = 1
    """As many as there may ever be."""

    def part(self, session: Session, data: Any, name: str, workers: int) -> Part:
        """What of `data` this worker, one of so many, evaluates."""
        batch = self.micro_batch or max(1, -(-self.batch_size // workers))
        return Part(session, data, self.collate, batch=batch, data_workers=self.data_workers, name=name)

    def facts(self, step: int, evaluated: int, stopping: str | None) -> Facts:
        """Of a run with this recipe, for what follows a step; nothing of its checkpoints."""
        every = None if self.eval_data is None else self.eval_every or self.steps_per_epoch
        return Facts(step, self.total_steps, every, evaluated, stopping=stopping)


MOST_BESTS = 20
"""Evaluations that were the best at their time, and are remembered."""


class Record:
    """What the loop remembers across a resume."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.best: float | None = None
        self.bests: list[list[float]] = []
        """Steps and losses of those that were the best at their time, the last ones."""
        self.evaluated = 0
        """The step of the last evaluation."""
        self.planned: int | None = None
        """Steps that the schedule was made for."""

    def take(self, step: int, metrics: dict[str, float]) -> bool:
        """A step was evaluated. Whether it is the best so far."""
        loss, best = metrics["loss"], is_best(metrics["loss"], self.best)
        self.metrics, self.evaluated = metrics, step
        if best:
            self.best = loss if loss == loss else None
            self.bests = [*self.bests[-MOST_BESTS:], [step, loss]]
        return best

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


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


def first_words(model: nn.Module, recipe: Recipe, *, workers: int, deterministic: bool) -> list[str]:
    """What people should know of before their model is trained."""
    words = []
    if workers > 1 and uses_batch_statistics(model) and not deterministic:
        words.append(
            "BatchNorm is in train mode: each worker normalises over its own part of the batch, as with DDP, so the "
            "result depends on the number of workers (docs/limits.md)"
        )
    if recipe.metrics and recipe.eval_data is None and settings.current().report:  # not within cross-validation
        words.append(
            "metrics= are computed in evaluations, and there is no eval_data=: there will be none during training"
        )
    if not model.training:
        words.append(
            "the model is in eval mode, so dropout and BatchNorm do not train; call model.train() before fit()"
        )
    return words


def make_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = recipe.optimizer(list(model.named_parameters()))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer= returned {type(optimizer).__name__}; it must return a torch optimizer, as lambda "
            "params: torch.optim.SGD(params, lr=0.1) does"
        )
    given = {id(param) for group in optimizer.param_groups for param in group["params"]}
    strange = given - {id(param) for param in model.parameters()}
    if strange:
        raise ConfigError(
            f"optimizer= returned {type(optimizer).__name__} over {len(given)} parameters, {len(strange)} of "
            "them not the "
            "model's: these would not be checkpointed, nor start equal on all workers. Build it from what it is given, "
            "as lambda params: torch.optim.SGD(params, lr=0.1) does, and make further parameters part of the model"
        )
    return optimizer


def make_schedule(recipe: Recipe, optimizer: torch.optim.Optimizer) -> Any:
    if recipe.schedule is None:
        return None
    schedule = recipe.schedule(optimizer, recipe.total_steps)
    if not all(callable(getattr(schedule, method, None)) for method in ("step", "state_dict", "load_state_dict")):
        raise ConfigError(
            f"schedule= returned {type(schedule).__name__}; it must return a learning-rate scheduler, as lambda "
            "optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) does"
        )
    return schedule


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
            self._part = recipe.part(session, recipe.eval_data, "eval_data", session.workers)
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
