"""Who computes which positions of which step, with weights of which version: the book that the clerk keeps.

No clock, no messages: every call says what happened and when (`now`, seconds of any one clock).

A step's positions are cut into ranges (leases) from the first to the last, when workers ask. A range never changes
after that, whoever computes it: servers know a gradient by its range.

What a free worker gets: of the lowest step c that has any of it, with c ≤ version + bound,

1. a *left over* range: its worker has left, or a server has lost its gradient;
2. an *overdue* range: all who compute it take three times as long as expected, and more than a second. Whoever is done
   first counts;
3. a new range.

`open_steps` bounds memory, so the bound in force is at most open_steps − 1. With `ahead`, one step more is leased out:
such a lease is not computed before its version is there, so the bound holds where it matters, when computing starts.

How much of a step: the workers that have none of it yet share what is left so that all end together, by their speeds
(samples per second of computing), their overhead (everything else of a lease's time) and when they will be free,
counted in *grains* of B/24 samples. If that is within a grain of sharing by speed alone, it is by speed alone. A range
of the length that the worker's last one had, or else of an equal share, is given instead where the step does not end
later by more than 3%: what was read ahead is then right. A worker that
already had a range of the step gets another only if that is at least half of an ordinary one. A worker that would hold
up the step with a single grain (the others are done with all of it sooner) sits out, whatever the bound, for twenty
times that long at most: then it is measured again. To have it compute some of later steps with the weights of today
was tried: what it adds to the speed is less than stale gradients cost.

While `paced` is False, a step is cut at once into equal ranges, whatever was measured, and whoever is free takes one:
speeds change from run to run, and must have no say where the result depends on how a step is cut.

Which version (`Grant.version`, the worker waits for it): at least c − bound. Fresher is better: if version c is
expected within twice the time that the lease takes, it is c; also if all before c is computed, and only has to be
applied: servers that are behind do not catch up by more gradients. If it is late by half of that time, `refresh` lowers
it. A worker that waits (`idle`) can be given older work instead: `reassign`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from shoal.core.atoms import Course
from shoal.core.pace import Estimate, deal, last, level, nearest
from shoal.core.slices import WORTH, grain
from shoal.core.slices import deal as shares
from shoal.syncs.server.messages import Lease
from shoal.syncs.server.ranges import Grant, Hold, Member, OpenStep, Range

__all__ = ["Book", "Grant"]

OVERDUE = 3.0
"""Times the expected time."""
LEAST_OVERDUE = 1.0
"""Seconds."""
UNKNOWN_OVERDUE = 30.0
"""Seconds, while no lease was ever done: the first one contains what processes do only once."""
LATE = 0.5
"""A fresher version than necessary is given up when it is late by so much of the lease's time."""
SOON = 2.0
"""Times a lease: if fresh weights are expected within that, they are waited for."""
HOLDS_UP = 1.1
"""Times what all together need for a step: a worker that takes so long for one grain sits out …"""
SITS_OUT = 20.0
"""… for so many times what it takes for one grain."""
LOOK = 0.05
LONGEST_LOOK = 1.0
"""Seconds between looks, while there is something that a free worker was not given."""


