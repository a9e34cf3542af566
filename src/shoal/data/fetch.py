"""From indices to batches: seed, fetch, collate, and say in words what is wrong with an item.

Everything here runs in the thread that calls it; `shoal.data.loader` decides in which process that is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import index as as_int
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from shoal.core.errors import ConfigError, DataError
from shoal.data.finder import Finder
from shoal.data.generators import Draws, global_sources
from shoal.draws.calls import Calls
from shoal.engines.activity import Activity, Call

Made = TypeVar("Made")

_SPREAD = 0x9E37_79B9_7F4A_7C15
"""2⁶⁴ divided by the golden ratio: multiples of it differ in all their bits."""
_POSITIVE = (1 << 63) - 1
_MOST_COLUMNS = 8
_COLLATE = 0x5851_F42D_4C95_7F2D
"""Turns the seed of an item into that of a `collate`: the two must not draw the same numbers."""


@dataclass(frozen=True, slots=True)
class Positions:
    """Consecutive positions whose samples become one batch: position `first + n` has the sample `indices[n]`.

    What is drawn for a sample depends on `key` and its position alone: whoever fetches it, and beside which others.
    """

    indices: Sequence[int]
    key: int
    first: int

    def seed(self, place: int) -> int:
        """Of the sample `indices[place]`."""
        return (self.key + (self.first + place) * _SPREAD) & _POSITIVE


Request: TypeAlias = tuple[Positions, ...]
"""One worker's part of a step, or any part of that: one batch for each."""


