"""Sparse tables in a model: which modules have one, how a worker's forwards use its rows, and the table as a whole.

A worker has no table. Its `nn.Embedding` modules get another forward, on the instance: the rows of the ids that come
are fetched from servers and looked up there, and their gradients are what is pushed. Which part of a batch the ids
come from is learned from the first batches; from then on the rows of a lease are fetched before its first forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal.core.errors import CheckpointMismatch, ConfigError
from shoal.data.tree import leaves
from shoal.syncs.server.tables import Table, TablePart, check_optimizer, put_part

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shoal.checkpoint import Loaded
    from shoal.syncs.server.setup import Setup
    from shoal.syncs.server.table_client import TableClient

_LOOKS = 8
"""Forwards of a table whose ids are looked for in the batch."""
_MOST_COLUMNS = 64


class Found(NamedTuple):
    name: str
    weight: Tensor
    padding: int | None


def find_tables(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Found]:
    """The tables that this optimizer trains. Raises ConfigError, in words, for what cannot be one."""
    trained = {id(param) for group in optimizer.param_groups for param in group["params"] if param.requires_grad}
    found: dict[int, Found] = {}
    for path, module in model.named_modules():
        if not getattr(module, "sparse", False) or not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if id(module.weight) in trained:
            _check_module(path, module)
            name = f"{path}.weight" if path else "weight"
            one = found.setdefault(id(module.weight), Found(name, module.weight, module.padding_idx))
            if one.padding != module.padding_idx:
                raise ConfigError(f"{one.name!r} and {name!r} are one table with two values of padding_idx; use one")
    if found:
        dense = bool(trained - found.keys())
        check_optimizer(optimizer, {key: one.name for key, one in found.items()}, dense=dense)
    return list(found.values())


def _check_module(path: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    kind = type(module).__name__
    if isinstance(module, nn.EmbeddingBag) or type(module).forward is not nn.Embedding.forward:
        raise ConfigError(
            f"{path!r} is {kind}(sparse=True), and sync='server' has tables for nn.Embedding(sparse=True) only; use "
            "that, or sparse=False"
        )
    for option in ("max_norm", "scale_grad_by_freq"):
        if getattr(module, option):
            raise ConfigError(
                f"{path!r} is {kind}({option}={getattr(module, option)}, sparse=True): with sync='server' its rows are "
                f"on servers, which cannot do that. Leave {option} out, or use sparse=False"
            )
    if not module.weight.is_floating_point() or module.weight.dim() != 2:
        raise ConfigError(f"{path!r} has a weight of {module.weight.dtype}; a sparse table has rows of floats")


def modules_of(model: nn.Module, table: Table) -> list[nn.Embedding]:
    """All modules of this model that look up rows of this table."""
    owner = model.get_submodule(table.name.rpartition(".")[0])
    weight = owner.weight
    return [module for module in model.modules() if isinstance(module, nn.Embedding) and module.weight is weight]


# -- the whole table ---------------------------------------------------------------------------------------------------


def make_real(model: nn.Module, loaded: Loaded) -> None:
    """Before a checkpoint is restored: give tables on the device "meta" memory for what it has."""
    state = loaded.trees.get("model", {})
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.sparse and module.weight.device.type == "meta":
            name = f"{path}.weight" if path else "weight"
            if name not in state:
                raise CheckpointMismatch(f"{loaded.path} has no {name!r}; resume with the model that its run had")
            _set_weight(model, module.weight, torch.empty(module.weight.shape, dtype=module.weight.dtype))


def _set_weight(model: nn.Module, old: Tensor, values: Tensor) -> nn.Parameter:
    new = nn.Parameter(values, requires_grad=old.requires_grad)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.weight is old:
            module.weight = new
    return new


@torch.no_grad()
def load_tables(model: nn.Module, setup: Setup, parts: Mapping[int, Mapping[str, Any]]) -> None:
    """Give the model whole tables, of the parts that servers have sent."""
    for table in setup.tables:
        weight = modules_of(model, table)[0].weight
        if weight.device.type == "meta":
            weight = _set_weight(model, weight, torch.empty(weight.shape, dtype=weight.dtype))
        for part in range(table.parts):
            put_part(TablePart(table, part), weight.detach(), parts[table.first + part]["weights"])


# -- a worker's modules ------------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Where in a batch ids are: the number of a leaf, and the column of its last dimension, or all of it."""

    leaf: int
    column: int | None

    def of(self, leaves: Sequence[Any]) -> Tensor | None:
        leaf = leaves[self.leaf] if self.leaf < len(leaves) else None
        if not isinstance(leaf, Tensor) or leaf.is_floating_point():
            return None
        if self.column is None:
            return leaf
        return leaf[..., self.column] if leaf.dim() > 1 and self.column < leaf.shape[-1] else None


