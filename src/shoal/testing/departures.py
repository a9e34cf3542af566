"""Members that go away: what `shoal.comm.group` promises the others, as stories for any implementation.

    check_departure(run_ranks, "killed_in_a_large_sum_at_35", size=3, victim=0)

Whoever stays must raise `GroupError` within a second, in whatever it waits for, and in everything after. All members
know the moment of the departure: they agree on it by the clock of the machine, which they must share.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from shoal.comm.group import Group
from shoal.testing.conformance.life import OPERATIONS, raises
from shoal.testing.leaks import LeakCheck

NOTICED_WITHIN = 1.0
"""Seconds from a departure to the error, and for all later operations together."""
_START_IN = 0.03  # seconds: everybody has left the operation that agrees on the start
_GIVE_UP_AFTER = 10.0  # seconds after the departure; it is a failure long before
_EARLY = -0.001  # seconds: an error before the departure has another cause
_LARGE = 4 << 20  # of float32: 16 MB

Operation = Callable[[], object]


class Runner(Protocol):
    """`fn(group)` on each of `size` members; the values in order of rank. Of those in `mortal` that died: None."""

    def __call__(self, size: int, fn: Callable[[Group], Any], *, mortal: Container[int]) -> list[Any]: ...


@dataclass(frozen=True)
class Plan:
    """When to start and when the victim goes, by `time.monotonic`; what the others do until they notice."""

    start: float
    departure: float
    operation: Operation


@dataclass(frozen=True)
class Story:
    """How one member goes, and what the others are doing meanwhile."""

    goes: Callable[[Group, Plan], None]
    stays: Callable[[Plan], float]
    """Returns the moment from which the second counts; raises nothing."""
    operation: Callable[[Group], Operation]
    """What is done when it happens. Called once on every member; it may prepare, but not with the group."""
    part: float | None = None
    """Goes after this part of the time that `operation` takes, which is measured first; None: after 0.1 s."""


def check_departure(run: Runner, name: str, size: int, victim: int) -> float:
    """The story of that name. The longest time in which a member noticed; raises AssertionError if one did not.

    Nothing may be left behind: no process, no shared memory.
    """
    with LeakCheck():
        values = run(size, partial(live_through, STORIES[name], victim), mortal=[victim])
    for rank, value in enumerate(values):
        if rank != victim:
            assert not (trouble := trouble_of(value)), f"{name}: member {rank} of {size}, without {victim}: {trouble}"
    return max(float(value["seconds"]) for rank, value in enumerate(values) if rank != victim)


def live_through(story: Story, victim: int, group: Group) -> dict[str, Any]:
    """One member's part in `story`. What a survivor met; of the victim, if it comes back, nothing."""
    operation = story.operation(group)
    spent = 0.1 if story.part is None else story.part * duration(group, operation)
    start = agreed_start(group)
    plan = Plan(start, start + spent, operation)
    if group.rank == victim:
        story.goes(group, plan)
        return {}
    return survive(group, plan, story.stays)


def survive(group: Group, plan: Plan, stays: Callable[[Plan], float]) -> dict[str, Any]:
    """What a member met that stayed: `trouble_of` judges it. Closes the group."""
    counts_from = stays(plan)
    said = raises(partial(_again_and_again, plan))
    noticed = time.monotonic()
    later = {name: raises(partial(operation, group)) for name, operation in OPERATIONS.items()}
    done = time.monotonic()
    group.close()
    silent = [name for name, error in later.items() if not error]
    return {"said": said, "seconds": noticed - counts_from, "silent": silent, "later": done - noticed}


def trouble_of(value: dict[str, Any], within: float = NOTICED_WITHIN) -> str:
    """What is wrong with how a survivor fared that had to notice `within` seconds; empty if nothing is."""
    if not value["said"]:
        return f"noticed nothing in {value['seconds']:.1f} s"
    if value["seconds"] < _EARLY:
        return f"raised {-value['seconds']:.3f} s before the departure: {value['said']}"
    if value["seconds"] > within:
        return f"raised after {value['seconds']:.2f} s, not within {within:g} s: {value['said']}"
    if value["silent"]:
        return f"the group is broken ({value['said']}), but {', '.join(value['silent'])} did not raise after that"
    if value["later"] > NOTICED_WITHIN:
        return f"later operations took {value['later']:.2f} s to raise, not {NOTICED_WITHIN:g} s"
    return ""


def duration(group: Group, operation: Operation) -> float:
    """How long `operation` takes the slowest member; the second time, when all is warm."""
    for _ in range(2):
        group.barrier()
        begun = time.monotonic()
        operation()
        spent = time.monotonic() - begun
    return float(group.gather(torch.tensor([spent], dtype=torch.float64)).max())


def agreed_start(group: Group) -> float:
    """A moment that all members know and none has reached, by `time.monotonic`."""
    arrivals = group.gather(torch.tensor([time.monotonic()], dtype=torch.float64))
    return float(arrivals.max()) + _START_IN


def sleep_until(moment: float) -> None:
    while (left := moment - time.monotonic()) > 0:
        time.sleep(left)


