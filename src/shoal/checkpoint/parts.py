"""A tree as a checkpoint holds it: a plain structure, and tensors under names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.tensorfile import Unstorable, refuse_unstorable
from shoal.core.errors import CheckpointWriteError
from shoal.data.tree import Unpackable, pack


@dataclass(frozen=True)
class TreeParts:
    """`names[i]` is the name of tensor i of the structure; tensors that are one and the same share a name."""

    structure: Any
    names: list[str]
    tensors: dict[str, Tensor]


def take_apart(name: str, tree: Any) -> TreeParts:
    """The parts of the tree called `name`. Tensors are not copied. Raises `CheckpointWriteError` naming the place."""
    try:
        structure, tensors = pack(tree)
    except Unpackable as error:
        raise CheckpointWriteError(f"the tree {name!r} cannot be put into a checkpoint: {error}") from error
    wanted = list(tree) if _is_flat(tree) else [str(index) for index in range(len(tensors))]
    names: list[str] = []
    stored: dict[str, Tensor] = {}
    first_name: dict[object, str] = {}
    for own_name, tensor in zip(wanted, tensors, strict=True):
        try:
            refuse_unstorable(tensor)
        except Unstorable as error:
            message = f"the tree {name!r} cannot be put into a checkpoint: tensor {own_name!r} is {error}"
            raise CheckpointWriteError(message) from error
        shared = first_name.setdefault(_region(tensor), own_name)
        names.append(shared)
        if shared == own_name:
            stored[own_name] = tensor
    return TreeParts(structure, names, stored)


def plain_meta(meta: Mapping[str, Any]) -> Any:
    """The packed form of the notes in a manifest. Raises `CheckpointWriteError` if they hold a tensor or the like."""
    try:
        structure, tensors = pack(dict(meta))
    except Unpackable as error:
        raise CheckpointWriteError(f"meta cannot be put into a checkpoint: {error}") from error
    if tensors:
        raise CheckpointWriteError(
            "meta holds a tensor, an array, a numpy number or bytes; it must hold plain values only: "
            "put tensors into a tree, and turn numpy numbers into Python ones with .item()"
        )
    return structure


def shield(parts: Sequence[TreeParts], volatile: Sequence[Tensor]) -> None:
    """Replace every tensor that begins where a volatile one does by a copy."""
    begins = {tensor.data_ptr() for tensor in volatile if tensor.numel()}
    for part in parts:
        for name, tensor in part.tensors.items():
            if tensor.data_ptr() in begins and tensor.numel():
                part.tensors[name] = tensor.clone(memory_format=torch.contiguous_format)


def _is_flat(tree: Any) -> bool:
    """Whether this is a plain state dict, whose own keys can be the names."""
    return (
        isinstance(tree, dict)
        and "__metadata__" not in tree
        and all(type(key) is str and isinstance(value, Tensor) for key, value in tree.items())
    )


def _region(tensor: Tensor) -> object:
    if not tensor.numel():
        return object()
    place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
    return (*place, tensor.is_conj(), tensor.is_neg())
