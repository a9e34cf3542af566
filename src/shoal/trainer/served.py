"""Runs with `sync="server"`: their processes, and who starts them, hears them and buries them.

Two threads in the process that called `fit()`. The main one tells all who watch, and runs the user's callbacks. The
other one has the engine's crew: it hears workers and servers, and lets the clerk answer them. So a callback that takes
long keeps no worker waiting.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from shoal.core.errors import ConfigError
from shoal.core.events import AnyEvent, Notice, Scale, Stop
from shoal.core.seats import FIRST_SERVER
from shoal.elastic.board import Board
from shoal.engines.local import LocalEngine
from shoal.engines.places import Place, spread
from shoal.engines.stacks import Stacks
from shoal.engines.world import LOOPBACK
from shoal.trainer.channel import STOPPED, StopSignals, leave_sigterm_to_the_supervisor
from shoal.trainer.logs import Tail
from shoal.trainer.served_server import be_server
from shoal.trainer.served_setup import Served, make_setup
from shoal.trainer.served_staff import Staff, Started
from shoal.trainer.served_worker import ServedTask, be_served_worker
from shoal.trainer.start import Start
from shoal.trainer.stopping import signal_notice
from shoal.trainer.stuck import Stuck
from shoal.trainer.watch import Watcher
from shoal.wire.link import Link

_TICK_SECONDS = 0.1


def run_served(
    served: Served, start: Start, watch: Watcher, signals: StopSignals | None, hosts: Sequence[Place] = ()
) -> list[dict[str, Any]]:
    """Train until the run is over; figures of it, and of each worker that was there at the end.

    Afterwards the model holds the trained weights. Raises EverythingLost if the state of the run is lost with servers.
    """
    places = Places(hosts, served.workers)
    setup = make_setup(served, start, places.addresses())
    board = Board(min(memory.seats for memory in setup.memory.values()))
    faults: Any = served.elasticity.faults
    task = ServedTask(served.model, served.recipe, start, faults=faults, workers=served.workers)

    def main(seat: int, link: Link, scratch: Any) -> None:
        place = places.of(seat)
        address = LOOPBACK if place is None else place.address
        if seat >= FIRST_SERVER:
            be_server(seat - FIRST_SERVER, link, address, setup, start, place)
        else:
            stacks.answer()
            be_served_worker(seat, link, address, setup, replace(task, place=place), on_board=board.place(seat))

    with (
        _removed(setup.journals),
        closing(Stacks()) as stacks,
        Tail(start.logs, 0, watch.output) as tail,
        LocalEngine().open(main, warm=leave_sigterm_to_the_supervisor) as crew,
    ):
        told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        staff = Staff(crew, setup, served, start, told.put, places.address)
        thread = threading.Thread(target=staff.run, name="shoal-clerk", daemon=True)
        thread.start()
        try:
            stuck = Stuck(board, stacks, staff.seats, watch.urge)
            with stuck.explaining():
                return _Teller(told, staff, watch, signals, tail, stuck, faults).until_over()
        finally:
            if faults is not None:
                faults.finish()
            staff.leave()
            thread.join()


@contextmanager
def _removed(folder: Path | None) -> Iterator[None]:
    """Afterwards there is no such folder: what a run goes on from is its checkpoint, not the journals of servers."""
    try:
        yield
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Places:
    """Which host of a lab each process runs on; None where there is no lab.

    Servers have the hosts after the workers' ones to themselves, if there are more hosts than workers.
    """

    hosts: Sequence[Place]
    workers: int

    def of(self, seat: int) -> Place | None:
        if not self.hosts:
            return None
        if seat >= FIRST_SERVER:
            alone = self.hosts[self.workers :] or self.hosts
            return alone[(seat - FIRST_SERVER) % len(alone)]
        if seat >= self.workers:
            return self.hosts[seat % len(self.hosts)]
        return spread(self.hosts, self.workers)[seat]

    def address(self, seat: int) -> str:
        place = self.of(seat)
        return LOOPBACK if place is None else place.address

    def addresses(self) -> list[str]:
        return [place.address for place in self.hosts] or [LOOPBACK]


class _Teller:
    """The main thread's part: tells all who watch, and passes on what they decide."""

    def __init__(
        self,
        told: queue.SimpleQueue[Any],
        staff: Staff,
        watch: Watcher,
        signals: StopSignals | None,
        tail: Tail,
        stuck: Stuck,
        faults: Any | None = None,
    ) -> None:
        self._told, self._staff, self._watch, self._signals, self._tail = told, staff, watch, signals, tail
        self._stuck = stuck
        self._faults, self._acts = faults, _Acts(staff)
        self._step = 0
        self._asked = False
        self._ticked = 0.0

    def until_over(self) -> list[dict[str, Any]]:
        while True:
            self._pass_on_signal()
            self._tick()
            try:
                thing = self._told.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                continue
            if isinstance(thing, BaseException):
                self._drain()
                raise thing
            if isinstance(thing, list):
                return thing
            self._hear(thing)

    def _hear(self, thing: Any) -> None:
        if isinstance(thing, Started):
            self._tail.follow(thing.seat)
            return
        self._tell(thing)

    def _drain(self) -> None:
        """What was told before the run failed."""
        while not self._told.empty():
            thing = self._told.get()
            if isinstance(thing, msgspec.Struct):
                self._hear(thing)
        self._tail.look()

    def _tell(self, event: AnyEvent) -> None:
        self._step = max(self._step, event.step)
        answer = self._watch(event)
        if isinstance(answer, Stop):
            self._staff.ask_stop(STOPPED)
        elif isinstance(answer, Scale):
            self._staff.ask_scale(answer)
        if self._faults is not None:
            self._faults.heard(event, self._acts)

    def _pass_on_signal(self) -> None:
        asked = None if self._signals is None else self._signals.asked
        if asked is not None and not self._asked:
            self._asked = True
            self._staff.ask_stop(asked)
            if (text := signal_notice(asked, self._stuck)) is not None:
                self._watch(Notice(step=self._step, text=text))

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._ticked > _TICK_SECONDS:
            self._ticked = now
            self._tail.look()
            self._watch.tick()
            self._stuck.look(now)


class _Acts:
    """What faults have done by the supervisor."""

    def __init__(self, staff: Staff) -> None:
        self._staff = staff

    def kill_coordinator(self) -> None:
        raise ConfigError("faults: a run with sync='server' has no coordinator; its clerk is the supervisor")

    stop_coordinator = kill_coordinator

    def kill_worker(self, seat: int) -> None:
        raise ConfigError("faults: workers of a run with sync='server' are killed at points of their steps")

    def scale(self, workers: int) -> None:
        self._staff.ask_scale(Scale(workers))

    def kill_supervisor(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
