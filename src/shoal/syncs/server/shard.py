"""One shard on one server: its weights, its optimizer, and the gradients that have come for it. No I/O.

A shard is on one server as *holder* and perhaps on another as *mirror*; both are a `Holding`. The holder sums the
gradients of leases step by step (`take`), closes a step when all its samples are there (`close`) and applies it
(`apply`). The mirror is given closed sums (`give`) and applies the same orders: it does the same arithmetic on the
same numbers, so its weights are equal, bit for bit.

With `apply=arrival` every gradient is an optimizer step of its own: `arrive` on the holder, `replay` on the mirror.
`apply` then only ends the step.

Each position counts exactly once: a lease is known by its step and range, a second gradient for it is dropped, and a
step is applied only if the ranges that came are a partition of its positions.

The weights change only inside `apply` (by step), `arrive`, `replay` (by arrival), `load` and `move_to`: whoever shares
them with readers marks them as changing around these calls, and nowhere else.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import AuditError, ShoalError
from shoal.syncs.server.messages import Apply, Lease, Record
from shoal.syncs.server.setup import Setup
from shoal.syncs.server.stepping import ShardGradients, Stepper
from shoal.syncs.server.used import either, used_bytes


class Unfit(ShoalError):
    """What came is not of this shard or step. The sender is wrong: nothing was made of it."""


class Overlap(Unfit):
    """A lease has some positions, but not all, in common with one that counts already."""


@dataclass
class _Open:
    """What has come for a step that is not applied."""

    used: bytes
    total: Tensor | None = None
    """Where it is summed, by step; None with `apply=arrival`."""
    ranges: set[tuple[int, int]] = field(default_factory=set)
    closed: bool = False
    rates: list[float] = field(default_factory=list)
    """With `apply=arrival`: the learning rates of all that was applied, added up."""
    lent: list[tuple[Tensor, float]] = field(default_factory=list)
    """All gradients so far, where their workers left them, and what each is multiplied with; then `total` is empty."""

    def add(self, lease: Lease, used: bytes) -> None:
        self.ranges.add((lease.start, lease.stop))
        self.used = either(self.used, used)


class Holding:
    """The state of one shard, as holder or as mirror. Of one thread."""

    def __init__(self, setup: Setup, shard: int, weights: Tensor, version: int) -> None:
        """`weights` are the shard's bytes, with the values of `version`: the live ones, which steps change."""
        self._setup = setup
        self._shard = setup.cut.shards[shard]
        self._size = self._shard.stop - self._shard.start
        self._expect("weights", weights)
        self.number = shard
        self.version = version
        """Steps applied."""
        self._stepper = self._make_stepper(weights)
        self.rates = self._stepper.applier.rates()
        """Learning rates of the optimizer's groups that the last step was applied with."""
        self._open: dict[int, _Open] = {}
        self._kept: dict[int, dict[str, Any]] = {}
        self._ledger = (0, 0)
        self._arrival = setup.spec.apply == "arrival"
        self._shares = setup.spec.durability == "peer"
        """Whether a mirror may apply from the very memory that a sum lies in: then it must stay as it is."""

    def _make_stepper(self, weights: Tensor) -> Stepper:
        return Stepper(self._setup, self._shard.number, weights)

    @property
    def pulled(self) -> Tensor:
        """Of the live weights, what a worker gets that pulls them, as bytes."""
        return self.weights

    def pulled_of(self, version: int) -> Tensor:
        """The same of a version that is kept."""
        return self.kept(version)["weights"]  # type: ignore[no-any-return]

    @property
    def weights(self) -> Tensor:
        """The live ones, as bytes."""
        return self._stepper.weights

    # -- by step: the holder -------------------------------------------------------------------------------------------

    def has(self, lease: Lease) -> bool:
        """Whether a gradient of this lease counts already."""
        opened = self._open.get(lease.step)
        return lease.step < self.version or (opened is not None and (lease.start, lease.stop) in opened.ranges)

    def take(
        self, lease: Lease, gradient: Tensor, used: bytes, scale: float, into: Tensor, *, lent: bool = False
    ) -> bool:
        """Add gradient × scale to the step's sum, in `into`; False, and nothing done, if this lease counts already.

        The first lease of a step says where its sum lies; what was there before does not matter, and it must be left
        alone until the step is applied. The gradient is only read; one that is `lent` stays as it is until `settle`, so
        that two can be added where they lie, when they are applied: then their sum never leaves the cache. With a
        mirror it is wanted before, and made when the second has come, while others are on their way. Raises `Unfit`.
        """
        if self.has(lease):
            return False
        self.check(lease, gradient, used)
        self._expect("sum", into)
        opened = self._open.get(lease.step)
        if opened is None:
            opened = self._open[lease.step] = _Open(bytes(len(used)), into)
            if lent:
                opened.lent.append((gradient, scale))
            else:
                self._stepper.put(into, gradient, scale)
        elif len(opened.lent) == 1:
            opened.lent.append((gradient, scale))
            if self._shares or not lent:
                self.settle(lease.step)
        else:
            self._stepper.add(self.sum_of(lease.step), gradient, scale)
        opened.add(lease, used)
        return True

    def lends(self, step: int) -> bool:
        """Whether the sum of a step is still gradients where their workers left them."""
        opened = self._open.get(step)
        return opened is not None and bool(opened.lent)

    def settle(self, step: int) -> None:
        """What was lent will change: have the sum of this step in its own place."""
        opened = self._open.get(step)
        if opened is not None and opened.lent and opened.total is not None:
            self._stepper.put_sum(opened.total, opened.lent)
            opened.lent = []

    def close(self, step: int) -> Record:
        """Nothing more is summed into this step. Raises `AuditError` unless each of its positions came exactly once."""
        opened = self._opened(step)
        self._check_partition(step, opened.ranges)
        opened.closed = True
        return Record(step, sorted(opened.ranges), opened.used)

    def is_closed(self, step: int) -> bool:
        """Whether the step's sum is complete here, or applied: its gradients are not needed any longer."""
        opened = self._open.get(step)
        return step < self.version or (opened is not None and opened.closed)

    def ranges(self, step: int) -> list[tuple[int, int]]:
        """The positions of a step that count here so far; none of one that is applied."""
        opened = self._open.get(step)
        return [] if opened is None else sorted(opened.ranges)

    def norm(self, step: int) -> float:
        """The squared norm of the sum, in double precision; not finite if any of its numbers is not."""
        gradients = ShardGradients(self._stepper, self.sum_of(step), self._opened(step).used)
        return self._stepper.applier.measure(gradients).square

    def sum_of(self, step: int) -> Tensor:
        """The sum of the step so far, where it lies."""
        total = self._opened(step).total
        self.settle(step)
        if total is None:
            raise AuditError(f"shard {self.number} has no sum of step {step}: with apply=arrival nothing is summed")
        return total

    def forget_open(self) -> None:
        """Drop all sums that are not closed: their leases do not count any longer. What is applied stays."""
        if not self._arrival:
            self._open = {step: opened for step, opened in self._open.items() if opened.closed}

    # -- by step: the mirror -------------------------------------------------------------------------------------------

    def give(self, record: Record, total: Tensor) -> None:
        """The closed sum of a step, from the holder. `total` is not copied: it stays as it is until applied."""
        if record.step < self.version:
            return
        self._check_record(record)
        self._expect("sum", total)
        ranges = {(start, stop) for start, stop in record.ranges}
        if len(ranges) != len(record.ranges):
            raise AuditError(f"shard {self.number}: a range of step {record.step} is in the record twice")
        self._check_partition(record.step, ranges)
        self._open[record.step] = _Open(record.used, total, ranges, closed=True)

    # -- both ----------------------------------------------------------------------------------------------------------

    def apply(self, order: Apply) -> None:
        """Apply the next step, or end it with `apply=arrival`. Does nothing if it is applied already.

        Raises `AuditError` if the steps before it are not applied, or if its positions did not come exactly once each.
        """
        if order.step < self.version:
            return
        if order.step != self.version:
            raise AuditError(f"shard {self.number} is told to apply step {order.step}, and is at step {self.version}")
        self.close(order.step)
        opened = self._opened(order.step)
        if order.metric is not None:
            # first: in one process it is told right after the evaluation
            self._stepper.applier.evaluated(order.metric)
        self.rates = opened.rates if self._arrival else self._stepper.applier.rates()
        if opened.lent and not self._shares:
            self._stepper.step_lent(opened.lent, opened.used, order.scale)
        elif opened.total is not None:
            self._stepper.step(self.sum_of(order.step), opened.used, order.scale, mine=not self._shares)
        self._stepper.applier.end(order.loss)
        del self._open[order.step]
        steps, samples = self._ledger
        self._ledger = steps + 1, samples + sum(stop - start for start, stop in opened.ranges)
        self.version += 1
        if order.keep:
            self.keep(state=order.state)

    def ledger(self) -> tuple[int, int]:
        """Steps and samples applied since the run began, here or on those that this is a copy of."""
        return self._ledger

    def move_to(self, weights: Tensor) -> None:
        """The live weights lie here from now on: the present ones are copied there."""
        self._expect("weights", weights)
        self._stepper.move_to(weights)

    # -- by arrival ----------------------------------------------------------------------------------------------------

    def arrive(
        self, lease: Lease, gradient: Tensor, used: bytes, scale: float, rate: float, into: Tensor | None = None
    ) -> Record | None:
        """Apply gradient × scale at once, at `rate` times the learning rate; None if this lease counts already.

        `into` gets gradient × scale: what a mirror replays. The gradient is only read. Raises `Unfit`.
        """
        if self.has(lease):
            return None
        self.check(lease, gradient, used)
        if into is not None:
            self._expect("memory for a scaled gradient", into)
            self._stepper.put(into, gradient, scale)
            gradient, scale = into, 1.0
        rates = [usual * rate for usual in self._stepper.applier.rates()]
        self._stepper.step(gradient, used, scale, rates=rates)
        self._count(lease, used, rates)
        return Record(lease.step, [(lease.start, lease.stop)], used, rates)

    def replay(self, record: Record, gradient: Tensor) -> None:
        """As mirror: what the holder applied, with the gradient as it was applied. Nothing, if it is there already."""
        self._check_record(record)
        if len(record.rates) != len(self._stepper.applier.rates()):
            raise Unfit(f"shard {self.number}: a record with {len(record.rates)} learning rates cannot be replayed")
        if len(record.ranges) != 1:
            raise Unfit(f"shard {self.number}: a record of {len(record.ranges)} leases cannot be replayed; send each")
        lease = Lease(record.step, *record.ranges[0])
        if not self.has(lease):
            self.check(lease, gradient, record.used)
            self._stepper.step(gradient, record.used, rates=record.rates)
            self._count(lease, record.used, record.rates)

    def restore(self, record: Record, total: Tensor) -> None:
        """What a journal or the holder has of this shard: `give` or `replay`, whichever the run does."""
        if self._arrival:
            self.replay(record, total)
        else:
            self.give(record, total)

    def _count(self, lease: Lease, used: bytes, rates: list[float]) -> None:
        opened = self._open.setdefault(lease.step, _Open(bytes(len(used))))
        opened.add(lease, used)
        opened.rates = [a + b for a, b in zip(opened.rates, rates, strict=True)] if opened.rates else rates

    # -- copies --------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that another `Holding` needs to go on from here, in memory of its own; not the sums that are open.

        What is kept is in it: whoever is sent for a version may have become a holder since.
        """
        carried = [(step, opened) for step, opened in self._open.items() if self._arrival or opened.closed]
        return {
            **self._stepper.snapshot(),
            "version": self.version,
            "rates": list(self.rates),
            "ledger": list(self._ledger),
            "open": [
                {
                    "step": step,
                    "ranges": [list(one) for one in sorted(opened.ranges)],
                    "used": opened.used,
                    "closed": opened.closed,
                    "rates": opened.rates,
                    "total": None if opened.total is None else self.sum_of(step).clone(),
                }
                for step, opened in carried
            ],
            "kept": [{"version": version, **kept} for version, kept in sorted(self._kept.items())],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Become what `state` was made of. Sums that were open here are dropped."""
        self._expect("weights of a copy", state["weights"])
        self._stepper.load(state)
        self.version = state["version"]
        self.rates = list(state["rates"])
        steps, samples = state["ledger"]
        self._ledger = steps, samples
        self._open = {}
        for one in state["open"]:
            ranges = {(start, stop) for start, stop in one["ranges"]}
            total = None if one["total"] is None else one["total"].clone()
            self._open[one["step"]] = _Open(one["used"], total, ranges, one["closed"], list(one["rates"]))
        self._kept = {}
        for kept in state["kept"]:
            names = ("weights", "optimizer", "schedule")
            self._kept[kept["version"]] = {name: copy.deepcopy(kept[name]) for name in names}

    def keep(self, *, state: bool) -> None:
        """Keep a copy of the weights of this version; with `state`, of the optimizer's too. See `kept`."""
        self._kept[self.version] = self._stepper.snapshot(optimizer=state)

    @property
    def keeping(self) -> bool:
        """Whether any version is kept."""
        return bool(self._kept)

    def kept(self, version: int) -> dict[str, Any]:
        """`weights` (bytes), `optimizer` (see `optimizers.state`; None without) and `schedule`, of a version."""
        return self._kept[version]

    def keeps(self, version: int) -> bool:
        return version in self._kept

    def let_go_but(self, most: int) -> None:
        """Of the versions that are kept, keep the last ones."""
        for version in sorted(self._kept)[:-most]:
            del self._kept[version]

    def let_go(self, version: int) -> None:
        self._kept.pop(version, None)

    # -- checks --------------------------------------------------------------------------------------------------------

    def _opened(self, step: int) -> _Open:
        try:
            return self._open[step]
        except KeyError:
            raise AuditError(
                f"shard {self.number} at step {self.version} has no gradients of step {step}, which all should have "
                "come: some were acknowledged and lost, or the step was applied already"
            ) from None

    def check(self, lease: Lease, gradient: Tensor, used: bytes) -> None:
        """Raises `Unfit` for what `take` and `arrive` would not take."""
        if not self.version <= lease.step < self._setup.total:
            raise Unfit(f"{lease} for shard {self.number}: its steps are {self.version} to {self._setup.total - 1}")
        samples = self._setup.course.step(lease.step).samples
        if not 0 <= lease.start < lease.stop <= samples:
            raise Unfit(f"{lease} for shard {self.number}: the step has the positions 0 to {samples - 1}")
        self._expect("gradient", gradient)
        self._check_used(used)
        opened = self._open.get(lease.step)
        for start, stop in opened.ranges if opened is not None else ():
            if lease.start < stop and start < lease.stop:
                raise Overlap(
                    f"{lease} overlaps the positions {start} to {stop - 1} that count already on shard {self.number}; "
                    "a lease is given again only with the same range"
                )

    def _check_record(self, record: Record) -> None:
        if not 0 <= record.step < self._setup.total:
            raise Unfit(f"a record of step {record.step} for shard {self.number}: the run has {self._setup.total}")
        self._check_used(record.used)

    def _check_used(self, used: bytes) -> None:
        params = len(self._setup.cut.names) + len(self._setup.tables)
        if len(used) != used_bytes(params):
            raise Unfit(f"{len(used)} bytes say which of {params} parameters have gradients; send {used_bytes(params)}")

    def _check_partition(self, step: int, ranges: Iterable[tuple[int, int]]) -> None:
        samples = self._setup.course.step(step).samples
        at = 0
        for start, stop in sorted(ranges):
            if start != at or stop <= start:
                break
            at = stop
        else:
            if at == samples:
                return
        raise AuditError(
            f"shard {self.number}: of the positions 0 to {samples - 1} of step {step} these came: "
            f"{', '.join(f'{start} to {stop - 1}' for start, stop in sorted(ranges)) or 'none'}; each must come once"
        )

    def _expect(self, what: str, memory: Tensor) -> None:
        if memory.dtype != torch.uint8 or memory.numel() != self._size or not memory.is_contiguous():
            raise Unfit(
                f"{what} for shard {self._shard.number}: {memory.numel()} of {memory.dtype}; it must be {self._size} "
                "bytes, one after the other"
            )