class Fetcher:
    """Turns `Positions` into batches. Remembers only what its data was seen to draw from: any process may fetch.

    `collate` takes a list of items and returns a batch; None means `torch.utils.data.default_collate`.
    `name` is how messages call the data set.
    """

    def __init__(self, data: Any, collate: Callable[[list[Any]], Any] | None, *, name: str = "data") -> None:
        self.data = data
        self.collate = collate
        self.name = name
        self._rows = _Rows.of(data) if collate is None else None
        self._finder = Finder({} if self._rows else {name: data, "collate": collate})
        self._looked_again = False
        sources = global_sources() + self._finder.more()
        self._draws = Draws(sources)
        self._collate_draws = Draws(sources)
        self._collate_calls = Calls(others=False)
        self.activity = Activity()
        """Where it writes what it is at."""

    @property
    def notices(self) -> list[str]:
        """What a person should know about the generators of this data."""
        return self._finder.notices

    def fetch(self, request: Request) -> list[Any]:
        """One batch for each `Positions` of `request`.

        If the data set draws random numbers, what it draws from is seeded for each item: the global generators of
        `random`, numpy and torch, and its own. Raises `DataError`, chained from the exception of the data set or of
        `collate`; `KeyboardInterrupt` and `SystemExit` pass through.
        """
        try:
            return [self._batch(wanted) for wanted in request]
        finally:
            self.activity.done()

    def items(self, wanted: Positions) -> list[Any]:
        """The samples themselves, uncollated."""
        indices = list(map(as_int, wanted.indices))
        return self._looking_again(lambda: self._items(indices, wanted))

    def parts(self, wanted: Positions) -> Callable[[int, int], Any]:
        """For trials: a function that collates the samples start … stop−1 of these, from copies of the same items."""
        indices = list(map(as_int, wanted.indices))
        items = None if self._rows is not None else self._items(indices, wanted)

        def part(start: int, stop: int) -> Any:
            some = Positions(indices[start:stop], wanted.key, wanted.first + start)
            if items is None:
                return self._batch(some)
            if self.collate is not None and self._collate_draws:
                return self._drawing(indices[start:stop], _copies(items[start:stop]), some)
            return self._collated(indices[start:stop], _copies(items[start:stop]))

        return part

    def _batch(self, wanted: Positions) -> Any:
        indices = list(map(as_int, wanted.indices))
        if self._rows is not None:
            try:
                return self._rows.take(indices)
            except Exception:
                # item by item finds out which index is wrong, and why
                pass
        return self._looking_again(lambda: self._made(indices, wanted))

    def _looking_again(self, make: Callable[[], Made]) -> Made:
        made = make()
        if self._looked_again:
            return made
        self._looked_again = True
        found = self._finder.more()
        if not found:
            return made
        # generators that were made with the first items: nothing is known about what they were made from
        self._draws.add(found)
        self._collate_draws.add(found)
        return make()

    def _made(self, indices: list[int], wanted: Positions) -> Any:
        while True:
            items = self._items(indices, wanted)
            if self.collate is None:
                return self._collated(indices, items)
            seed = wanted.seed(0) ^ _COLLATE
            self._collate_draws.begin(seed)
            batch = self._drawing(indices, items, wanted) if self._collate_draws else self._collated(indices, items)
            if not self._collate_draws.surprised():
                return batch
            # from new items, because the first time may have changed these

    def _drawing(self, indices: list[int], items: list[Any], wanted: Positions) -> Any:
        """A batch of a `collate` that draws: from torch by position, from others by the first position that it gets."""
        kept = _copies(items)

        def collated(start: int, stop: int) -> Any:
            nonlocal kept
            self._collate_draws.seed(wanted.seed(start) ^ _COLLATE, but_torch=True)
            fresh, kept = kept, _copies(kept)
            return self._collated(indices[start:stop], fresh[start:stop])

        return self._collate_calls.make(wanted.first, len(indices), wanted.key ^ _COLLATE, collated)

    def _items(self, indices: list[int], wanted: Positions) -> list[Any]:
        """All at once; or one by one and seeded, if that draws. What was drawn unseeded is fetched again."""
        while True:
            self._draws.begin(wanted.seed(0))
            if self._draws:
                items = [
                    item for place, index in enumerate(indices) for item in self._asked([index], wanted.seed(place))
                ]
            else:
                items = self._asked(indices, None)
            if not self._draws.surprised():
                return items

    def _collated(self, indices: list[int], items: list[Any]) -> Any:
        self.activity.enter(Call.COLLATE, self.name, indices[0] if indices else 0)
        try:
            return default_collate(items) if self.collate is None else self.collate(items)
        except Exception as error:
            raise DataError(self._uncollatable(indices, items, error)) from error

    def _asked(self, indices: list[int], seed: int | None) -> list[Any]:
        self._seed(seed)
        fetch_many = getattr(self.data, "__getitems__", None)
        if callable(fetch_many):
            self.activity.enter(Call.ITEMS, self.name, indices[0] if indices else 0)
            try:
                found = fetch_many(list(indices))
                items = list(found)
            except NotImplementedError:
                self._seed(seed)
            except Exception as error:
                raise self._culprit(indices, seed, error) from error
            else:
                if isinstance(found, Mapping) or len(items) != len(indices):
                    raise DataError(
                        f"{self.name}.__getitems__ returned a {type(found).__name__} of length {len(items)} "
                        f"for {len(indices)} indices; it must return a list with one item for each index"
                    )
                return items
        items = []
        self.activity.enter(Call.ITEM, self.name)
        for index in indices:
            try:
                self.activity.at(index)
                items.append(self.data[index])
            except Exception as error:
                raise self._unfetchable(index, error) from error
        return items

    def _seed(self, seed: int | None) -> None:
        if seed is not None:
            self._draws.seed(seed)

    def _culprit(self, indices: list[int], seed: int | None, error: Exception) -> DataError:
        """`__getitems__` raised `error`: the index that also raises alone, or else all of them."""
        self._seed(seed)
        for index in indices:
            try:
                self.data[index]
            except NotImplementedError:
                break
            except Exception as alone:
                return self._unfetchable(index, alone)
        return DataError(f"{self.name}.__getitems__ raised {_told(error)} for {_listed(indices)}")

    def _unfetchable(self, index: int, error: Exception) -> DataError:
        return DataError(f"{self.name}[{index}] could not be fetched: __getitem__ raised {_told(error)}")

    def _uncollatable(self, indices: list[int], items: list[Any], error: Exception) -> str:
        if not items:
            return f"a batch of {self.name} has no samples to collate: {_told(error)}"
        found = oddity(indices, items, default=self.collate is None)
        if self.collate is None:
            reason = found or f"default_collate raised {_told(error)}; pass collate= to collate them your own way"
            return f"{_listed(indices)} of {self.name} cannot be collated into a batch: {reason}"
        hint = f" ({found})" if found else ""
        return f"collate raised {_told(error)} for {_listed(indices)} of {self.name}{hint}"


def _copies(items: list[Any]) -> list[Any]:
    """Items of their own for a `collate` that may change what it gets; the same ones where they cannot be copied."""
    try:
        return copy.deepcopy(items)
    except Exception:
        return list(items)


