"""Every group there is, through the suite of `shoal.testing`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Container, Iterator
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.comm.group import Done, Group, SoloGroup, Work
from shoal.comm.shm import shared
from shoal.testing.conformance.life import OPERATIONS, raises
from shoal.testing.departures import STORIES, check_departure
from shoal.testing.groups import CASES, CaseFailed, check_group
from shoal.testing.lab import Lab, why_no_lab
from shoal.testing.ranks import RanksFailed, run_ranks
from shoal.testing.revocations import REVOKED_WITHIN, WHY, check_revocation
from shoal.testing.revocations import STORIES as REVOCATIONS

LEFT_OUT = {
    "gloo": set[str](),
    "hierarchical": set[str](),
    "shm": set[str](),
    "shm of two hubs": set[str](),
}
"""By what the members are: of the last kind, a third one passes tokens to and from two others and to no more."""


class Place:
    """Runs members with one collective; hierarchical ones on two hosts of a lab."""

    def __init__(self, kind: str, lab: Lab | None = None) -> None:
        self.kind = kind
        self.collective = kind.partition(" ")[0]
        self.lab = lab

    def run(
        self, size: int, fn: Callable[[Group], Any], *, mortal: Container[int] = (), deadline: float = 30.0
    ) -> list[Any]:
        def member(group: Group) -> Any:
            assert group.collective == self.collective, group.reason
            return fn(group)

        return run_ranks(size, member, deadline, mortal=mortal, collective=self.collective, lab=self.lab)


@pytest.fixture(scope="module", params=LEFT_OUT)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param != "hierarchical":
        with pytest.MonkeyPatch.context() as patch:
            if "two hubs" in request.param:
                patch.setattr(shared, "HUBS", 2)
            yield Place(request.param)
        return
    if reason := why_no_lab():
        pytest.skip(f"hierarchical groups need two hosts: {reason}")
    with Lab(2) as lab:
        yield Place(request.param, lab)


@pytest.mark.parametrize("size", [2, 3])
def test_a_group_keeps_its_contract(place: Place, size: int) -> None:
    check_group(place.run, [size], leave_out=LEFT_OUT[place.kind])


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 5, 8])
def test_a_larger_group_keeps_its_contract(place: Place, size: int) -> None:
    check_group(lambda members, fn: place.run(members, fn, deadline=100.0), [size], leave_out=LEFT_OUT[place.kind])


def test_a_group_of_one_keeps_the_contract() -> None:
    """But that it sends nothing, and has nothing to leave."""
    check_group(lambda size, fn: [fn(SoloGroup()) for _ in range(size)], [1], leave_out={"traffic", "closing"})


@pytest.mark.parametrize("name", STORIES)
def test_all_others_notice_a_departure(place: Place, name: str) -> None:
    # the first member leads its host, and the last one is led
    victim = 2 * (list(STORIES).index(name) % 2)
    check_departure(lambda size, fn, *, mortal: place.run(size, fn, mortal=mortal, deadline=8.0), name, 3, victim)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "victim"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (4, 0), (4, 2), (4, 3)])
@pytest.mark.parametrize("name", STORIES)
def test_whoever_it_is_that_departs(place: Place, name: str, size: int, victim: int) -> None:
    check_departure(lambda size, fn, *, mortal: place.run(size, fn, mortal=mortal), name, size, victim)


@pytest.mark.parametrize("name", REVOCATIONS)
def test_whoever_is_revoked_raises_at_once_and_the_others_see_it_leave(place: Place, name: str) -> None:
    away = 2 * (list(REVOCATIONS).index(name) % 2)

    def run(size: int, fn: Callable[[Group], Any]) -> list[Any]:
        return place.run(size, fn, deadline=8.0)

    # on a machine that is busy with other things a thread may wait for its turn: once must be quick
    assert any(check_revocation(run, name, 3, away) <= REVOKED_WITHIN for _ in range(4))


def test_a_group_that_was_revoked_before_any_operation(place: Place) -> None:
    def fn(group: Group) -> list[str]:
        group.revoke("not wanted")
        said = [raises(partial(operation, group)) for operation in OPERATIONS.values()]
        said.append(raises(lambda: group.buffer(1000, torch.float32)))
        group.close()
        return said

    assert place.run(3, fn) == [["not wanted"] * (len(OPERATIONS) + 1)] * 3


def test_a_group_of_one_can_be_revoked() -> None:
    group = SoloGroup()
    group.revoke("not wanted")
    group.revoke("something else")
    assert {raises(partial(operation, group)) for operation in OPERATIONS.values()} == {"not wanted"}
    assert raises(lambda: group.buffer(1000, torch.float32)) == "not wanted"


@pytest.mark.parametrize(
    ("fared", "trouble"),
    [
        ({"said": ""}, "noticed nothing"),
        ({"seconds": 1.5}, "raised after 1.50 s"),
        ({"later": ["", WHY]}, ".*but not every later operation raised"),
        ({"calls": 2.0}, "revoke took 2.000 s"),
        ({"said": "it broke"}, "raised 'it broke', then"),
    ],
)
def test_a_revocation_that_goes_wrong_is_found(fared: dict[str, Any], trouble: str) -> None:
    well = {
        "revoked": True,
        "reason": WHY,
        "said": WHY,
        "seconds": 0.1,
        "calls": 0.0,
        "later": [WHY],
        "later_seconds": 0.0,
    }
    with pytest.raises(AssertionError, match=f"member 1 of 2, 0 away: {trouble}"):
        check_revocation(lambda size, fn: [well, well | fared], "all_are_revoked", 2, 0)
    assert check_revocation(lambda size, fn: [well, well], "all_are_revoked", 2, 0) == 0.1


# -- the suite itself --------------------------------------------------------------------------------------------------


def adds_nothing(group: Any) -> None:
    group.sum = lambda buffer, kind="": Done()


def is_not_repeatable(group: Any) -> None:
    calls, right = count(), group.sum

    def sum_after_a_touch(buffer: Tensor, kind: str = "") -> Any:
        if next(calls) % 5 == 4 and buffer.is_floating_point():
            buffer.view(-1)[-1:].nextafter_(torch.tensor(9e9, dtype=buffer.dtype))
        return right(buffer)

    group.sum = sum_after_a_touch


def differs_on_one_member(group: Any) -> None:
    right = group.sum

    def sum_and_touch(buffer: Tensor, kind: str = "") -> Work:
        right(buffer).wait()
        if group.rank == 1 and buffer.dtype == torch.float32:
            buffer.view(-1)[-1:].nextafter_(torch.tensor(9e9))
        return Done()

    group.sum = sum_and_touch


def takes_every_kind_for_control(group: Any) -> None:
    right = group.sum
    group.sum = lambda buffer, kind="": right(buffer, "control")


def gathers_into_one_place(group: Any) -> None:
    right, places = group.gather, dict[Any, Tensor]()

    def gather(buffer: Tensor, kind: str = "") -> Tensor:
        place = places.setdefault((buffer.shape, buffer.dtype), right(buffer))
        return place.copy_(right(buffer))

    group.gather = gather


def forgets_bytes(group: Any) -> None:
    right = group.gather_bytes
    group.gather_bytes = lambda data, *rest: [part[:4096] for part in right(data, *rest)]


def scatters_the_first_row(group: Any) -> None:
    right = group.scatter_sum
    group.scatter_sum = lambda buffer, kind="": right(buffer[:1].expand_as(buffer).contiguous())


def swaps_the_wrong_rows(group: Any) -> None:
    right = group.swap
    group.swap = lambda rows, kind="": right(rows.flip(0).contiguous())


def takes_every_codec_for_none(group: Any) -> None:
    right = group.account.sent
    group.account.sent = lambda kind, link, size, messages: right(kind, link, size, messages, "none")


def waits_without_signals(group: Any) -> None:
    right = group.barrier

    def barrier() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        right()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])

    group.barrier = barrier


def does_nothing(name: str) -> Callable[[Any], None]:
    return lambda group: setattr(group, name, lambda *_: None)


MUTANTS: list[tuple[Callable[[Any], None], str]] = [
    (adds_nothing, "sum_of_every_dtype"),
    (adds_nothing, "sum_of_parts_of_a_buffer"),
    (adds_nothing, "sum_of_views"),
    (adds_nothing, "sums_under_way_at_once"),
    (adds_nothing, "other_operations_while_sums_are_under_way"),
    (adds_nothing, "not_finite_values"),
    (adds_nothing, "large_sum"),
    (adds_nothing, "buffers_made_again_and_again"),
    (adds_nothing, "many_tiny_operations"),
    (is_not_repeatable, "the_same_values_give_the_same_bits"),
    (differs_on_one_member, "sum_of_every_length"),
    (takes_every_kind_for_control, "traffic"),
    (gathers_into_one_place, "results_belong_to_the_caller"),
    (forgets_bytes, "gather_bytes"),
    (scatters_the_first_row, "scatter_sum"),
    (swaps_the_wrong_rows, "swap"),
    (takes_every_codec_for_none, "codecs"),
    (waits_without_signals, "signals"),
    (does_nothing("broadcast"), "broadcast"),
    (does_nothing("barrier"), "barrier_waits_for_the_last"),
    (does_nothing("release"), "released_buffers"),
    (does_nothing("close"), "closing"),
]


@pytest.mark.parametrize(("spoil", "case"), MUTANTS, ids=[case for _, case in MUTANTS])
def test_a_group_that_breaks_its_contract_is_caught(spoil: Callable[[Any], None], case: str) -> None:
    def run(size: int, fn: Callable[[Group], Any]) -> list[Any]:
        def member(group: Group) -> Any:
            spoil(group)
            return fn(group)

        return run_ranks(size, member, collective="shm")

    with pytest.raises((CaseFailed, RanksFailed), match=f"{case}: (member|of 3 members)"):
        check_group(run, [3], leave_out=CASES.keys() - {case})


class Wrong(SoloGroup):
    """A group of one that pretends to be a member of two, and adds up nothing."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank  # type: ignore[misc]
        self.size = 2  # type: ignore[misc]
        self.hosts = (0, 0)  # type: ignore[assignment]


