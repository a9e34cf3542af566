"""Adam's moments, where gradients travel encoded.

Adam divides by the root of a running mean of squared gradients. What a codec makes of gradients has other squares: a
sign has one size for a whole block, a sparse part has few large numbers, a product of thin matrices has less. So the
mean is not taken of those. For the first steps gradients are exchanged almost as they are, until the mean has become
steady. Then it is held, whatever comes; and each worker adds up the squares of its own gradients, from which the mean
is brought up to date now and then, as often as it turns out to have changed. In between the optimizer is linear in its
gradients, which is what error feedback needs. The same numbers are the codec's gauge.

From then on it is the first moment that travels: each worker adds its part of the gradient to an equal part of the
moment that all have, and the sum is the new one. It is smaller than a gradient and changes less from step to step, and
what encoding loses of it is smaller in proportion. The optimizer itself then applies it as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError

FIRST_CHECK = 40
"""The step of the optimizer at which its mean is looked at first."""
GROWTH = 1.25
"""From one look to the next."""
_MOST_BETWEEN = 50
"""Steps from one look to the next: an optimizer may be old when it is looked at first."""
STEADY = 0.1
"""Relative change of what the optimizer divides by, from one look to the next, below which it counts as steady."""
_FLOOR = 0.04
"""Of its tensor's mean: no element is held at less, as one that has had no gradient yet would be."""
_SLACK = 1e-6
"""Relative. Makes the held mean grow by next to nothing, where rounding could make it negative."""
_MOST_INTERVAL = 1 << 20


