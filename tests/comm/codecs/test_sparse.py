"""Sums of sparse parts over groups: against dense arithmetic, done again, not finite, and on the wire."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from shoal.comm.account import Account
from shoal.comm.codecs.contract import Codec, State
from shoal.comm.codecs.memory import RESIDUAL, Memory
from shoal.comm.codecs.sparse import MOMENTUM, STEP, SparseSum
from shoal.comm.codecs.topk import TopKCodec
from shoal.comm.group import Group, SoloGroup
from shoal.core.errors import PayloadError
from shoal.core.spec import TopK
from shoal.core.traffic import CONTROL, LOOPBACK
from shoal.testing.ranks import run_ranks

CPU = torch.device("cpu")
COUNT = 20_011
PLAIN = TopK(density=0.02, correction=False, mask=False)
CORRECTED = TopK(density=0.02, threshold="exact")


class Table:
    """Where the members of a group in one process meet."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.places: list[Tensor | None] = [None] * size


class Member:
    """As much of a group as sums of sparse parts need. Each member in a thread of its own."""

    def __init__(self, table: Table, rank: int) -> None:
        self.rank = rank
        self.size = len(table.places)
        self.account = Account()
        self.spoil: Callable[[Tensor], Tensor] = lambda rows: rows
        self._table = table

    def gather(self, buffer: Tensor, kind: str = CONTROL) -> Tensor:
        self._table.places[self.rank] = buffer
        self._table.barrier.wait()
        rows = torch.stack([cast(Tensor, place) for place in self._table.places])
        self._table.barrier.wait()
        self.account.sent(kind, LOOPBACK, buffer.nbytes * (self.size - 1), self.size - 1)
        return self.spoil(rows)


class Crew:
    """The members of a group, each with its memory."""

    def __init__(self, size: int, spec: TopK, count: int = COUNT, **options: Any) -> None:
        table = Table(size)
        self.members = [Member(table, rank) for rank in range(size)]
        self.sums = [SparseSum(cast(Group, member), spec, **options) for member in self.members]
        self.memories = [Memory(count, CPU) for _ in range(size)]

    def set_momentum(self, momentum: float, damping: float = 1.0) -> None:
        for summing in self.sums:
            summing.momentum, summing.damping = momentum, damping

    def sum(self, gradients: list[Tensor], *, key: int = 0, gauge: Tensor | None = None) -> list[Tensor]:
        flats = [gradient.clone() for gradient in gradients]
        for memory in self.memories:
            memory.open()
        with ThreadPoolExecutor(len(flats)) as pool:
            calls = [
                pool.submit(summing.sum, flat, memory, key=key, gauge=gauge)
                for summing, flat, memory in zip(self.sums, flats, self.memories, strict=True)
            ]
            for call in calls:
                call.result()
        return flats

    def commit(self) -> None:
        for memory in self.memories:
            memory.commit()

    def private(self, name: str = RESIDUAL) -> list[Tensor]:
        return [memory.parts()[name].clone() for memory in self.memories]


def gradients(size: int, step: int = 0, count: int = COUNT) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    common = torch.randn(count, generator=generator)
    return [(common + torch.randn(count, generator=generator)) / size for _ in range(size)]


def total(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).double().sum(0)


# -- what holds of every sum -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", ["exact", "sampled"])
@pytest.mark.parametrize("size", [2, 5])
def test_all_members_have_the_same_bits_and_nothing_is_lost(size: int, threshold: str) -> None:
    crew = Crew(size, TopK(density=0.02, threshold=threshold, correction=False))
    given, applied = torch.zeros(COUNT).double(), torch.zeros(COUNT).double()
    for step in range(10):
        parts = gradients(size, step)
        results = crew.sum(parts, key=step)
        crew.commit()
        assert all(torch.equal(results[0], result) for result in results)
        assert 0.02 * COUNT * 0.9 <= int(results[0].count_nonzero()) <= size * math.ceil(0.02 * COUNT)
        given += total(parts)
        applied += results[0].double()
        assert torch.allclose(applied + total(crew.private()), given, atol=1e-5, rtol=0)


