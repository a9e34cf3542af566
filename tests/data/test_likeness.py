"""Digests of items: by what they are made of, under the same keys, and without a trace in the worker."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from shoal.data import likeness
from shoal.data.likeness import UNKNOWN, differing, digest, digests_of, some_indices

ROW = torch.arange(6.0)


class Opaque:
    """Nothing of it can be read."""


class Picture:
    """As an image of PIL shows itself."""

    def __init__(self, value: int) -> None:
        self._array = np.full((2, 2), value, np.uint8)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self._array


@dataclass
class Pair:
    left: torch.Tensor
    right: str


def items(value: float) -> list[Any]:
    """Items that differ in `value` alone, of all kinds that are compared."""
    return [
        ROW + value,
        (ROW + value).to(torch.bfloat16),
        torch.tensor(complex(value, 1)).conj(),
        (ROW.view(2, 3) + value).T,
        np.arange(3) + value,
        np.float32(value),
        np.array([str(value)]),
        value,
        str(value),
        str(value).encode(),
        [1, 2, value],
        (ROW, {"label": value, "name": "x"}),
        [[Opaque()], value],
        Picture(int(value)),
        Pair(ROW + value, "x"),
    ]


def test_a_digest_depends_on_all_that_can_be_read() -> None:
    for one, same, other in zip(items(1.0), items(1.0), items(2.0), strict=True):
        assert digest(one) == digest(same) and digest(one) != digest(other), one


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ROW, ROW.double()),
        (ROW, ROW.view(2, 3)),
        ([1, 2], [1, [2]]),
        ((ROW, ROW), (ROW,)),
        ("1", 1),
        ({"a": 1}, {"b": 1}),
    ],
)
def test_a_digest_depends_on_the_form(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)


def test_a_digest_does_not_depend_on_the_order_of_keys_nor_on_what_cannot_be_read() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest((Opaque(), {1, 2})) == digest((Opaque(), {3}))
    assert digest(np.array([Opaque()])) == digest(np.array([Opaque()]))
    assert digest(torch.eye(3).to_sparse()) == digest(torch.zeros(3, 3).to_sparse())


@pytest.mark.parametrize("size", [1, 2, 3, 1000, 10**12])
def test_some_indices(size: int) -> None:
    indices = some_indices(size)
    assert len(set(indices)) == len(indices) <= 8 and {0, size - 1} <= set(indices)
    assert all(0 <= index < size for index in indices) and (size < 100 or len(indices) == 8)


class Data:
    """Counts what is fetched in this process."""

    def __init__(self) -> None:
        self.fetched = 0
        self.random = np.random.default_rng()

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        self.fetched += 1
        return ROW + index


class Cropped(Data):
    def __getitem__(self, index: int) -> Any:
        return self.random.random(), random.random(), torch.rand(2), np.random.rand(2)


class Unkeyed(Data):
    def __getitem__(self, index: int) -> Any:
        return random.SystemRandom().random()


class Torn(Data):
    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise OSError("torn")
        return index


class Slow(Data):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.04)
        return index


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is busy, too."""
    monkeypatch.setattr(likeness, "_SECONDS", 20.0)


def found(data: Any, *indices: int) -> list[bytes]:
    return digests_of(data, indices, name="data", key=7)


def test_items_are_fetched_where_they_leave_no_trace() -> None:
    data = Data()
    state = torch.get_rng_state()
    assert found(data, 4, 5) == [digest(ROW + 4), digest(ROW + 5)]
    assert data.fetched == 0 and torch.equal(torch.get_rng_state(), state)
    assert found([ROW, ROW + 1], 1) == [digest(ROW + 1)]
    assert found(TensorDataset(ROW), 1) == [digest((ROW[1],))]


def test_what_is_drawn_for_an_item_is_the_same_for_all_who_ask() -> None:
    one, other = found(Cropped(), 1, 2), found(Cropped(), 1, 2)
    assert one == other and one[0] != one[1] and UNKNOWN not in one
    assert found(Unkeyed(), 1) != found(Unkeyed(), 1)


def test_what_cannot_be_fetched_or_takes_long_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = found(Torn(), 2, 3, 4)
    assert second == UNKNOWN and UNKNOWN not in (first, third)
    monkeypatch.setattr(likeness, "_SECONDS", 0.03)
    assert [one == UNKNOWN for one in found(Slow(), 1, 2, 3)] == [False, True, True]


def test_differing() -> None:
    told = [[b"a", b"b", b"", b"d"], [b"a", b"x", b"y", b""], [b"z", b"y", b"z", b"d"]]
    assert differing(told) == {0: 2, 1: 1}


def test_texts_beside_tensors_do_not_count() -> None:
    image = torch.arange(4.0)
    one, two = ({"x": image, "path": f"/tmp/{name}/1.png"} for name in ("a", "b"))
    assert digest(one) == digest(two)
    assert digest({**one, "x": image + 1}) != digest(two)
    assert digest(("good", torch.tensor(1))) != digest(("bad", torch.tensor(1)))
