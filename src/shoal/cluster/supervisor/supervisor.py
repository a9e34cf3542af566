"""The supervisor of a run: it starts and ends processes as the coordinator orders, and tells who watches."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from shoal.cluster import messages as said
from shoal.cluster.board import Board, Phase, Sight
from shoal.cluster.channel.channel import STOPPED, StopSignals
from shoal.cluster.channel.messages import Decided, Departed, Failed, Happened, Returned, StopAsked, encode
from shoal.cluster.elasticity import Elasticity, EverythingLost
from shoal.cluster.logs import ERR, Tail, log_path
from shoal.cluster.supervisor.apart import Relay
from shoal.cluster.supervisor.directing import Director, Led, Undirected
from shoal.cluster.supervisor.events import Told, change_in_words, how_it_ended, where_it_was
from shoal.cluster.supervisor.failure import ROOT_CAUSE_SECONDS, as_error, ended_error, why_ended
from shoal.cluster.supervisor.stopping import KEPT, signal_notice
from shoal.cluster.supervisor.stuck import Asking, Stuck
from shoal.cluster.supervisor.vain import Vain
from shoal.cluster.supervisor.watch import Watcher
from shoal.core.errors import WorkerError
from shoal.core.events import AnyEvent, Notice, Regrouped, Scale, Stop, WorkerSeen
from shoal.core.seats import FIRST_SERVER
from shoal.engines.local import Crew, Ended, Message
from shoal.engines.look import GONE, SLOW, Look, OutOfMemory, is_halted
from shoal.engines.script import ScriptCrew

COORDINATOR_SEAT = said.MOST_SEATS
Sealed: TypeAlias = list[bytearray]
"""What a worker returned, as it came: a parcel and its buffers."""

_TICK_SECONDS = 0.1
_SAMPLE_SECONDS = 0.05
_SILENT_SECONDS = 10.0
"""Of a coordinator that speaks once a second; then another one takes its place."""
_BLOCKED_SECONDS = 1.0
_COORDINATOR_SECONDS = 0.5
"""Between two looks at the coordinator."""
_LAST_WORDS_SECONDS = 0.3
_FIRST_WORDS_SECONDS = 30.0
"""If no worker has told its figures yet: the run was short, or the machine is busy."""
_HALTED_SECONDS = 1.0
"""A server that somebody has stopped for so long is ended, and another one takes its place."""
_MOST_TEXT = 2000
_FAR = 1000
_MOST_COORDINATORS, _WITHIN_SECONDS = 10, 10.0
_RECENT_SECONDS = 10.0
"""A worker that lost its group after another one's end lost it because of that."""