def test_a_gauge_chooses_and_the_sum_is_in_the_units_of_the_gradient() -> None:
    gauge = torch.randn(COUNT, generator=torch.Generator().manual_seed(3)).exp()
    crew, parts = Crew(3, PLAIN), [part * gauge for part in gradients(3)]
    result = crew.sum(parts, gauge=gauge)[0]
    crew.commit()
    assert torch.allclose(result.double() + total(crew.private()), total(parts), rtol=1e-5, atol=1e-6)
    assert (result != 0)[gauge < gauge.median()].float().mean() > 0.01  # not only where the gauge is large


def test_a_step_that_is_done_again_ends_the_same() -> None:
    crew = Crew(3, TopK(density=0.02, warmup=5, clip=0.5))
    crew.set_momentum(0.9)
    crew.sum(gradients(3, 0), key=0)
    crew.commit()
    before = crew.private(), crew.private(MOMENTUM)
    lost = crew.sum(gradients(3, 8), key=8)
    first = crew.sum(gradients(3, 1), key=1)
    again = crew.sum(gradients(3, 1), key=1)
    assert torch.equal(first[0], again[0]) and not torch.equal(lost[0], first[0])
    for name, vectors in zip((RESIDUAL, MOMENTUM), before, strict=True):
        assert all(torch.equal(*pair) for pair in zip(crew.private(name), vectors, strict=True))
    crew.commit()
    assert [memory.common()[STEP].tolist() for memory in crew.memories] == [[2]] * 3


@pytest.mark.parametrize("what", [math.nan, math.inf])
@pytest.mark.parametrize("size", [1, 3])
def test_what_is_not_finite_reaches_all_and_is_remembered_by_none(size: int, what: float) -> None:
    crew = Crew(size, TopK(density=0.02, warmup=5))
    crew.set_momentum(0.9)
    for step in range(2):
        crew.sum(gradients(size, step), key=step)
        crew.commit()
    names = (MOMENTUM,) if size == 1 else (MOMENTUM, RESIDUAL)
    before = [crew.private(name) for name in names]
    parts = gradients(size, 2)
    parts[-1][77] = what
    results = crew.sum(parts, key=2)
    crew.commit()
    assert all(not bool(result.isfinite().all()) for result in results)
    for name, vectors in zip(names, before, strict=True):
        assert all(torch.equal(*pair) for pair in zip(crew.private(name), vectors, strict=True))
    assert crew.memories[0].common()[STEP].tolist() == [2]


def test_payloads_are_labelled_and_as_long_as_the_longest() -> None:
    crew = Crew(4, TopK(density=0.01, correction=False), count=100_000)
    crew.sum(gradients(4, count=100_000))
    for member in crew.members:
        flows = member.account.now().flows
        assert {flow.codec for flow in flows} == {"topk"} and member.account.codec == "none"
        assert sum(flow.bytes for flow in flows) <= 3 * 0.0102 * 400_000


def test_a_member_with_little_to_send_takes_part() -> None:
    crew, parts = Crew(3, PLAIN), gradients(3)
    parts[1] = torch.zeros(COUNT)
    parts[2] = torch.zeros(COUNT)
    parts[2][5] = 8.0
    results = crew.sum(parts)
    assert all(torch.equal(results[0], result) for result in results)
    alone = Crew(2, PLAIN).sum([parts[0], parts[1]])[0]
    alone[5] += 8.0
    assert torch.equal(results[0], alone)


def damage_payload(rows: Tensor) -> Tensor:
    if rows.dtype == torch.uint8:
        rows[1, 40] ^= 0x10
    return rows


def claim_length(length: int) -> Callable[[Tensor], Tensor]:
    def spoil(rows: Tensor) -> Tensor:
        if rows.dtype == torch.int64:
            rows[1] = length
        return rows

    return spoil


