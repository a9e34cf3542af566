"""Which objects the code of a data set can reach: attributes, items of containers, and what its functions name.

Looks and never asks: no method or property of the objects runs.
"""

from __future__ import annotations

import dis
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

_MOST_THINGS = 5_000
"""Objects that are looked at: some 20 ms."""
_MOST_ITEMS = 1_000
"""Of one container. Longer ones hold samples, of which a few tell what all are like."""
_FEW_ITEMS = 8
_VALUES = (str, bytes, bytearray, int, float, complex, type(None), Tensor, np.ndarray, np.generic, range, slice)
_LEAVES = (*_VALUES, ModuleType, GetSetDescriptorType, MemberDescriptorType)
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy"}

_LOOKS_UP = ("LOAD_GLOBAL", "LOAD_NAME")

_CONSTRUCTORS = frozenset({"__new__", "__init__", "__post_init__", "__init_subclass__", "__set_name__"})
"""What has run by the time that there is an object."""

_Named = Iterator[tuple[str, Any]]


class _Made(NamedTuple):
    """A class, as far as an object of it that is there can still run its code."""

    kind: type


def reachable(roots: Mapping[str, Any], *, constructed: bool = False) -> _Named:
    """Everything reachable from `roots`, each object once and the nearest first, by its path.

    Paths are the same in every process of a run, so nothing that has no order (a set) is looked into.
    With `constructed`, the constructors of objects that are there are left out: they have run.
    """
    # keeps what was made on the way, so that an id stays one object's
    seen: dict[int | tuple[int], Any] = {}
    waiting = deque(roots.items())
    while waiting and len(seen) < _MOST_THINGS:
        path, thing = waiting.popleft()
        if type(thing) is _Made and not constructed:
            thing = thing.kind
        key = (id(thing.kind),) if type(thing) is _Made else id(thing)
        if key in seen or issubclass(type(thing), _LEAVES):
            continue
        seen[key] = thing
        if type(thing) is not _Made:
            yield path, thing
        # an object may be built in a way that nobody foresaw
        with suppress(Exception):
            waiting.extend(_parts(path, thing))


def _parts(path: str, thing: Any) -> _Named:
    kind = type(thing)
    if kind is _Made:
        yield from (pair for pair in _of_class(path, thing.kind) if pair[0].rpartition(".")[2] not in _CONSTRUCTORS)
    elif issubclass(kind, type):
        yield from _of_class(path, thing)
    elif issubclass(kind, FunctionType):
        yield from _of_function(path, thing)
    elif issubclass(kind, MethodType):
        yield path, thing.__self__
        yield path, thing.__func__
    elif issubclass(kind, BuiltinMethodType):
        yield path, thing.__self__
    elif issubclass(kind, (staticmethod, classmethod)):
        yield path, thing.__func__
    elif issubclass(kind, property):
        yield path, thing.fget
    elif not _is_queue(kind):
        yield from _of_container(path, thing)
        yield from _of_instance(path, thing)


def _of_container(path: str, thing: Any) -> _Named:
    kind = type(thing)
    if issubclass(kind, dict):
        for place, (key, value) in enumerate(islice(dict.items(thing), _looked_at(dict.__len__(thing)))):
            yield f"{path}[{key!r}]" if type(key) in (str, int) else f"{path}[{place}]", value
    elif issubclass(kind, (list, tuple, deque)):
        base = next(base for base in (list, tuple, deque) if issubclass(kind, base))
        for place, value in enumerate(islice(base.__iter__(thing), _looked_at(base.__len__(thing)))):
            yield f"{path}[{place}]", value
    elif issubclass(kind, partial):
        yield from _named(path, {"func": thing.func, "args": thing.args, "keywords": thing.keywords})


def _looked_at(count: int) -> int:
    return count if count <= _MOST_ITEMS else _FEW_ITEMS


def _of_instance(path: str, thing: Any) -> _Named:
    with suppress(AttributeError):
        yield from _named(path, object.__getattribute__(thing, "__dict__"))
    for base in type(thing).__mro__:
        for name, member in vars(base).items():
            if isinstance(member, MemberDescriptorType) and not _of_library(base.__module__):
                with suppress(AttributeError):
                    yield f"{path}.{name}", member.__get__(thing)
    yield path, _Made(type(thing))


def _of_class(path: str, kind: type) -> _Named:
    for base in kind.__mro__:
        if not _of_library(base.__module__):
            yield from _named(path, vars(base))


def _of_function(path: str, function: FunctionType) -> _Named:
    code = function.__code__
    if not (_of_library(function.__module__) or _is_installed(code)):
        names = list(dict.fromkeys(_names(code)))
        yield from _used(path, function.__globals__, [name for name in names if name in set(_globals(code))], names)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        # a cell may still be empty
        with suppress(ValueError):
            yield f"{path}.{name}", cell.cell_contents
    defaults = dict(enumerate(function.__defaults__ or ()))
    yield from _named(path, {**defaults, **(function.__kwdefaults__ or {}), **vars(function)})


def _used(path: str, space: Mapping[str, Any], names: Sequence[str], attributes: Sequence[str]) -> _Named:
    """What these names stand for in a module, also as `module.attribute`."""
    for name in names:
        value: Any = space.get(name)
        if not issubclass(type(value), ModuleType):
            yield f"{path}.{name}", value
        elif not _of_library(vars(value).get("__name__")):
            others = [other for other in attributes if other != name]
            yield from _used(f"{path}.{name}", vars(value), others, others)


def _names(code: CodeType) -> Iterator[str]:
    """All names that a function looks up, also as attributes; those of functions inside it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _globals(code: CodeType) -> Iterator[str]:
    """Those of its names that it looks up in its module. An attribute of the same name is something else."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname in _LOOKS_UP)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals(constant)


def _named(path: str, values: Mapping[Any, Any]) -> _Named:
    return ((f"{path}.{name}", value) for name, value in list(values.items()))


def _is_queue(kind: type) -> bool:
    """Of `multiprocessing`: processes are meant to share the pipe in it, and its locks see to that."""
    queues: Any = sys.modules.get("multiprocessing.queues")
    return queues is not None and issubclass(kind, (queues.Queue, queues.SimpleQueue))


def _is_installed(code: CodeType) -> bool:
    """Whether it belongs to a package of others, whose modules lead anywhere."""
    return "site-packages" in code.co_filename or "dist-packages" in code.co_filename


def _of_library(module: Any) -> bool:
    """Libraries that keep no generators for others, besides the global ones."""
    return isinstance(module, str) and module.partition(".")[0] in _LIBRARIES
