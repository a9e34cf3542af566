"""Measuring what sums over a group cost. All members take part; member 0's clock decides how much is measured."""

from __future__ import annotations

import time
from collections.abc import Mapping
from math import inf

import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.comm.plan import SMALLEST, Costs
from shoal.core.traffic import CONTROL, MEASUREMENT

BUDGET_SECONDS = 0.05
"""Rounds are measured for as long as the next one is expected to end within this."""

_SIZES = (4 << 10, SMALLEST, 1 << 20, 4 << 20, 16 << 20)
"""Bytes of one sum."""
_TELLING = 4 << 20
"""Where sums of this size were measured larger ones follow from them. Else the steps themselves tell what they cost."""
_PIECES = 4
_REPEATS = 5
"""Of repeats the quickest counts: what else the machine does only ever adds to it."""
_BESIDE = 1 << 20
"""Bytes that are summed beside a computation, to see how much of both goes on at once."""
_MOST_BYTES = 32 << 20
"""Summed for one size."""
_MOST_PRODUCTS = 10_000
_EXPECTED_GROWTH = 8.0
"""From the smallest sum to the next larger one."""


class Scratch:
    """Memory to sum, and other memory to copy into it before, as gradients are."""

    def __init__(self, buffer: Tensor) -> None:
        most = min(buffer.numel(), _SIZES[-1] // buffer.element_size())
        self._buffer = buffer[:most]
        # Ones: pages of zeros that nobody wrote are one page, which is always in the cache.
        self._source = torch.ones_like(self._buffer)
        self._next = 0
        self.bytes = self._buffer.nbytes
        self.device = buffer.device

    def take(self, size: int, pieces: int = 1) -> list[tuple[Tensor, Tensor]]:
        """Parts of so many bytes that do not overlap, and what to copy into each; not used for as long as possible."""
        count = max(1, size // self._buffer.element_size())
        if self._next + pieces * count > self._buffer.numel():
            self._next = 0
        starts = [self._next + piece * count for piece in range(pieces)]
        self._next += pieces * count
        return [(self._buffer[start : start + count], self._source[start : start + count]) for start in starts]


def measure(group: Group, buffer: Tensor, whole: tuple[int, float]) -> Costs:
    """What sums cost here. All members call it; what `buffer` holds is lost. Only member 0's result counts.

    `whole` is the size in bytes of all gradients, and the seconds in which they were summed in a step. These count
    where the link is too slow to measure more than a little.
    """
    scratch = Scratch(buffer)
    began = time.perf_counter()
    smallest = min(_SIZES[0], scratch.bytes)
    points = {smallest: min(_seconds(group, scratch, smallest, 1) for _ in range(2))}
    largest = min(whole[0], scratch.bytes)
    sizes = [smallest, *(size for size in _SIZES[1:] if size <= largest)]
    if sizes[-1] < largest < _SIZES[-1]:
        sizes.append(largest)
    for size in sizes:
        left = BUDGET_SECONDS - (time.perf_counter() - began)
        most = 1 if size == smallest else min(_PIECES, scratch.bytes // size)
        pieces, repeats = _told(group, _affordable(points, most, size, left))
        if not pieces:
            break
        points[size] = min(_seconds(group, scratch, size, pieces) for _ in range(repeats))
    overlap = _overlap(group, scratch, points)
    if max(points) < min(_TELLING, largest):
        points = {size: seconds for size, seconds in points.items() if size < whole[0]} | dict([whole])
    return Costs(sorted(points.items()), overlap)


def finished(device: torch.device) -> None:
    """Wait until an accelerator has done what this thread asked of it, and what that waits for."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _affordable(points: Mapping[int, float], pieces: int, size: int, left: float) -> tuple[int, int]:
    """How many sums at once, how many times, fit in half of the seconds left; none and none if not even one does."""
    last = max(points)
    # From the latency alone little can be said of larger sizes.
    expected = points[last] * (_EXPECTED_GROWTH if len(points) == 1 and size > last else size / last)
    for choice in ((pieces, _REPEATS), (pieces, 2), (pieces, 1), (1, 1)):
        if choice[0] * choice[1] * expected <= left / 2 and choice[0] * choice[1] * size <= _MOST_BYTES:
            return choice
    return 0, 0


def _told(group: Group, choice: tuple[int, int]) -> tuple[int, int]:
    told = torch.tensor(choice, dtype=torch.int64)
    group.broadcast(told, CONTROL)
    pieces, repeats = told.tolist()
    return pieces, repeats


def _seconds(group: Group, scratch: Scratch, size: int, pieces: int) -> float:
    """Seconds of one of `pieces` sums that are under way together; the copies before them do not count."""
    spent, works = 0.0, []
    for part, source in scratch.take(size, pieces):
        part.copy_(source)
        finished(scratch.device)
        begun = time.perf_counter()
        works.append(group.sum(part, MEASUREMENT))
        spent += time.perf_counter() - begun
    begun = time.perf_counter()
    for work in works:
        work.wait()
    finished(scratch.device)
    return (spent + time.perf_counter() - begun) / pieces


def _overlap(group: Group, scratch: Scratch, points: Mapping[int, float]) -> float:
    """How much of a sum's time can be computed in: the same sum and computation, each alone and both at once."""
    size = max(size for size in points if size <= _BESIDE)
    matrix = torch.ones(96, 96, device=scratch.device)
    product = min(_computing(matrix, 1) for _ in range(_REPEATS))
    quick = points[size] < BUDGET_SECONDS / 10
    products = min(_MOST_PRODUCTS, max(1, round(points[size] / max(product, 1e-9))))
    repeats, products = _told(group, (_REPEATS if quick else 1, products))
    alone = inf if repeats > 1 else points[size]
    computing = both = inf
    for _ in range(repeats):
        computing = min(computing, _computing(matrix, products))
        if repeats > 1:
            _seconds(group, scratch, min(points), 1)  # all members go on at the same moment
            alone = min(alone, _seconds(group, scratch, size, 1))
        ((part, source),) = scratch.take(size)
        part.copy_(source)
        finished(scratch.device)
        begun = time.perf_counter()
        work = group.sum(part, MEASUREMENT)
        _computing(matrix, products)
        work.wait()
        finished(scratch.device)
        both = min(both, time.perf_counter() - begun)
    shorter = min(alone, computing)
    return min(1.0, max(0.0, (alone + computing - both) / shorter)) if shorter > 0.0 else 0.0


def _computing(matrix: Tensor, products: int) -> float:
    begun = time.perf_counter()
    for _ in range(products):
        _compute(matrix)
    return time.perf_counter() - begun


def _compute(matrix: Tensor) -> None:
    torch.mm(matrix, matrix)
    finished(matrix.device)
