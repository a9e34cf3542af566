"""What a person is told of a run that goes on, but is not what one process would do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.events import Notice

if TYPE_CHECKING:
    from shoal.trainer.session import Session


def say(session: Session, text: str) -> None:
    """Tell it: what was seen, why the result is another one, and what to write instead.

    Every worker says what it finds, and worker 0 is heard: all run the same code.
    """
    session.channel.emit(Notice(step=session.step, text=text))
