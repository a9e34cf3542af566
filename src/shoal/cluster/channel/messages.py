"""What a worker and its supervisor say to each other over their link."""

from __future__ import annotations

from typing import Any

import msgspec

from shoal.core.events import AnyEvent


class Happened(msgspec.Struct, frozen=True, tag=True):
    """Events, in order; from workers other than 0 only of themselves. With `ask`, the worker waits for a `Decided`."""

    events: list[AnyEvent]
    ask: bool = False
    loop: int = 0
    """Of the function's loops, each of which counts its steps from the beginning."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A worker cannot go on."""

    kind: str
    """The class of the error: a name in `shoal.core.errors`, or that of the user's own exception."""
    message: str
    traceback: str
    where: str
    """In words, for the beginning of a sentence; empty if that is not known."""
    place: str
    """The line of the user's own code, in words; empty if there is none."""
    step: int | None
    positions: tuple[int, int] | None
    culprit: int | None
    """The worker to name, where that is not the one who says it: all workers see a loss that is not finite."""
    secondary: bool
    """The worker failed because another one had gone away."""


class Returned(msgspec.Struct, frozen=True, tag=True):
    """A worker is done. Its value is a parcel: the frame's first buffer is its header, the others are its buffers."""

    complete: bool = False
    """Whether it has seen that all others are done as well, so that the death of one is of no account."""


class Departed(msgspec.Struct, frozen=True, tag=True):
    """A worker was told to leave, or cannot take part, and ends: it has no value to return."""

    why: str = ""
    tell: bool = False
    """Whether people should know why."""


class StopAsked(msgspec.Struct, frozen=True, tag=True):
    """Supervisor: end after the step in progress, checkpointed."""

    reason: str


class Decided(msgspec.Struct, frozen=True, tag=True):
    """Supervisor: the answer to an `ask`."""

    stop: str | None


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Supervisor, to a process that runs the script: take part in this run, once you have come to it."""

    number: int
    """Of the calls that start a run, from 1: the same in every process of the script."""
    what: str
    """The function that the first process has run."""
    run_id: str
    run_dir: str | None
    control: str
    """The folder with the run's keys."""
    board: str
    """The name of its file."""
    seats: int
    """Of the board."""
    meta: dict[str, Any]
    """What checkpoints say of the run."""
    checkpoint: str | None
    """That the run goes on from."""


class Over(msgspec.Struct, frozen=True, tag=True):
    """Supervisor, to a process that runs the script: this run is over, and its outcome is to be found."""

    number: int


Up = Happened | Failed | Returned | Departed
Down = StopAsked | Decided | Begin | Over

encode = msgspec.msgpack.Encoder().encode
decode_up = msgspec.msgpack.Decoder(Up).decode
decode_down = msgspec.msgpack.Decoder(Down).decode
