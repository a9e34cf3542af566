"""Layout `single`: every worker holds the whole model.

Gradients are the sync's matter. What is left to a replica is its *buffers*: state that a forward changes, such as the
running statistics of BatchNorm. Each forward of a step starts from the values at the beginning of the step, and the
new value is the mean of what the forwards made of it, weighted by samples, so that replicas stay equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.core.errors import ConfigError


def uses_batch_statistics(module: nn.Module) -> bool:
    """Whether a forward of this module depends on which samples are computed together."""
    return any(isinstance(part, _BatchNorm) and part.training for part in module.modules())


class Change(NamedTuple):
    """What one forward made of a buffer that was not known to change.

    `total` is its value times its samples, flat, and then the samples: sums of totals say how many they are of.
    """

    buffer: int
    atom: int
    total: Tensor


class Buffers:
    """The buffers of some modules over a step. `known` are those that all workers have agreed to merge in each step."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._slots: list[tuple[nn.Module, str]] = []
        seen: set[int] = set()
        for root in modules:
            for module in root.modules():
                for key, value in module._buffers.items():
                    # complex ones are tables in practice (rotary embeddings), not statistics
                    if value is not None and not value.is_complex() and id(value) not in seen:
                        seen.add(id(value))
                        self._slots.append((module, key))
        self.known: list[int] = []
        self._watched = list(range(len(self._slots)))
        self._start: dict[int, Tensor] = {}
        self._marks: list[tuple[int, int]] = []
        self._sums: dict[int, Tensor] = {}
        self._changes: list[Change] = []
        self._forwards = 0

    def _value(self, number: int) -> Tensor:
        module, key = self._slots[number]
        value = module._buffers[key]
        assert value is not None
        return value

    def _mark(self, number: int) -> tuple[int, int]:
        value = self._value(number)
        return id(value), value._version

    @property
    def size(self) -> int:
        """Elements that `known` buffers take in the step's sums."""
        return sum(self._value(number).numel() for number in self.known)

    @torch.no_grad()
    def open(self) -> None:
        """Begin a step (or a phase of one)."""
        self._changes = []
        self._forwards = 0
        if not self._slots:
            return
        # all buffers in the first step, those that changed before from then on
        if self._start.keys() != set(self._watched) or any(
            start.shape != self._value(number).shape for number, start in self._start.items()
        ):
            self._start = {number: torch.empty_like(self._value(number)) for number in self._watched}
        if self._watched:
            torch._foreach_copy_(list(self._start.values()), [self._value(number) for number in self._watched])
        if self._sums.keys() != set(self.known):
            self._sums = {number: torch.zeros_like(self._start[number], dtype=torch.float32) for number in self.known}
        self._clear()

    def _clear(self) -> None:
        if self._sums:
            torch._foreach_zero_(list(self._sums.values()))

    @torch.no_grad()
    def before_forward(self) -> None:
        """Put the buffers back to the beginning of the step."""
        if not self._slots:
            return
        if self._forwards and self._watched:
            torch._foreach_copy_([self._value(number) for number in self._watched], list(self._start.values()))
        self._forwards += 1
        self._marks = [self._mark(number) for number in range(len(self._slots))]

    @torch.no_grad()
    def rewind(self) -> None:
        """Undo what forwards of the step in progress have made of the buffers."""
        if self._forwards and self._watched:
            torch._foreach_copy_([self._value(number) for number in self._start], list(self._start.values()))
        self._forwards = 0

    @torch.no_grad()
    def after_forward(self, atom: int, samples: int) -> None:
        """Take in what the forward of these samples made of the buffers."""
        if not self._slots:
            return
        self._refuse_new_shapes()
        if self._sums:
            amounts = [self._amount(number) for number in self.known]
            torch._foreach_add_(list(self._sums.values()), amounts, alpha=samples)
        for number in self._changed():
            total = self._amount(number).flatten() * samples
            self._changes.append(Change(number, atom, torch.cat([total, total.new_tensor([samples])])))

    def _refuse_new_shapes(self) -> None:
        for number, start in self._start.items():
            if self._value(number).shape != start.shape:
                module, key = self._slots[number]
                raise ConfigError(
                    f"the buffer {key!r} of a {type(module).__name__} changes its shape in the forward, from "
                    f"{tuple(start.shape)} to {tuple(self._value(number).shape)}, so workers cannot merge it; "
                    "keep what "
                    "is only a cache in a plain attribute, not in a buffer"
                )

    def _changed(self) -> list[int]:
        """Buffers outside `known` that the forward changed, and all others of the same modules.

        Torch counts changes in place, but not those that its own kernels make: batch norm moves its counter by an
        operation and its statistics behind torch's back. What is watched is therefore compared by value as well.
        """
        touched = set()
        for number, mark in enumerate(self._marks):
            if number not in self._sums:
                start = self._start.get(number)
                if self._mark(number) != mark or (start is not None and not torch.equal(self._value(number), start)):
                    touched.add(id(self._slots[number][0]))
        if not touched:
            return []
        return [at for at, (module, _) in enumerate(self._slots) if id(module) in touched and at not in self._sums]

    def _amount(self, number: int) -> Tensor:
        value = self._value(number).detach()
        if not value.is_floating_point() and number in self._start:
            # counters are merged by how far they moved: whole numbers stay exact
            value = value.to(torch.int64) - self._start[number].to(torch.int64)
        return value.to(torch.float32)

    def take_sums(self) -> list[Tensor]:
        """The totals of the known buffers so far, flat, in order; counting starts anew."""
        sums = [total.flatten().clone() for total in self._sums.values()]
        self._clear()
        return sums

    @property
    def changes(self) -> list[Change]:
        """What changed outside `known`: the workers have to agree on it."""
        return self._changes

    @torch.no_grad()
    def set_known(self, totals: Tensor, samples: float) -> None:
        """Give the known buffers their merged values, from their flat totals over all workers."""
        sizes = [self._value(number).numel() for number in self.known]
        for number, total in zip(self.known, (totals / samples).split(sizes), strict=True):
            self._set(number, total)

    @torch.no_grad()
    def learn(self, totals: dict[int, Tensor], samples: float) -> None:
        """Give buffers that turned out to change their merged values; from now on they are known."""
        for number, total in totals.items():
            self._set(number, self._mean(number, total[:-1], float(total[-1]), samples))
        self.known = sorted({*self.known, *totals})

    def _mean(self, number: int, total: Tensor, covered: float, samples: float) -> Tensor:
        """Forwards that left the buffer alone count with its old value; where that is gone, they do not count."""
        start = self._start.get(number)
        if start is None:
            return total / covered
        if start.is_floating_point() and covered < samples:
            total = total + start.flatten().to(torch.float32) * (samples - covered)
        return total / samples

    def _set(self, number: int, mean: Tensor) -> None:
        value = self._value(number)
        mean = mean.view_as(value)
        if not value.is_floating_point():
            whole = mean.round().to(torch.int64)
            mean = self._start[number].to(torch.int64) + whole if number in self._start else whole
        value.copy_(mean)

    @torch.no_grad()
    def put(self, values: Mapping[int, Tensor]) -> None:
        """Give buffers these values, by number."""
        for number, value in values.items():
            self._value(number).copy_(value)

    def totals(self) -> dict[int, Tensor]:
        """What the forwards since `open` made of buffers that are not known, as `learn` wants it: sums over leases of
        these are those of the step."""
        totals: dict[int, Tensor] = {}
        for number, _, total in self._changes:
            totals[number] = totals[number] + total if number in totals else total
        return totals

    def know(self, known: Iterable[int]) -> None:
        """Another worker has told which buffers all agree to merge; its values are here already."""
        self.known = list(known)
        self._watched = self.known
        self._start = {}
        self._forwards = 0

    def settle(self) -> None:
        """A step is over: buffers that have never changed are taken as constants until they do."""
        self._watched = self.known
        self._forwards = 0
