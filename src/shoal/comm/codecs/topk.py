"""The largest numbers only. The others stay in the residual until they have grown."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.comm.codecs import payload as payloads
from shoal.comm.codecs.contract import State
from shoal.comm.codecs.payload import HEADER_BYTES
from shoal.comm.codecs.selection import about_largest, largest
from shoal.comm.codecs.sparse_body import halved, most_body_bytes, packed, unpacked
from shoal.core.errors import PayloadError

_NOT_FINITE = 1
"""Flag: the input had numbers that are not finite. The body is the index of one of them, in 8 bytes."""


class TopKCodec:
    """Sends about density × count numbers, the largest of (tensor + residual) / gauge, in half precision.

    `threshold` is exact, which sends ⌈density × count⌉ numbers and sorts, or sampled, which sends as many or, rarely,
    fewer, and is far faster. What rounding to half precision loses stays in the residual too: decoded + shadow is
    tensor + residual to the last bit, or with a gauge to rounding.

    If any number is not finite, nothing is sent but NaN in its place, and the whole shadow is the old residual.
    """

    name = "topk"
    fixed = False

    def __init__(self, density: float, threshold: str) -> None:
        self.density = density
        self.threshold = threshold

    def encode(self, tensor: Tensor, state: State) -> Tensor:
        count = tensor.numel()
        choose = largest if self.threshold == "exact" else about_largest
        index, weighed = choose(tensor, state, self._wanted(count))
        finite = weighed.isfinite()
        if not bool(finite.all()):
            return _not_finite(index[~finite][:1], count, state)
        sparse = halved(index, weighed)
        if state.shadow is not None:
            sent = sparse.numbers() if state.gauge is None else sparse.numbers().mul_(state.gauge[index])
            if not bool(sent.isfinite().all()):
                return _not_finite(index[~sent.isfinite()][:1], count, state)
            state.shadow.index_add_(0, index, sent, alpha=-1)
        return payloads.seal(packed(sparse, count), self.name, count)

    def decode(self, payload: Tensor, out: Tensor, *, gauge: Tensor | None = None, add: bool = False) -> None:
        count = out.numel()
        body, flags = payloads.opened(payload, self.name, count)
        if flags == _NOT_FINITE:
            index, numbers = _where_not_finite(body, count)
        elif flags:
            raise PayloadError(f"a payload of {self.name} has flags {flags:#x}, of which only 0x1 is known")
        else:
            sparse = unpacked(body, count)
            index, numbers = sparse.places, sparse.numbers()
        if gauge is not None:
            numbers.mul_(gauge[index])
        if not add:
            out.zero_()
        out.index_add_(0, index, numbers)

    def most_bytes(self, count: int) -> int:
        return HEADER_BYTES + most_body_bytes(count, self._wanted(count))

    def _wanted(self, count: int) -> int:
        return min(math.ceil(self.density * count), count)


def _not_finite(index: Tensor, count: int, state: State) -> Tensor:
    if state.shadow is not None and state.residual is not None:
        state.shadow.copy_(state.residual)
    payload = payloads.room(8, index.device)
    payload[HEADER_BYTES:] = index.view(torch.uint8)
    return payloads.seal(payload, TopKCodec.name, count, _NOT_FINITE)


def _where_not_finite(body: Tensor, count: int) -> tuple[Tensor, Tensor]:
    index = body.view(torch.int64)
    if index.numel() != 1 or not 0 <= int(index) < count:
        raise PayloadError(f"a payload that is not finite must name one of {count} numbers, and does not")
    return index, torch.full((1,), torch.nan, device=body.device)
