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
import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeGuard, get_args

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ConfigError, DataError

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

IGNORE = -100
"""Targets with this label are not counted: the label that torch's cross entropy leaves out too."""

Average = Literal["macro", "micro"]


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
            f"compute() of the metric {metric.name!r} returned {_short(result)}; "
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
            f"metrics has {_short(pattern)} of type {type(pattern).__qualname__}, which lacks {_listed(missing)}; "
            f"a metric is one of the names {_listed(sorted(_BUILT_INS))}, "
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
            f"unknown metric {name!r}{_nearest(name, _BUILT_INS)}; valid names are {_listed(sorted(_BUILT_INS))}, "
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
            valid = f"valid keys are {_listed(keys)}" if keys else f"{name} has no settings"
            raise ConfigError(f"metric {spec!r} has the unknown key {key!r}{_nearest(key, keys)}; {valid}")
        if key in chosen:
            raise ConfigError(f"metric {spec!r} sets {key!r} twice; each key may be set once")
        chosen[key] = _VALUES[key](value, spec)
    return chosen


def _ignore_value(value: str, spec: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"metric {spec!r} has ignore={value!r}; it must be an integer, such as {IGNORE}") from None


def _average_value(value: str, spec: str) -> str:
    valid = get_args(Average)
    if value not in valid:
        raise ConfigError(
            f"metric {spec!r} has average={value!r}{_nearest(str(value), valid)}; it must be {_listed(valid, 'or')}"
        )
    return value


_VALUES: Mapping[str, Callable[[str, str], Any]] = {"ignore": _ignore_value, "average": _average_value}


def _nearest(word: str, valid: Iterable[str]) -> str:
    found = difflib.get_close_matches(word.lower(), list(valid), n=1, cutoff=0.5)
    return f" (did you mean {found[0]!r}?)" if found else ""


def _listed(words: Sequence[str], last: str = "and") -> str:
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# ---- what predict returned, as tensors --------------------------------------------------------------------------


def _tensor(value: Any, name: str, what: str) -> Tensor:
    """`value` as a tensor of bool or integers (then int64), or of floats. Tensors stay on their device."""
    tensor = value.detach() if isinstance(value, Tensor) else _tensor_from_plain(value, name, what)
    if tensor.is_complex():
        raise DataError(f"{name}: the {what} has dtype {tensor.dtype}; it must be real: bool, integer or float")
    if not tensor.is_floating_point():
        return tensor.to(torch.int64)
    # float8 types can be converted but neither compared nor sorted
    return tensor if tensor.dtype.itemsize > 1 else tensor.to(torch.float32)


def _tensor_from_plain(value: Any, name: str, what: str) -> Tensor:
    try:
        if isinstance(value, (list, tuple)) and any(isinstance(part, Tensor) for part in value):
            return torch.stack([_tensor(part, name, what) for part in value])
        # through numpy, because torch reads Python floats as float32
        return torch.from_numpy(np.array(value, order="C"))
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"{name}: the {what} is {_short(value)} of type {type(value).__qualname__}, "
            "which is no regular array of numbers; "
            "predict must return (prediction, target) as tensors, numpy arrays, lists or numbers"
        ) from None


def _same_shape(prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor] | None:
    """Both in one shape, a trailing dimension of size 1 dropped from one of them if that is all they differ in."""
    if prediction.shape == target.shape:
        return prediction, target
    if prediction.shape == (*target.shape, 1):
        return prediction.squeeze(-1), target
    if target.shape == (*prediction.shape, 1):
        return prediction, target.squeeze(-1)
    return None


def _class_scores(prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor] | None:
    """Scores [..., C] and labels [...], if the shapes are such."""
    if prediction.ndim and prediction.shape[:-1] == target.shape:
        return prediction, target
    # not for a target of shape [1]: with a prediction of shape [C] that is more likely a mistake than one sample
    if target.ndim > 1 and target.shape == (*prediction.shape[:-1], 1):
        return prediction, target.squeeze(-1)
    return None


def _mismatch(name: str, prediction: Tensor, target: Tensor, must: str) -> DataError:
    return DataError(
        f"{name}: the prediction has shape {tuple(prediction.shape)} "
        f"and the target has shape {tuple(target.shape)}; {must}"
    )


def _labels(name: str, target: Tensor, ignore: int) -> tuple[Tensor, Tensor]:
    """The counted labels as int64 in one dimension, and where they are; both on the CPU."""
    flat = target.cpu().flatten()
    counted = flat != ignore
    labels = flat[counted]
    if labels.is_floating_point():
        labels = labels.to(torch.float64)
        wrong = labels[(labels != labels.round()) | (labels.abs() > 2**53) | labels.isnan()]
        if wrong.numel():
            raise DataError(
                f"{name}: the target has the value {wrong[0].item()!r}; targets must be class labels, that is, "
                "whole numbers: return integer labels as target from predict"
            )
    return labels.to(torch.int64), counted


