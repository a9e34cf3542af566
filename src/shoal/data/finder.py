"""Finds the generators that a data set and its `collate` have of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.core.keys import derive
from shoal.data.generators import Source, identity, is_generator, own_source, shared_by_all
from shoal.data.reach import reachable

_MOST = 256
"""Generators of one data set. Each costs a microsecond for every item that is fetched."""


class Finder:
    """Looks again and again, because some generators are made when the first item is fetched.

    `roots`: the data set and `collate`, by the names that messages call them.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._roots = roots
        self._known: dict[int, Any] = dict.fromkeys(shared_by_all())
        self._count = 0
        self.notices: list[str] = []
        """What a person should know of generators that were found."""

    def more(self) -> list[Source]:
        """Those that were not found before."""
        found = []
        for path, thing in reachable(self._roots):
            if is_generator(thing) and identity(thing) not in self._known:
                # kept, so that its identity stays its own
                self._known[identity(thing)] = thing
                source = self._source(path, thing)
                if source is not None:
                    found.append(source)
        return found

    def _source(self, path: str, thing: Any) -> Source | None:
        # by path, not by number: which are found first may differ between workers
        source = own_source(thing, derive("generator", path))
        kind = f"{type(thing).__module__}.{type(thing).__qualname__}"
        advice = "what is drawn from it depends on the worker; draw from random, numpy.random or torch instead"
        if source is None:
            self.notices.append(f"{path} is a {kind}, which cannot be keyed: {advice}")
            return None
        self._count += 1
        if self._count == _MOST + 1:
            self.notices.append(f"{path} is one generator more than the {_MOST} that are keyed: {advice}")
        return source if self._count <= _MOST else None