def test_members_that_end_with_different_bits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "gather", lambda group: f"bits of {group.rank}")
    with pytest.raises(CaseFailed, match="gather: of 2 members, 0 has 'bits of 0' and 1 has 'bits of 1'"):
        leave_out = CASES.keys() - {"gather"}
        check_group(lambda size, fn: [fn(Wrong(rank)) for rank in range(size)], [2], leave_out=leave_out)


@pytest.mark.parametrize(
    ("fared", "trouble"),
    [
        ({"said": ""}, "noticed nothing in 0.1 s"),
        ({"seconds": 1.5}, "raised after 1.50 s, not within 1 s"),
        ({"seconds": -0.5}, "raised 0.500 s before the departure"),
        ({"silent": ["gather"]}, "gather did not raise after that"),
        ({"later": 3.0}, "later operations took 3.00 s"),
    ],
)
def test_a_survivor_that_fares_badly_is_found(
    fared: dict[str, Any], trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    well = {"said": "it broke", "seconds": 0.1, "silent": [], "later": 0.0}
    values = [None, well, well | fared]
    with pytest.raises(AssertionError, match=f"member 2 of 3, without 0: .*{trouble}"):
        check_departure(lambda size, fn, *, mortal: values, "closes_between_operations", 3, 0)
    assert check_departure(lambda size, fn, *, mortal: [None, well, well], "closes_between_operations", 3, 0) == 0.1