@pytest.mark.parametrize("spoil", [damage_payload, claim_length(1 << 50), claim_length(0), claim_length(1001)])
def test_a_damaged_payload_is_an_error_and_changes_nothing_that_counts(spoil: Callable[[Tensor], Tensor]) -> None:
    crew = Crew(2, PLAIN)
    crew.sum(gradients(2))
    crew.commit()
    before = crew.private()
    for member in crew.members:
        member.spoil = spoil
    with pytest.raises(PayloadError):
        crew.sum(gradients(2, 1))
    assert all(torch.equal(*pair) for pair in zip(crew.private(), before, strict=True))
    assert {member.account.codec for member in crew.members} == {"none"}


def test_payloads_may_be_wrapped() -> None:
    """By another codec; each member's has a key of its own for random numbers."""
    densities, keys = [], set()

    class Wrapper(TopKCodec):
        def encode(self, tensor: Tensor, state: State) -> Tensor:
            densities.append(self.density)
            keys.add(state.key)
            return super().encode(tensor, state)

    def wrap(codec: Codec) -> Codec:
        assert isinstance(codec, TopKCodec)
        return Wrapper(codec.density, codec.threshold)

    assert torch.equal(Crew(2, PLAIN, wrap=wrap).sum(gradients(2))[0], Crew(2, PLAIN).sum(gradients(2))[0])
    assert densities == [0.02, 0.02] and len(keys) == 2


# -- deep gradient compression, against the same written densely -------------------------------------------------------


class Dense:
    """One member by the book, in vectors without codecs, shadows or groups."""

    def __init__(self) -> None:
        self.momentum = torch.zeros(COUNT)
        self.residual = torch.zeros(COUNT)

    def step(self, gradient: Tensor, density: float, *, momentum: float, damping: float, mask: bool) -> Tensor:
        moved = momentum * self.momentum + damping * gradient
        value = self.residual + moved
        chosen = torch.zeros(COUNT, dtype=torch.bool)
        chosen[value.abs().topk(math.ceil(density * COUNT)).indices] = True
        scale = 2.0 ** (math.frexp(float(value.abs().max()))[1] - 15)
        sent = torch.where(chosen, (value / scale).half().float() * scale, 0.0)
        self.residual = value - sent
        self.momentum = torch.where(chosen, 0.0, moved) if mask else moved
        return sent


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("damping", [1.0, 0.1])
def test_momentum_is_corrected_and_masked(mask: bool, damping: float) -> None:
    crew = Crew(3, TopK(density=0.02, threshold="exact", mask=mask))
    crew.set_momentum(0.9, damping)
    dense = [Dense() for _ in range(3)]
    for step in range(6):
        parts = gradients(3, step)
        expected = [
            member.step(part, 0.02, momentum=0.9, damping=damping, mask=mask)
            for member, part in zip(dense, parts, strict=True)
        ]
        results = crew.sum(parts, key=step)
        crew.commit()
        assert torch.allclose(results[0], torch.stack(expected).sum(0), atol=1e-5)
        for member, residual, momentum in zip(dense, crew.private(), crew.private(MOMENTUM), strict=True):
            assert torch.allclose(residual, member.residual, atol=1e-5)
            assert torch.allclose(momentum, member.momentum, atol=1e-5)


@pytest.mark.parametrize(("spec", "momentum"), [(TopK(correction=False), 0.9), (TopK(), 0.0)])
def test_without_correction_there_is_no_momentum(spec: TopK, momentum: float) -> None:
    crew = Crew(2, spec)
    crew.set_momentum(momentum)
    crew.sum(gradients(2))
    assert not crew.memories[0].has(MOMENTUM)


def test_what_is_sent_of_corrected_momentum_and_what_stays_is_all_of_it() -> None:
    crew = Crew(3, CORRECTED)
    crew.set_momentum(0.9)
    for step in range(4):
        parts = gradients(3, step)
        waiting = total(crew.private()) if step else torch.zeros(COUNT).double()
        moved = total(parts) + (0.9 * total(crew.private(MOMENTUM)) if step else 0)
        result = crew.sum(parts, key=step)[0]
        crew.commit()
        assert torch.allclose(waiting + moved, result.double() + total(crew.private()), atol=1e-5, rtol=0)


