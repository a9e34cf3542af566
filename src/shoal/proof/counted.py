"""The true weight of a loss that is the mean of `cross_entropy` or `nll_loss`: the targets that count, by class weight.

Such a mean is not one over samples where classes have weights or targets are ignored, as in every padded text. Its
weight is known at the call, so it is taken there; it counts if that very tensor is what the loss function returns.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from shoal.draws.replacing import Place, Replacing

_MOST = 64
"""Results of one forward that are remembered."""
_MEAN = 1
"""What torch calls the reduction 'mean' below `torch.nn.functional`."""
_COMPILED = os.path.join("torch", "_dynamo", "eval_frame.py")

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


def _make(original: Any) -> Callable[..., Tensor]:
    def loss(
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        reduction: int = _MEAN,
        ignore_index: int = -100,
        *more: Any,
        **named: Any,
    ) -> Tensor:
        result: Tensor = original(input, target, weight, reduction, ignore_index, *more, **named)
        # this first: while a graph is traced it is a constant, and nothing of ours becomes part of the graph
        if torch.compiler.is_dynamo_compiling() or _results is None:
            return result
        if reduction == _MEAN and len(_results) < _MOST and _is_plain(result) and not _compiled():
            _results.append((result, _weight(input, target, weight, ignore_index)))
        return result

    return loss


def _is_plain(result: Tensor) -> bool:
    """Whether its numbers can be looked at: neither traced, nor of many samples at once, as under `torch.func`."""
    return type(result) is Tensor and not result.is_meta and torch._C._functorch.peek_interpreter_stack() is None


def _compiled() -> bool:
    """Whether the call is made by compiled code, which makes it unseen as soon as it is a graph: so it never counts."""
    if "torch._dynamo" not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COMPILED):
            return True
        frame = frame.f_back
    return False


@torch.no_grad()
def _weight(input: Tensor, target: Tensor, classes: Tensor | None, ignored: int) -> float:
    if target.is_floating_point():  # probabilities of the classes: each of them counts
        return input.numel() / input.shape[1 if input.dim() > 1 else 0]
    counts = target != ignored
    if classes is None:
        return float(counts.sum())
    return float(classes.detach().double()[target[counts]].sum())


def _places() -> list[Place]:
    # below `torch.nn.functional`, so that `from torch.nn.functional import cross_entropy` gets there too
    nn: Any = torch._C._nn
    return [(nn, "cross_entropy_loss", _make), (nn, "nll_loss_nd", _make)]


_replacing = Replacing(_places)
