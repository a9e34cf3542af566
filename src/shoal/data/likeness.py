"""Whether workers that have each made their data set themselves have made the same: digests of a few of its items.

Items are fetched as for a step, so that what is drawn for them is the same on all workers. Where that runs code of the
data set it is done in a process of its own: what such code opens and keeps is for this worker's loaders to open.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128

from shoal.core.errors import DataError
from shoal.core.keys import derive
from shoal.data.fetch import Fetcher, Positions, Request, runs_no_code
from shoal.data.tree import Unpackable, leaves, mapped
from shoal.engines.activity import Activity

if TYPE_CHECKING:
    from shoal.data.background import LoaderProcess

_MOST_ITEMS = 8
_SECONDS = 0.03
"""No further item is fetched after so long."""
_SOON_SECONDS = 0.5
_PLAIN = (bool, int, float, complex, str, type(None))
UNKNOWN = b""
"""In place of the digest of an item that cannot be compared."""


def some_indices(size: int) -> list[int]:
    """A few indices, equal for data sets of equal length, in the order of how much their items would tell."""
    drawn = [derive("likeness", number) % size for number in range(_MOST_ITEMS - 2)]
    return list(dict.fromkeys([*drawn, size - 1, 0]))


def digests_of(
    data: Any,
    indices: Sequence[int],
    *,
    name: str,
    key: int,
    close_fds: Callable[[], Iterable[int]] = tuple,
    activity: Activity | None = None,
    late: list[LoaderProcess] | None = None,
) -> list[bytes]:
    """For each of these items its digest, or `UNKNOWN`. `key` is what is drawn for them depends on.

    `activity` shows what it is at. With `late`, what does not come soon is not waited for. The process that is at it is
    put there, to be ended by the caller, and ends by itself with the item: a kill could leave half of a file behind.
    """
    source = _Digests(data, name)
    request = tuple(Positions([index], key, index) for index in indices)
    if runs_no_code(data):
        return source.fetch(request)
    # here: most runs never need it
    from shoal.data.background import LoaderProcess, end_all

    try:
        process = LoaderProcess({name: source}, [], close_fds(), activity or Activity())
    except OSError:
        return [UNKNOWN] * len(request)
    ticket = process.ask(name, request)
    if late is not None and not process.answers_within(_SOON_SECONDS):
        process.close()
        late.append(process)
        return [UNKNOWN] * len(request)
    try:
        return ticket.wait()
    except (DataError, Unpackable):
        return [UNKNOWN] * len(request)
    finally:
        end_all([process])


class _Digests:
    """In place of a `Fetcher`: digests instead of batches, as far as there is time."""

    def __init__(self, data: Any, name: str) -> None:
        self._data = data
        self._name = name
        self.activity = Activity()

    def fetch(self, request: Request) -> list[Any]:
        fetcher = None if runs_no_code(self._data) else Fetcher(self._data, None, name=self._name)
        if fetcher is not None:
            fetcher.activity = self.activity
        deadline, found = time.monotonic() + _SECONDS, list[bytes]()
        for wanted in request:
            late = bool(found) and time.monotonic() > deadline
            found.append(UNKNOWN if late else self._digest(fetcher, wanted))
        return found

    def _digest(self, fetcher: Fetcher | None, wanted: Positions) -> bytes:
        try:
            (item,) = [self._data[wanted.indices[0]]] if fetcher is None else fetcher.items(wanted)
            return digest(item)
        except Exception:
            return UNKNOWN  # training comes to it too, and says what is wrong


def digest(item: Any) -> bytes:
    """Equal for equal items. Of a part whose values cannot be read, only the type counts.

    Texts do not count beside tensors, arrays and images: there they may be paths in a folder of the process's own.
    """
    found = xxh3_128()
    _add(found, mapped(item, _textless, is_leaf=_is_value) if any(map(_is_content, leaves(item))) else item)
    result: bytes = found.digest()
    return result


def _is_value(part: Any) -> bool:
    return not isinstance(part, Mapping | list | tuple) and not (is_dataclass(part) and not isinstance(part, type))


def _is_content(leaf: Any) -> bool:
    """More than a label."""
    if isinstance(leaf, Tensor):
        return leaf.numel() > 1
    return leaf.size > 1 if isinstance(leaf, np.ndarray) else hasattr(type(leaf), "__array_interface__")


def _textless(leaf: Any) -> Any:
    return "" if isinstance(leaf, str) else leaf


def _add(found: Any, part: Any) -> None:
    kind = type(part)
    if kind in _PLAIN:
        found.update(f"{kind.__name__} {part!r}\n".encode(errors="backslashreplace"))
    elif isinstance(part, Tensor):
        _add_tensor(found, part)
    elif isinstance(part, np.ndarray | np.generic):
        _add_array(found, np.asarray(part))
    elif isinstance(part, str | int | float):
        found.update(f"{kind.__name__} {part!r}\n".encode(errors="backslashreplace"))
    elif isinstance(part, bytes | bytearray):
        found.update(f"bytes {len(part)}\n".encode())
        found.update(part)
    elif isinstance(part, Mapping):
        # by name: the order may come from a set, which is another one in each process
        for key, value in sorted(part.items(), key=lambda pair: str(pair[0])):
            _add(found, key)
            _add(found, value)
        found.update(f"{len(part)} pairs\n".encode())
    elif isinstance(part, Sequence):
        _add_sequence(found, part)
    elif is_dataclass(part) and not isinstance(part, type):
        _add(found, vars(part))
    elif hasattr(kind, "__array_interface__") or hasattr(kind, "__array__"):
        _add_array(found, np.asarray(part))  # an image, for example
    else:
        found.update(f"{kind.__module__}.{kind.__qualname__}\n".encode())


def _add_tensor(found: Any, tensor: Tensor) -> None:
    found.update(f"tensor {tensor.dtype} {tensor.layout}\n".encode())
    if tensor.layout is torch.strided and not tensor.is_nested and tensor.device.type != "meta":
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        found.update(f"{tuple(plain.shape)}\n".encode())
        found.update(plain.view(-1).view(torch.uint8).numpy().data)


def _add_array(found: Any, array: np.ndarray) -> None:
    found.update(f"array {array.dtype} {array.shape}\n".encode())
    if not array.dtype.hasobject:
        found.update(array.tobytes())


def _add_sequence(found: Any, parts: Sequence[Any]) -> None:
    found.update(f"{len(parts)} parts\n".encode())
    if type(parts) is list and all(type(part) in _PLAIN for part in parts):
        found.update(repr(parts).encode(errors="backslashreplace"))
        return
    for part in parts:
        _add(found, part)


def differing(told: Sequence[Sequence[bytes]]) -> dict[int, int]:
    """From all workers' digests: where items differ, and the first worker there whose item is not that of worker 0."""
    found: dict[int, int] = {}
    for place, (first, *others) in enumerate(zip(*told, strict=True)):
        for worker, theirs in enumerate(others, start=1):
            if UNKNOWN not in (first, theirs) and theirs != first:
                found.setdefault(place, worker)
    return found
