"""How many workers a run has while they come and go, and what a plan of faults may do to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from shoal.core.errors import WorkerError
from shoal.core.events import AnyEvent


class EverythingLost(WorkerError):
    """Nobody is left who has the state of the run: it can only begin again at its last checkpoint."""

    term = 0
    """All terms that there were have lower numbers."""
    reached: int | None = None
    """How far people were told that it had come."""
    why = ""
    """What is most often the reason for the last of the deaths, and what to do."""

    def for_good(self) -> WorkerError:
        """What leaves the run if it does not begin again."""
        text = f"{self}{'; ' if self.why else ''}{self.why}"
        return WorkerError(text, worker=self.worker, step=self.step, positions=self.positions)


class Acts(Protocol):
    """What a plan of faults may have done by the supervisor."""

    def kill_coordinator(self) -> None: ...
    def stop_coordinator(self) -> None: ...
    def kill_worker(self, seat: int) -> None: ...
    def scale(self, workers: int) -> None: ...
    def kill_supervisor(self) -> None: ...


class Faults(Protocol):
    """A plan of faults, as far as the supervisor has part in it; sessions know the rest."""

    def at(self, point: str, *, worker: int, step: int) -> None:
        """A worker is at this point of this step."""

    def heard(self, event: AnyEvent, act: Acts) -> None:
        """An event has been told."""

    def for_servers(self) -> Any:
        """Called before servers are started: what strikes at points of their loops (see `serving`)."""

    def finish(self) -> None:
        """The run is over: undo what is not to outlive it."""


@dataclass(frozen=True)
class Elasticity:
    """How many workers a run has, and within which bounds that may change."""

    workers: int
    least: int
    most: int
    restarts: int = 0
    """How often a run that has lost everything begins again at its last checkpoint; for whoever calls `run`."""
    faults: Faults | None = None
    before: int = 0
    """Terms of this run that are over have at most this number."""
    replaces: bool = True
    """Whether a worker that is lost is replaced; else its loss ends the run."""
