"""The sums of a step over known buffers: one vector for each precision, and a stretch of it for each buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.layouts.merging import Merge
from shoal.layouts.words import CONCAT


class Totals(NamedTuple):
    """Sums in single precision, and in double precision on the CPU. None where there are none."""

    single: Tensor | None
    double: Tensor | None


class Sums:
    """For some buffers, by number, in order."""

    def __init__(self, merges: Mapping[int, Merge], values: Mapping[int, Tensor]) -> None:
        """Those of rows have no sums."""
        self.of = list(merges)
        kept = [number for number, merge in merges.items() if merge.word.kind != CONCAT]
        self._numbers = [[number for number in kept if merges[number].double == double] for double in (False, True)]
        self._counts = [[merges[each].size(values[each].numel()) for each in mine] for mine in self._numbers]
        self._flats: list[Tensor | None] = []
        self.parts: dict[int, Tensor] = {}
        for double, mine, counts in zip((False, True), self._numbers, self._counts, strict=True):
            if not mine:
                self._flats.append(None)
                continue
            dtype = torch.float64 if double else torch.float32
            flat = torch.zeros(sum(counts), dtype=dtype, device=values[mine[0]].device)
            self._flats.append(flat)
            self.parts.update(zip(mine, flat.split(counts), strict=True))

    @property
    def sizes(self) -> tuple[int, int]:
        """Elements that they take, in single and in double precision."""
        return sum(self._counts[0]), sum(self._counts[1])

    def clear(self) -> None:
        for flat in self._flats:
            if flat is not None:
                flat.zero_()

    def add(self, numbers: Sequence[int], amounts: Sequence[Tensor], times: int) -> None:
        """Add to some of them, flat amounts of any type, so many times."""
        if numbers:
            sums = [self.parts[number] for number in numbers]
            found = [amount.to(total.dtype) for amount, total in zip(amounts, sums, strict=True)]
            torch._foreach_add_(sums, found, alpha=times)

    def take(self) -> Totals:
        """All so far; they start anew."""
        single, double = self._flats
        taken = Totals(None if single is None else single.clone(), None if double is None else double.cpu().clone())
        self.clear()
        return taken

    def split(self, totals: Totals, samples: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Totals of this layout, by number: each as it is, and divided by so many samples."""
        for mine, counts, flat, total in zip(self._numbers, self._counts, self._flats, totals, strict=True):
            if flat is not None and total is not None:
                total = total.to(flat.device)
                yield from zip(mine, total.split(counts), (total / samples).split(counts), strict=True)
