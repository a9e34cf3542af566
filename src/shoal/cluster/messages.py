"""What workers, coordinator and engine say to each other. Every field has a bound; what is not of this form is refused.

Workers and coordinator speak ZeroMQ (`shoal.wire.curve`); each payload is one `Letter` upwards or one `Down` downwards.
Engine (the supervisor) and coordinator speak over a link, inside one machine.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

MOST_BYTES = 1 << 20
"""Of one message."""
MOST_VALUE = 1 << 16
"""Bytes of a value in the store of a term."""
MOST_GATHERED = 16 << 20
"""Bytes of all words of one gathering."""
MOST_ANSWER = MOST_GATHERED + MOST_BYTES
"""Of an answer to a question about the store of a term: a gathering's words and what frames them."""
MOST_SEATS = 4096

COORDINATOR = "coordinator"
OPERATOR = "operator"
"""The name under which a person or a program asks for another number of workers."""

_WORKER = "worker-"

Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=32, pattern=r"^[a-z0-9-]+\Z")]
Text: TypeAlias = Annotated[str, Meta(max_length=16_000)]
Run: TypeAlias = Annotated[str, Meta(max_length=200)]
Life: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]
"""A random number of one process: two processes that had the same name one after the other differ in it."""
Number: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 48)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e9)]
Seat: TypeAlias = Annotated[int, Meta(ge=0, lt=MOST_SEATS)]
Key: TypeAlias = Annotated[str, Meta(min_length=1, max_length=512)]
Value: TypeAlias = Annotated[bytes, Meta(max_length=MOST_VALUE)]
Position: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 48)]
"""How far a worker's state is: twice the steps applied, plus one if that step has been evaluated."""


def name_of(seat: int) -> str:
    return f"{_WORKER}{seat}"


def seat_of(name: str) -> int | None:
    """The seat of a worker; None for a name that is none of theirs."""
    digits = name.removeprefix(_WORKER)
    if not (name.startswith(_WORKER) and digits.isascii() and digits.isdecimal()):
        return None
    seat = int(digits)
    return seat if seat < MOST_SEATS and name == name_of(seat) else None


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    pass


# -- worker to coordinator ---------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True, tag=True):
    """The first word of a process. Answered by `Welcome` or `Refused`."""

    version: Annotated[str, Meta(max_length=64)]
    signature: Annotated[bytes, Meta(max_length=64)]
    """Of the model, the optimizer and the course through the data: equal on all workers of a run; empty as long as a
    process has not made these."""
    pid: Number


class Beat(_Message, frozen=True, tag=True):
    """Sent again and again by a thread of the worker, whatever its main thread does."""

    term: Number
    step: Number
    phase: Annotated[int, Meta(ge=0, le=15)]
    """A number of `shoal.cluster.board.Phase`."""
    seconds: Seconds
    """In that phase so far."""
    patience: Seconds
    """Beyond so many seconds in a phase in which it waits for others, something is wrong: from its own times."""
    stack: Text = ""
    """Where the main thread is, once it has waited for long."""


class Ready(_Message, frozen=True, tag=True):
    """The worker is in no term and waits for one. Repeated until there is an answer."""

    term: Number
    """The last term it was told of; 0 if none."""
    position: Position
    holds: bool
    """Whether it has the run's state, or only what every process starts from."""


class Formed(_Message, frozen=True, tag=True):
    """The group of this term stands, and this worker has the state that all of its members have."""

    term: Number


class Unreached(_Message, frozen=True, tag=True):
    """The group of this term did not come to stand, because these members could not be reached (if any is known)."""

    term: Number
    names: Annotated[list[Name], Meta(max_length=MOST_SEATS)]


class Done(_Message, frozen=True, tag=True):
    """The run is complete, and all members knew it when this was sent."""


class Put(_Message, frozen=True, tag=True):
    """Set a key of the store of a term. Answered by `Held`."""

    number: Number
    term: Number
    key: Key
    value: Value


class Add(_Message, frozen=True, tag=True):
    """Add to a counter of the store, which is kept in decimal digits. Answered by `Held` with the sum."""

    number: Number
    term: Number
    key: Key
    amount: Annotated[int, Meta(ge=-(1 << 48), le=1 << 48)]


class Get(_Message, frozen=True, tag=True):
    """Ask for a key. Answered by `Held` once it is there; with `wait` False at once, perhaps by `Held(value=None)`."""

    number: Number
    term: Number
    key: Key
    wait: bool = True


class Gather(_Message, frozen=True, tag=True):
    """Hand in the word of member `at` of `of`. Answered by `Gathered` once all have; with `wait` False by `Held`.

    One letter and one answer for each member, where keys would be as many questions as there are members.
    """

    number: Number
    term: Number
    key: Key
    at: Seat
    of: Annotated[int, Meta(ge=1, le=MOST_SEATS)]
    value: Value
    wait: bool = True


class Scale(_Message, frozen=True, tag=True):
    """An operator: so many workers, or servers, from now on. Answered by `Welcome` or `Refused`."""

    workers: Annotated[int, Meta(ge=1, lt=MOST_SEATS)] | None = None
    servers: Annotated[int, Meta(ge=1, lt=MOST_SEATS)] | None = None


Lasting: TypeAlias = Put | Add | Gather
"""What the store of a term has from a worker: a coordinator that follows another must be told of it again."""
Question: TypeAlias = Lasting | Get
Up: TypeAlias = Hello | Beat | Ready | Formed | Unreached | Done | Question | Scale


