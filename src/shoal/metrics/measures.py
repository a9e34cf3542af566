"""The built-in metrics."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.metrics.readings import (
    as_labels,
    as_tensor,
    check_no_nan,
    check_range,
    class_scores,
    mismatch,
    predicted_and_true,
    same_shape,
)

IGNORE = -100
"""Targets with this label are not counted: the label that torch's cross entropy leaves out too."""

Average = Literal["macro", "micro"]


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
        predicted, true = predicted_and_true(self.name, prediction, target, self.ignore)
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


class PerClass:
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
            average_value(average, self._base)
        self.name = name or (f"{self._base}_{average}" if average else self._base)
        self.average: Average = average or "macro"
        self.ignore = ignore
        self.reset()

    def update(self, prediction: Any, target: Any) -> None:
        predicted, true = predicted_and_true(self.name, prediction, target, self.ignore)
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


class Precision(PerClass):
    """Of what was predicted to be of a class, the share that is."""

    _base = "precision"

    def _ratio(self, hits: Tensor, false_positives: Tensor, false_negatives: Tensor) -> tuple[Tensor, Tensor]:
        return hits, hits + false_positives


class Recall(PerClass):
    """Of what is of a class, the share that was predicted to be."""

    _base = "recall"

    def _ratio(self, hits: Tensor, false_positives: Tensor, false_negatives: Tensor) -> tuple[Tensor, Tensor]:
        return hits, hits + false_negatives


class F1(PerClass):
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
        scores, labels = self._read(
            as_tensor(prediction, self.name, "prediction"), as_tensor(target, self.name, "target")
        )
        check_no_nan(self.name, scores)
        check_range(self.name, labels, 2, "auc compares two classes; for more, use f1 or accuracy")
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
        pair = same_shape(prediction, target)
        if pair is not None:
            labels, counted = as_labels(self.name, pair[1], self.ignore)
            return pair[0].cpu().flatten()[counted].to(torch.float64), labels
        scored = class_scores(prediction, target)
        if scored is None or scored[0].shape[-1] != 2:
            raise mismatch(
                self.name,
                prediction,
                target,
                "auc compares two classes: predict must return scores of class 1 in the target's shape, "
                "or scores of both classes with a last dimension of size 2",
            )
        labels, counted = as_labels(self.name, scored[1], self.ignore)
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
        prediction, target = as_tensor(prediction, self.name, "prediction"), as_tensor(target, self.name, "target")
        pair = same_shape(prediction, target)
        if pair is None:
            raise mismatch(
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


def average_value(value: str, spec: str) -> str:
    valid = get_args(Average)
    if value not in valid:
        raise ConfigError(
            f"metric {spec!r} has average={value!r}{nearest(str(value), valid)}; it must be {listed(valid, 'or')}"
        )
    return value


def nearest(word: str, valid: Iterable[str]) -> str:
    names = list(valid)
    begun = [name for name in names if word and name.startswith(word.lower())]
    found = begun or difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.5)
    return f" (did you mean {found[0]!r}?)" if found else ""


def listed(words: Sequence[str], last: str = "and") -> str:
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
