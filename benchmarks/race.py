"""Groups that take turns inside the same processes: what disturbs the machine disturbs all of them.

A *round* is one burst of every arm, in an order that is drawn anew each time and is equal on all members. Each burst
begins with a barrier, the same for all arms. Ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.comm.choose import make_group
from shoal.comm.group import Group

KB, MB = 1 << 10, 1 << 20
DTYPE = torch.float32
DEADLINE = 3600.0  # seconds, for all sizes of one table

SEED = 4
BURST_SECONDS = 0.02  # about how long a burst lasts: barriers let members go some 0.1 ms apart
MOST_IN_BURST = 1000
MOST_ROUNDS = 60

Operation = Callable[[], None]
Meter = Callable[[], int]


@dataclass(frozen=True)
class Plan:
    """How long to measure one size, in seconds of all arms together, and the fewest rounds whatever that takes."""

    seconds: float
    rounds: int


@dataclass(frozen=True)
class Spread:
    """The middle of some values, and where 5% of them are below and above."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} .. {self.high:.2f})"


def spread(values: Sequence[float]) -> Spread:
    low, middle, high = np.percentile(values, [5, 50, 95])
    return Spread(float(middle), float(low), float(high))


def ratios(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Of the values of the same round."""
    return spread([one / other for one, other in zip(above, below, strict=True)])


def race(
    referee: Group, arms: Mapping[str, Operation], plan: Plan, meters: Mapping[str, Meter] | None = None
) -> dict[str, dict[str, list[float]]]:
    """By arm: in each round, this member's seconds for one operation, and by how much an operation moved each meter.

    All members call this with the same arms. `referee` has the barriers; the first round does not count.
    """
    bursts, rounds = _settle(referee, arms, plan)
    meters = meters or {}
    found: dict[str, dict[str, list[float]]] = {name: {key: [] for key in ("seconds", *meters)} for name in arms}
    shuffle = random.Random(SEED)
    for number in range(rounds + 1):
        for name in shuffle.sample(list(arms), len(arms)):
            values = _burst(referee, arms[name], bursts[name], meters)
            if number:
                for key, value in values.items():
                    found[name][key].append(value)
    return found


def slowest(members: Sequence[Mapping[str, Mapping[str, list[float]]]]) -> dict[str, list[float]]:
    """By arm: the seconds of each round on the member that took longest."""
    arms = members[0]
    return {name: np.max([member[name]["seconds"] for member in members], axis=0).tolist() for name in arms}


def say(member: Group, text: str) -> None:
    if member.rank == 0:
        print(text, file=sys.stderr, flush=True)


def _settle(referee: Group, arms: Mapping[str, Operation], plan: Plan) -> tuple[dict[str, int], int]:
    """Operations in a burst of each arm, and rounds, as member 0 finds them by trying."""
    first = {name: _tried(referee, arm) for name, arm in arms.items()}
    wanted = [max(1, min(MOST_IN_BURST, math.ceil(BURST_SECONDS / seconds))) for seconds in first.values()]
    total = sum(count * seconds for count, seconds in zip(wanted, first.values(), strict=True))
    rounds = max(plan.rounds, min(MOST_ROUNDS, int(plan.seconds / total)))
    agreed = torch.tensor([*wanted, rounds])
    referee.broadcast(agreed)
    *counts, rounds = agreed.tolist()
    return dict(zip(arms, counts, strict=True)), rounds


def _tried(referee: Group, arm: Operation) -> float:
    arm()  # memory that was never touched, connections that were never used
    return float(np.median([_burst(referee, arm, 1, {})["seconds"] for _ in range(3)]))


def _burst(referee: Group, arm: Operation, count: int, meters: Mapping[str, Meter]) -> dict[str, float]:
    before = {name: meter() for name, meter in meters.items()}
    referee.barrier()
    begun = time.perf_counter()
    for _ in range(count):
        arm()
    seconds = max(time.perf_counter() - begun, 1e-9)  # a member may have no part in an arm
    if meters:
        referee.barrier()  # what this member's host has sent includes what others of it did
    return {"seconds": seconds / count, **{name: (meter() - before[name]) / count for name, meter in meters.items()}}


# ---- groups and sizes


@contextmanager
def another_group(first: Group, collective: str, rank: int, host: str, folder: Path) -> Iterator[Group]:
    """Another group of the processes of `first`, in which this one has `rank`; `folder` is for it alone."""
    distributed: Any = import_module("torch.distributed")
    store = distributed.FileStore(str(folder / "store"), first.size)
    group = make_group(
        store,
        rank,
        first.size,
        torch.device("cpu"),
        timeout=timedelta(seconds=2 * DEADLINE),
        host=host,
        collective=collective,
        run="-".join(folder.parts[-2:]),
    )
    try:
        if group.collective != collective:
            raise RuntimeError(
                f"asked for collective={collective!r} and got {group.collective!r}, because {group.reason}; "
                "nothing was measured"
            )
        yield group
        first.barrier()
    finally:
        group.close()


def check_sum(group: Group, part: Tensor) -> None:
    """Sum something whose result is known, and leave zeros."""
    part.fill_(group.rank + 1.0)
    group.barrier()
    group.sum(part).wait()
    low, high = torch.aminmax(part)
    wanted = group.size * (group.size + 1) / 2
    if low.item() != wanted or high.item() != wanted:
        raise RuntimeError(f"{group.collective} summed {part.nbytes} bytes to {low} .. {high} instead of {wanted}")
    group.barrier()
    part.zero_()


def named(size: int) -> str:
    for unit, name in ((MB, "MB"), (KB, "KB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def size_of(text: str) -> int:
    number, unit = text.strip().upper().rstrip("B").strip(), 1
    if number.endswith(("K", "M")):
        number, unit = number[:-1].strip(), KB if number.endswith("K") else MB
    if not number.isdecimal() or not int(number) or int(number) * unit % DTYPE.itemsize:
        raise argparse.ArgumentTypeError(f"got {text!r}; a size is a multiple of {DTYPE.itemsize} bytes, as 16KB")
    return int(number) * unit
