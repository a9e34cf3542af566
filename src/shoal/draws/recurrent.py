"""Recurrent networks with dropout between their layers: the layers one by one, and dropout by position in between."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.draws.dropout import dropped, noise
from shoal.draws.forward import Forward
from shoal.draws.here import forward_for


def make_recurrent(original: Any) -> Callable[..., Any]:
    def recurrent(input: Tensor, *given: Any) -> Any:
        packed = isinstance(given[0], Tensor) and isinstance(given[2], (list, tuple))
        layers, p, train = given[4:7] if packed else given[3:6]
        forward = forward_for(input) if train and layers > 1 and 0.0 < p < 1.0 else None
        if forward is None:
            return original(input, *given)
        if packed:
            order = sys._getframe(1).f_locals.get("sorted_indices")
            return _Packed(original, forward, given[0], order).run(input, *given[1:])
        return _Layers(original, forward).run(input, *given)

    return recurrent


class _Layers:
    def __init__(self, original: Any, forward: Forward) -> None:
        self._original = original
        self._forward = forward

    def run(
        self,
        input: Tensor,
        start: Any,
        weights: Sequence[Tensor],
        bias: bool,
        layers: int,
        p: float,
        train: bool,
        bidirectional: bool,
        *batch_first: bool,
    ) -> Any:
        directions = 2 if bidirectional else 1
        each = len(weights) // layers
        several = isinstance(start, (tuple, list))
        ends: list[tuple[Tensor, ...]] = []
        for layer in range(layers):
            here = slice(layer * directions, (layer + 1) * directions)
            begin = tuple(state[here] for state in start) if several else start[here]
            mine = list(weights[layer * each : (layer + 1) * each])
            if layer:
                input = self._dropped(input, p)
            input, *end = self._one(input, begin, mine, bias, 1, 0.0, train, bidirectional, *batch_first)
            ends.append(tuple(end))
        return (input, *(torch.cat(parts) for parts in zip(*ends, strict=True)))

    def _one(self, input: Tensor, *given: Any) -> Any:
        return self._original(input, *given)

    def _dropped(self, input: Tensor, p: float) -> Tensor:
        return dropped(self._forward, input, p)


class _Packed(_Layers):
    """Sequences of different lengths, packed: a row of the data is one step of one sequence, the longest ones first."""

    def __init__(self, original: Any, forward: Forward, sizes: Tensor, order: Tensor | None) -> None:
        super().__init__(original, forward)
        self._sizes = sizes
        steps = torch.arange(len(sizes)).repeat_interleave(sizes)
        place = torch.cat([torch.arange(int(size)) for size in sizes])
        self._rows = (place if order is None else order.cpu()[place]) * len(sizes) + steps

    def _one(self, input: Tensor, *given: Any) -> Any:
        return self._original(input, self._sizes, *given)

    def _dropped(self, input: Tensor, p: float) -> Tensor:
        shape = int(self._sizes[0]), len(self._sizes), input.shape[1]
        factor = noise(self._forward.draw("packed", shape), p, input.dtype).view(-1, input.shape[1])
        return input * factor[self._rows]
