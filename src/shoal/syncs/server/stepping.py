"""The arithmetic of one shard: its weights, the optimizer and the schedule over them, and sums of gradients.

Gradients and sums are bytes in the layout of the shard. Pieces of one type that lie in a row are added as one, with the
few bytes between them: most shards are one such run.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.syncs.applying import Applier
from shoal.syncs.server import optimizers
from shoal.syncs.server.setup import Setup
from shoal.syncs.server.used import is_used

_CHUNK = 1 << 16
"""Elements whose squares are summed at once in double precision: they stay in the cache."""


class _Run(NamedTuple):
    """Bytes start … stop−1 of the shard, all of one type."""

    start: int
    stop: int
    dtype: torch.dtype

    def of(self, memory: Tensor) -> Tensor:
        return memory[self.start : self.stop].view(self.dtype)


class _Scratch(threading.local):
    """Memory for a scaled gradient. Shards are stepped one after the other: they share it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def room(self, size: int) -> Tensor:
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory[:size]


_scratch = _Scratch()


class ShardGradients(NamedTuple):
    """Gradients in memory that is laid out as the shard; `mine`: it may be changed."""

    stepper: Stepper
    memory: Tensor
    used: bytes
    mine: bool = False

    def square(self) -> float:
        return self.stepper.square(self.memory, self.used)

    def place(self, scale: float) -> None:
        self.stepper.place(self.stepper._scaled(self.memory, scale, mine=self.mine), self.used)


