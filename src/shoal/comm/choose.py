"""Which group the workers of a run get: by where they are and what they compute on, unless they are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from shoal.comm.backend import BackendGroup, guarded, make_gloo, make_nccl
from shoal.comm.group import Group, SoloGroup
from shoal.comm.hierarchy import HierarchicalGroup
from shoal.comm.shm.group import ShmGroup
from shoal.comm.shm.meeting import meet as meet_in_memory
from shoal.comm.shm.memory import drop_spare
from shoal.comm.shm.shared import Shared
from shoal.comm.topology import REACH_SECONDS, Place, refuse_unreachable, where_all_are
from shoal.comm.whereabouts import Whereabouts
from shoal.core.errors import ConfigError
from shoal.core.spec import check_collective


def choose(collective: str, device: str, hosts: Sequence[int]) -> tuple[str, str]:
    """The collective for workers on these hosts, and why. Raises `ConfigError` if it cannot be the one asked for."""
    workers, number = len(hosts), len(set(hosts))
    places = f"{workers} workers on {number} hosts" if number > 1 else f"{workers} workers on one host"
    if (collective == "nccl") != (device == "cuda") and collective not in ("auto", "gloo"):
        on = "CUDA" if device == "cuda" else "the CPU"
        fitting = "'nccl' or 'auto'" if device == "cuda" else "'auto', 'shm', 'hierarchical' or 'gloo'"
        raise ConfigError(f"collective={collective!r}: the model is on {on}; use {fitting}")
    if collective == "gloo":
        return "gloo", "collective='gloo' was asked for"
    if device == "cuda":
        return "nccl", "the model is on CUDA"
    if collective == "shm" and number > 1:
        raise ConfigError(
            f"collective='shm': there are {places}, which share no memory; use 'hierarchical', 'gloo' or 'auto'"
        )
    if number == 1:
        return "shm", places
    if number == workers and collective == "auto":
        return "gloo", f"{places}: no two share memory"
    return "hierarchical", places


def make_group(
    store: Any,
    rank: int,
    size: int,
    device: torch.device,
    *,
    timeout: timedelta,
    host: str | None = None,
    collective: str = "auto",
    run: str = "",
    warn: Callable[[str], None] = lambda text: None,
    reach: float = REACH_SECONDS,
    notes: bool = True,
) -> Group:
    """Meet the other members through `store` (a `torch.distributed.Store`).

    Gloo listens at the address of `host`, or where this machine's name points if it is None. `run` names the segments
    of shared memory. Where shared memory cannot be had, `warn` is told why, and gloo is used. Raises `GroupError` if
    the store does, and `HostsApart` if hosts do not answer each other within `reach` seconds. With `notes`, members
    that wait for long tell through the store which operation they are in, so that two different ones are named.
    """
    check_collective(collective)
    if size == 1:
        drop_spare()
        return SoloGroup()

    def meet() -> Group:
        places = where_all_are(store, rank, size, host)
        return _meet(store, rank, places, device, collective, run, timeout=timeout, warn=warn, reach=reach, notes=notes)

    group: Group = guarded("meeting", meet)
    if group.collective not in ("shm", "hierarchical"):
        drop_spare()
    return group


def _meet(
    store: Any,
    rank: int,
    places: Sequence[Place],
    device: torch.device,
    collective: str,
    run: str,
    *,
    timeout: timedelta,
    warn: Callable[[str], None],
    reach: float,
    notes: bool,
) -> Group:
    size = len(places)
    hosts = [place.host for place in places]
    chosen, reason = choose(collective, device.type, hosts)
    shared: Shared | None = None
    if chosen in ("shm", "hierarchical"):
        members = [member for member in range(size) if hosts[member] == hosts[rank]]
        met = meet_in_memory(store, rank, size, members, run, timeout=timeout, warn=warn)
        if isinstance(met, Shared):
            shared = met
        else:
            chosen, reason = "gloo", f"shared memory cannot be used ({met})"
            warn(f"{reason}: gloo is used instead, which is several times slower")
    if chosen == "shm" and shared is not None:
        return ShmGroup(shared, run, warn, reason)
    try:
        refuse_unreachable(store, rank, places, reach)
        if shared is not None:
            across = _ring(store, rank, places, timeout, notes) if shared.rank == 0 else None
            return HierarchicalGroup(rank, hosts, shared, across, run=run, warn=warn, reason=reason)
    except BaseException:
        if shared is not None:
            shared.close()
        raise
    control, connections = make_gloo(store, rank, size, timeout=timeout, host=places[rank].address)
    accelerated = make_nccl(store, rank, size, timeout=timeout) if chosen == "nccl" else None
    whereabouts = Whereabouts(store, rank, [f"worker {member}" for member in range(size)]) if notes else None
    return BackendGroup(rank, hosts, control, accelerated, connections, reason, whereabouts)


def _ring(store: Any, rank: int, places: Sequence[Place], timeout: timedelta, notes: bool) -> BackendGroup:
    """The first members of all hosts."""
    hosts = [place.host for place in places]
    first = [hosts.index(number) for number in range(max(hosts) + 1)]
    at = first.index(rank)
    control, connections = make_gloo(store, at, len(first), timeout=timeout, host=places[rank].address)
    whereabouts = Whereabouts(store, at, [f"worker {member}" for member in first]) if notes else None
    return BackendGroup(at, range(len(first)), control, None, connections, whereabouts=whereabouts)
