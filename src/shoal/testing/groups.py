"""The conformance suite of groups: what `shoal.comm.group` promises, as cases for any implementation.

    check_group(run_ranks)                      # every case, with 2, 3 and 4 members
    check_group(run_ranks, sizes=[5], leave_out={"signals"})

A case runs on every member. It asserts what one member can see, and returns what must be equal on all of them: often a
digest of bits. Members that go away are the subject of `shoal.testing.departures`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

from shoal.comm.group import Group
from shoal.testing.conformance import accounts, life, moves, sums, tiny


class CaseFailed(AssertionError):
    """A case did not hold; the message begins with its name."""


def check_group(
    run: Callable[[int, Callable[[Group], Any]], list[Any]],
    sizes: Iterable[int] = (2, 3, 4),
    *,
    leave_out: Collection[str] = (),
) -> None:
    """Put groups through all cases but those in `leave_out`. Raises `CaseFailed`, or what `run` raises for a case.

    `run(size, fn)` calls `fn(group)` once on each of `size` members, in processes of their own, and returns the values
    in order of rank. `fn` needs the main thread of a process without other Python threads. It closes the group.
    """
    unknown = sorted(set(leave_out) - set(CASES))
    if unknown:
        raise ValueError(f"there is no case {unknown[0]!r} to leave out; there are {', '.join(CASES)}")
    names = [name for name in CASES if name not in leave_out]
    for size in sizes:
        answers = run(size, partial(_run_cases, names))
        for name in names:
            first, *others = [answer[name] for answer in answers]
            for rank, other in enumerate(others, start=1):
                if other != first:
                    raise CaseFailed(f"{name}: of {size} members, 0 has {first!r} and {rank} has {other!r}")


def _run_cases(names: Iterable[str], group: Group) -> dict[str, Any]:
    answers = {}
    for name in names:
        try:
            answers[name] = CASES[name](group)
        except Exception as error:
            raise CaseFailed(f"{name}: member {group.rank} of {group.size}: {error!r}") from error
    return answers


CASES: dict[str, Callable[[Group], Any]] = {
    case.__name__: case
    for case in (
        accounts.attributes,
        sums.sum_of_every_dtype,
        sums.sum_of_every_length,
        sums.sum_of_parts_of_a_buffer,
        sums.sum_of_views,
        sums.sums_under_way_at_once,
        sums.other_operations_while_sums_are_under_way,
        sums.the_same_values_give_the_same_bits,
        sums.not_finite_values,
        sums.large_sum,
        sums.buffers_made_again_and_again,
        moves.scatter_sum,
        moves.swap,
        moves.moves_under_way_at_once,
        moves.gather,
        moves.gather_bytes,
        moves.broadcast,
        moves.results_belong_to_the_caller,
        moves.barrier_waits_for_the_last,
        tiny.many_tiny_operations,
        accounts.traffic,
        accounts.codecs,
        life.signals,
        life.released_buffers,
        life.closing,
    )
}
"""By name, in the order in which they run."""
