"""A tree of plain values and tensors, taken apart into a plain structure and a flat list of tensors.

Everything that leaves a process (batches from a loader process, optimizer state in a checkpoint, predictions,
results) goes through `pack` and `unpack`, so that nothing is ever pickled. The structure consists of values that
msgpack and JSON can write; tensors are referred to by their place in the list.

What comes back equals what went in, with these differences in type: a bytearray comes back as bytes, an `OrderedDict`
or `defaultdict` as a dict, a `torch.Size` as a tuple, an array of foreign byte order in this machine's.

With `objects`, mappings and dataclasses of any class travel too, as their class's name and their attributes. That is
for processes which are forks of each other: from elsewhere, nobody's message should choose a class to be made.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PLAIN = (bool, int, float, str, type(None))
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_LEFT_BEHIND = ("_encodings",)
"""Attributes that become None if they cannot travel. `transformers.BatchEncoding` has objects of its tokenizer there,
and None if it has none."""


class Unpackable(TypeError):
    """The tree holds a value that cannot leave the process without pickle."""


# -- within a process --------------------------------------------------------------------------------------------------


def mapped(
    tree: Any, change: Callable[[Any], Any], *, is_leaf: Callable[[Any], bool] = lambda part: isinstance(part, Tensor)
) -> Any:
    """The same tree with `change` made to its leaves: what `is_leaf` says, and what holds nothing else.

    Containers are copied and keep their class: lists, tuples, named tuples, mappings, dataclasses.
    """
    if is_leaf(tree):
        return change(tree)

    def again(part: Any) -> Any:
        return mapped(part, change, is_leaf=is_leaf)

    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(again, tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(again, tree))
    if isinstance(tree, Mapping):
        return _with_items(tree, {key: again(part) for key, part in tree.items()})
    if _is_dataclass(tree):
        made = copy.copy(tree)
        for name, part in _fields(tree):
            object.__setattr__(made, name, again(part))
        return made
    return change(tree)


def leaves(tree: Any) -> list[Any]:
    """What `tree` holds in the end, in order."""
    if isinstance(tree, Mapping):
        parts = list(tree.values())
    elif isinstance(tree, (list, tuple)):
        parts = list(tree)
    elif _is_dataclass(tree):
        parts = [part for _, part in _fields(tree)]
    else:
        return [tree]
    return [leaf for part in parts for leaf in leaves(part)]


def _with_items(tree: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(tree) is dict:
        return items
    if isinstance(tree, MutableMapping):
        made = copy.copy(tree)  # it may have more than its items
        for key, part in items.items():
            made[key] = part
        return made
    try:
        return type(tree)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def _is_dataclass(tree: Any) -> bool:
    return is_dataclass(tree) and not isinstance(tree, type)


def _fields(tree: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(tree, field.name)) for field in fields(tree) if hasattr(tree, field.name)]


# -- out of a process, and into one ------------------------------------------------------------------------------------


def pack(tree: Any, *, objects: bool = False) -> tuple[Any, list[Tensor]]:
    """Take `tree` apart. Tensors are detached, not copied. Raises `Unpackable` naming the place and the type."""
    packing = _Packing(objects=objects)
    return packing.of(tree, "value"), packing.tensors


def unpack(structure: Any, tensors: list[Tensor], *, objects: bool = False) -> Any:
    """Put together what `pack` took apart. Raises `ValueError` for a structure that `pack` cannot have made here."""

    def again(structure: Any) -> Any:
        if isinstance(structure, _PLAIN):
            return structure
        tag, body = structure
        if tag == "t":
            return tensors[body]
        if tag == "l":
            return [again(part) for part in body]
        if tag == "u":
            return tuple(again(part) for part in body)
        if tag == "d":
            return {again(key): again(part) for key, part in body}
        if tag == "k":
            return Counter({again(key): again(part) for key, part in body})
        if tag == "a":
            return tensors[body].numpy()
        if tag == "n":
            return tensors[body].numpy()[()]
        if tag == "b":
            return tensors[body].numpy().tobytes()
        if tag == "f":
            return float(body)
        if tag == "i":
            return int(body)
        if tag == "c":
            return complex(*(again(part) for part in body))
        if tag == "s":
            return body.encode("ascii").decode("unicode_escape")
        if tag == "nt":
            module, name, parts = body
            kind = _class_named(module, name)
            if not _is_namedtuple(kind):
                raise ValueError(f"a packed tree holds the named tuple {module}.{name}, which is not imported here")
            return kind(*(again(part) for part in parts))
        if tag == "o" and objects:
            module, name, *parts = body
            return _made(module, name, *(again(part) for part in parts))
        raise ValueError(f"unknown tag {tag!r} in a packed tree")

    return again(structure)


class _Packing:
    """One tree on its way out."""

    def __init__(self, *, objects: bool) -> None:
        self.tensors: list[Tensor] = []
        self._objects = objects

    def of(self, tree: Any, place: str) -> Any:
        if tree is None or type(tree) is bool:
            return tree
        if type(tree) is str:
            return tree if _is_utf8(tree) else ["s", tree.encode("unicode_escape").decode("ascii")]
        if isinstance(tree, Tensor):
            return ["t", self._add(tree.detach())]
        if type(tree) is float:
            # JSON has no NaN and no infinity
            return tree if tree - tree == 0.0 else ["f", repr(tree)]
        if type(tree) is int:
            return tree if -(2**63) <= tree < 2**63 else ["i", str(tree)]
        if isinstance(tree, np.generic):
            return ["n", self._add(_from_numpy(np.asarray(tree), place))]
        if isinstance(tree, np.ndarray) and not isinstance(tree, np.ma.MaskedArray):
            return ["a", self._add(_from_numpy(tree, place))]
        if isinstance(tree, (bytes, bytearray)):
            return ["b", self._add(torch.from_numpy(np.frombuffer(tree, dtype=np.uint8).copy()))]
        if type(tree) is complex:
            return ["c", [self.of(tree.real, place), self.of(tree.imag, place)]]
        if isinstance(tree, tuple) and hasattr(tree, "_fields"):
            parts = [self.of(part, f"{place}.{name}") for name, part in zip(tree._fields, tree, strict=True)]
            return ["nt", [*_name(tree, place), parts]]
        if type(tree) in (list, tuple, torch.Size):
            parts = [self.of(part, f"{place}[{index}]") for index, part in enumerate(tree)]
            return ["l" if type(tree) is list else "u", parts]
        if type(tree) in _DICTS:
            return ["k" if type(tree) is Counter else "d", self._items(tree, place)]
        if self._objects and (isinstance(tree, Mapping) or _is_dataclass(tree)):
            return ["o", self._object(tree, place)]
        more = "mappings and dataclasses" if self._objects else "dicts"
        raise Unpackable(
            f"{place} is of type {_told(tree)}; only tensors, numpy arrays, numbers, strings, bytes, None, lists, "
            f"tuples, named tuples and {more} can leave a process"
        )

    def _items(self, tree: Mapping[Any, Any], place: str) -> list[list[Any]]:
        return [[self.of(key, f"{place}'s key"), self.of(part, f"{place}[{key!r}]")] for key, part in tree.items()]

    def _object(self, tree: Any, place: str) -> list[Any]:
        """Its class; what is in its `__dict__`, in slots, and in itself as a dict; and how many items it shows."""
        module, name = _name(tree, place)
        state: Any = object.__getstate__(tree)  # what copy.copy takes
        attributes, slots = state if isinstance(state, tuple) else (state, None)
        return [
            module,
            name,
            ["d", self._attributes(attributes or {}, place)],
            ["d", self._attributes(slots or {}, place)],
            ["d", self._items(tree, place) if isinstance(tree, dict) else []],
            len(tree) if isinstance(tree, Mapping) else 0,
        ]

    def _attributes(self, attributes: Mapping[str, Any], place: str) -> list[list[Any]]:
        pairs = []
        for name, part in attributes.items():
            there = len(self.tensors)
            try:
                pairs.append([name, self.of(part, f"{place}.{name}")])
            except Unpackable:
                if name not in _LEFT_BEHIND:
                    raise
                del self.tensors[there:]
                pairs.append([name, None])
        return pairs

    def _add(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1


def _made(
    module: str, name: str, attributes: dict[str, Any], slots: dict[str, Any], items: dict[Any, Any], size: int
) -> Any:
    """The object again: its class is not called, as with `copy.copy`."""
    kind = _class_named(module, name)
    if not isinstance(kind, type) or not (issubclass(kind, Mapping) or is_dataclass(kind)):
        raise ValueError(f"a packed tree holds an object of {module}.{name}, which is not imported here")
    made: Any = kind.__new__(kind)
    base = OrderedDict if issubclass(kind, OrderedDict) else dict
    for key, part in items.items():
        base.__setitem__(made, key, part)
    if attributes:
        made.__dict__.update(attributes)
    for key, part in slots.items():
        object.__setattr__(made, key, part)
    if isinstance(made, Mapping) and len(made) != size:
        raise ValueError(f"a packed {module}.{name} has {len(made)} items instead of {size}: they are not its own")
    return made


def _name(tree: Any, place: str) -> list[str]:
    """By which its class is found again. Raises `Unpackable` if it is not."""
    kind = type(tree)
    if _class_named(kind.__module__, kind.__qualname__) is not kind:
        raise Unpackable(
            f"{place} is of type {_told(tree)}, which is not found under this name; define the class at the top level "
            "of its module, not inside a function"
        )
    return [kind.__module__, kind.__qualname__]


def _told(tree: Any) -> str:
    return f"{type(tree).__module__}.{type(tree).__qualname__}"


def _is_utf8(text: str) -> bool:
    """False for lone surrogates, as in the names of files that are not UTF-8."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _from_numpy(array: np.ndarray, place: str) -> Tensor:
    try:
        return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), subok=False))
    except TypeError:
        raise Unpackable(f"{place} is a numpy array of dtype {array.dtype}, which has no tensor type") from None


def _class_named(module: str, name: str) -> Any:
    """What has that name, if it is already imported here: nothing is imported for a message."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _is_namedtuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")
