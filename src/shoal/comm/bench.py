"""What operations over a group cost, for people and for plans: `shoal bench comm`.

A point is the median over repetitions of the maximum over members: an operation is done when its last member is done,
and the median leaves out what else the machine was doing. All members begin a repetition together. A repetition of
small messages is a batch of operations one after the other, some milliseconds of them, so that neither the clock nor
the moments at which members leave the barrier before it are what is measured; gradients leave a step in the same way.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles

import torch

from shoal.comm.group import CPU, Group
from shoal.core.errors import ConfigError
from shoal.core.linkfit import Point

LEAST_REPETITIONS = 5
MOST_REPETITIONS = 40
_FEWEST = 2
"""Repetitions where there is no time even for LEAST_REPETITIONS: it takes two to have a spread."""
_BATCH_SECONDS = 0.002
_MOST_IN_BATCH = 256
_WARM_UP = 2
"""Operations before the first that counts: pages are touched, connections are opened, and one is timed."""
_SLOW = 1 / 12.5e6
"""Seconds per byte of a link of 100 Mbit/s: what is assumed of one of which only the smallest size is known."""
_CLOCK_SECONDS = 1e-7
"""What is faster than this is not told apart from nothing."""
_STOP, _GO = 0, 1
_WORD = 4
"""Bytes of a float32: what is exchanged is made of them."""

Run = Callable[[], object]
"""One operation, complete when it returns."""


def measure(
    group: Group,
    operation: str,
    sizes: Sequence[int],
    *,
    budget_seconds: float,
    on_point: Callable[[Point], object] | None = None,
    device: torch.device = CPU,
) -> list[Point]:
    """The time of `operation`, one of `OPERATIONS`, for messages of `sizes` bytes, the smallest first.

    All members call this with the same arguments; member 0 decides for all how often each size is repeated, and ends
    it when the budget does not allow the next size: of a slow link the large sizes are missing. The first size is
    always measured. A size is that of the tensor that each member hands in, rounded up to what the operation can take.
    `on_point` is called on member 0 after each size; if it returns something true, there are no more. Every member
    returns the same points. Raises ConfigError for an unknown operation or no sizes, and GroupError as the group does.
    """
    if operation not in OPERATIONS:
        raise ConfigError(f"operation {operation!r} is not known; use {', '.join(OPERATIONS)}")
    if not sizes or min(sizes) < 0:
        raise ConfigError(f"sizes to measure are {list(sizes)}; give at least one, and none below 0")
    rounded = sorted({_rounded(operation, size, group.size) for size in sizes})
    begin = OPERATIONS[operation](group, rounded[-1], device)
    conductor = _Conductor(time.perf_counter() + budget_seconds, len(rounded))
    stopped = False
    for size in rounded:
        goes_on = not stopped and conductor.can_afford(size)
        if _agreed(group, _GO if goes_on else _STOP) == _STOP:
            break
        point = _measure_one(group, begin(size), size, conductor, device)
        conductor.points.append(point)
        if on_point is not None and group.rank == 0:
            stopped = bool(on_point(point))
    return conductor.points


def memcpy_bandwidth(size: int = 16 << 20, repetitions: int = 15) -> float:
    """Bytes per second that one core copies from memory to memory: what an exchange can be compared with."""
    # Ones: pages of zeros that nobody wrote are one page, which is always in the cache.
    source, target = bytearray(b"\x01") * size, bytearray(size)
    as_chars = ctypes.c_char * size
    to, what = as_chars.from_buffer(target), as_chars.from_buffer(source)
    times = []
    for _ in range(_WARM_UP + repetitions):
        begun = time.perf_counter()
        ctypes.memmove(to, what, size)
        times.append(time.perf_counter() - begun)
    return size / median(times[_WARM_UP:])


class _Conductor:
    """Member 0's decisions. Every member has one; what those of the others would decide is not asked."""

    def __init__(self, deadline: float, sizes: int) -> None:
        self._deadline = deadline
        self._sizes = sizes
        self.points: list[Point] = []

    def can_afford(self, size: int) -> bool:
        """Whether a size fits the time that is left, going by those before it."""
        if not self.points:
            return True
        last = self.points[-1]
        expected = last.seconds + (size - last.bytes) * self._seconds_per_byte()
        return (_WARM_UP + LEAST_REPETITIONS) * expected < self._left()

    def batch(self, seconds: float) -> int:
        """How many operations that take so long make one repetition."""
        whole = min(_BATCH_SECONDS, self._share() / LEAST_REPETITIONS)
        return max(1, min(_MOST_IN_BATCH, int(whole / seconds)))

    def repetitions(self, seconds: float) -> int:
        """How many repetitions of so many seconds."""
        least = LEAST_REPETITIONS if LEAST_REPETITIONS * seconds < self._left() else _FEWEST
        return max(least, min(MOST_REPETITIONS, int(self._share() / seconds)))

    def _share(self) -> float:
        """Seconds for one size. Half of what is left: barriers take time too, and more than the trial is common."""
        return max(0.0, self._left()) / 2 / (self._sizes - len(self.points))

    def _seconds_per_byte(self) -> float:
        last = self.points[-1]
        if len(self.points) == 1:
            return min(_SLOW, last.seconds / max(1, last.bytes))
        before = self.points[-2]
        rise = (last.seconds - before.seconds) / (last.bytes - before.bytes)
        return max(0.0, min(rise, last.seconds / last.bytes))

    def _left(self) -> float:
        return self._deadline - time.perf_counter()


