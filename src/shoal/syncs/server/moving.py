"""How shards get from the servers that have them to those that should: pure functions over `Holder` values.

`aim` says what the placement should become, `toward` the next placement on the way there. On the way every shard stays
on as many servers as it was on: one that is to hold a shard is its mirror first and gets a copy; meanwhile the mirror
that it replaces keeps its own, as the *spare*, and no step is applied, so that the spare is as good as before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from shoal.syncs.server.messages import Holder
from shoal.syncs.server.placing import fill, speed


def aim(
    holders: Sequence[Holder],
    bytes_by_shard: Sequence[int],
    servers: Sequence[int],
    *,
    mirrors: bool,
    speeds: Mapping[int, float] | None = None,
) -> list[Holder]:
    """Every shard (and its mirror) on one of these servers, the load even, and as little moved as that allows."""
    owners: list[int | None] = [
        next((one for one in (holder.server, holder.mirror) if one in servers), None) for holder in holders
    ]
    load: Counter[int] = Counter()
    for owner, size in zip(owners, bytes_by_shard, strict=True):
        if owner is not None:
            load[owner] += size
    for shard in sorted(range(len(owners)), key=lambda shard: -bytes_by_shard[shard]):
        if owners[shard] is None:
            size = bytes_by_shard[shard]
            owner = min(servers, key=lambda one: (load[one] + size) / speed(speeds, one))
            owners[shard] = owner
            load[owner] += size
    held = [owner for owner in owners if owner is not None]
    near = [{holder.server, holder.mirror} for holder in holders]
    _balance(held, load, bytes_by_shard, servers, speeds, near, [None] * len(held))
    if not mirrors or len(servers) < 2:
        return [Holder(owner) for owner in held]
    filled = fill(
        [
            Holder(owner, next((one for one in (old.mirror, old.server) if one in servers and one != owner), None))
            for owner, old in zip(held, holders, strict=True)
        ],
        bytes_by_shard,
        servers,
        speeds,
    )
    kept = [holder.mirror for holder in filled if holder.mirror is not None]
    for mirror, size in zip(kept, bytes_by_shard, strict=True):
        load[mirror] += size  # a mirror applies as well
    _balance(kept, load, bytes_by_shard, servers, speeds, near, held)
    return [Holder(owner, mirror) for owner, mirror in zip(held, kept, strict=True)]


def _balance(
    places: list[int],
    load: Counter[int],
    bytes_by_shard: Sequence[int],
    servers: Sequence[int],
    speeds: Mapping[int, float] | None,
    near: Sequence[set[int | None]],
    taken: Sequence[int | None],
) -> None:
    """Move shards between places until no move makes loads more alike (Σ load² ∕ speed smaller): those first that
    gain most, and among equals those to a server that has the shard already. Nothing goes to the place it is `taken`
    from."""
    least = 1e-6 * sum(bytes_by_shard) ** 2  # not for a rounding error
    while True:
        best: tuple[float, bool, int, int] | None = None
        for shard, (here, size) in enumerate(zip(places, bytes_by_shard, strict=True)):
            for there in servers:
                if there in (here, taken[shard]):
                    continue
                gain = (2 * load[here] - size) * size / speed(speeds, here)
                gain -= (2 * load[there] + size) * size / speed(speeds, there)
                choice = gain, there in near[shard], -shard, there
                if gain > least and (best is None or choice > best):
                    best = choice
        if best is None:
            return
        shard, there = -best[2], best[3]
        load[places[shard]] -= bytes_by_shard[shard]
        load[there] += bytes_by_shard[shard]
        places[shard] = there


def toward(now: Holder, goal: Holder) -> Holder:
    """The next placement of a shard on its way to the goal; its mirror may need a copy first (`lacks`)."""
    if now.server == goal.server:
        keeps = now.mirror if goal.mirror not in (None, now.mirror, now.spare) else None
        return Holder(now.server, goal.mirror, keeps)
    if now.mirror == goal.server:
        there = goal.mirror is None or goal.mirror in (now.server, now.spare)
        return Holder(goal.server, goal.mirror if there else now.server)
    return Holder(now.server, goal.server, now.mirror)


def lacks(now: Holder, after: Holder, *, arrival: bool) -> bool:
    """Whether the mirror of the placement after this one needs a copy of the shard.

    With `apply=arrival` a former holder may have applied what nobody else knows of, and a spare lacks what came since.
    """
    if after.mirror is None or after.mirror == now.mirror:
        return False
    return arrival or after.mirror not in (now.server, now.spare)


def back(now: Holder, *, mirrors: bool) -> Holder:
    """Of a move that is given up: the spare is the mirror again."""
    if not mirrors:
        return Holder(now.server)
    return Holder(now.server, now.mirror if now.spare is None else now.spare)


def slowest(
    holders: Sequence[Holder], bytes_by_shard: Sequence[int], speeds: Mapping[int, float] | None = None
) -> float:
    """How long the slowest server takes to apply all that it has, in units of bytes over speed."""
    load: Counter[int] = Counter()
    for holder, size in zip(holders, bytes_by_shard, strict=True):
        for number in (holder.server, holder.mirror):
            if number is not None:
                load[number] += size
    return max(size / speed(speeds, number) for number, size in load.items())
