"""Cases: operations that are complete when they return."""

from __future__ import annotations

import time

import torch

from shoal.comm.group import Group
from shoal.testing.conformance.values import MOVED, all_drawn, assert_sum, digest, drawn, in_buffer


def scatter_sum(group: Group) -> None:
    shapes: list[tuple[int, ...]] = [(1,), (), (7, 3), (0,), (4099,), (60_001,)]
    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        for seed, shape in enumerate(shapes):
            parts = all_drawn(group, (group.size, *shape), dtype, seed)
            own = parts[group.rank].clone()
            found = group.scatter_sum(own)
            assert_sum(found, [part[group.rank] for part in parts], (dtype, shape))
            assert torch.equal(own, parts[group.rank]), "scatter_sum leaves what it was given as it is"


def swap(group: Group) -> None:
    """Also of odd numbers of bytes, and of more than goes through a stage at once."""
    shapes: list[tuple[int, ...]] = [(2, 3), (), (0,), (0, 4), (1,), (7,), (70_001,)]
    cases = [(dtype, shape) for dtype in MOVED for shape in shapes] + [(torch.uint8, (700_001,))]
    for dtype, shape in cases:
        parts = all_drawn(group, (group.size, *shape), dtype)
        own = parts[group.rank].clone()
        found = group.swap(own)
        assert torch.equal(found, torch.stack([part[group.rank] for part in parts])), (dtype, shape)
        assert found.dtype == dtype and torch.equal(own, parts[group.rank]), "swap leaves its rows as they are"


def moves_under_way_at_once(group: Group) -> None:
    """Swaps, gathers and sums, waited for in order, in reverse, and in an order of each member's own."""
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [(at + group.rank) % 5 for at in range(5)]):
        rows = [all_drawn(group, (group.size, length), torch.uint8, seed=length) for length in (70_001, 3)]
        parts = [all_drawn(group, length, torch.float32, seed=length) for length in (5, 40_000)]
        total = torch.full((1000,), float(group.rank))
        given = [some[group.rank].clone() for some in (*rows, *parts)]
        (first, swap), (third, gather) = group.start_swap(given[0]), group.start_gather(given[2])
        work = group.sum(total)
        (second, swap_again), (fourth, gather_again) = group.start_swap(given[1]), group.start_gather(given[3])
        works = [swap, gather, work, swap_again, gather_again]
        for at in order:
            works[at].wait()
            works[at].wait()
        for found, some in ((first, rows[0]), (second, rows[1])):
            assert torch.equal(found, torch.stack([part[group.rank] for part in some])), order
        for found, some in ((third, parts[0]), (fourth, parts[1])):
            assert torch.equal(found, torch.stack(some)), order
        assert float(total[0]) == float(total[-1]) == sum(range(group.size))


def gather(group: Group) -> str:
    stacks = []
    shapes: list[tuple[int, ...]] = [(2, 3), (), (0, 4), (1,), (70_001,)]
    for dtype in MOVED:
        for shape in shapes:
            parts = all_drawn(group, shape, dtype)
            stacks.append(group.gather(parts[group.rank]))
            assert torch.equal(stacks[-1], torch.stack(parts)), (dtype, shape)
    return digest(stacks)


def gather_bytes(group: Group) -> None:
    ranks = range(group.size)
    lopsided = [5_000_001 if rank == group.size - 1 else rank % 2 for rank in ranks]
    for lengths in ([3 * rank for rank in ranks], [0 for _ in ranks], lopsided, [4096 + rank for rank in ranks]):
        expected = [(bytes([rank, 0, 255]) * length)[:length] for rank, length in enumerate(lengths)]
        found = group.gather_bytes(expected[group.rank])
        assert found == expected, f"lengths {[len(data) for data in found]}, not {lengths}"


def broadcast(group: Group) -> str:
    found = []
    shapes: list[tuple[int, ...]] = [(3,), (2, 2), (), (0,), (70_001,)]
    for dtype in MOVED:
        for shape in shapes:
            buffer = drawn(group.rank, shape, dtype)
            group.broadcast(buffer)
            assert torch.equal(buffer, drawn(0, shape, dtype)), (dtype, shape)
            found.append(buffer)
    inside = in_buffer(group, drawn(group.rank, 5000, torch.float32))
    group.broadcast(inside[13:4013])
    assert torch.equal(inside[13:4013], drawn(0, 5000, torch.float32)[13:4013])
    assert torch.equal(inside[:13], drawn(group.rank, 5000, torch.float32)[:13])
    return digest(found)


def results_belong_to_the_caller(group: Group) -> None:
    """Neither what was given in nor what is done later changes them."""
    own = torch.full((group.size, 900), float(group.rank))
    row, stacked, told = group.scatter_sum(own), group.gather(own), group.gather_bytes(b"own")
    swapped = group.swap(own)
    own.fill_(-1.0)
    for _ in range(20):
        group.gather(own)
        group.scatter_sum(own)
        group.swap(own)
        group.gather_bytes(b"other")
        group.sum(torch.ones(900)).wait()
    assert (row == sum(range(group.size))).all() and told == [b"own"] * group.size
    assert all((stacked[rank] == rank).all() and (swapped[rank] == rank).all() for rank in range(group.size))
    row.zero_()
    swapped.zero_()
    stacked.zero_()  # what others hold stays: they look after this
    group.barrier()


def barrier_waits_for_the_last(group: Group) -> None:
    for late in range(min(group.size, 3)):
        if group.rank == late:
            time.sleep(0.05)
        arrived = time.monotonic()
        group.barrier()
        left = time.monotonic()
        last = float(group.gather(torch.tensor([arrived], dtype=torch.float64)).max())
        assert left >= last, f"left a barrier {last - left:.4f} s before the last member came"
