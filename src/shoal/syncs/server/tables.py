"""Sparse tables: the weights of `nn.Embedding(sparse=True)`, of which a step touches few rows.

A table is not in the area. Its rows are dealt to *parts*, row r to part r % parts, so that rows that are asked for
often are spread over all servers. A part is a shard like any other, numbered after those of the area: placed, mirrored,
journaled and kept in the same way. Only what travels is different: rows that were touched, not all bytes.

Gradients of a part travel *packed*: the numbers of the rows within the part (int64, rising), then their gradients.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.core.errors import ConfigError
from shoal.syncs.server.cutting import Cut, Shard

if TYPE_CHECKING:
    from shoal.syncs.server.setup import Setup

PARTS = 12
SMALLEST = 4096
"""Bytes; tables that would have smaller parts have fewer."""
LARGEST = 256 << 20
"""Bytes; tables that would have larger parts have more."""
_INDEX = 8
"""Bytes of a row's number."""


@dataclass(frozen=True)
class Table:
    """One sparse table of the model."""

    name: str
    number: int
    param: Tensor
    """The values that the run starts from; on the device "meta" they are made where they are held."""
    padding: int | None
    first: int
    """The shard that is its first part."""
    parts: int

    @property
    def rows(self) -> int:
        return int(self.param.shape[0])

    @property
    def width(self) -> int:
        return int(self.param.shape[1])

    @property
    def row_bytes(self) -> int:
        return self.width * self.param.dtype.itemsize

    def size(self, part: int) -> int:
        """Rows of a part."""
        return -(-(self.rows - part) // self.parts)


class TablePart(NamedTuple):
    table: Table
    part: int

    @property
    def rows(self) -> int:
        return self.table.size(self.part)

    @property
    def bytes(self) -> int:
        return self.rows * self.table.row_bytes


def make_tables(cut: Cut, found: Sequence[tuple[str, Tensor, int | None]]) -> tuple[Cut, tuple[Table, ...]]:
    """The cut with the parts of these tables (name, weight, padding row) as further shards, and the tables."""
    tables: list[Table] = []
    shards = list(cut.shards)
    for number, (name, param, padding) in enumerate(found):
        size = param.numel() * param.dtype.itemsize
        parts = max(1, min(PARTS, size // SMALLEST, param.shape[0]), min(-(-size // LARGEST), param.shape[0]))
        tables.append(Table(name, number, param, padding, len(shards), parts))
        shards += [Shard(len(shards) + part, cut.size, cut.size, ()) for part in range(parts)]
    return replace(cut, shards=tuple(shards)), tuple(tables)


def empty_cut() -> Cut:
    """Of a model that has nothing but tables."""
    return Cut(0, (), (), (), (), ())


def part_of(setup: Setup, shard: int) -> TablePart | None:
    """Which part of which table a shard is; None for one of the area."""
    number = bisect_right(setup.tables, shard, key=attrgetter("first"))
    if not number or shard >= setup.tables[number - 1].first + setup.tables[number - 1].parts:
        return None
    table = setup.tables[number - 1]
    return TablePart(table, shard - table.first)


def held_bytes(setup: Setup) -> list[int]:
    """For each shard, the bytes of its weights."""
    found = []
    for shard in setup.cut.shards:
        part = part_of(setup, shard.number)
        found.append(shard.size if part is None else part.bytes)
    return found


# -- weights -----------------------------------------------------------------------------------------------------------


def first_weights(setup: Setup, here: TablePart) -> Tensor:
    """The rows of a part that the run starts from, in memory of their own."""
    table, part = here
    if table.param.device.type != "meta":
        return table.param.detach()[part :: table.parts].to("cpu", copy=True).contiguous()
    key = hashlib.sha256(repr((setup.seed, table.name, part)).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
    weights = torch.empty(here.rows, table.width, dtype=table.param.dtype).normal_(generator=generator)
    if table.padding is not None and table.padding % table.parts == part:
        weights[table.padding // table.parts] = 0.0
    return weights


def put_part(here: TablePart, into: Tensor, weights: Tensor) -> None:
    """Have a part's bytes in the whole table."""
    table, part = here
    into[part :: table.parts] = weights.view(table.param.dtype).view(here.rows, table.width)


# -- gradients ---------------------------------------------------------------------------------------------------------


def pack(rows: Tensor, values: Tensor) -> Tensor:
    """Rows of a part and their gradients, as bytes."""
    return torch.cat([rows.contiguous().view(torch.uint8), values.detach().contiguous().view(-1).view(torch.uint8)])


def packed_rows(here: TablePart, packed: Tensor) -> int:
    """How many rows are packed there. Raises ValueError if these cannot be packed rows of this part."""
    each = _INDEX + here.table.row_bytes
    count = packed.numel() // each
    if packed.dtype != torch.uint8 or packed.numel() % each or count > here.rows:
        raise ValueError(f"{packed.numel()} bytes; a part of {here.rows} rows has at most so many of {each} bytes each")
    return count


def unpack(here: TablePart, packed: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of rows, and their gradients, where they lie."""
    count = packed_rows(here, packed)
    rows = packed[: count * _INDEX].view(torch.int64)
    values = packed[count * _INDEX :].view(here.table.param.dtype).view(count, here.table.width)
    return rows, values


def check_rows(here: TablePart, rows: Tensor) -> None:
    """Raises ValueError unless these are rows of this part, in rising order."""
    count = rows.numel()
    if not count:
        return
    if int(rows[0]) < 0 or int(rows[-1]) >= here.rows or (count > 1 and not bool((rows[1:] > rows[:-1]).all())):
        raise ValueError(f"{count} rows that are not rows 0 to {here.rows - 1} in rising order")


def summed(rows: Sequence[Tensor], values: Sequence[Tensor], like: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Each row once, in rising order, with the sum of its gradients, which are added in the order given."""
    if not rows:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, width, dtype=like.dtype)
    if len(rows) == 1:
        return rows[0], values[0]
    unique, place = torch.unique(torch.cat(list(rows)), return_inverse=True)
    total = torch.zeros(unique.numel(), width, dtype=like.dtype)
    return unique, total.index_add_(0, place, torch.cat(list(values)))


# -- optimizers --------------------------------------------------------------------------------------------------------

_FITTING = "SGD (without momentum and weight_decay), Adagrad (without weight_decay) and SparseAdam"


def check_optimizer(optimizer: Optimizer, names: Mapping[int, str], *, dense: bool) -> None:
    """Raises ConfigError if this optimizer cannot step tables; `names` has theirs, by the id of the weight."""
    kind = type(optimizer)
    first = next(iter(names.values()))
    own = kind.__module__.startswith("torch.optim")
    if not own or kind.__name__ not in ("SGD", "Adagrad", "SparseAdam"):
        raise ConfigError(
            f"{kind.__name__} cannot step {first!r}, a table with sparse gradients; tables are stepped by {_FITTING}. "
            "Use one of these, or build the layer with sparse=False"
        )
    if kind.__name__ == "SparseAdam" and dense:
        raise ConfigError(
            "SparseAdam steps tables, nn.Embedding(sparse=True), and nothing else, and this model has other parameters "
            "too. Use SGD or Adagrad for all of them, or freeze those"
        )
    for group in optimizer.param_groups:
        held = [names[id(param)] for param in group["params"] if id(param) in names]
        wrong = [option for option in ("momentum", "weight_decay", "fused", "foreach") if group.get(option)]
        if held and wrong:
            raise ConfigError(
                f"{kind.__name__}({wrong[0]}={group[wrong[0]]}) cannot step {held[0]!r}, a table with sparse "
                f"gradients: these are stepped by {_FITTING}. Put tables into a group of their own without it"
            )


def join_state(setup: Setup, table: Table, states: Mapping[int, Mapping[str, Any]]) -> dict[str, Any] | None:
    """What an optimizer keeps of the whole table, from the trees of its parts; see `optimizers.join`."""
    first = states[table.first]["table"]
    if first is None:
        return None
    joined = {}
    for key, value in first.items():
        if isinstance(value, Tensor) and value.dim():
            joined[key] = torch.empty(table.rows, table.width, dtype=value.dtype)
            for part in range(table.parts):
                joined[key][part :: table.parts] = states[table.first + part]["table"][key]
        else:
            joined[key] = value.clone() if isinstance(value, Tensor) else value
    return joined
