"""Who takes part in a run: the state machine that declares terms.

Pure: time is passed in, orders come out, and nothing else happens. One thread at a time. The owner writes `record()` to
its journal whenever it has changed, before it carries out the orders of the same call; then a coordinator that dies at
any moment can be `restored`, and no number of a term is ever used for two memberships.

A term is *gathered* (its members have left the last one and say Ready), *formed* (they meet and agree on the state) and
then *stands*. Orders to workers may get lost, so each is given again as long as it matters; a worker ignores a Term or
Regroup of a number that it has left behind, and a Regroup may come before it has begun to form that term.
"""

from __future__ import annotations

from shoal.cluster.messages import (
    OPERATOR,
    Answered,
    Beat,
    Closing,
    Done,
    Ended,
    Finish,
    Formed,
    FromEngine,
    Hello,
    Leave,
    Looked,
    Present,
    Ready,
    Refused,
    Regroup,
    Rescale,
    Say,
    Scale,
    Servers,
    Term,
    Unreached,
    Up,
    Welcome,
)
from shoal.cluster.roster.regrouping import VERDICT_TIME, Mode, Regrouping
from shoal.cluster.roster.terms import Order, Plan, Process, Tell, decode_kept

__all__ = ["Membership", "Order", "Plan", "Tell"]


