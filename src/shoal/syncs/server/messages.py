"""What workers, servers and the clerk of a run say to each other.

Two planes. *Data* goes between workers and servers, and between servers: ZeroMQ with CURVE (`post`), each message a
`Letter` and any number of raw frames. *Control* goes between the clerk, which is a thread of the supervisor, and every
other process, over the link that the engine gave each of them; there the message is the header of a frame.

Every number that sizes memory is checked against what the receiver knows (the cut, the course) before it is used.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from shoal.core.seats import FIRST_SERVER as FIRST_SERVER

MOST_KEPT = 2
"""Versions that the clerk has servers keep at a time."""


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """The positions start … stop−1 of a step, counted from its first one: what one worker computes at a time.

    Also the key of its gradient.
    """

    step: int
    start: int
    stop: int


class Holder(msgspec.Struct, frozen=True, array_like=True):
    """Which servers have a shard. They are numbered from 0; a process that replaces another has its number."""

    server: int
    mirror: int | None = None
    """Keeps a copy; None if there is none at present."""
    spare: int | None = None
    """While the mirror gets its copy: the one that was mirror before, and keeps what it has."""


class Placement(msgspec.Struct, frozen=True, tag=True):
    """Who holds what, from now on. Each has a higher `term` than the one before; what is of an older one is refused."""

    term: int
    holders: list[Holder]
    """For each shard."""
    endpoints: dict[int, str]
    """Of each server that lives."""
    hosts: dict[int, str]
    """The address of each server's host: who is on the same one uses shared memory."""


# -- data plane: worker → server ---------------------------------------------------------------------------------------


