"""The forward under way in this process: its samples, the salts of its draws, and what was learnt about them.

A salt comes from torch's default generator, which is seeded alike in all forwards of a step, so that activation
checkpointing replays it. The salt then tells a replayed draw from a new one: one that was seen is that draw again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.core.keys import derive
from shoal.draws.hashing import Grid, Keys, keys, spread
from shoal.draws.others import seed_others
from shoal.draws.sites import SHARED, Names, Rule, Seen, Shape, fits, guess, site

_NOBODY = spread(np.array([-1]))
"""In place of a position, for draws that belong to no sample."""
_ANOTHER = 0xD1B54A32D192ED03
_random_ = torch.Tensor.random_


class Keying:
    """What a run knows about its draws: the same on all workers, apart from what is `fresh`."""

    def __init__(self) -> None:
        self.rules: dict[int, Rule] = {}
        self.fresh: dict[int, Rule] = {}
        """What this worker has learnt since all agreed."""
        self.by_forward = ""
        """Why draws are seeded by the forward, if they are."""
        self.names = Names()

    def rule(self, number: int) -> Rule | None:
        return self.rules.get(number) or self.fresh.get(number)

    def learn(self, rules: dict[int, Rule]) -> None:
        self.fresh.update({number: rule for number, rule in rules.items() if number not in self.rules})

    def agree(self, told: Sequence[dict[int, Rule]]) -> list[int]:
        """Take in what all workers have learnt; returns the sites that they do not agree on."""
        differ = []
        for fresh in told:
            for number, rule in fresh.items():
                if self.rules.setdefault(number, rule) != rule:
                    differ.append(number)
        self.fresh = {}
        return differ


class Draw(NamedTuple):
    """One draw: the rows' salt, and where rows and their elements lie in the tensor."""

    salt: int
    rule: Rule
    rows: NDArray[np.uint64]
    inside: Shape
    """Of a row's elements."""
    before: int

    def grid(self, number: int = 0) -> Grid:
        return Grid.of(self.keys(number), self.inside, self.before)

    def keys(self, number: int = 0) -> Keys:
        return keys(self.rows, self.salt + number * _ANOTHER)


class Forward:
    """A forward over samples at these positions. One thread."""

    def __init__(
        self, keying: Keying, positions: Sequence[int] | NDArray[np.int64], seed: int, *, recording: bool = False
    ) -> None:
        """`recording`: all draws are told of in `seen`, not only those at new sites."""
        self.samples = len(positions)
        self.seen: list[Seen] = []
        self.strange: list[int] = []
        """Sites where something was drawn that its rule does not fit."""
        self.past = ""
        """What has drawn past this place, as far as it was seen."""
        self.permuted = False
        """Whether samples were put into another order."""
        self.own: list[str] = []
        """What was drawn from with a generator of its own."""
        self._keying = keying
        self._positions = np.asarray(positions, dtype=np.int64)
        self._spread: NDArray[np.uint64] | None = None
        self._seed = seed
        self._salts: dict[int, Rule] = {}
        self._salt: Tensor = torch.empty(1, dtype=torch.int64)
        self._recording = recording
        self._asked = 0

    def begin(self, *, others: bool = True) -> None:
        """Seed the generators that a model or a loss may draw from: alike in all forwards of a step."""
        torch.default_generator.manual_seed(self._seed)
        if others:
            seed_others(self._seed)

    def draw(self, kind: str, shape: Sequence[int]) -> Draw:
        """What stands for a draw of this shape by the code that called."""
        shape = tuple(shape)
        salt = self._next_salt()
        rule = self._salts.get(salt)
        if rule is None:
            rule = self._salts[salt] = self._find(kind, shape)
        return self._laid(salt, rule, shape)

    def salt(self) -> int:
        """For a draw that belongs to no sample, such as a permutation of the batch."""
        salt = self._next_salt()
        self._salts.setdefault(salt, SHARED)
        return salt

    def _next_salt(self) -> int:
        _random_(self._salt)
        return int(self._salt.item())

    def _find(self, kind: str, shape: Shape) -> Rule:
        number = site(self._keying.names, kind, len(shape))
        rule = self._keying.rule(number)
        if rule is None or self._recording:
            self.seen.append(Seen(number, self.samples, shape))
        if rule is None:
            return guess(self.samples, shape)
        if not fits(rule, self.samples, shape):
            self.strange.append(number)
            return guess(self.samples, shape)
        return rule

    def _laid(self, salt: int, rule: Rule, shape: Shape) -> Draw:
        if rule.dimension < 0:
            return Draw(salt, rule, _NOBODY, shape, 1)
        if self._spread is None:
            self._spread = spread(self._positions)
        at, samples = rule.dimension, self.samples
        before = 1
        for size in shape[:at]:
            before *= size
        if shape[at] == samples:
            return Draw(salt, rule, self._spread, shape[:at] + shape[at + 1 :], before)
        each = shape[at] // samples
        # each sample has so many of them, one after the other, or one in each of so many turns
        inside = (*shape[:at], each, *shape[at + 1 :])
        return Draw(salt, rule, self._spread, inside, before * each if rule.inner else before)

    def new(self) -> bool:
        """Whether something was drawn at a site that nothing is known of."""
        return any(self._keying.rule(one.site) is None for one in self.seen)

    def moved(self) -> bool:
        """Whether something else has drawn from the default generator since `begin`."""
        if self.past:
            return True
        twin = torch.Generator()
        twin.manual_seed(self._seed)
        expected = torch.empty(len(self._salts) + 1, dtype=torch.int64)
        _random_(expected, generator=twin)
        salt = self._next_salt()
        # a salt like the others, should this be asked again
        self._salts[salt] = SHARED
        self._asked += 1
        return salt != int(expected[-1])

    @property
    def drew(self) -> bool:
        """Whether anything was drawn."""
        return len(self._salts) > self._asked


def seed_of(seed: int, step: int, phase: int) -> int:
    """The seed of the generators in all forwards of a step's phase."""
    return derive(seed, "forward", step, phase)


def seed_by_forward(seed: int, step: int, phase: int, first: int) -> int:
    """Their seed where draws are by the forward: another one for each."""
    return derive(seed, "alone", step, phase, first)
