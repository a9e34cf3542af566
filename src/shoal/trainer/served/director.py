"""The clerk as the director of a run with servers: what it leases, and where parameters are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.cluster.channel.messages import Up
from shoal.cluster.supervisor.directing import Hands
from shoal.core.events import AnyEvent, Notice, WorkerSeen
from shoal.core.idle import idle_words
from shoal.core.seats import FIRST_SERVER
from shoal.core.spec import MOST_SERVERS
from shoal.layouts.single import least_samples
from shoal.syncs.recipe import first_words
from shoal.syncs.server.clerk.clerk import Clerk, Facts
from shoal.syncs.server.clerk.saving import resumed
from shoal.syncs.server.messages import Depart, End, Ready
from shoal.syncs.server.messages import Up as Said
from shoal.trainer.workers.start import Start

if TYPE_CHECKING:
    from shoal.syncs.server.setup import Setup
    from shoal.trainer.served.setup import Served

_decode = msgspec.msgpack.Decoder(Up | Said).decode


class _Channel:
    """What is told where the run is watched, from here."""

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self.emit = tell

    def decide(self, event: AnyEvent) -> None:
        self.emit(event)

    def stop_asked(self) -> str | None:
        return None

    def flush(self) -> None:
        return None


class ServedDirector:
    """See `directing.Director`."""

    def __init__(self, setup: Setup, served: Served, start: Start, hands: Hands, address: Callable[[int], str]) -> None:
        self._hands, self._setup, self._served = hands, setup, served
        self._run = [start.run_id, str(start.run_dir)]
        saving = start.saving(_Channel(hands.tell))
        saving.take_on(True)
        self._saving = saving
        numbers = range(2 * MOST_SERVERS)  # some may be leaving while others come
        self._clerk = Clerk(
            setup,
            served.recipe,
            hands,
            model=served.model,
            facts=Facts(start.run_id, None if start.run_dir is None else str(start.run_dir), served.workers),
            saving=saving,
            resumed=None if start.loaded is None else resumed(start.loaded, setup),
            hosts={number: address(FIRST_SERVER + number) for number in numbers},
        )
        self._leaving: set[int] = set()
        self._seen: dict[int, WorkerSeen] = {}
        self._living: set[int] = set()

    @property
    def finished(self) -> bool:
        return self._clerk.finished

    def begin(self, now: float) -> None:
        self._clerk.begin(now)
        served, setup = self._served, self._setup
        words = first_words(served.model, served.recipe, workers=served.workers, deterministic=False)
        idle = idle_words(setup.course, served.workers, served.recipe.most_workers, least_samples(served.model))
        codec = setup.codec.name if len(setup.memory) == 1 else "none"
        unused = ""
        if codec not in ("none", "auto"):
            unused = f"codec={codec!r} is for what travels between hosts; here all share the memory of one"
        for text in filter(None, (*words, idle, *served.recipe.doubts, unused)):
            self._hands.tell(Notice(step=self._clerk.version, text=text))

    def next_look(self, now: float) -> float | None:
        return self._clerk.next_look(now)

    def tick(self, now: float) -> None:
        self._clerk.tick(now)

    decode = staticmethod(_decode)

    def hear(self, seat: int, message: Any, buffers: Sequence[Any], now: float) -> None:
        if isinstance(message, Ready):
            self._living.add(seat)
            self._count()
        self._clerk.hear(seat, message, buffers, now)
        if isinstance(message, Ready) and seat in self._leaving:
            self._clerk.depart(seat, now)

    def seen(self, event: WorkerSeen) -> None:
        self._seen[event.worker] = event

    def leave(self, seat: int, now: float) -> None:
        self._leaving.add(seat)
        self._clerk.depart(seat, now)

    def ended(self, seat: int, how: str, now: float) -> None:
        self._living.discard(seat)
        self._leaving.discard(seat)
        self._count()
        self._clerk.ended(seat, how, now)

    def _count(self) -> None:
        self._clerk.waits = len(self._living) < self._served.elasticity.least

    def stop(self, reason: str) -> bool:
        self._clerk.stop(reason)
        return True

    def scale(self, servers: int, now: float) -> str | None:
        return self._clerk.scale_servers(servers, now)

    def farewell(self, seat: int) -> msgspec.Struct:
        return End() if seat >= FIRST_SERVER else Depart("the run is over")

    def values(self) -> list[Any]:
        """Figures of the run, and of each worker that was there at the end."""
        outcome = self._clerk.outcome()
        seats = sorted(self._living & self._seen.keys()) or sorted(self._seen)
        return [{**outcome, "seen": msgspec.to_builtins(self._seen[seat]), "run": self._run} for seat in seats]

    def close(self) -> None:
        if not self._clerk.finished:
            self._saving.close()
