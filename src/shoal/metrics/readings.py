"""What a predict function returned, read as labels, scores or numbers, or refused in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import DataError


def as_tensor(value: Any, name: str, what: str) -> Tensor:
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
            return torch.stack([as_tensor(part, name, what) for part in value])
        # through numpy, because torch reads Python floats as float32
        return torch.from_numpy(np.array(value, order="C"))
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"{name}: the {what} is {short(value)} of type {type(value).__qualname__}, "
            "which is no regular array of numbers; "
            "predict must return (prediction, target) as tensors, numpy arrays, lists or numbers"
        ) from None


def same_shape(prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor] | None:
    """Both in one shape, a trailing dimension of size 1 dropped from one of them if that is all they differ in."""
    if prediction.shape == target.shape:
        return prediction, target
    if prediction.shape == (*target.shape, 1):
        return prediction.squeeze(-1), target
    if target.shape == (*prediction.shape, 1):
        return prediction, target.squeeze(-1)
    return None


def class_scores(prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor] | None:
    """Scores [..., C] and labels [...], if the shapes are such."""
    if prediction.ndim and prediction.shape[:-1] == target.shape:
        return prediction, target
    # not for a target of shape [1]: with a prediction of shape [C] that is more likely a mistake than one sample
    if target.ndim > 1 and target.shape == (*prediction.shape[:-1], 1):
        return prediction, target.squeeze(-1)
    return None


def mismatch(name: str, prediction: Tensor, target: Tensor, must: str) -> DataError:
    return DataError(
        f"{name}: the prediction has shape {tuple(prediction.shape)} "
        f"and the target has shape {tuple(target.shape)}; {must}"
    )


def as_labels(name: str, target: Tensor, ignore: int) -> tuple[Tensor, Tensor]:
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


def predicted_and_true(name: str, prediction: Any, target: Any, ignore: int) -> tuple[Tensor, Tensor]:
    """Predicted and true labels of the counted positions: int64, one dimension, on the CPU."""
    prediction, target = as_tensor(prediction, name, "prediction"), as_tensor(target, name, "target")
    pair = same_shape(prediction, target)
    if pair is not None:
        labels, counted = as_labels(name, pair[1], ignore)
        if pair[0].is_floating_point():
            return _thresholded(name, pair[0].cpu().flatten()[counted], labels, pair[1].shape), labels
        return pair[0].cpu().flatten()[counted], labels
    scored = class_scores(prediction, target)
    if scored is None or scored[0].shape[-1] == 0:
        raise mismatch(
            name,
            prediction,
            target,
            "predict must return class scores with one dimension more than the target, classes last "
            "(scores [N, C, T] need .movedim(1, -1)), or labels or probabilities in the target's shape",
        )
    labels, counted = as_labels(name, scored[1], ignore)
    return _highest(name, scored[0], counted, labels), labels


def _thresholded(name: str, probabilities: Tensor, labels: Tensor, shape: torch.Size) -> Tensor:
    outside = ~((probabilities >= 0) & (probabilities <= 1))
    if outside.any():
        raise DataError(
            f"{name}: the prediction has the value {probabilities[outside][0].item():.6g} and is {probabilities.dtype} "
            f"in the target's shape {tuple(shape)}, which is read as probabilities of class 1; they must be within "
            f"[0, 1]: return torch.sigmoid(logits), or integer labels, or class scores of shape {_with_classes(shape)}"
        )
    check_range(
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
    check_no_nan(name, best.values.cpu().flatten()[counted])
    check_range(
        name,
        labels,
        classes,
        f"the prediction has scores of {classes} classes; if that label marks padding, set ignore to it",
    )
    return best.indices.cpu().flatten()[counted]


def check_no_nan(name: str, scores: Tensor) -> None:
    if scores.is_floating_point() and scores.isnan().any():
        raise DataError(
            f"{name}: the prediction has NaN among its scores; scores must be numbers: "
            "return finite scores from predict, or give such positions a target that is ignored"
        )


def check_range(name: str, labels: Tensor, classes: int, reason: str) -> None:
    outside = labels[(labels < 0) | (labels >= classes)]
    if outside.numel():
        raise DataError(
            f"{name}: the target has the label {outside[0].item()}; "
            f"it must be from 0 to {classes - 1}, because {reason}"
        )


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
