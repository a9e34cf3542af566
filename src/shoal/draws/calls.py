"""Draws by position in code that is called from here, and can be called again on parts of a batch to learn from it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch

from shoal.core.keys import derive
from shoal.draws import here
from shoal.draws.forward import Forward, Keying
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
        self.draws = False
        """Whether anything was drawn so far."""

    def make(self, first: int, samples: int, seed: int, compute: Callable[[int, int], Made]) -> Made:
        """What `compute(0, samples)` gives, for samples at positions from `first` on.

        It may be called several times, and on parts: what it changes must be of no account.
        """
        with standing(), _undisturbed(here.forward_now()):
            made, forward = self._once(first, 0, samples, seed, compute)
            if self.keying.by_forward:
                return made
            if forward.moved() or forward.strange:
                self.keying.by_forward = forward.past or "the default generator has moved by more than our draws"
            elif forward.new() and samples > 1:
                self._learn(first, samples, seed, compute, forward)
            else:
                return made
            self.draws = True
            return self._once(first, 0, samples, seed, compute)[0]

    def _learn(
        self, first: int, samples: int, seed: int, compute: Callable[[int, int], Made], forward: Forward
    ) -> None:
        seen = list(forward.seen)
        middle = max(1, samples * 3 // 8)
        for start, stop in ((0, middle), (middle, samples)):
            seen += self._once(first, start, stop, seed, compute)[1].seen
        self.keying.rules.update(learn(seen)[0])

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
