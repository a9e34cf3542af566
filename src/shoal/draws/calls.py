"""Draws by position in code that is called from here, and can be called again on parts of a batch to learn from it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from shoal.core.keys import derive
from shoal.draws import here
from shoal.draws.forward import PAST, Forward, Keying
from shoal.draws.sites import learn
from shoal.draws.stand import standing

Made = TypeVar("Made")


@contextmanager
def _undisturbed(around: Forward | None) -> Iterator[None]:
    """A forward that is under way goes on afterwards as if nothing had been."""
    if around is None:
        yield
        return
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


class Calls:
    """Calls of one kind (an evaluation's forwards, a `collate`), whose draws depend on positions alone.

    Parts of the batch are computed only if something is drawn at a new site, to learn which dimension holds samples.
    """

    def __init__(self, *, others: bool = True) -> None:
        """`others`: Python's and numpy's generators are seeded too, alike in all calls with one seed."""
        self.keying = Keying()
        self._others = others

    def make(self, first: int, samples: int, seed: int, compute: Callable[[int, int], Made]) -> Made:
        """What `compute(0, samples)` gives, for samples at positions from `first` on.

        It may be called several times, and on parts: what it changes must be of no account.
        """
        with standing(), _undisturbed(here.forward_now()):
            made, forward = self._once(first, 0, samples, seed, compute)
            if self.keying.by_forward:
                return made
            if forward.moved() or forward.strange:
                self.keying.by_forward = forward.past or PAST
            elif forward.new() and samples > 1:
                self._learn(first, samples, seed, compute, forward)
            else:
                return made
            return self._once(first, 0, samples, seed, compute)[0]

    def _learn(
        self, first: int, samples: int, seed: int, compute: Callable[[int, int], Made], forward: Forward
    ) -> None:
        middle = max(1, samples * 3 // 8)
        parts = [self._once(first, start, stop, seed, compute) for start, stop in ((0, middle), (middle, samples))]
        rules, multiples = learn([*forward.seen, *(one for _, part in parts for one in part.seen)])
        self.keying.rules.update(rules)
        if not multiples:
            return
        # whether a sample's draws lie side by side, or one in each of several copies of the batch
        for inner in (True, False):
            self.keying.rules.update({number: rules[number]._replace(inner=inner) for number in multiples})
            whole, one, other = (
                self._once(first, start, stop, seed, compute)[0]
                for start, stop in ((0, samples), (0, middle), (middle, samples))
            )
            if inner and adds_up(whole, one, other, middle / samples):
                return

    def _once(
        self, first: int, start: int, stop: int, seed: int, compute: Callable[[int, int], Made]
    ) -> tuple[Made, Forward]:
        forward = Forward(self.keying, range(first + start, first + stop), seed)
        forward.begin(others=self._others)
        if self.keying.by_forward:
            torch.default_generator.manual_seed(derive(seed, first + start))
            return compute(start, stop), forward
        around = here.enter(forward)
        try:
            return compute(start, stop), forward
        finally:
            here.enter(around)


def adds_up(whole: Any, one: Any, other: Any, share: float) -> bool:
    """Whether all tensors in what was made of two parts are, joined, those of the whole; for scalars: their mean."""
    found = [_tensors(each) for each in (whole, one, other)]
    if not found[0] or len({len(each) for each in found}) != 1:
        return False
    return all(_joined(*each, share=share) for each in zip(*found, strict=True))


def _joined(whole: Tensor, one: Tensor, other: Tensor, *, share: float) -> bool:
    if not whole.dim():
        joined = one.double() * share + other.double() * (1.0 - share)
    elif one.shape[1:] == other.shape[1:] == whole.shape[1:] and len(one) + len(other) == len(whole):
        joined = torch.cat([one, other]).double()
    else:
        return False
    return torch.allclose(joined, whole.double(), rtol=1e-4, atol=1e-6, equal_nan=True)


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree.detach()]
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    elif is_dataclass(tree) and not isinstance(tree, type):
        tree = [getattr(tree, field.name, None) for field in fields(tree)]
    return [tensor for each in tree for tensor in _tensors(each)] if isinstance(tree, (list, tuple)) else []
