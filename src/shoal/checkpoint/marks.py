"""Whether the data of a run is that of the run which it goes on from: marks of a few items, kept with the run.

Items are fetched as for a step, with the same draws in every run. Those that are others each time tell nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shoal.checkpoint.lineage import UNMARKED, first_differing
from shoal.core.keys import derive
from shoal.data.likeness import digests_of, some_indices

if TYPE_CHECKING:
    from shoal.data.background import LoaderProcess


class Marks:
    """Of one data set. For one thread, which must outlive it; `close` ends what is still being fetched."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self._late: list[LoaderProcess] = []

    @cached_property
    def first(self) -> tuple[str, ...]:
        """To be kept."""
        return self._fetch()

    @cached_property
    def steady(self) -> tuple[str, ...]:
        """To be compared with what was kept: only those that are the same twice."""
        return tuple(one if one == two else UNMARKED for one, two in zip(self.first, self._fetch(), strict=True))

    def other_than(self, kept: Sequence[str] | None) -> int | None:
        """The index of an item that surely is another one than that of a run whose marks these are; else None."""
        place = first_differing(self.steady, kept) if kept else None
        return None if place is None else some_indices(len(self._data))[place]

    def close(self) -> None:
        if self._late:
            from shoal.data.background import end_all

            end_all(self._late)
            self._late = []

    def _fetch(self) -> tuple[str, ...]:
        indices = some_indices(len(self._data))
        if self._late:  # one that was slow will be slow again
            return (UNMARKED,) * len(indices)
        found = digests_of(self._data, indices, name="data", key=derive("marks"), late=self._late)
        return tuple(digest.hex() for digest in found)
