"""What a worker draws in its forwards, and what it has found out about its loss on the first batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from enum import Enum
from typing import Any

import torch

from shoal.draws import here
from shoal.draws.forward import PAST, Forward, Keying, seed_by_forward, seed_of
from shoal.draws.others import forget_others, others_moved, seed_others, watch_others
from shoal.draws.sites import Names, Rule, as_tree, from_tree, guess
from shoal.draws.stand import standing
from shoal.proof import counted
from shoal.proof.examine import Finding, Kind

_MOST_REHEARSALS = 20
"""After so many, what is drawn at new sites is guessed: a model that draws from ever new ones would never get on."""


class Judgement(Enum):
    """Of a forward, before its backward."""

    FINE = "fine"
    AGAIN = "again"
    """Something was drawn that was not seeded as it should be, and will be from now on."""
    LEARN = "learn"
    """Something was drawn at a new site."""


class Keyed:
    """A worker's draws. Its `tree` is the same on all workers, but for what they have not agreed on yet."""

    def __init__(self, seed: int) -> None:
        self.keying = Keying()
        self.proven = False
        """Whether the first batch was examined."""
        self.finding: Finding | None = None
        self.held = False
        """Whether what was examined added up: then nobody sees how a step is split."""
        self.unit = 1.0
        """What a sample weighs, where targets are counted. Another one than 1 only once all workers have agreed on it:
        their weights are added."""
        self._unit = 1.0
        """What it should be."""
        self.draws = False
        """Whether anything was drawn, as far as this worker knows."""
        self.pending = False
        """Whether there is something that the other workers do not know."""
        self._seed = seed
        self._forward: Forward | None = None
        self._rehearsals = 0
        self._draws_others = False
        """Whether a forward was seen to draw from Python's or numpy's generator."""

    def within(self) -> AbstractContextManager[Any]:
        """Around all steps of a loop."""
        forget_others()
        stack = ExitStack()
        stack.enter_context(standing())
        stack.enter_context(counted.counting())
        return stack

    # -- a forward -----------------------------------------------------------------------------------------------------

    def enter(self, step: int, phase: int, positions: range, device: torch.device) -> None:
        """A forward of samples at these positions of a step begins."""
        counted.begin()
        seed = seed_of(self._seed, step, phase)
        if not self.keying.by_forward:
            self._others(seed)
            self._forward = Forward(self.keying, positions, seed)
            self._forward.begin(others=False)
            here.enter(self._forward)
            return
        self._forward = None
        seed_others(seed)
        key = seed_by_forward(self._seed, step, phase, positions.start)
        torch.default_generator.manual_seed(key)
        if device.type == "cuda":
            torch.cuda.manual_seed(key)

    def _others(self, seed: int) -> None:
        """Python's and numpy's generators: seeded once they are seen to be drawn from, and watched until then."""
        if self._draws_others:
            seed_others(seed)
        else:
            watch_others(seed)

    def leave(self) -> None:
        here.enter(None)
        counted.end()

    def judge(self, *, redo: bool) -> Judgement:
        """Whether what was computed may count. With `redo` it can be computed again; else what is new is guessed."""
        forward = self._forward
        if forward is None:
            return Judgement.FINE
        if forward.moved() or forward.strange:
            why = forward.past or PAST
            if forward.strange:
                why = "one place in the code draws for samples in different ways"
            self.by_forward(why)
            return Judgement.AGAIN if redo else Judgement.FINE
        if not self._draws_others and others_moved():
            self._draws_others = True
            if redo:
                return Judgement.AGAIN
        self.draws = self.draws or forward.drew
        if forward.new():
            self._rehearsals += 1
            if redo and self._rehearsals <= _MOST_REHEARSALS:
                return Judgement.LEARN
            self.guess()
        return Judgement.FINE

    def by_forward(self, why: str) -> None:
        if not self.keying.by_forward:
            self.keying.by_forward = why
            self.pending = True

    def guess(self) -> None:
        """Take what the forward was computed with for right."""
        if self._forward is not None:
            self._learn({one.site: guess(one.samples, one.shape) for one in self._forward.seen})

    def _learn(self, rules: dict[int, Rule]) -> None:
        self.keying.learn(rules)
        self.pending = self.pending or bool(self.keying.fresh)

    def found(self, finding: Finding, *, counts: bool) -> None:
        """A rehearsal is over; `counts`: it is the one on the first batch."""
        self._learn(finding.rules)
        self.draws = self.draws or finding.draws
        self._draws_others = self._draws_others or finding.others
        if finding.by_forward:
            self.by_forward(finding.by_forward)
        if counts:
            self.proven, self.finding = True, finding
            self.held = finding.kind is Kind.PROVEN
            if finding.unit != 1.0 == self.unit:
                self._unit, self.pending = finding.unit, True

    # -- among workers -------------------------------------------------------------------------------------------------

    def news(self) -> dict[str, Any]:
        return {"rules": as_tree(self.keying.fresh), "by_forward": self.keying.by_forward, "unit": self._unit}

    def agree(self, told: Sequence[Mapping[str, Any]]) -> None:
        """Take in what all workers had to tell, in order of rank. The result is the same on all of them."""
        differ = self.keying.agree([from_tree(each["rules"]) for each in told])
        self.keying.by_forward = next((each["by_forward"] for each in told if each["by_forward"]), "")
        if differ and not self.keying.by_forward:
            self.keying.by_forward = "workers do not agree on which dimension holds the samples"
        if self.unit == 1.0:
            self.unit = next((float(each["unit"]) for each in told if each["unit"] != 1.0), 1.0)
        self.pending = False

    def tree(self) -> dict[str, Any]:
        """What a worker that joins, or a run that goes on from a checkpoint, has to know."""
        known = {**self.keying.fresh, **self.keying.rules}
        return {
            "rules": as_tree(known),
            "by_forward": self.keying.by_forward,
            "unit": self.unit,
            "draws": self.draws,
            "held": self.held,
        }

    def load(self, tree: Mapping[str, Any], *, proven: bool) -> None:
        self.keying.rules = from_tree(tree["rules"])
        self.keying.fresh = {}
        self.keying.by_forward = tree["by_forward"]
        self.unit = float(tree["unit"])
        self.draws = bool(tree["draws"])
        self.held = bool(tree.get("held", False))
        self.proven = proven
        self.pending = False

    def know(self, modules: Sequence[torch.nn.Module]) -> None:
        self.keying.names = Names(modules)
