"""Putting something in the place of functions of torch, and putting them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Place = tuple[Any, str, Callable[[Any], Any]]
"""Whose attribute, its name, and what makes its stand-in from what is there."""

_MISSING = object()


class Replacing:
    """A set of places. `within` may be nested: they are replaced by the first and put back by the last."""

    def __init__(self, places: Callable[[], Sequence[Place]]) -> None:
        self._places = places
        self._depth = 0
        self._kept: list[tuple[Any, str, Any]] = []

    @contextmanager
    def within(self) -> Iterator[None]:
        if not self._depth:
            for owner, name, make in self._places():
                found = getattr(owner, name, None)
                if found is not None:
                    self._kept.append((owner, name, vars(owner).get(name, _MISSING)))
                    setattr(owner, name, make(found))
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            while not self._depth and self._kept:
                owner, name, before = self._kept.pop()
                if before is _MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, before)
