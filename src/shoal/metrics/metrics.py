"""What evaluation measures, and how the parts of N workers become one exact result.

Each worker evaluates a contiguous part of the data and updates its own metric objects. Then the `state()` of every
worker is gathered, and every worker merges all states, in worker order, into fresh objects and computes. Counts are
integers and sums are float64, so the number of workers does not show in the result.

Built-in names, also with settings as in ``"f1:average=micro"`` and ``"accuracy:ignore=0"``:

    accuracy                                   share of right labels
    precision, recall, f1                      macro average over the classes seen; `_macro` and `_micro` say which
    auc                                        area under the ROC curve of two classes, ties counted half
    mse, rmse, mae                             mean over all elements
    perplexity                                 exp(loss sum / weight) of the evaluation loss

What a classification metric takes as prediction, for a target of shape [N] (or [N, T], and so on):

    class scores [N, C]                        the class with the highest score; classes are the LAST dimension
    integer or bool labels [N]                 as they are
    floats [N]                                 probabilities of class 1, within [0, 1]; class 1 above 0.5

Targets equal to `ignore` (-100 unless set) are not counted. A trailing dimension of size 1 on either side is dropped
when the remaining shape fits. Tensors of any device, numpy arrays, lists and numbers are taken.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from shoal.core.errors import ConfigError
from shoal.metrics.measures import (
    AUC,
    F1,
    IGNORE,
    MAE,
    MSE,
    RMSE,
    Accuracy,
    Average,
    PerClass,
    Perplexity,
    Precision,
    Recall,
    average_value,
    listed,
    nearest,
)
from shoal.metrics.readings import short

__all__ = [
    "AUC",
    "F1",
    "MAE",
    "MSE",
    "RMSE",
    "Accuracy",
    "LossMetric",
    "Metric",
    "Perplexity",
    "Precision",
    "Recall",
    "compute_all",
    "make_metrics",
    "needs_loss",
]


class Metric(Protocol):
    """Something that evaluation measures. Implement these five methods and a name to measure your own.

    An object given to the trainer is a pattern: every worker and every evaluation works on a deep copy that was
    `reset()`. All methods are called from the thread that evaluates, never at the same time.

    An example, the largest error:

    >>> import torch
    >>> class LargestError:
    ...     name = "largest_error"
    ...     def __init__(self):
    ...         self.reset()
    ...     def reset(self):
    ...         self.largest = torch.zeros((), dtype=torch.float64)
    ...     def update(self, prediction, target):
    ...         error = (prediction.double() - target.double()).abs().max().cpu()
    ...         self.largest = torch.maximum(self.largest, error)
    ...     def state(self):
    ...         return {"largest": self.largest}
    ...     def merge(self, state):
    ...         self.largest = torch.maximum(self.largest, state["largest"])
    ...     def compute(self):
    ...         return float(self.largest)
    >>> one, other = make_metrics([LargestError()]), make_metrics([LargestError()])
    >>> one[0].update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]))
    >>> other[0].update(torch.tensor([4.0]), torch.tensor([1.0]))
    >>> one[0].merge(other[0].state())
    >>> compute_all(one)
    {'largest_error': 3.0}
    """

    name: str
    """The key of the result. Two metrics of one run must have different names."""

    def update(self, prediction: Any, target: Any) -> None:
        """Take in one batch, as the `predict` function returned it. Whatever is kept must be a copy.

        What is raised here ends the evaluation with that traceback.
        """
        ...

    def state(self) -> Any:
        """What another worker needs to know: a tree (lists, dicts) of tensors, numbers and strings.

        The object is not updated between `state()` and the moment the state was sent, so nothing needs to be copied.
        """
        ...

    def merge(self, state: Any) -> None:
        """Add what another object's `state()` returned. The caller owns `state`: do not alter it, copy what is kept.

        States are merged in worker order, that is, in the order of the data. Merging the state of an object that saw
        nothing must change nothing: a worker's part may be empty.
        """
        ...

    def compute(self) -> float | dict[str, float]:
        """The result over everything updated and merged; NaN when that is nothing.

        The keys of a dict are appended to the name: ``{"low": 1.0}`` of "error" becomes "error_low".
        """
        ...

    def reset(self) -> None:
        """Forget everything."""
        ...


class LossMetric(Metric, Protocol):
    """A metric of the evaluation loss: with `needs_loss` true, `update_loss` is called and `update` is not."""

    needs_loss: bool

    def update_loss(self, sum: float, weight: float) -> None:
        """Take in one batch's summed loss and its weight (samples, or tokens if the loss says so)."""
        ...


def needs_loss(metric: Metric) -> TypeGuard[LossMetric]:
    """Whether `metric` is fed by `update_loss` rather than by `update`."""
    return bool(getattr(metric, "needs_loss", False))


# ---- what users hand over ---------------------------------------------------------------------------------------


def make_metrics(specs: Sequence[str | Metric]) -> list[Metric]:
    """Fresh objects for `specs`: a name or spec string makes a built-in, an object is deep-copied and reset.

    Raises `ConfigError` for unknown names, settings and values, for objects that are no metrics, and for two metrics
    with the same name.
    """
    if isinstance(specs, str) or not isinstance(specs, Iterable):
        raise ConfigError(f"metrics is {specs!r}; it must be a list of names or metric objects, such as ['accuracy']")
    metrics = [_built_in(spec) if isinstance(spec, str) else _fresh_copy(spec) for spec in specs]
    seen: set[str] = set()
    for metric in metrics:
        if metric.name in seen:
            raise ConfigError(
                f"metrics has two entries that are called {metric.name!r}; names must differ: leave one out, "
                "or pass an object with a name of its own, such as Accuracy(ignore=0, name='accuracy_words')"
            )
        seen.add(metric.name)
    return metrics


