"""Tensors of bytes as frames of messages, and back, where they lie; and how large messages may be."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.syncs.server.tables import held_bytes

if TYPE_CHECKING:
    from shoal.syncs.server.setup import Setup


def as_frame(tensor: Tensor) -> memoryview:
    """The bytes of a flat tensor of bytes."""
    array: Any = tensor.numpy()
    return memoryview(array)


def as_tensor(frame: memoryview) -> Tensor:
    """The bytes of a frame. Not to be written to."""
    if not frame.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the memory may be read-only, and nobody writes to it
        return torch.frombuffer(frame, dtype=torch.uint8)


def message_limit(setup: Setup) -> int:
    """Bytes of the longest message between workers and servers: all weights, or a shard with all that it keeps."""
    return (16 << 20) + max(16 * max(held_bytes(setup), default=0), setup.cut.size)
