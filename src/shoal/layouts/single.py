"""Layout `single`: every worker holds the whole model.

Gradients are the sync's matter. What is left to a replica is its *buffers*: state that a forward changes, such as the
running statistics of BatchNorm. Each forward of a step starts from the values at the beginning of the step, and the
new value is made of what all of them came to, so that replicas stay equal: as a rule the mean, weighted by samples.
Whole numbers are counted (`counting`), and a user may say what is meant (`words`). With one forward in a step the
value is what that forward made, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from shoal.core.errors import ConfigError
from shoal.layouts.counting import SAMPLES, SINGLE, UNSURE, Move, Way, judge, strays
from shoal.layouts.looking import STEPS, Look
from shoal.layouts.merging import Merge, moved
from shoal.layouts.naming import name_counted, name_looked
from shoal.layouts.rows import Queue, Written, laid, rows_of_pointer, written
from shoal.layouts.totals import Sums, Totals
from shoal.layouts.words import CONCAT, FIRST, MEAN, SUM, Word, read_words

_MOST_STRAYS = 3
"""Times that a worker has what a buffer counts judged anew."""
_STATISTICS = "running_mean", "running_var"


def uses_batch_statistics(module: nn.Module) -> bool:
    """Whether a forward of this module depends on which samples are computed together."""
    return any(isinstance(part, _BatchNorm) and part.training for part in module.modules())


def least_samples(model: nn.Module) -> int:
    """That must be computed together: one sample alone has no variance, and BatchNorm fails."""
    return 2 if uses_batch_statistics(model) else 1


class Change(NamedTuple):
    """What forwards made of a buffer, for all to know.

    `amount` is what they add to its sum (see `Merge`). For whole numbers that are counted it is how far one forward
    moved them, and `place` is (rows,) of a `Move`; for rows it is what one wrote, and `place` is (axis, first).
    """

    buffer: int
    first: int
    """Position in the step, of the first of its samples."""
    samples: int
    forwards: int
    amount: Tensor
    place: tuple[int, ...] = ()


class Slot(NamedTuple):
    module: nn.Module
    key: str
    names: tuple[str, ...]
    """What it may be called; the first one is for messages."""


class Buffers:
    """The buffers of some modules over a step. `known` are those that all workers have agreed to merge in each step."""

    def __init__(self, modules: Iterable[nn.Module] | Mapping[str, nn.Module]) -> None:
        self._slots = list(_slots(modules))
        self.known: list[int] = []
        self._words: dict[int, Word] = {}
        self._ways: dict[int, Way] = {}
        self._merges = [self._merge(number) for number in range(len(self._slots))]
        self._watched = list(range(len(self._slots)))
        self._start: dict[int, Tensor] = {}
        self._marks: list[tuple[int, int]] = []
        self._sums = Sums({}, {})
        self._means: list[int] = []
        self._others: list[int] = []
        self._changes: list[Change] = []
        self._moves: list[Change] = []
        self._last: dict[int, Tensor] = {}
        self._strays: dict[int, int] = {}
        self._looks: dict[int, Look] = {}
        self._looked = 0
        self._said: set[int] = set()
        self._texts: list[str] = []
        self._forwards = self._taken = self._covered = self._samples = 0
        self._strayed = False

    # -- what they are, and what is said of them -----------------------------------------------------------------------

    def use(self, words: Any) -> None:
        """Take what a user says of them, before the first step. Raises `ConfigError`."""
        called = {name: self._value(number) for number, slot in enumerate(self._slots) for name in slot.names}
        found = read_words(words, called)
        self._words = {
            number: found[name] for number, slot in enumerate(self._slots) for name in slot.names if name in found
        }
        self._merges = [self._merge(number) for number in range(len(self._slots))]
        self._watched = sorted({*self._watched, *self._words})
        self._start = {}  # lays everything anew

    @property
    def queues(self) -> list[str]:
        """The names of those whose rows are put one after the other."""
        return [self._name(number) for number in self._worded(CONCAT)]

    def _merge(self, number: int) -> Merge:
        value = self._value(number)
        whole = not value.is_floating_point()
        kind = SUM if self._ways.get(number, Way()).kind == SAMPLES else MEAN
        wide = value.dtype == torch.float64 or (whole and not self._flaglike(number))
        return Merge(self._words.get(number, Word(kind)), whole, wide)

    def _flaglike(self, number: int) -> bool:
        """Whether it is known what it is: one that says whether something was done, or the counter of a norm."""
        slot = self._slots[number]
        return self._value(number).dtype == torch.bool or (
            isinstance(slot.module, _NormBase) and slot.key == "num_batches_tracked"
        )

    def _counted(self, number: int) -> bool:
        """Whether it has to be found out what it counts."""
        return self._merges[number].whole and number not in self._words and not self._flaglike(number)

    def _kind(self, number: int) -> str:
        return self._merges[number].word.kind

    def _name(self, number: int) -> str:
        return self._slots[number].names[0]

    def _value(self, number: int) -> Tensor:
        slot = self._slots[number]
        value = slot.module._buffers[slot.key]
        assert value is not None
        return value

    def _place(self, number: int) -> Tensor:
        """What to write into between forwards.

        A graph of an earlier phase that holds a buffer is refused by torch once that was changed, and rightly so: it
        would go back through other values. The statistics of norms are no values that a graph in train mode goes back
        through, and torch itself changes them uncounted.
        """
        slot, value = self._slots[number], self._value(number)
        return value.data if isinstance(slot.module, _NormBase) and slot.key in _STATISTICS else value

    def _mark(self, number: int) -> tuple[int, int]:
        value = self._value(number)
        return id(value), value._version

    @property
    def sizes(self) -> tuple[int, int]:
        """Elements that `known` buffers take in the sums of the step that is open, in single and double precision."""
        return self._sums.sizes

    # -- a step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def open(self, samples: int) -> None:
        """Begin a step (or a phase of one) of so many samples over all workers."""
        self._looked += self._covered > 0 and not self._alone()
        self._changes, self._moves, self._strayed = [], [], False
        self._forwards = self._taken = self._covered = 0
        self._samples = samples
        if not self._slots:
            return
        # all buffers in the first step, those that changed before from then on
        if self._start.keys() != set(self._watched) or any(
            start.shape != self._value(number).shape for number, start in self._start.items()
        ):
            self._start = {number: torch.empty_like(self._value(number)) for number in self._watched}
            self._sums = Sums({}, {})
        if self._watched:
            torch._foreach_copy_(list(self._start.values()), [self._value(number) for number in self._watched])
        if self._sums.of != self.known:
            merges = {number: self._merges[number] for number in self.known}
            self._sums = Sums(merges, {number: self._value(number) for number in self.known})
        self._sums.clear()
        self._means = [number for number in self._sums.parts if self._kind(number) == MEAN]
        self._others = [number for number in self._sums.parts if self._kind(number) != MEAN]

    @torch.no_grad()
    def before_forward(self) -> None:
        """Put the buffers back to the beginning of the step."""
        if not self._slots:
            return
        if self._forwards and self._watched:
            torch._foreach_copy_([self._place(number) for number in self._watched], list(self._start.values()))
        self._forwards += 1
        self._marks = [self._mark(number) for number in range(len(self._slots))]

    @torch.no_grad()
    def rewind(self) -> None:
        """Undo what forwards of the step in progress have made of the buffers."""
        if self._forwards and self._watched:
            torch._foreach_copy_([self._place(number) for number in self._start], list(self._start.values()))
        self._forwards = 0

    @torch.no_grad()
    def after_forward(self, start: int, samples: int) -> None:
        """Take in what the forward of these samples, the first of which is at this place in the step, made of them."""
        first = start == 0 and not self._taken
        self._taken += 1
        self._covered += samples
        if not self._slots:
            return
        self._refuse_new_shapes()
        self._add_known(samples, first=first)
        self._watch_moves(start, samples)
        changed = self._changed()
        for number in changed:
            self._changes.append(self._change(number, start, samples, first=first))
        if first:
            # it counts also where it changes nothing
            told = {*self._sums.parts, *changed}
            unknown = [number for number in self._worded(FIRST) if number not in told]
            self._changes += [self._change(number, start, samples, first=True) for number in unknown]
        self._note_rows(start, samples)
        if samples < self._samples and self._looked < STEPS:
            self._look(samples, [*self._means, *changed])

    def _add_known(self, samples: int, *, first: bool) -> None:
        self._sums.add(self._means, [self._amount(number) for number in self._means], samples)
        for number in self._others:
            value, start = self._value(number).detach(), self._start.get(number)
            self._sums.add([number], [self._merges[number].amount(value, start, samples, first=first)], 1)

    def _amount(self, number: int) -> Tensor:
        """What is merged of it, for a mean: its value, or how far it moved."""
        value = self._value(number).detach()
        return (moved(value, self._start.get(number)) if self._merges[number].whole else value).flatten()

    def _watch_moves(self, start: int, samples: int) -> None:
        """Whether known whole numbers move as they were judged to."""
        for number in filter(self._counted, self._sums.parts):
            change = self._change(number, start, samples, first=False)
            self._moves.append(change)
            way, move = self._ways.get(number, Way()), _move(change)
            told = self._strays.get(number, 0)
            if way.kind == UNSURE:
                self._strayed |= samples < self._samples and bool(move.by.any())
            elif told < _MOST_STRAYS and strays(way, move, self._last.get(number)):
                self._strays[number] = told + 1
                self._strayed = True
            if bool(move.by.any()):
                self._last[number] = move.by

    def _change(self, number: int, at: int, samples: int, *, first: bool) -> Change:
        value, start = self._value(number).detach(), self._start.get(number)
        if self._counted(number):
            by = moved(value, start)
            return Change(number, at, samples, 1, by, (self._points_into(number, by),))
        # a step of one forward: its value, unrounded
        weight = 1 if samples == self._samples else samples
        return Change(number, at, samples, 1, self._merges[number].amount(value, start, weight, first=first))

    def _points_into(self, number: int, by: Tensor) -> int:
        """The rows that this is a pointer into, by what other buffers of its module have become; 0 if it is none."""
        start = self._start.get(number)
        if by.numel() != 1 or start is None or self._ways.get(number, Way()).kind not in (UNSURE, SINGLE):
            return 0
        module = self._slots[number].module
        others = [other for other, slot in enumerate(self._slots) if slot.module is module and other != number]
        if any(self._merges[other].word.modulo for other in others):
            return 0  # that one is the pointer
        pairs = [(self._value(other), self._start[other]) for other in others if other in self._start]
        return rows_of_pointer(int(start), int(by), pairs)

    def _worded(self, kind: str) -> list[int]:
        return [number for number, word in self._words.items() if word.kind == kind]

    def _note_rows(self, start: int, samples: int) -> None:
        by_module: dict[int, list[int]] = {}
        for number in self._worded(CONCAT):
            by_module.setdefault(id(self._slots[number].module), []).append(number)
        for numbers in by_module.values():
            queues = [Queue(self._name(each), self._value(each).detach(), self._start[each]) for each in numbers]
            parts = written(queues, samples, alone=samples == self._samples)
            for number, found in zip(numbers, parts, strict=True):
                if found is not None:
                    self._changes.append(
                        Change(number, start, samples, 1, found.rows.contiguous(), (found.axis, found.first))
                    )

    def _look(self, samples: int, numbers: Sequence[int]) -> None:
        for number in numbers:
            start = self._start.get(number)
            if number in self._said or start is None or not self._merges[number].plain or number in self._words:
                continue
            word = self._looks.setdefault(number, Look()).see(self._value(number).detach(), start, samples)
            if word is not None:
                self._say(number, name_looked(self._name(number), word))

    def _say(self, number: int, text: str) -> None:
        if number not in self._said:
            self._said.add(number)
            self._texts.append(text)

    def notices(self) -> list[str]:
        """What a person should know of them, each once."""
        texts, self._texts = self._texts, []
        return texts

    def _refuse_new_shapes(self) -> None:
        for number, start in self._start.items():
            if self._value(number).shape != start.shape:
                slot = self._slots[number]
                raise ConfigError(
                    f"the buffer {slot.key!r} of a {type(slot.module).__name__} changes its shape in the forward, from "
                    f"{tuple(start.shape)} to {tuple(self._value(number).shape)}, so workers cannot merge it; "
                    "keep what "
                    "is only a cache in a plain attribute, not in a buffer"
                )

    def _changed(self) -> list[int]:
        """Buffers outside `known` that the forward changed, and all others of the same modules; not those of rows.

        Torch counts changes in place, but not those that its own kernels make: batch norm moves its counter by an
        operation and its statistics behind torch's back. What is watched is therefore compared by value as well.
        """
        touched = set()
        for number, mark in enumerate(self._marks):
            if number not in self._sums.parts and not (number in self.known and self._kind(number) == CONCAT):
                start = self._start.get(number)
                if self._mark(number) != mark or (start is not None and not torch.equal(self._value(number), start)):
                    touched.add(id(self._slots[number].module))
        if not touched:
            return []
        return [
            at
            for at, slot in enumerate(self._slots)
            if id(slot.module) in touched and at not in self._sums.parts and self._kind(at) != CONCAT
        ]

    # -- the exchange --------------------------------------------------------------------------------------------------

    def take_sums(self) -> Totals:
        """The totals of the known buffers so far, flat, in order; counting starts anew."""
        return self._sums.take()

    @property
    def news(self) -> bool:
        """Whether there is something that the workers have to agree on, with the changes of all of them."""
        return bool(self._changes) or self._strayed

    @property
    def changes(self) -> list[Change]:
        """What the forwards since `open` made of buffers, as `learn` wants it from all of them."""
        return [*self._changes, *self._moves]

    def summed_changes(self) -> list[Change]:
        """The same, with those in one that can be added up."""
        sums: dict[int, Change] = {}
        others = []
        for change in self._changes:
            before = sums.get(change.buffer)
            if change.place:
                others.append(change)
            elif before is None:
                sums[change.buffer] = change
            else:
                sums[change.buffer] = before._replace(
                    samples=before.samples + change.samples,
                    forwards=before.forwards + change.forwards,
                    amount=before.amount + change.amount,
                )
        return [*sums.values(), *others, *self._moves]

    def _alone(self) -> bool:
        """Whether this worker's one forward was the whole step: what it made is the value."""
        return self._taken == 1 and self._covered == self._samples

    @torch.no_grad()
    def set_known(self, totals: Totals) -> None:
        """Give the known buffers their merged values, from their totals over all workers."""
        if self._alone():
            return
        for number, total, mean in self._sums.split(totals, self._samples):
            merge = self._merges[number]
            self._set(number, merge.valued(mean if merge.word.kind == MEAN else total, self._start.get(number)))

    @torch.no_grad()
    def learn(self, changes: Iterable[Change]) -> None:
        """Give buffers their values from the changes of all workers, in order of positions. Now they are known."""
        told: dict[int, list[Change]] = {}
        for change in changes:
            told.setdefault(change.buffer, []).append(change)
        for number, mine in told.items():
            # what was measured in one forward that is all of the step says nothing, and is right as it is
            whole = len(mine) == 1 and mine[0].forwards == 1 and mine[0].samples == self._samples
            if self._counted(number):
                self._count(number, mine, whole=whole)
            elif self._kind(number) == CONCAT:
                parts = [Written(change.amount, *change.place) for change in mine]
                if not self._alone():
                    self._set(number, laid(self._name(number), self._start[number], parts))
            elif not self._alone():
                self._set(number, self._merged(number, mine, whole=whole))
        self.known = sorted({*self.known, *told})

    def _count(self, number: int, changes: Sequence[Change], *, whole: bool) -> None:
        """Judge what it counts by this step, and let it count."""
        start, former = self._start.get(number), self._ways.get(number, Way())
        moves = [_move(change) for change in changes]
        if not whole and start is not None:
            way = judge(former, moves)
            self._ways[number] = way
            self._merges[number] = self._merge(number)
            if way != former and (text := name_counted(self._name(number), way)):
                self._say(number, text)
        if self._alone():
            return
        merge = self._merges[number]
        totals = [
            merge.amount(move.by, torch.zeros_like(move.by), 1 if whole else move.samples, first=False)
            for move in moves
        ]
        covered = sum(move.samples for move in moves)
        samples = 1 if whole else self._samples if start is not None else covered
        self._set(number, merge.merged(torch.stack(totals).sum(0).to(self._value(number).device), start, samples))

    def _merged(self, number: int, changes: Sequence[Change], *, whole: bool) -> Tensor:
        """Forwards that left the buffer alone count with its old value; where that is gone, they do not count."""
        start, merge = self._start.get(number), self._merges[number]
        total = changes[0].amount
        for change in changes[1:]:
            total = total + change.amount
        total = total.to(self._value(number).device)
        if whole:
            return merge.merged(total, start, 1)
        covered = sum(change.samples for change in changes)
        if start is None:
            return merge.merged(total, start, covered)
        if merge.plain and covered < self._samples:
            total = total + start.flatten().to(total.dtype) * (self._samples - covered)
        return merge.merged(total, start, self._samples)

    def _set(self, number: int, value: Tensor) -> None:
        self._place(number).copy_(value.view_as(self._value(number)))

    # -- between steps -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def put(self, values: Mapping[int, Tensor]) -> None:
        """Give buffers these values, by number."""
        for number, value in values.items():
            self._value(number).copy_(value)

    def counts(self) -> dict[str, list[Any]]:
        """What has been found out about whole numbers, for a checkpoint, and for a worker that joins."""
        return {str(number): list(way) for number, way in self._ways.items()}

    def resume(self, known: Iterable[int], counts: Mapping[str, Sequence[Any]] | None) -> None:
        """Go on where a run was that had these known, and had found out this."""
        self.known = list(known)
        self._ways = {int(number): Way(*way) for number, way in (counts or {}).items()}
        self._merges = [self._merge(number) for number in range(len(self._slots))]

    def know(self, known: Iterable[int], counts: Mapping[str, Sequence[Any]] | None = None) -> None:
        """Another worker has told which buffers all agree to merge; its values are here already."""
        self.resume(known, counts)
        self._watched = self._to_watch()
        self._start = {}
        self._forwards = 0

    def settle(self) -> None:
        """A step is over: buffers that have never changed are taken as constants until they do."""
        self._watched = self._to_watch()
        self._forwards = 0

    def _to_watch(self) -> list[int]:
        return sorted({*self.known, *self._worded(CONCAT), *self._worded(SUM), *self._worded(FIRST)})


def _move(change: Change) -> Move:
    return Move(change.samples, change.amount, change.place[0])


def _slots(modules: Iterable[nn.Module] | Mapping[str, nn.Module]) -> Iterator[Slot]:
    """Each buffer once, by all names that it may be called: its own, and that with the name of what was tracked."""
    roots = list(modules.items()) if isinstance(modules, Mapping) else [("", module) for module in modules]
    seen: dict[int, str] = {}
    for root, top in roots:
        for path, module in top.named_modules():
            for key, value in module._buffers.items():
                # complex ones are tables in practice (rotary embeddings), not statistics
                if value is None or value.is_complex() or id(value) in seen:
                    continue
                seen[id(value)] = key
                name = f"{path}.{key}" if path else key
                yield Slot(module, key, (name, f"{root}.{name}") if root else (name,))
