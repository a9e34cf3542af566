"""The worker's end of the coordinator: a thread that beats and listens whatever the main thread does.

    main thread                          shoal-control
    enter, await_term, formed, ...  -->  sends letters, repeats what has no answer yet
    returns, raises             <--      hears terms, regroups, leaves
    its group                   <--      revoke, when the term is broken

Sockets belong to the thread that uses them: the control thread has one, and the main thread one for the term's store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shoal.cluster.access import Access
from shoal.cluster.board import Place
from shoal.cluster.member.dispatch import Dispatch
from shoal.cluster.member.questions import Questions
from shoal.cluster.member.writing import Writing
from shoal.cluster.messages import (
    Done,
    Down,
    Finish,
    Formed,
    Hello,
    Hold,
    Lasting,
    Leave,
    Ready,
    Refused,
    Regroup,
    Term,
    Unreached,
    Welcome,
    name_of,
)
from shoal.core.errors import ConfigError, ShoalError

ENTER_SECONDS = 10.0
_ORPHAN_SECONDS = 10.0
"""Without the supervisor, nobody restarts a coordinator or replaces a member: then waiting must have an end."""
_SLICE_SECONDS = 0.1
"""Of waiting on the main thread, between which handlers of signals may raise."""
_CLOSE_SECONDS = 2.0

Revoke = Callable[[str], None]


class Left(BaseException):
    """The worker is not needed any longer, or must not go on: it should end, without a word to the others.

    Not an `Exception`: code of users that catches those must not keep the worker.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Finished(BaseException):
    """The run is complete: the others have seen that all were. Not an `Exception`, for the same reason."""


