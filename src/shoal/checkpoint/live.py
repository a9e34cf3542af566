"""Tensors that are written to a file from where they are, while their owner computes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shoal.checkpoint.tensorfile import CHUNK_BYTES, bytes_of

PATIENCE = 0.05
"""Seconds that an owner waits before it is looked at how fast the file takes bytes."""

FAST_ENOUGH = 0.5e9
"""Bytes a second. Copying into fresh memory runs at 0.4 to 5 GB/s because of page faults, and costs that memory: an
owner that waits is served sooner by writing on than by copying, unless the file takes bytes more slowly than this."""


class LiveTensors:
    """The tensors of one save, until their owner needs them back.

    Two threads meet here. The writer reads them in order (`chunks`) and says when it is done (`release`). The owner
    leaves the tensors as they are until its `reclaim` has returned. While the owner waits and the file is slow, the
    writer copies what it has not read yet and reads on from the copies.
    """

    def __init__(
        self, tensors: Sequence[Tensor], *, patience: float = PATIENCE, fast_enough: float = FAST_ENOUGH
    ) -> None:
        self._tensors = list(tensors)
        self._patience = patience
        self._fast_enough = fast_enough
        self._wanted = threading.Event()
        self._released = threading.Event()
        self._next = 0
        self._bytes_read = 0
        self._wanted_at = 0.0
        self._bytes_read_when_wanted = 0

    def chunks(self, count: int) -> Iterator[memoryview]:
        """The bytes of the next `count` tensors, to be used before the next chunk is asked for. Writer only."""
        for _ in range(count):
            yield from self._chunks_of_next()
            self._next += 1

    def release(self) -> None:
        """Nothing will be read any more, and no reference is kept. Writer only; idempotent."""
        self._tensors = []
        self._released.set()

    def reclaim(self) -> float:
        """Wait until the tensors may be changed; seconds waited. Owner only."""
        if self._released.is_set():
            return 0.0
        begun = time.perf_counter()
        self._wanted_at, self._bytes_read_when_wanted = begun, self._bytes_read
        self._wanted.set()
        self._released.wait()
        return time.perf_counter() - begun

    def _chunks_of_next(self) -> Iterator[memoryview]:
        data = bytes_of(self._tensors[self._next])
        for start in range(0, len(data), CHUNK_BYTES):
            if self._must_copy():
                self._copy_rest()
                data = bytes_of(self._tensors[self._next])
            chunk = data[start : start + CHUNK_BYTES]
            yield chunk
            self._bytes_read += len(chunk)

    def _must_copy(self) -> bool:
        if not self._wanted.is_set() or self._released.is_set():
            return False
        waited = time.perf_counter() - self._wanted_at
        return waited > self._patience and self._bytes_read - self._bytes_read_when_wanted < self._fast_enough * waited

    def _copy_rest(self) -> None:
        # Without memory for the copies the owner waits for the file instead: slow, but nothing is lost.
        with contextlib.suppress(MemoryError, RuntimeError):
            rest = self._tensors[self._next :]
            self._tensors[self._next :] = [
                tensor.to("cpu", copy=True, memory_format=torch.contiguous_format) for tensor in rest
            ]
            self._released.set()
            return
        self._fast_enough = 0.0
