"""Where trained weights land: memory that the process which called `fit()` shares with the worker it forked."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


class Landing:
    """Anonymous shared memory for copies of some tensors. Made before the fork; one worker puts, the parent takes.

    Pages are used only once written, and the kernel frees them with the last process: nothing to clean up.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._like = {name: (tensor.dtype, tensor.shape, tensor.nbytes) for name, tensor in tensors.items()}
        self._memory = mmap.mmap(-1, max(1, sum(_padded(size) for _, _, size in self._like.values())))

    def put(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Copy the tensors here; returns `fitting`."""
        places, fitting = self._places(), self.fitting(tensors)
        for name in fitting:
            places[name].copy_(tensors[name].detach())
        return fitting

    def fitting(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """The names of those that have a place here: not one that is new, or of new shape."""
        return [name for name, (_, shape, _) in self._like.items() if name in tensors and tensors[name].shape == shape]

    def take(self, tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
        """Copy what was put under these names into the tensors that this was made for."""
        places = self._places()
        with torch.no_grad():
            for name in names:
                tensors[name].copy_(places[name])

    def _places(self) -> dict[str, Tensor]:
        places, offset = {}, 0
        for name, (dtype, shape, size) in self._like.items():
            places[name] = torch.empty(shape, dtype=dtype)
            if size:
                count = size // dtype.itemsize
                places[name] = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset).view(shape)
            offset += _padded(size)
        return places


def _padded(size: int) -> int:
    return -(-size // 64) * 64
