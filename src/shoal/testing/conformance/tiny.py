"""Case: thousands of tiny operations of all kinds, in an order that looks random and is equal everywhere."""

from __future__ import annotations

import random
import time

import torch
from torch import Tensor

from shoal.comm.group import Group, Work

_OPERATIONS = 6000
_SECONDS = 0.7
"""Then it is enough, on a machine or with a group that is slow."""
_ROUND = 50
_NAMES = ("sum", "sum", "buffer", "scatter_sum", "swap", "gather", "gather_bytes", "broadcast", "barrier")


def many_tiny_operations(group: Group) -> None:
    """Results are small whole numbers: exact. Up to three sums are under way at any time."""
    choose, begun, number = random.Random(4), time.monotonic(), 0
    whole = group.buffer(64, torch.float32)
    while number < _OPERATIONS and not _enough(group, begun):
        under_way: list[tuple[Work, Tensor, int]] = []
        for _ in range(_ROUND):
            number += 1
            _one(group, choose, number, whole, under_way)
            if len(under_way) > 3 or choose.random() < 0.3:
                _finish(group, under_way)
        _finish(group, under_way)


def _one(
    group: Group, choose: random.Random, number: int, whole: Tensor, under_way: list[tuple[Work, Tensor, int]]
) -> None:
    match choose.choice(_NAMES):
        case "buffer":
            _finish(group, under_way)
            part = whole[choose.randrange(32) : 32 + choose.randrange(32)]
            _start(group, part, number, under_way)
        case "sum":
            _start(group, torch.empty(choose.randrange(20)), number, under_way)
        case "scatter_sum":
            rows = torch.arange(group.size).view(-1, 1).repeat(1, 3) + group.rank + number
            expected = group.size * (group.rank + number) + sum(range(group.size))
            assert group.scatter_sum(rows).tolist() == [expected] * 3, number
        case "swap":
            rows = torch.arange(group.size).view(-1, 1) + torch.tensor([number, 100 * group.rank])
            theirs = [[number + group.rank, 100 * rank + group.rank] for rank in range(group.size)]
            assert group.swap(rows).tolist() == theirs, number
        case "gather":
            rows = group.gather(torch.tensor([number, group.rank], dtype=torch.int32))
            assert rows.tolist() == [[number, rank] for rank in range(group.size)], number
        case "gather_bytes":
            length = choose.randrange(4)
            found = group.gather_bytes(bytes([number % 256]) * (length * group.rank))
            assert found == [bytes([number % 256]) * (length * rank) for rank in range(group.size)], number
        case "broadcast":
            told = torch.full((choose.randrange(1, 9),), number + group.rank)
            group.broadcast(told)
            assert (told == number).all(), number
        case _:
            group.barrier()


def _start(group: Group, buffer: Tensor, number: int, under_way: list[tuple[Work, Tensor, int]]) -> None:
    buffer.fill_(float(number + group.rank))
    under_way.append((group.sum(buffer), buffer, number))


def _finish(group: Group, under_way: list[tuple[Work, Tensor, int]]) -> None:
    under_way.sort(key=lambda each: each[2] * (group.rank + 3) % 7)  # each member in an order of its own
    for work, buffer, number in under_way:
        work.wait()
        assert (buffer == group.size * number + sum(range(group.size))).all(), (number, buffer)
    under_way.clear()


def _enough(group: Group, begun: float) -> bool:
    """Whether member 0 has spent its time: one clock decides for all."""
    spent = torch.tensor([time.monotonic() - begun > _SECONDS])
    group.broadcast(spent)
    return bool(spent.item())
