"""Checks of `buffers=`, what a user says of the model's buffers."""

from __future__ import annotations

from typing import Any

from torch import nn

from shoal.core.errors import ConfigError
from shoal.core.spec import AllReduce, Server
from shoal.layouts.single import Buffers


def check_buffers(model: nn.Module, words: Any, sync: AllReduce | Server) -> None:
    """Raises `ConfigError` for names that the model does not have, and for words that do not go with them."""
    if words is None:
        return
    buffers = Buffers([model])
    buffers.use(words)
    if isinstance(sync, Server) and sync.mode != "bsp" and buffers.queues:
        raise ConfigError(
            f"buffers: {buffers.queues[0]!r} is to be 'concat'; with sync='server:mode={sync.mode}' a forward may "
            "begin with a queue of some steps ago, and it is not known where its rows belong; use mode=bsp, or "
            "sync='allreduce'"
        )
