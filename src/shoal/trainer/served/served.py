"""Runs with `sync="server"`: what their processes do."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.cluster.channel.channel import StopSignals
from shoal.cluster.supervisor.directing import Hands
from shoal.cluster.supervisor.watch import Watcher
from shoal.core.seats import FIRST_SERVER
from shoal.core.spec import MOST_SERVERS
from shoal.engines.places import Place
from shoal.engines.world import LOOPBACK
from shoal.trainer.served.director import ServedDirector
from shoal.trainer.served.leased import LeasedSession
from shoal.trainer.served.server import be_server
from shoal.trainer.served.setup import Served, make_setup
from shoal.trainer.served.worker import ServedTask, serve_leases
from shoal.trainer.workers.elastic import Places, run_elastic
from shoal.trainer.workers.start import Start
from shoal.wire.link import Link

if TYPE_CHECKING:
    from shoal.cluster.board import Place as OnBoard
    from shoal.cluster.channel.elastic import ElasticChannel
    from shoal.cluster.roster.membership import Plan
    from shoal.syncs.server.setup import Setup


def run_served(
    served: Served, start: Start, watch: Watcher, signals: StopSignals | None, hosts: Sequence[Place] = ()
) -> list[dict[str, Any]]:
    """Train until the run is over; figures of it, and of each worker that was there at the end.

    Afterwards the model holds the trained weights. Raises EverythingLost if the state of the run is lost with servers.
    """
    places = Places(hosts, served.workers)
    led = _Led(served, start, make_setup(served, start, places.addresses()), places)
    return run_elastic(None, start, served.elasticity, watch, signals, hosts, led)


@dataclass(frozen=True)
class _Led:
    """See `directing.Led`."""

    served: Served
    start: Start
    setup: Setup
    places: Places

    def plan(self, plan: Plan) -> Plan:
        seats = min(memory.seats for memory in self.setup.memory.values())
        return msgspec.structs.replace(plan, meets=False, seats=seats, servers=MOST_SERVERS)

    def direct(self, hands: Hands) -> ServedDirector:
        return ServedDirector(self.setup, self.served, self.start, hands, self.places.address)

    def serve(self, number: int, link: Link, place: Place | None) -> None:
        be_server(number, link, self.places.address(FIRST_SERVER + number), self.setup, self.start, place)

    def session(self, seat: int, channel: ElasticChannel, on_board: OnBoard) -> LeasedSession:
        served = self.served
        return LeasedSession(
            seat, channel, self.start, served.model, self.setup, workers=served.workers, place=on_board
        )

    def work(self, session: LeasedSession, link: Link, place: Place | None, attend: Callable[[], None]) -> None:
        served = self.served
        task = ServedTask(served.model, served.recipe, served.workers, faults=served.elasticity.faults)
        serve_leases(session, link, LOOPBACK if place is None else place.address, self.setup, task, attend)

    @contextmanager
    def over(self) -> Iterator[None]:
        """Afterwards there are no journals of servers: what a run goes on from is its checkpoint."""
        try:
            yield
        finally:
            if self.setup.journals is not None:
                shutil.rmtree(self.setup.journals, ignore_errors=True)
