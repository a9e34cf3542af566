"""When a worker checkpoints. One worker of a run does at a time: worker 0, whoever that is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shoal.cluster.channel.channel import Channel
from shoal.core.errors import CheckpointWriteError
from shoal.core.events import CheckpointSaved

if TYPE_CHECKING:
    from shoal.checkpoint import Checkpoints

CHECKPOINT_SECONDS = 300.0
"""How often a run is checkpointed when `checkpoint_every` is not given."""


class Saving:
    """Where and when to checkpoint. `make` is None where nothing is to be checkpointed."""

    def __init__(
        self,
        channel: Channel,
        make: Callable[[], Checkpoints] | None = None,
        every: int | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        self._channel = channel
        self._make = make
        self.every = every
        """Steps from one checkpoint to the next; None where they go by time."""
        self._meta = meta or {}
        self._checkpoints: Checkpoints | None = None
        self._saved_at = time.monotonic()
        self.begun = 0
        """The step that was last begun to be saved here."""
        self.overdue = False
        """Whether to checkpoint as soon as possible: another worker did it before, and may have died while it did."""

    @property
    def mine(self) -> bool:
        """Whether this worker is the one that checkpoints."""
        return self._checkpoints is not None

    def take_on(self, wanted: bool, *, overdue: bool = False) -> None:
        """Be the one that checkpoints, or cease to be. Who ceases has nothing under way when this returns."""
        if not wanted:
            self.close()
            self._checkpoints = None
        elif self._checkpoints is None and self._make is not None:
            self._checkpoints = self._make()
            self.overdue = overdue

    @property
    def late(self) -> bool:
        """Whether to checkpoint now, whatever the step is."""
        by_time = self.every is None and time.monotonic() - self._saved_at > CHECKPOINT_SECONDS
        return self.overdue or by_time

    def begin(self, step: int, trees: Mapping[str, Any], *, volatile: Sequence[Tensor], best: bool) -> None:
        assert self._checkpoints is not None
        # the record should not be behind the checkpoint that the run may go on from
        self._channel.flush()
        # `begin` would wait too, but only the last of two saves would be told of
        self._checkpoints.finish()
        self.tell()
        self._checkpoints.begin(step, trees, self._meta, volatile=volatile, best=best)
        self._saved_at = time.monotonic()
        self.begun = step
        self.overdue = False

    def best_step(self) -> int:
        """The step of the best checkpoint on disk; 0 if there is none."""
        best = None if self._checkpoints is None else self._checkpoints.best()
        digits = "" if best is None else best.name.rpartition("-")[2]
        return int(digits) if digits.isdecimal() else 0

    def wait_copied(self) -> float:
        """Wait until tensors that are being saved may be changed; seconds waited."""
        return 0.0 if self._checkpoints is None else self._checkpoints.wait_copied()

    def tell(self) -> None:
        """Tell of what has been saved since. Raises `CheckpointWriteError` if it could not be."""
        saved = None if self._checkpoints is None else self._checkpoints.check()
        if saved is not None:
            self._channel.emit(CheckpointSaved(step=saved.step, path=str(saved.path), best=saved.best))
            self._channel.flush()

    def finish(self) -> None:
        """Wait until every checkpoint is on disk."""
        if self._checkpoints is not None:
            self._checkpoints.finish()
            self.tell()

    def close(self) -> None:
        """Finish the checkpoint under way: also after a failure it is worth having."""
        if self._checkpoints is not None:
            self._checkpoints.close()
            with suppress(CheckpointWriteError):
                self.tell()