def _predicted_and_true(name: str, prediction: Any, target: Any, ignore: int) -> tuple[Tensor, Tensor]:
    """Predicted and true labels of the counted positions: int64, one dimension, on the CPU."""
    prediction, target = _tensor(prediction, name, "prediction"), _tensor(target, name, "target")
    pair = _same_shape(prediction, target)
    if pair is not None:
        labels, counted = _labels(name, pair[1], ignore)
        if pair[0].is_floating_point():
            return _thresholded(name, pair[0].cpu().flatten()[counted], labels, pair[1].shape), labels
        return pair[0].cpu().flatten()[counted], labels
    scored = _class_scores(prediction, target)
    if scored is None or scored[0].shape[-1] == 0:
        raise _mismatch(
            name,
            prediction,
            target,
            "predict must return class scores with one dimension more than the target, classes last "
            "(scores [N, C, T] need .movedim(1, -1)), or labels or probabilities in the target's shape",
        )
    labels, counted = _labels(name, scored[1], ignore)
    return _highest(name, scored[0], counted, labels), labels


def _thresholded(name: str, probabilities: Tensor, labels: Tensor, shape: torch.Size) -> Tensor:
    outside = ~((probabilities >= 0) & (probabilities <= 1))
    if outside.any():
        raise DataError(
            f"{name}: the prediction has the value {probabilities[outside][0].item():.6g} and is {probabilities.dtype} "
            f"in the target's shape {tuple(shape)}, which is read as probabilities of class 1; they must be within "
            f"[0, 1]: return torch.sigmoid(logits), or integer labels, or class scores of shape {_with_classes(shape)}"
        )
    _check_range(
        name,
        labels,
        2,
        f"the prediction is {probabilities.dtype} in the target's shape, which is read as probabilities of class 1; "
        f"for more classes return integer labels or class scores of shape {_with_classes(shape)}",
    )
    # a tie is class 0, as it is in the argmax of [0.5, 0.5]
    return (probabilities > 0.5).to(torch.int64)


def _with_classes(shape: torch.Size) -> str:
    return f"({', '.join([*map(str, shape), 'C'])})"


def _highest(name: str, scores: Tensor, counted: Tensor, labels: Tensor) -> Tensor:
    classes = scores.shape[-1]
    # max returns the first of equal scores, and NaN where there is one
    best = scores.max(dim=-1)
    _check_no_nan(name, best.values.cpu().flatten()[counted])
    _check_range(
        name,
        labels,
        classes,
        f"the prediction has scores of {classes} classes; if that label marks padding, set ignore to it",
    )
    return best.indices.cpu().flatten()[counted]


def _check_no_nan(name: str, scores: Tensor) -> None:
    if scores.is_floating_point() and scores.isnan().any():
        raise DataError(
            f"{name}: the prediction has NaN among its scores; scores must be numbers: "
            "return finite scores from predict, or give such positions a target that is ignored"
        )


def _check_range(name: str, labels: Tensor, classes: int, reason: str) -> None:
    outside = labels[(labels < 0) | (labels >= classes)]
    if outside.numel():
        raise DataError(
            f"{name}: the target has the label {outside[0].item()}; "
            f"it must be from 0 to {classes - 1}, because {reason}"
        )


# ---- the built-in metrics ---------------------------------------------------------------------------------------


class Accuracy:
    """The share of labels that are right."""

    needs_loss = False
    _correct: int
    _count: int

    def __init__(self, *, ignore: int = IGNORE, name: str = "accuracy") -> None:
        self.name = name
        self.ignore = ignore
        self.reset()

    def update(self, prediction: Any, target: Any) -> None:
        predicted, true = _predicted_and_true(self.name, prediction, target, self.ignore)
        self._correct += int((predicted == true).sum())
        self._count += true.numel()

    def state(self) -> dict[str, int]:
        return {"correct": self._correct, "count": self._count}

    def merge(self, state: Any) -> None:
        self._correct += state["correct"]
        self._count += state["count"]

    def compute(self) -> float:
        return self._correct / self._count if self._count else math.nan

    def reset(self) -> None:
        self._correct = self._count = 0