class Embeddings:
    """The modules of a worker's model that look up rows of tables, while it takes part in a run."""

    def __init__(self, model: nn.Module, setup: Setup, client: TableClient) -> None:
        self._setup, self._client = setup, client
        self._leaves: list[Any] = []
        self._places: list[set[_Place]] = [set() for _ in setup.tables]
        self._looks = [_LOOKS for _ in setup.tables]
        for table in setup.tables:
            for module in modules_of(model, table):
                module.forward = partial(self._forward, table)  # type: ignore[method-assign]
                module.weight.register_post_accumulate_grad_hook(partial(_refuse_other_use, table.name))

    def turn(self, version: int) -> None:
        """The next lease is computed with this version, or a later one."""
        self._client.turn(version)

    def turn_exact(self, version: int) -> None:
        """The next forwards are of exactly this version."""
        self._client.turn(version, exact=True)
        self._leaves = []

    def ahead(self, batches: Sequence[Any]) -> None:
        """Ask for the rows of these batches, as far as it is known where in them ids are."""
        if not any(self._places):
            return
        trees = [leaves(batch) for batch in batches]
        for table, places in zip(self._setup.tables, self._places, strict=True):
            found = [ids for tree in trees for place in places if (ids := place.of(tree)) is not None]
            if found:
                ids = torch.unique(torch.cat([each.reshape(-1).long() for each in found]))
                self._client.ahead(table.number, ids[(ids >= 0) & (ids < table.rows)])

    def batch(self, batch: Any) -> None:
        """The next forwards are of this batch."""
        self._leaves = leaves(batch) if any(self._looks) else []

    def read(self, version: int) -> int:
        """The version that the lease is computed with, if its other weights are of this one."""
        oldest = self._client.oldest
        return version if oldest is None else min(version, oldest)

    def gradients(self) -> list[Tensor]:
        """Of the lease; they may be changed in place."""
        return self._client.gradients()

    def _forward(self, table: Table, input: Tensor) -> Tensor:
        if self._looks[table.number] and self._leaves:
            self._look(table, input)
        ids, inverse = torch.unique(input, return_inverse=True)
        ids = ids.long()
        if ids.numel() and (int(ids[0]) < 0 or int(ids[-1]) >= table.rows):
            wrong = int(ids[0]) if int(ids[0]) < 0 else int(ids[-1])
            raise IndexError(f"index {wrong} is out of range: {table.name!r} has the rows 0 to {table.rows - 1}")
        rows = self._client.rows(table.number, ids)
        if torch.is_grad_enabled():
            rows.requires_grad_()
            self._client.touch(table.number, ids, rows)
        padding = None
        if table.padding is not None:
            place = int(torch.searchsorted(ids, table.padding))
            padding = place if place < ids.numel() and int(ids[place]) == table.padding else None
        return functional.embedding(inverse, rows, padding_idx=padding)

    def _look(self, table: Table, input: Tensor) -> None:
        """Find out where in the batch these ids are."""
        self._looks[table.number] -= 1
        for number, leaf in enumerate(self._leaves):
            if not isinstance(leaf, Tensor) or leaf.is_floating_point() or leaf.is_complex():
                continue
            columns = range(leaf.shape[-1]) if leaf.dim() > 1 and leaf.shape[-1] <= _MOST_COLUMNS else range(0)
            for column in (None, *columns):
                place = _Place(number, column)
                ids = place.of(self._leaves)
                if ids is not None and ids.numel() == input.numel() and _same(ids, input):
                    self._places[table.number].add(place)
                    return


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(torch.equal(one.reshape(-1).long(), other.reshape(-1).long()))


def _refuse_other_use(name: str, param: Tensor) -> None:
    raise ConfigError(
        f"{name!r} is a sparse table, whose rows are on servers, and the loss uses it otherwise than by calling its "
        "nn.Embedding. Call that, or build it with sparse=False"
    )
