"""Buckets: gradients of a set of parameters in flat buffers that are summed over a group while backward still runs.

Parameters are laid into buckets in the order in which backward completes them. A bucket leaves as soon as it is
complete and all before it have left, so that every member starts the same operations in the same order. The last
bucket carries a *tail*: a few numbers of the step (loss, weights, flags) that every member needs and that would
otherwise cost an operation of their own.

The first steps are watched: all is one bucket in them. Then the cost of sums is measured, member 0 decides on order and
size of the buckets, and all members lay them anew. If it is not clear that this is better, the next steps are a trial.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.group import CPU, Group, Work
from shoal.comm.knowledge import digest_of, fitting, note
from shoal.comm.measure import measure
from shoal.comm.plan import SMALLEST, UNDIVIDED, Choice, Costs, Gradient, Settled, choose, lay, parts, settle
from shoal.comm.watch import Trial, Watch
from shoal.core.errors import ConfigError, GroupError
from shoal.core.traffic import CONTROL

TAIL_DTYPE = torch.float32

CAP_BYTES: int | None = None
"""Bytes of a bucket where they are not to be found by measurement."""

WATCHED_STEPS = 3
TRIED_STEPS = 3
"""Steps with one layout before it is judged; the first of them does not count."""

_LINE = 64
"""Bytes. What is summed at once begins at a multiple of it: no two such parts share a line of the processor's cache."""
_SPARE = 4096
"""Elements of a buffer beyond what is needed now: tails grow in the first steps, and lines are filled up."""