class _PerClass:
    """Counts true positives, false positives and false negatives of each class that occurs, whatever its label.

    `average="macro"` is the mean over the classes that occur in target or prediction, a class without a defined value
    counting 0; `"micro"` pools the counts of all classes first. The name says the average if one was chosen.
    """

    needs_loss = False
    _base: str
    _classes: Tensor
    """[K], int64, ascending"""
    _counts: Tensor
    """[K, 3], int64: true positives, false positives, false negatives. Replaced, never written to."""

    def __init__(self, *, average: Average | None = None, ignore: int = IGNORE, name: str | None = None) -> None:
        if average is not None:
            _average_value(average, self._base)
        self.name = name or (f"{self._base}_{average}" if average else self._base)
        self.average: Average = average or "macro"
        self.ignore = ignore
        self.reset()

    def update(self, prediction: Any, target: Any) -> None:
        predicted, true = _predicted_and_true(self.name, prediction, target, self.ignore)
        classes, places = torch.unique(torch.cat([predicted, true]), return_inverse=True)
        predicted_at, true_at = places[: predicted.numel()], places[predicted.numel() :]
        hits = torch.bincount(true_at[predicted_at == true_at], minlength=classes.numel())
        predictions = torch.bincount(predicted_at, minlength=classes.numel())
        truths = torch.bincount(true_at, minlength=classes.numel())
        self._add(classes, torch.stack([hits, predictions - hits, truths - hits], dim=1))

    def state(self) -> dict[str, Tensor]:
        return {"classes": self._classes, "counts": self._counts}

    def merge(self, state: Any) -> None:
        self._add(state["classes"], state["counts"])

    def compute(self) -> float:
        if not self._classes.numel():
            return math.nan
        counts = self._counts.sum(dim=0, keepdim=True) if self.average == "micro" else self._counts
        part, whole = self._ratio(*counts.unbind(dim=1))
        values = part.to(torch.float64) / whole.clamp(min=1)
        return math.fsum(values.tolist()) / values.numel()

    def reset(self) -> None:
        self._classes = torch.zeros(0, dtype=torch.int64)
        self._counts = torch.zeros(0, 3, dtype=torch.int64)

    def _add(self, classes: Tensor, counts: Tensor) -> None:
        union, places = torch.unique(torch.cat([self._classes, classes]), return_inverse=True)
        total = torch.zeros(union.numel(), 3, dtype=torch.int64)
        self._counts = total.index_add_(0, places, torch.cat([self._counts, counts]))
        self._classes = union

    def _ratio(self, hits: Tensor, false_positives: Tensor, false_negatives: Tensor) -> tuple[Tensor, Tensor]:
        """Numerator and denominator per class; the numerator is 0 where the denominator is."""
        raise NotImplementedError


class Precision(_PerClass):
    """Of what was predicted to be of a class, the share that is."""

    _base = "precision"

    def _ratio(self, hits: Tensor, false_positives: Tensor, false_negatives: Tensor) -> tuple[Tensor, Tensor]:
        return hits, hits + false_positives


class Recall(_PerClass):
    """Of what is of a class, the share that was predicted to be."""

    _base = "recall"

    def _ratio(self, hits: Tensor, false_positives: Tensor, false_negatives: Tensor) -> tuple[Tensor, Tensor]:
        return hits, hits + false_negatives


