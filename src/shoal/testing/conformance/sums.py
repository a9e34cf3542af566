"""Cases: sums."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch

from shoal.comm.group import Group
from shoal.testing.conformance.values import SUMMED, all_drawn, assert_sum, digest, drawn, in_buffer

LENGTHS = sorted({0, 1, 2, 3, 5, 7} | {(1 << k) + by for k in (3, 5, 8, 10, 12, 14, 16, 18) for by in (-1, 0, 1)})
"""Around powers of two, a cache line (16 of float32) and a page (1024)."""

_LARGE = 16 << 20  # of float32: 64 MB


def sum_of_every_dtype(group: Group) -> str:
    """In any tensor and in a buffer of the group, with equal bits."""
    sums = []
    for dtype in SUMMED:
        parts = all_drawn(group, 1027, dtype)
        plain, buffer = parts[group.rank].clone(), group.buffer(1027, dtype)
        assert buffer.shape == (1027,) and buffer.dtype == dtype and not buffer.any(), "a buffer is flat and zero"
        buffer.copy_(plain)
        for tensor in (plain, buffer):
            group.sum(tensor).wait()
            assert_sum(tensor, parts, dtype)
        assert digest([plain]) == digest([buffer]), f"{dtype}: a sum depends on where the values lie"
        sums.append(plain)
    return digest(sums)


def sum_of_every_length(group: Group) -> str:
    sums = []
    for length in LENGTHS:
        parts = all_drawn(group, length, torch.float32, length)
        plain, buffer = parts[group.rank].clone(), in_buffer(group, parts[group.rank])
        for tensor in (plain, buffer):
            group.sum(tensor).wait()
            assert_sum(tensor, parts, length)
        sums += [plain, buffer]
    return digest(sums)


def sum_of_parts_of_a_buffer(group: Group) -> str:
    """Contiguous parts at odd offsets; what lies between them stays."""
    lengths = [1, 3, 0, 1025, 4099, 16, 70_001, 2]
    bounds = list(pairwise(accumulate(lengths, lambda at, length: at + length + 1, initial=1)))
    buffer = group.buffer(bounds[-1][1] + 5, torch.float32)
    buffer.fill_(-1.5)
    parts = [all_drawn(group, end - start - 1, torch.float32, start) for start, end in bounds]
    for (start, end), part in zip(bounds, parts, strict=True):
        buffer[start : end - 1] = part[group.rank]
    between = torch.ones_like(buffer, dtype=torch.bool)
    for (start, end), part in zip(bounds, parts, strict=True):
        group.sum(buffer[start : end - 1]).wait()
        assert_sum(buffer[start : end - 1], part, (start, end))
        between[start : end - 1] = False
    assert (buffer[between] == -1.5).all(), "a sum of a part changed its neighbours"
    return digest([buffer])


def sum_of_views(group: Group) -> str:
    """Any shape, 0 dimensions, rows of matrices, the inside of a larger storage."""
    flat = torch.empty(5000)
    cube = group.buffer(60, torch.float32).view(3, 4, 5)
    views = [torch.empty(()), flat[7:8], flat[11:1034], flat[2000:4400].view(2, 30, 40), cube[1], cube[2, 3]]
    views += [torch.empty(6, 4)[2], torch.empty(0, 3), torch.nn.Parameter(torch.empty(9, 9)).data]
    for seed, view in enumerate(views):
        parts = all_drawn(group, tuple(view.shape), torch.float32, seed)
        view.copy_(parts[group.rank])
        group.sum(view).wait()
        assert_sum(view, parts, tuple(view.shape))
    return digest(views)


def sums_under_way_at_once(group: Group) -> str:
    """Waited for in order, in reverse, and in an order of each member's own."""
    lengths = [3, 0, 100_000, 1, 4096, 50_001]
    whole = group.buffer(sum(lengths), torch.float32)
    orders = [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [(at + group.rank) % 6 for at in range(6)]]
    totals = []
    for seed, order in enumerate(orders):
        parts = [all_drawn(group, length, torch.float32, 10 * seed + at) for at, length in enumerate(lengths)]
        for buffers in (list(whole.split(lengths)), [torch.empty(length) for length in lengths]):
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part[group.rank])
            works = [group.sum(buffer) for buffer in buffers]
            for at in order:
                works[at].wait()
                assert_sum(buffers[at], parts[at], f"{at} of order {seed}")
            totals += [buffer.clone() for buffer in buffers]
    return digest(totals)


