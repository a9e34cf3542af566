"""What leads the workers of a run, where they do not find out by themselves what to do: a director, and its hands.

A director decides what each worker does next; who there is, and who is replaced, the coordinator decides for all runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from shoal.cluster.channel.messages import decode_up
from shoal.core.events import AnyEvent, WorkerSeen

if TYPE_CHECKING:
    from shoal.cluster.board import Place as OnBoard
    from shoal.cluster.channel.elastic import ElasticChannel
    from shoal.cluster.roster.membership import Plan
    from shoal.engines.places import Place
    from shoal.wire.link import Link


class Hands(Protocol):
    """What a director has done by the supervisor."""

    def send(self, seat: int, message: msgspec.Struct, buffers: Sequence[Any] = ()) -> None:
        """To the process in this seat; nothing if it has ended."""

    def start_server(self, number: int) -> None: ...

    def tell(self, event: AnyEvent) -> None:
        """May call `Director.stop` before it returns."""


class Director(Protocol):
    """Called by the supervisor, on its thread. Raises what ends the run, from any of its methods."""

    @property
    def finished(self) -> bool:
        """Whether it has led the run to its end. Then all are told farewell."""

    def begin(self, now: float) -> None: ...

    def next_look(self, now: float) -> float | None:
        """When to call `tick` at the latest; None if it does not matter."""

    def tick(self, now: float) -> None: ...

    def decode(self, header: bytes, /) -> Any:
        """A message of a worker or a server: one of `trainer.messages.Up`, or one that is for `hear`."""

    def hear(self, seat: int, message: Any, buffers: Sequence[Any], now: float) -> None: ...

    def seen(self, event: WorkerSeen) -> None:
        """A worker has told of itself."""

    def leave(self, seat: int, now: float) -> None:
        """The run wants fewer workers: this one is to leave when it has done what it does."""

    def ended(self, seat: int, how: str, now: float) -> None:
        """The process in this seat is gone."""

    def stop(self, reason: str) -> bool:
        """End after the step in progress, checkpointed. False: whoever works has to be told."""

    def scale(self, servers: int, now: float) -> str | None:
        """So many servers from now on. Returns why not."""

    def farewell(self, seat: int) -> msgspec.Struct: ...

    def values(self) -> list[Any]:
        """What the run returns."""

    def close(self) -> None: ...


class Undirected:
    """Workers that know by themselves what to do next: they have the state of the run, and agree on it."""

    finished = False
    decode = staticmethod(decode_up)

    def begin(self, now: float) -> None: ...

    def next_look(self, now: float) -> float | None:
        return None

    def tick(self, now: float) -> None: ...

    def hear(self, seat: int, message: Any, buffers: Sequence[Any], now: float) -> None: ...

    def seen(self, event: WorkerSeen) -> None: ...

    def leave(self, seat: int, now: float) -> None: ...

    def ended(self, seat: int, how: str, now: float) -> None: ...

    def stop(self, reason: str) -> bool:
        return False

    def scale(self, servers: int, now: float) -> str | None:
        return "this run has no servers (sync='server')"

    def farewell(self, seat: int) -> msgspec.Struct:
        raise AssertionError("nobody is led")

    def values(self) -> list[Any]:
        return []

    def close(self) -> None: ...


class Led(Protocol):
    """A run whose workers are led: what its processes do."""

    def plan(self, plan: Plan) -> Plan:
        """What such a run asks of the coordinator, beside its numbers."""

    def direct(self, hands: Hands) -> Director: ...

    def serve(self, number: int, link: Link, place: Place | None) -> None:
        """The process of a server, from its first moment to its last."""

    def session(self, seat: int, channel: ElasticChannel, on_board: OnBoard) -> Any:
        """Of the worker in this seat."""

    def work(self, session: Any, link: Link, place: Place | None, attend: Callable[[], None]) -> None:
        """Be a worker, until it raises `Left`. `attend` is called once it can be given something to do."""

    def over(self) -> AbstractContextManager[None]:
        """Around the run."""
