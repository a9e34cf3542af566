"""Sums of matrices by factors, over members in one process and over a real group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from shoal.comm.account import Account
from shoal.comm.codecs.lowrank import LowRankSum, plan
from shoal.comm.codecs.memory import Memory
from shoal.comm.group import Group, SoloGroup, Work
from shoal.core.errors import CheckpointMismatch, ConfigError
from shoal.core.traffic import GRADIENT
from shoal.testing.ranks import run_ranks

CPU = torch.device("cpu")
SHAPES = [(40, 60), (7,), (48, 40), (3, 5), (16, 4, 3, 3), (40, 60), (40, 4), ()]
COUNT = sum(int(torch.Size(shape).numel()) for shape in SHAPES)
MEMBERS = 3


class Suspended(Exception):
    """A member has come to a sum that others have not reached yet."""


class Summed:
    """The buffer is the group's until `wait`: what reads it before gets NaN."""

    def __init__(self, buffer: Tensor, total: Tensor) -> None:
        self._buffer, self._total = buffer.fill_(torch.nan), total

    def wait(self) -> None:
        self._buffer.copy_(self._total)


class Member:
    """A member whose sums are known so far; at the next one it leaves its numbers. Only what a low-rank sum needs."""

    def __init__(self) -> None:
        self.account = Account()
        self.labels: list[str] = []
        self.known: Sequence[Tensor] = ()
        self.given = torch.empty(0)

    def sum(self, buffer: Tensor, kind: str = GRADIENT) -> Work:
        self.labels.append(self.account.codec)
        if len(self.labels) > len(self.known):
            self.given = buffer.clone()
            raise Suspended
        return Summed(buffer, self.known[len(self.labels) - 1])


class Crew:
    """Members with a sum and a memory each, in lock-step: a step is done again after each sum, with one more known."""

    def __init__(
        self, rank: int, shapes: Sequence[tuple[int, ...]] = SHAPES, first: torch.dtype = torch.bfloat16
    ) -> None:
        self.groups = [Member() for _ in range(MEMBERS)]
        self.sums = [LowRankSum(cast(Group, group), rank, shapes, first=first) for group in self.groups]
        self.memories = [Memory(plan(shapes, rank).count, CPU) for _ in range(MEMBERS)]

    def step(self, gradients: Sequence[Tensor], *, commit: bool = True, gauge: Tensor | None = None) -> list[Tensor]:
        known: list[Tensor] = []
        while True:
            results = [self._try(member, gradients[member].clone(), known, gauge) for member in range(MEMBERS)]
            done = [result for result in results if result is not None]
            if done:
                break
            given = [group.given for group in self.groups]
            known.append(given[0] + given[1] + given[2])
        assert len(done) == MEMBERS, "some members want to sum more than others"
        if commit:
            for memory in self.memories:
                memory.commit()
        return done

    def _try(self, member: int, flat: Tensor, known: Sequence[Tensor], gauge: Tensor | None) -> Tensor | None:
        self.groups[member].known, self.groups[member].labels = known, []
        self.memories[member].open()
        try:
            self.sums[member].sum(flat, self.memories[member], key=1, gauge=gauge)
        except Suspended:
            return None
        return flat

    def left(self) -> Tensor:
        """What all members together have not sent."""
        return sum((memory.parts()["residual"].double() for memory in self.memories), torch.zeros(()).double())


def drawn(seed: int, count: int = COUNT, members: int = MEMBERS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=generator) for _ in range(members)]


def total(gradients: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(gradients)).double().sum(0)


def error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


def low_rank(rank: int, rows: int, cols: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, rank, generator=generator) @ torch.randn(rank, cols, generator=generator)).view(-1)


def same(tensors: Sequence[Tensor]) -> bool:
    """To the bit, and NaN is NaN."""
    return all(torch.equal(tensor.view(torch.int32), tensors[0].view(torch.int32)) for tensor in tensors)


# -- the plan ----------------------------------------------------------------------------------------------------------


