"""What happens in a run, as values. Whoever watches a run gets these and may return a decision, never reach in."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from shoal.core.traffic import Traffic


class Event(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Something that happened. `step` counts committed steps: 0 before the first one is done."""

    step: int
    time: float = msgspec.field(default_factory=time.time)
    """When, in seconds since 1970, by the clock of whoever saw it."""


class Preparing(Event, frozen=True, tag=True, kw_only=True):
    """Work before the first step that takes long enough to be shown. `total` 0: how much there is is not known."""

    what: str
    done: float = 0.0
    total: float = 0.0
    unit: str = ""


class RunStarted(Event, frozen=True, tag=True, kw_only=True):
    run_id: str
    name: str = ""
    config: dict[str, Any] = {}
    """The Trainer's arguments as plain values."""
    run_dir: str | None
    workers: int
    total_steps: int
    steps_per_epoch: int
    samples_per_epoch: int
    batch_size: int = 0
    parameters: int = 0
    """Elements of all parameters of the modules that are tracked."""
    optimizers: list[str] = []
    """Their classes."""


class StepDone(Event, frozen=True, tag=True, kw_only=True):
    """A step was applied on every worker. `loss` is the mean over the global batch."""

    epoch: int
    loss: float
    samples: int
    rates: list[float]
    """Learning rates of the optimizers' groups that it was applied with."""
    norm: float | None = None
    logs: dict[str, float] = {}
    traffic: Traffic | None = None
    """What worker 0 sent in this step; None where there is one worker."""


class WorkerSeen(Event, frozen=True, tag=True, kw_only=True):
    """What one worker has done since the run started or resumed, told about once a second and at the end."""

    worker: int
    samples: int
    seconds: dict[str, float]
    """In compute, exchange, data, eval, checkpoint, idle."""
    traffic: Traffic = Traffic()
    memory: int = 0
    """Bytes resident now, those it shares with other workers included."""
    pid: int = 0
    host: str = ""

    @property
    def bytes_sent(self) -> int:
        return self.traffic.bytes


class ServerFacts(msgspec.Struct, frozen=True):
    """What one server has done since its process started."""

    number: int
    shards: int
    """That it holds."""
    bytes: int
    """Of the weights in these."""
    mirrored: int = 0
    """Shards of others that it has a copy of."""
    pushes: int = 0
    repeated: int = 0
    """Pushes of what had come before, which did not count again."""
    received: int = 0
    sent: int = 0
    """Bytes over sockets. On one host weights and gradients go through shared memory, but for weights that are
    evaluated and, with `apply=arrival`, gradients on their way to a copy."""
    seconds: float = 0.0
    """Spent applying steps."""
    pid: int = 0
    host: str = ""


class ServersSeen(Event, frozen=True, tag=True, kw_only=True):
    """What the servers of a run with `sync="server"` have done since it started or resumed. Told now and then."""

    servers: list[ServerFacts]
    staleness: list[int] = []
    """How many pushes were computed with weights that lacked 0, 1, 2, … steps; the last place counts all beyond."""
    replaced: int = 0
    """Servers that took the place of one that had died."""


class ExchangeSettled(Event, frozen=True, tag=True, kw_only=True):
    """How the workers sum their gradients, measured in the first steps and agreed by all of them.

    Where nothing was measured (deterministic runs, and runs of a few steps) there are no buckets, and zeros.
    """

    collective: str
    """shm, hierarchical, gloo or nccl."""
    reason: str
    """Why that one."""
    hosts: list[int]
    """For each worker the number of its host."""
    latency: float
    """Seconds that the smallest sum takes."""
    bandwidth: float
    """Bytes of gradient summed per second in buckets of the size chosen."""
    buckets: list[int]
    """Bytes of each bucket, in the order in which they leave."""
    codec: str = "none"
    """What encodes the gradients."""
    encoding: float = 0.0
    """Seconds of a step that encoding and decoding take."""
    saved: float = 0.0
    """Seconds of a step that the bytes saved are worth."""
    note: str = ""
    """What people should know: that the codec does not pay here, or why it was chosen."""


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
    quiet: bool = False
    """Whether it is for the report alone: it changes nothing in this run."""


class Regrouped(Event, frozen=True, tag=True, kw_only=True):
    """The workers that take part have changed. `step` is the last one that the supervisor had heard of."""

    term: int
    """Grows with every change of members."""
    workers: list[int]
    """In order of rank."""
    joined: list[int]
    lost: list[int]
    """Dead, out of reach, or not needed any longer."""


class RunFailed(Event, frozen=True, tag=True, kw_only=True):
    """The last event of a run that ended with an error."""

    error: str
    """One line."""
    traceback: str = ""
    worker: int | None = None


class RunEnded(Event, frozen=True, tag=True, kw_only=True):
    """The last event of a run that ended as it should. `reason`: complete, stopped, interrupted or preempted."""

    loss: float
    metrics: dict[str, float]
    reason: str


AnyEvent = (
    Preparing
    | RunStarted
    | StepDone
    | WorkerSeen
    | ServersSeen
    | ExchangeSettled
    | EpochDone
    | EvalDone
    | CheckpointSaved
    | Notice
    | Regrouped
    | RunFailed
    | RunEnded
)


class Stop(msgspec.Struct, frozen=True, tag=True):
    """A callback's decision: end the run after the step in progress, checkpointed, as if it were complete."""

    reason: str = "a callback asked for it"


class Scale(msgspec.Struct, frozen=True, tag=True):
    """A callback's decision: so many workers from now on, between the run's `min_workers` and `max_workers`; or so many
    servers, where parameters are on servers; or both."""

    workers: int | None = None
    servers: int | None = None


Callback = Callable[[AnyEvent], Stop | Scale | None]
"""Called in the process that called `fit()` (on worker 0 where the script runs once per worker), in order of events."""
