"""How gradients are applied, on a worker and on a server: measured, scaled, stepped; then the schedule and the average.

In two phases. `Applier.measure` is what one owner has to say of its gradients; over all owners squares are added, and
`clipping` says what follows. Then each owner does `Applier.apply` with the same scale, and `Applier.end`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import isfinite, isnan, sqrt
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shoal.syncs.updating import rates_of, update


class Gradients(Protocol):
    """Those of one step, wherever they lie."""

    def square(self) -> float:
        """Their squared norm; not finite if any number of them is not."""

    def place(self, scale: float) -> None:
        """Have them, times `scale`, in `.grad` of the optimizer's parameters."""


class OwnGradients:
    """Gradients of whole parameters, which are changed where they lie."""

    def __init__(self, grads: Sequence[Tensor | None]) -> None:
        self._grads = [grad for grad in grads if grad is not None]
        self.precision: torch.dtype | None = None
        """That of their norm, once it was asked for."""

    def square(self) -> float:
        total = torch.nn.utils.get_total_norm(self._grads)
        self.precision, norm = total.dtype, float(total)
        return norm * norm  # the root of this is the norm again, bit for bit

    @torch.no_grad()
    def place(self, scale: float) -> None:
        for dtype in {grad.dtype for grad in self._grads} if scale != 1.0 else ():
            same = [grad for grad in self._grads if grad.dtype == dtype]
            # with a norm, in its precision, as torch has it; kernels round differently for numbers that are no tensors
            exact = None if self.precision is None else torch.tensor(scale, dtype=self.precision, device=same[0].device)
            torch._foreach_mul_(same, scale if exact is None else exact)


class Measured(NamedTuple):
    square: float
    finite: bool

    @property
    def norm(self) -> float:
        return sqrt(self.square)


def clipping(norm: float, clip: float, precision: torch.dtype | None = None) -> float:
    """What gradients of this norm are to be multiplied by: as `torch.nn.utils.clip_grad_norm_` does, bit for bit."""
    return float(torch.clamp(clip / (torch.tensor(norm, dtype=precision or torch.float64) + 1e-6), max=1.0))


class Average:
    """An exponential moving average of a model's floating-point parameters."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._params = [(name, param) for name, param in model.named_parameters() if param.is_floating_point()]
        self.values = [param.detach().clone() for _, param in self._params]

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(self.values, [param.detach() for _, param in self._params], 1.0 - self._decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the average with the weights; again to undo. See `averaged`."""
        for (_, param), value in zip(self._params, self.values, strict=True):
            weights = param.detach().clone()
            param.copy_(value)
            value.copy_(weights)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: value for (name, _), value in zip(self._params, self.values, strict=True)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for (name, _), value in zip(self._params, self.values, strict=True):
            value.copy_(state[name])


@contextmanager
def averaged(average: Average | None) -> Iterator[None]:
    """Within, the model has the average of its weights, where there is one."""
    if average is not None:
        average.swap()
    try:
        yield
    finally:
        if average is not None:
            average.swap()


class Applier:
    """An optimizer, and what goes on with its steps: a schedule, and an average of the weights."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Any = None, average: Average | None = None) -> None:
        self.optimizer, self.schedule, self.average = optimizer, schedule, average

    @property
    def by_loss(self) -> bool:
        """Whether the schedule goes by losses: of evaluations where there are some, else of steps."""
        return isinstance(self.schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)

    def rates(self) -> list[float]:
        return rates_of(self.optimizer)

    @staticmethod
    def measure(gradients: Gradients) -> Measured:
        square = gradients.square()
        return Measured(square, isfinite(square))

    def apply(
        self,
        gradients: Gradients,
        scale: float = 1.0,
        *,
        rates: Sequence[float] | None = None,
        within: AbstractContextManager[None] | None = None,
    ) -> None:
        """An optimizer step with gradients × scale; at these learning rates, if given, and `within` this."""
        gradients.place(scale)
        groups = [group for group in self.optimizer.param_groups if rates is not None and "lr" in group]
        usuals = [group["lr"] for group in groups]
        try:
            for group, rate in zip(groups, (rate for rate in rates or () if not isnan(rate)), strict=True):
                group["lr"] = rate
            with within or nullcontext():
                update(self.optimizer)
        finally:
            for group, usual in zip(groups, usuals, strict=True):
                group["lr"] = usual

    def end(self, loss: float) -> None:
        """A step has ended. A schedule that goes by losses is not stepped if this one is NaN."""
        if self.average is not None:
            self.average.update()
        if self.schedule is None:
            return
        if not self.by_loss:
            self.schedule.step()
        elif not isnan(loss):
            self.schedule.step(loss)

    def evaluated(self, loss: float) -> None:
        """There was an evaluation since the last step."""
        if self.by_loss:
            self.schedule.step(loss)
