"""Where weights land: memory that the process which called `fit()` shares with its workers."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor


class Landing:
    """Shared memory for copies of some tensors: one process puts, another one takes.

    Without a file it is anonymous, and made before the fork. Pages are used only once written, and the kernel frees
    them with the last process: nothing to clean up. With `path` it is that file, for processes that were not forked:
    its folder must be there when it is first used.
    """

    def __init__(self, tensors: Mapping[str, Tensor], path: Path | None = None) -> None:
        self._like = {name: (tensor.dtype, tensor.shape, tensor.nbytes) for name, tensor in tensors.items()}
        self._path = path
        if path is None:
            _ = self._memory  # before the fork

    @cached_property
    def _memory(self) -> mmap.mmap:
        size = max(1, sum(_padded(size) for _, _, size in self._like.values()))
        if self._path is None:
            return mmap.mmap(-1, size)
        with open(self._path, "ab") as file:
            if file.tell() < size:
                file.truncate(size)
        with open(self._path, "r+b") as file:
            return mmap.mmap(file.fileno(), size)

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
