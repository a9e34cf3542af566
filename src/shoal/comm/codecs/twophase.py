"""A sum in two phases: each member adds up one chunk of all members' numbers, encodes that sum, and all gather it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from shoal.comm.codecs.blocks import is_finite, mixed
from shoal.comm.codecs.contract import Codec, State
from shoal.comm.codecs.memory import Memory
from shoal.comm.group import Group, Work
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
        self.group = group
        self.codec = codec
        self.feedback = feedback

    def sum(self, flat: Tensor, memory: Memory, *, key: int = 0, gauge: Tensor | None = None) -> None:
        self.begin(flat, memory, key=key, gauge=gauge).go()

    def begin(
        self,
        flat: Tensor,
        memory: Memory,
        *,
        key: int = 0,
        gauge: Tensor | None = None,
        stretches: Sequence[tuple[int, int]] = (),
    ) -> Running:
        """A sum that goes on in parts, one for each of these stretches of the vector, which together are all of it.

        `flat` is read when its parts are sent, and written at the end.
        """
        return Running(self, flat, memory, key, gauge, stretches or [(0, flat.numel())])


class Running:
    """A sum under way. All members call the same methods in the same order: each stretch is sent, then turned."""

    def __init__(
        self,
        summing: TwoPhaseSum,
        flat: Tensor,
        memory: Memory,
        key: int,
        gauge: Tensor | None,
        stretches: Sequence[tuple[int, int]],
    ) -> None:
        self._group, self._codec, self._flat, self._key = summing.group, summing.codec, flat, key
        block = getattr(summing.codec, "block", 8)
        self._cuts = [
            [(start + first, start + last) for first, last in chunks(stop - start, self._group.size, block)]
            for start, stop in stretches
        ]
        mine = [cut[self._group.rank] for cut in self._cuts]
        self._whole = State(gauge=gauge)
        self._owned = [State(gauge=_part(gauge, *chunk)) for chunk in mine]
        if summing.feedback:
            # first: where chunks have changed hands, what was owned becomes part of the private residual
            for state, pair in zip(self._owned, memory.owned(*mine), strict=True):
                state.residual, state.shadow = pair
        else:
            memory.fold()
        if summing.feedback or memory.has():
            self._whole.residual, self._whole.shadow = memory.private()
        self._moving: dict[int, tuple[Tensor, Work]] = {}

    def go(self) -> None:
        """All of it: one stretch is turned while the next is on its way."""
        for number in range(len(self._cuts)):
            self.send(number)
            if number:
                self.turn(number - 1)
        self.turn(len(self._cuts) - 1)
        self.end()

    # -- the first phase -----------------------------------------------------------------------------------------------

    def send(self, number: int) -> None:
        """Begin to send this member's numbers in a stretch to those who add them up."""
        with self._labelled():
            rank, cut = self._group.rank, self._cuts[number]
            payloads = [
                self._encoded(number, member) if member != rank else self._flat.new_empty(0, dtype=torch.uint8)
                for member in range(self._group.size)
            ]
            self._moving[number] = self._group.start_swap(_rows(payloads, self._width(payloads, cut)), GRADIENT)

    def _encoded(self, number: int, member: int) -> Tensor:
        start, stop = self._cuts[number][member]
        state = State(
            _part(self._whole.residual, start, stop),
            _part(self._whole.shadow, start, stop),
            _part(self._whole.gauge, start, stop),
            mixed(self._key, _PARTS, self._group.rank, member, number),
        )
        return self._codec.encode(self._flat[start:stop], state)

    # -- the second phase ----------------------------------------------------------------------------------------------

    def turn(self, number: int) -> None:
        """Add up what came of a stretch, and begin to send the sum to all."""
        with self._labelled():
            cut, owned = self._cuts[number], self._owned[number]
            owned.key = mixed(self._key, _TOTALS, self._group.rank, number)
            payload = self._codec.encode(self._added(number), owned)
            row = _rows([payload], self._width([payload], cut))[0]
            self._moving[number] = self._group.start_gather(row, GRADIENT)

    def _added(self, number: int) -> Tensor:
        """The sum of all members' numbers in this member's chunk, added in order of rank."""
        received, work = self._moving.pop(number)
        rank = self._group.rank
        start, stop = self._cuts[number][rank]
        own, total = _own(self._flat, self._whole, start, stop), self._flat.new_zeros(stop - start)
        work.wait()
        for member in range(self._group.size):
            if member == rank:
                total.add_(own)
            else:
                self._codec.decode(received[member], total, gauge=_part(self._whole.gauge, start, stop), add=True)
        return total

    def end(self) -> None:
        """Have all sums in the vector."""
        with self._labelled():
            for number, (totals, work) in self._moving.items():
                work.wait()
                for (start, stop), payload in zip(self._cuts[number], totals, strict=True):
                    gauge = _part(self._whole.gauge, start, stop)
                    self._codec.decode(payload, self._flat[start:stop], gauge=gauge)
        if self._whole.shadow is not None and not is_finite(self._flat):
            # nothing of this sum can be applied, as all members see: each has all to send that it had before
            for state in (self._whole, *self._owned):
                if state.shadow is not None and state.residual is not None:
                    state.shadow.copy_(state.residual)

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

    @contextmanager
    def _labelled(self) -> Iterator[None]:
        account = self._group.account
        account.codec = self._codec.name
        try:
            yield
        finally:
            account.codec = "none"


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
