"""The forward under way in this process: its samples, the salts of its draws, and what was learnt about them.

Each draw takes a token from torch's default generator, which is seeded alike in all forwards of a step, so that
activation checkpointing replays it: a token that was seen is that draw again. The salt of its numbers comes from the
place in the code and from how often this place has drawn in the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.core.keys import derive
from shoal.draws.hashing import Grid, Keys, keys, spread
from shoal.draws.others import seed_others
from shoal.draws.sites import SHARED, Names, Rule, Seen, Shape, Site, fits, guess, site

_NOBODY = spread(np.array([-1]))
"""In place of a position, for draws that belong to no sample."""
_ANOTHER = 0xD1B54A32D192ED03
_U64 = 0xFFFF_FFFF_FFFF_FFFF
_TURN, _PLACE = 0x8CB92BA72F3D8DD7, 0xAEF17502108EF2D9
_random_, _item = torch.Tensor.random_, torch.Tensor.item
_STILL_TURNS = 256
"""More than a loop over samples has. Code that draws on until it likes its numbers would never end without others."""
PAST = "something draws past torch's functions, as compiled graphs and operators in C++ do"
_token = torch.empty(1, dtype=torch.int64, device="cpu")
_twin = torch.Generator()


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
        self,
        keying: Keying,
        positions: Sequence[int] | NDArray[np.int64],
        seed: int,
        *,
        recording: bool = False,
        still: bool = False,
    ) -> None:
        """`recording`: all draws are told of in `seen`, not only those at new sites. `still`: all samples, and all
        turns at a place, draw the same numbers."""
        self.samples = len(positions)
        self._still = still
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
        self._positions = [0] * len(positions) if still else positions
        self._spread: NDArray[np.uint64] | None = None
        self._seed = seed
        self._tokens: dict[int, tuple[int, Rule]] = {}
        """The salt and the rule of what was drawn with it."""
        self._turns: dict[int, int] = {}
        """How often something was drawn at a place."""
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
        token = _next_token()
        known = self._tokens.get(token)
        if known is None:
            place = site(self._keying.names, kind, len(shape))
            known = self._tokens[token] = self._salt(place.draw), self._rule(place, shape)
        return self._laid(*known, shape)

    def salt(self, kind: str) -> int:
        """For a draw that belongs to no sample, such as a permutation of the batch."""
        token = _next_token()
        known = self._tokens.get(token)
        if known is None:
            known = self._tokens[token] = self._salt(site(self._keying.names, kind, 0).draw), SHARED
        return known[0]

    def _salt(self, draw: int) -> int:
        turn = self._turns.get(draw, 0)
        self._turns[draw] = turn + 1
        if self._still and turn < _STILL_TURNS:
            turn = 0
        return (self._seed + draw * _PLACE + turn * _TURN) & _U64

    def _rule(self, place: Site, shape: Shape) -> Rule:
        rule = self._keying.rule(place.number)
        if rule is None or self._recording:
            self.seen.append(Seen(place.number, self.samples, shape))
        if rule is None:
            return guess(self.samples, shape)
        if not fits(rule, self.samples, shape):
            self.strange.append(place.number)
            return guess(self.samples, shape)
        return rule

    def _laid(self, salt: int, rule: Rule, shape: Shape) -> Draw:
        if rule.dimension < 0:
            return Draw(salt, rule, _NOBODY, shape, 1)
        if self._spread is None:
            self._spread = spread(np.asarray(self._positions, dtype=np.int64))
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
        _twin.manual_seed(self._seed)
        expected = torch.empty(len(self._tokens) + 1, dtype=torch.int64, device="cpu")
        _random_(expected, generator=_twin)
        token = _next_token()
        # a token like the others, should this be asked again
        self._tokens[token] = 0, SHARED
        self._asked += 1
        return token != int(expected[-1])

    @property
    def drew(self) -> bool:
        """Whether anything was drawn."""
        return len(self._tokens) > self._asked


def _next_token() -> int:
    _random_(_token)
    return int(_item(_token))


def seed_of(seed: int, step: int, phase: int) -> int:
    """The seed of the generators in all forwards of a step's phase."""
    return derive(seed, "forward", step, phase)


def seed_by_forward(seed: int, step: int, phase: int, first: int) -> int:
    """Their seed where draws are by the forward: another one for each."""
    return derive(seed, "alone", step, phase, first)
