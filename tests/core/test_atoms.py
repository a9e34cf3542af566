from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.atoms import (
    LEAST_ATOMS,
    MOST_ATOMS,
    Course,
    Node,
    Span,
    StepSpan,
    atom_count,
    cut,
    forwards,
    samples_of,
    share,
    share_atoms,
    tree_nodes,
    tree_sum,
)

courses = st.builds(Course, size=st.integers(1, 400), batch=st.integers(1, 450))
samples = st.integers(1, 5000)


@given(course=courses, epochs=st.integers(1, 4))
def test_every_position_is_in_one_step_and_one_atom_of_each_epoch(course: Course, epochs: int) -> None:
    met: dict[int, list[int]] = {}
    for number in range(epochs * course.steps_per_epoch):
        step = course.step(number)
        assert step.step == number
        positions = [position for atom in step.atoms() for position in range(atom.start, atom.stop)]
        assert positions == list(range(step.start, step.stop))
        met.setdefault(step.epoch, []).extend(positions)
    assert met == {epoch: list(range(course.size)) for epoch in range(epochs)}


@given(course=courses, epochs=st.integers(1, 4), workers=st.integers(1, 30), limit=st.none() | st.integers(1, 40))
def test_every_position_is_computed_once_whoever_computes_it(
    course: Course, epochs: int, workers: int, limit: int | None
) -> None:
    for number in range(epochs * course.steps_per_epoch):
        step = course.step(number)
        atoms = step.atoms()
        computed: list[int] = []
        for slice_ in share(len(atoms), workers):
            for group in forwards([atoms[at] for at in slice_], limit, alone=number % 2 == 0):
                computed += [position for span in group for position in range(span.start, span.stop)]
        assert computed == list(range(step.start, step.stop))


@given(course=courses, number=st.integers(0, 1000))
def test_steps_are_full_but_for_the_last_of_an_epoch(course: Course, number: int) -> None:
    step = course.step(number)
    last = step.stop == course.size
    assert last == ((number + 1) % course.steps_per_epoch == 0)
    assert step.samples == course.batch or (last and 0 < step.samples < course.batch)


@given(course=courses, number=st.integers(0, 300))
def test_samples_before_a_step_are_those_of_the_steps_before_it(course: Course, number: int) -> None:
    assert course.samples_before(number) == sum(course.step(at).samples for at in range(number))


@given(samples)
def test_a_step_has_as_many_atoms_as_make_sense(count: int) -> None:
    atoms = atom_count(count)
    assert 1 <= atoms <= min(count, MOST_ATOMS)
    assert atoms == count or atoms >= LEAST_ATOMS


def test_atom_counts_never_change() -> None:
    """Keys of random numbers hang on the cut: a resumed run must find the same one."""
    counts = {1: 1, 2: 2, 7: 7, 8: 8, 20: 8, 32: 8, 33: 9, 64: 16, 95: 24, 96: 24, 256: 24, 10**6: 24}
    assert {size: atom_count(size) for size in counts} == counts
    cut = StepSpan(step=0, epoch=0, start=100, stop=121).atoms()
    assert [(atom.start, atom.stop) for atom in cut] == list(pairwise([100, 102, 105, 107, 110, 113, 115, 118, 121]))


@given(start=st.integers(0, 10**12), count=samples)
def test_the_cut_depends_on_the_number_of_samples_alone(start: int, count: int) -> None:
    here = StepSpan(step=5, epoch=2, start=start, stop=start + count).atoms()
    there = StepSpan(step=0, epoch=0, start=0, stop=count).atoms()
    assert [(atom.atom, atom.start - start, atom.stop - start) for atom in here] == [tuple(atom) for atom in there]
    lengths = [atom.samples for atom in here]
    assert min(lengths) >= 1 and max(lengths) - min(lengths) <= 1


@given(count=st.integers(0, 300), members=st.integers(1, 50))
def test_shares_cover_in_order_and_differ_by_one_at_most(count: int, members: int) -> None:
    shares = share(count, members)
    assert [thing for part in shares for thing in part] == list(range(count))
    lengths = [len(part) for part in shares]
    assert len(shares) == members and max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6, 8, 12, 24])