def test_what_saves_enough_becomes_factors_and_the_rest_travels_as_it_is() -> None:
    made = plan(SHAPES, 4)
    assert {(matrix.number, matrix.rows, matrix.cols) for matrix in made.matrices} == {
        (0, 40, 60),
        (2, 48, 40),
        (4, 16, 36),
        (5, 40, 60),
    }
    assert [(part.start, part.stop) for part in made.stretches] == [(2400, 2407), (4327, 4342), (7318, 7479)]
    assert made.count == COUNT
    assert made.first == 4 * (40 + 48 + 16 + 40)
    assert made.rights == 4 * (60 + 40 + 36 + 60)
    assert made.second == made.rights + 7 + 15 + 161
    assert [block.count for block in made.blocks] == [1, 2, 1]


def test_a_tensor_is_cut_where_that_saves() -> None:
    assert [(matrix.rows, matrix.cols) for matrix in plan([(2, 64, 64)], 4).matrices] == [(128, 64)]
    assert plan([(16, 16)], 4).matrices and not plan([(16, 15)], 4).matrices
    assert not plan([(4, 4)], 4096).matrices and not plan([(0, 5)], 1).matrices


# -- what is summed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 4, 64])
def test_nothing_is_lost_over_all_members(rank: int) -> None:
    crew, asked, given = Crew(rank), torch.zeros(COUNT).double(), torch.zeros(COUNT).double()
    for step in range(5):
        gradients = drawn(step)
        asked += total(gradients)
        given += crew.step(gradients)[0].double()
        torch.testing.assert_close(given + crew.left(), asked, rtol=1e-5, atol=1e-4)
    assert (crew.left().norm() > 1) == (rank < 64)


def test_all_members_have_the_same_bits() -> None:
    crew = Crew(2)
    for step in range(3):
        assert same(crew.step(drawn(step)))
        assert same([next(iter(memory.common().values())) for memory in crew.memories])


def test_two_operations_a_step_under_the_codec_s_name() -> None:
    crew = Crew(2)
    crew.step(drawn(0))
    assert all(group.labels == ["powersgd"] * 2 and group.account.codec == "none" for group in crew.groups)


