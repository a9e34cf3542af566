"""What happens in a run, as values. Whoever watches a run gets these and may return a decision, never reach in."""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class Event(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Something that happened. `step` counts committed steps."""

    step: int


class RunStarted(Event, frozen=True, tag=True, kw_only=True):
    run_id: str
    run_dir: str | None
    workers: int
    total_steps: int
    steps_per_epoch: int
    samples_per_epoch: int


class StepDone(Event, frozen=True, tag=True, kw_only=True):
    """A step was applied on every worker. `loss` is the mean over the global batch."""

    epoch: int
    loss: float
    samples: int
    rates: list[float]
    norm: float | None = None
    logs: dict[str, float] = {}


class EpochDone(Event, frozen=True, tag=True, kw_only=True):
    epoch: int
    loss: float


class EvalDone(Event, frozen=True, tag=True, kw_only=True):
    epoch: int
    metrics: dict[str, float]


class CheckpointSaved(Event, frozen=True, tag=True, kw_only=True):
    path: str
    best: bool


class Notice(Event, frozen=True, tag=True, kw_only=True):
    """Something a person should know."""

    text: str


class RunEnded(Event, frozen=True, tag=True, kw_only=True):
    loss: float
    metrics: dict[str, float]
    reason: str


AnyEvent = RunStarted | StepDone | EpochDone | EvalDone | CheckpointSaved | Notice | RunEnded


class Stop(msgspec.Struct, frozen=True, tag=True):
    """A callback's decision: end the run after the step in progress, checkpointed, as if it were complete."""

    reason: str = "a callback asked for it"


Callback = Callable[[AnyEvent], Stop | None]
"""Called in the process that called `fit()` (on worker 0 where the script runs once per worker), in order of events."""
