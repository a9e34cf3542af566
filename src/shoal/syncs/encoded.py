"""The exchange of gradients that travel encoded.

Gradients of large parameters are one vector, which is summed by the codec's own way; those of small ones, and the
step's own numbers, are another, which is summed as it is. Where workers share hosts, only what crosses from host to
host is encoded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from shoal.comm.buckets import TAIL_DTYPE, refuse_sparse
from shoal.comm.codecs.contract import Summing
from shoal.comm.codecs.make import make_summing
from shoal.comm.codecs.memory import RESIDUAL, Memory
from shoal.comm.codecs.roots import RootCodec
from shoal.comm.codecs.sparse import MOMENTUM, SparseSum
from shoal.comm.codecs.twophase import Running, TwoPhaseSum
from shoal.comm.group import Group
from shoal.comm.hierarchy import HierarchicalGroup
from shoal.comm.measure import finished
from shoal.comm.plan import Settled
from shoal.core.errors import ConfigError
from shoal.core.keys import derive
from shoal.core.spec import AnyCodec, Int8, OneBit, PowerSGD, TopK
from shoal.core.traffic import GRADIENT, STATE
from shoal.syncs.allreduce import Weighing
from shoal.syncs.doubles import Riding, places
from shoal.syncs.encoding import SQUARES, Encoding
from shoal.syncs.leaving import WATCHED, Leaving, Params
from shoal.syncs.momentum import (
    add_decay,
    add_momentum,
    factors,
    leave_to_optimizer,
    left_to_workers,
    show_means,
)
from shoal.syncs.variance import Variance
from shoal.syncs.worth import Worth

_NONE = msgspec.msgpack.encode([])
PARTS = 3
"""At most, in which a vector leaves: more hide little more of what travels, and each has a cost."""
LEAST_PART = 1 << 19
"""Numbers of such a part."""


class _Part(NamedTuple):
    """Neighbouring large parameters, from number `first` on, and their stretch of the vector."""

    params: Params
    first: int
    start: int
    stop: int

    def apart(self) -> Iterator[_Part]:
        """Its parameters, each alone."""
        start = self.start
        for number, (name, param) in enumerate(self.params, self.first):
            yield _Part([(name, param)], number, start, start + param.numel())
            start += param.numel()


class EncodedExchange:
    """Over `group`, for the parameters of `encoding`. See `Exchange` for what its methods mean."""

    by_atom = False
    weighs = True

    def __init__(
        self,
        group: Group,
        encoding: Encoding,
        seed: int = 0,
        codec: AnyCodec | None = None,
        *,
        judged: bool = True,
        trial: bool = False,
    ) -> None:
        """`codec` is another one than that of `encoding`; `judged`: whether to find out if it is worth its while.

        In a `trial`, until `stay` is called, a step is taken with the codec itself whatever the optimizer is like.
        """
        self._group = group
        self._encoding = encoding
        self._wanted = codec or encoding.codec
        self._seed = seed
        self._params = [*encoding.large, *encoding.small]
        self._outer = _outer(group)
        self._members = len(set(group.hosts)) if isinstance(group, HierarchicalGroup) else group.size
        """Of the group over which sums are encoded."""
        self._sums: dict[str, Summing] = {}
        if judged:
            encoding.settled = _agreed(group, encoding.settled)
        self._worth = Worth(group, encoding, judged=judged)
        self._flat = group.buffer(encoding.count, torch.float32, encoding.memory.device)
        self._views = encoding.views(self._flat)
        self._short: Tensor | None = None
        self._vectors = 0
        self._squares: Tensor | None = None
        self._parts = self._cut()
        self._leaving = Leaving([part.params for part in self._parts], self._leave)
        self._running: Running | None = None
        self._early = (0.0, 0.0)
        """Seconds of encoding, and of waiting, while backward was going on."""
        self._is_due: bool | None = None
        self._unweighted = 0
        """Steps in which no member had a loss with a weight of its own; -1 once one had."""
        encoding.memory.fold()
        share_common(group, encoding.memory)
        if self._outer is None:
            encoding.memory.adopt({})  # it would be out of date when this member needs it
        self._variance: Variance | None = None
        if not trial:
            self.stay()

    def stay(self) -> None:
        """No trial any longer: from the next step on Adam's variance is taken care of, where the codec needs that."""
        encoding = self._encoding
        self._variance = encoding.variance if isinstance(self._wanted, OneBit | TopK | PowerSGD) else None
        # those of members that have gone are missing from them, or of steps with another codec
        encoding.memory.drop(SQUARES)
        if self._variance is not None:
            self._variance.begin_anew()
            self._variance.hurry()

    # -- a step --------------------------------------------------------------------------------------------------------

    def open(self, atoms: int, vectors: int, doubles: int = 0) -> None:
        self._worth.begin(self._flat)
        self._vectors = vectors + places(doubles, self._group.size) + 1
        self._leaving.open()
        self._running, self._early, self._is_due = None, (0.0, 0.0), None
        self._encoding.memory.open()
        for _, param in self._params:
            param.grad = None

    def arm(self, *, weighted: bool = False) -> None:
        if self._divides() and self._unweighted >= 0 and not weighted:
            self._leaving.arm()

    def atom_done(self, atom: int, sums: Tensor, doubles: Tensor | None = None) -> None:
        return None

    def used(self) -> list[bool]:
        return [param.grad is not None for _, param in self._encoding.params]

    def finish(
        self, sums: Tensor, flags: Tensor, weighing: Weighing | None = None, doubles: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self._group.account.departing.passed()
        begun, waited = time.perf_counter(), self._group.account.exposed
        self._leaving.stop()
        by_parts = self._by_parts()
        if by_parts and weighing is not None:
            raise ConfigError(
                f"codec {self._wanted.name}: the loss is (sum, weight) in this step and was a mean in those before; "
                "return the same form throughout, or use another codec"
            )
        if by_parts:
            for number in range(len(self._parts) - 1):  # those that have not left during backward
                self._leave(number)
        short, small = self._laid_short()
        if not by_parts:
            _lay(self._encoding.large, self._views)
        _lay(self._encoding.small, small)
        tail = short[short.numel() - self._vectors :]
        riding = Riding(self._group, doubles)
        torch.cat([sums, flags, sums.new_tensor([weighing is not None]), *riding.parts(sums.device)], out=tail)
        summed = tail[tail.numel() - riding.size :]
        work = self._group.sum(short)
        riding.start()
        if weighing is not None:
            # what is kept from step to step must not depend on what a step weighs
            work.wait()
            riding.finish(summed)
            self._weigh(weighing, doubles, small)
        if by_parts:
            self._leave(len(self._parts) - 1)
            self._come()
        else:
            self._sum()
        work.wait()
        if weighing is None:
            riding.finish(summed)
        self._sum_squares()
        if self._group.size > 1:
            show_means(self._encoding.optimizer, self._wanted, self._encoding.large, self._views)
        finished(self._flat.device)
        for (_, param), view in zip(self._params, [*self._views, *small], strict=True):
            param.grad = view if param.dtype == view.dtype else view.to(param.dtype)
        waited = self._group.account.exposed - waited
        if self._codec() is self._wanted:
            encoding, early = self._early
            self._worth.end(encoding + time.perf_counter() - begun - waited, early + waited)
        parts = tail.clone().split([sums.numel(), flags.numel(), 1, riding.size])
        summed_sums, summed_flags, weighted, _ = parts
        self._unweighted = -1 if self._unweighted < 0 or bool(weighted) else self._unweighted + 1
        return summed_sums, summed_flags

    def _weigh(self, weighing: Weighing, doubles: Tensor | None, small: Sequence[Tensor]) -> None:
        weight = weighing.weight
        if weight is None:
            assert doubles is not None
            weight = float(doubles[0])
        if weight > 0.0 and weight != weighing.samples:
            for part in (self._flat, *small):
                part.mul_(weighing.samples / weight)

    def _laid_short(self) -> tuple[Tensor, list[Tensor]]:
        """The vector of all that is small, and the parts of it that belong to parameters."""
        sizes = [param.numel() for _, param in self._encoding.small]
        needed = sum(sizes) + self._vectors
        if self._short is None or self._short.numel() != needed:
            if self._short is not None:
                self._group.release(self._short)
            self._short = self._group.buffer(needed, TAIL_DTYPE, self._flat.device)
        parts = self._short[: sum(sizes)].split(sizes) if sizes else ()
        return self._short, [part.view_as(param) for part, (_, param) in zip(parts, self._encoding.small, strict=True)]

    def _sum(self) -> None:
        """Sum the large vector over all members."""
        if not self._flat.numel():
            return
        if self._outer is None:
            variance = self._variance
            self._flush(variance.fresh if variance is not None and variance.held else 1.0)
        if isinstance(self._group, HierarchicalGroup):
            self._group.relay(self._flat, self._sum_over, GRADIENT)
        else:
            self._sum_over(self._group)

    # -- by parts, while backward goes on ------------------------------------------------------------------------------

    def _cut(self) -> list[_Part]:
        """What leaves together, in the order in which backward comes to it. One part where that would be of no use."""
        large, whole = self._encoding.large, _Part(self._encoding.large, 0, 0, self._encoding.count)
        alone = isinstance(self._group, HierarchicalGroup) or self._group.size == 1
        if alone or not self._group.progresses or self._flat.device.type != "cpu":
            return [whole]
        count = min(PARTS, self._encoding.count // LEAST_PART)
        if count < 2:
            return [whole]
        parts, first, start, at = [], 0, 0, 0
        for number, (_, param) in enumerate(large):
            at += param.numel()
            if at - start >= self._encoding.count / count or number == len(large) - 1:
                parts.append(_Part(large[first : number + 1], first, start, at))
                first, start = number + 1, at
        return parts[::-1]

    def _by_parts(self) -> bool:
        """Whether in this step. All members agree, also those that have no batch in it.

        Not where losses have weights: what a step weighs is not known before its end, and has to be before anything is
        encoded.
        """
        return self._divides() and self._unweighted >= WATCHED

    def _divides(self) -> bool:
        return len(self._parts) > 1 and isinstance(self._summing(self._group), TwoPhaseSum)

    def _leave(self, number: int) -> None:
        """Send a part, and what there is of the one before it, unless that has been done in this step."""
        if number < self._leaving.left:
            return
        self._leaving.left = number + 1
        begun, waited = time.perf_counter(), self._group.account.exposed
        self._group.account.departing.passed()
        part = self._parts[number]
        if self._running is None:
            self._running = self._begin()
        for each in part.apart():  # one by one, while it is in the processor's cache
            _lay(each.params, self._views[each.first : each.first + 1])
            self._take_into_account(self._group, each)
        self._running.send(number)
        if number:
            self._running.turn(number - 1)
        if self._leaving.armed:
            waited = self._group.account.exposed - waited
            encoding, early = self._early
            self._early = encoding + time.perf_counter() - begun - waited, early + waited

    def _begin(self) -> Running:
        summing = self._summing(self._group)
        assert isinstance(summing, TwoPhaseSum)
        return summing.begin(
            self._flat,
            self._encoding.memory,
            key=self._key(),
            gauge=self._gauge(),
            stretches=self._stretches(),
        )

    def _stretches(self) -> list[tuple[int, int]]:
        return [(part.start, part.stop) for part in self._parts]

    def _come(self) -> None:
        """All parts have been sent: have their sums."""
        assert self._running is not None
        self._running.turn(len(self._parts) - 1)
        self._running.end()
        self._running = None

    def _sum_squares(self) -> None:
        """Where Adam's variance is to be renewed in this step: sum what all members have for it."""
        memory, self._squares = self._encoding.memory, None
        if not self._due():
            return
        squares = torch.zeros(memory.count, device=memory.device)
        if self._outer is not None:
            squares.copy_(memory.private(SQUARES)[0]).nan_to_num_(0.0, 0.0, 0.0)

        def cross(outer: Group) -> None:
            if outer.size > 1:
                scratch, stretches = Memory(memory.count, memory.device), self._stretches()
                TwoPhaseSum(outer, RootCodec(), False).begin(squares, scratch, stretches=stretches).go()

        if isinstance(self._group, HierarchicalGroup):
            self._group.relay(squares, cross, GRADIENT)
        else:
            cross(self._group)
        self._squares = squares

    def _flush(self, units: float = 1.0) -> None:
        """This member encodes nothing: what it still has to send goes as it is."""
        memory = self._encoding.memory
        if memory.has(RESIDUAL):
            residual, shadow = memory.private()
            self._flat.add_(residual, alpha=1.0 / units)
            shadow.zero_()

    def _sum_over(self, outer: Group) -> None:
        encoding = self._encoding
        self._take_into_account(outer, _Part(encoding.large, 0, 0, encoding.count))
        if outer.size == 1 and not factors(encoding.optimizer, self._wanted)[0]:
            self._flush()
            return
        self._summing(outer).sum(self._flat, encoding.memory, key=self._key(), gauge=self._gauge())

    def _key(self) -> int:
        return derive(self._seed, "codec", self._encoding.steps)

    def _gauge(self) -> Tensor | None:
        variance = self._variance
        if variance is None or not variance.held or isinstance(self._wanted, PowerSGD):
            # a matrix whose elements are divided by numbers of their own would have more directions than before
            return None
        return variance.gauge()

    def _take_into_account(self, outer: Group, part: _Part) -> None:
        """Make of a part of this member's gradients what travels: with what its optimizer would do before it sums."""
        variance, views = self._variance, self._views[part.first : part.first + len(part.params)]
        if variance is not None and variance.held:
            self._count_squares(variance, part)
            variance.mix(views, outer.size, part.first)
        else:
            add_decay(self._encoding.optimizer, self._wanted, part.params, views, outer.size)
            if self._group.size > 1:
                add_momentum(self._encoding.optimizer, self._wanted, part.params, views, outer.size)

    def _count_squares(self, variance: Variance, part: _Part) -> None:
        """Add this step's to those before it, unless these are used up in this step."""
        here = slice(part.start, part.stop)
        before, now = (vector[here] for vector in self._encoding.memory.private(SQUARES))
        torch.mul(self._flat[here], self._flat[here], out=now)
        if variance.scale != 1.0:
            now.mul_(variance.scale**2)
        if not self._due():
            now.add_(before)

    def _due(self) -> bool:
        """Whether Adam's variance is to be renewed in this step."""
        if self._is_due is None:  # each parameter is asked for its steps
            self._is_due = self._variance is not None and self._variance.due()
        return self._is_due

    def _summing(self, outer: Group) -> Summing:
        codec = self._codec()
        if codec.name not in self._sums:
            self._sums[codec.name] = make_summing(codec, outer, self._encoding.shapes)
        summing = self._sums[codec.name]
        for way in getattr(summing, "ways", (summing,)):
            if isinstance(way, SparseSum):
                way.momentum, damping = factors(self._encoding.optimizer, self._wanted)
                # as in the optimizer, whose first momentum is the gradient
                way.damping = damping if self._encoding.steps else 1.0
        return summing

    def _codec(self) -> AnyCodec:
        """That of this step: while Adam's variance is not steady gradients travel almost as they are."""
        waits = self._variance is not None and not self._variance.held
        return Int8() if waits else self._wanted

    # -- the update ----------------------------------------------------------------------------------------------------

    @contextmanager
    def applying(self, scale: float = 1.0) -> Iterator[None]:
        encoding, variance = self._encoding, self._variance
        held = variance is not None and variance.held
        self._keep_unused()
        if scale != 1.0:
            encoding.memory.temper(scale, (RESIDUAL, MOMENTUM))
        if variance is None or not held:
            if self._group.size > 1:
                leave_to_optimizer(encoding.optimizer, self._wanted, encoding.large)
            with left_to_workers(encoding.optimizer, self._wanted, encoding.small):
                yield
        else:
            variance.gauge()  # on all members now, also those that encode nothing: later it would have other bits
            if self._squares is not None:
                variance.renew(self._squares, self._members)
                self._squares = None
            with variance.applying(scale):
                yield
        encoding.memory.commit()
        encoding.steps += 1
        # alone nothing is encoded, and there is no reason to hold anything
        if variance is not None and not held and self._group.size > 1 and variance.observe():
            encoding.memory.rescale(variance.fresh)

    def _keep_unused(self) -> None:
        """What nobody has a gradient for is not applied: nothing of it has been sent."""
        start = 0
        for _, param in self._encoding.large:
            if param.grad is None:
                self._encoding.memory.undo(start, start + param.numel(), (RESIDUAL, MOMENTUM))
            start += param.numel()

    # -- what others ask -----------------------------------------------------------------------------------------------

    def digest(self) -> bytes:
        return repr(
            (
                self._wanted,
                None if self._variance is None else self._variance.pace,
                [(name, tuple(param.shape), str(param.dtype)) for name, param in self._params],
            )
        ).encode()

    def settled(self) -> Settled | None:
        return self._encoding.settled

    def knowledge(self) -> bytes | None:
        return None

    def close(self, *, with_group: bool = False) -> None:
        self._leaving.close()
        self._running = None
        if not with_group:
            self._group.release(self._flat)
            if self._short is not None:
                self._group.release(self._short)
        self._short, self._views = None, []


def _agreed(group: Group, settled: Settled | None) -> Settled | None:
    """What the first member knows that knows any: who has come now does not, and all have to measure alike."""
    told = group.gather_bytes(msgspec.msgpack.encode(settled))
    known = (msgspec.msgpack.decode(text, type=Settled | None) for text in told)
    return next((one for one in known if one is not None), None)


class _Common(msgspec.Struct, frozen=True, array_like=True):
    """What a member says of a vector that all who encode have."""

    name: str
    dtype: str
    size: int


def share_common(group: Group, memory: Memory) -> None:
    """Give all members the shared vectors of the first one that has some: not all of them have encoded so far."""
    if group.size == 1:
        return
    mine = memory.common()
    said = [_Common(name, str(value.dtype).removeprefix("torch."), value.numel()) for name, value in mine.items()]
    told = group.gather_bytes(msgspec.msgpack.encode(said))
    holder = next((rank for rank, text in enumerate(told) if text != _NONE), None)
    if holder is None:
        return
    common = {}
    for one in msgspec.msgpack.decode(told[holder], type=list[_Common]):
        vector = torch.zeros(one.size, dtype=getattr(torch, one.dtype), device=memory.device)
        if group.rank == holder:
            vector.copy_(mine[one.name].flatten())
        group.sum(vector, STATE).wait()
        common[one.name] = vector.view_as(mine[one.name]) if one.name in mine else vector
    memory.adopt(common)


def _lay(params: Sequence[tuple[str, Any]], views: Sequence[Tensor]) -> None:
    """Copy gradients to where they are summed; where there is none there are zeros."""
    targets, grads = [], []
    for (name, param), view in zip(params, views, strict=True):
        if param.grad is None:
            view.zero_()
        elif param.grad.is_sparse:
            raise refuse_sparse(name)
        else:
            targets.append(view)
            grads.append(param.grad)
    if grads:
        torch._foreach_copy_(targets, grads)


def _outer(group: Group) -> Group | None:
    """The group over which this member sums encoded numbers; None if another one of its host does."""
    return group.across if isinstance(group, HierarchicalGroup) else group