class _Kind(NamedTuple):
    """What parameters of one bucket have in common."""

    dtype: torch.dtype
    device: torch.device

    @property
    def line(self) -> int:
        return max(1, _LINE // self.dtype.itemsize)


def refuse_sparse(name: str) -> ConfigError:
    return ConfigError(f"{name!r} has a sparse gradient; build its layer with sparse=False")


class _Bucket:
    """Parameters of one kind, and the flat buffer of their gradients: `memory`, with the tail at its end."""

    def __init__(self, numbers: list[int], params: Sequence[nn.Parameter], memory: Tensor, cap: int) -> None:
        sizes = [params[number].numel() for number in numbers]
        count = sum(sizes)
        self.numbers = numbers
        flat, self.tail = memory.split([count, memory.numel() - count])
        self.views = [piece.view_as(params[number]) for piece, number in zip(flat.split(sizes), numbers, strict=True)]
        line = _Kind(memory.dtype, memory.device).line
        self.pieces = list(flat.split(parts(count, cap // memory.element_size(), line)))
        """What is copied and summed at once."""
        last = memory[count - self.pieces[-1].numel() :]
        self.summed = [*self.pieces[:-1], last]
        """The same with the tail."""
        self.missing = len(numbers)
        self.works: list[Work] = []


class Buckets:
    """The buckets of `params` (name, parameter) over `group`. Used by one thread; autograd calls the hooks on it too.

    In each step: `open()`, then backward passes with `arm()` called before the last one, then `finish(tail)`. All
    members open and finish the same steps; both are operations of the group, and whatever uses the group meanwhile must
    be in the same order on all members. `cap` (bytes of a bucket) is found by measurement unless it is given, or known:
    `knowledge` is what earlier buckets of the same parameters said, the same bytes on all members.
    """

    def __init__(
        self,
        group: Group,
        params: Sequence[tuple[str, nn.Parameter]],
        tail: int,
        cap: int | None = None,
        knowledge: bytes | None = None,
    ) -> None:
        self._group = group
        self._names = [name for name, _ in params]
        self._params = [param for _, param in params]
        self._kinds = [_Kind(param.dtype, param.device) for param in self._params]
        self._total = sum(param.nbytes for param in self._params)
        self._given_cap = CAP_BYTES if cap is None else cap
        self._cap = UNDIVIDED
        self._tail = tail
        self._order = list(range(len(self._params)))[::-1]
        self._watch: Watch | None = Watch()
        self._trial: Trial | None = None
        self._settled: Settled | None = None
        self._often: set[int] = set()
        self._seen = [False] * len(self._params)
        self._armed = False
        self._next = 0
        self._hooks: list[Any] = []
        self._memory: dict[_Kind, Tensor] = {}
        self._buckets: list[_Bucket] = []
        self._stale = True
        self._departing = group.account.departing
        self._about = digest_of(params, self._given_cap)
        known = fitting(knowledge, self._about, len(self._params))
        if known is not None:
            self._watch, self._settled = None, known.settled
            self._cap, self._order, self._often = known.cap, known.order, set(known.often)

    @property
    def digest(self) -> bytes:
        """Equal on two members if and only if their buckets fit each other."""
        text = repr([(self._names[n], tuple(self._params[n].shape), str(self._params[n].dtype)) for n in self._order])
        return blake2b(f"{text}{self._tail}{self._cap}{self._given_cap}".encode(), digest_size=16).digest()

    @property
    def settled(self) -> Settled | None:
        """What was measured and decided; None until then."""
        return self._settled

    def knowledge(self) -> bytes | None:
        """What later buckets of the same parameters, over another group, can start with; None until it is settled."""
        settled = self._settled
        return None if settled is None else note(self._about, self._cap, self._order, self._often, settled)

    # -- layout --------------------------------------------------------------------------------------------------------

    def _gradients(self) -> list[Gradient]:
        """In the order of arrival. What this member has not seen arrive is complete at the end of backward."""
        watch = self._watch or Watch()
        return [
            Gradient(self._params[number].nbytes, self._kinds[number], watch.arrivals.get(number, watch.backward))
            for number in self._order
        ]

    def _lay(self) -> None:
        runs = [[self._order[place] for place in bucket] for bucket in lay(self._gradients(), self._cap)]
        # The tail is exact in single precision; a last bucket of another kind cannot carry it.
        carried = bool(runs) and self._kinds[runs[-1][0]].dtype == TAIL_DTYPE
        wanted = [(self._kinds[run[0]], sum(self._params[number].numel() for number in run)) for run in runs]
        if not carried:
            wanted.append((_Kind(TAIL_DTYPE, self._params[0].device if self._params else CPU), 0))
        wanted[-1] = wanted[-1][0], wanted[-1][1] + self._tail
        memories = self._allot(wanted)
        self._own_tail = None if carried else memories.pop()
        self._buckets = [
            _Bucket(run, self._params, memory, self._cap) for run, memory in zip(runs, memories, strict=True)
        ]
        self._place = {number: bucket for bucket in self._buckets for number in bucket.numbers}
        self._stale = False

    def _allot(self, wanted: Sequence[tuple[_Kind, int]]) -> list[Tensor]:
        """Memory for so many elements of each kind, one after the other.

        There is one buffer for all of a kind, which is kept for as long as it is large enough: making one is an
        operation of the whole group, and not a quick one.
        """
        ends: dict[_Kind, int] = {}
        starts = []
        for kind, count in wanted:
            starts.append(-(-ends.get(kind, 0) // kind.line) * kind.line)
            ends[kind] = starts[-1] + count
        for kind, count in ends.items():
            held = self._memory.get(kind)
            if held is None or held.numel() < count:
                if held is not None:
                    self._group.release(held)
                self._memory[kind] = self._group.buffer(count + count // 1024 + _SPARE, kind.dtype, kind.device)
        return [self._memory[kind][start : start + count] for (kind, count), start in zip(wanted, starts, strict=True)]

    def resize_tail(self, tail: int) -> None:
        """Make room for a tail of another length, from the next `open` on."""
        if tail != self._tail:
            self._tail = tail
            self._stale = True

    # -- a step --------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin a step: no gradients yet."""
        self._armed = False
        self._next = 0
        for param in self._params:
            param.grad = None
        if self._watch is not None and len(self._watch.times) == WATCHED_STEPS:
            self._plan(self._watch)
        elif self._trial is not None and len(self._trial.times) == TRIED_STEPS:
            self._judge(self._trial)
        if self._stale:
            self._lay()
        for bucket in self._buckets:
            bucket.missing = len(bucket.numbers)
            bucket.works = []
        self._begin()

    def _begin(self) -> None:
        for watch in (self._watch, self._trial):
            if watch is not None:
                watch.begin()

    def arm(self) -> None:
        """The next backward is this member's last in the step: buckets may leave during it."""
        self._armed = self._divisible if self._watch is not None else len(self._buckets) > 1
        if self._armed:
            self._seen = [False] * len(self._params)
            if not self._hooks:
                self._hooks = [
                    param.register_post_accumulate_grad_hook(self._hook(number))
                    for number, param in enumerate(self._params)
                ]
        if self._watch is not None:
            self._watch.armed = True
        self._begin()

    @property
    def _divisible(self) -> bool:
        """Whether there may come to be more than one bucket, so that it matters when gradients arrive."""
        return self._total > (SMALLEST if self._given_cap is None else self._given_cap)

    def _hook(self, number: int) -> Any:
        def arrived(param: Tensor) -> None:
            if self._armed:
                self._arrive(number)

        return arrived

    def _arrive(self, number: int) -> None:
        if self._seen[number]:
            self._again(number)
            return
        self._seen[number] = True
        if self._watch is not None:
            self._watch.arrived(number)
            return
        bucket = self._place[number]
        bucket.missing -= 1
        if bucket.missing == 0 and not self._often.intersection(bucket.numbers):
            self._launch_complete()

    def _again(self, number: int) -> None:
        """A gradient that arrives in parts (reentrant checkpointing): its bucket must wait for the end of backward."""
        self._often.add(number)
        if self._place[number].works:
            raise ConfigError(
                f"the gradient of {self._names[number]!r} arrived again after it had been sent: backward reached this "
                "parameter in one more part than in earlier steps; use torch.utils.checkpoint with use_reentrant=False"
            )

    def _launch_complete(self) -> None:
        last = len(self._buckets) - 1
        while self._next < last:
            bucket = self._buckets[self._next]
            if bucket.missing or self._often.intersection(bucket.numbers):
                return
            self._launch(bucket)

    def _launch(self, bucket: _Bucket) -> None:
        self._departing.passed()
        views, grads = [], []
        for number, view in zip(bucket.numbers, bucket.views, strict=True):
            param = self._params[number]
            grad = param.grad
            if grad is None:
                view.zero_()
            elif grad.is_sparse:
                raise refuse_sparse(self._names[number])
            else:
                views.append(view)
                grads.append(grad)
            param.grad = view
        if len(bucket.pieces) > 1 and grads and grads[0].is_contiguous():
            # A gradient larger than the cap: each piece is summed while it is still in the cache.
            sources = grads[0].view(-1).split([piece.numel() for piece in bucket.pieces])
            for piece, source, summed in zip(bucket.pieces, sources, bucket.summed, strict=True):
                piece.copy_(source)
                self._sum(bucket, summed)
        else:
            if grads:
                torch._foreach_copy_(views, grads)
            for summed in bucket.summed:
                self._sum(bucket, summed)
        self._next += 1

    def _sum(self, bucket: _Bucket, buffer: Tensor) -> None:
        begun = time.perf_counter()
        bucket.works.append(self._group.sum(buffer))
        if self._watch is not None:
            self._watch.exchange += time.perf_counter() - begun

    def finish(self, tail: Tensor) -> Tensor:
        """Send what has not left, wait for all of it, and return the summed tail.

        Afterwards every parameter's `.grad` is the sum over the members.
        """
        self._armed = False
        if self._watch is not None:
            self._watch.end_backward(tail.device)
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if bucket.tail.numel():
                bucket.tail.copy_(tail)
            self._launch(bucket)
        begun = time.perf_counter()
        works = [work for bucket in self._buckets for work in bucket.works]
        if self._own_tail is not None:
            self._own_tail.copy_(tail)
            works.append(self._group.sum(self._own_tail))
        for work in works:
            work.wait()
        for watch in (self._watch, self._trial):
            if watch is not None:
                watch.end(tail.device)
                watch.exchange += time.perf_counter() - begun
        return (self._own_tail if self._own_tail is not None else self._buckets[-1].tail).clone()

    # -- after the watched steps ---------------------------------------------------------------------------------------

    def _plan(self, watch: Watch) -> None:
        """Measure, and let member 0 decide. No gradient is in the buffers."""
        # Who came last waited for nobody: its time is that of the exchange itself.
        exchange = float(self._group.gather(torch.tensor([watch.exchange], dtype=torch.float64), CONTROL).min())
        scratch = max(self._memory.values(), key=lambda memory: memory.nbytes)
        costs = measure(self._group, scratch, (self._total, exchange))
        early = [number for number in watch.arrivals if number not in self._often]
        placed = set(early)
        self._order = early + [number for number in self._order if number not in placed]
        for number in self._often.intersection(watch.arrivals):
            watch.arrivals[number] = watch.backward
        gradients = self._gradients()
        choice = Choice(self._given_cap or UNDIVIDED, close=False)
        if self._given_cap is None:
            choice = choose(gradients, costs, watch.backward, during_backward=watch.armed)
        self._watch = None
        if self._adopt(choice, gradients, costs):
            self._trial = Trial(gradients, costs, watch.seconds)

    def _judge(self, trial: Trial) -> None:
        """Keep the buckets that were tried, or go back to one."""
        better = trial.seconds < trial.rival
        self._trial = None
        self._adopt(Choice(self._cap if better else UNDIVIDED, close=False), trial.gradients, trial.costs)

    def _adopt(self, choice: Choice, gradients: Sequence[Gradient], costs: Costs) -> bool:
        """Lay the buckets as member 0 has chosen; whether they are to be tried first."""
        figures = settle(gradients, choice.cap, costs)
        latency, bandwidth, close = self._agree(choice.cap, figures.latency, figures.bandwidth, choice.close)
        self._lay()
        if len(self._buckets) == 1:
            self._unhook()
        if not close:
            sizes = [sum(self._params[number].nbytes for number in bucket.numbers) for bucket in self._buckets]
            self._settled = Settled(latency, bandwidth, sizes)
        return bool(close)

    def _agree(self, cap: int, *figures: float) -> list[float]:
        """Take over order, cap and what arrives in parts from member 0; its figures."""
        often = [number in self._often for number in range(len(self._params))]
        measured = torch.tensor(figures, dtype=torch.float64).view(torch.int64)
        told = torch.cat([torch.tensor([cap, *self._order, *often], dtype=torch.int64), measured])
        self._group.broadcast(told, CONTROL)
        count = len(self._params)
        self._cap, *rest = told[: 1 + 2 * count].tolist()
        self._order = rest[:count]
        self._often.update(number for number, flag in enumerate(rest[count:]) if flag)
        digests = self._group.gather(torch.frombuffer(bytearray(self.digest), dtype=torch.uint8), CONTROL)
        others = [member for member, digest in enumerate(digests) if not torch.equal(digest, digests[0])]
        if others:
            raise GroupError(
                f"the buckets of worker {others[0]} are not those of worker 0, though they agreed on them; "
                "build the same model on every worker, and let no worker change which parameters it trains"
            )
        result: list[float] = told[1 + 2 * count :].view(torch.float64).tolist()
        return result

    def close(self, *, with_group: bool = False) -> None:
        """Let go of the parameters and of the memory; gradients that show it keep it.

        `with_group`: the group is closed next, and does with its memory what it will.
        """
        self._unhook()
        if not with_group:
            for memory in self._memory.values():
                self._group.release(memory)
        self._memory, self._buckets, self._place, self._own_tail = {}, [], {}, None
        self._stale = True

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