def _measure_one(group: Group, run: Run, size: int, conductor: _Conductor, device: torch.device) -> Point:
    run()
    group.barrier()
    trial = max(_CLOCK_SECONDS, _timed(run, 1, device))
    batch = _agreed(group, conductor.batch(trial))
    repetitions = _agreed(group, conductor.repetitions(trial * batch))
    mine = []
    for _ in range(repetitions):
        group.barrier()
        mine.append(_timed(run, batch, device) / batch)
    everyone = group.gather(torch.tensor(mine, dtype=torch.float64))
    slowest = everyone.amax(dim=0).tolist()
    low, middle, high = quantiles(slowest, n=4, method="inclusive")
    return Point(size, middle, low, high, repetitions)


def _timed(run: Run, times: int, device: torch.device) -> float:
    begun = time.perf_counter()
    for _ in range(times):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def _agreed(group: Group, number: int) -> int:
    """Member 0's number."""
    told = torch.tensor([number])
    group.broadcast(told)
    return int(told.item())


# -- the operations ----------------------------------------------------------------------------------------------------

Begin = Callable[[int], Run]
"""Prepares the operation for a size."""


def _sum_in_place(group: Group, largest: int, device: torch.device) -> Begin:
    # One buffer for all sizes: parts of it are as fast, and a group may keep what it has handed out.
    buffer = group.buffer(largest // _WORD, torch.float32, device)

    def begin(size: int) -> Run:
        part = buffer[: size // _WORD]
        return lambda: group.sum(part).wait()

    return begin


def _sum_any(group: Group, largest: int, device: torch.device) -> Begin:
    def begin(size: int) -> Run:
        tensor = _tensor(size, device)
        return lambda: group.sum(tensor).wait()

    return begin


def _broadcast(group: Group, largest: int, device: torch.device) -> Begin:
    def begin(size: int) -> Run:
        tensor = _tensor(size, device)
        return lambda: group.broadcast(tensor)

    return begin


def _gather(group: Group, largest: int, device: torch.device) -> Begin:
    def begin(size: int) -> Run:
        tensor = _tensor(size, device)
        return lambda: group.gather(tensor)

    return begin


def _scatter_sum(group: Group, largest: int, device: torch.device) -> Begin:
    def begin(size: int) -> Run:
        rows = _tensor(size, device).view(group.size, -1)
        return lambda: group.scatter_sum(rows)

    return begin


def _barrier(group: Group, largest: int, device: torch.device) -> Begin:
    return lambda size: group.barrier


def _tensor(size: int, device: torch.device) -> torch.Tensor:
    # Zeros stay what they are however often they are summed. `full` writes them, so that every page is there.
    return torch.full((size // _WORD,), 0.0, device=device)


OPERATIONS: dict[str, Callable[[Group, int, torch.device], Begin]] = {
    "sum": _sum_in_place,
    "sum_any": _sum_any,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter_sum": _scatter_sum,
    "barrier": _barrier,
}
"""`sum` is of a buffer that the group has made, `sum_any` of a tensor from elsewhere. A barrier has the size 0."""


def _rounded(operation: str, size: int, members: int) -> int:
    if operation == "barrier":
        return 0
    unit = _WORD * members if operation == "scatter_sum" else _WORD
    return max(1, -(-size // unit)) * unit
