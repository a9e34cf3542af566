"""What a loss function may return, and what it means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.proof.counted import weight_of


class Loss(NamedTuple):
    """A loss to be differentiated. With `weight` None it is a mean over the batch's samples, else a sum."""

    value: Tensor
    weight: float | None
    logs: dict[str, float]
    mean: bool
    """Whether the value is a mean: over samples, or over what has `weight`, which was then counted by us."""


_FORMS = 'return a scalar mean over the batch, or (sum, weight), or {"loss": either of these, "name": number, ...}'


def read_loss(returned: Any, *, training: bool) -> Loss:
    """Check and take apart what the user's loss function returned."""
    logs: dict[str, float] = {}
    if isinstance(returned, Mapping):
        if "loss" not in returned:
            raise ConfigError(
                f"the loss function returned a dict with {sorted(map(str, returned))} and no 'loss'; {_FORMS}"
                f"{_model_output(returned)}"
            )
        if _model_output(returned):
            raise ConfigError(f"the loss function returned the model's whole output; {_FORMS}{_model_output(returned)}")
        logs = {str(name): _number(name, value) for name, value in returned.items() if name != "loss"}
        returned = returned["loss"]
    weight: float | None = None
    if isinstance(returned, (tuple, list)):
        if len(returned) != 2:
            raise ConfigError(f"the loss function returned {len(returned)} values; {_FORMS}")
        returned, given = returned
        if training and isinstance(given, Tensor) and given.requires_grad:
            raise ConfigError(
                "the weight in (sum, weight) depends on the model, and its gradient would not be taken: if the loss is "
                "a ratio of the model's outputs, as dice is, take the ratio per sample and return its mean; if the "
                "weight is meant to be a constant, return weight.detach()"
            )
        weight = _number("weight", given)
        if not weight >= 0.0:
            raise ConfigError(f"the loss function returned weight {weight}; it must not be negative")
    if not isinstance(returned, Tensor):
        raise ConfigError(f"the loss function returned {type(returned).__name__}; {_FORMS}")
    if returned.numel() != 1:
        raise ConfigError(
            f"the loss is not a scalar: it has shape {tuple(returned.shape)}; take .mean() of it, or return "
            "(loss.sum(), weight)"
        )
    if not returned.is_floating_point():
        raise ConfigError(f"the loss has dtype {returned.dtype}; it must be a floating-point scalar")
    counted = weight_of(returned) if weight is None else None
    if training and not returned.requires_grad:
        raise ConfigError(
            "the loss is detached: no parameter's gradient can be computed from it; compute it from the "
            "model's output, "
            "without .item(), .detach(), .data or torch.no_grad(), and leave at least one parameter with "
            "requires_grad=True"
        )
    mean = weight is None
    return Loss(returned.reshape(()), counted if mean else weight, logs, mean)


def _model_output(returned: Any) -> str:
    """A hint for the outputs of Hugging Face models, which are dicts of tensors."""
    if not type(returned).__name__.endswith("Output"):
        return ""
    return f". For a {type(returned).__name__}: return model(**batch).loss, with labels in the batch"


def _number(name: object, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.detach())
    try:
        return float(value)
    except (TypeError, ValueError):
        kind = (
            f"a tensor of shape {tuple(value.shape)}"
            if isinstance(value, torch.Tensor)
            else f"of type {type(value).__name__}"
        )
        raise ConfigError(f"the loss function returned {name!r} {kind}; it must be one number") from None
