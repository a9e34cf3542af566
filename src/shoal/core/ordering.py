"""The order of samples in an epoch, and which items of the data set that means, in words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.core.atoms import Course
from shoal.core.keys import derive
from shoal.core.permutation import Permutation


def order_key(seed: int, epoch: int) -> int:
    """The key of the permutation that is the order of samples in an epoch."""
    return derive(seed, "order", epoch)


def items_in_words(course: Course, seed: int, epoch: int, positions: Sequence[int], most: int = 8) -> str:
    """Which items of the data set are at these positions of an epoch: so many of them by their index."""
    shown = Permutation(course.size, order_key(seed, epoch)).at(np.array(positions[:most])).tolist()
    more = len(positions) - len(shown)
    return ", ".join(f"data[{item}]" for item in shown) + (f" and {more} more" if more else "")


def positions_in_words(course: Course, seed: int, epoch: int, first: int, last: int) -> str:
    items = items_in_words(course, seed, epoch, range(first, last + 1))
    return f"positions {first}–{last} of epoch {epoch + 1}: {items}"