class Part(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A part of a gradient that travels; its one frame holds the bytes. Counts only once its `Push` has come."""

    lease: Lease
    shard: int
    start: int
    """The first byte in the area (see `cutting`) that it is for; of an encoded part, the first byte decoded."""
    stop: int
    encoded: bool = False


class Push(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All of a gradient has been sent (or lies in shared memory, in this worker's slot): it may be summed now."""

    lease: Lease
    shards: list[int]
    """Which it has for this server."""
    read: int
    """The version of the weights that it was computed with."""
    used: bytes
    """One bit for each parameter, then for each table: whether this worker has a gradient for it."""
    slot: int | None = None
    """Where it lies in shared memory; None if it has travelled as parts."""
    parts: int = 0
    """How many of them there were."""
    scale: float = 1.0
    """What the gradient is multiplied with when it is summed (staleness-aware scaling, `apply=arrival`)."""


class Touched(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Gradients of rows of tables, one frame for each shard (packed, see `tables`). Count once the `Push` has come."""

    lease: Lease
    shards: list[int]


class Pull(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer as soon as all shards of this server have at least this version."""

    number: int
    """Counts a worker's pulls; the answer has it again."""
    version: int
    near: bool
    """Whether this worker reads the weights from shared memory: then the answer has no frames."""
    exact: bool = False
    """Exactly this version, from what was kept by `Keep`."""


class Fetch(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Rows of parts of tables, at this version at least. For each shard a frame: numbers of rows in it (int64)."""

    number: int
    """Counts a worker's questions; the answer has it again."""
    version: int
    shards: list[int]
    exact: bool = False
    """Exactly this version, from what was kept."""


class Record(msgspec.Struct, frozen=True, array_like=True):
    """What a shard's step is made of, besides the sum of gradients itself."""

    step: int
    ranges: list[tuple[int, int]]
    """The positions that are in it: of a whole step (`apply=step`), or of one lease (`apply=arrival`)."""
    used: bytes
    """One bit for each parameter, then for each table: whether any worker had a gradient for it."""
    rates: list[float] = []
    """With `apply=arrival`: the learning rates that it was applied with. A mirror may hear of the end of the step
    before, and with it of other rates, sooner or later than its holder did."""


class Mirror(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """From the holder to the mirror of a shard: what will be applied next. Answered with `Mirrored`.

    The frame is the sum of gradients (of a part of a table: packed rows, see `tables`); none if it lies in shared
    memory (`Setup.sums`), where it stays until all have applied it.
    """

    shard: int
    record: Record
    near: bool


class Copy(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """From a holder to the new mirror of a shard: all that it has of it, as a parcel in the frames."""

    shard: int
    version: int


# -- data plane: server → worker ---------------------------------------------------------------------------------------


class Took(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The gradient of this lease counts on these shards; it, or another worker's of the same lease."""

    lease: Lease
    shards: list[int]


class Weights(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An answer to `Pull`: the weights of `shards`, one frame for each if they travel."""

    number: int
    version: int
    shards: list[int]


class Rows(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An answer to `Fetch`: for each shard a frame, with as many rows as were asked for."""

    number: int
    version: int
    shards: list[int]


class Mirrored(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The mirror has this record, or, with `ranges` empty, the copy of a shard at version `step`."""

    shard: int
    step: int
    ranges: list[tuple[int, int]]


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What was asked is not done. `term` is the receiver's: if it is higher, the sender waits for that placement."""

    term: int
    why: str


Said = Part | Push | Touched | Pull | Fetch | Mirror | Copy | Took | Weights | Rows | Mirrored | Refused


class Letter(msgspec.Struct, frozen=True, array_like=True):
    run: str
    term: int
    sender: str
    """worker-3, server-0."""
    body: Said


# -- control plane: clerk → worker -------------------------------------------------------------------------------------


class Work(msgspec.Struct, frozen=True, tag=True):
    """Compute this lease with weights of at least this version.

    Buffers of the frame: the parcel of the model's buffers at the beginning of the step, if any of them change.
    """

    lease: Lease
    version: int


class Evaluate(msgspec.Struct, frozen=True, tag=True):
    """Evaluate the weights of exactly this version, which servers keep until `LetGo`. Buffers as with `Work`."""

    version: int


class Depart(msgspec.Struct, frozen=True, tag=True):
    """This worker is not needed any longer: leave."""

    why: str


# -- control plane: worker → clerk -------------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A worker can work."""

    pid: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """A lease's gradient is acknowledged by all servers that hold a shard. Asks for the next lease.

    Buffers of the frame: the parcel of what forwards made of the model's buffers, if there is one.
    """

    lease: Lease
    read: int
    """The version that was read."""
    seconds: float
    """From the first forward to the last backward."""
    loss: float
    """Sum over samples."""
    weight: float
    logs: dict[str, tuple[float, float]] = {}
    """Sums and weights."""
    sent: int = 0
    """Bytes that this worker has sent for it."""
    aside: float = 0.0
    """Seconds that it has examined the loss meanwhile."""
    unseen: bool = False
    """Whether the result is the same however a step is cut, as far as it was proven."""


class Evaluated(msgspec.Struct, frozen=True, tag=True):
    version: int
    metrics: dict[str, float]


# -- control plane: clerk → server -------------------------------------------------------------------------------------


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Have these shards, at this version: from the checkpoint or the initial weights (`source` "start"), from the
    journal ("journal"), or from nothing, as a mirror that a holder will send a copy to ("copy")."""

    shards: list[int]
    source: str
    version: int


class Close(msgspec.Struct, frozen=True, tag=True):
    """All leases of this step are done: nothing more is summed into it. Make sure that mirrors (or the journal) have
    the sum, then say so, and with `norm` tell its squared norm."""

    step: int
    norm: bool = True


class Apply(msgspec.Struct, frozen=True, tag=True):
    """Apply a step whose leases are all done, on all shards that you hold or mirror.

    The sum of gradients is multiplied with `scale` first. With `apply=arrival` pushes were applied when they came: then
    this only ends the step (schedules, versions).
    """

    step: int
    scale: float
    loss: float
    """Of the step, for schedules that go by it; NaN if it is not known."""
    metric: float | None = None
    """Of an evaluation since the last step, for a schedule that goes by these."""
    keep: bool = False
    """Keep a copy of these weights, of version step + 1, for `Pull(exact=True)` and `Send`."""
    state: bool = False
    """Also of the optimizer's state."""


class Send(msgspec.Struct, frozen=True, tag=True):
    """Send what you keep of this version to the clerk."""

    version: int


class LetGo(msgspec.Struct, frozen=True, tag=True):
    """What is kept of this version is not needed any longer."""

    version: int


class End(msgspec.Struct, frozen=True, tag=True):
    """The run is over: leave."""


# -- control plane: server → clerk -------------------------------------------------------------------------------------


class Serving(msgspec.Struct, frozen=True, tag=True):
    """A server listens."""

    endpoint: str
    pid: int


class Holds(msgspec.Struct, frozen=True, tag=True):
    """What a server has after `Begin`, `Copy` or a change of placement: versions by shard, as holder and as mirror."""

    term: int
    held: dict[int, int]
    mirrored: dict[int, int]


class Closed(msgspec.Struct, frozen=True, tag=True):
    step: int
    norm: float
    """Squared, if it was asked for; not finite if any number of the sum is not."""


class Applied(msgspec.Struct, frozen=True, tag=True):
    """A step is applied on all shards that this server holds, and as durable as was asked for."""

    version: int
    rates: list[float]
    """Learning rates of the optimizer's groups that it was applied with."""
    seconds: float
    """That applying took."""
    received: int
    sent: int
    """Bytes over sockets so far."""
    pushes: int
    repeated: int
    """Leases that came a second time, so far."""


class Kept(msgspec.Struct, frozen=True, tag=True):
    """An answer to `Send`. Buffers: the parcel of a tree with the kept state of each shard."""

    version: int
    shards: list[int]
    more: bool = False
    """Whether the rest comes in another one."""


class Complaint(msgspec.Struct, frozen=True, tag=True):
    """Something that people should know of; `fatal` ends the run."""

    text: str
    fatal: bool = False


Down = Placement | Work | Evaluate | Depart | Begin | Close | Apply | Send | LetGo | End
Up = Ready | Done | Evaluated | Serving | Holds | Closed | Applied | Kept | Complaint

_letter = msgspec.msgpack.Decoder(Letter)
_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def decode_letter(data: bytes) -> Letter:
    """Raises `msgspec.MsgspecError` (or ValueError) for what is not one."""
    return _letter.decode(data)


class Told(NamedTuple):
    """A message and its buffers."""

    message: msgspec.Struct
    buffers: list[bytearray]
