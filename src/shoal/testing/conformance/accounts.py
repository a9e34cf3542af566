"""Cases: what a group says of itself, and its account of what was sent."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.core.traffic import KINDS, LINKS, NETWORK, Traffic

_CLOCK = 1e-4  # seconds that two readings of a clock may be apart
_FLOATS = 12_000


def attributes(group: Group) -> str:
    assert 0 <= group.rank < group.size, "the rank is not below the size"
    assert group.collective and isinstance(group.reason, str), "collective and reason say nothing"
    assert len(group.hosts) == group.size, "there must be a host for each member"
    first_seen = list(dict.fromkeys(group.hosts))
    assert first_seen == list(range(len(first_seen))), "hosts are numbered in order of their first member"
    assert group.gather(torch.tensor([group.rank])).flatten().tolist() == list(range(group.size)), "ranks"
    for number in group.descriptors():
        os.fstat(number)
    return repr((group.size, group.collective, group.hosts))


def traffic(group: Group) -> None:
    """Bytes, messages, kinds, links, operations and times grow as `shoal.core.traffic` says."""
    for kind in KINDS:
        _sum(group, kind)
    _others(group)
    _times(group)


def _sum(group: Group, kind: str) -> None:
    """A sum cannot be had for less than 2 (n − 1) times its size in all; more than n (n − 1) twice is a mistake."""
    others, size = group.size - 1, 4 * _FLOATS
    for buffer in (torch.ones(_FLOATS), group.buffer(_FLOATS, torch.float32)):
        grown = _grown(group, partial(_sum_and_wait, group, buffer, kind))
        assert grown.operations == 1, f"a sum is one operation, not {grown.operations}"
        assert {flow.kind for flow in grown.flows} <= {kind}, f"a sum of kind {kind} counted as {grown.flows}"
        sent = _over_all(group, grown.bytes)
        assert 2 * others * size - 64 * group.size <= sent <= 2 * group.size * others * size, f"a sum of {size}: {sent}"
        assert _over_all(group, grown.messages) >= others
        between_hosts = sum(flow.bytes for flow in grown.flows if flow.link == NETWORK)
        assert (_over_all(group, between_hosts) > 0) == (len(set(group.hosts)) > 1), grown.flows


def _sum_and_wait(group: Group, buffer: Tensor, kind: str) -> None:
    group.sum(buffer, kind).wait()


def _others(group: Group) -> None:
    others, size, rows = group.size - 1, 4 * _FLOATS, torch.ones(group.size, _FLOATS)
    # what is swapped between hosts goes by way of their first members, to all of them
    detour = group.size if group.collective == "hierarchical" else 1
    least: list[tuple[str, Callable[[], object], int]] = [
        ("gather", lambda: group.gather(rows[0], "state"), group.size * others * size),
        ("gather_bytes", lambda: group.gather_bytes(bytes(size), "state"), group.size * others * size),
        ("broadcast", lambda: group.broadcast(rows[0], "state"), others * size),
        ("scatter_sum", lambda: group.scatter_sum(rows, "state"), group.size * others * size),
        ("swap", lambda: group.swap(rows, "state"), group.size * others * size),
    ]
    for name, operation, at_least in least:
        grown = _grown(group, operation)
        assert grown.operations == 1 or name == "gather_bytes", f"{name} counted {grown.operations} operations"
        assert {flow.kind for flow in grown.flows} <= {"state"}, f"{name} of kind state counted as {grown.flows}"
        sent = _over_all(group, grown.bytes)
        at_most = 4 * group.size * others * size * (detour if name == "swap" else 1) + 4096 * others
        assert at_least <= sent <= at_most, f"{name} of {size}: {sent} sent"
        assert name != "swap" or detour > 1 or grown.bytes == others * size, f"a swap of {size}: {grown.bytes} sent"
    assert _grown(group, group.barrier).operations == 1


def _times(group: Group) -> None:
    """From the start of a sum to its end is exchange, also while the member does other things."""
    late = 0.03  # seconds
    is_late = group.rank == group.size - 1

    def sums() -> None:
        works = [group.sum(torch.ones(1000)), group.sum(torch.ones(200_000))]
        time.sleep(0.0 if is_late else late / 3)
        for work in works:
            work.wait()

    group.barrier()
    begun = time.perf_counter()
    if is_late:
        time.sleep(late)
    grown = _grown(group, sums)
    assert grown.operations == 2 and grown.exchange <= time.perf_counter() - begun, grown
    assert is_late or grown.exchange > late / 2, f"waited {late} s for a member, and the exchange took {grown}"
    whole = group.account.now()
    assert 0.0 <= whole.exposed <= whole.exchange + whole.operations * _CLOCK, whole
    idle = _grown(group, partial(time.sleep, late))
    assert idle == Traffic(), f"nothing was done, and the account grew: {idle}"


def codecs(group: Group) -> None:
    """What is sent counts as encoded by what the account is told."""
    buffer = group.buffer(1000, torch.float32)
    group.account.codec = "int8"
    try:
        group.sum(buffer).wait()
        group.sum(torch.ones(1000)).wait()
        grown = [_grown(group, partial(group.swap, torch.ones(group.size, 1000))), _grown(group, group.barrier)]
        assert group.size == 1 or any(traffic.bytes for traffic in grown)
    finally:
        group.account.codec = "none"
    _grown(group, partial(group.gather, torch.ones(1000)))


def _grown(group: Group, operation: Callable[[], object]) -> Traffic:
    before = group.account.now()
    operation()
    grown = group.account.now().since(before)
    assert 0.0 <= grown.exposed <= grown.exchange + _CLOCK, grown
    for flow in grown.flows:
        assert flow.link in LINKS and flow.kind in KINDS and flow.codec == group.account.codec, flow
        assert flow.bytes >= 0 and flow.messages >= (flow.bytes > 0), flow
    return grown


def _over_all(group: Group, number: int) -> int:
    return int(group.gather(torch.tensor([number])).sum())
