"""Workers that this process starts: with what, and how."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.cluster.access import Access, control_folder
from shoal.cluster.board import Board
from shoal.cluster.channel.channel import StopSignals, leave_sigterm_to_the_supervisor
from shoal.cluster.elasticity import Elasticity, EverythingLost
from shoal.cluster.logs import Tail
from shoal.cluster.roster.membership import Plan
from shoal.cluster.supervisor.apart import Relay, watch_apart
from shoal.cluster.supervisor.directing import Led
from shoal.cluster.supervisor.supervisor import COORDINATOR_SEAT, Supervisor
from shoal.cluster.supervisor.watch import Watcher
from shoal.comm.shm.segment import sweep
from shoal.core.seats import FIRST_SERVER
from shoal.core.version import __version__
from shoal.data.parcel import unseal
from shoal.engines.local import LocalEngine
from shoal.engines.places import Place, spread
from shoal.engines.stacks import Stacks
from shoal.engines.world import LOOPBACK
from shoal.trainer.workers.start import Body, Start
from shoal.trainer.workers.worker import Task, be_coordinator, be_worker
from shoal.wire.curve import Keys
from shoal.wire.link import Link

__all__ = ["Elasticity", "EverythingLost", "run_elastic"]

GRACE_SECONDS = 300.0
"""For workers whose supervisor was killed to end the step in progress and to checkpoint."""


def run_elastic(
    body: Body | None,
    start: Start,
    elasticity: Elasticity,
    watch: Watcher,
    signals: StopSignals | None,
    hosts: Sequence[Place] = (),
    led: Led | None = None,
) -> list[Any]:
    """`body(session)` on workers that come and go; what those that were there at the end returned, in order of seat.

    With `hosts`, the hosts of a lab, the workers run there, and the coordinator on the first of them. Workers that are
    `led` have no body. Raises EverythingLost if nobody is left who has the state of the run, and WorkerError for
    whatever else ends it.
    """
    plan = plan_of(start, elasticity)
    if led is not None:
        plan = led.plan(plan)
    keys = Keys.make()
    board = Board(plan.seats or seats_of(elasticity))
    places = Places(hosts, elasticity.workers)

    def main(seat: int, link: Link, scratch: Path) -> None:
        access = Access(start.run_id, control_folder(start.run_dir, scratch), keys)
        if seat == COORDINATOR_SEAT:
            be_coordinator(link, access, plan, places.of_coordinator())
        elif seat >= FIRST_SERVER:
            assert led is not None
            led.serve(seat - FIRST_SERVER, link, places.of(seat))
        else:
            stacks.answer()
            be_worker(seat, link, access, board, Task(body, start, elasticity, places.of(seat), led=led))

    # what servers have is lost with the supervisor, and workers have nothing to checkpoint
    grace = GRACE_SECONDS if led is None else 0.0
    try:
        with (
            closing(Stacks()) as stacks,
            Tail(start.logs, 0, watch.output) as tail,
            cleared(start.run_dir),
            nullcontext() if led is None else led.over(),
            LocalEngine().open(main, warm=leave_sigterm_to_the_supervisor, grace=grace) as crew,
        ):
            folder = control_folder(start.run_dir, crew.scratch)
            folder.mkdir(mode=0o700, parents=True)
            keys.write(folder)
            if led is None:
                values = Supervisor(crew, board, elasticity, watch, signals, tail, stacks, start.kept).watch()
                return [unseal(bytes(parcel), buffers) for parcel, *buffers in values]

            def make(relay: Relay) -> Supervisor:
                return Supervisor(crew, board, elasticity, relay, signals, relay, stacks, start.kept, led)

            return watch_apart(make, watch, tail)
    finally:
        if elasticity.faults is not None:
            elasticity.faults.finish()
        # workers that were all ended while they met, or while they made room for gradients
        sweep()


@dataclass(frozen=True)
class Places:
    """Which host of a lab each process runs on; None where there is no lab.

    Servers have the hosts after the workers' ones to themselves, if there are more hosts than workers.
    """

    hosts: Sequence[Place]
    workers: int

    def of_coordinator(self) -> Place | None:
        return self.hosts[0] if self.hosts else None

    def of(self, seat: int) -> Place | None:
        if not self.hosts:
            return None
        if seat >= FIRST_SERVER:
            alone = self.hosts[self.workers :] or self.hosts
            return alone[(seat - FIRST_SERVER) % len(alone)]
        return spread(self.hosts, self.workers)[seat] if seat < self.workers else self.hosts[seat % len(self.hosts)]

    def address(self, seat: int) -> str:
        place = self.of(seat)
        return LOOPBACK if place is None else place.address

    def addresses(self) -> list[str]:
        return [place.address for place in self.hosts] or [LOOPBACK]


def plan_of(start: Start, elasticity: Elasticity) -> Plan:
    return Plan(
        workers=elasticity.workers,
        least=elasticity.least,
        most=elasticity.most,
        version=__version__,
        run=start.run_id,
        before=elasticity.before,
        replaces=elasticity.replaces,
        deaths=10 if elasticity.faults is None else 0,
    )


def seats_of(elasticity: Elasticity) -> int:
    """Of the board: some more than there can be workers, for those whose seats rest."""
    return 2 * elasticity.most + 8


@contextmanager
def cleared(run_dir: Path | None) -> Iterator[None]:
    """Before and after: no control folder. A supervisor that was killed may have left one."""
    folder = None if run_dir is None else control_folder(run_dir, run_dir)
    try:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        yield
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
