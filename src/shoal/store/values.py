"""What the run store holds, as values."""

from __future__ import annotations

from typing import Any

import msgspec

from shoal.core.settings import Setting
from shoal.core.traffic import Traffic

RUNNING = "running"
COMPLETE = "complete"
STOPPED = "stopped"
"""A callback ended it before its time."""
INTERRUPTED = "interrupted"
PREEMPTED = "preempted"
FAILED = "failed"
KILLED = "killed"
"""Its process is gone and never said how it ended. Not stored: found out when a run is read."""
LOST = "lost"
"""It runs on another machine, and has not been heard of for a while. Not stored either."""


class NewRun(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run when it starts."""

    id: str
    name: str
    created: float
    workers: int
    run_dir: str | None = None
    script: str = ""
    command: list[str] = []
    host: str = ""
    user: str = ""
    pid: int = 0
    pid_started: float = 0.0
    """In seconds after the machine started: process ids are used again. Left out: the recorder fills it in."""
    boot: str = ""
    """Which start of the machine that was. Left out: the recorder fills it in."""
    config: dict[str, Setting] = {}
    environment: dict[str, Any] = {}
    """Left out: the recorder finds it out, in its own thread."""
    git_commit: str | None = None
    """Left out: the recorder asks git about the folder of the script, in its own thread."""
    git_dirty: bool | None = None
    version: str = ""


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A run, as it is shown in lists."""

    id: str
    name: str
    status: str
    created: float
    updated: float
    """When it was last heard of."""
    ended: float | None
    workers: int
    batch_size: int
    total_steps: int
    steps_per_epoch: int
    samples_per_epoch: int
    step: int
    """Steps done."""
    loss: float | None
    """Of the last step, or the mean over the last epoch once the run has ended."""
    metrics: dict[str, float]
    """The last evaluation."""
    seconds: float
    """Spent training, all starts together."""
    resumes: int
    run_dir: str | None
    script: str
    command: list[str]
    host: str
    user: str
    pid: int
    pid_started: float
    """In seconds after the machine started."""
    boot: str = ""
    """Which start of the machine that was."""
    config: dict[str, Setting]
    environment: dict[str, Any]
    git_commit: str | None
    git_dirty: bool | None
    version: str
    error: str | None
    traceback: str | None
    bytes_sent: int
    """By all workers, all starts together."""
    traffic: Traffic = Traffic()
    """The same in detail. Empty for one worker, and for what was recorded before there was an account."""
    tags: list[str]


class StepRow(msgspec.Struct, frozen=True):
    step: int
    time: float
    epoch: int
    loss: float
    samples: int
    rate: float | None
    """The learning rate of the first parameter group."""
    norm: float | None
    logs: dict[str, float]
    bytes_sent: int | None = None
    """By worker 0 in this step, as is all that follows. None where there is one worker, or no account was kept."""
    messages: int | None = None
    operations: int | None = None
    """Sums, gathers, broadcasts and barriers."""
    exchange: float | None = None
    """Seconds from the start of an operation to its end, each moment counted once."""
    exposed: float | None = None
    """Seconds of these in which the worker could do nothing else."""


class FlowRow(msgspec.Struct, frozen=True):
    """What worker 0 sent of one sort in a step, and in each step after it until the next step that has rows.

    The rows of a step are all that it sent; where that is nothing, they have 0 bytes and 0 messages.
    """

    step: int
    kind: str
    codec: str
    link: str
    bytes: int
    messages: int


class EventRow(msgspec.Struct, frozen=True):
    """Anything but a step: `kind` is the event's class in `shoal.core.events`, `data` its other fields."""

    time: float
    step: int
    kind: str
    data: dict[str, Any]


class CheckpointRow(msgspec.Struct, frozen=True):
    step: int
    time: float
    path: str
    best: bool


class WorkerRow(msgspec.Struct, frozen=True):
    """The last that a worker told of itself."""

    worker: int
    samples: int
    seconds: dict[str, float]
    bytes_sent: int
    memory: int
    pid: int
    host: str
    traffic: Traffic = Traffic()
    """Since the last start."""


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended."""

    status: str
    step: int = 0
    loss: float | None = None
    metrics: dict[str, float] = {}
    bytes_sent: int = 0
    """By all workers since this start; 0: what they told of themselves counts."""
    error: str | None = None
    traceback: str | None = None