class Membership(Regrouping):
    """The members of a run. `begin` or `restored` comes first; every call returns the orders that follow from it."""

    # -- what the owner calls ------------------------------------------------------------------------------------------

    @classmethod
    def restored(cls, plan: Plan, record: bytes, now: float) -> Membership:
        """As it was when that record was written. Starts nobody until the engine says who is present."""
        self = cls(plan)
        self._restore(decode_kept(record), now)
        self._gathering_since = now
        if self._kept.complete or self._kept.failed:
            self._mode = Mode.OVER
        elif self._kept.stands:
            self._mode = Mode.STANDING
            for process in self._living():
                process.formed = self.term
        else:
            self._order_out(now, hard=True)
        return self

    def begin(self, now: float) -> list[Order]:
        """Start the first workers."""
        self._gathering_since = now
        return self._settled(now)

    def hear(self, name: str, life: int, body: Up, now: float) -> list[Order]:
        """A letter of a worker or of an operator. Letters of processes that do not count any longer are ignored."""
        if name == OPERATOR:
            self._hear_operator(body)
        elif isinstance(body, Hello):
            self._hear_hello(name, life, body, now)
        elif (process := self._process(name, life)) is not None:
            self._hear_process(process, body, now)
        elif isinstance(body, Ready) and self._is_unknown(name):
            self._refuse_unknown(name)
        if isinstance(body, Beat) and not self._orders:
            return []  # most letters are beats: nothing follows from one, and what does from time waits for the tick
        return self._settled(now)

    def engine(self, report: FromEngine, now: float) -> list[Order]:
        """A report of the engine."""
        match report:
            case Ended():
                self._hear_ended(report, now)
            case Looked():
                self._hear_looked(report, now)
            case Present():
                self._hear_present(report, now)
            case Rescale(workers=workers):
                wrong = self._rescale(workers)
                if wrong:
                    self._order(Say(wrong))
            case Answered(why=why):
                self._hear_answered(why)
            case Closing():
                self._mode = Mode.OVER
        return self._settled(now)

    def orphaned(self, now: float) -> list[Order]:
        """The engine is gone: nobody is started or killed from now on."""
        self._orphaned = True
        return self._settled(now)

    def was_absent(self, now: float) -> None:
        """The coordinator has not listened for a while: whoever was silent until now may have spoken."""
        self._listening_since = now

    def tick(self, now: float) -> list[Order]:
        """Time has passed. To be called some twenty times a second."""
        if self._mode is not Mode.OVER:
            self._watch_silence(now)
        if self._mode is Mode.GATHERING:
            self._press(now)
        elif self._mode is Mode.FORMING:
            self._judge(now)
        if self._mode in (Mode.FORMING, Mode.STANDING) and self._plan.meets:
            self._watch_waits(now)
        return self._settled(now)

    def _settled(self, now: float) -> list[Order]:
        """What follows from the state as it is, whatever has happened; then the orders."""
        if not self._plan.meets and self._mode is not Mode.OVER:
            self._compose(now)
        elif self._mode is Mode.STANDING:
            self._consider_regroup(now)
        if self._plan.meets and self._mode is Mode.GATHERING:
            self._try_to_declare(now)
        if self._mode is not Mode.OVER:
            self._fill(now)
        return self._take_orders()

    # -- letters -------------------------------------------------------------------------------------------------------

    def _hear_operator(self, body: Up) -> None:
        if not isinstance(body, Scale):
            wrong = "an operator may only ask for another number of workers"
        elif self._mode is Mode.OVER:
            wrong = "the run is over: its number of workers cannot change any longer"
        elif body.servers is not None and not self._plan.servers:
            wrong = "it has no servers: it was not started with sync='server'"
        elif body.workers is not None and (wrong := self._bounds(body.workers)):
            pass
        elif body.servers is not None:
            self._asked = body.workers
            self._order(Servers(body.servers))
            return
        else:
            wrong = "" if body.workers is None else self._rescale(body.workers)
        self._order(Tell(OPERATOR, Refused(wrong) if wrong else Welcome()))

    def _hear_answered(self, wrong: str) -> None:
        workers, self._asked = self._asked, None
        if not wrong and workers is not None:
            wrong = self._rescale(workers)
        self._order(Tell(OPERATOR, Refused(wrong) if wrong else Welcome()))

    def _hear_process(self, process: Process, body: Up, now: float) -> None:
        match body:
            case Beat():
                self._learn_term(body.term, now)
                self._hear_beat(process, body, now)
            case Ready():
                self._hear_ready(process, body, now)
            case Formed():
                self._hear_formed(process, body)
            case Unreached():
                self._hear_unreached(process, body, now)
            case Done():
                self._hear_done()
            case Scale():
                self._order(Tell(process.name, Refused("a worker cannot ask for another number of workers")))
            case _:
                pass

    def _hear_ready(self, process: Process, body: Ready, now: float) -> None:
        self._learn_term(body.term, now)
        if self._kept.complete:
            self._order(Tell(process.name, Finish()))
        elif process.leaving:
            self._order(Tell(process.name, Leave("the run goes on with fewer workers")))
        elif process.refused:
            return
        elif self._is_living(process) and not self._plan.meets:
            self._order(Tell(process.name, Term(self.term, self.members)))
        elif self._is_living(process) and body.term < self.term:
            self._tell_term_again(process)
        else:
            self._note_ready(process, body)
            process.was_ready = True
            process.holds = process.holds or body.holds
            self._kept.held = self._kept.held or body.holds
            if not self._plan.meets:
                self._forgive()
            if self._is_living(process):
                self._member_left(now)

    def _tell_term_again(self, process: Process) -> None:
        """It may or may not have heard of this term. Before it is counted on, it has to have left it behind."""
        if self._mode is Mode.GATHERING:
            self._order_these_out([process], hard=True)
        elif process.formed < self.term:
            self._order(Tell(process.name, Term(self.term, self.members)))

    def _member_left(self, now: float) -> None:
        if self._mode is Mode.STANDING:
            self._gather(now, hard=not self._soft)
        elif self._mode is Mode.FORMING:
            if self._verdict_at is None:
                self._gather(now, hard=True)
            else:
                self._judge(now)

    def _hear_formed(self, process: Process, body: Formed) -> None:
        if body.term != self.term or not self._is_living(process) or process.ready is not None:
            return
        process.formed = body.term
        process.holds = self._kept.held = True
        if self._mode is Mode.GATHERING:
            self._order(Tell(process.name, Regroup(self.term, now=True)))
        elif self._mode is Mode.FORMING:
            self._unformed.discard(process.seat)
            if not self._unformed:
                self._stand()

    def _hear_unreached(self, process: Process, body: Unreached, now: float) -> None:
        if body.term != self.term or not self._is_living(process) or self._mode is not Mode.FORMING:
            return
        # also without names: those that are apart may have yet to say so, and told to leave they never would
        if self._verdict_at is None:
            self._verdict_at = now + VERDICT_TIME
        self._unreached[process.name] = body.names
        self._judge(now)

    def _hear_done(self) -> None:
        self._kept.complete = True
        self._mode = Mode.OVER
        for process in self._counting():
            if process.ready is not None:
                self._order(Tell(process.name, Finish()))
