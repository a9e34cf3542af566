from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shoal.core.atoms import (
    LEAST_ATOMS,
    MOST_ATOMS,
    Course,
    Node,
    StepSpan,
    atom_count,
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
    """The bits of a deterministic run hang on the cut: a resumed one must find the same."""
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
