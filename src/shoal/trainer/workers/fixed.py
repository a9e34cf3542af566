"""The part of a worker whose group stays what it is: under a launcher, and where servers have the state.

What `shoal.trainer.workers.standing.Standing` is where members may change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from shoal.cluster.board import Place
    from shoal.core.errors import GroupError
    from shoal.trainer.session import Session

Returned = TypeVar("Returned")


class Fixed:
    """A worker whose group stays as it is. One that breaks is an error of the run."""

    term = 1
    due = leaving = broken = joining = finished = whole = redoes = False

    def __init__(self, seat: int, place: Place | None = None) -> None:
        self.seat = seat
        self.place = place
        self.faults: Any | None = None

    def computes(self, start: int, stop: int) -> None:
        if self.place is not None:
            self.place.computes(start, stop)

    def fault(self, point: str, step: int) -> None: ...

    def confirm(self, step: int | None) -> None: ...

    def committed(self, step: int, spans: Callable[[], Any], digest: Callable[[], bytes]) -> None: ...

    def take_part(self, session: Session, signature: Callable[[], str] | None) -> None:
        share_equally(session)
        session.private.stands()

    def redo(self, on: bool) -> None: ...

    def begins_loop(self, number: int) -> None: ...

    def refuse_other_order(self, error: GroupError) -> None:
        raise error

    def refuse_alone(self, what: str) -> None: ...

    def regroup(self, session: Session) -> None:
        raise AssertionError("the members of this run do not change")

    def guard(self, session: Session, work: Callable[[], Returned]) -> Returned | None:
        return work()

    def farewell(self, session: Session, last: Callable[[], None]) -> None:
        last()


def share_equally(session: Session) -> None:
    """All members are the same as they were, or have read the same checkpoint: each has its part of what was kept."""
    session.share_private([session.private.holding] * session.workers)
