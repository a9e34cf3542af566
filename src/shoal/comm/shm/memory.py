"""Memory that all members of a host have mapped, for buffers: made anew, or left over from the group before.

Memory that is made anew must be cleared by the kernel, page by page: most of the time of forming a group again. Where
members still have what their former group used, and nothing shows it any longer, they take that, and those that are new
borrow it from them.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.comm.shm.segment import Segment, attach, borrow, create, sweep, sweep_after_death
from shoal.comm.shm.shared import STAGE, Area, Shared

_PIECE = 16 << 20
"""Bytes to clear before looking whether the group is still wanted."""

_NOT_MINE = "none"
"""Of a member that has what its last group left, and cannot use it: it is too small, or a tensor still shows it."""

Gather = Callable[[bytes], list[bytes]]
"""The group's `gather_bytes`."""

_spare: list[Segment] = []
"""What the last group of this process has left: one segment, or none."""


class Memory:
    """The segments of one group's buffers. One thread."""

    def __init__(self, shared: Shared, run: str, warn: Callable[[str], None]) -> None:
        self._shared = shared
        self._run = run
        self._warn = warn
        self._segments: dict[Area, Segment] = {}
        shared.on_break.append(self._sweep)

    def allocate(self, each: int, gather: Gather) -> Area | None:
        """Zeros of `each` bytes for every member; None, on all members, if any of them cannot have it."""
        size = each * self._shared.size
        segment = self._left_over(size, gather) or self._new(size, gather)
        if segment is None:
            return None
        try:
            area = Area(segment, self._shared.size, each)
            segment.hold(self._shared.rank)
            mine = area.rows[self._shared.rank]
            for at in range(0, each, _PIECE):
                self._shared.refuse_broken()
                mine[at : at + _PIECE].zero_()
        except BaseException:
            segment.close()
            raise
        self._segments[area] = segment
        return area

    def release(self, area: Area) -> None:
        self._segments.pop(area).close()

    def close(self) -> None:
        """Leave the largest segment to the group that this process is a member of next."""
        segments, self._segments = sorted(self._segments.values(), key=lambda segment: segment.size), {}
        for segment in segments:
            drop_spare()
            segment.hide()
            if segment.is_hidden():
                segment.let_go_of_all()
            _spare.append(segment)
        if self._shared.revoked:
            sweep()

    def _left_over(self, size: int, gather: Gather) -> Segment | None:
        """The spare of the members, if all that have one have the same, large enough, and nobody uses it any longer."""
        mine = next((spare for spare in _spare if spare.size >= size and spare.is_hidden()), None)
        word = _NOT_MINE if _spare else ""
        if mine is not None:
            mine.let_go_of_all()
            word = mine.offer
        offers = [offer.decode() for offer in gather(word.encode()) if offer]
        if not offers or len({offer.rpartition("/")[2] for offer in offers}) > 1 or _NOT_MINE in offers:
            drop_spare()
            return None
        if mine is None:
            drop_spare()
            mine = _borrowed(offers[0])
        else:
            _spare.clear()
            mine.show()
        # Members of the former group that are none of this one must have ended: they could still write.
        usable = mine is not None and not mine.is_held_by_another()
        if all(gather(b"usable" if usable else b"")):
            return mine
        if mine is not None:
            mine.close()
        return None

    def _new(self, size: int, gather: Gather) -> Segment | None:
        segment, trouble = self._create(size) if self._shared.rank == 0 else (None, "")
        whole = False
        try:
            told = gather(f"{segment.path.name if segment else ''}|{trouble}".encode())[0].decode()
            name, _, trouble = told.partition("|")
            if name and segment is None:
                try:
                    segment = attach(name, size)
                except OSError as error:
                    trouble = str(error)
            troubles = [text.decode() for text in gather(trouble.encode())]
            whole = segment is not None and not any(troubles)
        finally:
            if segment is not None:
                segment.unlink()
                if not whole:
                    segment.close()
        if not whole:
            self._warn(
                f"{next(filter(None, troubles), 'no segment')}: gradients are copied through {STAGE >> 20} MB instead "
                "of being summed in place, which takes about twice the time"
            )
            return None
        return segment

    def _create(self, size: int) -> tuple[Segment | None, str]:
        try:
            return create(self._run, size, look=self._shared.refuse_broken), ""
        except OSError as error:
            return None, why_no_room(size, error)

    def _sweep(self) -> None:
        """Remove what a member leaves that died. Who revokes a group for a death has heard of it some time after it."""
        if self._shared.revoked:
            sweep()
        else:
            sweep_after_death(self._run)


def _borrowed(offer: str) -> Segment | None:
    try:
        return borrow(offer)
    except (OSError, ValueError):
        return None


def drop_spare() -> None:
    """Give up what the last group has left."""
    while _spare:
        _spare.pop().close()


def why_no_room(size: int, error: OSError) -> str:
    return (
        f"/dev/shm has no room for {size / 1e6:.1f} MB of shared memory ({error.strerror or error}; in a container, "
        "raise it with --shm-size)"
    )
