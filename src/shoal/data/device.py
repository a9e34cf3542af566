"""Batches on the device where a worker computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.data.tree import mapped


def moved(tree: Any, device: torch.device) -> Any:
    """The same tree with its tensors, and what else has a `to`, on `device`."""

    def move(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.to(device, non_blocking=True)
        return part.to(device) if _moves_itself(part) else part

    return mapped(tree, move, is_leaf=_moves_itself)


def _moves_itself(part: Any) -> bool:
    # of its class: an item that is called so is not meant
    return callable(getattr(type(part), "to", None))