def compute_all(metrics: Iterable[Metric]) -> dict[str, float]:
    """The results of all `metrics`, by name. Raises `ConfigError` if a result is no number or a name comes twice."""
    results: dict[str, float] = {}
    for metric in metrics:
        for name, value in _named_results(metric):
            if name in results:
                raise ConfigError(f"two metrics give a result called {name!r}; give one of them another name")
            results[name] = value
    return results


def _named_results(metric: Metric) -> list[tuple[str, float]]:
    result = metric.compute()
    try:
        if isinstance(result, Mapping):
            return [(f"{metric.name}_{key}", float(part)) for key, part in result.items()]
        return [(metric.name, float(result))]
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(
            f"compute() of the metric {metric.name!r} returned {short(result)}; "
            "it must return a number or a dict of numbers"
        ) from None


def _fresh_copy(pattern: Metric) -> Metric:
    _check_is_metric(pattern)
    try:
        metric = copy.deepcopy(pattern)
    except Exception as error:
        raise ConfigError(
            f"the metric {pattern.name!r} cannot be deep-copied ({type(error).__name__}: {error}); "
            "each worker needs a copy of its own: keep open files, locks and the like out of it"
        ) from error
    metric.reset()
    return metric


def _check_is_metric(pattern: Any) -> None:
    if isinstance(pattern, type):
        raise ConfigError(f"metrics has the class {pattern.__name__}; it must have an object: {pattern.__name__}()")
    methods = ["state", "merge", "compute", "reset", "update_loss" if needs_loss(pattern) else "update"]
    missing = [method for method in methods if not callable(getattr(pattern, method, None))]
    if missing:
        raise ConfigError(
            f"metrics has {short(pattern)} of type {type(pattern).__qualname__}, which lacks {listed(missing)}; "
            f"a metric is one of the names {listed(sorted(_BUILT_INS))}, "
            "or an object with name, update, state, merge, compute, reset"
        )
    name = getattr(pattern, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"the metric of type {type(pattern).__qualname__} has the name {name!r}; "
            "it must be a string that is not empty: set its attribute `name`"
        )


def _built_in(spec: str) -> Metric:
    """The metric that `name` or `name:key=value,key=value` describes."""
    name, colon, settings = spec.partition(":")
    name = name.strip()
    known = _BUILT_INS.get(name)
    if known is None:
        raise ConfigError(
            f"unknown metric {name!r}{nearest(name, _BUILT_INS)}; valid names are {listed(sorted(_BUILT_INS))}, "
            "and any object with name, update, state, merge, compute, reset"
        )
    if colon and not settings.strip():
        raise ConfigError(f"metric {spec!r} ends after the colon; write {name!r}, or settings as in {name}:key=value")
    return known.build(**_settings(spec, name, settings, known.keys))


def _settings(spec: str, name: str, settings: str, keys: tuple[str, ...]) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for part in settings.split(",") if settings else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise ConfigError(f"metric {spec!r} has the setting {part!r}; settings are written key=value")
        if key not in keys:
            valid = f"valid keys are {listed(keys)}" if keys else f"{name} has no settings"
            raise ConfigError(f"metric {spec!r} has the unknown key {key!r}{nearest(key, keys)}; {valid}")
        if key in chosen:
            raise ConfigError(f"metric {spec!r} sets {key!r} twice; each key may be set once")
        chosen[key] = _VALUES[key](value, spec)
    return chosen


def _ignore_value(value: str, spec: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"metric {spec!r} has ignore={value!r}; it must be an integer, such as {IGNORE}") from None


_VALUES: Mapping[str, Callable[[str, str], Any]] = {"ignore": _ignore_value, "average": average_value}


@dataclass(frozen=True)
class _BuiltIn:
    build: Callable[..., Metric]
    keys: tuple[str, ...] = ()


def _averaged(kind: type[PerClass], average: Average) -> _BuiltIn:
    return _BuiltIn(lambda **settings: kind(average=average, **settings), ("ignore",))


_BUILT_INS: Mapping[str, _BuiltIn] = {
    "accuracy": _BuiltIn(Accuracy, ("ignore",)),
    "precision": _BuiltIn(Precision, ("average", "ignore")),
    "precision_macro": _averaged(Precision, "macro"),
    "precision_micro": _averaged(Precision, "micro"),
    "recall": _BuiltIn(Recall, ("average", "ignore")),
    "recall_macro": _averaged(Recall, "macro"),
    "recall_micro": _averaged(Recall, "micro"),
    "f1": _BuiltIn(F1, ("average", "ignore")),
    "f1_macro": _averaged(F1, "macro"),
    "f1_micro": _averaged(F1, "micro"),
    "auc": _BuiltIn(AUC, ("ignore",)),
    "mse": _BuiltIn(MSE),
    "rmse": _BuiltIn(RMSE),
    "mae": _BuiltIn(MAE),
    "perplexity": _BuiltIn(Perplexity),
}
