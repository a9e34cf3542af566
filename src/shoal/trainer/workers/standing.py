"""A worker's part in a run's membership: it leaves groups that break, and comes back in the next term.

Wherever a worker waits for others, a `GroupError` may come out: somebody died, or members change. Where what it does
can be done again, the worker then calls `Standing.regroup`, which returns when it is in a group again, with the state
that counts: its own, or that of a member that is ahead. What the worker does next follows from that state alone
(`Session.position`), so that all members go on at the same place, wherever each of them was when the group broke.
Elsewhere the error ends the run.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from shoal.checkpoint.copying import copy_state
from shoal.cluster.board import Phase, Place
from shoal.cluster.channel.elastic import ElasticChannel
from shoal.cluster.member.control import Control, Finished, Left
from shoal.cluster.messages import Hold, Term, name_of, seat_of
from shoal.comm.group import Group
from shoal.comm.term_store import TermStore, store_of
from shoal.comm.topology import HostsApart
from shoal.core.errors import SAME_ORDER, ConfigError, GroupError
from shoal.core.events import AnyEvent
from shoal.core.version import __version__
from shoal.trainer.workers.fixed import share_equally

if TYPE_CHECKING:
    from shoal.trainer.session import Session

Returned = TypeVar("Returned")
MakeGroup = Callable[[Any, int, int], Group]
"""(store, rank, size) -> the group of a term."""


class _Told(msgspec.Struct, frozen=True, array_like=True):
    """What a member tells the others of a new term."""

    position: int
    stopping: str | None
    by_forward: str
    """Why draws are seeded by the forward, if they are."""
    knowledge: list[bytes | None]
    """What is settled about each exchange."""
    private: int
    """What it has of that which differs between members."""
    unit: float
    """In which targets are counted: 1 until that was agreed on."""
    holds: bool
    """Whether it has the state of the run, and not only what every process starts from."""


class CannotJoin(Left):
    """A worker was to take the place of one that died, and has found that it cannot."""


class Standing:
    """Made by the worker's main function, used by its session, on the main thread."""

    def __init__(
        self,
        control: Control,
        channel: ElasticChannel,
        place: Place,
        seat: int,
        make_group: MakeGroup,
        faults: Any | None = None,
    ) -> None:
        self.seat = seat
        self.term = 0
        self.members: list[int] = [seat]
        """The seats of the members, in order of rank."""
        self.due = False
        """Whether all members are to leave at the end of the step in progress."""
        self._control = control
        self._channel = channel
        self.place = self._place = place
        self._make_group = make_group
        self._store: TermStore | None = None
        self.faults = faults
        self._holds = False
        self._broken = False
        self.joining = False
        """Whether it has come into a run that is under way, and takes part once it has come to what the others do."""
        self.whole = False
        """Whether all that this worker does can be done again, not only the loop that it is in."""
        self.redoes = False
        """Whether what this worker does now can be done again."""
        self.finished = False
        """Whether all members know that the run is complete."""

    # -- where it is ---------------------------------------------------------------------------------------------------

    @property
    def leaving(self) -> bool:
        """Whether this worker has heard that members are to change."""
        return self._control.leaving

    @property
    def broken(self) -> bool:
        """Whether the group is known to be broken: what is computed now would be in vain."""
        return self._broken

    def computes(self, start: int, stop: int) -> None:
        self._place.computes(start, stop)

    def fault(self, point: str, step: int) -> None:
        """Where a plan of faults may strike."""
        if self.faults is not None:
            self.faults.at(point, worker=self.seat, step=step)

    def confirm(self, step: int | None) -> None:
        """All members have applied this step; with None all that is to be told may be, by anyone: the run is over."""
        if step is not None:
            self._channel.confirm(step)
            return
        self._channel.last_words()

    def committed(self, step: int, spans: Callable[[], Any], digest: Callable[[], bytes]) -> None:
        if self.faults is not None and self.faults.records:
            shares = {self.members[rank]: share for rank, share in enumerate(spans())}
            self.faults.committed(worker=self.seat, term=self.term, step=step, spans=shares, digest=digest)

    # -- changing members ----------------------------------------------------------------------------------------------

    def begin(self, session: Session) -> None:
        """Take part from the first moment on, if the run has not begun; else when `take_part` is called."""
        refused = ""
        try:
            self.joining = self._control.enter(__version__, b"")
        except ConfigError as error:
            refused = str(error)
        if refused:
            # the coordinator has told it to people, and the others go on
            raise Left(refused)
        if not self.joining:
            self.regroup(session)

    def take_part(self, session: Session, signature: Callable[[], str] | None) -> None:
        """This worker has made what it needs for what comes now; `signature` tells that of one worker from another's.

        None: what comes now cannot be done again. Returns when there is a term with this worker in it.
        """
        if signature is None:
            self.refuse_alone("a session.steps loop that cannot be done again (it needs one optimizer, tracked before)")
            self.redo(False)
            share_equally(session)
            session.private.stands()
            return
        self._control.sign(__version__, blake2b(signature().encode(), digest_size=16).digest())
        self.redo(True)
        if self.joining:
            self.regroup(session)
            self.joining = False
        else:
            share_equally(session)

    def redo(self, on: bool) -> None:
        """Whether what this worker does can be done again from now on."""
        self.redoes = on
        self._place.redoable(on or self.whole)

    def refuse_alone(self, what: str) -> None:
        """Raises `Left` in a worker that has yet to join: the others are somewhere else."""
        if self.joining:
            raise CannotJoin(
                f"worker {self.seat} was to take the place of one that died, and cannot: before it comes to the loop "
                f"that the others are in, its function has {what}"
            )

    def regroup(self, session: Session) -> None:
        """Leave the group, if there is one, and come back in the next term, with the state that counts.

        Raises `Left` if this worker is not to go on, and `Finished` if the run turns out to be complete.
        """
        self._place.enter(Phase.RECOVER, session.step)
        self._channel.flush()
        session.rewind()
        self.fault("recover", session.step)
        while True:
            session.leave_group()
            self._place.enter(Phase.RECOVER, session.step)
            term = self._control.await_term(session.position, self._holds, lambda hold: _save(hold, session))
            apart = self._try(term, session)
            if apart is None:
                break
            self._control.unreached(term.number, apart)
        self._control.formed(term.number)
        self.due = False
        session.save_best_overdue()
        self._place.enter(Phase.APPLY, session.step)

    def guard(self, session: Session, work: Callable[[], Returned]) -> Returned | None:
        """What `work` returns; None if the group broke meanwhile, once this worker is in another one."""
        try:
            return work()
        except GroupError as error:
            self.refuse_other_order(error)
        # outside the except block, where nothing holds on to the broken group
        self.regroup(session)
        return None

    @staticmethod
    def refuse_other_order(error: GroupError) -> None:
        """A group that broke because members called different operations would break again: raises that error."""
        if SAME_ORDER in str(error):
            raise error

    def begins_loop(self, number: int) -> None:
        """Steps are counted from the beginning."""
        self._channel.begins_loop(number)

    def farewell(self, session: Session, last: Callable[[], None]) -> None:
        """Do `last`, and return when all members have: whoever is worker 0 by then has done its part of it."""
        try:
            while not self.guard(session, lambda: self._say_farewell(session, last)):
                pass
        except Finished:
            pass  # another one has seen all members come here
        self.finished = True
        self._control.done()
        self._place.enter(Phase.DONE, session.step)
        self.confirm(None)

    def _say_farewell(self, session: Session, last: Callable[[], None]) -> bool:
        session.save_overdue()
        last()
        with session.waiting(Phase.APPLY):
            session.group.barrier()
        return True

    def _try(self, term: Term, session: Session) -> list[str] | None:
        """None once the group of this term stands; else the members that are out of reach, as far as that is known."""
        try:
            self._meet(term, session)
            return None
        except HostsApart as error:
            pairs = error.pairs
        except GroupError:
            pairs = []
        mine = term.members.index(name_of(self.seat))
        others = {first + second - mine for first, second in pairs if mine in (first, second)}
        return [term.members[rank] for rank in sorted(others)]

    def _meet(self, term: Term, session: Session) -> None:
        rank = term.members.index(name_of(self.seat))
        self._broken = False
        store = self._store = store_of(self._control, term.number)
        group = self._make_group(store, rank, len(term.members))

        def revoke(why: str) -> None:
            self._broken = True
            group.revoke(why)

        self._control.watch(term.number, revoke)
        self._place.term(term.number)
        session.take_group(group)
        self._place.enter(Phase.COPY, session.step)
        told = self._agree(group, session)
        self._holds = True
        self.term = term.number
        self.members = [seat for name in term.members if (seat := seat_of(name)) is not None]
        session.rebuild(told[0].knowledge)
        self._channel.speak(rank == 0)

    def _agree(self, group: Group, session: Session) -> list[_Told]:
        drawn, known = session.keyed.keying.by_forward, session.knowledge()
        private, unit, holds = session.private.holding, session.keyed.unit, self._holds and session.course is not None
        mine = _Told(session.position, session.stopping, drawn, known, private, unit, holds)
        told = [msgspec.msgpack.decode(text, type=_Told) for text in group.gather_bytes(msgspec.msgpack.encode(mine))]
        if any(_lacks(other, told[0]) for other in told):
            self._copy(group, session, told[0].position // 2, behind=_lacks(mine, told[0]))
        session.share_private([other.private for other in told])
        # Members that differ in these are all at the place where it was decided: see docs/design/membership.md.
        session.stopping = next((other.stopping for other in told if other.stopping is not None), None)
        session.keyed.keying.by_forward = next((other.by_forward for other in told if other.by_forward), "")
        session.keyed.unit = max(other.unit for other in told)
        return told

    def _copy(self, group: Group, session: Session, step: int, *, behind: bool) -> None:
        tree: Any = None
        if group.rank == 0:
            tree = {"state": session.state(), "events": msgspec.msgpack.encode(self._channel.kept())}

        def at_chunk() -> None:
            self._place.enter(Phase.COPY, session.step)  # anew: there is progress
            self.fault("copy", step)

        copied = copy_state(group, tree, wanted=behind, at_chunk=at_chunk)
        if copied is not None:
            session.load(copied["state"])
            self._channel.adopt(msgspec.msgpack.decode(copied["events"], type=list[AnyEvent]))


def _save(hold: Hold, session: Session) -> None:
    if hold.checkpoint:
        session.save_now()


def _lacks(one: _Told, first: _Told) -> bool:
    """Whether a member needs the state of the first."""
    return one.position < first.position or (first.holds and not one.holds)