def test_a_large_step_is_shared_evenly(workers: int) -> None:
    assert {len(part) for part in share(atom_count(1000), workers)} == {MOST_ATOMS // workers}


slices = st.builds(
    lambda count, first, length: StepSpan(0, 0, 0, count).atoms()[first : first + length],
    st.integers(1, 500),
    st.integers(0, 23),
    st.integers(0, 24),
)


@given(atoms=slices, limit=st.none() | st.integers(1, 60), alone=st.booleans())
def test_forwards_keep_order_cover_and_respect_the_limit(atoms: list[Span], limit: int | None, alone: bool) -> None:
    groups = forwards(atoms, limit, alone=alone)
    assert all(groups)
    parts = [part for group in groups for part in group]
    positions = [position for part in parts for position in range(part.start, part.stop)]
    assert positions == [position for atom in atoms for position in range(atom.start, atom.stop)]
    owner = {position: atom.atom for atom in atoms for position in range(atom.start, atom.stop)}
    assert all(owner[position] == part.atom for part in parts for position in range(part.start, part.stop))
    if limit is not None:
        assert max((sum(part.samples for part in group) for group in groups), default=0) <= limit
    if alone:
        assert all(len(group) == 1 for group in groups)
        whole = [atom for atom in atoms if limit is None or atom.samples <= limit]
        assert all([atom] in groups for atom in whole)


@given(atoms=slices, limit=st.integers(1, 60))
def test_forwards_are_as_few_as_a_greedy_filling_gives(atoms: list[Span], limit: int) -> None:
    groups = forwards(atoms, limit, alone=False)
    totals = [sum(part.samples for part in group) for group in groups]
    # what could have been joined was: the next group's first atom did not fit, or was cut itself
    for total, following in zip(totals, groups[1:], strict=False):
        head = following[0]
        cut = head not in atoms
        assert cut or total + head.samples > limit


def test_without_a_limit_a_slice_is_one_forward() -> None:
    atoms = StepSpan(0, 0, 0, 100).atoms()[3:9]
    assert forwards(atoms, None, alone=False) == [atoms]
    assert forwards(atoms, None, alone=True) == [[atom] for atom in atoms]
    assert forwards([], 4, alone=False) == []


# -- the tree ----------------------------------------------------------------------------------------------------------


def covered(node: Node) -> range:
    return range(node.place << node.level, (node.place + 1) << node.level)


@given(start=st.integers(0, 60), length=st.integers(0, 60))
def test_nodes_cover_exactly_their_atoms_in_order(start: int, length: int) -> None:
    nodes = tree_nodes(range(start, start + length))
    assert [atom for node in nodes for atom in covered(node)] == list(range(start, start + length))


@given(start=st.integers(0, 60), length=st.integers(1, 60))
def test_nodes_are_as_large_as_can_be(start: int, length: int) -> None:
    atoms = range(start, start + length)
    for node in tree_nodes(atoms):
        parent = covered(Node(node.level + 1, node.place // 2))
        assert parent.start < atoms.start or parent.stop > atoms.stop


@st.composite
def partitions(draw: st.DrawFn) -> tuple[int, list[range]]:
    count = draw(st.integers(1, 40))
    cuts = sorted(draw(st.lists(st.integers(0, count), max_size=10)))
    edges = [0, *cuts, count]
    return count, [range(first, last) for first, last in pairwise(edges)]


def joined(left: str, right: str) -> str:
    return f"({left}+{right})"


@given(partitions())
def test_any_partition_sums_in_the_same_order(partition: tuple[int, list[range]]) -> None:
    """Sums are of strings, so that the result shows every parenthesis."""
    count, parts = partition
    values = {node: subtree(node) for part in parts for node in tree_nodes(part)}
    assert tree_sum(values, count, joined) == tree_sum({Node(0, at): str(at) for at in range(count)}, count, joined)


def subtree(node: Node) -> str:
    """The sum over a complete node, as whoever owns all of its atoms would make it."""
    if node.level == 0:
        return str(node.place)
    return joined(subtree(Node(node.level - 1, 2 * node.place)), subtree(Node(node.level - 1, 2 * node.place + 1)))


def test_the_shape_of_the_tree_never_changes() -> None:
    """The bits of a deterministic run hang on it."""
    leaves = {Node(0, at): str(at) for at in range(6)}
    assert tree_sum(leaves, 6, joined) == "(((0+1)+(2+3))+(4+5))"
    assert tree_sum(leaves, 5, joined) == "(((0+1)+(2+3))+4)"
    assert tree_sum(leaves, 1, joined) == "0"


def test_the_last_forward_has_enough_samples_where_there_are_enough() -> None:
    ones = cut(8)[:7]
    assert [len(group) for group in forwards(ones, 6, alone=False)] == [6, 1]
    groups = forwards(ones, 6, alone=False, least=2)
    assert [len(group) for group in groups] == [5, 2]
    assert [span for group in groups for span in group] == list(ones)
    assert [len(group) for group in forwards(ones, 1, alone=False, least=2)] == [1] * 7
    assert [len(group) for group in forwards(ones, 6, alone=True, least=2)] == [1] * 7
    assert [len(group) for group in forwards(ones[:1], 6, alone=False, least=2)] == [1]


@given(samples=st.integers(1, 200), members=st.integers(1, 30))
def test_who_computes_any_atom_has_enough_samples(samples: int, members: int) -> None:
    atoms = cut(samples)
    assert share_atoms(atoms, members) == share(len(atoms), members)
    dealt = share_atoms(atoms, members, 2)
    assert len(dealt) == members
    assert [number for part in dealt for number in part] == list(range(len(atoms)))
    assert samples == 1 or all(samples_of([atoms[number] for number in part]) >= 2 for part in dealt if part)


@given(atoms=slices, limit=st.none() | st.integers(2, 60))
def test_no_forward_has_too_few_samples(atoms: list[Span], limit: int | None) -> None:
    groups = forwards(atoms, limit, alone=False, least=2)
    totals = [samples_of(group) for group in groups]
    assert len(groups) < 2 or min(totals) >= 2
    assert limit is None or max(totals, default=0) <= limit + 1
    spans = [span for group in groups for span in group]
    assert [at for span in spans for at in range(span.start, span.stop)] == [
        at for atom in atoms for at in range(atom.start, atom.stop)
    ]
