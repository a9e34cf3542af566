"""Which operation the members of a group on torch's backends are in, told where they met, once a wait has become long.

Gloo does not see that members have called different operations: they wait for each other, or break for a reason that
says nothing of it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from shoal.core.errors import SAME_ORDER

_POLL_SECONDS = 0.01


class At(NamedTuple):
    """An operation of a group, as one member sees it."""

    number: int
    """How many the group has had before."""
    what: str


class Whereabouts:
    """One member's view of all of them. Where the store is gone, nothing is known."""

    def __init__(self, store: Any, rank: int, names: Sequence[str]) -> None:
        self._store = store
        self._rank = rank
        self._names = list(names)

    def tell(self, at: At) -> None:
        with suppress(RuntimeError, ValueError):
            self._store.set(f"at/{self._rank}", f"{at.number} {at.what}")

    def strayed(self, at: At, patience: float = 0.0) -> str:
        """In words, that another member has told of something else as the same operation, within so many seconds."""
        deadline = time.monotonic() + patience
        with suppress(RuntimeError, ValueError):
            while True:
                for member, name in enumerate(self._names):
                    theirs = None if member == self._rank else self._told(member)
                    if theirs is not None and theirs.number == at.number and theirs != at:
                        return (
                            f"as operation {at.number} {self._names[self._rank]} has {at.what} and {name} "
                            f"{theirs.what}; {SAME_ORDER}, with the same buffers"
                        )
                if time.monotonic() >= deadline:
                    break
                time.sleep(_POLL_SECONDS)
        return ""

    def _told(self, member: int) -> At | None:
        key = f"at/{member}"
        if not self._store.check([key]):
            return None
        number, _, what = self._store.get(key).decode().partition(" ")
        return At(int(number), what)
