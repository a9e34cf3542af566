"""A tree of values and tensors as one header and raw buffers, for a link between processes; or as one byte string."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import msgspec
import torch
from torch import Tensor

from shoal.data.tree import pack, unpack

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class _Header(msgspec.Struct, array_like=True):
    structure: Any
    tensors: list[tuple[str, list[int]]]


class _Whole(msgspec.Struct, array_like=True):
    header: bytes
    buffers: list[bytes]


def seal(tree: Any, *, objects: bool = False) -> tuple[bytes, list[memoryview]]:
    """Header and buffers of `tree`. The buffers are views of contiguous CPU tensors: send them before those change."""
    structure, tensors = pack(tree, objects=objects)
    plain = [tensor.detach().cpu().contiguous() for tensor in tensors]
    head = [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in plain]
    return msgspec.msgpack.encode(_Header(structure, head)), [_view(tensor) for tensor in plain]


def unseal(header: bytes, buffers: Sequence[bytearray | bytes | memoryview], *, objects: bool = False) -> Any:
    """The tree again. Its tensors live in `buffers`."""
    head = msgspec.msgpack.decode(header, type=_Header)
    if len(head.tensors) != len(buffers):
        raise ValueError(f"a parcel names {len(head.tensors)} tensors and has {len(buffers)} buffers")
    tensors = [_tensor(name, shape, buffer) for (name, shape), buffer in zip(head.tensors, buffers, strict=True)]
    return unpack(head.structure, tensors, objects=objects)


def sizes(header: bytes) -> list[int]:
    """The bytes of each buffer that belongs to this header."""
    head = msgspec.msgpack.decode(header, type=_Header)
    return [prod(shape) * _DTYPES[name].itemsize for name, shape in head.tensors]


def to_bytes(tree: Any) -> bytes:
    header, buffers = seal(tree)
    return msgspec.msgpack.encode(_Whole(header, [bytes(buffer) for buffer in buffers]))


def from_bytes(data: bytes) -> Any:
    whole = msgspec.msgpack.decode(data, type=_Whole)
    return unseal(whole.header, [bytearray(buffer) for buffer in whole.buffers])


def _view(tensor: Tensor) -> memoryview:
    if tensor.numel() == 0:
        return memoryview(b"")
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _tensor(name: str, shape: list[int], buffer: bytearray | bytes | memoryview) -> Tensor:
    dtype = _DTYPES[name]
    if not len(buffer):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)
