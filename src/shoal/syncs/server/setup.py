"""What all processes of a run with servers start from. Made once, before they are forked, and never changed."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.core.atoms import Course
from shoal.core.spec import AnyCodec, Server
from shoal.wire.curve import Keys

if TYPE_CHECKING:
    from shoal.syncs.server.cutting import Cut
    from shoal.syncs.server.tables import Table


def shared(size: int) -> Tensor:
    """So many bytes, zeros, that processes forked later share; memory is taken when it is first touched."""
    return torch.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=torch.uint8)


class Memory:
    """What the processes of one host share, inherited by all that are forked: weights, gradients, sums.

    All of it has the layout of `Cut`: the *area*, in which every parameter has its bytes, and shards are ranges of it.
    """

    def __init__(self, size: int, shards: int, *, seats: int, steps: int) -> None:
        """For so many bytes in the area; gradients of `seats` workers, and sums of `steps` open steps."""
        self._size = size
        self._seats, self._steps = seats, steps
        self.weights = shared(size)
        self.state = shared(16 * shards).view(torch.int64).view(shards, 2).numpy()
        """For each shard: a count that is odd while the weights change, and their version. One element of an array is
        read and written in a fraction of what a tensor takes."""
        self._gradients = shared(2 * seats * size)
        self._sums = shared(steps * size)

    def gradient(self, seat: int, slot: int) -> Tensor:
        """Where the worker in this seat puts its gradient; it has two slots, to be used in turn."""
        return self._at(self._gradients, 2 * (seat % self._seats) + slot)

    def sum(self, step: int) -> Tensor:
        """Where the holders sum the gradients of this step."""
        return self._at(self._sums, step % self._steps)

    @property
    def seats(self) -> int:
        """Workers that have a place of their own: that of a seat is also that of the seat so many later."""
        return self._seats

    @property
    def steps(self) -> int:
        """Steps that may be open at once."""
        return self._steps

    def _at(self, memory: Tensor, place: int) -> Tensor:
        return memory[place * self._size : (place + 1) * self._size]


@dataclass(frozen=True)
class Setup:
    run: str
    keys: Keys
    spec: Server
    course: Course
    total: int
    """Steps of the run."""
    version: int
    """Steps done when it starts: 0, or where its checkpoint is."""
    cut: Cut
    params: list[tuple[str, Tensor]]
    """Those that are trained, in the order of the cut, with the values that the run starts from."""
    optimizer: torch.optim.Optimizer
    """The user's, over these parameters (and perhaps others, which have no gradient), with the state that it starts
    from. A template: nobody steps it."""
    make_schedule: Callable[[torch.optim.Optimizer], Any] | None
    schedule_state: dict[str, Any] | None
    clip: float | None
    codec: AnyCodec
    memory: dict[str, Memory]
    """By the address of the host; processes use that of their own host only."""
    journals: Path | None = None
    """Folder for `durability=disk`."""
    seed: int = 0
    tables: tuple[Table, ...] = ()
    """Sparse tables; their parts are the last shards of the cut, and they are not among `params`."""
    extra: dict[str, Any] = field(default_factory=dict)