class _Rows:
    """Data that is nothing but tensors, seen through any number of `Subset`s: a batch is one gather per tensor.

    Exact types only: a subclass may have its own `__getitem__`. No user code runs, so nothing is seeded.
    """

    def __init__(self, data: Tensor | TensorDataset, subsets: list[Subset[Any]]) -> None:
        self._data = data
        self._subsets = subsets

    @classmethod
    def of(cls, data: Any) -> _Rows | None:
        subsets = []
        while type(data) is Subset:
            subsets.append(data)
            data = data.dataset
        return cls(data, subsets) if type(data) in (Tensor, TensorDataset) else None

    def take(self, indices: list[int]) -> Any:
        """What `default_collate` would make of the items. Raises what torch raises for what it cannot gather."""
        for subset in self._subsets:
            indices = [as_int(subset.indices[index]) for index in indices]
        rows = torch.tensor(indices)
        if isinstance(self._data, Tensor):
            return _gathered(self._data, rows)
        return [_gathered(tensor, rows) for tensor in self._data.tensors]


def _gathered(tensor: Tensor, rows: Tensor) -> Tensor:
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        raise TypeError("not a plain tensor")
    return torch.index_select(tensor, 0, rows)


def runs_no_code(data: Any) -> bool:
    """Whether items are had without calling anything of the user's."""
    return type(data) is list or _Rows.of(data) is not None


def check_data(data: Any, name: str, collate: Callable[[list[Any]], Any] | None = None) -> int:
    """The number of samples of a map-style data set, whose items `collate` makes batches of. Touches no item.

    Raises `ConfigError` when `data` is not map-style and `DataError` when it is empty.
    """
    _check_kind(data, name, collate)
    try:
        length = len(data)
    except TypeError as error:
        raise ConfigError(f"len({name}) raised {_told(error)}; it must be the number of samples, an int") from error
    except Exception as error:
        raise DataError(f"len({name}) raised {_told(error)}; it must be the number of samples") from error
    if length == 0:
        raise DataError(f"{name} is empty: len({name}) is 0, and at least one sample is needed")
    return length


def _check_kind(data: Any, name: str, collate: Callable[[list[Any]], Any] | None) -> None:
    kind = type(data)
    must = "it must be a map-style data set with __len__ and __getitem__, for example a list of samples"
    if isinstance(data, type):
        raise ConfigError(f"{name} is the class {data.__name__}, not an instance of it; {must}")
    if isinstance(data, DataLoader):
        raise ConfigError(
            f"{name} is a DataLoader; pass its .dataset instead (and its collate_fn as collate=): "
            "batches, order and loader processes are made here"
        )
    if isinstance(data, IterableDataset):
        raise ConfigError(
            f"{name} is an IterableDataset ({kind.__name__}), which is not supported, because samples are assigned to "
            "workers by index; wrap it into a map-style data set with __len__ and __getitem__, or read it into a list"
        )
    columns = _columns(data, by_default=collate is None)
    if columns:
        what, words, given = _in_words(data, columns, name)
        raise ConfigError(
            f"{name} is a {what} of {len(columns)} {words} with {len(columns[0]):,} rows each: these are columns, and "
            f"{must}; use torch.utils.data.TensorDataset({given})"
        )
    if isinstance(data, (Mapping, str, bytes)):
        raise ConfigError(f"{name} is a {kind.__name__}, which is not indexed by sample number; {must}")
    missing = [method for method in ("__len__", "__getitem__") if not callable(getattr(kind, method, None))]
    if not missing and isinstance(data, Dataset) and kind.__getitem__ is Dataset.__getitem__:
        missing = [] if callable(getattr(kind, "__getitems__", None)) else ["__getitem__"]
    if missing:
        raise ConfigError(f"{name} is a {kind.__name__} without {' and '.join(missing)}; {must}")


def _columns(data: Any, *, by_default: bool) -> list[Any]:
    """What `data` holds, if these are columns of a table: a few tensors, arrays or lists (not lists alone), all with as
    many rows, and more of them than there are columns. Else nothing.

    In a list, tensors of one shape may be samples; others only if they are not collated by default.
    """
    if not isinstance(data, (tuple, list, Mapping)) or not 1 < len(data) <= _MOST_COLUMNS:
        return []
    parts = list(data.values() if isinstance(data, Mapping) else data)
    shapes = [tuple(part.shape) for part in parts if isinstance(part, (Tensor, np.ndarray)) and part.ndim]
    lists = [part for part in parts if isinstance(part, list)]
    if not shapes or len(shapes) + len(lists) < len(parts) or len({len(part) for part in parts}) > 1:
        return []
    if isinstance(data, list) and (not by_default or (not lists and len(set(shapes)) == 1)):
        return []
    return parts if len(parts[0]) > len(parts) else []