def _again_and_again(plan: Plan) -> None:
    while time.monotonic() < plan.departure + _GIVE_UP_AFTER:
        plan.operation()


# -- how a member goes -------------------------------------------------------------------------------------------------


class _When(ctypes.Structure):
    _fields_ = (("again", ctypes.c_long * 2), ("at", ctypes.c_long * 2))


class _Event(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("_", ctypes.c_int * 12),
    )


def kill_at(moment: float) -> None:
    """Have the kernel send SIGKILL to this process at `moment` of `time.monotonic`, whatever it is doing then."""
    libc, absolute, timer = ctypes.CDLL(None, use_errno=True), 1, ctypes.c_void_p()
    event = _Event(None, signal.SIGKILL, 0)
    when = _When((0, 0), (int(moment), int(moment % 1 * 1e9)))
    if libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) or libc.timer_settime(
        timer, absolute, ctypes.byref(when), None
    ):
        raise OSError(ctypes.get_errno(), "no timer could be set")


def killed_while_away(group: Group, plan: Plan) -> None:
    """The others wait for it in vain."""
    kill_at(plan.departure)
    signal.pause()


def killed_at_work(group: Group, plan: Plan) -> None:
    """It takes part in what the others do, and is killed at it."""
    kill_at(plan.departure)
    sleep_until(plan.start)
    while True:
        plan.operation()


def exits(group: Group, plan: Plan) -> None:
    """With a sum begun, as after an exception that nobody caught."""
    sleep_until(plan.departure)
    group.sum(torch.zeros(_LARGE))
    os._exit(1)


def raises_and_closes(group: Group, plan: Plan) -> None:
    sleep_until(plan.departure)
    try:
        raise LookupError("the member's own code")
    except LookupError:
        group.close()


def closes(group: Group, plan: Plan) -> None:
    sleep_until(plan.departure)
    group.close()


# -- what the others do ------------------------------------------------------------------------------------------------


def waiting(plan: Plan) -> float:
    """They are in the operation when it happens."""
    sleep_until(plan.start)
    return plan.departure


def elsewhere(plan: Plan) -> float:
    """They have something else to do, and come to the operation when it has happened."""
    sleep_until(plan.departure + 0.05)
    return time.monotonic()


# -- operations --------------------------------------------------------------------------------------------------------


def _small_sum(group: Group) -> Operation:
    buffer = torch.ones(1000)
    return lambda: group.sum(buffer).wait()


def large_sum(group: Group, floats: int = _LARGE) -> Operation:
    buffer = group.buffer(floats, torch.float32)
    return lambda: group.sum(buffer).wait()


def _large_sum_of_a_tensor(group: Group) -> Operation:
    buffer = torch.zeros(_LARGE)
    return lambda: group.sum(buffer).wait()


def _large_swap(group: Group) -> Operation:
    rows = torch.zeros(group.size, _LARGE, dtype=torch.uint8)
    return lambda: group.swap(rows)


def _several_sums(group: Group) -> Operation:
    buffers = group.buffer(1 << 20, torch.float32).split(100_000)

    def sums() -> None:
        for work in [group.sum(buffer) for buffer in buffers]:
            work.wait()

    return sums


def _named(name: str) -> Callable[[Group], Operation]:
    return lambda group: partial(OPERATIONS[name], group)


def _allocation(group: Group) -> Operation:
    """A buffer and a first use of it: making it alone need not meet the others."""

    def allocate() -> None:
        group.sum(group.buffer(1 << 20, torch.float32)).wait()

    return allocate


STORIES: dict[str, Story] = {
    "killed_while_the_others_sum": Story(killed_while_away, waiting, _small_sum),
    "killed_while_the_others_sum_much": Story(killed_while_away, waiting, large_sum),
    "killed_while_several_sums_are_under_way": Story(killed_while_away, waiting, _several_sums),
    **{
        f"killed_while_the_others_{name}": Story(killed_while_away, waiting, _named(name))
        for name in ("scatter_sum", "swap", "gather", "gather_bytes", "broadcast", "barrier")
    },
    **{
        f"killed_in_a_large_sum_at_{percent}": Story(killed_at_work, waiting, large_sum, percent / 100)
        for percent in (5, 35, 65, 95)
    },
    "killed_in_a_large_sum_of_any_tensor": Story(killed_at_work, waiting, _large_sum_of_a_tensor, 0.5),
    "killed_in_a_large_swap": Story(killed_at_work, waiting, _large_swap, 0.5),
    "killed_in_several_sums": Story(killed_at_work, waiting, _several_sums, 0.5),
    "killed_among_small_sums": Story(killed_at_work, waiting, _small_sum),
    "killed_among_allocations": Story(killed_at_work, waiting, _allocation),
    "killed_between_operations": Story(killed_while_away, elsewhere, _small_sum),
    "exits_with_a_sum_begun": Story(exits, waiting, _large_sum_of_a_tensor),
    "raises_and_closes": Story(raises_and_closes, waiting, _small_sum),
    "closes_while_the_others_wait": Story(closes, waiting, _small_sum),
    "closes_between_operations": Story(closes, elsewhere, _small_sum),
}
"""By name."""
