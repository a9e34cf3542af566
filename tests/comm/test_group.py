from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.comm.group import Group, SoloGroup
from shoal.core.errors import GroupError
from shoal.testing.ranks import die, run_ranks

SIZES = [1, 2, 3, 4]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WHOLE = [torch.uint8, torch.int8, torch.int32, torch.int64]


def on(size: int, fn: Callable[[Group], Any]) -> list[Any]:
    """A group of one is tested where it is used: in this process."""
    return [fn(SoloGroup())] if size == 1 else run_ranks(size, fn)


# -- what holds for every group ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_a_sum_replaces_the_buffer_everywhere(size: int) -> None:
    def fn(group: Group) -> dict[str, Tensor]:
        sums = {}
        for dtype in FLOATS + WHOLE:
            buffer = torch.arange(5).to(dtype) + group.rank
            group.sum(buffer).wait()
            sums[str(dtype)] = buffer
        return sums

    ranks = sum(range(size))
    for values in on(size, fn):
        for name, total in values.items():
            assert total.tolist() == [size * at + ranks for at in range(5)], name


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_sum_is_bitwise_equal_on_all_members(size: int, dtype: torch.dtype) -> None:
    def fn(group: Group) -> Tensor:
        values = torch.randn(4099, generator=torch.Generator().manual_seed(group.rank)).to(dtype)
        group.sum(values).wait()
        return values

    first, *others = on(size, fn)
    assert all(torch.equal(first, other) for other in others)
    own = [torch.randn(4099, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(size)]
    exact = torch.stack(own).double().sum(0)
    assert torch.allclose(first.double(), exact, rtol=0.0, atol=16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("size", SIZES)
def test_sums_may_overlap_and_be_empty(size: int) -> None:
    def fn(group: Group) -> list[Tensor]:
        buffers = [torch.full((count,), float(group.rank + count)) for count in (3, 0, 100_000, 1)]
        works = [group.sum(buffer) for buffer in buffers]
        for work in works:
            work.wait()
        return [buffer[:1] for buffer in buffers]

    for value in on(size, fn):
        ranks = sum(range(size))
        assert [part.tolist() for part in value] == [
            [ranks + size * 3.0],
            [],
            [ranks + size * 100_000.0],
            [ranks + size * 1.0],
        ]


@pytest.mark.parametrize("size", SIZES)
def test_gather_stacks_in_order_of_rank(size: int) -> None:
    def fn(group: Group) -> list[Tensor]:
        return [
            group.gather(torch.full((2, 3), group.rank, dtype=dtype)) for dtype in [*FLOATS, *WHOLE, torch.bool]
        ] + [group.gather(torch.empty(0, 4)), group.gather(torch.tensor(float(group.rank)))]

    for value in on(size, fn):
        *full, empty, scalar = value
        for stacked in full:
            assert stacked.shape == (size, 2, 3)
            expected = torch.arange(size).view(size, 1, 1).expand(size, 2, 3)
            assert torch.equal(stacked, expected.to(stacked.dtype))
        assert empty.shape == (size, 0, 4)
        assert scalar.tolist() == [float(rank) for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_what_gather_returned_is_not_the_callers_buffer(size: int) -> None:
    def fn(group: Group) -> Tensor:
        buffer = torch.zeros(2)
        stacked = group.gather(buffer)
        buffer += 1
        return stacked

    for value in on(size, fn):
        assert value.tolist() == [[0.0, 0.0]] * size


@pytest.mark.parametrize("size", SIZES)
def test_bytes_of_different_lengths_come_back_whole(size: int) -> None:
    def fn(group: Group) -> list[list[bytes]]:
        return [
            group.gather_bytes(bytes([group.rank]) * (3 * group.rank)),
            group.gather_bytes(b""),
            group.gather_bytes(b"\x00\xff" * (50_000 if group.rank == 0 else 1)),
        ]

    for growing, empty, lopsided in on(size, fn):
        assert growing == [bytes([rank]) * (3 * rank) for rank in range(size)]
        assert empty == [b""] * size
        assert lopsided == [b"\x00\xff" * (50_000 if rank == 0 else 1) for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_gives_everybody_what_member_0_has(size: int) -> None:
    def fn(group: Group) -> list[Tensor]:
        buffers = [torch.full((3,), group.rank + 1, dtype=dtype) for dtype in [*FLOATS, *WHOLE]]
        buffers += [torch.full((2, 2), group.rank == 0), torch.empty(0)]
        for buffer in buffers:
            group.broadcast(buffer)
        return buffers

    for value in on(size, fn):
        *numbers, flags, empty = value
        assert all(buffer.tolist() == [1, 1, 1] for buffer in numbers)
        assert flags.all() and empty.shape == (0,)


@pytest.mark.parametrize("size", SIZES)
def test_bytes_sent_follow_the_arithmetic_of_the_algorithms(size: int) -> None:
    def fn(group: Group) -> list[int]:
        counts = [group.bytes_sent]
        group.sum(torch.zeros(1000)).wait()
        counts.append(group.bytes_sent)
        group.gather(torch.zeros(10, dtype=torch.float64))
        counts.append(group.bytes_sent)
        group.broadcast(torch.zeros(7, dtype=torch.int32))
        counts.append(group.bytes_sent)
        group.gather_bytes(b"x" * group.rank)
        counts.append(group.bytes_sent)
        return [after - before for before, after in pairwise(counts)]

    for rank, sent in enumerate(on(size, fn)):
        others = size - 1
        lengths_and_bytes = others * (8 + others)
        assert sent == [2 * others * 4000 // size, others * 80, 28 if rank == 0 and others else 0, lengths_and_bytes]


# -- when a member goes away -------------------------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[[Group], Any]] = {
    "sum": lambda group: group.sum(torch.ones(200_000)).wait(),
    "gather": lambda group: group.gather(torch.ones(200_000)),
    "gather_bytes": lambda group: group.gather_bytes(b"x" * 200_000),
    "broadcast": lambda group: group.broadcast(torch.ones(200_000)),
}


@pytest.mark.parametrize("dead", [0, 2])
@pytest.mark.parametrize("what", OPERATIONS)
def test_all_survivors_notice_a_death_within_two_seconds(what: str, dead: int) -> None:
    operation = OPERATIONS[what]

    def fn(group: Group) -> dict[str, Any]:
        begun, said = time.monotonic(), ""
        try:
            # a broadcast is done for its sender before the others have it: the next one tells
            for number in range(20):
                if number == 1 and group.rank == dead:
                    die()
                operation(group)
        except GroupError as error:
            said = str(error)
        group.close()
        return {"seconds": time.monotonic() - begun, "said": said}

    values = run_ranks(4, fn, mortal=[dead])
    for rank, value in enumerate(values):
        if rank != dead:
            assert "over the group broke" in value["said"]
            assert value["seconds"] < 2.0


def test_a_death_with_several_sums_under_way() -> None:
    def fn(group: Group) -> str:
        buffers = [torch.ones(100_000) for _ in range(4)]
        if group.rank == 1:
            group.sum(buffers[0])
            die()
        try:
            works = [group.sum(buffer) for buffer in buffers]
            for work in works:
                work.wait()
        except GroupError as error:
            return str(error)
        return "no error"

    first, _, third = run_ranks(3, fn, mortal=[1])
    assert "sum over the group broke" in first and "sum over the group broke" in third


def test_a_broken_group_stays_broken() -> None:
    def fn(group: Group) -> int:
        if group.rank == 1:
            die()
        failures = 0
        for _ in range(3):
            try:
                group.sum(torch.ones(1000)).wait()
            except GroupError:
                failures += 1
        return failures

    assert run_ranks(2, fn, mortal=[1]) == [3, None]


def test_a_forked_child_can_let_go_of_the_groups_sockets() -> None:
    """A child that keeps them would keep a dead member alive in the eyes of its peers."""

    held, until_all_are_gone = os.pipe()

    def fn(group: Group) -> str:
        group.sum(torch.ones(1)).wait()
        if group.rank == 1:
            descriptors = list(group.descriptors())
            assert descriptors
            ready, done = os.pipe()
            if os.fork() == 0:
                for descriptor in [*descriptors, until_all_are_gone]:
                    os.close(descriptor)
                os.write(done, b"x")
                os.read(held, 1)
                os._exit(0)
            os.read(ready, 1)
            die()
        begun = time.monotonic()
        try:
            group.sum(torch.ones(1)).wait()
        except GroupError:
            assert time.monotonic() - begun < 2.0
            return "noticed"
        return "did not notice"

    try:
        assert run_ranks(2, fn, mortal=[1])[0] == "noticed"
    finally:
        os.close(until_all_are_gone)
        os.close(held)


def test_a_group_of_one_sends_nothing() -> None:
    group = SoloGroup()
    group.sum(torch.ones(10)).wait()
    group.gather_bytes(b"abc")
    assert group.bytes_sent == 0 and list(group.descriptors()) == []
    group.close()
