"""Where trained weights land: memory that the process which called `fit()` shares with the worker it forked."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor


class Landing:
    """Anonymous shared memory for copies of some tensors. Made before the fork; one worker puts, the parent takes.

    Pages are used only once written, and the kernel frees them with the last process: nothing to clean up.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._like = [(tensor.dtype, tensor.shape, tensor.nbytes) for tensor in tensors]
        self._memory = mmap.mmap(-1, max(1, sum(_padded(size) for _, _, size in self._like)))

    def put(self, tensors: Sequence[Tensor]) -> None:
        for place, tensor in zip(self._places(), tensors, strict=True):
            place.copy_(tensor.detach())

    def take(self, tensors: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for place, tensor in zip(self._places(), tensors, strict=True):
                tensor.copy_(place)

    def _places(self) -> list[Tensor]:
        places, offset = [], 0
        for dtype, shape, size in self._like:
            if size:
                count = size // dtype.itemsize
                places.append(torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset).view(shape))
            else:
                places.append(torch.empty(shape, dtype=dtype))
            offset += _padded(size)
        return places


def _padded(size: int) -> int:
    return -(-size // 64) * 64