@pytest.mark.parametrize(("first", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_a_sum_of_low_rank_comes_through(first: torch.dtype, near: float) -> None:
    shapes = [(40, 60), (48, 40)]
    gradients = [
        torch.cat([low_rank(1, 40, 60, member), low_rank(1, 48, 40, 10 + member)]) for member in range(MEMBERS)
    ]
    crew, arrived = Crew(4, shapes, first), torch.zeros(gradients[0].numel()).double()
    for _ in range(5):
        result = crew.step(gradients)[0]
        arrived += result
        assert error(result, total(gradients)) < near  # rank 3 in 4 directions
    assert error(arrived, 5 * total(gradients)) < near / 4  # what rounding left out came later


def test_the_warm_start_improves_the_approximation() -> None:
    shapes, size = [(96, 80)], 96 * 80
    signal = low_rank(4, 96, 80, 0)
    noise = torch.randn(size, generator=torch.Generator().manual_seed(1))
    gradients = [signal + noise] * MEMBERS
    crew, errors = Crew(4, shapes), []
    for _ in range(4):
        errors.append(error(crew.step(gradients)[0], total(gradients)))
        for memory in crew.memories:  # without what was left, to see the directions alone
            memory.take({}, 1)
    left, values, right = torch.linalg.svd(total(gradients).view(96, 80))
    best = error((left[:, :4] * values[:4] @ right[:4]).view(-1), total(gradients))
    assert errors[1] < errors[0]
    assert best <= errors[3] < best * 1.01 < errors[0]


def test_what_is_left_out_at_first_comes_later() -> None:
    """The same gradient again and again: its mean over steps arrives, whatever the rank."""
    crew, gradients, arrived = Crew(2), drawn(0), torch.zeros(COUNT).double()
    errors = []
    for step in range(1, 41):
        arrived += crew.step(gradients)[0].double()
        errors.append(error(arrived / step, total(gradients)))
    assert errors[-1] < 0.4 * errors[0]


def test_what_a_member_leaves_out_stays_bounded() -> None:
    crew = Crew(2)
    sizes = []
    for step in range(300):
        crew.step(drawn(step))
        sizes.append([float(memory.parts()["residual"].norm()) for memory in crew.memories])
    early, late = torch.tensor(sizes[50:150]).amax(), torch.tensor(sizes[-100:]).amax()
    assert late < 1.3 * early


def test_what_only_distinguishes_the_members_does_not_pile_up() -> None:
    """Gradients that cancel, along directions that are reached: nobody keeps them."""
    shapes, size = [(40, 60)], 40 * 60
    common, own = low_rank(1, 40, 60, 0), low_rank(1, 40, 60, 0)
    gradients = [common + own, common, common - own]
    crew = Crew(2, shapes)
    for _ in range(20):
        crew.step(gradients)
    assert all(memory.parts()["residual"].norm() < 1e-3 * size for memory in crew.memories)


def test_small_tensors_are_summed_exactly_with_what_was_left_of_them() -> None:
    crew, gradients = Crew(4), drawn(0)
    for memory in crew.memories:
        memory.take({"residual": torch.full((COUNT,), 3.0)}, MEMBERS)
    result = crew.step(gradients)[0]
    for stretch in plan(SHAPES, 4).stretches:
        expected = gradients[0] + 1 + (gradients[1] + 1) + (gradients[2] + 1)
        assert torch.equal(stretch.of(result), stretch.of(expected))
        assert all(not stretch.of(memory.parts()["residual"]).any() for memory in crew.memories)


def test_small_tensors_alone_take_one_operation() -> None:
    crew, gradients = Crew(4, [(3,), (2, 2)]), drawn(0, 7)
    assert torch.equal(crew.step(gradients)[2], gradients[0] + gradients[1] + gradients[2])
    assert crew.groups[0].labels == ["powersgd"]


def test_a_rank_beyond_all_dimensions_is_an_exact_sum() -> None:
    crew, gradients = Crew(4096), drawn(0)
    assert torch.equal(crew.step(gradients)[1], gradients[0] + gradients[1] + gradients[2])


def test_nothing_to_sum() -> None:
    assert Crew(2, []).step([torch.empty(0)] * MEMBERS)[0].numel() == 0


def test_a_gauge_weighs_the_errors_and_loses_nothing() -> None:
    gradients = drawn(0)
    gauge = torch.rand(COUNT, generator=torch.Generator().manual_seed(5)) * 10 + 0.01
    gauged, plain = Crew(4), Crew(4)
    result = gauged.step(gradients, gauge=gauge)[0]
    torch.testing.assert_close(result + gauged.left(), total(gradients), rtol=1e-5, atol=1e-4)
    without = plain.step([gradient / gauge for gradient in gradients])[0]
    for matrix in plan(SHAPES, 4).matrices:
        torch.testing.assert_close(matrix.of(result), matrix.of(without * gauge))


# -- again, and nothing ------------------------------------------------------------------------------------------------


def test_a_step_that_is_done_again_has_the_same_bits() -> None:
    crew = Crew(3)
    crew.step(drawn(0))
    crew.step(drawn(7), commit=False)
    once = crew.step(drawn(1), commit=False)
    left = [memory.parts()["residual"].clone() for memory in crew.memories]
    again = crew.step(drawn(1))
    assert same([once[0], again[0]])
    assert not any(
        same([before, memory.parts()["residual"]]) for before, memory in zip(left, crew.memories, strict=True)
    )
    other = Crew(3)
    other.step(drawn(0))
    assert same([other.step(drawn(1))[0], again[0]])


def test_zero_gradients_are_zeros_and_leave_the_directions() -> None:
    crew = Crew(4)
    crew.step(drawn(0))
    for memory in crew.memories:
        memory.take({}, 1)
    kept = [next(iter(memory.common().values())).clone() for memory in crew.memories]
    for _ in range(2):
        assert not crew.step([torch.zeros(COUNT)] * MEMBERS)[0].any()
    assert same([kept[0], *(next(iter(memory.common().values())) for memory in crew.memories)])
    assert crew.left().norm() == 0


def test_directions_that_a_poor_gradient_leaves_empty_come_back() -> None:
    shapes = [(40, 60)]
    crew, poor = Crew(4, shapes), torch.zeros(40, 60)
    poor[3, 5] = 1.0  # of rank one: three of four directions say nothing
    for _ in range(3):
        result = crew.step([poor.view(-1)] * MEMBERS)[0]
        assert torch.isfinite(result).all() and error(result, 3 * poor.view(-1).double()) < 1e-2
    rich = low_rank(4, 40, 60, 1)
    for _ in range(3):
        result = crew.step([rich] * MEMBERS)[0]
    assert error(result, 3 * rich.double()) < 1e-2


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e33])
def test_small_and_large_numbers(scale: float) -> None:
    crew, gradients = Crew(4, [(40, 60)], torch.float32), [low_rank(2, 40, 60, 0) * scale] * MEMBERS
    for _ in range(3):
        assert error(crew.step(gradients)[0], total(gradients)) < 1e-4


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("place", [0, 1234, 2403, 5000])
def test_what_is_not_finite_is_seen_by_all_and_kept_by_none(bad: float, place: int) -> None:
    crew = Crew(2)
    crew.step(drawn(0))
    before = [
        [memory.parts()["residual"].clone(), *map(Tensor.clone, memory.common().values())] for memory in crew.memories
    ]
    gradients = drawn(1)
    gradients[1][place] = bad
    gradients[2][place] = bad  # so that 3e38 overflows in the sum
    results = crew.step(gradients)
    assert all(not torch.isfinite(result).all() for result in results) and same(results)
    for memory, kept in zip(crew.memories, before, strict=True):
        assert same([memory.parts()["residual"], kept[0]]) and same([*memory.common().values(), kept[1]])
    assert torch.isfinite(crew.step(drawn(2))[0]).all()


