"""What encoding remembers: shadows, commits, and members that change."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.codecs.memory import RESIDUAL, Memory

CPU = torch.device("cpu")


def numbers(*values: float) -> Tensor:
    return torch.tensor(values)


def remembered(memory: Memory, *values: float, name: str = RESIDUAL) -> None:
    """A step that counts and leaves these."""
    memory.open()
    memory.private(name)[1].copy_(numbers(*values))
    memory.commit()


def test_private_vectors_begin_with_zeros() -> None:
    memory = Memory(3, CPU)
    assert not memory.has()
    value, shadow = memory.private()
    assert memory.has() and torch.equal(value, torch.zeros(3)) and shadow.shape == value.shape
    assert value.data_ptr() != shadow.data_ptr()


def test_what_is_written_counts_after_commit() -> None:
    memory = Memory(2, CPU)
    memory.open()
    _, shadow = memory.private()
    shadow.copy_(numbers(1, 2))
    assert torch.equal(memory.private()[0], torch.zeros(2)), "not before"
    memory.commit()
    assert torch.equal(memory.private()[0], numbers(1, 2))


def test_committing_twice_is_once() -> None:
    memory = Memory(2, CPU)
    remembered(memory, 1, 2)
    memory.commit()
    assert torch.equal(memory.parts()[RESIDUAL], numbers(1, 2))


def test_a_step_that_is_done_again_starts_from_the_same() -> None:
    memory = Memory(2, CPU)
    remembered(memory, 1, 2)
    memory.open()
    memory.private()[1].copy_(numbers(8, 8))
    memory.open()
    value, shadow = memory.private()
    assert torch.equal(value, numbers(1, 2))
    shadow.copy_(numbers(3, 4))
    memory.commit()
    assert torch.equal(memory.private()[0], numbers(3, 4))


def test_what_a_given_up_step_wrote_never_counts() -> None:
    """The step that takes its place may not use the vector at all."""
    memory = Memory(2, CPU)
    remembered(memory, 1, 2)
    memory.open()
    memory.private()[1].copy_(numbers(8, 8))
    memory.open()
    memory.commit()
    assert torch.equal(memory.parts()[RESIDUAL], numbers(1, 2))


def test_vectors_have_names() -> None:
    memory = Memory(1, CPU)
    remembered(memory, 5, name="momentum")
    assert memory.has("momentum") and not memory.has()
    remembered(memory, 6)
    assert {name: float(value) for name, value in memory.parts().items()} == {"momentum": 5.0, RESIDUAL: 6.0}


def test_owned_residuals_commit_too() -> None:
    memory = Memory(6, CPU)
    memory.open()
    [(value, shadow)] = memory.owned((2, 4))
    assert torch.equal(value, torch.zeros(2))
    shadow.copy_(numbers(1, 2))
    memory.commit()
    assert torch.equal(memory.owned((2, 4))[0][0], numbers(1, 2))


def test_another_chunk_has_the_old_one_folded() -> None:
    memory = Memory(6, CPU)
    remembered(memory, 1, 1, 1, 1, 1, 1)
    memory.open()
    memory.owned((2, 4))[0][1].copy_(numbers(10, 20))
    memory.commit()
    assert torch.equal(memory.owned((3, 6))[0][0], torch.zeros(3))
    assert torch.equal(memory.private()[0], numbers(1, 1, 11, 21, 1, 1))


def test_folding_needs_no_residual_before() -> None:
    memory = Memory(3, CPU)
    memory.open()
    memory.owned((1, 3))[0][1].copy_(numbers(4, 5))
    memory.commit()
    memory.fold()
    memory.fold()
    assert torch.equal(memory.parts()[RESIDUAL], numbers(0, 4, 5))


def test_folding_leaves_out_what_does_not_count() -> None:
    memory = Memory(2, CPU)
    memory.open()
    memory.owned((0, 2))[0][1].copy_(numbers(4, 5))
    memory.open()
    assert torch.equal(memory.parts()[RESIDUAL], torch.zeros(2))


def test_parts_taken_by_other_members_have_the_same_sum() -> None:
    given = [Memory(4, CPU) for _ in range(3)]
    for rank, memory in enumerate(given):
        remembered(memory, rank, 2, 3, 4)
        memory.open()
        memory.owned((rank, rank + 1))[0][1].fill_(1.5)
        memory.commit()
    totals = {RESIDUAL: torch.stack([memory.parts()[RESIDUAL] for memory in given]).sum(0)}
    assert torch.equal(totals[RESIDUAL], numbers(4.5, 7.5, 10.5, 12))
    taking = [Memory(4, CPU) for _ in range(5)]
    for memory in taking:
        memory.owned((0, 4))[0][1].fill_(9)
        memory.take(totals, 5)
    found = torch.stack([memory.parts()[RESIDUAL] for memory in taking]).sum(0)
    assert torch.allclose(found, totals[RESIDUAL])


def test_taken_parts_are_a_copy_and_have_shadows() -> None:
    total = numbers(2, 4)
    memory = Memory(2, CPU)
    memory.take({RESIDUAL: total}, 1)
    total.zero_()
    memory.open()
    value, shadow = memory.private()
    assert torch.equal(value, numbers(2, 4))
    shadow.zero_()
    memory.commit()
    assert torch.equal(memory.parts()[RESIDUAL], torch.zeros(2))


def test_taking_nothing_leaves_shared_vectors() -> None:
    memory = Memory(2, CPU)
    remembered(memory, 1, 2)
    memory.owned((0, 1))
    memory.shared("scale", lambda: torch.ones(1))
    memory.take({}, 1)
    assert memory.parts() == {} and list(memory.common()) == ["scale"]


def test_looking_at_parts_changes_nothing() -> None:
    memory = Memory(3, CPU)
    remembered(memory, 1, 2, 3)
    memory.open()
    memory.owned((0, 1))[0][1].fill_(4)
    memory.commit()
    assert memory.parts()[RESIDUAL].tolist() == memory.parts()[RESIDUAL].tolist() == [5.0, 2.0, 3.0]
    assert memory.owned((0, 1))[0][0].tolist() == [4.0] and memory.private()[0].tolist() == [1.0, 2.0, 3.0]


def test_what_is_left_of_a_step_is_scaled_as_what_is_applied() -> None:
    """And nothing else: not what was left before, nor other vectors, nor what was not written in this step."""
    memory = Memory(4, CPU)
    remembered(memory, 1, 1, 1, 1)
    remembered(memory, 5, 5, 5, 5, name="momentum")
    memory.open()
    memory.owned((1, 3))[0][1].copy_(numbers(6, 8))
    memory.private()[1].copy_(numbers(2, 2, 2, 4))
    memory.private("momentum")[1].copy_(numbers(3, 3, 3, 3))
    memory.temper(0.5, [RESIDUAL, "none"])
    assert torch.equal(memory.private()[0], numbers(1, 1, 1, 1))
    memory.commit()
    assert torch.equal(memory.parts()[RESIDUAL], numbers(1, 4, 5, 2))
    assert torch.equal(memory.parts()["momentum"], numbers(3, 3, 3, 3))
    memory.open()
    memory.private("momentum")[1].copy_(numbers(8, 8, 8, 8))
    memory.temper(0.5, [RESIDUAL, "momentum"])
    memory.commit()
    assert torch.equal(memory.parts()[RESIDUAL], numbers(1, 4, 5, 2))
    assert torch.equal(memory.parts()["momentum"], numbers(4, 4, 4, 4))


def test_a_stretch_of_which_nothing_is_applied_keeps_what_it_had() -> None:
    cases = {(0, 2): [1, 11, 25, 5], (1, 4): [5, 11, 11, 1], (3, 4): [5, 25, 25, 1], (2, 2): [5, 25, 25, 5]}
    for (start, stop), expected in cases.items():
        memory = Memory(4, CPU)
        memory.open()
        memory.owned((1, 3))[0][1].fill_(10)
        memory.private()[1].fill_(1)
        memory.private("momentum")[1].fill_(2)
        memory.commit()
        memory.open()
        memory.owned((1, 3))[0][1].fill_(20)
        memory.private()[1].fill_(5)
        memory.private("momentum")[1].fill_(3)
        memory.undo(start, stop, [RESIDUAL])
        memory.commit()
        assert memory.parts()[RESIDUAL].tolist() == expected
        assert memory.parts()["momentum"].tolist() == [3] * 4


def test_what_is_dropped_begins_with_zeros() -> None:
    memory = Memory(2, CPU)
    remembered(memory, 1, 2, name="squares")
    remembered(memory, 3, 4)
    memory.drop("squares")
    memory.drop("squares")
    assert not memory.has("squares") and torch.equal(memory.parts()[RESIDUAL], numbers(3, 4))
    assert torch.equal(memory.private("squares")[0], torch.zeros(2))


def test_other_units_are_those_of_all_that_is_to_be_sent() -> None:
    memory = Memory(2, CPU)
    remembered(memory, 1, 2)
    memory.owned((0, 1))[0][1].fill_(4)
    memory.commit()
    memory.rescale(0.5)
    assert memory.parts()[RESIDUAL].tolist() == [2.5, 1.0]


def test_shared_vectors_are_made_once_and_committed() -> None:
    memory = Memory(2, CPU)
    memory.open()
    value, shadow = memory.shared("scale", lambda: torch.full((3,), 7.0))
    assert torch.equal(value, torch.full((3,), 7.0))
    shadow.fill_(8)
    memory.commit()
    assert torch.equal(memory.shared("scale", lambda: torch.zeros(3))[0], torch.full((3,), 8.0))


def test_adopted_vectors_are_own() -> None:
    memory, other = Memory(2, CPU), Memory(2, CPU)
    memory.shared("scale", lambda: torch.full((3,), 7.0))
    other.shared("other", lambda: torch.zeros(1))
    other.adopt(memory.common())
    memory.common()["scale"].zero_()
    assert {name: value.tolist() for name, value in other.common().items()} == {"scale": [7.0, 7.0, 7.0]}
    other.open()
    other.shared("scale", lambda: torch.zeros(3))[1].fill_(1)
    other.commit()
    assert other.common()["scale"].tolist() == [1.0, 1.0, 1.0]


def test_several_chunks_are_owned_and_folded_together() -> None:
    memory = Memory(8, CPU)
    for _, shadow in memory.owned((6, 8), (1, 3)):
        shadow.copy_(numbers(4, 5))
    memory.undo(2, 7, ())
    memory.commit()
    wanted = [0.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 5.0]
    assert memory.parts()[RESIDUAL].tolist() == wanted
    assert [value.tolist() for value, _ in memory.owned((6, 8), (1, 3))] == [[0.0, 5.0], [4.0, 0.0]]
    # another cut: all of it is the member's own to send
    assert [value.tolist() for value, _ in memory.owned((1, 3))] == [[0.0, 0.0]]
    assert memory.private()[0].tolist() == wanted