class Variance:
    """That of one Adam's parameters. Equal on all workers, since it depends on summed numbers only."""

    def __init__(
        self,
        optimizer: torch.optim.Adam,
        params: Sequence[nn.Parameter],
        others: Sequence[nn.Parameter] = (),
        *,
        carries: bool = True,
    ) -> None:
        """`params` are those whose gradients are encoded; `others` those of the same optimizer that are not.

        Unless it `carries` the first moment, gradients travel, and that is left to the optimizer.
        """
        self._carries = carries
        self._optimizer = optimizer
        self._params = params
        self._others = others
        self._gauge: Tensor | None = None
        self.held_at = 0
        """The step of the optimizer at which it was held; 0 while it is not."""
        self._renewed: list[int] = []
        """For each parameter the step of the optimizer whose gradient was the last to count in it."""
        self._live: list[bool] = []
        """For each parameter whether it is as yet left to the optimizer, as it has had hardly any gradients."""
        self._interval = 1
        """Steps from one renewal to the next."""
        self._look_at = FIRST_CHECK
        self._seen: Tensor | None = None
        """What the optimizer divided by at the last look."""
        self.scale = 1.0
        """What the last ones were multiplied by when they had been summed."""

    @staticmethod
    def of(
        optimizer: torch.optim.Optimizer,
        params: Sequence[nn.Parameter],
        others: Sequence[nn.Parameter] = (),
        *,
        carries: bool = True,
    ) -> Variance | None:
        """None for an optimizer that has none. Raises `ConfigError` for one whose cannot be held."""
        if not isinstance(optimizer, torch.optim.Adam):  # AdamW is one
            return None
        if not can_be_held(optimizer):
            raise ConfigError(
                "codec: onebit and topk hold Adam's variance, which amsgrad=True does not let them; use "
                "amsgrad=False, or another codec"
            )
        return Variance(optimizer, params, others, carries=carries)

    @property
    def held(self) -> bool:
        return self.held_at > 0

    @property
    def fresh(self) -> float:
        """How much of a gradient is in what travels."""
        if not self._carries:
            return 1.0
        return 1.0 - _kept(float(self._optimizer.param_groups[0]["betas"][0]), self._steps())

    def due(self) -> bool:
        """Whether it is to be renewed in this step."""
        return self.held and self._steps() - max(self._renewed) >= self._interval

    # -- for each step -------------------------------------------------------------------------------------------------

    def gauge(self) -> Tensor:
        """What the optimizer divides by, for all parameters one after the other."""
        if self._gauge is None:
            groups = self._groups
            live = self._live or [False] * len(self._params)
            gauge = torch.cat(
                [
                    (
                        torch.zeros_like(param, dtype=torch.float32) if on else self._divisor(param, groups[id(param)])
                    ).flatten()
                    for param, on in zip(self._params, live, strict=True)
                ]
            )
            # of what has had no gradient yet nothing is known: it counts as others do
            known = gauge > 0
            self._gauge = torch.where(known, gauge, gauge[known].mean() if bool(known.any()) else 1.0)
        return self._gauge

    def begin_anew(self) -> None:
        """Members have changed: no squares are there yet, and those that come together have to have the same bits."""
        self._gauge = None
        if self.held:
            self._renewed = [self._steps_of(param) for param in self._params]

    def hurry(self) -> None:
        """Members have met anew: where they do so more often than it is renewed it would never be."""
        if self.held:
            self._interval = max(1, self._interval // 2)

    @property
    def pace(self) -> tuple[int, int]:
        """What decides when it is renewed, which all members have to do together."""
        return self.held_at, self._interval

    @torch.no_grad()
    def renew(self, squares: Tensor, members: int) -> None:
        """Bring it up to date: `squares` are those of all members' own gradients since it was last, added up.

        The square of a sum is more than the sum of squares by what the members' gradients have in common, of which the
        optimizer's first moment is an estimate.
        """
        before, groups = self.gauge(), self._groups
        parts = squares.split([param.numel() for param in self._params])
        for number, (param, part) in enumerate(zip(self._params, parts, strict=True)):
            state, last = self._optimizer.state.get(param), self._renewed[number]
            count = self._steps_of(param) - last
            if not state or not count:
                continue
            beta, step = float(groups[id(param)]["betas"][1]), last + count
            self._renewed[number] = step
            live = self._live[number]
            if live and not bool(part.any()):
                continue  # it has had no gradients as yet: what its moments have is what encoding made of others'
            mean = part.view_as(param).div(count)
            mean.addcmul_(state["exp_avg"], state["exp_avg"], value=1.0 - 1.0 / members)
            held = state["exp_avg_sq"]
            if live:
                held.copy_(mean).mul_(1 - beta**step)
            else:
                was = beta**count * (1 - beta**last) / (1 - beta**step)
                held.mul_(was).add_(mean.to(held.dtype), alpha=1 - beta**count)
            _raise_to_floor(held)
            self._live[number] = self._steps_of(param) < FIRST_CHECK
        self._gauge = None
        self._adapt(_change(before, self.gauge()))

    def _adapt(self, change: float) -> None:
        """Renew more often what changes more."""
        if change > 2 * STEADY:
            self._interval = max(1, self._interval // 2)
        elif change < STEADY:
            self._interval = min(_MOST_INTERVAL, self._interval * 2)

    @torch.no_grad()
    def mix(self, grads: Sequence[Tensor], members: int, first: int = 0) -> None:
        """Make of this member's gradients its part of the first moment, of which all have the last one.

        `grads` are those of the parameters from number `first` on.
        """
        if not self._carries:
            return
        for param, grad in zip(self._params[first:], grads, strict=False):
            beta, state = self._first_beta(param), self._optimizer.state.get(param)
            beta = _kept(beta, self._steps_of(param))
            grad.mul_(1 - beta)
            if state:
                grad.add_(state["exp_avg"], alpha=beta / members)

    @contextmanager
    def applying(self, scale: float) -> Iterator[None]:
        """Within, the optimizer makes a step with first moments in place of gradients, and changes no second moment.

        `scale` is what gradients have been multiplied by since they were summed: they may have been clipped.
        """
        self.scale = scale
        self._prepare()
        kept = [group["betas"] for group in self._optimizer.param_groups]
        if self._carries:
            for group, (_, second) in zip(self._optimizer.param_groups, kept, strict=True):
                group["betas"] = (0.0, second)
        try:
            yield
        finally:
            for group, betas in zip(self._optimizer.param_groups, kept, strict=True):
                group["betas"] = betas
        if self._carries:
            self._keep_moments()

    @torch.no_grad()
    def _prepare(self) -> None:
        groups = self._groups
        for param, live in zip(self._params, self._live, strict=True):
            if param.grad is not None and (step := self._steps_of(param)):
                group, held, beta = groups[id(param)], *self._second(param, groups[id(param)])
                if live:
                    own = _seen_by(param, group, self._fresh_part(param, group))
                    held.addcmul_(own, own, value=(1 - beta) / beta)
                else:
                    held.mul_((1 - beta ** (step + 1)) / (1 - beta**step) / beta)
                self._take_away(held, beta, _seen_by(param, group, param.grad))
        for param in self._others if self._carries else ():
            if param.grad is not None and self._steps_of(param):
                group, held, beta = groups[id(param)], *self._second(param, groups[id(param)])
                own = _seen_by(param, group, param.grad)
                first = _kept(float(group["betas"][0]), self._steps_of(param))
                held.addcmul_(own, own, value=(1 - beta) / beta)
                param.grad.mul_(1 - first).add_(self._optimizer.state[param]["exp_avg"], alpha=first)
                self._take_away(held, beta, _seen_by(param, group, param.grad))

    def _fresh_part(self, param: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
        """The gradient in what was summed: without what it has of the last first moment."""
        assert param.grad is not None
        if not self._carries:
            return param.grad
        stays = _kept(float(group["betas"][0]), self._steps_of(param))
        return param.grad.sub(self._optimizer.state[param]["exp_avg"], alpha=stays).div_(1 - stays)

    def _second(self, param: nn.Parameter, group: Mapping[str, Any]) -> tuple[Tensor, float]:
        return self._optimizer.state[param]["exp_avg_sq"], float(group["betas"][1])

    @staticmethod
    def _take_away(held: Tensor, beta: float, grad: Tensor) -> None:
        """What the step is about to do with `grad` shall not show: v ← β₂v + (1−β₂)g²."""
        held.addcmul_(grad, grad, value=-(1 - beta) / beta * (1 - _SLACK))

    @torch.no_grad()
    def _keep_moments(self) -> None:
        """The first moment is what was applied, also where the optimizer has made something else of it before."""
        groups = self._groups
        for param in (*self._params, *self._others):
            group = groups[id(param)]
            turned = group["maximize"] or (group["weight_decay"] and not group.get("decoupled_weight_decay"))
            if turned and param.grad is not None:
                self._optimizer.state[param]["exp_avg"].copy_(param.grad)

    def observe(self) -> bool:
        """After a step of the optimizer while it is not held: hold it if it is steady. Whether it is held now."""
        step = self._steps()
        if step < self._look_at:
            return False
        self._gauge = None
        now = self.gauge()
        if self._seen is not None and _change(self._seen, now) < STEADY:
            self._hold(step)
        else:
            self._seen, self._look_at = now, max(step + 1, min(int(step * GROWTH), step + _MOST_BETWEEN))
        return self.held

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _groups(self) -> dict[int, dict[str, Any]]:
        """Of each parameter, by identity. Not kept: an optimizer that loads a state has new ones."""
        return {id(param): group for group in self._optimizer.param_groups for param in group["params"]}

    def _first_beta(self, param: nn.Parameter) -> float:
        for group in self._optimizer.param_groups:
            if len(self._optimizer.param_groups) == 1 or any(param is one for one in group["params"]):
                return float(group["betas"][0])
        raise AssertionError("a parameter that the optimizer does not have")

    def _steps(self) -> int:
        """Steps of the parameter that has had most: some may have had none so far."""
        return max((self._steps_of(param) for param in self._params), default=0)

    def _steps_of(self, param: nn.Parameter) -> int:
        state = self._optimizer.state.get(param)
        return int(state["step"]) if state else 0

    def _all_live(self) -> list[bool]:
        return [
            self._steps_of(param) < FIRST_CHECK or not bool(self._optimizer.state[param]["exp_avg_sq"].any())
            for param in self._params
        ]

    def _divisor(self, param: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
        state = self._optimizer.state.get(param)
        if not state:
            return torch.zeros_like(param, dtype=torch.float32)
        mean: Tensor = state["exp_avg_sq"] / (1 - float(group["betas"][1]) ** float(state["step"]))
        return torch.where(mean > 0, mean.to(torch.float32).sqrt_().add_(group["eps"]), 0.0)

    @torch.no_grad()
    def _hold(self, step: int) -> None:
        groups = self._groups
        for param in self._params:
            if self._steps_of(param):
                _raise_to_floor(self._optimizer.state[param]["exp_avg_sq"])
        for param in (*self._params, *self._others) if self._carries else ():
            state = self._optimizer.state.get(param)
            if state:
                # corrected for its start, which the optimizer does not do any longer
                group = groups[id(param)]
                # and turned back: it is gradients that travel
                turned = -1.0 if group["maximize"] else 1.0
                state["exp_avg"].mul_(turned / (1 - float(group["betas"][0]) ** float(state["step"])))
        self.held_at, self._renewed = step, [self._steps_of(param) for param in self._params]
        self._live = self._all_live()
        self._interval = max(1, step // 4)
        self._gauge, self._seen = None, None

    # -- state ---------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "held_at": self.held_at,
            "renewed": self._renewed,
            "live": self._live,
            "interval": self._interval,
            "look_at": self._look_at,
            "seen": self._seen,
            "scale": self.scale,
        }

    def load(self, state: Mapping[str, Any] | None) -> None:
        if state is not None and len(state["renewed"]) in (0, len(self._params)):
            self.held_at, self._renewed = int(state["held_at"]), [int(step) for step in state["renewed"]]
            self._live = [bool(live) for live in state["live"]]
            self._interval, self._look_at = int(state["interval"]), int(state["look_at"])
            self._seen, self.scale, self._gauge = state["seen"], float(state["scale"]), None
            if self._seen is not None and self._seen.numel() != sum(param.numel() for param in self._params):
                self._seen = None  # it is of other parameters


def can_be_held(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it divides by a mean of squares that nothing else is made of."""
    return isinstance(optimizer, torch.optim.Adam) and not any(group.get("amsgrad") for group in optimizer.param_groups)


def _kept(beta: float, steps: int) -> float:
    """How much of a mean that is corrected for its start stays in it, after so many steps."""
    return beta * (1 - beta**steps) / (1 - beta ** (steps + 1))


def _seen_by(param: nn.Parameter, group: Mapping[str, Any], grad: Tensor) -> Tensor:
    """What the optimizer takes for the gradient: decay that is not decoupled is part of it."""
    grad = -grad if group["maximize"] else grad
    decays = group["weight_decay"] and not group.get("decoupled_weight_decay")
    return grad.add(param, alpha=group["weight_decay"]) if decays else grad


def _raise_to_floor(mean: Tensor) -> None:
    mean.clamp_(min=_FLOOR * float(mean.mean()))


def _change(before: Tensor, now: Tensor) -> float:
    """How much of what the optimizer divides by has changed."""
    return float((now - before).abs().sum() / before.sum())
