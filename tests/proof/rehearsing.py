"""Losses in a rehearsal, without a run around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.data import default_collate

from shoal.draws.forward import Keying
from shoal.draws.sites import Names
from shoal.draws.stand import standing
from shoal.proof import counted
from shoal.proof.loss import read_loss
from shoal.proof.rehearse import Rehearsal


def rehearse(
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    items: Sequence[Any],
    samples: int | None = None,
    collate: Callable[[list[Any]], Any] = default_collate,
) -> Rehearsal:
    """What the Trainer does before the first forward of a step of these items."""
    keying = Keying()
    keying.names = Names([model])
    rehearsal = Rehearsal(
        [model],
        keying,
        lambda start, stop: collate(list(items[start:stop])),
        seed=(0, 0, 0),
        first=0,
        samples=samples or len(items),
        catches=True,
    )
    with standing(), counted.counting():
        for batch in rehearsal.play():
            try:
                rehearsal.take(read_loss(loss(model, batch), training=True))
            except Exception as error:
                rehearsal.fell(error)
    return rehearsal
