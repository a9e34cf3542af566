"""Counts warnings that repeat, so that each is read once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from shoal.monitor.display.phrases import shortened

_SHOWN_PER_KIND = 3
_MOST_KINDS = 200
_MOST_LETTERS = 100
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]+|\d[\d.,_:]*(?:[eE][-+]?\d+)?")


@dataclass
class _Kind:
    """Texts that differ only in numbers."""

    shown: dict[str, int] = field(default_factory=dict)
    """How often each came again."""
    others: int = 0


class Notices:
    """Says of each text whether to show it, and at the end how often those that were not shown came again.

    The same text is shown once; of texts that differ only in numbers, three are. Memory is bounded: beyond 200 kinds
    of text, further ones are only counted.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = {}
        self._further = 0

    def is_news(self, text: str) -> bool:
        key = _NUMBER.sub("#", text)
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= _MOST_KINDS:
                self._further += 1
                return False
            kind = self._kinds[key] = _Kind()
        if text in kind.shown:
            kind.shown[text] += 1
            return False
        if len(kind.shown) >= _SHOWN_PER_KIND:
            kind.others += 1
            return False
        kind.shown[text] = 0
        return True

    def counts(self) -> Iterator[str]:
        """A line for each text that came again."""
        for kind in self._kinds.values():
            for text, again in kind.shown.items():
                if again:
                    yield f"{_times(again)}: {shortened(text, _MOST_LETTERS)}"
            if kind.others:
                yield f"{_times(kind.others)}, with other numbers: {shortened(next(iter(kind.shown)), _MOST_LETTERS)}"
        if self._further:
            yield f"{self._further} more warnings of other kinds"


def _times(count: int) -> str:
    return "once more" if count == 1 else f"{count} more times"
