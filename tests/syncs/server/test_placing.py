"""Who holds what: even loads, mirrors elsewhere, and little that moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.syncs.server.messages import Holder
from shoal.syncs.server.placing import even, fill, lost_for_good, place, replace

sizes = st.lists(st.integers(1, 1000), min_size=1, max_size=14)
counts = st.integers(1, 6)


def load(holders: Sequence[Holder], by_shard: Sequence[int]) -> Counter[int]:
    total: Counter[int] = Counter()
    for holder, size in zip(holders, by_shard, strict=True):
        total[holder.server] += size
    return total


def worst(holders: Sequence[Holder], by_shard: Sequence[int], speeds: Mapping[int, float]) -> float:
    return max(amount / speeds[server] for server, amount in load(holders, by_shard).items())


@given(sizes, counts, st.booleans())
def test_all_is_placed_in_ranges(by_shard: list[int], count: int, mirrors: bool) -> None:
    servers = list(range(10, 10 + count))
    holders = place(by_shard, servers, mirrors=mirrors)
    owners = [holder.server for holder in holders]
    assert owners == sorted(owners) and set(owners) <= set(servers)
    assert max(load(holders, by_shard).values()) <= sum(by_shard) / count + max(by_shard)
    for holder in holders:
        assert holder.mirror != holder.server
        assert (holder.mirror is not None) == (mirrors and count > 1)


def test_equal_shards_are_shared_equally() -> None:
    for count in (1, 2, 3, 4, 6, 12):
        owners = Counter(holder.server for holder in place([64] * 12, range(count), mirrors=False))
        assert set(owners.values()) == {12 // count}


def test_more_servers_than_shards() -> None:
    assert Counter(holder.server for holder in place([5, 5], range(4), mirrors=False)).most_common(1)[0][1] == 1


def test_a_faster_server_holds_more() -> None:
    holders = place([10] * 12, [0, 1], mirrors=True, speeds={0: 3.0, 1: 1.0})
    assert load(holders, [10] * 12) == {0: 90, 1: 30}


def test_mirrors_of_one_server_are_spread() -> None:
    holders = place([10] * 12, range(4), mirrors=True)
    for server in range(4):
        mirrors = [holder.mirror for holder in holders if holder.server == server]
        assert len(set(mirrors)) == 3
    assert set(Counter(holder.mirror for holder in holders).values()) == {3}


def test_nobody_to_place_on() -> None:
    with pytest.raises(ValueError, match="without a server"):
        place([1], [], mirrors=False)


def test_mirrors_take_over() -> None:
    holders = [Holder(0, 1), Holder(1, 0), Holder(1, 2), Holder(2, 1)]
    assert replace(holders, 1) == [Holder(0), Holder(0), Holder(2), Holder(2)]
    assert lost_for_good(holders, 1) == []


def test_what_nobody_has_is_told() -> None:
    holders = [Holder(0, 1), Holder(1), Holder(1, 0)]
    assert lost_for_good(holders, 1) == [1]
    with pytest.raises(LookupError, match="server 1 had the only copy of shards 1"):
        replace(holders, 1)


@given(sizes, st.integers(2, 5), st.data())
def test_a_server_that_comes_back_is_used_again(by_shard: list[int], count: int, data: st.DataObject) -> None:
    servers = list(range(count))
    holders = place(by_shard, servers, mirrors=True)
    lost = data.draw(st.sampled_from(servers))
    left = replace(holders, lost)
    mirrored = even(left, by_shard, servers)
    for before, after in zip(left, mirrored, strict=True):
        # Nobody holds what it has not got yet.
        assert after.server in (before.server, before.mirror)
        assert after.mirror is not None and after.mirror != after.server
        if before.mirror is not None:
            assert {after.server, after.mirror} == {before.server, before.mirror}
    final = even(mirrored, by_shard, servers)
    for before, after in zip(mirrored, final, strict=True):
        assert {after.server, after.mirror} == {before.server, before.mirror}
    assert sum(amount**2 for amount in load(final, by_shard).values()) <= sum(
        amount**2 for amount in load(mirrored, by_shard).values()
    )
    assert even(final, by_shard, servers) == final


def test_after_a_loss_loads_become_equal_again() -> None:
    for count in (2, 3, 4, 6):
        servers, by_shard = list(range(count)), [10] * 12
        left = replace(place(by_shard, servers, mirrors=True), 1)
        final = even(even(left, by_shard, servers), by_shard, servers)
        assert load(final, by_shard) == {server: 120 // count for server in servers}


@pytest.mark.parametrize("count", [3, 4, 6])
def test_a_server_that_comes_late_is_used_too(count: int) -> None:
    """The others have given mirrors to all shards before it is back."""
    servers, by_shard = list(range(count)), [10] * 12
    left = replace(place(by_shard, servers, mirrors=True), 1)
    others = even(left, by_shard, [server for server in servers if server != 1])
    assert all(holder.mirror not in (None, 1) for holder in others)
    mirrored = even(others, by_shard, servers)
    assert [holder.server for holder in mirrored] == [holder.server for holder in others]
    copies = sum(holder.mirror == 1 for holder in mirrored)
    assert copies == 24 // count
    final = even(mirrored, by_shard, servers)
    assert max(load(final, by_shard).values()) <= 120 // count + 10
    assert load(final, by_shard)[1] >= 120 // count - 10


def test_even_goes_by_speed() -> None:
    servers, by_shard, speeds = [0, 1], [10] * 12, {0: 1.0, 1: 2.0}
    holders = even(place(by_shard, servers, mirrors=True), by_shard, servers, speeds)
    assert load(holders, by_shard) == {0: 40, 1: 80}
    assert worst(holders, by_shard, speeds) == 40


def test_nothing_moves_where_all_is_even() -> None:
    holders = place([10] * 12, range(3), mirrors=True)
    assert even(holders, [10] * 12, range(3)) == holders


def test_without_mirrors_nothing_moves() -> None:
    holders = [Holder(0), Holder(0), Holder(1)]
    assert even(holders, [1, 1, 1], [0, 1], mirrors=False) == holders


def test_fill_changes_no_holder() -> None:
    holders = [Holder(0, 1), Holder(0), Holder(1, 7), Holder(2)]
    filled = fill(holders, [1, 1, 1, 1], [0, 1, 2])
    assert [holder.server for holder in filled] == [0, 0, 1, 2]
    assert filled[0] == holders[0]
    assert filled[1].mirror == 2  # 1 has one of this server's already
    assert all(holder.mirror in (0, 1, 2) and holder.mirror != holder.server for holder in filled)
