"""A worker's gradient of one lease: where it lies, and which parts of it are complete.

Gradients are gathered in an *area* (see `cutting`): memory that servers on this host read, or private memory that
frames are sent from. What autograd makes first of a parameter's gradient is copied there as soon as it is complete;
from then on `param.grad` is a view of the area, and later backwards add to it in place.

During the last backward of a lease, stretches leave as soon as all of their parameters have arrived. Autograd runs the
hooks of parameters on the CPU in the thread that called backward, which is the one that sockets belong to; where it
does not (deeply nested reentrant checkpointing, gradients on an accelerator) stretches leave at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.comm.buckets import refuse_sparse
from shoal.core.errors import ConfigError
from shoal.syncs.leaving import WATCHED
from shoal.syncs.server.pushcodec import Stretch

if TYPE_CHECKING:
    from shoal.syncs.server.cutting import Cut


class Gradient:
    """Belongs to the thread that made it, which also calls backward."""

    def __init__(
        self,
        cut: Cut,
        params: Sequence[tuple[str, nn.Parameter]],
        stretches: Sequence[Stretch],
        leave: Callable[[int], None],
    ) -> None:
        """`leave` is called with the number of each stretch that is complete before the end of the last backward."""
        self._cut = cut
        self._names = [name for name, _ in params]
        self._params = [param for _, param in params]
        self._leave = leave
        self._thread = threading.get_ident()
        self._early = all(param.device.type == "cpu" for param in self._params)
        self._sizes = [len(stretch.params) for stretch in stretches]
        self._of: list[list[int]] = [[] for _ in self._params]
        for number, stretch in enumerate(stretches):
            for param in stretch.params:
                self._of[param].append(number)
        self._by_place: dict[int, list[Tensor]] = {}
        self._views: list[Tensor] = []
        self._area: Tensor | None = None
        self._touched = [False] * len(self._params)
        self._armed = False
        self._missing: list[int] = []
        self._seen: set[int] = set()
        self._left: set[int] = set()
        self._often: set[int] = set()
        """Parameters whose gradient arrived in several parts of one backward."""
        self._watched = 0
        self._hooks: list[Any] = [
            param.register_post_accumulate_grad_hook(self._hook(number)) for number, param in enumerate(self._params)
        ]

    # -- a lease -------------------------------------------------------------------------------------------------------

    def open(self, area: Tensor) -> None:
        """No gradients yet; they will be in this area."""
        views = self._by_place.get(area.data_ptr())
        if views is None:
            views = [self._cut.view(area, number) for number in range(len(self._params))]
            self._by_place[area.data_ptr()] = views
        self._area, self._views = area, views
        self._armed = False
        self._left.clear()
        self._touched = [False] * len(self._params)
        for param in self._params:
            param.grad = None

    def arm(self) -> None:
        """The next backward is the last of the lease."""
        self._armed = True
        self._missing = self._sizes.copy()
        self._seen.clear()

    def finish(self) -> list[bool]:
        """All of the gradient lies in the area now, zeros where there is none; for which parameters there is one."""
        self._watched += self._armed
        self._armed = False
        used = []
        with torch.no_grad():
            for number, (param, view) in enumerate(zip(self._params, self._views, strict=True)):
                grad = param.grad
                used.append(grad is not None and (self._touched[number] or grad is not view))
                if grad is None:
                    view.zero_()
                elif grad is not view:
                    self._take(number, param, grad)
        return used

    def close(self) -> None:
        """Let go of the parameters and of the area."""
        for hook in self._hooks:
            hook.remove()
        for param, view in zip(self._params, self._views, strict=bool(self._views)):
            if param.grad is view:
                param.grad = None
        self._hooks, self._views, self._area, self._by_place = [], [], None, {}

    # -- during backward -----------------------------------------------------------------------------------------------

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        def arrived(param: Tensor) -> None:
            if self._area is not None:
                self._arrive(number, param)

        return arrived

    def _arrive(self, number: int, param: Tensor) -> None:
        self._touched[number] = True
        again = self._armed and number in self._seen
        if again:
            self._often.add(number)
            if not self._left.isdisjoint(self._of[number]):
                raise ConfigError(
                    f"the gradient of {self._names[number]!r} arrived again after it had been sent: backward reached "
                    "this parameter in one more part than in earlier steps; use torch.utils.checkpoint with "
                    "use_reentrant=False"
                )
        grad = param.grad
        if grad is not None and grad is not self._views[number]:
            with torch.no_grad():
                self._take(number, param, grad)
        if self._armed and not again:
            self._seen.add(number)
            for stretch in self._of[number]:
                self._missing[stretch] -= 1
            self._leave_complete(number)

    def _take(self, number: int, param: Tensor, grad: Tensor) -> None:
        """Have a gradient in the area that autograd, or somebody else, has put elsewhere."""
        if grad.layout != torch.strided:
            raise refuse_sparse(self._names[number])
        self._views[number].copy_(grad)
        if param.device.type == "cpu":
            param.grad = self._views[number]

    def _leave_complete(self, number: int) -> None:
        if not self._early or self._watched < WATCHED or threading.get_ident() != self._thread:
            return
        for stretch in self._of[number]:
            if not self._missing[stretch] and stretch not in self._left and not self._waits(stretch):
                self._left.add(stretch)
                self._leave(stretch)

    def _waits(self, stretch: int) -> bool:
        return any(stretch in self._of[number] for number in self._often)
