"""Attention with dropout by position: the steps of torch's own on a CPU, which has no faster kernel with dropout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.draws.dropout import dropped
from shoal.draws.here import forward_for

_HALF = (torch.float16, torch.bfloat16)


def make_attention(original: Any) -> Callable[..., Tensor]:
    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        forward = forward_for(query) if 0.0 < dropout_p < 1.0 else None
        if forward is None or (is_causal and attn_mask is not None):  # it refuses that
            return original(  # type: ignore[no-any-return]
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        # torch computes halves as singles here
        wide = torch.float32 if query.dtype in _HALF else query.dtype
        if enable_gqa:
            key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
            value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
        # half of the factor on either side, as torch has it
        root = math.sqrt(1.0 / math.sqrt(query.size(-1)) if scale is None else abs(scale))
        keyed = key if scale is None or scale >= 0.0 else -key
        score = (query.to(wide) * root) @ (keyed.to(wide) * root).transpose(-2, -1)
        added = _added(attn_mask, is_causal, score)
        weights = score.softmax(-1) if added is None else torch._safe_softmax(score + added, -1)
        out = dropped(forward, weights, dropout_p) @ value.to(wide)
        return out if torch.is_autocast_enabled("cpu") else out.to(query.dtype)

    return scaled_dot_product_attention


def _added(mask: Tensor | None, causal: bool, score: Tensor) -> Tensor | None:
    """What is added to the scores: nothing where a query may look, minus infinity where it may not."""
    if causal:
        mask = torch.ones(score.shape[-2:], dtype=torch.bool).tril_()
    if mask is not None and mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=score.dtype).masked_fill_(mask.logical_not(), -math.inf)
    return mask
