"""What of a worker's gradient has travelled to a server, until all of it is there. Nothing is believed unchecked."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.core.errors import PayloadError, ShoalError
from shoal.syncs.server.frames import as_tensor
from shoal.syncs.server.messages import FIRST_SERVER, Lease, Part, Push
from shoal.syncs.server.pushcodec import decode_part
from shoal.syncs.server.used import is_used, used_bytes

if TYPE_CHECKING:
    from shoal.syncs.server.setup import Setup


class Unsound(ShoalError):
    """What came cannot be used: it is refused, and whoever sent it is told why."""


def seat_of(sender: str) -> int:
    """Of a worker, by its name. Raises `Unsound`."""
    kind, _, number = sender.partition("-")
    if kind != "worker" or not number.isascii() or not number.isdigit() or len(number) > 7:
        raise Unsound(f"{sender[:40]!r} is not the name of a worker")
    if int(number) >= FIRST_SERVER:
        raise Unsound(f"{sender} has the seat of a server")
    return int(number)


def check_lease(setup: Setup, lease: Lease) -> None:
    """Raises `Unsound` if the run has no such positions."""
    if not 0 <= lease.step < setup.total:
        raise Unsound(f"a lease of step {lease.step}; the run has {setup.total}")
    samples = setup.course.step(lease.step).samples
    if not 0 <= lease.start < lease.stop <= samples:
        raise Unsound(f"a lease of positions {lease.start} to {lease.stop} of step {lease.step}, which has {samples}")


def check_push(setup: Setup, push: Push) -> None:
    """Raises `Unsound` if this cannot be the gradient of a lease."""
    check_lease(setup, push.lease)
    shards = len(setup.cut.shards)
    if not push.shards or len(set(push.shards)) != len(push.shards) or not all(0 <= s < shards for s in push.shards):
        raise Unsound(f"a gradient for the shards {push.shards[:20]}; there are {shards}")
    params = len(setup.params) + len(setup.tables)
    if len(push.used) != used_bytes(params):
        raise Unsound(f"{len(push.used)} bytes say which of {params} parameters are used")
    if push.slot is not None and push.slot not in (0, 1):
        raise Unsound(f"a gradient in slot {push.slot}; there are 0 and 1")
    if not math.isfinite(push.scale):
        raise Unsound(f"a gradient with the scale {push.scale}")


@dataclass
class _Coming:
    """Of one worker: the parts of one lease."""

    peer: bytes
    lease: Lease
    parts: dict[int, dict[tuple[int, int], tuple[bool, memoryview]]] = field(default_factory=dict)
    """For each shard, by first and last byte: whether it is encoded, and the frame."""
    push: Push | None = None
    """If that came before some of the parts."""


class Intake:
    """Collects the parts of gradients. Each worker has one lease on its way; with the next one the last is dropped."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._coming: dict[str, _Coming] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def part(self, peer: bytes, sender: str, part: Part, frames: list[memoryview]) -> Push | None:
        """Keep a part. Returns the push that waited for it, if it is whole now. Raises `Unsound`."""
        seat_of(sender)
        self._check(part, frames)
        coming = self._of(peer, sender, part.lease)
        known = coming.parts.setdefault(part.shard, {})
        key = (part.start, part.stop)
        if key not in known and any(part.start < stop and start < part.stop for start, stop in known):
            self._coming.pop(sender)
            raise Unsound(f"bytes {part.start} to {part.stop} of shard {part.shard} came twice, cut differently")
        known[key] = (part.encoded, frames[0])
        if coming.push is not None and self._is_whole(coming, coming.push):
            return coming.push
        return None

    def whole(self, peer: bytes, sender: str, push: Push) -> bool:
        """Whether all parts of this push are there; if not, `part` will tell when they are. Raises `Unsound`."""
        coming = self._of(peer, sender, push.lease)
        coming.push = push
        return self._is_whole(coming, push)

    def gradient(self, sender: str, shard: int) -> Tensor:
        """The bytes of a shard's gradient, valid until the next call. Raises `Unsound` if a part is damaged."""
        parts = self._coming[sender].parts[shard]
        place = self._setup.cut.shards[shard]
        size = place.stop - place.start
        if len(parts) == 1:
            ((start, stop), (encoded, frame)) = next(iter(parts.items()))
            if (start, stop) == (place.start, place.stop) and not encoded:
                return as_tensor(frame)
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        whole = self._scratch[:size].zero_()
        for (start, stop), (encoded, frame) in parts.items():
            out = whole[start - place.start : stop - place.start]
            if encoded:
                self._decode(frame, out)
            else:
                out.copy_(as_tensor(frame))
        return whole

    def drop(self, sender: str) -> None:
        """Forget what has come of this worker's gradient."""
        self._coming.pop(sender, None)

    def _of(self, peer: bytes, sender: str, lease: Lease) -> _Coming:
        coming = self._coming.get(sender)
        if coming is None or coming.lease != lease or coming.peer != peer:
            coming = self._coming[sender] = _Coming(peer, lease)
        return coming

    def _check(self, part: Part, frames: list[memoryview]) -> None:
        check_lease(self._setup, part.lease)
        if not 0 <= part.shard < len(self._setup.cut.shards):
            raise Unsound(f"a part of shard {part.shard}; there are {len(self._setup.cut.shards)}")
        place = self._setup.cut.shards[part.shard]
        if not place.start <= part.start < part.stop <= place.stop:
            raise Unsound(
                f"a part of bytes {part.start} to {part.stop}; shard {part.shard} has {place.start} to {place.stop}"
            )
        if len(frames) != 1:
            raise Unsound(f"a part with {len(frames)} frames; it has one")
        if not part.encoded and frames[0].nbytes != part.stop - part.start:
            raise Unsound(f"a part of {part.stop - part.start} bytes came with {frames[0].nbytes}")
        if part.encoded and (part.start % 4 or part.stop % 4):
            raise Unsound(f"an encoded part of bytes {part.start} to {part.stop}, which are not whole numbers")

    def _is_whole(self, coming: _Coming, push: Push) -> bool:
        """Bytes between parameters, and of parameters that were not used, need not travel."""
        if sum(len(coming.parts.get(shard, ())) for shard in push.shards) < push.parts:
            return False
        return all(self._covers(coming.parts.setdefault(shard, {}), push, shard) for shard in push.shards)

    def _covers(self, parts: dict[tuple[int, int], tuple[bool, memoryview]], push: Push, shard: int) -> bool:
        cut = self._setup.cut
        reach = sorted(parts)
        for piece in cut.shards[shard].pieces:
            if not is_used(push.used, piece.param):
                continue
            item = cut.dtypes[piece.param].itemsize
            at, end = (cut.offsets[piece.param] + edge * item for edge in (piece.start, piece.stop))
            for start, stop in reach:
                if start <= at < stop:
                    at = stop
            if at < end:
                return False
        return True

    def _decode(self, frame: memoryview, out: Tensor) -> None:
        try:
            decode_part(self._setup.codec, frame, out)
        except PayloadError as error:
            raise Unsound(str(error)) from error