class Letter(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a client sends. `number` grows with every letter of a life: one that does not is a repetition."""

    run: Run
    name: Name
    life: Life
    number: Number
    body: Up


# -- coordinator to worker ---------------------------------------------------------------------------------------------


class Welcome(_Message, frozen=True, tag=True):
    """The process takes part from now on."""

    begun: bool = False
    """Whether a term was declared before: then it comes into a run that is under way."""


class Refused(_Message, frozen=True, tag=True):
    """What was asked for cannot be: why, and what to do, for people."""

    why: Text


class Term(_Message, frozen=True, tag=True):
    """An agreed membership. A member's rank is its place in `members`; the first one has the state that counts."""

    number: Number
    members: Annotated[list[Name], Meta(max_length=MOST_SEATS)]


class Regroup(_Message, frozen=True, tag=True):
    """Leave this term: `now`, because it is broken; or all together, at the end of a step."""

    term: Number
    now: bool


class Hold(_Message, frozen=True, tag=True):
    """No term for now: why. With `checkpoint`, the worker should save what it has meanwhile."""

    why: Text
    checkpoint: bool


class Leave(_Message, frozen=True, tag=True):
    """The worker is not needed any longer, or must not go on: end, without a word to the others."""

    why: Text


class Finish(_Message, frozen=True, tag=True):
    """The run is complete: another member has seen that all were."""


class Held(_Message, frozen=True, tag=True):
    """The answer to the question of that number. `gone`: the term is over, and there will be no value."""

    number: Number
    value: Value | None = None
    gone: bool = False


class Gathered(_Message, frozen=True, tag=True):
    """The answer to the `Gather` of that number: the words of all members, in order."""

    number: Number
    words: Annotated[list[Value], Meta(max_length=MOST_SEATS)]


class Heard(_Message, frozen=True, tag=True):
    """The coordinator hears this worker: said now and then in answer to beats."""

    life: Number
    """Of the coordinator's process: another one knows nothing of what was said only to the one before."""


Down: TypeAlias = Welcome | Refused | Term | Regroup | Hold | Leave | Finish | Held | Gathered | Heard


# -- coordinator to engine ---------------------------------------------------------------------------------------------


class Serving(_Message, frozen=True, tag=True):
    """The coordinator listens."""

    endpoint: Text


class Alive(_Message, frozen=True, tag=True):
    """Said about once a second: the coordinator does its work."""


class Start(_Message, frozen=True, tag=True):
    """Start a worker in this seat."""

    seat: Seat


class Kill(_Message, frozen=True, tag=True):
    seat: Seat
    why: Text


class Look(_Message, frozen=True, tag=True):
    """Look at the process in this seat, and answer with `Looked`."""

    seat: Seat


class Say(_Message, frozen=True, tag=True):
    """Something a person should know."""

    text: Text


class Changed(_Message, frozen=True, tag=True):
    """A term stands: its members, in order of rank. `joined` and `lost` since the one before, for people.

    Of those lost, `left` were told to.
    """

    term: Number
    members: list[Name]
    joined: list[Name]
    lost: list[Name]
    left: list[Name] = []


class Fail(_Message, frozen=True, tag=True):
    """The run cannot go on. `everything`: because nobody is left who has its state, so that a restart may help.

    `seat`: because the process in that seat has ended, and is not replaced: where it ended says why not.
    """

    text: Text
    everything: bool = False
    seat: Seat | None = None
    positions: tuple[int, int] | None = None
    step: int | None = None


class Servers(_Message, frozen=True, tag=True):
    """An operator asks for so many servers. Answered by `Answered`."""

    count: Annotated[int, Meta(ge=1, lt=MOST_SEATS)]


ToEngine: TypeAlias = Serving | Alive | Start | Kill | Look | Say | Changed | Fail | Servers


# -- engine to coordinator ---------------------------------------------------------------------------------------------


class Present(_Message, frozen=True, tag=True):
    """The first word to a coordinator that has just started: seats whose process lives. Others are lost or empty."""

    seats: list[Seat]


class Ended(_Message, frozen=True, tag=True):
    """The process in this seat is gone: where it was, as far as the board says."""

    seat: Seat
    how: Text
    """For people: "was killed by SIGKILL"."""
    computing: bool = False
    """Whether it was in the forward or backward of a step."""
    step: Number = 0
    positions: tuple[int, int] | None = None
    """The first and last position that it computed, where it was computing."""
    signal: Annotated[int, Meta(ge=0, le=128)] | None = None
    """That ended it."""
    elsewhere: bool = False
    """What it did cannot be done again by others, nor by another one in its place."""


class Looked(_Message, frozen=True, tag=True):
    """What a look at the process showed: a word of `VERDICTS`, and more for people."""

    seat: Seat
    verdict: Annotated[str, Meta(max_length=16)]
    text: Text = ""


class Rescale(_Message, frozen=True, tag=True):
    """A callback asks for so many workers."""

    workers: Annotated[int, Meta(ge=1, lt=MOST_SEATS)]


class Answered(_Message, frozen=True, tag=True):
    """To the last `Servers`: why not, if it cannot be."""

    why: Text = ""


class Closing(_Message, frozen=True, tag=True):
    """The run is over: end."""


FromEngine: TypeAlias = Present | Ended | Looked | Rescale | Answered | Closing

STOPPED = "stopped"
"""By a signal, or it has made no progress at all while the machine could have let it: it will not come back in time."""
CUT = "cut"
"""It lives and beats, but its messages do not arrive."""
SLOW = "slow"
"""It computes, or holds the interpreter's lock: it will beat again."""
GONE = "gone"
VERDICTS = (STOPPED, CUT, SLOW, GONE)

encode = msgspec.msgpack.Encoder().encode
decode_letter = msgspec.msgpack.Decoder(Letter).decode
decode_down = msgspec.msgpack.Decoder(Down).decode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
