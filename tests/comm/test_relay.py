"""Relays: sums inside hosts around something else between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.comm.hierarchy import HierarchicalGroup
from shoal.core.errors import GroupError, PayloadError
from shoal.core.traffic import GRADIENT, MEMORY, NETWORK, STATE
from shoal.testing import departures, revocations
from shoal.testing.conformance.life import OPERATIONS, raises
from shoal.testing.conformance.values import all_drawn, assert_sum, digest
from shoal.testing.departures import check_departure
from shoal.testing.lab import Lab, why_no_lab
from shoal.testing.ranks import run_ranks
from shoal.testing.revocations import REVOKED_WITHIN, check_revocation

pytestmark = pytest.mark.skipif(why_no_lab() is not None, reason=f"no lab: {why_no_lab()}")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(hosts=2) as made:
        yield made


def run(lab: Lab, size: int, fn: Callable[[Any], Any], *, mortal: Container[int] = (), deadline: float = 20.0) -> Any:
    return run_ranks(size, fn, deadline, mortal=mortal, lab=lab, collective="hierarchical")


def places(group: HierarchicalGroup, values: Tensor) -> list[Tensor]:
    """The same values in any tensor, in a buffer, and in a part of one."""
    buffer, around = group.buffer(values.numel(), values.dtype), group.buffer(values.numel() + 40, values.dtype)
    made = [values.clone(), buffer, around[17 : 17 + values.numel()]]
    for place in made[1:]:
        place.copy_(values)
    return made


def sum_between(buffer: Tensor) -> Callable[[Group], None]:
    return lambda across: across.sum(buffer).wait()


# -- what it does ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 5])
def test_hosts_are_summed_inside_and_changed_between(lab: Lab, size: int) -> None:
    def fn(group: HierarchicalGroup) -> str:
        sums = []
        for length in (0, 1, 1023, 9001, 700_001):
            for dtype in (torch.float32, torch.bfloat16):
                parts = all_drawn(group, length, dtype, length)
                for buffer in places(group, parts[group.rank]):
                    group.relay(buffer, sum_between(buffer))
                    assert_sum(buffer, parts, (length, dtype))
                    sums.append(buffer.clone())
        return digest(sums)

    assert len(set(run(lab, size, fn))) == 1


def test_only_the_first_member_of_a_host_crosses(lab: Lab) -> None:
    def fn(group: HierarchicalGroup) -> list[Any]:
        crossed: list[Group] = []
        for buffer in places(group, torch.full((50_000,), float(group.rank + 1))):

            def cross(across: Group, buffer: Tensor = buffer) -> None:
                crossed.append(across)
                own = float(buffer[-1])
                buffer.fill_(10 * own + across.rank)

            group.relay(buffer, cross)
            assert buffer.unique().tolist() == [30.0 if group.rank < 2 else 71.0], buffer
        assert (group.across is None) == (not crossed) and all(across is group.across for across in crossed)
        return [len(crossed), None if group.across is None else [group.across.rank, group.across.size]]

    assert run(lab, 4, fn) == [[3, [0, 2]], [0, None], [3, [1, 2]], [0, None]]


def test_every_operation_of_the_hosts_group_can_be_used_in_a_crossing(lab: Lab) -> None:
    def fn(group: HierarchicalGroup) -> list[float]:
        buffer = group.buffer(9000, torch.float32)
        buffer.fill_(1.0 + group.rank)

        def cross(across: Group) -> None:
            mine = buffer[0].item()
            swapped = across.swap(torch.tensor([mine, 10 * mine]))
            gathered = across.gather(buffer[:2])
            lengths = [len(data) for data in across.gather_bytes(b"x" * int(mine))]
            across.barrier()
            across.broadcast(told := torch.tensor([mine]))
            buffer.copy_(torch.tensor([*swapped, *gathered[:, 1], *lengths, told.item(), 0, 0]).repeat(1000))

        group.relay(buffer, cross)
        assert torch.equal(buffer.view(-1, 9), buffer[:9].expand(1000, 9))
        return list(buffer[:7].tolist())

    first, second = [3, 7, 3, 7, 3, 7, 3], [30, 70, 3, 7, 3, 7, 3]
    assert run(lab, 4, fn) == [first, first, second, second]


def test_sums_that_are_under_way_are_finished_before(lab: Lab) -> None:
    def fn(group: HierarchicalGroup) -> str:
        ahead = [group.buffer(300_000, torch.float32).fill_(float(number)) for number in range(1, 4)]
        buffer = group.buffer(100_000, torch.float32).fill_(1.0)
        for _ in range(3):
            works = [group.sum(each) for each in ahead]
            group.relay(buffer, sum_between(buffer))
            behind = group.sum(buffer)
            for work in [*works, behind]:
                work.wait()
        assert (buffer == 16.0**3).all(), buffer
        assert all((each == 64.0 * number).all() for number, each in enumerate(ahead, start=1))
        return digest([*ahead, buffer])

    assert len(set(run(lab, 4, fn))) == 1


def test_the_account_tells_what_was_encoded_from_what_was_not(lab: Lab) -> None:
    def fn(group: HierarchicalGroup) -> list[Any]:
        buffer = group.buffer(100_000, torch.float32)

        def cross(across: Group) -> None:
            group.account.codec = "int8"
            across.swap(torch.zeros(2, 1000, dtype=torch.uint8))
            group.account.codec = "none"

        before = group.account.now()
        group.relay(buffer, cross, STATE)
        grown = group.account.now().since(before)
        assert 0 <= grown.exposed <= grown.exchange + 1e-4
        return [grown.operations, sorted([flow.kind, flow.codec, flow.link, flow.bytes] for flow in grown.flows)]

    # each of the two members adds half of the host's buffers; the second one writes its half, and copies the whole
    led = [1, [[STATE, "none", MEMORY, 800_000]]]
    leads = [1, [[GRADIENT, "int8", NETWORK, 1000], [STATE, "none", MEMORY, 200_000]]]
    assert run(lab, 4, fn) == [leads, led, leads, led]


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("error", [PayloadError, ZeroDivisionError])
def test_an_error_in_a_crossing_breaks_all_hosts(lab: Lab, error: type[Exception], in_place: bool) -> None:
    def fn(group: HierarchicalGroup) -> list[Any]:
        buffer = group.buffer(50_000, torch.float32) if in_place else torch.zeros(50_000)

        def cross(across: Group) -> None:
            across.barrier()
            if across.rank == 1:
                raise error("it is damaged")
            across.swap(torch.zeros(2, 1000))

        begun, said = time.monotonic(), ""
        try:
            group.relay(buffer, cross)
        except (error, GroupError) as raised:
            said = type(raised).__name__
        seconds = time.monotonic() - begun
        assert all(raises(partial(operation, group)) for operation in OPERATIONS.values())
        assert raises(lambda: group.relay(buffer, cross))
        return [said, seconds < 1.0]

    expected = [["GroupError", True], ["GroupError", True], [error.__name__, True], ["GroupError", True]]
    assert run(lab, 4, fn) == expected


def test_a_member_that_sums_while_another_relays_is_told(lab: Lab) -> None:
    def fn(group: HierarchicalGroup) -> str:
        buffer = group.buffer(100_000, torch.float32)
        if group.rank == 1:
            return raises(lambda: group.sum(buffer).wait())
        return raises(lambda: group.relay(buffer, sum_between(buffer)))

    told = run(lab, 4, fn)
    assert all(told) and "a relay of 400000 bytes" in told[0] + told[1]


def relaying(group: Any, floats: int = 1 << 20) -> Callable[[], object]:
    buffer = group.buffer(floats, torch.float32)
    return lambda: group.relay(buffer, sum_between(buffer))


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("goes", [departures.killed_while_away, departures.killed_at_work])
def test_all_others_notice_a_death_in_a_relay(
    lab: Lab, goes: Any, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = 0.5 if goes is departures.killed_at_work else None
    monkeypatch.setitem(departures.STORIES, "relay", departures.Story(goes, departures.waiting, relaying, part))
    check_departure(partial(run, lab, deadline=8.0), "relay", 4, victim)


@pytest.mark.parametrize("away", [0, 1, 2])
def test_whoever_is_revoked_in_a_relay_raises_at_once(lab: Lab, away: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(revocations.STORIES, "relay", revocations.Story(relaying))
    # on a machine that is busy with other things a thread may wait for its turn: once must be quick
    assert any(check_revocation(partial(run, lab), "relay", 4, away) <= REVOKED_WITHIN for _ in range(4))


def test_a_crossing_that_waits_sees_that_a_member_of_its_host_is_revoked(lab: Lab) -> None:
    """The host's first member is between hosts, where others are late; the second one waits for it."""

    def fn(group: HierarchicalGroup) -> list[Any]:
        buffer = group.buffer(1000, torch.float32)
        group.barrier()
        if group.rank in (2, 3):
            time.sleep(0.5)
        begun = time.monotonic()
        if group.rank == 1:
            revocation = revocations._Revoker(group, begun + 0.1)
            revocation.start()
        said = raises(lambda: group.relay(buffer, sum_between(buffer)))
        seconds = time.monotonic() - begun
        if group.rank == 1:
            revocation.join()
        return [said, seconds]

    told = run(lab, 4, fn)
    assert told[1][0] == revocations.WHY and all(said for said, _ in told), told
    assert told[0][1] < 0.5 and max(seconds for _, seconds in told) < 1.1, told