class Supervisor:
    """Watches a crew until every worker that lives has returned. For one thread."""

    def __init__(
        self,
        crew: Crew | ScriptCrew,
        board: Board,
        elasticity: Elasticity,
        watch: Watcher,
        signals: StopSignals | None,
        tail: Tail | Relay,
        stacks: Asking,
        kept: str = KEPT,
        led: Led | None = None,
    ) -> None:
        """`kept`: see `KEPT`."""
        self._crew = crew
        self._kept = kept
        self._board = board
        self._elasticity = elasticity
        self._watch = watch
        self._signals = signals
        self._tail = tail
        self._told = Told()
        self._living: set[int] = set()
        self._servers: dict[int, float | None] = {}
        """The seats of servers that live, and since when each was seen halted."""
        self.stuck = self._stuck = Stuck(board, stacks, lambda: sorted(self._living), lambda text: watch.urge(text))
        self._acts = _Acts(crew, self._living, self._rescale)
        self._led = led is not None
        self._left = False
        self._spoke = False
        """Whether any worker has told its figures."""
        self._refused = ""
        self._values: dict[int, Sealed] = {}
        self._complete = False
        """Whether a worker has seen that all are done."""
        self._last_end: tuple[Ended, float] | None = None
        """Of a worker that nobody had told to end, and when that was."""
        self._vain = Vain(board, stacks)
        self._memory = OutOfMemory()
        self._departed: set[int] = set()  # told to leave; their process may still be there
        self._ends: dict[int, str | None] = {}  # how the last process of a seat ended, in words; None: as it was told
        self._kills: dict[int, str] = {}  # why the coordinator had the process of a seat killed
        self._members: list[int] = []
        self._term = 0
        self._known: set[int] = set()
        self._looks: dict[int, Look] = {}
        self._looking: set[int] = set()
        self._coordinators: deque[float] = deque(maxlen=_MOST_COORDINATORS + 1)
        self._glanced = 0.0
        self._pulse = time.monotonic()
        """When the coordinator was last heard."""
        self._ticked = 0.0
        self._step = 0
        self._decided: str | None = None
        self._passed_on: str | None = None
        self._wish: tuple[int, float] | None = None  # so many workers, and when that was asked for
        self._director: Director = Undirected() if led is None else led.direct(self)

    def watch(self) -> list[Any]:
        """Until the run is over; the values in order of seat. Raises what ended it before."""
        try:
            with self._stuck.explaining():
                return self._watch_until_over()
        except EverythingLost as lost:
            # more than the coordinator can have declared since the last one that stood
            lost.term = max(self._term, self._elasticity.before) + _FAR
            lost.reached = self._step
            if self._last_end is not None and not self._led:
                lost.worker, lost.why = self._last_end[0].worker, why_ended(self._last_end[0], self._tail.folder)
            raise
        finally:
            self._director.close()

    def leave(self) -> None:
        """End at once: nobody waits for the result. Any thread."""
        self._left = True

    @property
    def returned(self) -> list[int]:
        """The seats of those who have returned a value, in order."""
        return sorted(self._values)

    def _watch_until_over(self) -> list[Any]:
        self._start_coordinator()
        self._director.begin(time.monotonic())
        while not self._over():
            self._pass_on_stop()
            arrival = self._crew.next(self._pause())
            self._tick()
            if isinstance(arrival, Message):
                self._take(arrival)
            elif arrival is not None:
                self._bury(arrival)
            self._director.tick(time.monotonic())
        if self._led and not self._left:
            self._say_farewell()
        self._close_coordinator()
        return [self._values[seat] for seat in self.returned] or self._director.values()

    def _pause(self) -> float:
        """How long to wait for what comes."""
        pause = _SAMPLE_SECONDS if self._looking else _TICK_SECONDS
        now = time.monotonic()
        look = self._director.next_look(now)
        return pause if look is None else min(pause, max(0.0, look - now))

    def _over(self) -> bool:
        if self._led:
            # a run with nothing left to train is finished before anybody could tell of itself
            return (self._director.finished and bool(self._living)) or self._left
        if not self._complete:
            return bool(self._members) and set(self._members) <= self._values.keys() | self._departed
        late = self._living - self._departed - self._values.keys()
        # one that is still starting, or wants to join, has nothing to return
        return not late or (bool(self._members) and not late & set(self._members))

    # -- time ----------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = time.monotonic()
        if self._looking:
            self._sample(now)
        if now - self._glanced > _COORDINATOR_SECONDS:
            self._glanced = now
            self._look_at_servers(now)
            pid = self._crew.pids().get(COORDINATOR_SEAT)
            if pid is not None and (is_halted(pid) or now - self._pulse > _SILENT_SECONDS):
                self._crew.kill(COORDINATOR_SEAT)
        if now - self._ticked > _BLOCKED_SECONDS:
            self._pulse = now  # a callback has kept us from listening
        if now - self._ticked > _TICK_SECONDS:
            self._ticked = now
            self._memory.look(now)
            self._tail.look()
            self._watch.tick()
            if isinstance(self._watch, Relay):
                self._heed(self._watch.answer())
            self._stuck.look(now)
            if not self._complete and self._values:
                self._vain.look(self._members, now)

    def _sample(self, now: float) -> None:
        """Look at the processes that the coordinator has asked about, and answer where there is an answer."""
        pids = self._crew.pids()
        for seat in sorted(self._looking):
            found = self._look(seat, pids.get(seat), now)
            if found is not None:
                self._looking.discard(seat)
                self._report(said.Looked(seat, *found))

    def _look(self, seat: int, pid: int | None, now: float) -> tuple[str, str] | None:
        if seat not in self._living:
            return GONE, "there is no process in this seat"
        if pid is None:
            return SLOW, "it is being started"
        look = self._looks.get(seat)
        if look is None or look.pid != pid:
            look = self._looks[seat] = Look(pid)
        return look.take(self._board.see(seat).ticks, now)

    # -- asking workers to stop ----------------------------------------------------------------------------------------

    def _wanted(self) -> str | None:
        return (self._signals.asked if self._signals is not None else None) or self._decided

    def _pass_on_stop(self) -> None:
        wanted = self._wanted()
        if wanted is None or self._passed_on is not None:
            return
        self._passed_on = wanted
        if not self._director.stop(wanted):
            for seat in sorted(self._living):
                self._crew.send(seat, encode(StopAsked(wanted)))
        if (text := signal_notice(wanted, self._stuck, self._kept)) is not None:
            self._tell(Notice(step=self._step, text=text))

    # -- the coordinator -----------------------------------------------------------------------------------------------

    def _start_coordinator(self) -> None:
        now = time.monotonic()
        self._coordinators.append(now)
        self._pulse = now
        self._looking.clear()
        self._crew.add(COORDINATOR_SEAT)
        self._report(said.Present(sorted(self._living - self._departed)))
        if self._wish is not None and now - self._wish[1] < _COORDINATOR_SECONDS + 1.0:
            # the one before may not have heard it
            self._report(said.Rescale(self._wish[0]))

    def _restart_coordinator(self, end: Ended) -> None:
        if end.why:
            raise EverythingLost(
                "the process that workers and coordinator are forked from has ended, and all of them with it; or the "
                f"coordinator cannot be started again ({end.why})"
            )
        count = len(self._coordinators)
        if count > _MOST_COORDINATORS and time.monotonic() - self._coordinators[0] < _WITHIN_SECONDS:
            raise WorkerError(
                f"the coordinator of the run ended {count} times within {_WITHIN_SECONDS:.0f} s; the last one "
                f"{how_it_ended(end)}. What it said is on stderr; please report it"
            )
        self._start_coordinator()

    def _close_coordinator(self) -> None:
        self._report(said.Closing())
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while (left := deadline - time.monotonic()) > 0 and COORDINATOR_SEAT in self._crew.pids():
            self._crew.next(left)

    def _report(self, report: said.FromEngine) -> None:
        self._crew.send(COORDINATOR_SEAT, said.encode(report))

    def _obey(self, order: said.ToEngine) -> None:
        if isinstance(order, said.Start):
            self._start(order.seat)
        elif isinstance(order, said.Kill):
            if order.seat in self._living:
                self._kills[order.seat] = order.why
                self._crew.kill(order.seat)
        elif isinstance(order, said.Look):
            if order.seat in self._looks and order.seat not in self._looking:
                self._looks[order.seat].again()
            self._looking.add(order.seat)
        elif isinstance(order, said.Say):
            self._tell(Notice(step=self._step, text=order.text))
        elif isinstance(order, said.Changed):
            self._change(order)
        elif isinstance(order, said.Servers):
            self._report(said.Answered(self._director.scale(order.count, time.monotonic()) or ""))
        elif isinstance(order, said.Fail):
            self._hear_the_others()
            end = None if self._last_end is None or self._last_end[0].worker != order.seat else self._last_end[0]
            if end is not None and order.step is None:
                raise self._lost_for_good(end)
            kind = EverythingLost if order.everything else WorkerError
            text = order.text + (self._last_ends() if order.everything else "")
            error = kind(text, step=order.step, positions=order.positions)
            if end is not None:
                error.add_note("\n".join(["", *_indented(why_ended(end, self._tail.folder), end, self._tail.folder)]))
            raise error

    def _start(self, seat: int) -> None:
        if seat in self._living:
            return
        if seat >= self._board.seats:
            self._report(said.Ended(seat, f"was not started: there are {self._board.seats} seats"))
            return
        self._tail.follow(seat)
        self._living.add(seat)
        self._departed.discard(seat)
        self._kills.pop(seat, None)
        self._looks.pop(seat, None)
        self._crew.add(seat)
        if self._passed_on is not None and not self._led:
            self._crew.send(seat, encode(StopAsked(self._passed_on)))

    def _change(self, change: said.Changed) -> None:
        members, joined, lost = (_seats(names) for names in (change.members, change.joined, change.lost))
        first, again = self._term == 0, change.term == self._term
        known, self._known = self._known, self._known | set(members)
        self._term, self._members = change.term, members
        if first or again:
            return
        left = set(_seats(change.left))
        for seat in sorted(left):
            self._director.leave(seat, time.monotonic())
        text = change_in_words(
            len(members), joined, lost, known, lambda seat: None if seat in left else self._why_lost(seat)
        )
        for seat in joined:
            self._ends.pop(seat, None)
        self._tell(Regrouped(step=self._step, term=change.term, workers=members, joined=joined, lost=lost))
        self._tell(Notice(step=self._step, text=text))

    def _why_lost(self, seat: int) -> str | None:
        if seat in self._kills:
            return self._why_killed(seat, where_it_was(self._board.see(seat)))  # it may not have ended yet
        return None if seat in self._departed else self._ends.get(seat, "is lost")

    def _last_ends(self) -> str:
        """How the last processes of all seats ended, for the end of a sentence."""
        told = [f"worker {seat} {how}" for seat, how in sorted(self._ends.items()) if how]
        where = f"; logs: {self._tail.folder}" if told and self._tail.folder is not None else ""
        return f" ({'; '.join(told)}){where}" if told else ""

    def _why_killed(self, seat: int, where: str = "") -> str:
        why = self._kills[seat].replace(said.name_of(seat), "it", 1)
        return f"was killed{where}, because {why}"

    # -- what the director has done (`directing.Hands`) ----------------------------------------------------------------

    def send(self, seat: int, message: msgspec.Struct, buffers: Sequence[Any] = ()) -> None:
        if seat in self._living or seat in self._servers:
            self._crew.send(seat, encode(message), buffers)

    def start_server(self, number: int) -> None:
        self._servers[FIRST_SERVER + number] = None
        self._crew.add(FIRST_SERVER + number)

    def tell(self, event: AnyEvent) -> None:
        self._step = max(self._step, event.step)
        self._tell(event)

    def _look_at_servers(self, now: float) -> None:
        """One that somebody has stopped keeps everybody waiting."""
        pids = self._crew.pids()
        for seat, since in self._servers.items():
            pid = pids.get(seat)
            halted = pid is not None and is_halted(pid)
            self._servers[seat] = (now if since is None else since) if halted else None
            if halted and since is not None and now - since > _HALTED_SECONDS:
                self._kills[seat] = "it stands still"
                self._crew.kill(seat)

    # -- workers -------------------------------------------------------------------------------------------------------

    def _take(self, arrival: Message) -> None:
        if arrival.worker == COORDINATOR_SEAT:
            self._pulse = time.monotonic()
            self._obey(said.decode_to_engine(arrival.header))
            return
        message = self._director.decode(arrival.header)
        if isinstance(message, Returned):
            self._values[arrival.worker] = arrival.buffers
            self._complete = self._complete or message.complete
        elif isinstance(message, Departed):
            self._departed.add(arrival.worker)
            if message.tell:
                self._tell(Notice(step=self._step, text=message.why))
        elif isinstance(message, Failed):
            raise self._failure(arrival.worker, message)
        elif isinstance(message, Happened):
            self._hear(arrival.worker, message)
        else:
            self._director.hear(arrival.worker, message, arrival.buffers, time.monotonic())

    def _hear(self, worker: int, message: Happened) -> None:
        if self._told.begins_loop(message.loop):
            self._step = 0
        for event in message.events:
            if self._told.is_new(event):
                if isinstance(event, WorkerSeen):
                    self._spoke = True
                    self._director.seen(event)
                self._step = max(self._step, event.step)
                self._tell(event)
        if message.ask:
            self._crew.send(worker, encode(Decided(self._wanted())))

    def _tell(self, event: AnyEvent) -> None:
        self._heed(self._watch(event))
        if self._elasticity.faults is not None:
            self._elasticity.faults.heard(event, self._acts)

    def _heed(self, answer: Stop | Scale | None) -> None:
        """What a callback has decided."""
        if isinstance(answer, Stop):
            self._decided = STOPPED
        elif isinstance(answer, Scale):
            self._rescale(answer.workers, answer.servers)

    def _rescale(self, workers: int | None, servers: int | None = None) -> None:
        """What cannot be as a whole is ignored, and said once."""
        if servers is None and self._wish is not None and self._wish[0] == workers:
            return
        least, most = self._elasticity.least, self._elasticity.most
        why = None
        if workers is not None and not (_is_count(workers) and least <= workers <= most):
            why = f"this run may have {least} to {most} workers (min_workers=, max_workers=)"
        elif servers is not None:
            why = self._director.scale(servers, time.monotonic()) if _is_count(servers) else "servers is a number"
        if why is None and workers is not None:
            self._wish = workers, time.monotonic()
            self._report(said.Rescale(workers))
        if why is not None and why != self._refused:
            asked = ", ".join(
                [*([] if workers is None else [f"{workers!r}"]), *([] if servers is None else [f"servers={servers!r}"])]
            )
            self._watch(Notice(step=self._step, text=f"Scale({asked}): {why}; ignored"))
        self._refused = why or ""

    def _bury(self, end: Ended) -> None:
        """A process is gone."""
        if end.worker == COORDINATOR_SEAT:
            self._restart_coordinator(end)
            return
        seat = end.worker
        if self._servers.pop(seat, self) is not self:
            how = self._why_killed(seat) if seat in self._kills else how_it_ended(end)
            self._kills.pop(seat, None)
            self._director.ended(seat, how, time.monotonic())
            return
        self._living.discard(seat)
        sight = self._board.see(seat)
        mine = sight if sight.pid == end.pid and end.pid else None
        where = where_it_was(mine)
        by_memory = end.signal == signal.SIGKILL and self._memory.just_now(time.monotonic())
        how = f"{how_it_ended(end)}{' (the out-of-memory killer)' if by_memory else ''}"
        told = f"{how}{where}"
        if end.signal == signal.SIGKILL and seat in self._kills:
            how, told = self._why_killed(seat), self._why_killed(seat, where)
        self._ends[seat] = None if seat in self._departed else told
        computing = mine is not None and mine.phase is Phase.COMPUTE
        if seat not in self._departed and seat not in self._kills:
            self._last_end = end, time.monotonic()
        self._report(
            said.Ended(
                seat,
                how[:_MOST_TEXT],
                computing=computing,
                step=0 if mine is None else mine.step,
                positions=mine.positions if mine is not None and computing else None,
                signal=end.signal,
                elsewhere=self._is_elsewhere(mine),
            )
        )
        self._director.ended(seat, how, time.monotonic())

    def _is_elsewhere(self, sight: Sight | None) -> bool:
        """Whether one that ended there cannot be replaced: what it did is not done again, or others have done it."""
        outside = sight is not None and sight.term > 0 and not sight.redoable
        return not self._complete and (outside or bool(self._values))

    def _lost_for_good(self, end: Ended) -> WorkerError:
        error = ended_error(end, self._tail.folder)
        if self._elasticity.replaces:
            error.add_note(
                "\n  It was not replaced: that is possible only inside a session.steps loop with one phase and one "
                "optimizer,\n  which is tracked before it (docs/elastic.md)"
            )
        return error

    # -- the end -------------------------------------------------------------------------------------------------------

    def _say_farewell(self) -> None:
        """Let everybody leave by themselves; the crew's end is the end of whoever does not."""
        living = self._living | self._servers.keys()  # some may not have begun yet
        for seat in sorted(living):
            self.send(seat, self._director.farewell(seat))
        began = time.monotonic()
        while living and not self._left:
            # without a word of any worker, as at the end of a run that was complete before it began, wait for one
            patience = _LAST_WORDS_SECONDS if self._spoke else _FIRST_WORDS_SECONDS
            if (left := began + patience - time.monotonic()) <= 0:
                break
            arrival = self._crew.next(min(left, _TICK_SECONDS))
            if isinstance(arrival, Ended):
                living.discard(arrival.worker)
            elif arrival is not None:
                self._overhear(arrival)

    def _overhear(self, arrival: Message) -> None:
        """Of what comes after the end, what it tells of the run."""
        if arrival.worker != COORDINATOR_SEAT:
            message = self._director.decode(arrival.header)
            if isinstance(message, Happened):
                self._hear(arrival.worker, message)

    def _failure(self, worker: int, failed: Failed) -> Exception:
        """The failure to show: if this worker only lost its peers, the one that left first."""
        deadline = time.monotonic() + ROOT_CAUSE_SECONDS
        while failed.secondary and (left := deadline - time.monotonic()) > 0:
            if self._last_end is not None and time.monotonic() - self._last_end[1] < _RECENT_SECONDS:
                self._hear_the_others()
                return self._lost_for_good(self._last_end[0])
            arrival = self._crew.next(left)
            if arrival is None:
                break
            if isinstance(arrival, Ended):
                self._bury(arrival)
                continue
            if arrival.worker == COORDINATOR_SEAT:
                continue
            message = self._director.decode(arrival.header)
            if isinstance(message, Happened):
                self._hear(arrival.worker, message)
            elif isinstance(message, Failed) and not message.secondary:
                worker, failed = arrival.worker, message
        self._crew.kill(worker)
        self._hear_the_others()
        workers = max(len(self._members) or self._elasticity.workers, worker + 1)
        return as_error(worker, workers, failed, self._tail.folder)

    def _hear_the_others(self) -> None:
        """Take in what is still to be told of the run: events come in batches."""
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            arrival = self._crew.next(left)
            if isinstance(arrival, Message):
                self._overhear(arrival)
            elif arrival is None:
                return


class _Acts:
    """What faults have done by the supervisor."""

    def __init__(self, crew: Crew | ScriptCrew, living: set[int], rescale: Callable[[int], None]) -> None:
        self._crew = crew
        self._living = living
        self._rescale = rescale

    def kill_coordinator(self) -> None:
        self._crew.kill(COORDINATOR_SEAT)

    def stop_coordinator(self) -> None:
        pid = self._crew.pids().get(COORDINATOR_SEAT)
        if pid is not None:
            os.kill(pid, signal.SIGSTOP)

    def kill_worker(self, seat: int) -> None:
        if seat in self._living:
            self._crew.kill(seat)

    def scale(self, workers: int) -> None:
        self._rescale(workers)

    def kill_supervisor(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def _indented(why: str, end: Ended, logs: Path | None) -> list[str]:
    """The reason, and where to look, of a worker that ended without a word."""
    lines = [f"  worker {end.worker}: {why}"] if why else []
    if logs is not None and log_path(logs, end.worker, ERR).exists():
        lines.append(f"  log:  {log_path(logs, end.worker, ERR)}")
    return lines


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def _seats(names: list[str]) -> list[int]:
    return [seat for seat in map(said.seat_of, names) if seat is not None]
