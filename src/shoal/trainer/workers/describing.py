"""What a worker tells of the error that ended it, and where it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from shoal.cluster.channel.messages import Failed
from shoal.cluster.supervisor.failure import NOWHERE, Whereabouts, describe, tell
from shoal.core.errors import ShoalError
from shoal.proof.rehearse import playing

if TYPE_CHECKING:
    from shoal.trainer.session import Session


def describe_here(error: BaseException, session: Session | None) -> Failed:
    """What a worker tells of the error that ended it."""
    rehearsal = playing()
    if rehearsal is not None:
        rehearsal.fell(error)
    return describe(error, _where(session))


def explain(error: Exception, session: Session) -> None:
    """In a process that is a worker itself: add to an error, which leaves as it is, what a supervisor would tell."""
    failed = describe_here(error, session)
    if not isinstance(error, ShoalError):
        # Python prints its traceback itself
        failed = msgspec.structs.replace(failed, traceback="")
    elif not failed.secondary:
        error.worker_traceback = failed.traceback
    tell(error, session.rank, session.workers, failed, None)


def _where(session: Session | None) -> Whereabouts:
    if session is None or session.where is None:
        return NOWHERE
    if session.evaluating:
        return f"in the evaluation after step {session.step}, ", session.step, None
    at = session.where
    own = session.own_of(at)
    if not own:
        return f"in step {at.step + 1} (it has no samples of this batch), ", at.step, None
    positions = at.start + own.start, at.start + own.stop - 1
    return f"in step {at.step + 1} (positions {positions[0]}–{positions[1]} of its epoch), ", at.step, positions
