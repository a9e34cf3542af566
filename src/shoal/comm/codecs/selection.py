"""Which numbers are the largest: exactly, or by a threshold that a sample of them gives.

Both write tensor + residual to the state's shadow on the way, so that the numbers are passed over once. Torch has no
fast way to the largest hundredth of a vector; with a threshold that lets somewhat more than enough pass, it has to
sort out that small part only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.comm.codecs.contract import State

_PIECE = 1 << 16
"""Numbers that are worked on at a time on a CPU: what is made of them on the way stays in its cache."""
_STRIDE = 64
"""One number out of so many is in the sample, if that makes a sample of `_LEAST_SAMPLE` at least."""
_LEAST_SAMPLE = 4096


def largest(tensor: Tensor, state: State, wanted: int) -> tuple[Tensor, Tensor]:
    """Rising indices of exactly the `wanted` largest numbers of (tensor + residual) / gauge, and these numbers.

    The shadow is tensor + residual afterwards. Numbers that are not finite count as the largest.
    """
    total = _totals(tensor, state, slice(None))
    weighed = total if state.gauge is None else total / state.gauge
    index = weighed.abs().topk(wanted, sorted=False).indices.sort().values
    return index, weighed[index]


def about_largest(tensor: Tensor, state: State, wanted: int) -> tuple[Tensor, Tensor]:
    """As `largest`, but from what exceeds a threshold found by a sample.

    These are the same numbers unless the sample misleads; then they are fewer, never more, and at least one unless all
    are zero. Zeros are left out. If some numbers are not finite, one of these is among them.
    """
    index, weighed = _exceeding(tensor, state, threshold(tensor, state, wanted))
    return _cut(index, weighed, wanted)


def _totals(tensor: Tensor, state: State, part: slice) -> Tensor:
    """tensor + residual in this part, which is in the shadow then."""
    if state.residual is None or state.shadow is None:
        return tensor[part]
    return torch.add(tensor[part], state.residual[part], out=state.shadow[part])


def _exceeding(tensor: Tensor, state: State, size: float) -> tuple[Tensor, Tensor]:
    """Everything that is larger than `size`, or not finite."""
    count = tensor.numel()
    piece = _PIECE if tensor.device.type == "cpu" else max(count, 1)
    indices, numbers = [], []
    for start in range(0, count, piece):
        part = slice(start, start + piece)
        weighed = _totals(tensor, state, part)
        if state.gauge is not None:
            weighed = weighed / state.gauge[part]
        # `hardshrink` lets NaN pass, which a comparison with the size would not
        at = _where(torch.hardshrink(weighed, size).bool())
        numbers.append(weighed[at])
        indices.append(at.add_(start))
    if not indices:
        return tensor.new_empty(0, dtype=torch.int64), tensor.new_empty(0)
    return torch.cat(indices), torch.cat(numbers)


def _where(mask: Tensor) -> Tensor:
    """Indices of what is true. Where that is little, 8 numbers at a time are passed over."""
    if mask.numel() % 8:
        mask = torch.cat([mask, mask.new_zeros(-mask.numel() % 8)])
    words = mask.view(torch.int64)
    hit = words.nonzero().view(-1)
    if hit.numel() * 4 > words.numel():
        return mask.nonzero().view(-1)
    within = words[hit].view(torch.bool).nonzero().view(-1)
    return hit[within >> 3].mul_(8).add_(within & 7)


def _cut(index: Tensor, weighed: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
    """The `wanted` largest of these, in their order."""
    if index.numel() <= wanted:
        return index, weighed
    kept = torch.zeros_like(index, dtype=torch.bool)
    kept[weighed.abs().topk(wanted, sorted=False).indices] = True
    return index[kept], weighed[kept]


def threshold(tensor: Tensor, state: State, wanted: int) -> float:
    """A size that somewhat more than `wanted` numbers of (tensor + residual) / gauge exceed, by a sample of these."""
    count = tensor.numel()
    stride = max(1, min(_STRIDE, count // _LEAST_SAMPLE))
    sampled = count // stride
    rank = wanted
    if stride > 1:
        expected = wanted * sampled / count
        # three standard deviations: that too few pass is rare, and to sort out some more is cheap
        rank = math.ceil(expected + 3 * math.sqrt(expected) + 4)
    if rank >= sampled:
        return 0.0
    sizes = _sample(tensor, state, sampled, stride)
    least = sizes.kthvalue(sampled - rank + 1).values
    # Numbers equal to `least` are to pass. If it is infinite what is infinite passes, and if it is NaN everything.
    return float(torch.nextafter(least, torch.zeros_like(least)))


def _sample(tensor: Tensor, state: State, sampled: int, stride: int) -> Tensor:
    """Sizes of `sampled` numbers, one from each `stride` of them, at places that follow from the key."""
    at = torch.arange(sampled, device=tensor.device)
    if stride > 1:
        at = at * stride + (_hashed(at, state.key) * stride >> 31)
    sizes = tensor[at]
    if state.residual is not None:
        sizes += state.residual[at]
    if state.gauge is not None:
        sizes /= state.gauge[at]
    return sizes.abs_()


def _hashed(numbers: Tensor, key: int) -> Tensor:
    """Numbers from 0 to 2³¹−1 that look random: the finalizer of SplitMix64 (arithmetic modulo 2⁶⁴ in int64)."""
    start = (key * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % (1 << 63)
    mixed = numbers * 0x1E3779B97F4A7C15 + start
    mixed = (mixed ^ (mixed >> 30)) * 0x3F58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x14D049BB133111EB
    return (mixed >> 32) & 0x7FFFFFFF
