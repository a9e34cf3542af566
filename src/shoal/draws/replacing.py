"""Putting something in the place of functions of torch, and putting them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Place = tuple[Any, str, Callable[[Any], Any]]
"""Whose attribute, its name, and what makes its stand-in from what is there."""

_MISSING = object()


class Replacing:
    """A set of places. `within` may be nested: they are replaced by the first and put back by the last.

    A stand-in is made once: compiled code is guarded by which functions it has called.
    """

    def __init__(self, places: Callable[[], Sequence[Place]]) -> None:
        self._list = places
        self._places: Sequence[Place] = ()
        self._depth = 0
        self._kept: list[tuple[Any, str, Any]] = []
        self._made: dict[int, tuple[Any, Any]] = {}
        """By number of the place: what was there, and its stand-in."""

    @contextmanager
    def within(self) -> Iterator[None]:
        if not self._depth:
            self._places = self._places or self._list()
            for number, (owner, name, make) in enumerate(self._places):
                found = getattr(owner, name, None)
                if found is not None:
                    if number not in self._made or self._made[number][0] is not found:
                        self._made[number] = found, make(found)
                    self._kept.append((owner, name, vars(owner).get(name, _MISSING)))
                    setattr(owner, name, self._made[number][1])
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
