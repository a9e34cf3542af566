"""What encoded exchanges of an optimizer's parameters keep, whatever group they go over.

It outlives exchanges, which are made anew whenever members change. Its vectors are keyed by parameter in everything
that leaves the process: checkpoints, and what workers hand over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.codecs.memory import Memory
from shoal.comm.plan import Settled
from shoal.core.spec import AnyCodec, AutoCodec, OneBit, PowerSGD, TopK
from shoal.syncs.variance import Variance, can_be_held

Params = Sequence[tuple[str, nn.Parameter]]

SQUARES = "squares"
"""The private vector of the squares of a worker's own gradients since Adam's variance was last renewed."""
SMALL = 1024
"""Tensors of fewer elements travel as they are: their bytes are nothing, and models are sensitive to them."""
SMALL_VECTOR = 65536
"""So do vectors of fewer (biases, scales of norms)."""


def is_small(param: Tensor) -> bool:
    return param.numel() < (SMALL_VECTOR if param.dim() < 2 else SMALL)


class Encoding:
    """One optimizer's, on one worker. `params` are those that are exchanged, in order."""

    def __init__(self, codec: AnyCodec, optimizer: torch.optim.Optimizer, params: Params) -> None:
        self.codec = codec
        self.optimizer = optimizer
        self.params = params
        self.large = [(name, param) for name, param in params if not is_small(param)]
        self.small = [(name, param) for name, param in params if is_small(param)]
        self.count = sum(param.numel() for _, param in self.large)
        device = params[0][1].device
        self.memory = Memory(self.count, device)
        self.variance = self._variance() if self.large else None
        self.steps = 0
        """Steps that were exchanged with this codec."""
        self.settled: Settled | None = None
        """What was measured, in whatever group."""

    def _variance(self) -> Variance | None:
        """Of codecs that make gradients of other squares; `auto` may choose one. None if it is the optimizer's own."""
        codec, large, small = self.codec, *([param for _, param in some] for some in (self.large, self.small))
        if isinstance(codec, OneBit | TopK):
            carries = isinstance(codec, OneBit) or codec.correction
            return Variance.of(self.optimizer, large, small, carries=carries)
        if isinstance(codec, PowerSGD | AutoCodec) and can_be_held(self.optimizer):
            # a moment has as many directions as the gradients of ten steps together, and factors reach few of them
            return Variance.of(self.optimizer, large, small, carries=False)
        return None

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(param.shape) for _, param in self.large]

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parts of a vector that belong to the large parameters, in their shapes."""
        parts = flat.split([param.numel() for _, param in self.large]) if self.large else ()
        return [part.view_as(param) for part, (_, param) in zip(parts, self.large, strict=True)]

    # -- replicated state ----------------------------------------------------------------------------------------------

    def common(self) -> dict[str, Any]:
        """What is equal on all workers, for checkpoints and for workers that join. The tensors are the live ones."""
        held = None if self.variance is None else self.variance.state()
        return {"codec": self.codec.name, "steps": self.steps, "shared": self.memory.common(), "variance": held}

    def adopt(self, common: Mapping[str, Any]) -> None:
        """Take over another worker's, or a checkpoint's; that of another codec means nothing here."""
        if common["codec"] != self.codec.name:
            return
        self.steps = int(common["steps"])
        self.memory.adopt(common["shared"])
        if self.variance is not None:
            before = self.variance.held
            self.variance.load(common["variance"])
            self.variance.begin_anew()  # squares are of those who were there
            if self.variance.held and not before:
                self.memory.rescale(self.variance.fresh)

    # -- private state -------------------------------------------------------------------------------------------------

    def parts(self) -> dict[str, Tensor]:
        """This worker's private vectors. Squares are left out: they are of those who were there, all of the time."""
        return {name: part for name, part in self.memory.parts().items() if name != SQUARES}

    def keyed(self, vectors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Private vectors by parameter."""
        names = [name for name, _ in self.large]
        return {kind: dict(zip(names, self.views(vector), strict=True)) for kind, vector in vectors.items()}

    def flat(self, keyed: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The same as vectors. Parameters that are not there, or of another shape, have nothing to send."""
        vectors = {}
        for kind, by_name in keyed.items():
            vector = torch.zeros(self.count, device=self.memory.device)
            for (name, param), view in zip(self.large, self.views(vector), strict=True):
                found = by_name.get(name)
                if found is not None and found.shape == param.shape:
                    view.copy_(found)
            vectors[kind] = vector
        return vectors