def test_density_falls_by_the_same_factor_in_each_step_of_the_warm_up() -> None:
    crew = Crew(2, TopK(density=0.01, threshold="exact", correction=False, warmup=4))
    shared = gradients(1)[0]
    sizes = []
    for step in range(6):
        sizes.append(int(crew.sum([shared + step, shared + step], key=step)[0].count_nonzero()))
        crew.commit()
    densities = [0.25 * 0.04 ** (step / 4) for step in range(5)] + [0.01]
    assert sizes[0] == math.ceil(0.25 * COUNT) and sizes[4] == math.ceil(0.01 * COUNT)
    for size, density in zip(sizes, densities, strict=True):
        assert size == pytest.approx(density * COUNT, abs=0.1 * density * COUNT + 1)


def test_a_density_above_that_of_the_warm_up_stays() -> None:
    crew = Crew(2, TopK(density=0.5, threshold="exact", correction=False, warmup=4))
    shared = gradients(1)[0]
    assert int(crew.sum([shared, shared])[0].count_nonzero()) == math.ceil(0.5 * COUNT)


def test_the_norm_of_each_members_gradient_is_limited() -> None:
    crew = Crew(4, TopK(density=1.0, correction=False, clip=1.0))
    parts = gradients(4)
    parts[1] *= 1e-4  # its norm is below the limit already
    result = crew.sum(parts)[0]
    crew.commit()
    expected = [part * min(1.0, 0.5 / float(part.norm())) for part in parts]
    assert torch.allclose(result.double() + total(crew.private()), total(expected), atol=1e-6)
    assert not torch.allclose(result.double(), total(parts), atol=1e-3)


# -- a group of one ----------------------------------------------------------------------------------------------------


def test_alone_it_is_plain_momentum() -> None:
    summing, memory = SparseSum(SoloGroup(), TopK(density=0.01, warmup=3)), Memory(COUNT, CPU)
    summing.momentum, summing.damping = 0.9, 0.5
    velocity = torch.zeros(COUNT)
    for step in range(3):
        flat = gradients(1, step)[0]
        velocity = 0.9 * velocity + 0.5 * flat
        memory.open()
        summing.sum(flat, memory)
        memory.commit()
        assert torch.allclose(flat, velocity, atol=1e-6)
    assert not memory.has() and memory.common()[STEP].tolist() == [3]  # others that join find the warm-up over


def test_alone_it_sends_what_was_left_from_before() -> None:
    summing, memory = SparseSum(SoloGroup(), PLAIN), Memory(COUNT, CPU)
    left, gradient = gradients(2)
    memory.take({RESIDUAL: left}, 1)
    for _ in range(2):
        flat = gradient.clone()
        memory.open()
        summing.sum(flat, memory)
        assert torch.equal(flat, gradient + left)
    memory.commit()
    assert torch.equal(memory.parts()[RESIDUAL], torch.zeros(COUNT))


# -- between processes -------------------------------------------------------------------------------------------------


def test_over_gloo_it_does_what_it_does_in_one_process() -> None:
    count, steps, spec = 100_000, 3, TopK(density=0.01)

    def fn(group: Group) -> list[object]:
        summing, memory = SparseSum(group, spec), Memory(count, CPU)
        summing.momentum = 0.9
        flat = torch.empty(0)
        for step in range(steps):
            flat = gradients(group.size, step, count)[group.rank]
            memory.open()
            summing.sum(flat, memory, key=step)
            memory.commit()
        flows = group.account.now().flows
        return [flat, sum(flow.bytes for flow in flows if flow.codec == "topk")]

    crew = Crew(3, spec, count)
    crew.set_momentum(0.9)
    expected = torch.empty(0)
    for step in range(steps):
        expected = crew.sum(gradients(3, step, count), key=step)[0]
        crew.commit()
    for flat, sent in run_ranks(3, fn, collective="gloo"):
        assert torch.equal(flat, expected)
        assert 0 < sent <= steps * 2 * 0.0102 * 4 * count
