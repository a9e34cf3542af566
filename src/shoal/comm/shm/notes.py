"""What a member writes down of an operation, for the others to compare: one number for what it does."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.strings import hint
from shoal.core.errors import ConfigError

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)
"""What can be added, with a number for each to compare."""
GATHER, BROADCAST, SCATTER, BARRIER, SWAP, RELAY = range(100, 106)
_OTHERS = {
    GATHER: "a gather",
    BROADCAST: "a broadcast",
    SCATTER: "a scatter-sum",
    BARRIER: "a barrier",
    SWAP: "a swap",
    RELAY: "a relay",
}
"""Operations other than sums, with a number for each to compare."""


def what_of(numbers: Tensor) -> int:
    try:
        return (numbers.nbytes << 8) + _DTYPES.index(numbers.dtype)
    except ValueError:
        raise ConfigError(
            f"tensors of {numbers.dtype} cannot be summed; use one of "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in _DTYPES)}"
        ) from None


def other(operation: int, size: int) -> int:
    return (size << 8) + operation


def said(what: int) -> str:
    size, code = what >> 8, what & 0xFF
    if code in _OTHERS:
        return f"{_OTHERS[code]} of {size} bytes{hint(size) if code == SWAP else ''}"
    return f"a sum of {size} bytes of {str(_DTYPES[code]).removeprefix('torch.')}"
