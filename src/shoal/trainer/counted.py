"""The true weight of a loss that is the mean of `cross_entropy` or `nll_loss`: the targets that count, by class weight.

Such a mean is not one over samples where classes have weights or targets are ignored, as in every padded text. Its
weight is known at the call, so it is taken there; it counts if that very tensor is what the loss function returns.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shoal.draws.replacing import Place, Replacing

_MOST = 64
"""Results of one forward that are remembered."""

_results: list[tuple[Tensor, float]] | None = None


def begin() -> None:
    """A forward begins."""
    global _results
    _results = []


def end() -> None:
    """It is over, and what was remembered is forgotten."""
    global _results
    _results = None


def weight_of(loss: Tensor) -> float | None:
    """If this is the result of such a call in the forward under way."""
    for result, weight in _results or ():
        if result is loss:
            return weight
    return None


def counting() -> AbstractContextManager[None]:
    """Within, such calls are seen. May be nested."""
    return _replacing.within()


def _make(original: Any, *, positions: tuple[str, ...]) -> Callable[..., Tensor]:
    def mean(input: Tensor, target: Tensor, *given: Any, **named: Any) -> Tensor:
        result: Tensor = original(input, target, *given, **named)
        if torch.compiler.is_dynamo_compiling() or _results is None or len(_results) >= _MOST:
            return result
        settings = {**dict(zip(positions, given, strict=False)), **named}
        usual = settings.get("size_average") is None and settings.get("reduce") is None
        if usual and settings.get("reduction", "mean") == "mean" and result.dim() == 0:
            _results.append((result, _weight(input, target, settings)))
        return result

    return mean


@torch.no_grad()
def _weight(input: Tensor, target: Tensor, settings: dict[str, Any]) -> float:
    if target.is_floating_point():  # probabilities of the classes: each of them counts
        return input.numel() / input.shape[1 if input.dim() > 1 else 0]
    counts = target != settings.get("ignore_index", -100)
    classes = settings.get("weight")
    if classes is None:
        return float(counts.sum())
    return float(classes.detach().double()[target[counts]].sum())


_POSITIONS = "weight", "size_average", "ignore_index", "reduce", "reduction"


def _places() -> list[Place]:
    return [
        (functional, "cross_entropy", partial(_make, positions=(*_POSITIONS, "label_smoothing"))),
        (functional, "nll_loss", partial(_make, positions=_POSITIONS)),
    ]


_replacing = Replacing(_places)
