"""Evaluation and prediction on all workers: every sample once, results in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError, DataError
from shoal.core.events import Notice
from shoal.core.keys import derive
from shoal.core.slices import Forward, deal, forwards
from shoal.data.device import moved
from shoal.data.fetch import Fetcher, Positions, Request, check_data
from shoal.draws.calls import Calls
from shoal.draws.stand import standing
from shoal.metrics.metrics import Metric, compute_all, make_metrics, needs_loss
from shoal.proof import counted
from shoal.proof.loss import Loss, read_loss
from shoal.proof.words import by_forward
from shoal.syncs.recipe import LossFn, PredictFn, Recipe
from shoal.trainer.session import Session

Made = TypeVar("Made")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within: eval mode and no gradients. Afterwards every module is in the mode it was in, also frozen ones."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


class Part:
    """This worker's part of a data set: contiguous, in order, in batches of at most `batch` samples."""

    def __init__(
        self, session: Session, data: Any, collate: Any, *, batch: int, data_workers: int | None, name: str
    ) -> None:
        self._session = session
        self._size = check_data(data, name, collate)
        self._batch = batch
        self._parts: tuple[Forward, ...] = ()
        self._loader = session.loader({name: Fetcher(data, collate, name=name)}, data_workers)
        self._name = name
        self._key = derive(session.seed, name)
        self._calls = Calls()
        self._said = False

    def each(self, compute: Callable[[Any], Made]) -> Iterator[tuple[int, Made]]:
        """(samples, what `compute` makes of the batch), in order. What is drawn meanwhile is keyed by sample index."""
        seed = derive(self._session.seed, "draws", self._name)
        self._calls.keying.names = self._session.keyed.keying.names
        with standing(), counted.counting():
            for own, batch in self._batches():

                def part(start: int, stop: int, own: Forward = own, batch: Any = batch) -> Made:
                    whole = stop - start == own.samples
                    counted.begin()
                    try:
                        return compute(batch if whole else self._fetched(own.start + start, own.start + stop))
                    finally:
                        counted.end()

                yield own.samples, self._calls.make(own.start, own.samples, seed, part)
                self._say()

    def _fetched(self, start: int, stop: int) -> Any:
        (batch,) = self._loader.sources[self._name].fetch((Positions(range(start, stop), self._key, start),))
        return moved(batch, self._session.device)

    def _say(self) -> None:
        why = self._calls.keying.by_forward
        if why and not self._said:
            self._said = True
            self._session.channel.emit(Notice(step=self._session.step, text=f"in {self._name}, {by_forward(why)}"))

    def _batches(self) -> Iterator[tuple[Forward, Any]]:
        self._parts = forwards(deal(self._size, self._session.workers)[self._session.rank], self._batch)
        stream = self._loader.open(self._name, self._request)
        try:
            for part in self._parts:
                (batch,) = stream.take() or [None]
                yield part, moved(batch, self._session.device)
        finally:
            stream.close()

    def _request(self, number: int) -> Request | None:
        if number >= len(self._parts):
            return None
        part = self._parts[number]
        # positions are the indices of samples: neither the size of batches nor the number of workers has a say
        return (Positions(range(part.start, part.stop), self._key, part.start),)

    @property
    def start(self) -> int:
        """The index of the first sample, of those gone through last."""
        return self._parts[0].start if self._parts else self._size

    def close(self) -> None:
        self._loader.close()


