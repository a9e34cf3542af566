"""Rows that forwards write into a buffer, one after the other: queues of keys, of labels, of features.

Every forward of a step begins with the queue, and its pointer, as they were at the beginning of the step. The rows
that it wrote are those that changed, from the first to the last, cyclically; put one after the other in the order of
positions they are what one process would have written. A queue may also be shifted, with what is new at either end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.core.errors import ConfigError

_FRONT, _END = -1, -2
"""In place of the first row, where a queue is shifted: what is new is at its front, or at its end."""


class Queue(NamedTuple):
    """A buffer of rows, after a forward and before it."""

    name: str
    value: Tensor
    start: Tensor


class Written(NamedTuple):
    """What a forward wrote."""

    rows: Tensor
    """With the dimension that counts rows first."""
    axis: int
    """Which dimension of the buffer that is."""
    first: int
    """The row of the buffer with which it begins."""


class _Changed(NamedTuple):
    axis: int
    mask: Tensor
    """For each row, whether it changed."""


def written(queues: Sequence[Queue], samples: int, *, alone: bool) -> list[Written | None]:
    """What a forward wrote into the queues of one module; None for those it left alone.

    `alone`: it is the only one of its step, and what it made of them is right whatever that is.
    Queues of one length are written together: a label that is the one that was there before is written all the same.
    """
    changed = [_changed(queue.value, queue.start) for queue in queues]
    found: list[Written | None] = []
    for queue, own in zip(queues, changed, strict=True):
        along = _along(queue.value, own, changed)
        found.append(None if along is None else _cut_out(queue, along, samples, alone=alone))
    return found


def _changed(value: Tensor, start: Tensor) -> _Changed | None:
    """The rows that changed, along the dimension where they are the smallest part."""
    different = value != start
    if not bool(different.any()):
        return None
    masks = [different.movedim(axis, 0).reshape(size, -1).any(1) for axis, size in enumerate(value.shape)]
    axis = min(range(value.ndim), key=lambda each: float(masks[each].double().mean()))
    return _Changed(axis, masks[axis])


def _along(value: Tensor, own: _Changed | None, changed: Sequence[_Changed | None]) -> _Changed | None:
    """The same, with the rows that changed in other queues of the same length."""
    others = [other for other in changed if other is not None]
    length = None if own is None else own.mask.numel()
    if own is None:
        length = next((other.mask.numel() for other in others if other.mask.numel() in value.shape), None)
    if length is None:
        return None
    masks = [other.mask for other in others if other.mask.numel() == length]
    axis = list(value.shape).index(length) if own is None else own.axis
    return _Changed(axis, torch.stack(masks).any(0))


def _cut_out(queue: Queue, changed: _Changed, samples: int, *, alone: bool) -> Written:
    axis, mask = changed
    rows = queue.value.detach().movedim(axis, 0)
    if bool(mask.all()) and alone:
        return Written(rows.clone(), axis, 0)
    if bool(mask.all()):
        return _shifted(queue, axis, samples)
    first, count = _run(mask)
    index = (torch.arange(count, device=rows.device) + first) % len(mask)
    return Written(rows[index].clone(), axis, first)


def _run(mask: Tensor) -> tuple[int, int]:
    """First row and number of rows of the shortest cyclic stretch that has them all."""
    places = mask.nonzero().flatten().tolist()
    gaps = [(places[number] - places[number - 1] - 1) % len(mask) for number in range(len(places))]
    widest = max(range(len(places)), key=lambda number: gaps[number])
    return places[widest], len(mask) - gaps[widest]


def _shifted(queue: Queue, axis: int, samples: int) -> Written:
    rows, before = queue.value.detach().movedim(axis, 0), queue.start.movedim(axis, 0)
    for count in range(samples, len(rows), samples):
        if torch.equal(rows[count:], before[:-count]):
            return Written(rows[:count].clone(), axis, _FRONT)
        if torch.equal(rows[:-count], before[count:]):
            return Written(rows[-count:].clone(), axis, _END)
    raise ConfigError(
        f"buffers: {queue.name!r} is to be 'concat', which is for rows that a forward writes one after the other; a "
        f"forward of {samples} samples changed all of its {len(rows)} rows. Use 'mean', 'sum' or 'first' for it, or "
        "more rows than a step has samples"
    )


def laid(name: str, start: Tensor, parts: Sequence[Written]) -> Tensor:
    """The buffer after all that forwards wrote, in this order, from what it was before."""
    shifted = {part.first if part.first < 0 else 0 for part in parts}
    if len({part.axis for part in parts}) > 1 or len(shifted) > 1:
        raise ConfigError(
            f"buffers: {name!r} is to be 'concat', and forwards of one step wrote it in different ways (rows and "
            "columns, or at different ends); use 'mean', 'sum' or 'first' for it"
        )
    value = start.clone()
    rows = value.movedim(parts[0].axis, 0)
    if parts[0].first < 0:
        rows.copy_(_pushed(rows, parts))
        return value
    first = Counter(part.first for part in parts).most_common(1)[0][0]
    new = torch.cat([_from(name, first, part, rows) for part in parts])
    skipped = max(0, len(new) - len(rows))
    index = (torch.arange(len(new) - skipped, device=rows.device) + first + skipped) % len(rows)
    rows[index] = new[skipped:]
    return value


def _from(name: str, first: int, part: Written, rows: Tensor) -> Tensor:
    """A part's rows from `first` on: those before its own first were written too, with what was there already."""
    missing = (part.first - first) % len(rows)
    if missing > len(rows) // 2:
        raise ConfigError(
            f"buffers: {name!r} is to be 'concat', and forwards of one step wrote it from row {first} and from row "
            f"{part.first} on; each has to begin where the step began: keep the pointer in a buffer too, not in a "
            "plain attribute"
        )
    index = (torch.arange(missing, device=rows.device) + first) % len(rows)
    return torch.cat([rows[index], part.rows.to(rows.device)]) if missing else part.rows.to(rows.device)


def _pushed(rows: Tensor, parts: Sequence[Written]) -> Tensor:
    """The rows, shifted by what is new."""
    new = [part.rows.to(rows.device) for part in parts]
    if parts[0].first == _FRONT:
        return torch.cat([*new, rows])[: len(rows)]
    return torch.cat([rows, *new])[-len(rows) :]


def rows_of_pointer(start: int, by: int, buffers: Sequence[tuple[Tensor, Tensor]]) -> int:
    """Whether a number that moved from `start` by so much says where rows of a buffer were written, and goes round.

    `buffers` are those beside it, after a forward and before it. The number of rows, or 0.
    """
    for value, before in buffers:
        for length in {size for size in value.shape if 0 <= start < size and 0 <= start + by < size}:
            found = _changed(value, before)
            if found is None or found.mask.numel() != length or by % length == 0:
                continue
            inside = torch.zeros(length, dtype=torch.bool)
            inside[(torch.arange(by % length) + start) % length] = True
            if not bool((found.mask.cpu() & ~inside).any()):
                return length
    return 0
