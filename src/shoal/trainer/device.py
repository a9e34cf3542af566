"""Batches on the device where a worker computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def moved(tree: Any, device: torch.device) -> Any:
    """The same tree with its tensors, and what else has a `to`, on `device`."""
    if isinstance(tree, Tensor):
        return tree.to(device, non_blocking=True)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(moved(part, device) for part in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(moved(part, device) for part in tree)
    if isinstance(tree, dict):
        return {key: moved(part, device) for key, part in tree.items()}
    return tree.to(device) if hasattr(tree, "to") else tree
