"""The processes of a run, whatever the term: started, let in or refused, watched, killed, replaced.

The half of `membership` that deals with the engine.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from itertools import islice

import msgspec

from shoal.cluster.messages import (
    CUT,
    GONE,
    STOPPED,
    Beat,
    Changed,
    Ended,
    Fail,
    Hello,
    Kill,
    Leave,
    Look,
    Looked,
    Present,
    Ready,
    Refused,
    Say,
    Start,
    Welcome,
    seat_of,
)
from shoal.cluster.roster.terms import (
    Kept,
    Order,
    Plan,
    Process,
    Tell,
    encode_kept,
    free_seats,
    process_of,
    remember_life,
    second_death,
    too_many,
)

_MOST_TEXT = 15_000
_IN_VAIN = 3
"""Processes of one seat that end before they were ready, after which nobody is replaced."""
_RECONNECT = 3.0
"""Seconds that workers have to be heard by a coordinator that has just been restored, before they can be overdue."""
_LOOK_AGAIN = 2.0
"""Seconds to wait for an answer of the engine."""
_REST, _LONGEST_REST = 5.0, 60.0
"""Seconds until a seat whose process was out of reach gets another one: the first time, and at most, doubling."""
_ALONE_SILENCE = 4.0
"""Seconds of silence after which a process is lost where no engine is left that could look at it."""
_KILL_TIME = 5.0
"""Seconds for a killed process to end; then its replacement takes another seat."""

_WHY = {
    STOPPED: "stands still",
    CUT: "cannot be heard by the coordinator, though it runs",
    GONE: "is gone",
}


class Casting(ABC):
    """Who there is. A subclass decides about terms."""

    def __init__(self, plan: Plan, kept: Kept) -> None:
        self._plan = plan
        self._kept = kept
        self._processes: dict[int, Process] = {}
        self._ready: dict[int, Process] = {}
        """Those that are in no term and have said so. All of them count."""
        self._present: dict[int, Process] | None = None
        self._going: list[Process] | None = None
        """What `_members_present` and `_expected` found, until somebody comes or goes: letters are many."""
        self._orders: list[Order] = []
        self._orphaned = False
        self._asked: int | None = None
        """Workers that an operator wants beside a number of servers, until the engine has answered."""
        self._listening_since = -math.inf
        self._blind = False
        """Restored, and the engine has not yet said who is present."""
        self._resting: dict[int, tuple[float, float]] = {}
        """Seats that were out of reach: until when to leave them empty, and for how long that is. A new process there
        would most likely be out of reach as well, and every try costs the others a pause."""
        self._in_vain: dict[int, int] = {}
        self._barren = False
        """New processes end before they are ready: no more of them until a term ends or another number is wanted."""

    def record(self) -> bytes:
        """What must be durable before the orders of the last call are carried out."""
        self._kept.seats = [process.kept() for _, process in sorted(self._processes.items())]
        return encode_kept(self._kept)

    @abstractmethod
    def _lost(self, process: Process, now: float) -> None:
        """A living member of the current term was lost. `_living` does not name it any longer."""

    @abstractmethod
    def _fail(
        self,
        text: str,
        *,
        everything: bool = False,
        seat: int | None = None,
        step: int | None = None,
        at: tuple[int, int] | None = None,
    ) -> None:
        """The run cannot go on."""

    @property
    @abstractmethod
    def _is_before_the_first(self) -> bool:
        """Whether no term was declared yet."""

    def _restore(self, kept: Kept, now: float) -> None:
        self._kept = kept
        self._blind = True
        self._forget_who_is_here()
        self._processes = {occupied.seat: process_of(occupied) for occupied in kept.seats}
        for process in self._processes.values():
            process.lost_at = now
            if process.life is not None:
                process.suspicion.beat(now + _RECONNECT)
        if kept.stands:
            # it may not have left; the engine drops what it has had
            self._order(Changed(kept.term, [member.name for member in kept.members], [], []))

    # -- orders and views ----------------------------------------------------------------------------------------------

    def _order(self, order: Order) -> None:
        if isinstance(order, Say | Fail) and len(order.text) > _MOST_TEXT:
            order = msgspec.structs.replace(order, text=f"{order.text[:_MOST_TEXT]} …")
        if not (self._orphaned and isinstance(order, Start | Kill | Look)):
            self._orders.append(order)

    def _take_orders(self) -> list[Order]:
        orders, self._orders = self._orders, []
        return orders

    def _counting(self) -> list[Process]:
        """Processes that take part or may come to, by seat."""
        return [process for _, process in sorted(self._processes.items()) if process.counts]

    def _living(self) -> list[Process]:
        """Members of the current term that were not lost, by rank."""
        return list(self._members_present().values())

    def _is_living(self, process: Process) -> bool:
        return self._members_present().get(process.seat) is process

    def _members_present(self) -> dict[int, Process]:
        """The living members of the current term by seat, in order of rank."""
        if self._present is None:
            found = (self._process(member.name, member.life) for member in self._kept.members)
            self._present = {process.seat: process for process in found if process is not None and not process.leaving}
        return self._present

    def _forget_who_is_here(self) -> None:
        """To be called whenever a process comes, goes, or becomes a member."""
        self._present = self._going = None

    def _note_ready(self, process: Process, word: Ready | None) -> None:
        process.ready = word
        if word is None:
            self._ready.pop(process.seat, None)
        else:
            self._ready[process.seat] = process

    def _process(self, name: str, life: int) -> Process | None:
        """The process of that name and life, if it was welcome and is not lost."""
        seat = seat_of(name)
        process = self._processes.get(seat) if seat is not None else None
        return process if process is not None and process.life == life and not process.lost else None

    def _is_unknown(self, name: str) -> bool:
        return seat_of(name) not in self._processes

    # -- starting ------------------------------------------------------------------------------------------------------

    def _fill(self, now: float) -> None:
        """Start processes in free seats, up to the number wanted."""
        if self._orphaned or self._blind:
            return
        if self._barren:
            if len(self._counting()) < self._plan.least:
                self._fail(
                    f"{len(self._counting())} workers are left, and the run needs {self._plan.least} (min_workers): "
                    "new ones ended before they were ready. Look into their logs for the reason."
                )
            return
        resting = self._rest_of(now)
        missing = self._kept.target - self._expected(now) - len(resting)
        if missing > 0:
            taken = [*self._processes, *resting]
            for seat in islice(free_seats(taken, self._kept.next_seat, self._plan.seats), missing):
                self._kept.next_seat = seat + 1
                self._processes[seat] = Process(seat)
                self._order(Start(seat))

    def _rest_of(self, now: float) -> list[int]:
        """Seats to be left empty for now; none where the run cannot go on without them."""
        if not self._resting or len(self._counting()) < self._plan.least:
            return []
        return [seat for seat, (until, _) in self._resting.items() if now < until and seat not in self._processes]

    def _let_rest(self, process: Process, now: float) -> None:
        _, before = self._resting.get(process.seat, (0.0, _REST / 2))
        seconds = min(2 * before, _LONGEST_REST)
        self._resting[process.seat] = now + seconds, seconds

    def _expected(self, now: float) -> int:
        """Seats that have a process, or will be free in a moment for another one."""
        if self._going is None:
            self._going = [process for process in self._processes.values() if process.leaving or process.lost]
        gone = sum(process.leaving or now - process.lost_at > _KILL_TIME for process in self._going)
        return len(self._processes) - gone

    def _forgive(self) -> None:
        """What has ended before it was ready does not count any longer."""
        self._in_vain = {}
        self._barren = False

    def _rescale(self, workers: int) -> str:
        """Ask for so many workers. Returns what is wrong with it, if anything."""
        if wrong := self._bounds(workers):
            return wrong
        if workers != self._kept.target:
            self._order(Say(f"the run goes from {self._kept.target} to {workers} workers, as asked"))
            self._kept.target = workers
            self._forgive()
        return ""

    def _bounds(self, workers: int) -> str:
        if self._plan.least <= workers <= self._plan.most:
            return ""
        return (
            f"asked for {workers} workers: this run may have {self._plan.least} (min_workers) to "
            f"{self._plan.most} (max_workers). Ask for a number between them"
        )

    # -- letting in ----------------------------------------------------------------------------------------------------

    def _hear_hello(self, name: str, life: int, body: Hello, now: float) -> None:
        seat = seat_of(name)
        process = self._processes.get(seat) if seat is not None else None
        if process is None or seat is None:
            self._refuse_unknown(name)
        elif life in self._kept.ended.get(seat, []) or (process.life == life and process.lost):
            return
        elif (why := self._mismatch(body)) and not (process.life == life and process.was_ready):
            self._order(Tell(name, Refused(why)))
            if not process.refused:
                process.refused = True
                self._order(Say(f"{name} was refused: {why}"))
        else:
            # those who take part already say by it that all have come to another loop
            if process.life not in (None, life):
                self._forget(process, now)
                process = self._processes[seat] = Process(seat)
            process.life = life
            process.refused = False
            self._present = None
            self._kept.signature = body.signature or self._kept.signature
            self._order(Tell(name, Welcome(begun=not self._is_before_the_first)))

    def _mismatch(self, hello: Hello) -> str:
        if hello.version != self._plan.version:
            return (
                f"it has shoal {hello.version}, and the run has {self._plan.version}. All workers of a run need the "
                f"same version: install shoal=={self._plan.version} there"
            )
        if hello.signature and self._kept.signature not in (None, hello.signature):
            assert self._kept.signature is not None
            return (
                f"its model, optimizer or data differ (signature {hello.signature.hex()[:12]}) from the run's "
                f"(signature {self._kept.signature.hex()[:12]}). All workers must build the same ones: "
                "start it from the same script, arguments and data. (In a function with several loops, a worker can "
                "be replaced only in the first.)"
            )
        return ""

    def _refuse_unknown(self, name: str) -> None:
        self._order(
            Tell(
                name,
                Refused(
                    f"{name} is not a worker that this run has started. The run starts its workers itself: "
                    "to have more of them, ask for another number of workers"
                ),
            )
        )

    # -- losing --------------------------------------------------------------------------------------------------------

    def _dismiss(self, process: Process, why: str) -> None:
        process.leaving = True
        self._forget_who_is_here()
        self._note_ready(process, None)
        self._order(Tell(process.name, Leave(why)))

    def _expel(self, process: Process, why: str, now: float) -> None:
        """Kill a process, and go on without it at once: whatever it does until it ends, it cannot do alone."""
        process.killed = True
        self._order(Kill(process.seat, why))
        self._mark_lost(process, now)

    def _mark_lost(self, process: Process, now: float) -> None:
        was_member = self._is_living(process)
        process.lost = True
        process.lost_at = now
        self._forget_who_is_here()
        self._note_ready(process, None)
        remember_life(self._kept.ended, process)
        if not (self._plan.replaces or process.leaving or self._kept.complete):
            self._fail(f"{process.name} is lost", seat=process.seat)
        elif was_member:
            self._lost(process, now)

    def _forget(self, process: Process, now: float) -> None:
        """The process has ended: its seat is free."""
        if not process.lost:
            self._mark_lost(process, now)
        del self._processes[process.seat]
        self._forget_who_is_here()

    def _hear_ended(self, report: Ended, now: float) -> None:
        process = self._processes.get(report.seat)
        if process is None:
            return
        self._forget(process, now)
        if self._kept.complete or process.killed or process.leaving:
            return
        if report.elsewhere:
            self._fail(f"{process.name} {report.how}", seat=report.seat)
            return
        common = second_death(self._kept.deaths, report)
        if common is not None:
            self._fail(
                f"two workers died in step {common.step + 1} while they computed the same samples: positions "
                f"{common.first}–{common.last} of its epoch (the last one, {process.name}, {report.how}). Another "
                "would die of them as well. Look at these samples, and at what the model does with them.",
                seat=report.seat,
                step=common.step,
                at=(common.first, common.last),
            )
        elif too_many(self._kept.killed, report, self._plan.deaths):
            self._fail(
                f"{self._plan.deaths} workers died of the same signal within 100 steps (the last one, {process.name}, "
                f"{report.how}): that is no accident, and would go on. Look into their logs, and at the memory of the "
                "machine.",
                seat=report.seat,
                step=report.step,
            )
        elif not process.was_ready:
            self._count_in_vain(process, report.how)

    def _count_in_vain(self, process: Process, how: str) -> None:
        seat = -1 if self._plan.seats else process.seat  # given in turn, a seat says nothing
        count = self._in_vain[seat] = self._in_vain.get(seat, 0) + 1
        if count >= _IN_VAIN and not self._barren:
            self._barren = True
            who = f"{count} workers ended before they were ready (the last one, {process.name}, {how})"
            if not self._plan.seats:
                who = f"{process.name} ended {count} times before it was ready (the last one {how})"
            again = "Look into its log; asking for another number of workers tries again"
            self._order(Say(f"{who}: nobody is replaced for now. {again}"))

    def _hear_present(self, report: Present, now: float) -> None:
        if not self._blind:
            return
        self._blind = False
        for process in list(self._processes.values()):
            if process.seat not in report.seats:
                self._forget(process, now)
            elif process.killed:
                self._order(Kill(process.seat, "it was lost to the run before"))
        for seat in report.seats:
            self._processes.setdefault(seat, Process(seat))

    # -- watching ------------------------------------------------------------------------------------------------------

    def _hear_beat(self, process: Process, body: Beat, now: float) -> None:
        process.beat = body
        process.silence_said = False
        process.suspicion.beat(now)

    def _watch_silence(self, now: float) -> None:
        for process in self._processes.values():
            if not process.lost and now >= process.look_after and self._is_overdue(process, now):
                process.look_after = now + _LOOK_AGAIN
                if not self._orphaned:
                    self._order(Look(process.seat))
                elif now - (process.suspicion.last or now) > _ALONE_SILENCE:
                    self._mark_lost(process, now)

    def _is_overdue(self, process: Process, now: float) -> bool:
        return process.suspicion.overdue(now, self._listening_since)

    def _hear_looked(self, report: Looked, now: float) -> None:
        process = self._processes.get(report.seat)
        if process is None or process.lost or not self._is_overdue(process, now) or self._kept.complete:
            return
        silent = now - (process.suspicion.last or now)
        why = _WHY.get(report.verdict)
        if why is not None:
            detail = f" ({report.text})" if report.text else ""
            text = f"{process.name} {why}{detail}: silent for {silent:.1f} s"
            if report.verdict == GONE:
                self._mark_lost(process, now)
            elif not self._plan.replaces:
                self._say_it_waits(process, text, now)
            else:
                self._order(Say(f"{text}. It is killed, and the others go on"))
                if report.verdict == CUT:
                    self._let_rest(process, now)
                self._expel(process, text, now)
            return
        process.look_after = now + process.suspicion.bound()
        if not process.silence_said and not process.leaving:
            process.silence_said = True
            self._order(
                Say(
                    f"{process.name} has been silent for {silent:.1f} s, but works"
                    f"{f' ({report.text})' if report.text else ''}: it is slow, and the others wait for it"
                )
            )

    def _say_it_waits(self, process: Process, text: str, now: float) -> None:
        process.look_after = now + process.suspicion.bound()
        if not process.silence_said:
            process.silence_said = True
            self._order(Say(f"{text}. The run waits for it: with replace=False no other process takes its place"))