class Control:
    """A worker's connection to the coordinator of its run.

    Made, used and closed by the main thread of the process; only `revoke` is called from another thread, which
    belongs to this object. `lifeline` is watched for the end of the other side, never read: it must stay open until
    `close` returns.
    """

    def __init__(self, access: Access, seat: int, place: Place, lifeline: int) -> None:
        self._access = access
        self.name = name_of(seat)
        self._writing = Writing(access.run, self.name)
        self._changed = threading.Condition()
        self._revoking = threading.RLock()
        """Held during a call of `revoke`, so that `watch` returns only when none is under way."""
        self._watched: tuple[int, Revoke] | None = None
        self._answer: Welcome | Refused | None = None
        self._end: Leave | Finish | None = None
        self._hold: Hold | None = None
        self._offered: Term | None = None
        self._told = 0
        """The newest term that was heard of."""
        self._taken = 0
        self._broken = 0
        """The newest term that must be left at once."""
        self._soft = 0
        self._questions: Questions | None = None
        self._dispatch = Dispatch(access, self._writing, place, lifeline, self._hear, self._wake)
        self._dispatch.start()

    # -- main thread ---------------------------------------------------------------------------------------------------

    def enter(self, version: str, signature: bytes) -> bool:
        """Present this process to the coordinator; whether the run is under way already.

        Raises `ConfigError` with the coordinator's reason if it refuses, or if none answers; `Left` and `Finished`.
        """
        self._dispatch.begin(Hello(version, signature, self._dispatch.pid))
        until = time.monotonic() + ENTER_SECONDS
        with self._changed:
            while self._answer is None:
                self._refuse_to_wait_in_vain()
                if time.monotonic() > until:
                    where = self._dispatch.endpoint or f"the endpoint that {self._access.folder} should name"
                    raise ConfigError(
                        f"no answer from the coordinator at {where}: "
                        "is the run still going on, and is it this run's key?"
                    )
                self._changed.wait(_SLICE_SECONDS)
            answer = self._answer
        if isinstance(answer, Refused):
            raise ConfigError(answer.why)
        return answer.begun

    def sign(self, version: str, signature: bytes) -> None:
        """This is what the process has made since it came in: one that made something else is told to leave."""
        self._dispatch.begin(Hello(version, signature, self._dispatch.pid))

    def await_term(self, position: int, holds: bool, on_hold: Callable[[Hold], None] | None = None) -> Term:
        """Leave the term, and wait for the next one. `on_hold` is called, on this thread, with each new `Hold`.

        Raises `Left` or `Finished`.
        """
        with self._changed:
            self._hold = None
            self._dispatch.stand(Ready(self._told, position, holds))
        while True:
            with self._changed:
                while self._offered is None and self._hold is None:
                    self._refuse_to_wait_in_vain()
                    self._changed.wait(_SLICE_SECONDS)
                self._refuse_to_wait_in_vain()
                hold, self._hold = self._hold, None
                if self._offered is not None and self._broken < self._offered.number:
                    return self._take(self._offered)
                if self._offered is not None:
                    # broken before it was taken: wait for the one after it
                    self._offered = None
                    self._dispatch.stand(Ready(self._told, position, holds))
            if hold is not None and on_hold is not None:
                on_hold(hold)

    def attend(self) -> None:
        """Take part, where members need not meet. Returns at once: what a worker then does, others tell it."""
        self._dispatch.stand(Ready(self._told, 0, holds=False))

    def watch(self, term: int, revoke: Revoke | None) -> None:
        """Have `revoke` called, once, when this term is over; at once, and on this thread, if it is already.

        It is called from the control thread with the reason, must not raise, and must not wait for this thread. None
        ends the watch: no call is under way once this returns.
        """
        with self._revoking:
            with self._changed:
                self._watched = None if revoke is None else (term, revoke)
            self._revoke_what_is_over()

    @property
    def leaving(self) -> bool:
        """Whether all members should leave the current term together, at the end of a step."""
        with self._changed:
            return 0 < self._taken <= self._soft

    @property
    def orphaned(self) -> bool:
        """Whether the supervisor is gone."""
        return self._dispatch.orphaned_for() is not None

    def formed(self, term: int) -> None:
        """The group of this term stands, and this worker has the state of its members."""
        self._dispatch.claim(Formed(term))

    def unreached(self, term: int, names: list[str]) -> None:
        """The group of this term did not come to stand: these members could not be reached, as far as is known."""
        self._dispatch.claim(Unreached(term, names))

    def done(self) -> None:
        """The run is complete, and all members know it."""
        self._dispatch.claim(Done())

    def questions(self) -> Questions:
        """To the store of a new term, for this thread. That of the term before must not be used any longer."""
        endpoint = self._access.endpoint() or self._dispatch.endpoint
        if self._questions is None:
            self._questions = Questions(endpoint, self._access.keys, self._writing)
        else:
            self._questions.reconnect_if_moved(endpoint)
        self._dispatch.forget_keys()
        return self._questions

    def remember_key(self, key: Lasting) -> None:
        """What a coordinator that starts anew is told again."""
        self._dispatch.remember_key(key)

    def why_over(self, term: int) -> str | None:
        """Why this term is over, for people; None while it may go on. Any thread."""
        with self._changed:
            return self._why_over(term)

    def close(self) -> None:
        """End the thread and let go of the connections. Calling it again does nothing."""
        self._dispatch.close(_CLOSE_SECONDS)
        if self._questions is not None:
            self._questions.close()
            self._questions = None

    # -- either thread, with the lock ----------------------------------------------------------------------------------

    def _refuse_to_wait_in_vain(self) -> None:
        if isinstance(self._end, Leave):
            raise Left(self._end.why)
        if self._end is not None:
            raise Finished("the run is complete")
        alone = self._dispatch.orphaned_for()
        if alone is not None and alone > _ORPHAN_SECONDS:
            raise Left(f"the supervisor is gone, and after {alone:.0f} s the workers have not come together again")
        trouble = self._dispatch.trouble
        if trouble is not None:
            raise ShoalError(f"the thread that speaks with the coordinator has ended: {trouble}")

    def _take(self, term: Term) -> Term:
        self._offered = self._hold = None
        self._taken = term.number
        return term

    def _why_over(self, term: int) -> str | None:
        if self._end is not None:
            return "this worker leaves the run" if isinstance(self._end, Leave) else "the run is complete"
        if self._broken >= term:
            return f"term {term} is broken: its members regroup"
        if self._told > term:
            return f"term {term} is over: term {self._told} was declared"
        return None

    # -- control thread ------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _hear(self, body: Down) -> None:
        with self._changed:
            self._note(body)
            self._changed.notify_all()
        with self._revoking:
            self._revoke_what_is_over()

    def _note(self, body: Down) -> None:
        if isinstance(body, Term):
            self._note_term(body)
        elif isinstance(body, Regroup) and body.now:
            self._broken = max(self._broken, body.term)
            self._told = max(self._told, body.term)
        elif isinstance(body, Regroup):
            self._soft = max(self._soft, body.term)
        elif isinstance(body, Hold):
            self._hold = body
        elif isinstance(body, Leave | Finish):
            self._end = self._end or body
        elif isinstance(body, Refused) and isinstance(self._answer, Welcome):
            self._end = self._end or Leave(body.why)
        elif isinstance(body, Welcome | Refused):
            self._answer = self._answer or body

    def _note_term(self, term: Term) -> None:
        if term.number <= self._told:
            return
        self._told = term.number
        if self.name in term.members:
            self._offered = term
            self._dispatch.settle(Ready)

    def _revoke_what_is_over(self) -> None:
        with self._changed:
            if self._watched is None:
                return
            term, revoke = self._watched
            why = self._why_over(term)
            if why is None:
                return
            self._watched = None
        revoke(why)