def part_of(session: Session, recipe: Recipe, data: Any, name: str, workers: int) -> Part:
    """What of `data` this worker, one of so many, evaluates."""
    batch = recipe.micro_batch or max(1, -(-recipe.batch_size // workers))
    return Part(session, data, recipe.collate, batch=batch, data_workers=recipe.data_workers, name=name)


class Evaluator:
    """Evaluates a model on a data set, again and again. All workers call it together and get the same figures."""

    def __init__(
        self,
        session: Session,
        part: Part,
        loss: LossFn | None,
        predict: PredictFn | None,
        metrics: Sequence[str | Metric],
    ) -> None:
        self._session = session
        self._part = part
        self._loss = loss
        self._predict = predict
        self._specs = metrics

    def run(self, model: nn.Module) -> dict[str, float]:
        begun = time.perf_counter()
        own = make_metrics(self._specs)
        total = weight = 0.0
        with evaluating(model):
            for samples, (loss, pair) in self._part.each(lambda batch: self._compute(model, batch, own)):
                if loss is not None:
                    each = float(samples) if loss.weight is None else loss.weight
                    total += float(loss.value) * (each if loss.mean else 1.0) if each else 0.0
                    weight += each
                for metric in own:
                    if pair is not None and not needs_loss(metric):
                        metric.update(*pair)
        mine = {"loss": [total, weight], "states": [metric.state() for metric in own]}
        told = self._session.gather_for("an evaluation", mine)
        figures = self._merged(told)
        self._session.times.eval += time.perf_counter() - begun
        return figures

    def _compute(self, model: nn.Module, batch: Any, own: list[Metric]) -> tuple[Loss | None, tuple[Any, Any] | None]:
        """The loss, and what metrics compare; each where it is wanted."""
        loss = None if self._loss is None else read_loss(self._loss(model, batch), training=False)
        if all(needs_loss(metric) for metric in own):
            return loss, None
        assert self._predict is not None
        return loss, _pair(self._predict(model, batch))

    def _merged(self, told: list[dict[str, Any]]) -> dict[str, float]:
        """In order of rank into fresh objects: the same figures on every worker, whatever their number."""
        total = sum(part["loss"][0] for part in told)
        weight = sum(part["loss"][1] for part in told)
        metrics = make_metrics(self._specs)
        for part in told:
            for metric, state in zip(metrics, part["states"], strict=True):
                metric.merge(state)
        for metric in metrics:
            if needs_loss(metric):
                metric.update_loss(total, weight)
        if self._loss is not None and not weight > 0.0:
            raise DataError(
                f"the weight of the evaluation is {weight:g} over all samples; some of them must have weight"
            )
        figures = {"loss": total / weight} if weight else {}
        return {**figures, **compute_all(metrics)}


def _pair(returned: Any) -> tuple[Any, Any]:
    if isinstance(returned, tuple) and len(returned) == 2:
        return returned[0], returned[1]
    raise ConfigError(
        f"predict returned {type(returned).__name__}; it must return (prediction, target) when metrics are computed"
    )


def done_by_all(session: Session, what: str, compute: Callable[[], Made]) -> Made:
    """What `compute` returns, once all members are done with it. If they change before, all of them compute again."""
    session.standing.whole = True
    session.standing.take_part(session, lambda: what)
    made: dict[int, Made] = {}

    def last() -> None:
        if session.standing.term not in made:
            made[session.standing.term] = compute()

    session.farewell(last)
    return made[session.standing.term]


def predict_part(session: Session, part: Part, model: nn.Module, predict: PredictFn) -> dict[str, Any]:
    """This worker's predictions: those of samples from `start` on, in order, joined into one; none if it has none."""
    outputs = []
    with evaluating(model):
        for _, returned in part.each(lambda batch: predict(model, batch)):
            outputs.append(returned[0] if isinstance(returned, tuple) and len(returned) == 2 else returned)
    return {"start": part.start, "outputs": [join(outputs)] if outputs else []}


def join(outputs: list[Any]) -> Any:
    """Predictions of batches as those of one batch: tensors joined along dimension 0, lists appended, dicts by key."""
    first = outputs[0]
    if isinstance(first, Tensor):
        if first.dim() == 0:
            raise DataError(
                "predict returned a scalar for a batch; return one prediction per sample, along dimension 0"
            )
        return torch.cat([output.detach() for output in outputs])
    if isinstance(first, Mapping):
        return {key: join([output[key] for output in outputs]) for key in first}
    if isinstance(first, tuple):
        return tuple(join([output[place] for output in outputs]) for place in range(len(first)))
    if isinstance(first, list):
        return [item for output in outputs for item in output]
    if hasattr(first, "__array__"):
        import numpy as np

        return np.concatenate(outputs)
    raise DataError(
        f"predict returned {type(first).__name__} for a batch; return tensors, arrays, lists, or dicts of these"
    )
