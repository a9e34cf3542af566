"""Callbacks that look at the model of the process that called `fit()`, which is not the one that is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from shoal.core.events import Callback
from shoal.trainer.reach import modules_of, name_of


def stale_callbacks(callbacks: Sequence[Callback], model: nn.Module, *, servers: bool = False) -> list[str]:
    """What to say about those that refer to the model, or to a part of it, where workers are forked."""
    mine = {id(part) for part in model.modules()}
    now = "is that of some checkpoint, or the untrained one," if servers else "stays the untrained one that it was"
    change = "" if servers else "change weights in after_step=fn(model), "
    return [
        f"callbacks[{number}], {name_of(callback)}, refers to the model. Workers train copies of it: in this process "
        f"it {now} until fit() returns, which gives it the trained weights. So a callback can neither measure nor "
        f"change what is trained. Measure with eval_data=, predict= and metrics=, {change}or load the checkpoint that "
        "a CheckpointSaved event names"
        for number, callback in enumerate(callbacks)
        if any(id(module) in mine for module in modules_of(callback))
    ]


def stale_in_loop(callbacks: Sequence[Callback], body: Callable[..., Any]) -> list[str]:
    """The same for an own loop: what both it and a callback refer to is trained in copies."""
    trained = {id(module) for module in modules_of(body)}
    return [
        f"callbacks[{number}], {name_of(callback)}, refers to a module that the loop uses, too. Workers have copies of "
        "it: in this process it stays the untrained one, also after launch() has returned. Measure in the loop, with "
        "session.gather, and return the weights from it, or load the checkpoint that a CheckpointSaved event names"
        for number, callback in enumerate(callbacks)
        if any(id(module) in trained for module in modules_of(callback))
    ]
