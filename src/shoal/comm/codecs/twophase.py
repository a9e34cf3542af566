"""A sum in two phases: each member adds up one chunk of all members' numbers, encodes that sum, and all gather it."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.codecs.blocks import is_finite, mixed
from shoal.comm.codecs.contract import Codec, State
from shoal.comm.codecs.memory import Memory
from shoal.comm.group import Group
from shoal.core.errors import PayloadError
from shoal.core.traffic import GRADIENT

_PARTS, _TOTALS = 1, 2


def chunks(count: int, members: int, block: int) -> list[tuple[int, int]]:
    """Start and stop of each member's chunk: equal numbers of whole blocks, but what is left for the last ones."""
    blocks = -(-count // block)
    each = -(-blocks // members) * block
    return [(min(member * each, count), min((member + 1) * each, count)) for member in range(members)]


class TwoPhaseSum:
    """Sums what any codec encodes. With `feedback` both phases keep what they lose.

    A member's own numbers of the chunk that it adds up are not encoded in the first phase: they stay here.
    """

    def __init__(self, group: Group, codec: Codec, feedback: bool = True) -> None:
        self.name = codec.name
        self._group = group
        self._codec = codec
        self._feedback = feedback
        self._block = getattr(codec, "block", 8)

    def sum(self, flat: Tensor, memory: Memory, *, key: int = 0, gauge: Tensor | None = None) -> None:
        account = self._group.account
        account.codec = self.name
        try:
            self._sum(flat, memory, key, gauge)
        finally:
            account.codec = "none"

    def _sum(self, flat: Tensor, memory: Memory, key: int, gauge: Tensor | None) -> None:
        cut = chunks(flat.numel(), self._group.size, self._block)
        whole, owned = self._states(flat, memory, cut, key, gauge)
        total = self._parts_added(flat, whole, cut)
        totals = self._gathered(self._codec.encode(total, owned), cut)
        for (start, stop), payload in zip(cut, totals, strict=True):
            self._codec.decode(payload, flat[start:stop], gauge=_part(gauge, start, stop))
        if whole.shadow is not None and not is_finite(flat):
            # nothing of this sum can be applied, as all members see: each has all to send that it had before
            for state in (whole, owned):
                if state.shadow is not None and state.residual is not None:
                    state.shadow.copy_(state.residual)

    def _states(
        self, flat: Tensor, memory: Memory, cut: list[tuple[int, int]], key: int, gauge: Tensor | None
    ) -> tuple[State, State]:
        """For the whole vector in the first phase, and for this member's chunk in the second."""
        start, stop = cut[self._group.rank]
        whole, owned = State(gauge=gauge), State(gauge=_part(gauge, start, stop))
        whole.key, owned.key = key, mixed(key, _TOTALS, self._group.rank)
        if self._feedback:
            # first: where chunks have changed hands, what was owned becomes part of the private residual
            owned.residual, owned.shadow = memory.owned(start, stop)
        else:
            memory.fold()
        if self._feedback or memory.has():
            whole.residual, whole.shadow = memory.private()
        return whole, owned

    # -- the first phase -----------------------------------------------------------------------------------------------

    def _parts_added(self, flat: Tensor, whole: State, cut: list[tuple[int, int]]) -> Tensor:
        """The sum of all members' numbers in this member's chunk, added in order of rank."""
        rank = self._group.rank
        start, stop = cut[rank]
        payloads = [
            self._encoded(flat, whole, cut, member) if member != rank else flat.new_empty(0, dtype=torch.uint8)
            for member in range(self._group.size)
        ]
        received = self._group.swap(_rows(payloads, self._width(payloads, cut)), GRADIENT)
        own, total = _own(flat, whole, start, stop), flat.new_zeros(stop - start)
        for member in range(self._group.size):
            if member == rank:
                total.add_(own)
            else:
                self._codec.decode(received[member], total, gauge=_part(whole.gauge, start, stop), add=True)
        return total

    def _encoded(self, flat: Tensor, whole: State, cut: list[tuple[int, int]], member: int) -> Tensor:
        start, stop = cut[member]
        state = State(
            _part(whole.residual, start, stop),
            _part(whole.shadow, start, stop),
            _part(whole.gauge, start, stop),
            mixed(whole.key, _PARTS, self._group.rank, member),
        )
        return self._codec.encode(flat[start:stop], state)

    # -- the second phase ----------------------------------------------------------------------------------------------

    def _gathered(self, payload: Tensor, cut: list[tuple[int, int]]) -> Tensor:
        """All members' payloads, one in each row."""
        row = _rows([payload], self._width([payload], cut))[0]
        return self._group.gather(row, GRADIENT)

    def _width(self, payloads: list[Tensor], cut: list[tuple[int, int]]) -> int:
        """The bytes of a row, equal on all members: as many as the longest payload has."""
        most = self._codec.most_bytes(cut[0][1] - cut[0][0])
        if self._codec.fixed:
            return most
        longest = torch.tensor([max(payload.numel() for payload in payloads)], device=payloads[0].device)
        width = int(self._group.gather(longest, GRADIENT).max())
        if not 0 <= width <= most or width % 8:
            raise PayloadError(
                f"a worker announced a payload of {width} bytes; it must be a multiple of 8 up to {most}"
            )
        return width


def _own(flat: Tensor, whole: State, start: int, stop: int) -> Tensor:
    """What this member adds to its own chunk, of which nothing is lost."""
    here = flat[start:stop]
    if whole.residual is None or whole.shadow is None:
        return here
    numbers = here + whole.residual[start:stop]
    whole.shadow[start:stop].zero_()
    return numbers


def _rows(payloads: list[Tensor], width: int) -> Tensor:
    """Payloads as rows of equal length, with zeros behind each."""
    rows = torch.empty(len(payloads), width, dtype=torch.uint8, device=payloads[0].device)
    for row, payload in zip(rows, payloads, strict=True):
        row[: payload.numel()].copy_(payload)
        row[payload.numel() :].zero_()
    return rows


def _part(tensor: Tensor | None, start: int, stop: int) -> Tensor | None:
    return None if tensor is None else tensor[start:stop]
