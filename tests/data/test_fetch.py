from __future__ import annotations

import statistics
import time
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from shoal.core.errors import ConfigError, DataError
from shoal.data.fetch import Fetcher, Positions, Request, check_data

Point = namedtuple("Point", "x y")


def one(*indices: int, key: int = 7, first: int = 0) -> Request:
    return (Positions(indices, key, first),)


def same(left: object, right: object) -> bool:
    """Equal values of equal types, all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and bool(
                torch.equal(left.nan_to_num(), right.nan_to_num())
                if left.is_floating_point()
                else torch.equal(left, right)
            )
        )
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


class Numbers(Dataset):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        return index


# ---- fetching


def test_one_batch_for_each_range_of_positions_in_order() -> None:
    data = [(torch.tensor([float(i)]), i) for i in range(10)]
    first, second = Fetcher(data, None).fetch((Positions([0, 1, 5], 1, 0), Positions(range(7, 9), 1, 3)))
    assert first[1].tolist() == [0, 1, 5] and first[0].shape == (3, 1)
    assert second[1].tolist() == [7, 8]
    assert Fetcher(data, None).fetch(()) == []


def test_collate_gets_all_items_of_the_batch() -> None:
    batches = Fetcher(list("abcdef"), "".join).fetch(one(0, 1, 5) + one(2))
    assert batches == ["abf", "c"]


def test_indices_are_python_ints() -> None:
    class Strict(Dataset):
        def __getitem__(self, index: int) -> int:
            assert type(index) is int
            return index

    request = Positions(np.array([1, 2]), 0, 0), Positions(torch.tensor([3]), 0, 2)
    assert [batch.tolist() for batch in Fetcher(Strict(), None).fetch(request)] == [[1, 2], [3]]


# ---- data that is nothing but tensors

TENSORS = (
    torch.randn(20, 3, 4),
    torch.arange(20),
    torch.rand(20, 2) > 0.5,
    torch.randn(20, 2).to(torch.bfloat16),
    torch.randn(2, 20).t(),
    torch.empty(20, 0),
)


@pytest.mark.parametrize(
    "data",
    [
        TensorDataset(*TENSORS),
        Subset(TensorDataset(*TENSORS), list(range(19, -1, -1))),
        Subset(Subset(TensorDataset(*TENSORS), torch.arange(0, 20)), np.arange(10)),
        Subset(TensorDataset(*TENSORS), [-1] * 10),
        TENSORS[0],
        TENSORS[1],
        Subset(TENSORS[0], range(5, 15)),
    ],
)
@pytest.mark.parametrize("indices", [[0], [3, 1, 3], range(2, 8)])
def test_gathering_rows_equals_default_collate(data: Dataset, indices: list[int]) -> None:
    batch = Fetcher(data, None).fetch(one(*indices))[0]
    assert same(batch, default_collate([data[i] for i in indices]))


def test_rows_are_gathered_without_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda *_: pytest.fail("fetched an item"))
    data = Subset(TensorDataset(torch.arange(10)), [9, 8, 7])
    assert Fetcher(data, None).fetch(one(2, 0))[0][0].tolist() == [7, 9]


def test_a_subclass_of_tensor_dataset_keeps_its_items() -> None:
    class Negated(TensorDataset):
        def __getitem__(self, index: int) -> Tensor:
            return -self.tensors[0][index]

    assert Fetcher(Negated(torch.arange(5)), None).fetch(one(1, 2))[0].tolist() == [-1, -2]
    assert Fetcher(Subset(Negated(torch.arange(5)), [4, 3]), None).fetch(one(1))[0].tolist() == [-3]


def test_a_subclass_of_subset_keeps_its_items() -> None:
    class Doubled(Subset):
        def __getitem__(self, index: int) -> Tensor:
            return 2 * self.dataset[self.indices[index]]

        def __getitems__(self, indices: list[int]) -> list[Tensor]:
            return [self[index] for index in indices]

    assert Fetcher(Doubled(torch.arange(5), [4, 3]), None).fetch(one(1, 0))[0].tolist() == [6, 8]
    assert Fetcher(Subset(Doubled(torch.arange(5), [4, 3]), [1]), None).fetch(one(0))[0].tolist() == [6]


def test_out_of_range_row_is_named() -> None:
    with pytest.raises(DataError, match=r"train\[10\].*IndexError"):
        Fetcher(TensorDataset(torch.arange(10)), None, name="train").fetch(one(1, 10, 2))


# ---- any nesting of plain values

leaves = st.one_of(
    st.integers(-(2**40), 2**40),
    st.floats(allow_nan=False, width=32),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.integers(0, 3).map(lambda n: torch.arange(float(n))),
    st.integers(0, 3).map(lambda n: np.arange(n, dtype=np.int32)),
)
items = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, min_size=1, max_size=3),
        st.tuples(inner, inner).map(lambda pair: Point(*pair)),
    ),
    max_leaves=6,
)


@given(items, st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_nested_items_collate_as_torch_does(item: object, count: int) -> None:
    assert same(Fetcher([item] * count, None).fetch(one(*range(count)))[0], default_collate([item] * count))


# ---- errors


class Broken(Dataset):
    def __init__(self, error: BaseException, at: int) -> None:
        self.error, self.at = error, at

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        if index == self.at:
            raise self.error
        return index


class BrokenMany(Broken):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("kind", [Broken, BrokenMany])
@pytest.mark.parametrize("error", [ValueError("bad crop"), StopIteration(), IndexError("gone"), KeyError("label")])
def test_the_index_that_raises_is_named(kind: type[Broken], error: Exception) -> None:
    with pytest.raises(DataError, match=rf"train\[6\].*{type(error).__name__}") as caught:
        Fetcher(kind(error, at=6), None, name="train").fetch(one(4, 5, 6, 7))
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("kind", [Broken, BrokenMany])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_interrupts_pass_through(kind: type[Broken], error: BaseException) -> None:
    with pytest.raises(type(error)):
        Fetcher(kind(error, at=1), None).fetch(one(0, 1))


class TogetherOnly(Dataset):
    """Fails when asked for many, or has no items at all."""

    def __init__(self, result: object, single: bool) -> None:
        self.result, self.single = result, single

    def __getitem__(self, index: int) -> int:
        if not self.single:
            raise NotImplementedError
        return index

    def __getitems__(self, indices: list[int]) -> object:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.mark.parametrize("single", [True, False])
def test_getitems_that_fails_only_together_names_all(single: bool) -> None:
    with pytest.raises(DataError, match=r"__getitems__ raised OSError: shard.*items 3, 4"):
        Fetcher(TogetherOnly(OSError("shard"), single), None).fetch(one(3, 4))


@pytest.mark.parametrize("result", [[1], {"x": [1], "y": [2]}])
def test_getitems_must_return_one_item_each(result: object) -> None:
    with pytest.raises(DataError, match="one item for each index"):
        Fetcher(TogetherOnly(result, True), None).fetch(one(3, 4))


def test_stacked_data_sets_have_getitems() -> None:
    data = StackDataset(x=torch.arange(5), y=list("abcde"))
    assert Fetcher(data, None).fetch(one(1, 3))[0]["x"].tolist() == [1, 3]


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (
            [torch.zeros(3, 32, 32), torch.zeros(3, 32, 31)],
            r"item 11 has shape \(3, 32, 31\), item 10 \(3, 32, 32\); pass collate= to pad them",
        ),
        ([(np.zeros(2), 0), (np.zeros(2), 1), (np.zeros(3), 1)], r"item 12 has shape \(3,\) at \[0\], item 10 \(2,\)"),
        ([{"x": [1, 2]}, {"x": [1]}], r"item 11 has length 1 at \['x'\], item 10 2; pass collate= to pad"),
        ([{"x": 1, "y": 2}, {"x": 1}], r"item 11 has keys \['x'\], item 10 \['x', 'y'\]"),
        ([1, "one"], "item 11 is a string, item 10 a number"),
        ([torch.zeros(1), torch.zeros(1), None], "item 12 is None; return an item for every index"),
        ([(1, None), (1, None)], r"item 10 is None at \[1\]"),
        ([object(), object()], "item 10 is of type builtins.object; .*pass collate="),
        ([{"x": {1}}, {"x": {1}}], r"item 10 is of type builtins.set at \['x'\]"),
        ([np.array(["a"]), np.array(["a"])], "item 10 is a numpy array of dtype <U1"),
        ([torch.zeros(2).to_sparse()] * 2, "item 10 is a sparse tensor"),
        ([2**70, 1], "default_collate raised"),
    ],
)
def test_items_that_do_not_collate_are_described(items: list[object], words: str) -> None:
    data = dict(enumerate(items, start=10))
    with pytest.raises(DataError, match=words) as caught:
        Fetcher(data, None, name="train").fetch(one(*data))
    assert caught.value.__cause__ is not None and "train" in str(caught.value)


def test_error_of_the_users_collate_is_told() -> None:
    def stack(items: list[Tensor]) -> Tensor:
        return torch.stack(items)

    words = r"collate raised RuntimeError.*item 1 has shape \(3,\), item 0 \(2,\)\)"
    with pytest.raises(DataError, match=words) as caught:
        Fetcher([torch.zeros(2), torch.zeros(3)], stack).fetch(one(0, 1))
    assert "pass collate" not in str(caught.value)
    with pytest.raises(DataError, match=r"collate raised ZeroDivisionError.*items 0, 1, \.\.\. 19 \(20 in all\)"):
        Fetcher(list(range(20)), lambda items: 1 / 0).fetch(one(*range(20)))


# ---- what counts as data


@pytest.mark.parametrize("data", [[1, 2, 3], (1, 2, 3), torch.zeros(3, 2), np.zeros(3), TensorDataset(torch.zeros(3))])
def test_map_style_data_has_its_length(data: object) -> None:
    assert check_data(data, "data") == 3
    assert len(Fetcher(data, None).fetch(one(0, 2))[0]) in (1, 2)


def test_other_kinds_are_refused_with_advice() -> None:
    class Endless(IterableDataset):
        def __iter__(self) -> object:
            return iter(range(3))

    class NoItems(Dataset):
        def __len__(self) -> int:
            return 3

    class FloatLength(Numbers):
        def __len__(self) -> int:
            return 2.5  # type: ignore[return-value]

    refused = {
        r"pass its \.dataset": DataLoader([1, 2]),
        "map-style": Endless(),
        "without __getitem__": NoItems(),
        "without __len__": Broken.__mro__[1](),
        "a generator without __len__ and __getitem__": (i for i in range(3)),
        "NoneType": None,
        "the class Numbers": Numbers,
        "dict, which is not indexed": {"x": [1]},
        r"an int": FloatLength(),
        "len.eval. raised TypeError": torch.tensor(3.0),
    }
    for words, data in refused.items():
        with pytest.raises(ConfigError, match=words) as caught:
            check_data(data, "eval")
        assert "eval" in str(caught.value)


TABLES = {
    r"tuple of 2 arrays with 9 rows.*TensorDataset\(\*map\(torch\.as_tensor, data\)\)": (np.zeros((9, 2)), np.zeros(9)),
    r"tuple of 2 tensors with 9 rows each.*TensorDataset\(\*data\)": (torch.zeros(9, 2), torch.zeros(9, 2)),
    r"tuple of 2 arrays, tensors or lists with 9 rows": (np.zeros((9, 2)), list(range(9))),
    r"Point of 2 arrays": Point(np.zeros((9, 2)), np.zeros(9)),
    r"list of 2 arrays with 9 rows each": [np.zeros((9, 2)), np.zeros(9)],
    r"list of 2 tensors with 9 rows each.*TensorDataset\(\*data\)": [torch.zeros(9, 2), torch.zeros(9)],
    r"dict of 2 arrays.*torch\.as_tensor, data\.values\(\)\)\)": {"x": np.zeros((9, 2)), "y": np.zeros(9)},
    r"dict of 2 tensors.*TensorDataset\(\*data\.values\(\)\)": {"x": torch.zeros(9, 2), "y": torch.ones(9)},
}


@pytest.mark.parametrize("words", TABLES)
def test_columns_are_refused_with_how_to_make_rows_of_them(words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_data(TABLES[words], "data")


@pytest.mark.parametrize(
    "data",
    [
        [np.zeros((9, 2)), np.ones((9, 2))],
        [torch.zeros(9), torch.ones(9)],
        (np.zeros(9), np.zeros(8)),
        (np.zeros(2), np.zeros(2)),
        ([1, 2, 3], [4, 5, 6]),
        [(np.zeros(9), 1), (np.zeros(9), 2)],
        [torch.zeros(9, 2)] * 10,
    ],
)
def test_what_may_be_samples_is_taken_for_samples(data: Any) -> None:
    assert check_data(data, "data") == len(data)


def test_unequal_samples_in_a_list_may_have_a_collate_of_their_own() -> None:
    images = [torch.zeros(3, 32, 30), torch.zeros(3, 32, 28)]
    assert check_data(images, "data", collate=list) == 2


def test_empty_and_failing_length_are_data_errors() -> None:
    class Failing(Numbers):
        def __len__(self) -> int:
            raise OSError("no index file")

    for words, data in {"empty": [], "OSError: no index file": Failing()}.items():
        with pytest.raises(DataError, match=words):
            check_data(data, "data")


def test_getitems_alone_is_enough() -> None:
    class OnlyMany(Dataset):
        def __len__(self) -> int:
            return 4

        def __getitems__(self, indices: list[int]) -> list[int]:
            return indices

    assert check_data(OnlyMany(), "data") == 4
    assert Fetcher(OnlyMany(), None).fetch(one(2, 3))[0].tolist() == [2, 3]


def test_fetching_rows_is_quick() -> None:
    fetcher = Fetcher(TensorDataset(torch.randn(1000, 8), torch.arange(1000)), None)
    request = one(*range(64))

    def seconds() -> float:
        begin = time.perf_counter()
        fetcher.fetch(request)
        return time.perf_counter() - begin

    assert statistics.median(seconds() for _ in range(50)) < 500e-6
