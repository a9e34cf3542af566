"""A part of a sparse table on one server: a shard whose gradients are some of its rows.

All that a shard is (see `shard`) holds for it too. Its weights lie in the server's own memory, and sums of gradients
are kept as they came until the step is closed; then each touched row is in the sum once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.core.errors import ConfigError
from shoal.syncs.applying import Applier
from shoal.syncs.server import optimizers
from shoal.syncs.server.messages import Lease, Record
from shoal.syncs.server.setup import Setup
from shoal.syncs.server.shard import Holding, Unfit, _Open
from shoal.syncs.server.stepping import Stepper, _square
from shoal.syncs.server.tables import TablePart, check_rows, pack, packed_rows, part_of, summed, unpack
from shoal.syncs.server.used import is_used


class TableStepper(Stepper):
    """Steps the optimizer and the schedule of a part, on the rows that were touched."""

    def __init__(self, setup: Setup, here: TablePart, weights: Tensor) -> None:
        """`weights` are the part's live bytes."""
        self._setup = setup
        self._here = here
        self._bit = len(setup.params) + here.table.number
        self.weights = weights
        self._param = nn.Parameter(weights.view(here.table.param.dtype).view(here.rows, here.table.width))
        self._optimizer = _make_optimizer(setup, here, self._param)
        self._params = [self._param]
        self.applier = Applier(self._optimizer, self._make_schedule())

    @property
    def rows(self) -> Tensor:
        """The live weights, row by row."""
        return self._param.detach()

    def put(self, into: Tensor, gradient: Tensor, scale: float) -> None:
        if into is not gradient:
            into.copy_(gradient)
        if scale != 1.0:
            unpack(self._here, into)[1].mul_(scale)

    def join(self, gradients: list[Tensor]) -> Tensor:
        """The sum of packed gradients, packed."""
        parts = [unpack(self._here, gradient) for gradient in gradients if gradient.numel()]
        table = self._here.table
        return pack(*summed([rows for rows, _ in parts], [values for _, values in parts], self._param, table.width))

    def square(self, total: Tensor, used: bytes) -> float:
        return _square(unpack(self._here, total)[1].reshape(-1)) if is_used(used, self._bit) else 0.0

    def step(
        self,
        gradient: Tensor,
        used: bytes,
        scale: float = 1.0,
        *,
        rates: Sequence[float] | None = None,
        mine: bool = False,
    ) -> None:
        with torch.sparse.check_sparse_tensor_invariants(False):  # rows were checked when they came
            super().step(gradient, used, scale, rates=rates, mine=mine)

    def _scaled(self, gradient: Tensor, scale: float, *, mine: bool) -> Tensor:
        if scale != 1.0:
            gradient = gradient.clone()
            self.put(gradient, gradient, scale)
        return gradient

    def _places(self, memory: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        rows, values = unpack(self._here, memory)
        size = self._param.shape
        return [(self._bit, self._param, torch.sparse_coo_tensor(rows[None], values, size, is_coalesced=True))]

    def _state(self) -> optimizers.Tree:
        state = self._optimizer.state.get(self._param)
        return {
            "pieces": [],
            "groups": [optimizers._options(group) for group in self._optimizer.param_groups],
            "other": {},
            "table": None if not state else optimizers._copied(dict(state)),
        }

    def _load(self, tree: optimizers.Tree) -> None:
        self._optimizer.state.clear()
        if tree["table"] is not None:
            self._optimizer.state[self._param] = optimizers._copied(tree["table"])
        for group, options in zip(self._optimizer.param_groups, tree["groups"], strict=True):
            group.update(optimizers._options(options))


class TableHolding(Holding):
    """The state of one part of a table, as holder or as mirror. Of one thread."""

    _stepper: TableStepper

    def __init__(self, setup: Setup, shard: int, weights: Tensor, version: int) -> None:
        here = part_of(setup, shard)
        assert here is not None
        self._here = here
        self._sums: dict[int, dict[int, Tensor]] = {}
        """By step and first position: the gradients of steps that are not closed, packed."""
        super().__init__(setup, shard, weights, version)

    def _make_stepper(self, weights: Tensor) -> Stepper:
        return TableStepper(self._setup, self._here, weights)

    def rows(self, numbers: Tensor, version: int | None = None) -> Tensor:
        """These rows of the live weights, or of a version that is kept, in memory of their own. Raises `Unfit`."""
        try:
            check_rows(self._here, numbers)
        except ValueError as error:
            raise Unfit(f"shard {self.number} was asked for {error}") from None
        table = self._here.table
        source = self._stepper.rows
        if version is not None:
            source = self.kept(version)["weights"].view(table.param.dtype).view(self._here.rows, table.width)
        return source.index_select(0, numbers)

    @property
    def pulled(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def pulled_of(self, version: int) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def take(
        self, lease: Lease, gradient: Tensor, used: bytes, scale: float, into: Tensor, *, lent: bool = False
    ) -> bool:
        """`into` is not used: rows are kept as they came."""
        if self.has(lease):
            return False
        self.check(lease, gradient, used)
        opened = self._open.setdefault(lease.step, _Open(bytes(len(used))))
        self._sums.setdefault(lease.step, {})[lease.start] = self._stepper._scaled(gradient, scale, mine=False)
        opened.add(lease, used)
        return True

    def close(self, step: int) -> Record:
        record = super().close(step)
        opened = self._opened(step)
        if opened.total is None and not self._arrival:
            # in the order of positions, whatever order they came in
            came = self._sums.pop(step, {})
            opened.total = self._stepper.join([came[start] for start in sorted(came)])
        return record

    def forget_open(self) -> None:
        super().forget_open()
        self._sums = {step: came for step, came in self._sums.items() if step in self._open}

    def move_to(self, weights: Tensor) -> None:
        """Nobody reads these from shared memory: they stay where they are."""

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._sums.clear()

    def _expect(self, what: str, memory: Tensor) -> None:
        if what in ("gradient", "sum"):
            try:
                check_rows(self._here, unpack(self._here, memory)[0])
            except ValueError as error:
                raise Unfit(f"{what} for shard {self._shard.number}: {error}") from None
        elif what.startswith("weights"):
            if memory.dtype != torch.uint8 or memory.numel() != self._here.bytes:
                raise Unfit(f"{what} for shard {self._shard.number}: {memory.numel()} bytes, not {self._here.bytes}")
        else:
            packed_rows(self._here, memory)


def _make_optimizer(setup: Setup, here: TablePart, param: nn.Parameter) -> Optimizer:
    """The user's, over the rows of a part, with the state that the run starts from."""
    template, table = setup.optimizer, here.table
    groups = [
        {
            **optimizers._options(group),
            "params": [param] if any(one is table.param for one in group["params"]) else [],
        }
        for group in template.param_groups
    ]
    try:
        optimizer = type(template)(groups, **optimizers._arguments(template))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{type(template).__name__} cannot be made for a part of {table.name!r}: {error}") from error
    for key, value in template.state.get(table.param, {}).items():
        whole = isinstance(value, Tensor) and value.shape == table.param.shape
        if whole and value.device.type == "meta":
            continue  # it is as it was made
        mine = value[here.part :: table.parts] if whole else value
        optimizer.state[param][key] = optimizers._copied(mine)
    return optimizer
