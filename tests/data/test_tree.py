"""Trees through JSON and msgpack and back."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shoal.data.tree import Unpackable, pack, unpack

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
leaves = hashable | st.complex_numbers() | st.binary(max_size=8) | tensors | arrays | scalars


def branches(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = hashable | st.tuples(st.integers(), strings)
    few = st.lists(parts, max_size=4)
    return few | few.map(tuple) | st.dictionaries(keys, parts, max_size=4) | st.builds(Point, parts, parts)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.recursive(leaves, branches, max_leaves=12))
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
