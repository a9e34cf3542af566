"""Buckets: gradients of a set of parameters in flat buffers that are summed over a group while backward still runs.

Parameters are laid into buckets in the order in which backward completes them. A bucket leaves as soon as it is
complete and all before it have left, so that every member starts the same operations in the same order. The last
bucket carries a *tail*: a few numbers of the step (loss, weights, flags) that every member needs and that would
otherwise cost an operation of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.group import Group, Work
from shoal.core.errors import ConfigError

CAP_BYTES = 25 << 20
"""Size at which a bucket is closed. Larger ones use a link better, smaller ones leave earlier."""

TAIL_DTYPE = torch.float32


def refuse_sparse(name: str) -> ConfigError:
    return ConfigError(f"{name!r} has a sparse gradient; build its layer with sparse=False")


class _Bucket:
    """Consecutive parameters of one dtype and device, and the flat buffer of their gradients."""

    def __init__(self, numbers: list[int], params: Sequence[nn.Parameter], tail: int) -> None:
        first = params[numbers[0]]
        sizes = [params[number].numel() for number in numbers]
        self.numbers = numbers
        self.buffer = torch.zeros(sum(sizes) + tail, dtype=first.dtype, device=first.device)
        flat, self.tail = self.buffer.split([sum(sizes), tail])
        self.views = [piece.view_as(params[number]) for piece, number in zip(flat.split(sizes), numbers, strict=True)]
        self.missing = len(numbers)
        self.work: Work | None = None


class Buckets:
    """The buckets of `params` (name, parameter) over `group`. Used by one thread; autograd calls the hooks on it too.

    In each step: `open()`, then backward passes with `arm()` called before the last one, then `finish(tail)`.
    """

    def __init__(
        self, group: Group, params: Sequence[tuple[str, nn.Parameter]], tail: int, cap: int | None = None
    ) -> None:
        self._group = group
        self._names = [name for name, _ in params]
        self._params = [param for _, param in params]
        self._cap = CAP_BYTES if cap is None else cap
        self._tail = tail
        self._order = list(range(len(self._params)))[::-1]
        self._arrivals: list[int] | None = []
        self._often: set[int] = set()
        self._seen = [False] * len(self._params)
        self._armed = False
        self._next = 0
        self._hooks: list[Any] = []
        self._lay()

    @property
    def digest(self) -> bytes:
        """Equal on two members if and only if their buckets fit each other."""
        text = repr([(self._names[n], tuple(self._params[n].shape), str(self._params[n].dtype)) for n in self._order])
        return blake2b(f"{text}{self._tail}{self._cap}".encode(), digest_size=16).digest()

    def _lay(self) -> None:
        runs: list[list[int]] = []
        room = 0
        for number in self._order:
            param = self._params[number]
            same = runs and self._kind(runs[-1][0]) == self._kind(number)
            if not same or param.nbytes > room:
                runs.append([])
                room = self._cap
            runs[-1].append(number)
            room -= param.nbytes
        # The tail is exact in single precision; a last bucket of another kind cannot carry it.
        carried = bool(runs) and self._kind(runs[-1][0])[0] == TAIL_DTYPE
        last = len(runs) - 1
        self._buckets = [
            _Bucket(run, self._params, self._tail if carried and at == last else 0) for at, run in enumerate(runs)
        ]
        self._place = {number: bucket for bucket in self._buckets for number in bucket.numbers}
        device = self._params[0].device if self._params else torch.device("cpu")
        self._own_tail = None if carried else torch.zeros(self._tail, dtype=TAIL_DTYPE, device=device)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if len(self._buckets) > 1:
            self._hooks = [
                param.register_post_accumulate_grad_hook(self._hook(number))
                for number, param in enumerate(self._params)
            ]

    def _kind(self, number: int) -> tuple[torch.dtype, torch.device]:
        return self._params[number].dtype, self._params[number].device

    def resize_tail(self, tail: int) -> None:
        """Make room for a tail of another length, from the next step on."""
        if tail != self._tail:
            self._tail = tail
            self._lay()

    def open(self) -> None:
        """Begin a step: no gradients yet."""
        self._armed = False
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.numbers)
            bucket.work = None
        for param in self._params:
            param.grad = None

    def arm(self) -> None:
        """The next backward is this member's last in the step: buckets may leave during it."""
        self._armed = len(self._buckets) > 1
        if self._armed:
            self._seen = [False] * len(self._params)

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
        if self._arrivals is not None:
            # The first step only watches: the order of arrival decides the layout.
            self._arrivals.append(number)
            return
        bucket = self._place[number]
        bucket.missing -= 1
        if bucket.missing == 0 and not self._often.intersection(bucket.numbers):
            self._launch_complete()

    def _again(self, number: int) -> None:
        """A gradient that arrives in parts (reentrant checkpointing): its bucket must wait for the end of backward."""
        self._often.add(number)
        if self._place[number].work is not None:
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
        present_views, grads = [], []
        for number, view in zip(bucket.numbers, bucket.views, strict=True):
            param = self._params[number]
            grad = param.grad
            if grad is None:
                view.zero_()
            elif grad.is_sparse:
                raise refuse_sparse(self._names[number])
            else:
                present_views.append(view)
                grads.append(grad)
            param.grad = view
        if grads:
            torch._foreach_copy_(present_views, grads)
        bucket.work = self._group.sum(bucket.buffer)
        self._next += 1

    def finish(self, tail: Tensor) -> Tensor:
        """Send what has not left, wait for all of it, and return the summed tail.

        Afterwards every parameter's `.grad` is the sum over the members.
        """
        self._armed = False
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if bucket.tail.numel():
                bucket.tail.copy_(tail)
            self._launch(bucket)
        works = [bucket.work for bucket in self._buckets]
        if self._own_tail is not None:
            self._own_tail.copy_(tail)
            works.append(self._group.sum(self._own_tail))
        for work in works:
            assert work is not None
            work.wait()
        summed = (self._own_tail if self._own_tail is not None else self._buckets[-1].tail).clone()
        if self._arrivals is not None:
            self._settle()
        return summed

    def _settle(self) -> None:
        """Lay the buckets anew in the order in which member 0 saw the gradients arrive."""
        seen, self._arrivals = self._arrivals or [], None
        if len(self._buckets) == 1:
            return
        rest = [number for number in self._order if number not in set(seen)]
        order = torch.tensor(seen + rest, dtype=torch.int64)
        often = torch.tensor([number in self._often for number in range(len(self._params))], dtype=torch.uint8)
        self._group.broadcast(order)
        self._group.broadcast(often)
        self._order = order.tolist()
        self._often.update(number for number, flag in enumerate(often.tolist()) if flag)
        summed = [param.grad for param in self._params]
        self._lay()
        # The old buffers live on in the gradients of this one step.
        for param, grad in zip(self._params, summed, strict=True):
            param.grad = grad

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