class Book:
    """The leases of the steps `version` … `total` − 1. `bound` None: only `open_steps` bounds how far ahead it goes."""

    def __init__(
        self,
        course: Course,
        *,
        bound: int | None,
        version: int,
        total: int,
        open_steps: int,
        ahead: bool = True,
        calm: int = 0,
        least: int = 1,
    ):
        """In the first `calm` steps the bound is 0, whatever else is asked for. A lease has at least `least` samples,
        if its step has."""
        if open_steps < 1:
            raise ValueError("open_steps must be at least 1: a step has to be somewhere")
        self.course = course
        self.version = version
        self.total = total
        self.bound = open_steps - 1 if bound is None else min(bound, open_steps - 1)
        """In force: of what was asked for, as much as memory allows."""
        self._ahead = ahead
        self._calm = version + calm
        self._fewest = least
        self.paced = True
        """Whether speeds have a say in how much of a step a worker gets."""
        self._steps: dict[int, OpenStep] = {}
        self._workers: dict[int, Member] = {}
        self._applying = Estimate()
        self._usual = (1.0, 0.0)
        """The latest pace and overhead of any worker, for when all that were measured have left."""
        self._measured = False
        self._now = -inf

    # -- what happens ------------------------------------------------------------------------------------------------

    def joined(self, worker: int) -> None:
        """It can work. Call it for all that are there before the first one asks: they share the step."""
        self._workers.setdefault(worker, Member())

    def left(self, worker: int) -> None:
        """It is gone; its lease is free again."""
        gone = self._workers.pop(worker, None)
        if gone is not None and gone.hold is not None:
            gone.hold.range.holders.discard(worker)

    def done(self, worker: int, lease: Lease, seconds: float, now: float, aside: float = 0.0) -> bool:
        """A lease's gradient is on all servers, computed in so many seconds. False: it was there already.

        `aside`: so many more it spent on something that it does not do every time.

        It counts whether or not this worker still has that lease, or has left.
        """
        self._now = max(self._now, now)
        member = self._workers.get(worker)
        if member is not None and member.hold is not None and member.hold.grant.lease == lease:
            self._measure(member, member.hold, seconds, now - aside)
            member.hold.range.holders.discard(worker)
            member.hold, member.waiting = None, False
            member.seen = member.ended = now
        if lease.step < self.version:
            return False
        step = self._steps.get(lease.step)
        part = None if step is None else step.ranges.get(lease)
        if step is None or part is None:
            raise ValueError(f"worker {worker} is done with {lease}, which nobody was given")
        if part.done:
            return False
        part.done = True
        if step.done:
            step.finished = now
        return True

    def complete(self) -> int | None:
        """The step that is next to be applied, if all of it is done."""
        step = self._steps.get(self.version)
        return self.version if step is not None and step.done else None

    def applied(self, version: int, now: float | None = None) -> None:
        """All servers have this version. Without `now`, the latest time that any call told is taken for it."""
        if version < self.version:
            raise ValueError(f"version {version} comes after version {self.version}")
        self._now = self._now if now is None else max(self._now, now)
        for number in range(self.version, version):
            step = self._steps.pop(number, None)
            if step is None or not step.done:
                raise ValueError(f"step {number} is applied, but not all of it is done")
            if step.finished is not None:
                self._applying.add(max(1e-6, self._now - step.finished))
        self.version = version
        for member in self._workers.values():
            if member.hold is not None and member.hold.start is None and member.hold.grant.version <= version:
                member.hold.start = self._now

    def undo(self, step: int) -> None:
        """A server was lost: from this step on nothing counts as done. The ranges stay."""
        for number, opened in self._steps.items():
            if number >= step:
                opened.finished = None
                for part in opened.ranges.values():
                    part.done = False

    # -- who gets what -----------------------------------------------------------------------------------------------

    def ask(self, worker: int, now: float) -> Grant | None:
        """What a free worker computes next; None: ask again when something has happened, or at `next_look`.

        None also if it has a lease already (see `reassign` and `refresh`).
        """
        self._now = max(self._now, now)
        member = self._workers[worker]
        if member.hold is not None:
            return None
        grant = self._find(worker, now, self.total)
        member.waiting, member.seen = grant is None, None
        return grant

    def idle(self, worker: int) -> bool:
        """Whether it has a lease but waits for the version to compute it with."""
        member = self._workers.get(worker)
        return member is not None and member.hold is not None and member.hold.start is None

    def reassign(self, worker: int, now: float) -> Grant | None:
        """For an idle worker: something of an older step instead, if there is. What it had is free again."""
        self._now = max(self._now, now)
        member = self._workers.get(worker)
        if member is None or member.hold is None or member.hold.start is not None:
            return None
        had = member.hold
        grant = self._find(worker, now, had.grant.lease.step)
        if grant is not None:
            had.range.holders.discard(worker)
        return grant

    def refresh(self, worker: int, now: float) -> Grant | None:
        """For an idle worker that waits in vain for fresh weights: the same lease with a lower version."""
        self._now = max(self._now, now)
        member = self._workers.get(worker)
        if member is None or member.hold is None or member.hold.start is not None or now < member.hold.patience:
            return None
        hold = member.hold
        if self._computed(hold.grant.version):
            hold.patience = now + LOOK  # it only has to be applied
            return None
        version = max(self.version, self._least(hold.grant.lease.step))
        hold.patience = inf
        if version >= hold.grant.version:
            return None
        hold.grant = hold.grant._replace(version=version)
        hold.start = now if version <= self.version else None
        return hold.grant

    def next_look(self, now: float) -> float | None:
        """When to ask, reassign and refresh again even if nothing happens; None: no need to."""
        moments = []
        free = False
        for member in self._workers.values():
            free |= member.waiting or (member.hold is not None and member.hold.start is None)
            if member.hold is not None:
                if member.hold.start is None:
                    moments.append(member.hold.patience)
                elif not member.hold.range.done:
                    moments.append(self._overdue_at(member, member.hold))
        moments = [moment if moment > now else now + LONGEST_LOOK for moment in moments if free or moment > now]
        if free and any(step.left for step in self._steps.values()):
            moments.append(now + min(LONGEST_LOOK, max(LOOK, min(self._ends(now), default=now) - now)))
        moment = min(moments, default=inf)
        return max(now + 1e-3, moment) if moment < inf else None

    def clock(self, worker: int) -> int:
        """The step of the lease that it has, or had last; the present version if it never had one."""
        last = self._workers[worker].last
        return self.version if last is None else last

    def speed(self, worker: int) -> float | None:
        """Samples per second, as measured; None if it was not."""
        pace = self._workers[worker].pace.value
        return None if pace is None else 1 / pace

    # -- choosing ----------------------------------------------------------------------------------------------------

    def _find(self, worker: int, now: float, stop: int) -> Grant | None:
        """Something of the steps before `stop`, in the order that the module's head tells."""
        for number in range(self.version, min(stop, self.version + self.bound + self._ahead + 1)):
            if self._least(number) > self.version + self._ahead:
                return None
            step = self._open(number)
            open_parts = [part for part in step.ranges.values() if not part.done and worker not in part.holders]
            for part in open_parts:
                if not part.holders:
                    self._steps[number] = step
                    return self._give(worker, part, now)
            for part in open_parts:
                if self._overdue(part, now):
                    return self._give(worker, part, now)
            if step.left and (samples := self._size(worker, step, now)):
                self._steps[number] = step
                part = step.take(worker, step.enough(samples, self._fewest))
                self._workers[worker].usual = part.samples, step.samples
                return self._give(worker, part, now)
        return None

    def _open(self, number: int) -> OpenStep:
        """A step as it is, or as it would be if somebody were given something of it."""
        if number in self._steps:
            return self._steps[number]
        span, workers = self.course.step(number), len(self._workers)
        step = OpenStep(span, grain(span.samples, self._fewest, workers))
        if not self.paced:
            for own in filter(None, shares(span.samples, workers, least=self._fewest)):
                step.add(len(own))
        return step

    def _give(self, worker: int, part: Range, now: float) -> Grant:
        step = part.lease.step
        member = self._workers[worker]
        least = max(self.version, self._least(step))
        version, patience = least, inf
        if least < step and self._computed(step):
            version = step
        elif least < step:
            wait = self._ready(now).get(step, inf) - now
            if wait <= SOON * self._seconds(member, part.samples):
                version, patience = step, now + wait + max(LOOK, LATE * self._seconds(member, part.samples))
        grant = Grant(part.lease, version)
        part.holders.add(worker)
        member.hold = Hold(grant, part, now if version <= self.version else None, patience)
        member.last, member.waiting, member.seen = step, False, None
        return grant

    def _least(self, step: int) -> int:
        """The oldest version that this step may be computed with."""
        return step if step < self._calm else step - self.bound

    def _computed(self, step: int) -> bool:
        """Whether all steps before this one are done, but for being applied."""
        between = [self._steps.get(number) for number in range(self.version, step)]
        return all(each is not None and each.done for each in between)

    def _size(self, worker: int, step: OpenStep, now: float) -> int:
        """How many of the samples left in a step this worker should take; 0: leave them to others."""
        others = [other for other in self._workers if other != worker and other not in step.takers]
        if not others:
            return step.left
        equal = -(-step.left // (1 + len(others)))
        if not self._measured:
            return equal if worker not in step.takers else 0
        left = -(-step.left // step.grain)
        ready = self._ready(now)
        begin = self._begin(step, now, ready)
        hands = self._hands(begin, step.grain, now, ready, asking=worker)
        slow = {each for each in self._slow(left, hands, begin) if not self._due(each, step.grain, now)}
        if worker in slow:
            return 0
        others = [other for other in others if other not in slow]
        crew = [hands[each] for each in (worker, *others)]
        parts = level(left, crew)[1]
        if worker in step.takers:
            size, whole = round(parts[0]), sum(speed for _, speed in hands.values())
            enough = size >= min(left, step.samples / step.grain * crew[0][1] / whole / 2)
            return min(step.left, size * step.grain) if enough else 0
        rest = [part >= 0.5 or self._due(other, step.grain, now) for other, part in zip(others, parts[1:], strict=True)]
        if not any(rest):
            return step.left
        plain = left * crew[0][1] / sum(speed for _, speed in crew)
        if abs(plain - parts[0]) <= 1:
            crew = [(now, speed) for _, speed in crew]
            size = nearest(plain, left, crew)
        else:
            size = nearest(parts[0], left, crew)
        size = max(1, min(size, left - sum(rest)))
        usual, of = self._workers[worker].usual
        wanted = ([usual] if of == step.samples else []) + ([equal] if all(rest) else [])
        return self._unless_worth(min(step.left, size * step.grain), wanted, step, crew)

    @staticmethod
    def _unless_worth(samples: int, wanted: list[int], step: OpenStep, crew: list[tuple[float, float]]) -> int:
        """The first of the `wanted` numbers of samples with which the step does not end notably later, or `samples`."""

        def seconds(size: int) -> float:
            amount = step.left / step.grain
            return last(size / step.grain, amount, crew) - min(start for start, _ in crew)

        soon = seconds(samples) / (1.0 - WORTH)
        return next((size for size in wanted if size < step.left and seconds(size) <= soon), samples)

    def _hands(
        self, begin: float, size: int, now: float, ready: dict[int, float], *, asking: int | None = None
    ) -> dict[int, tuple[float, float]]:
        """For each worker, when it could begin with a step, and how many grains of this size it does in a second."""
        hands = {}
        for number, member in self._workers.items():
            free = now if number == asking else self._free(member, now, ready)
            hands[number] = max(begin, free) + self._overhead(member), 1 / (self._pace(member) * size)
        return hands

    @staticmethod
    def _slow(left: int, hands: dict[int, tuple[float, float]], begin: float) -> set[int]:
        """Those who would hold up a step: one grain takes them longer than the others need for all that is left."""
        end, counts = deal(left, list(hands.values()))
        return {
            number
            for (number, (start, speed)), count in zip(hands.items(), counts, strict=True)
            if not count and start + 1 / speed - begin > HOLDS_UP * (end - begin)
        }

    def _due(self, worker: int, size: int, now: float) -> bool:
        """Whether a worker has sat out for so long that it should be measured again."""
        member = self._workers[worker]
        return member.ended is not None and now - member.ended >= SITS_OUT * size * self._pace(member)

    # -- expecting ---------------------------------------------------------------------------------------------------

    def _measure(self, member: Member, hold: Hold, seconds: float, now: float) -> None:
        member.pace.add(max(1e-6, seconds) / hold.range.samples)
        start = hold.start if hold.start is not None else now
        member.overhead.add(max(1e-6, now - start - seconds))
        self._usual = self._pace(member), self._overhead(member)
        self._measured = True

    def _pace(self, member: Member) -> float:
        """Seconds per sample; of a worker that is not measured, as the others' mean speed."""
        if member.pace.value is not None:
            return member.pace.value
        known = [1 / each.pace.value for each in self._workers.values() if each.pace.value is not None]
        return len(known) / sum(known) if known else self._usual[0]

    def _overhead(self, member: Member) -> float:
        if member.overhead.value is not None:
            return member.overhead.value
        known = [each.overhead.value for each in self._workers.values() if each.overhead.value is not None]
        return sum(known) / len(known) if known else self._usual[1]

    def _seconds(self, member: Member, samples: int) -> float:
        return samples * self._pace(member) + self._overhead(member) if self._measured else inf

    def _overdue_at(self, member: Member, hold: Hold) -> float:
        if hold.start is None:
            return inf
        if not self._measured:
            return hold.start + UNKNOWN_OVERDUE
        return hold.start + max(LEAST_OVERDUE, OVERDUE * self._seconds(member, hold.range.samples))

    def _overdue(self, part: Range, now: float) -> bool:
        holds = [(self._workers[each], self._workers[each].hold) for each in part.holders]
        return all(hold is not None and self._overdue_at(member, hold) <= now for member, hold in holds)

    def _end(self, member: Member, hold: Hold, now: float, ready: dict[int, float]) -> float:
        """When a lease is expected to be done. If it should be already: it may take as long again as it is late."""
        start = ready.get(hold.grant.version, inf) if hold.start is None else hold.start
        end = start + self._seconds(member, hold.range.samples)
        return end if end >= now else now + (now - end)

    def _free(self, member: Member, now: float, ready: dict[int, float]) -> float:
        if member.hold is not None:
            return self._end(member, member.hold, now, ready)
        if member.waiting:
            return now
        if member.seen is None:
            member.seen = now
        return now + (now - member.seen)

    def _ready(self, now: float) -> dict[int, float]:
        """When each version is expected, as far as all before it is in someone's hands."""
        ready = {self.version: now}
        number = self.version
        while (step := self._steps.get(number)) is not None and not step.left:
            at = ready[number]
            for part in step.ranges.values():
                if not part.done:
                    holds = [(self._workers[each], self._workers[each].hold) for each in part.holders]
                    ends = [self._end(member, hold, now, ready) for member, hold in holds if hold is not None]
                    at = max(at, min(ends, default=inf))
            if at == inf:
                break
            number += 1
            ready[number] = at + (self._applying.value or 0.0)
        return ready

    def _begin(self, step: OpenStep, now: float, ready: dict[int, float]) -> float:
        """When fresh weights for a step are expected, as if all took part in what is left of the steps before it."""
        number = max(ready)
        at = ready[number]
        while number < step.number:
            before = self._open(number)
            hands = self._hands(at, before.grain, now, ready)
            at = deal(-(-before.left // before.grain), list(hands.values()))[0] + (self._applying.value or 0.0)
            number += 1
        return ready.get(step.number, at)

    def _ends(self, now: float) -> Iterator[float]:
        ready = self._ready(now)
        for member in self._workers.values():
            if member.hold is not None and (end := self._end(member, member.hold, now, ready)) < inf:
                yield end
