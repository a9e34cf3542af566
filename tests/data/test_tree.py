"""Trees through JSON and msgpack and back."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shoal.data.tree import Unpackable, leaves, mapped, pack, unpack

Point = namedtuple("Point", ["x", "y"])

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
NUMPY_DTYPES = ["?", "i1", "i4", "i8", "u1", "u2", "u8", "f2", "f4", "f8", "c8", "c16", ">f4", ">i8"]


def through(encoding: Any, tree: Any) -> Any:
    structure, tensors = pack(tree)
    return unpack(encoding.decode(encoding.encode(structure)), tensors)


def same(left: Any, right: Any) -> bool:
    """Equal in type and, for numbers, to the bit."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and left.equal(right)
    if isinstance(left, (np.ndarray, np.generic)):
        kind = type(left) is type(right) and left.dtype.newbyteorder("=") == right.dtype
        return kind and left.shape == right.shape and left.astype(right.dtype).tobytes() == right.tobytes()
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        pairs = zip(left.items(), right.items(), strict=False)
        return len(left) == len(right) and all(same(list(one), list(other)) for one, other in pairs)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return (math.isnan(left) and math.isnan(right)) or left.hex() == right.hex()
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    return bool(left == right)


tensors = st.builds(
    lambda shape, dtype, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
arrays = st.sampled_from(NUMPY_DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3))
)
scalars = st.sampled_from(["?", "i4", "u8", "f2", "f8", "c8"]).flatmap(lambda dtype: hnp.from_dtype(np.dtype(dtype)))
strings = st.text(st.characters(), max_size=8) | st.just("caf\udce9") | st.just("\\u0041\n")
hashable = st.none() | st.booleans() | st.integers() | st.floats() | strings
single_values = hashable | st.complex_numbers() | st.binary(max_size=8) | tensors | arrays | scalars


def branches(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = hashable | st.tuples(st.integers(), strings)
    few = st.lists(parts, max_size=4)
    return few | few.map(tuple) | st.dictionaries(keys, parts, max_size=4) | st.builds(Point, parts, parts)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.recursive(single_values, branches, max_leaves=12))
def test_a_tree_comes_back_as_it_was(tree: Any) -> None:
    assert same(tree, through(msgspec.json, tree))
    assert same(tree, through(msgspec.msgpack, tree))


def test_tensors_are_referred_to_not_copied() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    structure, tensors = pack({"a": weight, "b": [weight]})
    assert structure == ["d", [["a", ["t", 0]], ["b", ["l", [["t", 1]]]]]]
    assert {tensor.data_ptr() for tensor in tensors} == {weight.data_ptr()}
    assert not any(tensor.requires_grad for tensor in tensors)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (OrderedDict(a=1), {"a": 1}),
        (defaultdict(int, a=1), {"a": 1}),
        (bytearray(b"ab"), b"ab"),
        (torch.Size([2, 3]), (2, 3)),
        (Counter({3: 2, 5: 1}), Counter({3: 2, 5: 1})),
    ],
)
def test_near_relatives_come_back_as_documented(tree: Any, expected: Any) -> None:
    assert same(expected, through(msgspec.json, tree))


@dataclass
class Opaque:
    """Something that only pickle could carry."""


@pytest.mark.parametrize(
    ("tree", "place"),
    [
        ({"a": [1, Opaque()]}, "value['a'][1]"),
        ({"a": {1, 2}}, "value['a']"),
        (Point(1, Opaque()), "value.y"),
        ([lambda: 0], "value[0]"),
        ({Opaque: 1}, "value's key"),
        ([np.array([None])], "value[0]"),
        ([np.ma.masked_array([1, 2], [True, False])], "value[0]"),
        ([np.array(["text"])], "value[0]"),
    ],
)
def test_what_cannot_leave_is_named(tree: Any, place: str) -> None:
    with pytest.raises(Unpackable) as error:
        pack(tree)
    assert str(error.value).startswith(f"{place} is ")


def test_a_named_tuple_that_cannot_be_found_again_is_refused() -> None:
    local = namedtuple("local", ["x"])
    with pytest.raises(Unpackable, match=r"test_tree.*local"):
        pack(local(1))


@pytest.mark.parametrize("structure", [["?", 1], ["nt", ["os", "nothing", []]], ["nt", ["os", "system", []]]])
def test_a_strange_structure_is_refused(structure: Any) -> None:
    with pytest.raises(ValueError, match="packed tree"):
        unpack(structure, [])


# ---- mappings and dataclasses


class Encoding(UserDict[str, Any]):
    """Like `transformers.BatchEncoding`: items by attribute, and objects of a tokenizer beside them."""

    def __init__(self, data: Any = None, encodings: Any = None, sequences: int | None = None) -> None:
        super().__init__(data)
        self._encodings, self._sequences = encodings, sequences

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None


class Labelled(dict[str, Any]):
    """A dict with more than its items."""

    label: str = ""


class Ordered(OrderedDict[str, Any]):
    pass


@dataclass
class Pair:
    x: torch.Tensor
    y: Any
    half: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.half = self.x / 2
        self.note = "made"


@dataclass(frozen=True, slots=True)
class Still:
    x: torch.Tensor
    y: int = 0


