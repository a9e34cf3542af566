"""How one term follows another: leaving the last one, entering the next, waiting inside.

The half of `membership` that decides about terms. `_declare` is the only way into a term, `_gather` the
only one out of it.
"""

from __future__ import annotations

import enum

from shoal.cluster.messages import Changed, Fail, Hold, Regroup, Say, Term
from shoal.cluster.roster.casting import Casting
from shoal.cluster.roster.terms import Kept, Member, Plan, Process, Tell, by_rank, to_expel
from shoal.cluster.roster.waits import impatient, place, stall_text, stalled, waiting_text

_FIRST_TERM = 30.0
"""Seconds after which a run begins with fewer workers than it asked for."""
_MOMENT = 0.05
"""Seconds between the first candidate's readiness and the soft regroup, which takes all that are ready by then."""
_SOFT = 2.0
"""Seconds between the first and the last member that leaves a term softly; beyond, the others are told to leave now."""
VERDICT_TIME = 3.0
"""Seconds to hear from the other members once one says that it could not reach somebody."""
_REPEAT = 1.0
"""Seconds after which an order to leave a term is given again to those that have not."""
_LONG = 5.0
"""Seconds of gathering after which people are told who is waited for."""
_VAIN = 10
"""Terms in a row that never stood, with nobody lost, after which the run fails: a lost message may cost one or two."""
_STALLS = 8
"""Stalls at one step after which the run fails. Each time twice the patience: what only takes long gets there."""
_FAR = 1000
_PATIENT = 1.0
"""Seconds to wait quietly for a replacement, which most often takes a tenth of that."""


class Mode(enum.Enum):
    """Of the current term."""

    GATHERING = enum.auto()
    FORMING = enum.auto()
    STANDING = enum.auto()
    OVER = enum.auto()


