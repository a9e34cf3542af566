"""Which server holds which shard, and which one keeps its copy: pure functions over `Holder` values.

A server's load is the bytes that it holds, over its speed. Each has a range of neighbouring shards at the beginning,
so that few ranges of memory go to one server. The copies of one server's shards are spread over all others: when it is
lost, each of them takes over a part of its load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from shoal.syncs.server.messages import Holder


def place(
    bytes_by_shard: Sequence[int],
    servers: Sequence[int],
    *,
    mirrors: bool,
    speeds: Mapping[int, float] | None = None,
) -> list[Holder]:
    """Give each shard to a server, and a mirror if asked for (and if there is a second server)."""
    if not servers:
        raise ValueError("shards cannot be placed without a server")
    held = [Holder(server) for server in _ranges(bytes_by_shard, servers, speeds)]
    return fill(held, bytes_by_shard, servers, speeds) if mirrors else held


def replace(holders: Sequence[Holder], lost: int) -> list[Holder]:
    """What is left after the loss of a server: mirrors take over. Ask `lost_for_good` first what nobody has now."""
    if gone := lost_for_good(holders, lost):
        raise LookupError(f"server {lost} had the only copy of shards {', '.join(map(str, gone))}")
    return [
        Holder(holder.mirror)
        if holder.server == lost and holder.mirror is not None
        else Holder(holder.server, None if holder.mirror == lost else holder.mirror)
        for holder in holders
    ]


def lost_for_good(holders: Sequence[Holder], lost: int) -> list[int]:
    """The shards that nobody has when this server is lost."""
    return [shard for shard, holder in enumerate(holders) if holder.server == lost and holder.mirror in (None, lost)]


def fill(
    holders: Sequence[Holder],
    bytes_by_shard: Sequence[int],
    servers: Sequence[int],
    speeds: Mapping[int, float] | None = None,
) -> list[Holder]:
    """Give a mirror to each shard that has none among these servers. Nothing else changes."""
    filled = [holder if holder.mirror in servers else Holder(holder.server) for holder in holders]
    load: Counter[int] = Counter()
    pairs: Counter[tuple[int, int]] = Counter()
    for holder, size in zip(filled, bytes_by_shard, strict=True):
        load[holder.server] += size
        if holder.mirror is not None:
            load[holder.mirror] += size
            pairs[holder.server, holder.mirror] += size
    missing = [shard for shard, holder in enumerate(filled) if holder.mirror is None]
    for shard in sorted(missing, key=lambda shard: -bytes_by_shard[shard]):
        server, size = filled[shard].server, bytes_by_shard[shard]
        others = [other for other in servers if other != server]
        if not others:
            break
        # First spread what this server holds; among equals, the one that has the least of everything.
        mirror = min(
            others,
            key=lambda other: (
                (pairs[server, other] + size) / speed(speeds, other),
                (load[other] + size) / speed(speeds, other),
            ),
        )
        filled[shard] = Holder(server, mirror)
        load[mirror] += size
        pairs[server, mirror] += size
    return filled


def even(
    holders: Sequence[Holder],
    bytes_by_shard: Sequence[int],
    servers: Sequence[int],
    speeds: Mapping[int, float] | None = None,
    *,
    mirrors: bool = True,
) -> list[Holder]:
    """What the placement should become: all shards mirrored, and the load even, with as few bytes moved as possible.

    Only a server that is a shard's mirror in `holders` becomes its holder, because it has it; and the one that held it
    is the mirror then. So all that moves are the copies for new mirrors. After a loss this takes two calls: the first
    gives mirrors to the server that came back; when that has its copies, the second makes it a holder again. A server
    that has nothing, while all shards have mirrors, gets its share of these: they have no copy until it has copied.
    """
    evened = list(holders)
    load: Counter[int] = Counter()
    for holder, size in zip(evened, bytes_by_shard, strict=True):
        load[holder.server] += size
    while (shard := _best_swap(evened, bytes_by_shard, servers, speeds, load)) is not None:
        holder, size = evened[shard], bytes_by_shard[shard]
        assert holder.mirror is not None
        evened[shard] = Holder(holder.mirror, holder.server)
        load[holder.server] -= size
        load[holder.mirror] += size
    if not mirrors:
        return evened
    return employ(fill(evened, bytes_by_shard, servers, speeds), bytes_by_shard, servers, speeds)


def _best_swap(
    holders: Sequence[Holder],
    bytes_by_shard: Sequence[int],
    servers: Sequence[int],
    speeds: Mapping[int, float] | None,
    load: Mapping[int, int],
) -> int | None:
    """The shard whose holder and mirror should change places: the one that brings the loads nearest to each other.

    Each swap lowers Σ load² ∕ speed, which is least where loads go by speed; so there is an end to them.
    """
    best, most = None, 1e-9 * sum(bytes_by_shard) ** 2  # not for a rounding error
    for shard, (holder, size) in enumerate(zip(holders, bytes_by_shard, strict=True)):
        here, there = holder.server, holder.mirror
        if there is None or here not in servers or there not in servers:
            continue
        gain = (2 * load[here] - size) * size / speed(speeds, here)
        gain -= (2 * load[there] + size) * size / speed(speeds, there)
        if gain > most:
            best, most = shard, gain
    return best


def employ(
    holders: Sequence[Holder],
    bytes_by_shard: Sequence[int],
    servers: Sequence[int],
    speeds: Mapping[int, float] | None,
) -> list[Holder]:
    """Move mirrors from the most loaded servers to those that have nothing at all, up to a fair share."""
    employed = list(holders)
    load: Counter[int] = Counter()
    for holder, size in zip(employed, bytes_by_shard, strict=True):
        load[holder.server] += size
        if holder.mirror is not None:
            load[holder.mirror] += size
    share = load.total() / sum(speed(speeds, server) for server in servers)
    for idle in [server for server in servers if not load[server]]:
        given: Counter[int] = Counter()
        while True:
            choices = []
            for shard, (holder, size) in enumerate(zip(employed, bytes_by_shard, strict=True)):
                if holder.mirror is None or holder.mirror == idle or load[idle] + size > share * speed(speeds, idle):
                    continue
                theirs = load[holder.mirror] / speed(speeds, holder.mirror)
                if theirs > (load[idle] + size) / speed(speeds, idle):
                    choices.append((theirs, -given[holder.server], shard, holder.mirror))
            if not choices:
                break
            _, _, shard, donor = max(choices)
            server, size = employed[shard].server, bytes_by_shard[shard]
            employed[shard] = Holder(server, idle)
            given[server] += size
            load[idle] += size
            load[donor] -= size
    return employed


def _ranges(bytes_by_shard: Sequence[int], servers: Sequence[int], speeds: Mapping[int, float] | None) -> list[int]:
    """The server of each shard, in ranges in the order of the servers, so that the greatest load is least.

    `worst[n]` is the least that the greatest load can be if the first n shards are on the servers seen so far; among
    equals, loads that are more alike (a smaller sum of squares) are better.
    """
    shards = len(bytes_by_shard)
    before = [0]
    for size in bytes_by_shard:
        before.append(before[-1] + size)
    worst: list[tuple[float, float]] = [(0.0, 0.0)] + [(float("inf"), 0.0)] * shards
    begins: list[list[int]] = []
    for server in servers:
        now, begin = [], []
        for stop in range(shards + 1):
            choices = []
            for start in range(stop + 1):
                load = (before[stop] - before[start]) / speed(speeds, server)
                choices.append((max(worst[start][0], load), worst[start][1] + load * load, start))
            greatest, squares, start = min(choices)
            now.append((greatest, squares))
            begin.append(start)
        worst = now
        begins.append(begin)
    owners = [servers[0]] * shards
    stop = shards
    for server, begin in zip(reversed(servers), reversed(begins), strict=True):
        owners[begin[stop] : stop] = [server] * (stop - begin[stop])
        stop = begin[stop]
    return owners


def speed(speeds: Mapping[int, float] | None, server: int) -> float:
    """Relative; one that is not known has that of the mean."""
    if not speeds:
        return 1.0
    return max(speeds.get(server, sum(speeds.values()) / len(speeds)), 1e-9)