def test_what_cancels_beyond_the_range_is_refused_by_all() -> None:
    """The sums are finite, but what two of the members would keep may not be."""
    crew = Crew(1, [(40, 60)])
    ones = torch.ones(40, 60)
    crew.step([ones.view(-1)] * MEMBERS)
    kept = [memory.parts()["residual"].clone() for memory in crew.memories]
    huge = torch.zeros(40, 60)
    huge[:, 7] = 2e37
    results = crew.step([huge.view(-1), -huge.view(-1), ones.view(-1)])
    assert all(result.isnan().all() for result in results)
    assert all(same([memory.parts()["residual"], before]) for memory, before in zip(crew.memories, kept, strict=True))


def test_nothing_more_is_sent_once_something_is_not_finite() -> None:
    crew = Crew(2)
    crew.step([torch.full((COUNT,), torch.nan)] * MEMBERS)
    assert all(len(group.labels) == 1 for group in crew.groups)


# -- mistakes, and a real group ----------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank=0 must be at least 1"):
        LowRankSum(SoloGroup(), 0, SHAPES)
    with pytest.raises(ConfigError, match="6 numbers came where the shapes have 4"):
        LowRankSum(SoloGroup(), 1, [(4,)]).sum(torch.zeros(6), Memory(6, CPU))
    memory = Memory(2400, CPU)
    LowRankSum(SoloGroup(), 1, [(40, 60)]).sum(torch.ones(2400), memory)
    with pytest.raises(CheckpointMismatch, match="60 numbers are kept"):
        LowRankSum(SoloGroup(), 1, [(60, 40)]).sum(torch.ones(2400), memory)


@pytest.mark.parametrize(
    ("collective", "first", "near"),
    [("gloo", torch.float32, 1e-3), ("gloo", torch.bfloat16, 0.1), ("shm", torch.bfloat16, 0.1)],
)
def test_members_of_a_real_group_agree_with_members_in_one_process(
    collective: str, first: torch.dtype, near: float
) -> None:
    """But for rounding: a ring adds in another order."""

    def fn(group: Group) -> dict[str, Any]:
        memory = Memory(COUNT, CPU)
        summing = LowRankSum(group, 4, SHAPES, first=first)
        for step in range(3):
            flat = drawn(step)[group.rank]
            memory.open()
            summing.sum(flat, memory, key=step)
            memory.commit()
        labels = sorted({flow.codec for flow in group.account.now().flows if flow.kind == GRADIENT})
        return {"flat": flat, "residual": memory.parts()["residual"], "labels": labels, **memory.common()}

    crew = Crew(4, first=first)
    for step in range(3):
        expected = crew.step(drawn(step))[0]
    answers = run_ranks(MEMBERS, fn, collective=collective)
    assert same([answer["flat"] for answer in answers])
    assert same([answer["powersgd rank 4"] for answer in answers])
    assert {label for answer in answers for label in answer["labels"]} == {"powersgd"}
    for answer, memory in zip(answers, crew.memories, strict=True):
        assert error(answer["flat"], expected.double()) < near
        assert error(answer["residual"], memory.parts()["residual"].double()) < near
