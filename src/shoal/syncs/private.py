"""What workers have that differs between them, and must not be lost: what encoding has not sent yet.

It is kept as a sum where workers may be others afterwards: in checkpoints, and when members change as planned. Whoever
goes on then has an equal part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import msgspec
import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.core.traffic import STATE
from shoal.syncs.encoding import Encoding

Totals = list[dict[str, Tensor]]
"""For each optimizer the sums over all workers, by kind."""


class Holding(IntEnum):
    """What a worker that comes into a term has of it."""

    NOTHING = 0
    READ = 1
    """The sum, from a checkpoint."""
    SUM = 2
    """The sum, from its last group, and its own part."""
    PART = 3
    """Its own part."""


class Private:
    """One worker's. One thread."""

    def __init__(self) -> None:
        self._totals: Totals | None = None
        self._read: Totals | None = None
        self.holds = False
        """Whether this worker has been in a term."""

    def pool(self, group: Group, encodings: Sequence[Encoding]) -> Totals:
        """The sums over all members. All of them call it."""
        self._totals = [_sums(group, encoding) for encoding in encodings]
        return self._totals

    def read(self, totals: dict[str, Tensor]) -> None:
        """A checkpoint has these of the next optimizer."""
        self._read = [*(self._read or []), totals]

    @property
    def holding(self) -> Holding:
        if self._totals is not None:
            return Holding.SUM
        if self.holds:
            return Holding.PART
        return Holding.NOTHING if self._read is None else Holding.READ

    def share(self, held: Sequence[int], encodings: Sequence[Encoding]) -> None:
        """Have this worker's part in a new term, given what each of its members holds.

        It still holds the sum, until the term `stands`: if it does not come to that, all share once more.
        """
        mine, most = self.holding, max(held)
        totals = self._totals if mine == Holding.SUM else self._read if mine == Holding.READ else None
        if mine == most and totals is not None:
            for encoding, total in zip(encodings, totals, strict=False):  # a checkpoint may be of fewer optimizers
                encoding.memory.take(total, list(held).count(mine))

    def stands(self) -> None:
        """All members of the term have shared: a step has been exchanged in it."""
        self._totals, self._read, self.holds = None, None, True

    def forget(self) -> None:
        """What was pooled is of a step that is over."""
        self._totals = None


def parts(encodings: Sequence[Encoding]) -> Totals:
    """What this worker has itself, for where no others can be asked."""
    return [encoding.parts() for encoding in encodings]


def as_tree(encodings: Sequence[Encoding], totals: Totals | None) -> list[dict[str, Any]]:
    """For a checkpoint, or without totals for a worker that joins: the state of each, by parameter."""
    trees = [encoding.common() for encoding in encodings]
    if totals is not None:
        for tree, encoding, total in zip(trees, encodings, totals, strict=True):
            tree["private"] = encoding.keyed(total)
    return trees


def from_tree(tree: Mapping[str, Any], encoding: Encoding) -> dict[str, Tensor]:
    """Give an encoding its state from a checkpoint; the sums that it has. Those of another codec mean other things."""
    if tree["codec"] != encoding.codec.name:
        return {}
    encoding.adopt(tree)
    return encoding.flat(tree.get("private", {}))


def _sums(group: Group, encoding: Encoding) -> dict[str, Tensor]:
    mine = encoding.parts()
    told = group.gather_bytes(msgspec.msgpack.encode(sorted(mine)), STATE)
    kinds = sorted({kind for text in told for kind in msgspec.msgpack.decode(text, type=list[str])})
    sums = {}
    for kind in kinds:
        part = mine.get(kind)
        total = torch.zeros(encoding.count, device=encoding.memory.device) if part is None else part.clone()
        group.sum(total, STATE).wait()
        sums[kind] = total
    return sums
