"""Whole numbers in buffers: do they count samples, or calls?

`seen += len(x)` moves with samples: what forwards added belongs together. `num_batches_tracked += 1` moves per call:
each forward of a step moves it, and it counts once. Which one it is shows in forwards of different sizes: who moves in
proportion to their samples moves with samples, who moves alike however many there are moves per call. Where all
forwards are of one size, a movement that is a multiple of it (and not of one sample) is taken to be with samples, else
to be per call. For a vector it is the sum of its elements that goes with samples (a histogram), and none of them may
move back. If it shows later that it was taken for the wrong one, it is judged anew.

What is neither is named, and so is a pointer (a number that says where rows of another buffer are written, and goes
round): they go on as the mean of their movements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

UNSURE = "unsure"
"""There was never more than one forward in a step in which it moved."""
SINGLE = "single"
"""All forwards were of one sample: as per call, until others come."""
CALLS = "calls"
SAMPLES = "samples"
POINTER = "pointer"
NEITHER = "neither"


class Way(NamedTuple):
    """How whole numbers move."""

    kind: str = UNSURE
    rate: int = 0
    """By how much with each sample; for a pointer, the rows that it goes round in."""

    @property
    def named(self) -> bool:
        """Whether a person has to be told, as no rule is right."""
        return self.kind in (POINTER, NEITHER)


class Move(NamedTuple):
    """How far a forward of so many samples moved a buffer."""

    samples: int
    by: Tensor
    rows: int = 0
    """If it looks like a pointer into so many rows."""


def judge(former: Way, moves: Sequence[Move]) -> Way:
    """What the forwards of one step, which are more than one, show. Pure: all workers come to the same."""
    moves = [move for move in moves if bool(move.by.any())]
    if former.named or not moves:
        return former
    if all(move.rows for move in moves):
        return Way(POINTER, moves[0].rows)
    rates = {_rate(move) for move in moves}
    rate = rates.pop() if len(rates) == 1 else None
    alike = all(torch.equal(move.by, moves[0].by) for move in moves)
    if len({move.samples for move in moves}) > 1:
        return Way(CALLS) if alike else _with_samples(rate)
    if not alike:
        return _with_samples(rate)
    return _of_one_size(former, moves[0].samples, rate)


def _of_one_size(former: Way, samples: int, rate: int | None) -> Way:
    """All forwards had so many samples, and moved it alike."""
    if samples == 1:
        return Way(SINGLE) if former.kind == UNSURE else former
    if former.kind == CALLS or rate is None:
        return Way(CALLS)
    # another rate than before, but alike in all forwards: it goes by something that they share
    return Way(CALLS) if former.kind == SAMPLES and former.rate != rate else Way(SAMPLES, rate)


def _with_samples(rate: int | None) -> Way:
    return Way(NEITHER) if rate is None else Way(SAMPLES, rate)


def _rate(move: Move) -> int | None:
    """Its movement by sample, if it is one that can go with samples."""
    total = int(move.by.sum())
    return None if total % move.samples or bool((move.by < 0).any()) else total // move.samples


def strays(way: Way, move: Move, last: Tensor | None) -> bool:
    """Whether a forward moves it otherwise than was judged. `last` is how far an earlier one moved it."""
    if not bool(move.by.any()):
        return False
    if way.kind == SAMPLES:
        return _rate(move) != way.rate
    if way.kind == CALLS:
        return last is not None and not torch.equal(last, move.by)
    return way.kind == SINGLE and move.samples > 1
