"""The thread that has the processes of a run with servers: it starts them, hears them, and lets the clerk answer.

How many workers there are is decided here: one that dies is replaced where members may change, and ends the run where
they may not. What becomes of its leases, and of a dead server's shards, is the clerk's matter.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.core.errors import WorkerError
from shoal.core.events import AnyEvent, Notice, Regrouped, Scale, WorkerSeen
from shoal.core.seats import FIRST_SERVER
from shoal.core.spec import MOST_SERVERS
from shoal.engines.local import Crew, Ended, Message
from shoal.engines.look import is_halted
from shoal.layouts.single import least_samples
from shoal.syncs.server.messages import Complaint, Depart, End, Lease, encode
from shoal.syncs.server.messages import Up as Said
from shoal.trainer.clerk import Clerk, Facts
from shoal.trainer.elastic_events import change_in_words, how_it_ended
from shoal.trainer.failure import as_error, ended_error
from shoal.trainer.idle import idle_words
from shoal.trainer.messages import Departed, Failed, Happened, Returned
from shoal.trainer.recipe import first_words
from shoal.trainer.served_desk import Desk
from shoal.trainer.served_saving import resumed
from shoal.trainer.start import Start

if TYPE_CHECKING:
    from shoal.syncs.server.setup import Setup
    from shoal.trainer.served_setup import Served

_TICK_SECONDS = 0.05
_LOOK_SECONDS = 0.5
_HALTED_SECONDS, _HALTED_WORKER_SECONDS = 1.0, 4.0
"""A server, or a worker, that somebody has stopped for so long is ended, and another one takes its place."""
_LAST_WORDS_SECONDS = 0.5
_FIRST_WORDS_SECONDS = 30.0
"""If no worker has told its figures yet: the run was short, or the machine is busy."""
_DEATHS_ON_A_LEASE = 2
_MOST_STILLBORN = 5
"""Workers that end before they can compute anything, in a row."""

_decode = msgspec.msgpack.Decoder(Happened | Failed | Returned | Departed | Said).decode


class Started(msgspec.Struct, frozen=True):
    """A process was started in this seat: there is a log to follow."""

    seat: int


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


class Staff:
    """For one thread, but `ask_stop`, `ask_scale`, `seats` and `leave`, which any may call."""

    def __init__(
        self,
        crew: Crew,
        setup: Setup,
        served: Served,
        start: Start,
        tell: Callable[[Any], None],
        address: Callable[[int], str],
    ) -> None:
        self._crew = crew
        self._served = served
        self._elasticity = served.elasticity
        self._logs = start.logs
        self._run = [start.run_id, str(start.run_dir)]
        self._tell = tell
        saving = start.saving(_Channel(tell))
        saving.take_on(True)
        numbers = range(2 * MOST_SERVERS)  # some may be leaving while others come
        self._clerk = Clerk(
            setup,
            served.recipe,
            self,
            model=served.model,
            facts=Facts(start.run_id, None if start.run_dir is None else str(start.run_dir), served.workers),
            saving=saving,
            resumed=None if start.loaded is None else resumed(start.loaded, setup),
            hosts={number: address(FIRST_SERVER + number) for number in numbers},
        )
        self._saving = saving
        self._idle_codec = setup.codec.name if len(setup.memory) == 1 else "none"
        most, least = served.recipe.most_workers, least_samples(served.model)
        self._idle = idle_words(setup.course, served.workers, most, least)
        self._desk = start.run_id, start.run_dir
        self._workers: set[int] = set()
        self._servers: set[int] = set()
        """Seats of those that live."""
        self._leaving: set[int] = set()
        self._ended_wanted = False
        self._next_seat = served.workers
        self._places = min(memory.seats for memory in setup.memory.values())
        self._target = served.workers
        self._seen: dict[int, WorkerSeen] = {}
        self._killed: dict[Lease, int] = {}
        self._stillborn = 0
        self._halted: dict[int, float] = {}
        self._looked = 0.0
        self._stop: str | None = None
        self._scale: Scale | None = None
        self._refused = ""
        self._left = False
        self._term = 1

    # -- from any thread -----------------------------------------------------------------------------------------------

    def ask_stop(self, reason: str) -> None:
        """End after the step in progress, checkpointed."""
        self._stop = self._stop or reason

    def ask_scale(self, wish: Scale) -> None:
        before = self._scale or Scale()
        workers = before.workers if wish.workers is None else wish.workers
        self._scale = Scale(workers, before.servers if wish.servers is None else wish.servers)

    def seats(self) -> list[int]:
        """Of the workers that live."""
        return sorted(self._workers)

    def leave(self) -> None:
        """End at once: nobody waits for the result."""
        self._left = True

    # -- this thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until the run is over. Tells the figures, or the error that ended it."""
        try:
            self._watch()
        except BaseException as error:  # the main thread raises it
            outcome: Any = error
            self._saving.close()
        else:
            outcome = self._figures()
        self._tell(outcome)

    def _watch(self) -> None:
        served = self._served
        for seat in range(served.workers):
            self._start_worker(seat)
        self._clerk.begin(time.monotonic())
        words = first_words(served.model, served.recipe, workers=served.workers, deterministic=False)
        for text in filter(None, (*words, self._idle, *served.recipe.doubts)):
            self._tell(Notice(step=self._clerk.version, text=text))
        if self._idle_codec not in ("none", "auto"):
            text = f"codec={self._idle_codec!r} is for what travels between hosts; here all share the memory of one"
            self._tell(Notice(step=self._clerk.version, text=text))
        with contextlib.closing(Desk(*self._desk, self._rescale)) as desk:
            self._until_over(desk)
        self._end_all()

    def _until_over(self, desk: Desk) -> None:
        while not self._clerk.finished and not self._left:
            self._obey_wishes()
            desk.look(time.monotonic())
            look = self._clerk.next_look(time.monotonic())
            left = _TICK_SECONDS if look is None else look - time.monotonic()
            arrival = self._crew.next(min(_TICK_SECONDS, max(0.0, left)))
            now = time.monotonic()
            if isinstance(arrival, Message):
                self._take(arrival, now)
            elif arrival is not None:
                self._bury(arrival, now)
            self._clerk.tick(now)
            if now - self._looked > _LOOK_SECONDS:
                self._look(now)

    def _obey_wishes(self) -> None:
        if self._stop is not None and not self._ended_wanted:
            self._ended_wanted = True
            self._clerk.stop(self._stop)
        if self._scale is not None:
            wish, self._scale = self._scale, None
            why = self._rescale(wish.workers, wish.servers)
            if why is not None and why != self._refused:
                asked = f"{wish.workers!r}" if wish.servers is None else f"{wish.workers!r}, servers={wish.servers!r}"
                self._tell(Notice(step=self._clerk.version, text=f"Scale({asked}): {why}; ignored"))
            self._refused = why or ""

    # -- what the clerk has done (`clerk.Hands`) -----------------------------------------------------------------------

    def send(self, seat: int, message: Any, buffers: Sequence[Any] = ()) -> None:
        # the clerk speaks to servers that were never started, if there is nothing left to train
        if seat in self._workers or seat in self._servers:
            self._crew.send(seat, encode(message), buffers)

    def start_server(self, number: int) -> None:
        self._servers.add(FIRST_SERVER + number)
        self._crew.add(FIRST_SERVER + number)

    def tell(self, event: Any) -> None:
        self._tell(event)

    # -- hearing -------------------------------------------------------------------------------------------------------

    def _take(self, arrival: Message, now: float) -> None:
        seat, message = arrival.worker, _decode(arrival.header)
        if isinstance(message, Happened):
            for event in message.events:
                if isinstance(event, WorkerSeen):
                    self._seen[event.worker] = event
                self._tell(event)
        elif isinstance(message, Failed):
            self._hear_the_others()
            raise as_error(seat, max(self._served.workers, seat + 1), message, self._logs)
        elif isinstance(message, Departed):
            self._leaving.add(seat)
        elif isinstance(message, Complaint):
            if message.fatal:
                raise WorkerError(message.text)
            self._tell(Notice(step=self._clerk.version, text=message.text))
        elif not isinstance(message, Returned):
            self._clerk.hear(seat, message, arrival.buffers, now)

    def _hear_the_others(self) -> None:
        """Take in what is still to be told of the run."""
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            arrival = self._crew.next(min(left, _TICK_SECONDS))
            if arrival is None:
                return
            if isinstance(arrival, Message):
                message = _decode(arrival.header)
                if isinstance(message, Happened):
                    for event in message.events:
                        self._tell(event)

    # -- deaths --------------------------------------------------------------------------------------------------------

    def _bury(self, end: Ended, now: float) -> None:
        seat = end.worker
        halted = self._halted.pop(seat, None) is not None
        how = "was stopped, did not go on, and was ended" if halted else how_it_ended(end)
        if seat >= FIRST_SERVER:
            self._servers.discard(seat)
            self._clerk.ended(seat, how, now)
            return
        self._workers.discard(seat)
        if seat in self._leaving:
            self._clerk.ended(seat, "has left, as it was told to", now)
            self._tell_change(joined=[], lost=[seat], why=None)
            return
        if not self._elasticity.replaces:
            raise ended_error(end, self._logs)
        if not halted:
            self._count_death(seat, how)
        self._clerk.ended(seat, how, now)
        joined = []
        if len(self._workers - self._leaving) < self._target:
            joined = [self._start_next()]
        self._tell_change(joined=joined, lost=[seat], why=how)

    def _count_death(self, seat: int, how: str) -> None:
        """Two deaths of the same samples are no accident, nor are many before anything is computed."""
        self._stillborn = 0 if seat in self._clerk.workers else self._stillborn + 1
        if self._stillborn >= _MOST_STILLBORN:
            raise WorkerError(
                f"{_MOST_STILLBORN} workers one after the other ended before they could compute anything; the last, "
                f"worker {seat}, {how}. What it said is in its log"
            )
        found = self._clerk.computing(seat)
        if found is None:
            return
        lease, (first, last) = found
        self._killed[lease] = self._killed.get(lease, 0) + 1
        if self._killed[lease] >= _DEATHS_ON_A_LEASE:
            raise WorkerError(
                f"{_DEATHS_ON_A_LEASE} workers died one after the other while they computed positions {first}–{last} "
                f"of step {lease.step + 1}: these samples end the process that computes them",
                step=lease.step,
                positions=(first, last),
            )

    def _tell_change(self, *, joined: list[int], lost: list[int], why: str | None) -> None:
        self._term += 1
        members = sorted(self._workers - self._leaving)
        text = change_in_words(len(members), joined, lost, set(), lambda seat: why)
        step = self._clerk.version
        self._tell(Regrouped(step=step, term=self._term, workers=members, joined=joined, lost=lost))
        self._tell(Notice(step=step, text=text))

    def _look(self, now: float) -> None:
        """Servers that somebody has stopped keep everybody waiting, as a worker does that evaluates.

        Where members may change, another worker takes its place. Leases have gone to others long before.
        """
        self._looked = now
        for seat, pid in self._crew.pids().items():
            if seat < FIRST_SERVER and not self._elasticity.replaces:
                continue
            patience = _HALTED_SECONDS if seat >= FIRST_SERVER else _HALTED_WORKER_SECONDS
            if not is_halted(pid):
                self._halted.pop(seat, None)
            elif now - self._halted.setdefault(seat, now) > patience:
                self._crew.kill(seat)

    # -- more and fewer workers ----------------------------------------------------------------------------------------

    def _start_worker(self, seat: int) -> None:
        self._tell(Started(seat))
        self._workers.add(seat)
        self._crew.add(seat)

    def _start_next(self) -> int:
        """In a seat that is new, and whose place for gradients is nobody's who lives."""
        taken = {seat % self._places for seat in self._workers}
        while self._next_seat % self._places in taken:
            self._next_seat += 1
        seat, self._next_seat = self._next_seat, self._next_seat + 1
        self._start_worker(seat)
        return seat

    def _rescale(self, workers: int | None, servers: int | None) -> str | None:
        """So many workers, and so many servers, from now on. Returns why not; then nothing changes."""
        if workers is not None and (why := self._bounds(workers)) is not None:
            return why
        if servers is not None:
            why = self._clerk.scale_servers(servers, time.monotonic()) if _is_count(servers) else "servers is a number"
            if why is not None:
                return why
        if workers is not None:
            self._scale_workers(workers)
        return None

    def _bounds(self, workers: int) -> str | None:
        elasticity = self._elasticity
        if not _is_count(workers) or not elasticity.least <= workers <= elasticity.most:
            return f"this run may have {elasticity.least} to {elasticity.most} workers (min_workers=, max_workers=)"
        return None

    def _scale_workers(self, wanted: int) -> None:
        self._target = wanted
        members = sorted(self._workers - self._leaving)
        joined = [self._start_next() for _ in range(wanted - len(members))]
        for seat in members[wanted:]:
            self._leaving.add(seat)
            self._clerk.depart(seat, time.monotonic())
        if joined:
            self._tell_change(joined=joined, lost=[], why=None)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _end_all(self) -> None:
        """Let everybody leave by themselves; the crew's end is the end of whoever does not."""
        living = self._workers | self._servers  # some may not have begun yet
        for seat in sorted(living):
            self._crew.send(seat, encode(End() if seat >= FIRST_SERVER else Depart("the run is over")))
        began = time.monotonic()
        while living and not self._left:
            # without a word of any worker, as at the end of a run that was complete before it began, wait for one
            patience = _LAST_WORDS_SECONDS if self._seen else _FIRST_WORDS_SECONDS
            if (left := began + patience - time.monotonic()) <= 0:
                break
            arrival = self._crew.next(min(left, _TICK_SECONDS))
            if isinstance(arrival, Ended):
                living.discard(arrival.worker)
            elif arrival is not None:
                message = _decode(arrival.header)
                if isinstance(message, Happened):
                    for event in message.events:
                        if isinstance(event, WorkerSeen):
                            self._seen[event.worker] = event
                        self._tell(event)

    def _figures(self) -> list[dict[str, Any]]:
        outcome = self._clerk.outcome()
        seats = sorted(self._workers & self._seen.keys()) or sorted(self._seen)
        return [{**outcome, "seen": msgspec.to_builtins(self._seen[seat]), "run": self._run} for seat in seats]


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)