class Stepper:
    """Steps the optimizer and the schedule of a shard."""

    def __init__(self, setup: Setup, shard: int, weights: Tensor) -> None:
        """`weights` are the shard's live bytes: steps change them.

        The schedule is made anew. If the run starts with the state of one, the options of the optimizer's groups are
        those of the template; if not, the schedule may set them, as it does in one process.
        """
        self._setup, self._shard = setup, shard
        self._pieces = setup.cut.shards[shard].pieces
        self._runs = _runs(setup, shard)
        self.weights = weights
        self._optimizer = optimizers.make(setup, shard, weights)
        self._params = optimizers.parameters(self._optimizer, setup, shard)
        self.applier = Applier(self._optimizer, self._make_schedule())

    # -- gradients -----------------------------------------------------------------------------------------------------

    def add(self, total: Tensor, gradient: Tensor, scale: float) -> None:
        """total += gradient × scale"""
        for run in self._runs:
            run.of(total).add_(run.of(gradient), alpha=scale)

    def put_sum(self, into: Tensor, gradients: Sequence[tuple[Tensor, float]]) -> None:
        """into = the sum of one or two gradients, each times its scale"""
        (first, scale), *more = gradients
        if scale == 1.0 and more:
            second, scale = more[0]
            for run in self._runs:
                torch.add(run.of(first), run.of(second), alpha=scale, out=run.of(into))
            return
        self.put(into, first, scale)
        for gradient, scale in more:
            self.add(into, gradient, scale)

    def put(self, into: Tensor, gradient: Tensor, scale: float) -> None:
        """into = gradient × scale; both may be the same memory."""
        for run in self._runs:
            if scale != 1.0:
                torch.mul(run.of(gradient), scale, out=run.of(into))
            elif into is not gradient:
                run.of(into).copy_(run.of(gradient))

    def square(self, total: Tensor, used: bytes) -> float:
        """The squared norm, in double precision; not finite if any number of it is not."""
        views = self._setup.cut.pieces(total, self._shard)
        return math.fsum(
            _square(view) for piece, view in zip(self._pieces, views, strict=True) if is_used(used, piece.param)
        )

    def step(
        self,
        gradient: Tensor,
        used: bytes,
        scale: float = 1.0,
        *,
        rates: Sequence[float] | None = None,
        mine: bool = False,
    ) -> None:
        """An optimizer step with gradient × scale, at these learning rates if given; `mine`: it may be changed."""
        try:
            self.applier.apply(ShardGradients(self, gradient, used, mine), scale, rates=rates)
        finally:
            for param in self._params:
                if param is not None:
                    param.grad = None

    def place(self, gradient: Tensor, used: bytes) -> None:
        """Have its parts in `.grad` of the optimizer's parameters."""
        for number, param, view in self._places(gradient):
            param.grad = view if is_used(used, number) else None

    def step_lent(self, gradients: Sequence[tuple[Tensor, float]], used: bytes, scale: float) -> None:
        """An optimizer step with the sum of one or two gradients × scale; they are only read."""
        if len(gradients) == 1:
            ((gradient, own),) = gradients
            self.step(gradient, used, own * scale)
            return
        total = _scratch.room(gradients[0][0].numel())
        self.put_sum(total, gradients)
        self.step(total, used, scale, mine=True)

    def _scaled(self, gradient: Tensor, scale: float, *, mine: bool) -> Tensor:
        as_it_is = mine or (scale == 1.0 and self._only_reads())
        into = gradient if as_it_is else _scratch.room(gradient.numel())
        self.put(into, gradient, scale)
        return into

    def _only_reads(self) -> bool:
        """Whether a step leaves gradients as they are. torch's own do, but for some of those that work on lists."""
        own = type(self._optimizer).__module__.startswith("torch.optim.")
        return own and not any(group.get("foreach") for group in self._optimizer.param_groups)

    # -- schedule ------------------------------------------------------------------------------------------------------

    def _make_schedule(self) -> Any:
        if self._setup.make_schedule is None:
            return None
        groups = self._optimizer.param_groups
        # copies: schedules change a rate that is a tensor where it lies
        before = [copy.deepcopy({key: value for key, value in group.items() if key != "params"}) for group in groups]
        schedule = self._setup.make_schedule(self._optimizer)
        if self._setup.schedule_state is not None:
            schedule.load_state_dict(copy.deepcopy(self._setup.schedule_state))
            for group, options in zip(groups, before, strict=True):
                group.update(options)
        return schedule

    # -- copies --------------------------------------------------------------------------------------------------------

    def snapshot(self, *, optimizer: bool = True) -> dict[str, Any]:
        """Copies of the weights (bytes), of the optimizer's state (see `optimizers.state`) and of the schedule's."""
        schedule = self.applier.schedule
        state = None if schedule is None else copy.deepcopy(schedule.state_dict())
        return {"weights": self.weights.clone(), "optimizer": self._state() if optimizer else None, "schedule": state}

    def _state(self) -> optimizers.Tree:
        return optimizers.state(self._optimizer, self._setup, self._shard)

    def load(self, state: dict[str, Any]) -> None:
        """Become what a whole `snapshot` was made of."""
        self.weights.copy_(state["weights"])
        self._load(state["optimizer"])
        if self.applier.schedule is not None:
            self.applier.schedule.load_state_dict(copy.deepcopy(state["schedule"]))
            # torch's schedules warn if they are stepped before the optimizer; it was, if in another process
            self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def _load(self, tree: optimizers.Tree) -> None:
        optimizers.load(self._optimizer, self._setup, self._shard, tree)

    def move_to(self, weights: Tensor) -> None:
        """The live weights lie here from now on: the present ones are copied there."""
        weights.copy_(self.weights)
        self.weights = weights
        for _, param, view in self._places(weights):
            param.data = view

    def _places(self, memory: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        """Of each piece: its parameter's number, the optimizer's parameter, and its part of this memory."""
        views = self._setup.cut.pieces(memory, self._shard)
        return [
            (piece.param, param, view.view(param.shape))
            for piece, param, view in zip(self._pieces, self._params, views, strict=True)
            if param is not None
        ]


def _runs(setup: Setup, shard: int) -> list[_Run]:
    cut = setup.cut
    here = cut.shards[shard]
    runs: list[_Run] = []
    for piece in here.pieces:
        dtype, offset = cut.dtypes[piece.param], cut.offsets[piece.param] - here.start
        start, stop = offset + piece.start * dtype.itemsize, offset + piece.stop * dtype.itemsize
        if start == stop:
            continue
        if runs and runs[-1].dtype == dtype:
            runs[-1] = runs[-1]._replace(stop=stop)
        else:
            runs.append(_Run(start, stop, dtype))
    return runs


def _square(part: Tensor) -> float:
    if part.is_complex():
        part = torch.view_as_real(part).reshape(-1)
    total = 0.0
    room = torch.empty(min(part.numel(), _CHUNK), dtype=torch.float64)
    for chunk in part.split(_CHUNK):
        double = room[: chunk.numel()].copy_(chunk)
        total += float(torch.dot(double, double))
    return total
