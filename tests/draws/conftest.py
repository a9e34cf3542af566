"""Forwards by hand: parts of a batch, computed with draws by position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.draws import here
from shoal.draws.forward import Forward, Keying
from shoal.draws.sites import Names, learn
from shoal.draws.stand import standing

Compute = Callable[[int, int], Any]
CUTS = ((), (5,), (2, 9))
"""A batch in one part, in two and in three of different sizes."""


_code: dict[str, Any] = {}
exec(
    compile("def call(compute, *given): return compute(*given)", f"{Path(shoal.__file__).parent}/worker.py", "exec"),
    _code,
)
_call = _code["call"]
"""As by a worker: lines that lead here are of no account."""


class Play:
    """Calls of `compute(start, stop)` with one keying."""

    def __init__(self, compute: Compute, size: int, modules: Sequence[nn.Module] = (), seed: int = 7) -> None:
        self.compute, self.size, self.seed = compute, size, seed
        self.keying = Keying()
        self.keying.names = Names(modules)

    def part(self, start: int, stop: int, *, recording: bool = False) -> tuple[Any, Forward]:
        forward = Forward(self.keying, range(start, stop), self.seed, recording=recording)
        with standing():
            forward.begin()
            here.enter(forward)
            try:
                return _call(self.compute, start, stop), forward
            finally:
                here.enter(None)

    def learn(self, *, inner: bool = False) -> Play:
        middle = self.size * 3 // 8
        seen = []
        for start, stop in ((0, self.size), (0, middle), (middle, self.size)):
            seen += self.part(start, stop, recording=True)[1].seen
        rules, multiples = learn(seen)
        self.keying.rules = {
            number: rule._replace(inner=inner and number in multiples) for number, rule in rules.items()
        }
        return self

    def parts(self, *cuts: int) -> list[Any]:
        """What all parts give. Nothing may be new, or draw past us."""
        found = []
        for start, stop in pairwise([0, *cuts, self.size]):
            value, forward = self.part(start, stop)
            assert not forward.new() and not forward.strange and not forward.moved(), forward.past
            found.append(value)
        return found


def difference(one: Tensor, other: Tensor) -> float:
    """The largest one, relative to the largest value."""
    assert one.shape == other.shape and one.dtype == other.dtype
    if not one.numel():
        return 0.0
    left, right = one.detach().double(), other.detach().double()
    return float((left - right).abs().max() / right.abs().max().clamp(min=1e-12))


class Check:
    """What tests ask about a function of a part of a batch."""

    play = Play
    cuts = CUTS
    difference = staticmethod(difference)

    @staticmethod
    def values(compute: Compute, size: int = 13, *, along: int = 0, inner: bool = False, bound: float = 1e-6) -> Tensor:
        """It gives the same for samples, whatever lies beside them. Returns what it gives for the whole batch."""
        play = Play(compute, size).learn(inner=inner)
        whole: Tensor = play.parts()[0]
        for cuts in CUTS:
            assert difference(torch.cat(play.parts(*cuts), along), whole) <= bound
        other = Play(compute, size, seed=8)
        other.keying = play.keying
        assert not torch.equal(other.parts()[0], whole), "the seed has no say"
        return whole

    @staticmethod
    def gradients(model: nn.Module, loss: Callable[[int, int], Tensor], size: int = 13, *, inner: bool = False) -> None:
        """The gradients of a batch in parts add up to those of the whole."""

        def compute(start: int, stop: int) -> None:
            loss(start, stop).backward()

        play = Play(compute, size, [model]).learn(inner=inner)
        found = []
        for cuts in CUTS:
            model.zero_grad()
            play.parts(*cuts)
            grads = [param.grad for param in model.parameters()]
            assert all(grad is not None for grad in grads)
            found.append([grad.clone() for grad in grads if grad is not None])
        for other in found[1:]:
            assert max(map(difference, other, found[0])) <= 1e-6


@pytest.fixture(scope="session")
def check() -> type[Check]:
    return Check
