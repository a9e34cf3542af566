"""How workers of one host come to share memory, or all learn why they cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from shoal.comm.gathering import gather
from shoal.comm.shm import segment, semaphores
from shoal.comm.shm.memory import why_no_room
from shoal.comm.shm.segment import Segment
from shoal.comm.shm.shared import Channel, Layout, Shared
from shoal.core.errors import GroupError

_PROOF_SECONDS = 20.0
_MOST_TROUBLE = 1000
"""Characters: everybody hears those of all."""
_PROOF = -1
"""The number of the proof among the notes: it is no operation."""


def meet(
    store: Any,
    rank: int,
    size: int,
    members: Sequence[int],
    run: str,
    *,
    timeout: timedelta,
    warn: Callable[[str], None],
) -> Shared | str:
    """What worker `rank` shares with the workers of its host, `members`; or why not, the same on all `size` workers.

    Before anyone relies on it, each member shows the others a number through the memory and the semaphores. Workers
    that are alone on their host, and have nothing to share, take part in deciding.
    """
    control: Segment | None = None
    me = members.index(rank)
    layout = Layout(len(members))
    trouble = ""
    try:
        try:
            control = _enter(store, members, me, layout, run, warn)
            control.hold(me)
        except (OSError, GroupError) as error:
            trouble = str(error)
        trouble = _agree(store, "there", rank, size, trouble)
        if control is not None:
            control.unlink()
        if not trouble and control is not None:
            shared = Shared(me, [f"worker {member}" for member in members], control, _PROOF_SECONDS)
            trouble = _agree(store, "proven", rank, size, _prove(shared))
            if not trouble:
                shared.timeout = timeout.total_seconds()
                control = None
                return shared
        return trouble
    finally:
        if control is not None:
            control.unlink()
            control.close()


def _enter(
    store: Any, members: Sequence[int], me: int, layout: Layout, run: str, warn: Callable[[str], None]
) -> Segment:
    """The control segment of this host: made by its first member, and told to the others through the store."""
    key = f"segment/{members[0]}"
    if me == 0:
        try:
            created = _create(layout, run, warn)
        except BaseException:
            store.set(key, b"")
            raise
        try:
            store.set(key, created.path.name.encode())
        except BaseException:
            created.unlink()
            created.close()
            raise
        return created
    name = store.get(key).decode()
    if not name:
        raise GroupError("")
    return segment.attach(name, layout.size)


def _create(layout: Layout, run: str, warn: Callable[[str], None]) -> Segment:
    trouble = semaphores.why_not()
    if trouble:
        raise GroupError(trouble)
    swept = segment.sweep()
    if swept:
        warn(f"removed shared memory that runs left behind which are dead: {', '.join(swept)}")
    try:
        created = segment.create(run, layout.size)
    except OSError as error:
        raise GroupError(why_no_room(layout.size, error)) from None
    try:
        layout.prepare(created)
    except BaseException:
        created.unlink()
        created.close()
        raise
    return created


def _agree(store: Any, word: str, rank: int, size: int, trouble: str) -> str:
    """What is wrong with any of the workers; the same on all of them."""
    told = [text.decode()[1:] for text in gather(store, word, rank, size, f"-{trouble[:_MOST_TROUBLE]}".encode())]
    return next((f"worker {member}: {text}" for member, text in enumerate(told) if text), "")


def _prove(shared: Shared) -> str:
    """Show the others a number and read theirs; what is wrong, if anything is."""
    ready = Channel(shared, 0)
    with suppress(GroupError):
        shared.note(_PROOF, 1000 + shared.rank, shared.rank)
        ready.meet()
        wrong = [peer for peer in shared.peers if shared.noted(_PROOF, peer) != 1000 + peer]
        ready.meet()
        if wrong:
            return f"does not see what {shared.name(wrong[0])} wrote: the memory is not shared in order"
        return ""
    return shared.broken
