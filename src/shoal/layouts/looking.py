"""Looking at what forwards make of a buffer in the first steps: can it be a mean of what each of them made?

Statistics can: a running mean over parts of a batch is that over the batch. Two kinds of buffers cannot, and show it:

- *Written in places.* A forward changes some elements and leaves others alone, and another forward others: a queue, a
  memory, an average by class. (An element that is 0 may have been decayed: it counts as left alone only if it is not.)
- *Sums over the batch.* With n samples the sum of all elements goes from s to d·s + a·n, with d and a the same from
  step to step, and tends to a whole multiple of n: counts, also decayed ones.

What each sees is enough to say it; no exchange is needed for that.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

STEPS = 6
"""In which to look, of those with more than one forward."""
_POINTS = 3
_LEAST, _PART = 2, 4
"""Elements that must have been left alone: at least so many, and of those that changed at least one of so many."""
_CLOSE = 5e-4
_SAME = 1e-5


class _Point(NamedTuple):
    """A forward in three numbers: the sum of the elements before it and after it, and its samples."""

    before: float
    after: float
    samples: int


class Look:
    """At one buffer of floating-point numbers."""

    def __init__(self) -> None:
        self._changed: Tensor | None = None
        self._alone: Tensor | None = None
        self._points: list[_Point] = []

    def see(self, value: Tensor, start: Tensor, samples: int) -> str | None:
        """What a forward made of it; the word that fits better than a mean, once that is clear."""
        changed = value != start
        if not bool(changed.any()):
            return None
        word = self._places(changed, start) or self._sums(_Point(_total(start), _total(value), samples))
        self._changed, self._alone = changed, ~changed & (start != 0)
        return word

    def _places(self, changed: Tensor, start: Tensor) -> str | None:
        if self._changed is None or self._alone is None:
            return None
        alone = ~changed & (start != 0)
        differ = int(((changed & self._alone) | (self._changed & alone)).sum())
        either = int((changed | self._changed).sum())
        return "concat" if differ >= max(_LEAST, either / _PART) else None

    def _sums(self, point: _Point) -> str | None:
        if point.samples < 2:
            return None
        if any(abs(point.before - other.before) <= _SAME * abs(point.before) for other in self._points):
            return None  # of the same step, or it stands still: there is nothing to be learned from it
        self._points = [*self._points, point][-_POINTS:]
        return None if len(self._points) < _POINTS else _word(*self._points)


def _total(value: Tensor) -> float:
    return float(value.detach().sum(dtype=torch.float64))


def _word(one: _Point, two: _Point, three: _Point) -> str | None:
    """What fits, if after = decay · before + rate · samples for all of them, and the rate is one of sums."""
    scale = one.before * two.samples - two.before * one.samples
    if not scale:
        return None
    decay = (one.after * two.samples - two.after * one.samples) / scale
    rate = (one.before * two.after - two.before * one.after) / scale
    expected = decay * three.before + rate * three.samples
    if not abs(three.after - expected) <= _SAME * abs(three.after) or not 0.0 < decay < 1.0 + _CLOSE:
        return None
    endless = abs(decay - 1.0) < 1e-6
    by_sample = rate if endless else rate / (1.0 - decay)
    if by_sample < 1.0 - _CLOSE or abs(by_sample - round(by_sample)) > _CLOSE * by_sample:
        return None
    return "sum" if endless else f"sum:decay={decay:.4g}"
