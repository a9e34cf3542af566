"""What a function refers to, as far as that can be read without calling it."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_DEPTH = 2
"""A function, and those that it calls."""
_MOST = 100
"""Things in a list or a dict that is looked into."""


def modules_of(function: Any) -> list[nn.Module]:
    """The modules that a callable refers to, and those inside them."""
    found = (thing for thing in reached(function) if isinstance(thing, nn.Module))
    return [part for module in found for part in module.modules()]


def name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def reached(function: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """The objects that a callable has: in its closure, defaults, bound arguments, globals, and what it is bound to.

    Of these objects, the attributes that its code names; and the same for functions among them.
    """
    if isinstance(function, functools.partial):
        for value in (*function.args, *function.keywords.values()):
            yield from _opened(value)
        yield from reached(function.func, depth)
    elif isinstance(function, MethodType):
        yield from _held(function.__self__, function.__func__)
        yield from reached(function.__func__, depth)
    elif isinstance(function, FunctionType):
        for value in _values(function):
            yield from _held(value, function)
            if depth > 1 and isinstance(value, FunctionType | functools.partial):
                yield from reached(value, depth - 1)
    elif isinstance(call := type(function).__call__, FunctionType):
        yield from reached(MethodType(call, function), depth)


def _values(function: FunctionType) -> Iterator[Any]:
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    for code in _codes(function.__code__):
        for instruction in dis.get_instructions(code):
            if instruction.opname in _GLOBAL and instruction.argval in function.__globals__:
                yield function.__globals__[instruction.argval]


def _held(owner: Any, user: Any) -> Iterator[Any]:
    """An object, and its attributes that a function names, or that a method named by it does."""
    yield from _opened(owner)
    if isinstance(owner, nn.Module | type | FunctionType):
        return
    held = getattr(owner, "__dict__", {})
    names = _names(user)
    for name in list(names):
        names |= _names(getattr(type(owner), name, None))
    for name in names & held.keys():
        yield from _opened(held[name])


def _opened(value: Any) -> Iterator[Any]:
    """A value, and what is in it if that is a small container."""
    yield value
    if isinstance(value, list | tuple | dict) and len(value) <= _MOST:
        yield from value.values() if isinstance(value, dict) else value


def _names(function: Any) -> set[str]:
    code = getattr(getattr(function, "fget", function), "__code__", None)
    return {name for each in _codes(code) for name in each.co_names} if isinstance(code, CodeType) else set()


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code, and that of functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
