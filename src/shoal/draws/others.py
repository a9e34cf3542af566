"""Python's and numpy's global generators: seeding them, and finding out whether somebody has drawn from them.

There is one of each in a process, and so there is one watch of each: what data, a loss and Shoal itself do with them
must not be taken for one another.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

_UINT32 = 0xFFFF_FFFF
# torch and numpy grow the same Mersenne Twister state from the same 32 bits, so the two need different ones
_NUMPY_SALT = 0x9E37_79B9


def numpy_word(seed: int) -> int:
    """One word, because an array of two costs five times as much."""
    return (seed >> 32 ^ seed) & _UINT32


class Twinned:
    """A generator that is watched by a twin: their next numbers are equal as long as nobody has drawn from one.

    Reading a state takes longer than many an item (35 us for numpy's).
    """

    def __init__(
        self,
        seed: Callable[[int], None],
        draw: Callable[[], float],
        seed_twin: Callable[[int], None],
        draw_twin: Callable[[], float],
    ) -> None:
        self.certain = False
        self._seed, self._draw = seed, draw
        self._seed_twin, self._draw_twin = seed_twin, draw_twin
        self._in_step = False
        self._doubted = False
        self._shared = False
        """Whether others draw too, between fetches: then the twins are put in step before each."""

    def seed(self, seed: int) -> None:
        self._in_step = False
        self._seed(seed)

    def forget(self) -> None:
        """Others may have drawn since it was last watched: the next watch begins anew."""
        self._in_step = False

    def begin(self, seed: int) -> None:
        self.certain = self._shared or not self._in_step
        if self.certain:
            self._seed(seed)
            self._seed_twin(seed)
            self._in_step = True

    def moved(self) -> bool:
        self._in_step = self._draw() == self._draw_twin()
        if self.certain and self._doubted:
            self._shared, self._doubted = self._in_step, False
        elif not self._in_step:
            self._doubted = True
        return not self._in_step


_twin, _numpy_twin = random.Random(0), np.random.RandomState(0)

PYTHON = Twinned(random.seed, random.random, _twin.seed, _twin.random)
NUMPY = Twinned(
    # also when nobody has imported numpy.random yet: it would then seed itself in the middle of an item
    lambda seed: np.random.seed(numpy_word(seed ^ _NUMPY_SALT)),
    np.random.random_sample,
    lambda seed: _numpy_twin.seed(numpy_word(seed ^ _NUMPY_SALT)),
    _numpy_twin.random_sample,
)


def seed_others(seed: int) -> None:
    """Seed both."""
    PYTHON.seed(seed)
    NUMPY.seed(seed)


def forget_others() -> None:
    """Nothing is known about who has drawn from them so far."""
    PYTHON.forget()
    NUMPY.forget()


def watch_others(seed: int) -> None:
    """Watch both from now on; where that needs a seed, it is this one."""
    PYTHON.begin(seed)
    NUMPY.begin(seed)


def others_moved() -> bool:
    """Whether one of them was drawn from since `watch_others`."""
    # not short-circuited: both twins must take the same steps
    moved = [PYTHON.moved(), NUMPY.moved()]
    return any(moved)
