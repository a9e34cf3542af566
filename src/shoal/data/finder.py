"""Finds what a data set and its `collate` have of their own that matters in several processes: generators, files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.core.keys import derive
from shoal.data.generators import Source, identity, is_generator, own_source, shared_by_all
from shoal.data.reach import reachable
from shoal.data.shared import is_new, what_is_shared
from shoal.engines.openfiles import take_failures

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
        self._looked = False
        self.notices: list[str] = [
            f"{path} was open before the workers were forked and cannot be opened again ({why}): they have one "
            "position in it, and one may read what another has looked for; open it in __getitem__"
            for path, why in (take_failures() if roots else {}).items()
        ]
        """What a person should know of what was found."""

    def more(self) -> list[Source]:
        """Those generators that were not found before."""
        found = []
        shared: list[tuple[str, str, Any]] = []
        for path, thing in reachable(self._roots):
            if is_generator(thing) and identity(thing) not in self._known:
                # kept, so that its identity stays its own
                self._known[identity(thing)] = thing
                source = self._source(path, thing)
                if source is not None:
                    found.append(source)
            elif (text := what_is_shared(thing)) and is_new(thing):
                shared.append((text, path, thing))
        # what is found later was made by this process, while it fetched
        if not self._looked:
            self._name_shared(shared)
        self._looked = True
        return found

    def _name_shared(self, shared: list[tuple[str, str, Any]]) -> None:
        """In a notice for each kind, but for what only constructors reach: they have run."""
        if any("__." in path for _, path, _ in shared):
            paths = {id(thing): path for path, thing in reachable(self._roots, constructed=True)}
            shared = [(text, paths[id(thing)], thing) for text, _, thing in shared if id(thing) in paths]
        named: dict[str, list[str]] = {}
        for text, path, _ in shared:
            named.setdefault(text, []).append(path)
        self.notices += [f"{_named(paths)} {text}" for text, paths in named.items()]

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


def _named(paths: list[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} (and {len(paths) - 1} more)"
