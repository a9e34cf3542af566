"""What encoding remembers from step to step, for one set of parameters that are laid flat.

*Private* vectors differ between members: residuals, local momentum. *Shared* ones are equal on all members: the
factors of PowerSGD, the scale of fp16. Both are written to shadows during a step and swapped by `commit`, so that a
step which is done again starts from the same values as the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

RESIDUAL = "residual"
"""The private vector of what has not been sent yet."""


class _Pair:
    """A vector that counts, and its shadow."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.shadow = torch.empty_like(value)
        self.written = False


class Memory:
    """One member's. One thread. In each step: `open`, any number of the getters, and `commit` if the step counts."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.count = count
        self.device = device
        self._private: dict[str, _Pair] = {}
        self._shared: dict[str, _Pair] = {}
        self._owned: dict[int, _Pair] = {}
        """What the second phase has lost of the chunks that this member adds up, by where they begin."""

    # -- in a step -----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin a step, or begin it again."""
        for pair in self._pairs():
            pair.written = False

    def commit(self) -> None:
        """The step counts: what was written to shadows counts from now on. Twice is once."""
        for pair in self._pairs():
            if pair.written:
                pair.value, pair.shadow, pair.written = pair.shadow, pair.value, False

    def undo(self, start: int, stop: int, names: Sequence[str]) -> None:
        """Of this stretch nothing is applied: these private vectors, and what is owned, keep what they had."""
        for name in names:
            pair = self._private.get(name)
            if pair is not None:
                pair.shadow[start:stop].copy_(pair.value[start:stop])
        for at, pair in self._owned.items():
            first, last = (min(max(place - at, 0), pair.value.numel()) for place in (start, stop))
            pair.shadow[first:last].copy_(pair.value[first:last])

    def private(self, name: str = RESIDUAL) -> tuple[Tensor, Tensor]:
        """A private vector of `count` numbers, zeros at first, and its shadow, which the caller writes completely."""
        pair = self._private.get(name)
        if pair is None:
            pair = self._private[name] = _Pair(torch.zeros(self.count, device=self.device))
        pair.written = True
        return pair.value, pair.shadow

    def has(self, name: str = RESIDUAL) -> bool:
        """Whether there is such a private vector: a step whose codec needs none has to send what is in it."""
        return name in self._private

    def owned(self, *chunks: tuple[int, int]) -> list[tuple[Tensor, Tensor]]:
        """The residuals of the second phase, for all chunks that this member adds up, and their shadows.

        If it had other chunks before, what they have kept becomes part of the private residual.
        """
        if [(start, start + pair.value.numel()) for start, pair in self._owned.items()] != list(chunks):
            self.fold()
            self._owned = {start: _Pair(torch.zeros(stop - start, device=self.device)) for start, stop in chunks}
        for pair in self._owned.values():
            pair.written = True
        return [(pair.value, pair.shadow) for pair in self._owned.values()]

    def shared(self, name: str, make: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """A vector that is equal on all members, made by `make` at first, and its shadow."""
        pair = self._shared.get(name)
        if pair is None:
            pair = self._shared[name] = _Pair(make())
        pair.written = True
        return pair.value, pair.shadow

    def _pairs(self) -> list[_Pair]:
        return [*self._private.values(), *self._shared.values(), *self._owned.values()]

    # -- when members change -------------------------------------------------------------------------------------------

    def fold(self) -> None:
        """Chunks are about to have other owners: what the second phase lost is this member's to send, as any other."""
        owned, self._owned = self._owned, {}
        if owned:
            pair = self._private.get(RESIDUAL)
            if pair is None:
                pair = self._private[RESIDUAL] = _Pair(torch.zeros(self.count, device=self.device))
            _add_parts(pair.value, owned)

    def parts(self) -> dict[str, Tensor]:
        """The private vectors as they would be folded: sums of them over all members are what is still to be sent."""
        found = {name: pair.value for name, pair in sorted(self._private.items())}
        if self._owned:
            residual = found[RESIDUAL].clone() if RESIDUAL in found else torch.zeros(self.count, device=self.device)
            _add_parts(residual, self._owned)
            found[RESIDUAL] = residual
        return found

    def take(self, totals: Mapping[str, Tensor], members: int) -> None:
        """Have one of `members` equal parts of these sums."""
        self._owned = {}
        self._private = {name: _Pair(total.to(self.device) / members) for name, total in totals.items()}

    def temper(self, factor: float, names: Sequence[str]) -> None:
        """What is applied in this step is scaled by this, and so is what is left of it, in these private vectors."""
        for pair in (*(self._private.get(name) for name in names), *self._owned.values()):
            if pair is not None and pair.written:
                pair.shadow.mul_(factor)

    def drop(self, name: str) -> None:
        """Forget a private vector."""
        self._private.pop(name, None)

    def rescale(self, factor: float) -> None:
        """What is to be sent is in other units from now on."""
        pair = self._private.get(RESIDUAL)
        for held in (pair, *self._owned.values()):
            if held is not None:
                held.value.mul_(factor)

    def common(self) -> dict[str, Tensor]:
        """The shared vectors, live."""
        return {name: pair.value for name, pair in sorted(self._shared.items())}

    def adopt(self, common: Mapping[str, Tensor]) -> None:
        """Have these shared vectors, which are another member's, or a checkpoint's."""
        self._shared = {name: _Pair(value.detach().clone().to(self.device)) for name, value in common.items()}


def _add_parts(vector: Tensor, parts: Mapping[int, _Pair]) -> None:
    for start, pair in parts.items():
        vector[start : start + pair.value.numel()].add_(pair.value)