def other_operations_while_sums_are_under_way(group: Group) -> str:
    parts = all_drawn(group, 20_011, torch.float32)
    buffers = [in_buffer(group, parts[group.rank]), parts[group.rank].clone()]
    first = group.sum(buffers[0])
    assert group.gather(torch.tensor([group.rank])).flatten().tolist() == list(range(group.size))
    second = group.sum(buffers[1])
    swapped = group.swap(torch.arange(group.size) + 100 * group.rank)
    assert swapped.tolist() == [100 * rank + group.rank for rank in range(group.size)]
    told = torch.tensor([group.rank + 7])
    group.broadcast(told)
    assert told.item() == 7
    group.barrier()
    second.wait()
    first.wait()
    for buffer in buffers:
        assert_sum(buffer, parts)
    return digest(buffers)


def the_same_values_give_the_same_bits(group: Group) -> str:
    """Again, and in a plain tensor, a buffer or a part of one: only values, shape and members count."""
    seen = set()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        own, around = drawn(group.rank, 30_011, dtype), group.buffer(30_100, dtype)
        for _ in range(3):
            places = [own.clone(), in_buffer(group, own), around[17 : 17 + own.numel()]]
            places[2].copy_(own)
            for work in [group.sum(place) for place in places]:
                work.wait()
            seen |= {(str(dtype), digest([place])) for place in places}
    assert len(seen) == 3, f"equal values gave {len(seen)} different sums in 3 dtypes"
    return repr(sorted(seen))


def not_finite_values(group: Group) -> str:
    """NaN and infinity of one member reach all, and stay where they are."""
    last = group.size - 1
    own = torch.full((1000,), float(group.rank == last))
    if group.rank == last:
        own[3], own[500], own[999] = float("nan"), float("inf"), float("-inf")
    if group.rank == 0:
        own[501] = float("inf")
    places = [own.clone(), in_buffer(group, own)]
    for place in places:
        group.sum(place).wait()
        assert place[3].isnan() and place[500] == float("inf") and place[999] == float("-inf")
        assert place[501] == float("inf") and int(place.isfinite().sum()) == 996
    return digest(places)


def large_sum(group: Group) -> str:
    """64 MB, in a buffer. Values are exact, so that every element is checked."""
    buffer = group.buffer(_LARGE, torch.float32)
    torch.arange(_LARGE, out=buffer)
    buffer.remainder_(65_521.0).add_(group.rank)
    group.sum(buffer).wait()
    expected = torch.arange(_LARGE, dtype=torch.float32).remainder_(65_521.0).mul_(group.size)
    expected += sum(range(group.size))
    assert torch.equal(buffer, expected), f"{int((buffer != expected).sum())} elements are wrong"
    return digest([buffer[:: 1 << 12]])


def buffers_made_again_and_again(group: Group) -> None:
    """Made, dropped and kept in turn: none changes another."""
    kept = []
    for number in range(1, 41):
        buffer = group.buffer(257 * number, torch.float32)
        assert not buffer.any(), "a new buffer is zero"
        buffer.fill_(float(number))
        if number % 4 == 0:
            kept.append((number, buffer))
        group.sum(buffer).wait()
        assert (buffer == number * group.size).all()
    for number, buffer in kept:
        assert (buffer == number * group.size).all(), "a buffer was changed by another"
        group.sum(buffer).wait()
        assert (buffer == number * group.size**2).all()
