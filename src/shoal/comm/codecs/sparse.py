"""Sums of sparse parts: every member sends its largest numbers to all, and all add them up in the same order.

With the options of deep gradient compression (Lin et al., 2018), each of which may be off.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from shoal.comm.codecs.contract import Codec, State
from shoal.comm.codecs.memory import Memory
from shoal.comm.codecs.payload import HEADER_BYTES
from shoal.comm.codecs.topk import TopKCodec
from shoal.comm.group import Group
from shoal.core.errors import PayloadError
from shoal.core.spec import TopK
from shoal.core.traffic import GRADIENT

MOMENTUM = "momentum"
"""The private vector of a member's own momentum."""
STEP = "topk step"
"""The shared vector of one number: how many steps of the density's warm-up have been made."""
_FIRST_DENSITY = 0.25
_PIECE = 1 << 16


class SparseSum:
    """A `Summing` of the largest numbers.

    Of each member's gradient g, with its residual and its momentum u from the steps before:

        g is scaled down to a norm of clip / √members, if it is larger        (spec.clip)
        u' = momentum · u + damping · g, or just g without correction         (spec.correction, `momentum`)
        v = residual + u', of which the largest numbers are sent              (spec.density, spec.warmup)
        residual' = v − sent
        u' = 0 where numbers other than 0 were sent                           (spec.mask)

    Without correction, nothing is lost: over all members, the sum of g (clipped) + residual is the result + the sum of
    residual'. With it the same holds of u' before masking in place of g: what masking takes from the momentum is only
    how far numbers that were just sent would have gone on moving.

    In a group of one all of v is the result, and nothing is masked: this is plain momentum.

    If the result is not finite, which all members see alike, then it cannot be applied, and nothing counts as sent on
    any of them: all shadows are what was there before.
    """

    name = "topk"

    def __init__(self, group: Group, spec: TopK, wrap: Callable[[Codec], Codec] | None = None) -> None:
        """`wrap` may put another codec around the one whose payloads are sent, such as one that loses nothing."""
        self.group = group
        self.spec = spec
        self.momentum = 0.0
        """The optimizer's, if it is to act before numbers are chosen; the optimizer itself then applies none."""
        self.damping = 1.0
        """What the optimizer multiplies a gradient by before it adds it to the momentum."""
        self._wrap = wrap

    def sum(self, flat: Tensor, memory: Memory, *, key: int = 0, gauge: Tensor | None = None) -> None:
        """See `Summing.sum`. Raises `PayloadError` if what came is damaged: `flat` is worth nothing then."""
        memory.fold()
        density = self._density(memory)
        self._clip(flat)
        correcting = self.spec.correction and self.momentum > 0
        moved = self._moved(flat, memory) if correcting else flat
        if self.group.size == 1:
            self._sum_alone(flat, moved, memory)
        else:
            residual, shadow = memory.private()
            state = State(residual, shadow, gauge, key * self.group.size + self.group.rank)
            self._exchange(flat, moved, state, density)
            if correcting and self.spec.mask:
                _mask(moved, residual, shadow)
        if not _all_finite(flat):
            self._undo(memory, correcting)

    def _clip(self, flat: Tensor) -> None:
        if self.spec.clip:
            norm = float(torch.linalg.vector_norm(flat))
            most = self.spec.clip / math.sqrt(self.group.size)
            if most < norm < math.inf:
                flat.mul_(most / norm)

    def _moved(self, flat: Tensor, memory: Memory) -> Tensor:
        """The new momentum, in its shadow."""
        momentum, shadow = memory.private(MOMENTUM)
        return torch.mul(momentum, self.momentum, out=shadow).add_(flat, alpha=self.damping)

    def _density(self, memory: Memory) -> float:
        """That of this step: it falls by the same factor in each step of the warm-up."""
        wanted, warmup = self.spec.density, self.spec.warmup
        if not warmup:
            return wanted
        step, shadow = self._step(memory)
        torch.add(step, 1, out=shadow).clamp_(max=warmup)
        passed = min(1.0, int(step) / warmup)
        return max(wanted, _FIRST_DENSITY * math.pow(wanted / _FIRST_DENSITY, passed))

    @staticmethod
    def _step(memory: Memory) -> tuple[Tensor, Tensor]:
        return memory.shared(STEP, lambda: torch.zeros(1, dtype=torch.int64, device=memory.device))

    def _sum_alone(self, flat: Tensor, moved: Tensor, memory: Memory) -> None:
        flat.copy_(moved)
        if memory.has():
            residual, shadow = memory.private()
            flat.add_(residual)
            shadow.zero_()

    def _exchange(self, flat: Tensor, moved: Tensor, state: State, density: float) -> None:
        """Replace `flat` by the sum of what all members send of `moved` + residual."""
        topk = TopKCodec(density, self.spec.threshold)
        codec: Codec = topk if self._wrap is None else self._wrap(topk)
        payload = codec.encode(moved, state)
        account = self.group.account
        account.codec = self.name
        try:
            rows = self._gather(payload, codec.most_bytes(flat.numel()))
        finally:
            account.codec = "none"
        flat.zero_()
        for row in rows:
            codec.decode(row, flat, gauge=state.gauge, add=True)

    def _gather(self, payload: Tensor, most: int) -> list[Tensor]:
        """All members' payloads, in order of rank."""
        own = torch.tensor([payload.numel()], device=payload.device)
        lengths: list[int] = self.group.gather(own, GRADIENT).view(-1).tolist()
        for member, length in enumerate(lengths):
            if length % 8 or not HEADER_BYTES <= length <= most:
                raise PayloadError(
                    f"member {member} has a payload of {length} bytes; it must be a multiple of 8 from {HEADER_BYTES} "
                    f"to {most}. Do all members have the same codec and the same parameters?"
                )
        row = payload.new_zeros(max(lengths))
        row[: payload.numel()] = payload
        rows = self.group.gather(row, GRADIENT)
        return [rows[member, :length] for member, length in enumerate(lengths)]

    def _undo(self, memory: Memory, correcting: bool) -> None:
        pairs = [memory.private()] if memory.has() else []
        if correcting:
            pairs.append(memory.private(MOMENTUM))
        if self.spec.warmup:
            pairs.append(self._step(memory))
        for value, shadow in pairs:
            shadow.copy_(value)


def _mask(moved: Tensor, residual: Tensor, shadow: Tensor) -> None:
    """Stop the momentum where sending has changed what is left of residual + momentum."""
    for start in range(0, moved.numel(), _PIECE):
        part = slice(start, start + _PIECE)
        kept = shadow[part] == residual[part] + moved[part]
        moved[part].mul_(kept)


def _all_finite(flat: Tensor) -> bool:
    """The sum is quick to find, and tells unless finite numbers overflow in it."""
    return bool(flat.sum().isfinite()) or bool(flat.isfinite().all())