class Regrouping(Casting):
    """The terms of a run."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, Kept(target=plan.workers, term=plan.before))
        self._mode = Mode.GATHERING
        self._gathering_since = 0.0
        self._soft = False
        """The members were asked to leave at the end of a step."""
        self._soft_at: float | None = None
        self._ordered_at = 0.0
        """When the members were last told to leave."""
        self._slow_said = False
        self._hold_said = False
        self._unformed: set[int] = set()
        """Members that have yet to say that the term is formed, while it is. Who is lost meanwhile ends that."""
        self._unreached: dict[str, list[str]] = {}
        self._verdict_at: float | None = None
        self._vain = 0
        self._stalls = 0
        self._stall_step = -1
        self._waits_said: set[tuple[int, str]] = set()

    @property
    def term(self) -> int:
        """The number of the current term, or of the last one while the next is gathered; 0 before the first."""
        return self._kept.term

    @property
    def members(self) -> list[str]:
        """Of that term, in order of rank."""
        return [member.name for member in self._kept.members]

    @property
    def complete(self) -> bool:
        return self._kept.complete

    # -- leaving a term ------------------------------------------------------------------------------------------------

    def _consider_regroup(self, now: float) -> None:
        """While a term stands: ask its members to leave softly if others are to join, or some to go."""
        candidates = [process for _, process in sorted(self._ready.items())]
        count = len(self._kept.members)
        if count > self._kept.target or (candidates and count < self._kept.target):
            if self._soft_at is None:
                self._soft_at = now + _MOMENT
            due = now >= self._soft_at if not self._soft else now >= self._ordered_at + _REPEAT
            if due:
                self._soft = True
                self._order_out(now, hard=False)
        else:
            for process in candidates:
                self._dismiss(process, f"the run has the {count} workers that it wants")

    def _learn_term(self, number: int, now: float) -> None:
        """A higher number than ours can only mean that the journal lost its end: it must not be used again.

        A much higher one is none that anybody declared.
        """
        if self.term < number < self.term + _FAR:
            self._kept.term = number
            if self._plan.meets and self._mode in (Mode.FORMING, Mode.STANDING):
                self._gather(now, hard=True)

    def _gather(self, now: float, *, hard: bool, lost: bool = False) -> None:
        """The term is over: wait until all of its living members have left it."""
        if lost:
            self._vain = 0
        elif self._mode is Mode.FORMING:
            self._vain += 1
        self._mode = Mode.GATHERING
        self._kept.stands = False
        self._gathering_since = now
        self._slow_said = self._hold_said = False
        self._verdict_at = None
        self._soft = not hard
        self._soft_at = None
        self._forgive()
        if self._vain >= _VAIN:
            self._fail(
                f"{_VAIN} groups of workers in a row did not come to stand, though no worker was lost. "
                "Look into the logs of the workers for what kept them from meeting."
            )
        elif hard:
            self._order_out(now, hard=True)

    def _order_out(self, now: float, *, hard: bool) -> None:
        """Tell the members that have not left the term to do so."""
        self._ordered_at = now
        self._order_these_out([process for process in self._living() if process.ready is None], hard=hard)

    def _order_these_out(self, processes: list[Process], *, hard: bool) -> None:
        term, regroup = Term(self.term, self.members), Regroup(self.term, now=hard)
        for process in processes:
            if process.formed < self.term:
                # it may not have heard of the term, and must not hear of it later
                self._order(Tell(process.name, term))
            self._order(Tell(process.name, regroup))

    def _press(self, now: float) -> None:
        """Those that have not left the term yet are told again, and people who is waited for."""
        late = [process for process in self._living() if process.ready is None]
        waited = now - self._gathering_since
        if self._soft and waited >= _SOFT:
            self._soft = False
            self._order_out(now, hard=True)
        elif not self._soft and now >= self._ordered_at + _REPEAT:
            self._order_out(now, hard=True)
        if late and waited >= _LONG and not self._slow_said:
            self._slow_said = True
            places = "; ".join(place(process, now) for process in late)
            self._order(
                Say(
                    f"the workers have waited {waited:.0f} s to regroup: {places}. They go on once it has come to the "
                    "end of that, and without it if its process ends or stands still."
                )
            )

    def _lost(self, process: Process, now: float) -> None:
        """The process counts for nothing any longer, and was a member of the current term."""
        if not self._plan.meets:
            return  # `_compose` goes on without it
        if self._mode in (Mode.STANDING, Mode.FORMING):
            self._gather(now, hard=True, lost=True)
        elif self._mode is Mode.GATHERING:
            self._soft = self._hold_said = False
            for other in self._counting():
                other.holding = False
            self._order_out(now, hard=True)

    def _judge(self, now: float) -> None:
        """Once all members have said how far they came, or had the time to: expel the one that keeps them apart."""
        if self._verdict_at is None:
            return
        silent = [
            process
            for process in self._living()
            if process.ready is None and process.formed < self.term and process.name not in self._unreached
        ]
        if silent and now < self._verdict_at:
            return
        choice = to_expel(self._living(), self._unreached)
        if choice is None:
            self._gather(now, hard=True)
        else:
            worst, apart = choice
            self._let_rest(worst, now)
            self._expel(worst, f"{worst.name} has no connection with {', '.join(apart)}", now)

    # -- entering a term -----------------------------------------------------------------------------------------------

    def _compose(self, now: float) -> None:
        """Where members need not meet: who is ready takes part at once, and who is lost or too many no longer does."""
        if self._is_before_the_first and not self._may_begin(len(self._ready), now):
            return
        living, target = self._living(), self._kept.target
        for process in living[target:]:
            self._dismiss(process, f"the run goes on with {target} workers")
        room = max(0, target - len(living))
        candidates = [process for _, process in sorted(self._ready.items())]
        for process in candidates[room:]:
            self._dismiss(process, f"the run has the {target} workers that it wants")
        chosen = sorted([*living[:target], *candidates[:room]], key=lambda process: process.seat)
        if len(chosen) < self._plan.least:
            return
        if [Member(process.name, process.life or 0) for process in chosen] != self._kept.members:
            self._declare(chosen, [])
            self._stand()

    def _try_to_declare(self, now: float) -> None:
        """Declare the next term if all living members of the last one have left it, and enough processes are ready."""
        if len(self._ready) < len(self._members_present()):
            return
        living = self._living()
        if any(process.ready is None for process in living):
            return
        if self._state_is_gone(living):
            self._fail("no worker is left that has the state of the run: all that had it were lost", everything=True)
            return
        if self._is_before_the_first and not self._may_begin(len(self._ready), now):
            return
        if len(self._ready) < self._plan.least:
            self._hold(now)
        else:
            ready = by_rank(self._ready.values())
            self._declare(ready[: self._kept.target], ready[self._kept.target :])

    def _state_is_gone(self, living: list[Process]) -> bool:
        """Whether the run had a state, and nobody has it any longer.

        Of a term whose members are all gone, nobody knows how far it came: it counts as having had one.
        """
        had = self._kept.held or (not self._is_before_the_first and not living)
        return had and not any(process.holds for process in self._counting())

    @property
    def _is_before_the_first(self) -> bool:
        return self.term == self._plan.before

    def _may_begin(self, ready: int, now: float) -> bool:
        if ready >= self._kept.target:
            return True
        nobody_comes = self._barren and ready == len(self._counting())
        if now - self._gathering_since < _FIRST_TERM and not nobody_comes:
            return False
        if not self._slow_said:
            self._slow_said = True
            enough = ready >= self._plan.least
            self._order(
                Say(
                    f"{ready} of {self._kept.target} workers are ready after {now - self._gathering_since:.0f} s: "
                    + (
                        "the run begins with those, and the others join it later"
                        if enough
                        else f"the run waits until there are {self._plan.least} (min_workers)"
                    )
                )
            )
        return ready >= self._plan.least

    def _hold(self, now: float) -> None:
        if self._is_before_the_first or now - self._gathering_since < _PATIENT:
            return
        if self._hold_said and all(process.holding for process in self._ready.values()):
            return
        ready = by_rank(self._ready.values())
        why = f"{len(ready)} workers are ready, and the run needs {self._plan.least} (min_workers): waiting for more"
        keeper = self._keeper(ready)
        for process in ready:
            if not process.holding:
                process.holding = True
                save = not self._hold_said and process is keeper and process.holds
                self._order(Tell(process.name, Hold(why, checkpoint=save)))
        if ready and not self._hold_said:
            self._hold_said = True
            saves = f". {keeper.name} saves a checkpoint meanwhile" if keeper is not None and keeper.holds else ""
            self._order(Say(f"{why}{saves}"))

    def _keeper(self, ready: list[Process]) -> Process | None:
        """Who should save: the one that did it so far, if it is as far as any, for it may still be writing."""
        if not ready:
            return None
        before = self._kept.members[0].name if self._kept.members else ""
        first = next((process for process in ready if process.name == before), ready[0])
        assert first.ready is not None and ready[0].ready is not None
        return first if first.ready.position == ready[0].ready.position and first.holds else ready[0]

    def _declare(self, chosen: list[Process], others: list[Process]) -> None:
        self._kept.term += 1
        self._kept.members = [Member(process.name, process.life or 0) for process in chosen]
        self._kept.stands = False
        self._mode = Mode.FORMING
        self._soft = False
        self._soft_at = self._verdict_at = None
        self._unreached = {}
        self._unformed = {process.seat for process in chosen}
        self._forget_who_is_here()
        term = Term(self.term, self.members)
        for process in chosen:
            self._note_ready(process, None)
            process.holding = False
            self._order(Tell(process.name, term))
        for process in others:
            self._dismiss(process, f"the run goes on with {len(chosen)} workers")

    def _stand(self) -> None:
        kept = self._kept
        before, after = set(kept.stood), set(kept.members)
        joined = [member.name for member in kept.members if member not in before]
        lost = [member.name for member in kept.stood if member not in after]
        kept.stood = kept.members
        kept.stands = True
        self._mode = Mode.STANDING
        self._vain = 0
        for process in self._living():
            self._resting.pop(process.seat, None)
        leaving = {process.name for process in self._processes.values() if process.leaving}
        self._order(Changed(self.term, self.members, joined, lost, [name for name in lost if name in leaving]))

    # -- waiting inside a term -----------------------------------------------------------------------------------------

    def _watch_waits(self, now: float) -> None:
        members = self._living()
        again = max((member.beat.step for member in members if member.beat is not None), default=0) <= self._stall_step
        step = stalled(members, self.term, 2.0**self._stalls if again else 1.0)
        if step is not None:
            self._break_stall(members, step, now)
            return
        found = [(waiter.beat, waiter, busy) for waiter, busy in impatient(members, self.term) if waiter.beat]
        waits = {(beat.step, waiter.name): (waiter, busy) for beat, waiter, busy in found}
        if waits.keys() <= self._waits_said:
            return
        for once, (waiter, busy) in waits.items():
            if once not in self._waits_said:
                self._order(Say(waiting_text(waiter, busy, now, replaces=self._plan.replaces)))
        oldest, _ = min(waits)
        self._waits_said = {once for once in self._waits_said if once[0] >= oldest} | waits.keys()

    def _break_stall(self, members: list[Process], step: int, now: float) -> None:
        self._stalls = self._stalls + 1 if step <= self._stall_step else 1
        self._stall_step = step
        if self._stalls >= _STALLS:
            self._fail(
                f"all workers waited for each other in step {step + 1}, {_STALLS} times in a row, and new groups did "
                "not help: messages between them get lost, or a loss or callback does something on some workers only."
            )
            return
        self._order(Say(stall_text(members, step)))
        self._gather(now, hard=True)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _fail(
        self,
        text: str,
        *,
        everything: bool = False,
        seat: int | None = None,
        step: int | None = None,
        at: tuple[int, int] | None = None,
    ) -> None:
        if self._mode is not Mode.OVER:
            self._mode = Mode.OVER
            self._kept.failed = True
            self._order(Fail(text, everything=everything, seat=seat, positions=at, step=step))
