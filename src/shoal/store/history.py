"""How a run went, step by step: what a learning curve needs."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from math import nan
from typing import Any

from shoal.core.errors import ShoalError
from shoal.core.events import AnyEvent, EvalDone, RunStarted, StepDone
from shoal.store.home import NO_STORE

_PLACE = ("step", "epoch", "time")
_OF_A_STEP = (*_PLACE, "loss", "rate", "norm")


class History:
    """Figures of a run as columns: dicts of lists of one length, ready for a plot or a `pandas.DataFrame`.

    A callback of the run, which takes 8 bytes for each figure of a step. Lists are made when they are first asked for.
    """

    def __init__(self) -> None:
        self._steps, self._evaluations = _of_steps(), _of_evaluations()
        self._begun: int | None = None
        self._earlier: tuple[str, str] | None = None

    @cached_property
    def steps(self) -> dict[str, list[Any]]:
        """`step`, `epoch`, `time` (seconds since 1970), `loss`, `rate` (`rate.1` is that of the second parameter group,
        and so on), `norm` with `clip=`, and what the loss function logs. NaN where a step has no such figure."""
        return self._whole[0].lists()

    @cached_property
    def evaluations(self) -> dict[str, list[Any]]:
        """`step`, `epoch`, `time`, `loss` and the metrics asked for."""
        return self._whole[1].lists()

    def __repr__(self) -> str:
        steps, evaluations = self._whole
        return f"<History: {len(steps):,} steps, {len(evaluations):,} evaluations>"

    def __call__(self, event: AnyEvent) -> None:
        if isinstance(event, StepDone):
            figures = _figures(event.time, event.loss, event.rates, event.norm, event.logs)
            self._steps.add(event.step, event.epoch, figures)
        elif isinstance(event, EvalDone):
            self._evaluations.add(event.step, event.epoch, _metrics(event.time, event.metrics))
        elif isinstance(event, RunStarted):
            # once more after all workers were lost: what came after this step is done again
            self._begun = event.step if self._begun is None else min(self._begun, event.step)
            self._steps.cut(event.step)
            self._evaluations.cut(event.step)

    def goes_on(self, run_id: str, store: str) -> None:
        """The run has an earlier part, of which this run store may know."""
        if store != NO_STORE:
            self._earlier = run_id, store

    @cached_property
    def _whole(self) -> tuple[_Columns, _Columns]:
        """With what was before a resume, as far as the store has it: read when somebody asks."""
        if self._earlier is None or not self._begun:
            return self._steps, self._evaluations
        steps, evaluations = _of_steps(), _of_evaluations()
        with suppress(ShoalError):
            _read(*self._earlier, self._begun, steps, evaluations)
        steps.extend(self._steps)
        evaluations.extend(self._evaluations)
        return steps, evaluations


class _Columns:
    """Rows of figures in order of steps. A column may begin late: it is NaN before."""

    def __init__(self, *figures: str) -> None:
        """Those that are there also if nothing is in them."""
        self._step, self._epoch = array("q"), array("q")
        self._figures: dict[str, array[float]] = {name: array("d") for name in figures}

    def __len__(self) -> int:
        return len(self._step)

    def add(self, step: int, epoch: int, figures: Mapping[str, float]) -> None:
        self.cut(step - 1)
        for name in figures:
            if name not in self._figures:
                self._figures[name] = array("d", [nan]) * len(self)
        self._step.append(step)
        self._epoch.append(epoch)
        for name, column in self._figures.items():
            column.append(figures.get(name, nan))

    def cut(self, after: int) -> None:
        """Forget what came after this step."""
        if not self._step or self._step[-1] <= after:
            return
        count = bisect_right(self._step, after)
        columns: list[array[Any]] = [self._step, self._epoch, *self._figures.values()]
        for column in columns:
            del column[count:]

    def extend(self, later: _Columns) -> None:
        for place in range(len(later)):
            figures = {name: column[place] for name, column in later._figures.items()}
            self.add(later._step[place], later._epoch[place], figures)

    def lists(self) -> dict[str, list[Any]]:
        figures = {name: column.tolist() for name, column in self._figures.items()}
        return {"step": self._step.tolist(), "epoch": self._epoch.tolist(), **figures}


def _of_steps() -> _Columns:
    return _Columns("time", "loss", "rate")


def _of_evaluations() -> _Columns:
    return _Columns("time", "loss")


def _figures(
    time: float, loss: float, rates: Sequence[float], norm: float | None, logs: Mapping[str, float]
) -> dict[str, float]:
    figures = {"time": time, "loss": loss}
    for number, rate in enumerate(rates):
        figures[f"rate.{number}" if number else "rate"] = rate
    if norm is not None:
        figures["norm"] = norm
    for name, value in logs.items():
        figures[f"log.{name}" if name in _OF_A_STEP or name.startswith("rate.") else name] = value
    return figures


def _metrics(time: float, metrics: Mapping[str, float]) -> dict[str, float]:
    named = {f"metric.{name}" if name in _PLACE else name: value for name, value in metrics.items()}
    return {"time": time, **named}


def _read(run_id: str, url: str, last: int, steps: _Columns, evaluations: _Columns) -> None:
    """What the store has of a run up to the step `last`."""
    # here, because importing SQLAlchemy takes long
    from shoal.store.store import Store

    with Store.open(url, create=False) as store:
        for row in store.steps(run_id):
            if row.step <= last:
                rates = [] if row.rate is None else [row.rate]
                steps.add(row.step, row.epoch, _figures(row.time, row.loss, rates, row.norm, row.logs))
        for event in store.events(run_id):
            if event.kind == EvalDone.__name__ and event.step <= last:
                metrics = _metrics(event.time, event.data["metrics"])
                evaluations.add(event.step, event.data["epoch"], metrics)