def _in_words(data: Any, columns: list[Any], name: str) -> tuple[str, str, str]:
    """What the columns are in; what they are; and how to write them as arguments."""
    given = f"{name}.values()" if isinstance(data, Mapping) else name
    if all(isinstance(part, Tensor) for part in columns):
        return type(data).__name__, "tensors", f"*{given}"
    words = "arrays" if all(isinstance(part, np.ndarray) for part in columns) else "arrays, tensors or lists"
    return type(data).__name__, words, f"*map(torch.as_tensor, {given})"


# ---- what is wrong with these items, in words


def oddity(indices: Sequence[int], items: Sequence[Any], *, default: bool) -> str | None:
    """Why these items do not make one batch: what two of them differ in, or what cannot be collated by default."""
    if default:
        for index, item in zip(indices, items, strict=True):
            found = _foreign(item, "")
            if found:
                return f"item {index} {found}"
    for index, item in zip(indices, items, strict=True):
        difference = _difference(items[0], item, "")
        if difference:
            has, other, advice = difference
            tail = f"; {advice}" if default else ""
            return f"item {index} {has}, item {indices[0]} {other}{tail}"
    return None


def _foreign(item: Any, place: str) -> str | None:
    """What `default_collate` cannot take, if anything."""
    if item is None:
        return (
            f"is None{_at(place)}; return an item for every index (leave the others out of the data set), "
            "or pass collate= to deal with None"
        )
    if isinstance(item, Tensor):
        if item.layout is torch.strided and not item.is_nested:
            return None
        return (
            f"is a {'nested' if item.is_nested else 'sparse'} tensor{_at(place)}; pass collate= to batch such tensors"
        )
    if isinstance(item, np.ndarray):
        if item.dtype.kind in "biufc":
            return None
        return f"is a numpy array of dtype {item.dtype}{_at(place)}; make it an array of numbers or pass collate="
    if isinstance(item, (int, float, str, bytes, np.bool_, np.number)):
        return None
    parts = _parts(item)
    if parts is None:
        kind = f"{type(item).__module__}.{type(item).__qualname__}"
        return (
            f"is of type {kind}{_at(place)}; items must be nested of tensors, numpy arrays, numbers, strings, "
            "dicts, lists and tuples: convert it to a tensor in __getitem__ or pass collate="
        )
    return next((found for key, part in parts for found in [_foreign(part, f"{place}[{key!r}]")] if found), None)


def _difference(first: Any, item: Any, place: str) -> tuple[str, str, str] | None:
    """What `item` has, what `first` has instead, and advice. None if they can be batched together."""
    at = _at(place)
    advice = "give every item the same form, or pass collate="
    if _kind(first) != _kind(item):
        return f"is {_kind(item)}{at}", _kind(first), advice
    if isinstance(first, (Tensor, np.ndarray)):
        if tuple(first.shape) != tuple(item.shape):
            return f"has shape {tuple(item.shape)}{at}", f"{tuple(first.shape)}", "pass collate= to pad them"
        return None  # different dtypes are promoted
    if isinstance(first, Mapping):
        if first.keys() != item.keys():
            return f"has keys {list(item)}{at}", f"{list(first)}", advice
    elif _parts(first) is not None and len(first) != len(item):
        return f"has length {len(item)}{at}", f"{len(first)}", "pass collate= to pad them"
    for key, part in _parts(first) or ():
        found = _difference(part, item[key], f"{place}[{key!r}]")
        if found:
            return found
    return None


def _parts(item: Any) -> list[tuple[Any, Any]] | None:
    """The keyed parts of a container, None of anything else."""
    if isinstance(item, Mapping):
        return list(item.items())
    if isinstance(item, Sequence) and not isinstance(item, (str, bytes)):
        return list(enumerate(item))
    return None


def _kind(item: Any) -> str:
    """The type in words, the same for types that can stand in for each other in a batch."""
    if item is None:
        return "None"
    if isinstance(item, (int, float, np.bool_, np.number)):
        return "a number"
    for kind, words in ((Tensor, "a tensor"), (np.ndarray, "a numpy array"), (str, "a string"), (bytes, "bytes")):
        if isinstance(item, kind):
            return words
    if isinstance(item, Mapping):
        return "a dict"
    return "a sequence" if isinstance(item, Sequence) else f"of type {type(item).__module__}.{type(item).__qualname__}"


def _at(place: str) -> str:
    return f" at {place}" if place else ""


def _told(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _listed(indices: Sequence[int]) -> str:
    if len(indices) > 8:
        return f"items {indices[0]}, {indices[1]}, ... {indices[-1]} ({len(indices)} in all)"
    return f"item{'s' if len(indices) > 1 else ''} " + ", ".join(map(str, indices))
