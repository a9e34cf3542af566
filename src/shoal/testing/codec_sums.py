"""The conformance suite of encoded sums: what `shoal.comm.codecs.contract` promises of a `Summing`, as cases.

    check_summing(SumClaim(lambda group, shapes: MySum(group), close=0.1))

Members are threads of this process (`shoal.testing.fake_group`), unless the claim says how to run others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from shoal.comm.codecs.contract import Summing
from shoal.comm.codecs.memory import RESIDUAL, Memory
from shoal.comm.group import Group
from shoal.testing.codecs import CaseFailed, gauge_of, gradient
from shoal.testing.fake_group import run_members

CPU = torch.device("cpu")
SHAPES = ((24, 40), (7,), (3, 5), (16, 2, 20))
"""Of the tensors that are summed: matrices that are worth factors, and some that are not."""
REDONE = 5
"""Steps that are done again: few enough that no measurement of the first steps has led to a decision."""
FEW = (0, 1, 2, 3, 7)
"""Counts of numbers, most of them smaller than a group."""


@dataclass(frozen=True)
class SumClaim:
    """A summing, and what it says of itself."""

    make: Callable[[Group, Sequence[tuple[int, ...]]], Summing]
    close: float
    """‖result − sum‖ / ‖sum‖ of one step from an empty memory is at most this."""
    conserves: bool = True
    """What is applied and what remains in memory are, over all steps and members, what was given."""
    bounded: float = 20.0
    """What remains in memory is at most so many times the largest gradient."""
    run: Callable[[int, Callable[[Any], Any]], list[Any]] = run_members
    """Runs a function on each of so many members: `shoal.testing.ranks.run_ranks` has them in real groups."""


class Member:
    """One member at work: its summing, its memory, and gradients that differ between members and steps."""

    def __init__(self, claim: SumClaim, group: Group, shapes: Sequence[tuple[int, ...]] = SHAPES) -> None:
        self.group = group
        self.count = sum(prod(shape) for shape in shapes)
        self.memory = Memory(self.count, CPU)
        self.summing = claim.make(group, shapes)

    def gradient(self, step: int) -> Tensor:
        return (gradient(self.count, 77) + gradient(self.count, 1000 * self.group.rank + step)) / self.group.size

    def step(self, step: int, numbers: Tensor | None = None, gauge: Tensor | None = None) -> Tensor:
        """What the sum of a step is; whoever calls this commits it."""
        result = (self.gradient(step) if numbers is None else numbers).clone()
        self.memory.open()
        self.summing.sum(result, self.memory, key=step, gauge=gauge)
        return result

    def kept(self) -> Tensor:
        """What this member has still to send, as one vector that is its own."""
        return self.memory.parts().get(RESIDUAL, torch.zeros(self.count)).clone()


def check_summing(claim: SumClaim, sizes: Iterable[int] = (1, 2, 3, 5), *, leave_out: Collection[str] = ()) -> None:
    """Put a summing through all cases but those in `leave_out`. Raises `CaseFailed`."""
    unknown = sorted(set(leave_out) - set(SUM_CASES))
    if unknown:
        raise ValueError(f"there is no case {unknown[0]!r} to leave out; there are {', '.join(SUM_CASES)}")
    for size in sizes:
        for name, case in SUM_CASES.items():
            if name in leave_out:
                continue
            try:
                case(claim, size)
            except Exception as error:
                raise CaseFailed(f"{name}: {size} members: {error!r}") from error


def assert_equal_bits(found: Sequence[Tensor], what: object = "") -> None:
    first = found[0].view(torch.int32)
    for rank, other in enumerate(found):
        assert torch.equal(first, other.view(torch.int32)), f"{what}: members 0 and {rank} have different bits"


def total(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([part.double() for part in parts]).sum(0)


# -- cases -------------------------------------------------------------------------------------------------------------


def sums_are_close_and_equal(claim: SumClaim, size: int) -> None:
    def member(group: Group) -> tuple[Tensor, Tensor]:
        one = Member(claim, group)
        return one.gradient(0), one.step(0)

    given, results = zip(*claim.run(size, member), strict=True)
    assert_equal_bits(results)
    expected = total(given)
    off = float((results[0].double() - expected).norm() / expected.norm())
    assert off <= claim.close, f"a sum is off by {off:.3g} of its norm where {claim.close:g} is claimed"


def few_numbers(claim: SumClaim, size: int) -> None:
    """Fewer than members: some have nothing to add up."""

    def member(group: Group) -> list[Tensor]:
        found = []
        for count in FEW:
            one = Member(claim, group, [(count,)])
            for step in range(2):
                found.append(one.step(step, torch.full((count,), float(group.rank + 1))))
                one.memory.commit()
        return found

    found = claim.run(size, member)
    for results in zip(*found, strict=True):
        assert_equal_bits(results, f"{results[0].numel()} numbers")
        assert bool(torch.isfinite(results[0]).all())
    applied = float(sum(result.sum() for result in found[0][2:4]))
    assert applied > 0.5 * size * (size + 1) / 2, f"of one number, {applied:g} came out of two steps"


def nothing_is_lost_over_steps(claim: SumClaim, size: int, steps: int = 20) -> None:
    def member(group: Group) -> tuple[list[Tensor], Tensor, Tensor, float]:
        one = Member(claim, group)
        given, applied, results, largest = torch.zeros(one.count).double(), torch.zeros(one.count).double(), [], 0.0
        for step in range(steps):
            numbers = one.gradient(step)
            results.append(one.step(step, numbers))
            one.memory.commit()
            given += numbers
            applied += results[-1]
            largest = max(largest, float(numbers.norm()))
        return results, given - applied / size, one.kept(), largest

    found = claim.run(size, member)
    for step in range(steps):
        assert_equal_bits([results[step] for results, *_ in found], f"step {step}")
    missing, kept = total([missing for _, missing, *_ in found]), total([kept for *_, kept, _ in found])
    largest = size * max(largest for *_, largest in found)
    if claim.conserves:
        off, granted = float((missing - kept).norm()), 1e-5 * (largest * steps**0.5 + float(kept.norm()))
        assert off <= granted, f"{off:g} of {float(missing.norm()):g} was lost over {steps} steps"
    most = max(float(kept.norm()) for *_, kept, _ in found)
    assert most <= claim.bounded * largest, f"what remains grew to {most:g} over {steps} steps"


def a_step_done_again_is_the_same(claim: SumClaim, size: int) -> None:
    def member(group: Group) -> list[Tensor]:
        one = Member(claim, group)
        found = []
        for step in range(REDONE):
            first = one.step(step)
            again = one.step(step)
            assert torch.equal(first, again), f"step {step}"
            one.step(step, 9 * gradient(one.count, step))  # one that is given up
            assert torch.equal(first, one.step(step)), f"step {step}, after another that did not count"
            one.memory.commit()
            one.memory.commit()
            found.append(first)
        return found

    def calm(group: Group) -> list[Tensor]:
        one = Member(claim, group)
        found = []
        for step in range(REDONE):
            found.append(one.step(step))
            one.memory.commit()
        return found

    for redone, once in zip(claim.run(size, member)[0], claim.run(size, calm)[0], strict=True):
        assert torch.equal(redone, once), "steps that were done again end elsewhere than those that were not"


def what_is_not_finite_reaches_all(claim: SumClaim, size: int) -> None:
    """And no residual: there, what was still to be sent before is so after, of all members together."""
    for bad, at in ((torch.nan, 0), (torch.inf, -1), (-torch.inf, 500)):

        def member(group: Group, bad: float = bad, at: int = at) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            one = Member(claim, group)
            one.step(0)
            one.memory.commit()
            before = one.kept()
            numbers = one.gradient(1)
            if group.rank == group.size - 1:
                numbers[at] = bad
            result = one.step(1, numbers)
            one.memory.commit()
            kept, after = one.kept(), one.step(2)
            return result, before, kept, after

        found = claim.run(size, member)
        for result, _, kept, after in found:
            assert not torch.isfinite(result).all(), f"{bad} on one member is not seen by all"
            assert bool(torch.isfinite(kept).all()), f"{bad} is in a residual"
            assert bool(torch.isfinite(after).all()), f"{bad} comes again in the next step"
        before, kept = total([before for _, before, *_ in found]), total([kept for *_, kept, _ in found])
        off = abs(float(before[at] - kept[at]))
        assert off <= 1e-6 * float(before.norm()), f"where {bad} was, residuals were {before[at]} and are {kept[at]}"


def gauges(claim: SumClaim, size: int) -> None:
    """Nothing is lost by weighing, and all members have the same bits."""

    def member(group: Group) -> tuple[Tensor, Tensor, Tensor]:
        one = Member(claim, group)
        gauge = gauge_of(one.count)
        numbers = one.gradient(0)
        before = gauge.clone()
        result = one.step(0, numbers, gauge)
        assert torch.equal(gauge, before), "the gauge is not changed"
        one.memory.commit()
        return numbers, result, one.kept()

    given, results, kept = zip(*claim.run(size, member), strict=True)
    assert_equal_bits(results)
    if claim.conserves:
        off = float((total(given) - results[0].double() - total(kept)).norm())
        assert off <= 1e-5 * float(total(given).norm()), f"{off:g} is lost"


def large_and_small_numbers(claim: SumClaim, size: int) -> None:
    def member(group: Group) -> list[Tensor]:
        found = []
        for scale in (1e30, 1e-30, 0.0):
            one = Member(claim, group)
            for step in range(3):
                found.append(one.step(step, scale * one.gradient(step)))
                one.memory.commit()
                assert bool(torch.isfinite(one.kept()).all()), scale
        return found

    for results in zip(*claim.run(size, member), strict=True):
        assert_equal_bits(results)
        assert bool(torch.isfinite(results[0]).all()), "finite numbers have a finite sum"


def the_account_has_its_name(claim: SumClaim, size: int) -> None:
    def member(group: Group) -> tuple[str, list[str]]:
        one = Member(claim, group)
        one.step(0)
        assert group.account.codec == "none", "the label is put back"
        flows = group.account.now().flows
        return one.summing.name, [flow.codec for flow in flows if flow.kind == "gradient" and flow.bytes]

    found = claim.run(size, member)
    name, codecs = found[0][0], sorted({codec for _, codecs in found for codec in codecs})
    assert size == 1 or any(codec.startswith(name) for codec in codecs), f"{name} is sent as {codecs}"


SUM_CASES: dict[str, Callable[[SumClaim, int], None]] = {
    case.__name__: case
    for case in (
        sums_are_close_and_equal,
        few_numbers,
        nothing_is_lost_over_steps,
        a_step_done_again_is_the_same,
        what_is_not_finite_reaches_all,
        gauges,
        large_and_small_numbers,
        the_account_has_its_name,
    )
}
"""By name, in the order in which they run."""