class Sealed(Mapping[str, Any]):
    """A mapping that cannot be changed."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Elsewhere(UserDict[str, Any]):
    """A mapping whose items are not among its attributes, as of one that is written in C."""

    items_of: ClassVar[dict[int, dict[str, Any]]] = {}

    @property
    def data(self) -> dict[str, Any]:
        return self.items_of.setdefault(id(self), {})

    @data.setter
    def data(self, value: dict[str, Any]) -> None:
        self.items_of[id(self)] = value


def labelled(**items: Any) -> Labelled:
    made = Labelled(items)
    made.label = "here"
    return made


def objects() -> list[Any]:
    x = torch.arange(4.0)
    return [
        Encoding({"ids": x, "mask": x > 1}, sequences=2),
        labelled(x=x, inner=[x]),
        Ordered(b=x, a=x + 1),
        Pair(x, {"z": x}),
        Still(x, 7),
        Sealed({"x": x}),
        [Still(x), {"deep": Pair(x, Encoding({"ids": x}))}],
    ]


def parts_of(tree: Any) -> Any:
    """All that an object has, in plain containers, with its class."""
    if isinstance(tree, torch.Tensor):
        return tree.tolist()
    if isinstance(tree, (list, tuple)):
        return [parts_of(part) for part in tree]
    if type(tree) is dict:
        return {key: parts_of(part) for key, part in tree.items()}
    if isinstance(tree, (Mapping, Pair, Still)):
        items = list(tree.items()) if isinstance(tree, Mapping) else []
        own = {name: getattr(tree, name) for name in getattr(tree, "__slots__", ())} or vars(tree)
        return [type(tree), parts_of(items), parts_of(dict(own))]
    return tree


@pytest.mark.parametrize("place", range(len(objects())))
@pytest.mark.parametrize("encoding", [msgspec.json, msgspec.msgpack])
def test_an_object_comes_back_as_what_it_was(place: int, encoding: Any) -> None:
    tree = objects()[place]
    structure, tensors = pack(tree, objects=True)
    again = unpack(encoding.decode(encoding.encode(structure)), tensors, objects=True)
    assert parts_of(again) == parts_of(tree)


def test_what_a_tokenizer_keeps_beside_the_items_stays_behind() -> None:
    structure, tensors = pack(Encoding({"ids": torch.ones(2)}, encodings=[torch.ones(1), object()]), objects=True)
    again = unpack(structure, tensors, objects=True)
    assert again.ids.tolist() == [1, 1] and again._encodings is None and len(tensors) == 1


def test_an_attribute_that_cannot_leave_is_named() -> None:
    tree = labelled(x=1)
    tree.extra = [object()]  # type: ignore[attr-defined]
    with pytest.raises(Unpackable, match=r"value\[0\]\.extra\[0\] is of type builtins\.object; .* and dataclasses can"):
        pack([tree], objects=True)
    with pytest.raises(Unpackable, match=r"value\.y\['z'\] is of type builtins\.object"):
        pack(Pair(torch.ones(1), {"z": object()}), objects=True)


def test_a_class_inside_a_function_is_refused_with_what_to_do() -> None:
    @dataclass
    class Local:
        x: int

    with pytest.raises(Unpackable, match=r"<locals>\.Local, which is not found.* at the top level"):
        pack(Local(1), objects=True)


def test_items_that_do_not_come_along_are_not_silently_missing() -> None:
    tree = Elsewhere({"x": 1})
    structure, tensors = pack(tree, objects=True)
    with pytest.raises(ValueError, match="has 0 items instead of 1"):
        unpack(structure, tensors, objects=True)


@pytest.mark.parametrize("tree", objects()[:5])
def test_objects_are_for_forks_alone(tree: Any) -> None:
    with pytest.raises(Unpackable):
        pack(tree)
    structure, tensors = pack(tree, objects=True)
    with pytest.raises(ValueError, match="unknown tag 'o'"):
        unpack(structure, tensors)


@pytest.mark.parametrize("name", [["subprocess", "Popen"], ["os", "system"], ["os", "nothing"], ["builtins", "list"]])
def test_only_mappings_and_dataclasses_are_made(name: list[str]) -> None:
    with pytest.raises(ValueError, match="not imported here"):
        unpack(["o", [*name, ["d", []], ["d", []], ["d", []], 0]], [], objects=True)


@pytest.mark.parametrize("place", range(len(objects())))
def test_a_tree_with_its_leaves_changed_keeps_its_classes(place: int) -> None:
    tree = objects()[place]
    before = parts_of(tree)

    def double(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, torch.Tensor) else leaf

    changed = mapped(tree, double)
    assert parts_of(changed) == before == parts_of(tree)
    assert {leaf.dtype for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)} <= {torch.float32, torch.bool}
    doubled = {leaf.dtype for leaf in leaves(changed) if isinstance(leaf, torch.Tensor)}
    assert doubled == {torch.float64}


def test_leaves_come_in_order() -> None:
    assert leaves([1, (2, Point(3, 4)), {"a": 5}, Still(torch.ones(1), 6), Sealed({"b": 7})])[-1] == 7
    assert [leaf for leaf in leaves([1, (2, Point(3, 4)), {"a": 5}, Encoding({"c": 6})])] == [1, 2, 3, 4, 5, 6]