class F1(_PerClass):
    """The harmonic mean of precision and recall, of each class."""

    _base = "f1"

    def _ratio(self, hits: Tensor, false_positives: Tensor, false_negatives: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * hits, 2 * hits + false_positives + false_negatives


class AUC:
    """The probability that a sample of class 1 has a higher score than one of class 0, a tie counting half.

    Takes any real scores of class 1 in the target's shape, or scores of both classes [N, 2], whose difference is used.
    Keeps all scores (9 bytes a sample, on every worker after the merge). NaN if only one class was seen.
    """

    needs_loss = False
    _scores: list[Tensor]
    _positive: list[Tensor]

    def __init__(self, *, ignore: int = IGNORE, name: str = "auc") -> None:
        self.name = name
        self.ignore = ignore
        self.reset()

    def update(self, prediction: Any, target: Any) -> None:
        scores, labels = self._read(_tensor(prediction, self.name, "prediction"), _tensor(target, self.name, "target"))
        _check_no_nan(self.name, scores)
        _check_range(self.name, labels, 2, "auc compares two classes; for more, use f1 or accuracy")
        self._scores.append(scores)
        self._positive.append(labels.to(torch.uint8))

    def state(self) -> dict[str, Tensor]:
        # starts with nothing, so that the dtypes are right when nothing was seen
        return {
            "scores": torch.cat([torch.zeros(0, dtype=torch.float64), *self._scores]),
            "positive": torch.cat([torch.zeros(0, dtype=torch.uint8), *self._positive]),
        }

    def merge(self, state: Any) -> None:
        self._scores.append(state["scores"].clone())
        self._positive.append(state["positive"].clone())

    def compute(self) -> float:
        state = self.state()
        values, places = torch.unique(state["scores"], return_inverse=True)
        positives = torch.bincount(places[state["positive"] == 1], minlength=values.numel())
        negatives = torch.bincount(places[state["positive"] == 0], minlength=values.numel())
        pairs = int(positives.sum()) * int(negatives.sum())
        if not pairs:
            return math.nan
        negatives_below = negatives.cumsum(dim=0) - negatives
        # twice the pairs in the right order, so that a tie is an integer too
        ordered = int((positives * (2 * negatives_below + negatives)).sum())
        return ordered / (2 * pairs)

    def reset(self) -> None:
        self._scores = []
        self._positive = []

    def _read(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the counted scores, float64, and labels; on the CPU."""
        pair = _same_shape(prediction, target)
        if pair is not None:
            labels, counted = _labels(self.name, pair[1], self.ignore)
            return pair[0].cpu().flatten()[counted].to(torch.float64), labels
        scored = _class_scores(prediction, target)
        if scored is None or scored[0].shape[-1] != 2:
            raise _mismatch(
                self.name,
                prediction,
                target,
                "auc compares two classes: predict must return scores of class 1 in the target's shape, "
                "or scores of both classes with a last dimension of size 2",
            )
        labels, counted = _labels(self.name, scored[1], self.ignore)
        both = scored[0].cpu().reshape(-1, 2)[counted].to(torch.float64)
        return both[:, 1] - both[:, 0], labels


class _MeanError:
    """The mean of some error over all elements of predictions and targets of the same shape."""

    needs_loss = False
    _base: str
    _sum: float
    _count: int

    def __init__(self, *, name: str | None = None) -> None:
        self.name = name or self._base
        self.reset()

    def update(self, prediction: Any, target: Any) -> None:
        prediction, target = _tensor(prediction, self.name, "prediction"), _tensor(target, self.name, "target")
        pair = _same_shape(prediction, target)
        if pair is None:
            raise _mismatch(
                self.name,
                prediction,
                target,
                "they must have the same shape: nothing is broadcast, reshape one of them in predict",
            )
        difference = pair[0].cpu().to(torch.float64) - pair[1].cpu().to(torch.float64)
        self._sum += float(self._error(difference).sum())
        self._count += difference.numel()

    def state(self) -> dict[str, float | int]:
        return {"sum": self._sum, "count": self._count}

    def merge(self, state: Any) -> None:
        self._sum += state["sum"]
        self._count += state["count"]

    def compute(self) -> float:
        return self._sum / self._count if self._count else math.nan

    def reset(self) -> None:
        self._sum = 0.0
        self._count = 0

    def _error(self, difference: Tensor) -> Tensor:
        raise NotImplementedError


class MSE(_MeanError):
    """The mean squared error."""

    _base = "mse"

    def _error(self, difference: Tensor) -> Tensor:
        return difference.square()


class RMSE(MSE):
    """The square root of the mean squared error."""

    _base = "rmse"

    def compute(self) -> float:
        return math.sqrt(super().compute())


class MAE(_MeanError):
    """The mean absolute error."""

    _base = "mae"

    def _error(self, difference: Tensor) -> Tensor:
        return difference.abs()


class Perplexity:
    """exp(loss sum / weight) of the evaluation loss; for a loss summed over tokens, the perplexity of a token."""

    needs_loss = True
    _sum: float
    _weight: float

    def __init__(self, *, name: str = "perplexity") -> None:
        self.name = name
        self.reset()

    def update_loss(self, sum: float, weight: float) -> None:
        self._sum += float(sum)
        self._weight += float(weight)

    def update(self, prediction: Any, target: Any) -> None:
        raise ConfigError(
            f"{self.name} was given predictions; it is computed from the loss: call update_loss(sum, weight)"
        )

    def state(self) -> dict[str, float]:
        return {"sum": self._sum, "weight": self._weight}

    def merge(self, state: Any) -> None:
        self._sum += state["sum"]
        self._weight += state["weight"]

    def compute(self) -> float:
        if not self._weight:
            return math.nan
        try:
            return math.exp(self._sum / self._weight)
        except OverflowError:
            return math.inf

    def reset(self) -> None:
        self._sum = self._weight = 0.0


@dataclass(frozen=True)
class _BuiltIn:
    build: Callable[..., Metric]
    keys: tuple[str, ...] = ()


def _averaged(kind: type[_PerClass], average: Average) -> _BuiltIn:
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
