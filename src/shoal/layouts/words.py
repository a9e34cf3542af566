"""What a user says of buffers: `buffers={"queue": "concat", "*.count": "sum"}`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor

from shoal.core.errors import ConfigError

MEAN, SUM, FIRST, CONCAT = "mean", "sum", "first", "concat"
_KNOWN = '"mean", "sum", "sum:modulo=64", "sum:decay=0.99", "first" and "concat"'
_MOST_NAMES = 12
"""Names in a message at most."""


class Word(NamedTuple):
    """How what forwards made of a buffer is put together. See docs/buffers.md."""

    kind: str
    modulo: int = 0
    """Of a sum of whole numbers that goes round: a pointer into so many rows."""
    decay: float = 0.0
    """Of a sum that each step begins with so much of what it was; 0 is none."""


def read_words(given: Any, buffers: Mapping[str, Tensor]) -> dict[str, Word]:
    """The word for each buffer that one was given for, by name. Raises `ConfigError`.

    `buffers` has them all, under each of the names that they may be called.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"buffers={given!r} is of type {type(given).__name__}; it must be a dict from names of buffers to {_KNOWN}"
        )
    words: dict[str, Word] = {}
    for name, text in given.items():
        if not isinstance(name, str):
            raise ConfigError(f"buffers: {name!r} is of type {type(name).__name__}; the name of a buffer is text")
        word = _read(name, text)
        found = [known for known in buffers if known == name] or [
            known for known in buffers if fnmatchcase(known, name)
        ]
        if not found:
            raise ConfigError(f"buffers: no buffer is called {name!r}; {_those(name, list(buffers))}")
        for known in found:
            _check(known, word, buffers[known])
            words[known] = word
    return words


def _read(name: str, text: Any) -> Word:
    kind, _, option = text.partition(":") if isinstance(text, str) else ("", "", "")
    if kind in (MEAN, SUM, FIRST, CONCAT) and not option:
        return Word(kind)
    key, _, value = option.partition("=")
    try:
        if kind == SUM and key == "modulo" and int(value) > 0:
            return Word(SUM, modulo=int(value))
        if kind == SUM and key == "decay" and 0.0 < float(value) < 1.0:
            return Word(SUM, decay=float(value))
    except ValueError:
        pass
    raise ConfigError(f"buffers: {name!r} is given {text!r}; there are {_KNOWN} (a decay is between 0 and 1)")


def _check(name: str, word: Word, value: Tensor) -> None:
    if value.is_complex():
        raise ConfigError(f"buffers: {name!r} is complex, and such buffers are not merged; leave it out")
    if word.kind == CONCAT and not value.ndim:
        raise ConfigError(f"buffers: {name!r} is a single number, which has no rows for 'concat'; use 'sum' or 'first'")
    if word.modulo and value.is_floating_point():
        raise ConfigError(f"buffers: {name!r} is of {value.dtype}; 'sum:modulo=' is for whole numbers")
    if word.decay and not value.is_floating_point():
        raise ConfigError(f"buffers: {name!r} is of {value.dtype}; 'sum:decay=' is for floating-point numbers")


def _those(name: str, names: Sequence[str]) -> str:
    """Which names there are, the likeliest alone."""
    if not names:
        return "the model has no buffers"
    near = get_close_matches(name, names, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    listed = ", ".join(map(repr, names[:_MOST_NAMES]))
    return f"there are {listed}" + (f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else "")
