"""Weights on their way into a worker's parameters: from shared memory, or from frames."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shoal.core.errors import PayloadError

if TYPE_CHECKING:
    from shoal.syncs.server.cutting import Cut
    from shoal.syncs.server.setup import Memory


class Copying:
    """Copies shards into parameters, and knows what is there already."""

    def __init__(self, cut: Cut, params: Sequence[tuple[str, nn.Parameter]], memory: Memory | None) -> None:
        self._cut = cut
        self._params = [param for _, param in params]
        self._memory = memory
        self._there: list[tuple[int, int] | None] = [None] * len(cut.shards)
        """For each shard: what its parameters hold, as holder and count of the shared memory; None if not of there."""
        self._flat = {
            number: torch.empty(param.numel(), dtype=param.dtype)
            for number, param in enumerate(self._params)
            if not param.is_contiguous()
        }
        """Parameters whose elements lie in another order: their values are gathered here, until all are there."""
        self._gathered: set[int] = set()
        self.copied = 0
        """Bytes that were read from shared memory so far."""

    def size(self, shard: int) -> int:
        """Its bytes."""
        return self._cut.shards[shard].stop - self._cut.shards[shard].start

    def near(self, shard: int, holder: int) -> int | None:
        """Copy a shard from shared memory; the version that it has. None if it changes right now: try again.

        The count of a shard's weights is odd while they change. Whoever reads the same even one before and after has
        read nothing of two versions. It counts, not the version: with `apply=arrival` weights change within one.
        """
        memory = self._memory
        if memory is None:
            raise PayloadError(f"shard {shard} was to be read from shared memory, and this host has none")
        state = memory.state[shard]
        count = int(state[0])
        if count % 2:
            return None
        version = int(state[1])
        if self._there[shard] != (holder, count):
            self._there[shard] = None
            bounds = self._cut.shards[shard]
            self._copy(shard, memory.weights[bounds.start : bounds.stop])
            self.copied += self.size(shard)
        if int(state[0]) != count:
            self._there[shard] = None
            return None
        self._there[shard] = (holder, count)
        return version

    def frame(self, shard: int, frame: memoryview) -> None:
        """Copy a shard that has travelled; its length was checked."""
        self._there[shard] = None
        if not len(frame):  # a part of a table: its rows are fetched
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the memory may be read-only, and nobody writes to it
            self._copy(shard, torch.frombuffer(frame, dtype=torch.uint8))

    def _copy(self, shard: int, weights: Tensor) -> None:
        first = self._cut.shards[shard].start
        with torch.no_grad():
            for piece in self._cut.shards[shard].pieces:
                dtype = self._cut.dtypes[piece.param]
                base = self._cut.offsets[piece.param] - first
                start, stop = base + piece.start * dtype.itemsize, base + piece.stop * dtype.itemsize
                flat = self._flat.get(piece.param)
                if flat is None:
                    flat = self._params[piece.param].detach().view(-1)
                else:
                    self._gathered.add(piece.param)
                flat[piece.start : piece.stop].copy_(weights[start:stop].view(dtype))

    def finish(self) -> None:
        """All shards have been copied."""
        with torch.no_grad():
            for number in self._gathered:
                param = self._params[number].detach()
                param.copy_(self._flat[number].view(param.shape))
        self._gathered.clear()
