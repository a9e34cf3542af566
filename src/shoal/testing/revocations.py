"""Groups that are revoked: what `shoal.comm.group` promises of `revoke`, as stories for any implementation.

    check_revocation(run_ranks, "revoked_in_barrier", size=3, away=0)

In each story one member is away, computing, while the others are in an operation and wait for it. One of them is
revoked by a thread of its own. It raises with the reason that it was given, at once and in everything after; the others
see it leave.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from shoal.comm.group import Group
from shoal.testing.conformance.life import OPERATIONS, raises
from shoal.testing.departures import NOTICED_WITHIN, Operation, agreed_start, large_sum, sleep_until
from shoal.testing.leaks import LeakCheck

REVOKED_WITHIN = 0.05
"""Seconds from `revoke` to the error on a member that waits, on a machine that has time for it."""
WHY = "worker-7 is gone; a new group is made without it"
_AFTER = 0.08  # seconds from the start: whoever waits has begun to
_RETURNS_WITHIN = 0.02  # seconds, for the call of `revoke`
_BACK_AFTER = 0.05  # seconds from the revocation: the one that was away comes back


@dataclass(frozen=True)
class Story:
    """Who is revoked, and what those do that are not away."""

    operation: Callable[[Group], Operation]
    who: Literal["waits", "is away", "all"] = "waits"
    """Whom of them. Where all are, one may see another leave before it is revoked itself, and say so."""

    def revokes(self, rank: int, away: int) -> bool:
        if self.who == "all":
            return True
        return rank == (away if self.who == "is away" else int(away == 0))


def check_revocation(run: Callable[[int, Callable[[Group], Any]], list[Any]], name: str, size: int, away: int) -> float:
    """The story of that name. The longest time in which a revoked member raised, where it waited.

    Raises AssertionError if one did not raise within a second, or not with its reason, or if anything is left behind.
    """
    with LeakCheck():
        values = run(size, partial(live_through, STORIES[name], away))
    for rank, value in enumerate(values):
        assert not (trouble := trouble_of(value)), f"{name}: member {rank} of {size}, {away} away: {trouble}"
    return max(
        [float(value["seconds"]) for rank, value in enumerate(values) if value["revoked"] and rank != away] or [0]
    )


def live_through(story: Story, away: int, group: Group) -> dict[str, Any]:
    """One member's part in `story`; closes the group."""
    operation = story.operation(group)
    start = agreed_start(group)
    moment = start + _AFTER
    revoked = story.revokes(group.rank, away)
    thread = _Revoker(group, moment)
    if revoked:
        thread.start()
    if group.rank == away:
        _compute_until(moment + _BACK_AFTER)
        moment = time.monotonic()
    else:
        sleep_until(start)
    said = raises(partial(_again_and_again, operation, moment + 5 * NOTICED_WITHIN))
    noticed = time.monotonic()
    acts: list[Callable[[Group], object]] = [*OPERATIONS.values(), _allocate]
    later = [raises(partial(act, group)) for act in acts]
    done = time.monotonic()
    if revoked:
        thread.join()
    group.close()
    group.revoke("too late")
    if revoked and group.rank != away:
        moment = thread.called
    return {
        "revoked": revoked,
        "reason": WHY if revoked and story.who != "all" else "",
        "said": said,
        "seconds": noticed - moment,
        "calls": thread.seconds,
        "later": sorted(set(later)),
        "later_seconds": done - noticed,
    }


def trouble_of(value: dict[str, Any]) -> str:
    """What is wrong with how a member fared; empty if nothing is."""
    if not value["said"]:
        return "noticed nothing"
    if value["seconds"] > NOTICED_WITHIN or value["later_seconds"] > NOTICED_WITHIN:
        return f"raised after {value['seconds']:.2f} s, and again in {value['later_seconds']:.2f} s"
    if "" in value["later"]:
        return f"the group is broken ({value['said']}), but not every later operation raised"
    if value["calls"] > _RETURNS_WITHIN + NOTICED_WITHIN / 2:
        return f"revoke took {value['calls']:.3f} s"
    if {value["said"], *value["later"]} != {value["reason"] or value["said"]}:
        return f"raised {value['said']!r}, then {value['later']}, not {value['reason']!r}"
    return ""


class _Revoker(threading.Thread):
    """Revokes the group at `moment`, twice: only the first time counts."""

    def __init__(self, group: Group, moment: float) -> None:
        super().__init__(name="revoker")
        self._group = group
        self._moment = moment
        self.called = 0.0
        self.seconds = 0.0

    def run(self) -> None:
        sleep_until(self._moment)
        self.called = time.monotonic()
        self._group.revoke(WHY)
        self._group.revoke("something else")
        self.seconds = time.monotonic() - self.called


def _compute_until(moment: float) -> None:
    values = torch.ones(64, 64)
    while time.monotonic() < moment:
        values = (values @ values).clamp(0, 1)


def _again_and_again(operation: Operation, until: float) -> None:
    while time.monotonic() < until:
        operation()


def _allocate(group: Group) -> None:
    group.sum(group.buffer(1 << 18, torch.float32)).wait()


def _named(name: str) -> Callable[[Group], Operation]:
    return lambda group: partial(OPERATIONS[name], group)


def _several_sums(group: Group) -> Operation:
    buffers = group.buffer(1 << 20, torch.float32).split(100_000)

    def sums() -> None:
        for work in [group.sum(buffer) for buffer in buffers]:
            work.wait()

    return sums


STORIES: dict[str, Story] = {
    **{f"revoked_in_{name}": Story(_named(name)) for name in OPERATIONS},
    "revoked_in_a_large_sum": Story(large_sum),
    "revoked_in_several_sums": Story(_several_sums),
    "revoked_in_an_allocation": Story(lambda group: partial(_allocate, group)),
    "all_are_revoked": Story(_several_sums, "all"),
    "revoked_while_it_computes": Story(_named("sum"), "is away"),
    "revoked_while_it_computes_and_others_allocate": Story(lambda group: partial(_allocate, group), "is away"),
}
"""By name."""
