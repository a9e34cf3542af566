"""What is said to the keeper of a lab, and what it answers: one request and one answer per frame of a link."""

from __future__ import annotations

import msgspec

from shoal.core.errors import ConfigError, LabUnavailable, ShoalError
from shoal.engines.places import Place
from shoal.testing.lab.shape import Change, Shape


class Plan(msgspec.Struct, frozen=True):
    """What a keeper is started with."""

    name: str
    hosts: int
    shape: Shape
    owner: int | None
    """The process whose end is the end of the lab; None: the lab stays until it is taken down."""


class Reshape(msgspec.Struct, frozen=True, tag=True):
    """Change the shape of one host."""

    host: str
    change: Change


class Cut(msgspec.Struct, frozen=True, tag=True):
    """Let nothing through between `a` and `b` (None: all others); with `one_way` only what `a` sends."""

    a: str
    b: str | None = None
    one_way: bool = False


class Heal(msgspec.Struct, frozen=True, tag=True):
    """Undo cuts: those that `Cut` with the same words would make. Without words all of them."""

    a: str | None = None
    b: str | None = None
    one_way: bool = False


class Look(msgspec.Struct, frozen=True, tag=True):
    """Ask how the lab stands."""


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Ask which hosts reach which."""


Request = Reshape | Cut | Heal | Look | Probe


class HostStatus(msgspec.Struct, frozen=True):
    """One host as it stands."""

    place: Place
    shape: Shape
    unplugged: bool


class Status(msgspec.Struct, frozen=True, tag=True):
    """How the lab stands: the answer to all requests but Probe."""

    hosts: tuple[HostStatus, ...]
    cuts: tuple[tuple[str, str], ...]
    """Pairs: what the first sends to the second is dropped."""


class Reached(msgspec.Struct, frozen=True, tag=True):
    """The answer to Probe: the pairs (from, to) that got no answer."""

    silent: tuple[tuple[str, str], ...]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The request could not be done."""

    text: str
    wrong: bool
    """The request was wrong; otherwise the machine cannot do it."""

    def error(self) -> ShoalError:
        return ConfigError(self.text) if self.wrong else LabUnavailable(self.text)


class Up(msgspec.Struct, frozen=True, tag=True):
    """The first word of a keeper to the one who started it: the lab is up."""


Answer = Status | Reached | Refused | Up


def refusal(error: Exception) -> Refused:
    return Refused(str(error), isinstance(error, ConfigError))


def encode(message: Request | Answer) -> bytes:
    return msgspec.json.encode(message)


def decode_request(data: bytes) -> Request:
    """Raises msgspec.DecodeError."""
    request: Request = msgspec.json.decode(data, type=Request)
    return request


def decode_answer(data: bytes) -> Answer:
    """Raises msgspec.DecodeError."""
    answer: Answer = msgspec.json.decode(data, type=Answer)
    return answer
