"""Rounds in which a value that is read too early or too late shows: the litmus test of what groups synchronise.

In each round every member writes, meets the others, and checks each element of what it reads. What is written differs
from round to round, so a read of the last round's value, or of the next one's, is told from a right one.
"""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shoal.comm.group import Group

_MODULUS = 8_191
"""Patterns are whole numbers below it, so that sums of them are exact in float32."""


class Board:
    """Memory that this process and those forked from it share: one row of whole numbers for each member."""

    def __init__(self, members: int, columns: int) -> None:
        self._map = mmap.mmap(-1, 8 * members * columns)
        self.rows = torch.frombuffer(self._map, dtype=torch.int64).view(members, columns)


class Ordering:
    """One member's part. `board` is shared by all members; `floats` is the length of the buffer that is summed."""

    def __init__(self, group: Group, board: Board, floats: int, seed: int) -> None:
        self._group = group
        self._board = board
        self._ramp = torch.arange(floats) % _MODULUS
        self._buffer = group.buffer(floats, torch.float32)
        self._random = random.Random(f"{seed} {group.rank}")

    def run(self, seconds: float) -> int:
        """Rounds until `seconds` are over on member 0; how many. Raises AssertionError where an order was broken."""
        until, number = time.monotonic() + seconds, 0
        while self._goes_on(until):
            for _ in range(10):
                number += 1
                self._baton(number)
                self._sums(number)
        return number

    def _baton(self, number: int) -> None:
        """What was written before a barrier is seen by all after it, and what is written after is not seen before."""
        rows, rank, size = self._board.rows, self._group.rank, self._group.size
        self._dawdle()
        rows[rank] = number * size + rank
        self._group.barrier()
        self._dawdle()
        _check(rows, (number * size + torch.arange(size)).view(-1, 1).expand_as(rows), f"board, round {number}")
        self._group.barrier()
        if rank == number % size:  # one writes for all, and in the others' rows
            rows.fill_(-number)
        self._group.barrier()
        _check(rows, torch.full_like(rows, -number), f"board of one writer, round {number}")
        self._group.barrier()

    def _sums(self, number: int) -> None:
        """Sums in place, whole and in parts, each filled again at once."""
        whole = self._buffer
        self._fill(whole, number, 0)
        self._group.sum(whole).wait()
        self._check_sum(whole, number, 0)
        cut = sorted(self._cuts(number))
        parts = [whole[start:end] for start, end in zip([0, *cut], [*cut, whole.numel()], strict=True)]
        works = []
        for at, part in enumerate(parts):
            self._fill(part, number, at + 1)
            works.append(self._group.sum(part))
            self._dawdle()
        for at, (part, work) in enumerate(zip(parts, works, strict=True)):
            work.wait()
            self._check_sum(part, number, at + 1)

    def _cuts(self, number: int) -> list[int]:
        """Where the buffer is cut in this round: everybody must cut alike."""
        return [number * step % self._buffer.numel() for step in (7_919, 104_729)]

    def _fill(self, part: Tensor, number: int, at: int) -> None:
        torch.remainder(self._ramp[: part.numel()] + _shift(number, at, self._group.rank), _MODULUS, out=part)

    def _check_sum(self, part: Tensor, number: int, at: int) -> None:
        expected = torch.zeros_like(part)
        for rank in range(self._group.size):
            expected += torch.remainder(self._ramp[: part.numel()] + _shift(number, at, rank), _MODULUS)
        _check(part, expected, f"sum, round {number}, part {at}")

    def _dawdle(self) -> None:
        """Sometimes let the others run ahead."""
        if self._random.random() < 0.3:
            time.sleep(self._random.random() * 3e-4)

    def _goes_on(self, until: float) -> bool:
        more = torch.tensor([time.monotonic() < until])
        self._group.broadcast(more)
        return bool(more.item())


def _shift(number: int, at: int, rank: int) -> int:
    return 31 * number + 1_009 * at + 97 * rank


def _check(found: Tensor, expected: Tensor, what: str) -> None:
    if not torch.equal(found, expected):
        wrong = (found != expected).view(-1)
        at = int(wrong.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are wrong; element {at} is "
            f"{found.reshape(-1)[at].item()}, not {expected.reshape(-1)[at].item()}"
        )


@contextmanager
def busy_cores(number: int | None = None) -> Iterator[None]:
    """Keeps so many cores (None: all of them) busy with processes that give way to others."""
    loop = "import os\nos.nice(19)\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"
    count = len(os.sched_getaffinity(0)) if number is None else number
    loops = [subprocess.Popen([sys.executable, "-S", "-c", loop]) for _ in range(count)]
    try:
        yield
    finally:
        for process in loops:
            process.kill()
            process.wait()
