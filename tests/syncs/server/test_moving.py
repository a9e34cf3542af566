"""How shards get from one placement to another."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.syncs.server.messages import Holder
from shoal.syncs.server.moving import aim, back, lacks, slowest, toward
from shoal.syncs.server.placing import place

SIZES = [100] * 12


def loads(holders: list[Holder], servers: list[int]) -> tuple[list[int], list[int]]:
    """Shards that each server holds, and that it mirrors."""
    held = Counter(holder.server for holder in holders)
    mirrored = Counter(holder.mirror for holder in holders)
    return [held[server] for server in servers], [mirrored[server] for server in servers]


@pytest.mark.parametrize("mirrors", [True, False])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 4), (1, 2), (4, 3), (2, 6)])
def test_aim_is_even(before: int, after: int, mirrors: bool) -> None:
    servers = list(range(after))
    now = place(SIZES, list(range(before)), mirrors=mirrors)
    goal = aim(now, SIZES, servers, mirrors=mirrors)
    held, mirrored = loads(goal, servers)
    assert held == [12 // after] * after
    assert not mirrors or mirrored == [12 // after] * after
    assert all(holder.server != holder.mirror for holder in goal)


def test_aim_moves_no_more_than_it_must() -> None:
    now = place(SIZES, [0, 1], mirrors=False)
    goal = aim(now, SIZES, [0, 1, 2], mirrors=False)
    assert sum(old.server != new.server for old, new in zip(now, goal, strict=True)) == 4
    assert aim(goal, SIZES, [0, 1, 2], mirrors=False) == goal
    drained = aim(goal, SIZES, [0, 1], mirrors=False)
    assert sum(old.server != new.server for old, new in zip(goal, drained, strict=True)) == 4


def test_aim_goes_by_speed() -> None:
    goal = aim(place(SIZES, [0, 1], mirrors=False), SIZES, [0, 1], mirrors=False, speeds={0: 1.5, 1: 0.5})
    assert loads(goal, [0, 1])[0] == [9, 3]
    assert slowest(goal, SIZES, {0: 1.5, 1: 0.5}) == 600


@given(st.data(), st.booleans(), st.booleans())
def test_the_way_ends_at_the_goal_and_no_copy_is_given_up(data: st.DataObject, mirrors: bool, arrival: bool) -> None:
    """Whoever is to hold a shard has it, and with mirrors another server has it at every moment too."""
    numbers = st.sets(st.integers(0, 6), min_size=2 if mirrors else 1, max_size=5)
    before, after = sorted(data.draw(numbers)), sorted(data.draw(numbers))
    sizes = data.draw(st.lists(st.integers(1, 1000), min_size=1, max_size=12))
    now = place(sizes, before, mirrors=mirrors)
    goal = aim(now, sizes, after, mirrors=mirrors)
    assert {one for holder in goal for one in (holder.server, holder.mirror)} <= {*after, None}
    for holder, end in zip(now, goal, strict=True):
        have = {holder.server, holder.mirror} - {None}
        for _ in range(8):
            then = toward(holder, end)
            if then == holder:
                break
            assert then.server in have, "a holder without the shard"
            there = {then.server, then.mirror, then.spare} - {None}
            whole = have & there
            if lacks(holder, then, arrival=arrival):
                whole -= {then.mirror}
            else:
                assert then.mirror is None or then.mirror in have
            if mirrors and not arrival:
                assert len(whole) >= 2, "one copy only"
                assert back(then, mirrors=True).mirror in whole, "what is gone back to is not whole"
            assert whole
            holder, have = then, there
        assert holder == end
