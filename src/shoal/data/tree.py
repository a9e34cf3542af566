"""A tree of plain values and tensors, taken apart into a plain structure and a flat list of tensors.

Everything that leaves a process (batches from a loader process, optimizer state in a checkpoint, predictions,
results) goes through these two functions, so that nothing is ever pickled. The structure consists of values that
msgpack and JSON can write; tensors are referred to by their place in the list.

What comes back equals what went in, with these differences in type: a bytearray comes back as bytes, an `OrderedDict`
or `defaultdict` as a dict, a `torch.Size` as a tuple, an array of foreign byte order in this machine's.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PLAIN = (bool, int, float, str, type(None))
_DICTS = (dict, OrderedDict, defaultdict, Counter)


class Unpackable(TypeError):
    """The tree holds a value that cannot leave the process without pickle."""


def pack(tree: Any) -> tuple[Any, list[Tensor]]:
    """Take `tree` apart. Tensors are detached, not copied. Raises `Unpackable` naming the place and the type."""
    tensors: list[Tensor] = []
    return _pack(tree, tensors, "value"), tensors


def unpack(structure: Any, tensors: list[Tensor]) -> Any:
    """Put together what `pack` took apart. Raises `ValueError` for a structure that `pack` cannot have made here."""
    if isinstance(structure, _PLAIN):
        return structure
    tag, body = structure
    if tag == "t":
        return tensors[body]
    if tag == "l":
        return [unpack(part, tensors) for part in body]
    if tag == "u":
        return tuple(unpack(part, tensors) for part in body)
    if tag == "d":
        return {unpack(key, tensors): unpack(part, tensors) for key, part in body}
    if tag == "k":
        return Counter({unpack(key, tensors): unpack(part, tensors) for key, part in body})
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
        return complex(*(unpack(part, tensors) for part in body))
    if tag == "s":
        return body.encode("ascii").decode("unicode_escape")
    if tag == "nt":
        module, name, parts = body
        kind = _namedtuple(module, name)
        if kind is None:
            raise ValueError(f"a packed tree holds the named tuple {module}.{name}, which is not imported here")
        return kind(*(unpack(part, tensors) for part in parts))
    raise ValueError(f"unknown tag {tag!r} in a packed tree")


def _pack(tree: Any, tensors: list[Tensor], place: str) -> Any:
    if tree is None or type(tree) is bool:
        return tree
    if type(tree) is str:
        return tree if _is_utf8(tree) else ["s", tree.encode("unicode_escape").decode("ascii")]
    if isinstance(tree, Tensor):
        return ["t", _add(tensors, tree.detach())]
    if type(tree) is float:
        # JSON has no NaN and no infinity
        return tree if tree - tree == 0.0 else ["f", repr(tree)]
    if type(tree) is int:
        return tree if -(2**63) <= tree < 2**63 else ["i", str(tree)]
    if isinstance(tree, np.generic):
        return ["n", _add(tensors, _from_numpy(np.asarray(tree), place))]
    if isinstance(tree, np.ndarray) and not isinstance(tree, np.ma.MaskedArray):
        return ["a", _add(tensors, _from_numpy(tree, place))]
    if isinstance(tree, (bytes, bytearray)):
        return ["b", _add(tensors, torch.from_numpy(np.frombuffer(tree, dtype=np.uint8).copy()))]
    if type(tree) is complex:
        return ["c", [_pack(tree.real, tensors, place), _pack(tree.imag, tensors, place)]]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        kind = type(tree)
        if _namedtuple(kind.__module__, kind.__qualname__) is kind:
            parts = [_pack(part, tensors, f"{place}.{name}") for name, part in zip(tree._fields, tree, strict=True)]
            return ["nt", [kind.__module__, kind.__qualname__, parts]]
    if type(tree) in (list, tuple, torch.Size):
        parts = [_pack(part, tensors, f"{place}[{index}]") for index, part in enumerate(tree)]
        return ["l" if type(tree) is list else "u", parts]
    if type(tree) in _DICTS:
        pairs = [
            [_pack(key, tensors, f"{place}'s key"), _pack(part, tensors, f"{place}[{key!r}]")]
            for key, part in tree.items()
        ]
        return ["k" if type(tree) is Counter else "d", pairs]
    raise Unpackable(
        f"{place} is of type {type(tree).__module__}.{type(tree).__qualname__}; only tensors, numpy arrays, numbers, "
        "strings, bytes, None, lists, tuples, named tuples and dicts can leave a process"
    )


def _add(tensors: list[Tensor], tensor: Tensor) -> int:
    tensors.append(tensor)
    return len(tensors) - 1


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


def _namedtuple(module: str, name: str) -> Any:
    """The named-tuple class of that name, if it is already imported here: nothing is imported for a message."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields"):
        return found
    return None
