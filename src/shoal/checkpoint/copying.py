"""Copying state from one member of a group to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.core.traffic import PARAMETER
from shoal.data.parcel import seal, sizes, unseal

_CHUNK = 1 << 20
"""Bytes that travel at once: those who need them not let them pass through their cache."""


def copy_state(group: Group, tree: Any, *, wanted: bool, at_chunk: Callable[[], None] = lambda: None) -> Any:
    """Member 0's `tree` on every other member that wants it; None on the rest. All members call it.

    What comes lives in memory of its own: whoever loses its peers on the way has lost nothing. `at_chunk` is called
    before each part.
    """
    first = group.rank == 0
    header, buffers = seal(tree) if first else (b"", [])
    length = torch.tensor([len(header)])
    group.broadcast(length, PARAMETER)
    packed = torch.frombuffer(bytearray(header), dtype=torch.uint8) if first else _room(int(length))
    group.broadcast(packed, PARAMETER)
    header = bytes(packed.numpy())
    lengths = sizes(header)
    parts = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in buffers if len(buffer)]
    if not first and wanted:
        buffers = [_bytes(_room(size)) for size in lengths]
        parts = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in buffers if len(buffer)]
    run, total = _Run(parts), sum(lengths)
    chunk = _room(min(total, _CHUNK))
    for start in range(0, total, _CHUNK):
        at_chunk()
        part = chunk[: min(_CHUNK, total - start)]
        if first:
            run.read(part)
        group.broadcast(part, PARAMETER)
        if not first and wanted:
            run.write(part)
    return unseal(header, buffers) if wanted and not first else None


def _room(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _bytes(memory: Tensor) -> memoryview:
    array: Any = memory.numpy()
    return memoryview(array)


class _Run:
    """Memory in several parts, one after the other, as one run of bytes."""

    def __init__(self, parts: list[Tensor]) -> None:
        self._parts = parts
        self._number = 0
        self._at = 0

    def read(self, into: Tensor) -> None:
        for here, there in self._pieces(into):
            there.copy_(here)

    def write(self, what: Tensor) -> None:
        for here, there in self._pieces(what):
            here.copy_(there)

    def _pieces(self, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces from where this run is, and the pieces of `other` that they belong to."""
        done = 0
        while done < other.numel():
            part = self._parts[self._number]
            count = min(part.numel() - self._at, other.numel() - done)
            yield part[self._at : self._at + count], other[done : done + count]
            done += count
            self._at += count
            if self._at == part.numel():
                self._number, self._at = self._number + 1, 0
