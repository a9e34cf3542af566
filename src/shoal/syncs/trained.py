"""An optimizer on one worker: its parameters, their exchange, and what that keeps from group to group."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from shoal.comm.codecs.memory import RESIDUAL
from shoal.comm.group import Group
from shoal.core.errors import ConfigError
from shoal.core.spec import AnyCodec, NoCodec
from shoal.syncs.allreduce import Exchange
from shoal.syncs.encoding import Encoding
from shoal.syncs.exchanges import make_exchange


@dataclass
class Trained:
    """An optimizer, and the exchange of those of its parameters that require gradients."""

    optimizer: torch.optim.Optimizer
    exchange: Exchange
    params: list[tuple[str, nn.Parameter]]
    everything: list[nn.Parameter]
    mask: list[bool]
    known: bytes | None = None
    """What was settled about its exchange in a group that is no more."""
    encoding: Encoding | None = None
    """What encoding its gradients keeps; None where they travel as they are."""

    @cached_property
    def frozen(self) -> list[nn.Parameter]:
        """Those that did not require a gradient when the exchange was made."""
        return [param for param, on in zip(self.everything, self.mask, strict=True) if not on]

    def outdated(self) -> bool:
        """Whether the optimizer has got other parameters, or others of them require gradients, since."""
        now = [param for group in self.optimizer.param_groups for param in group["params"]]
        same = len(now) == len(self.everything) and all(map(operator.is_, now, self.everything))
        return not same or [param.requires_grad for param in now] != self.mask


def make_trained(
    optimizer: torch.optim.Optimizer,
    group: Group,
    codec: AnyCodec,
    *,
    by_atom: bool,
    seed: int,
    knowledge: bytes | None,
    former: Trained | None,
) -> Trained:
    """The exchange of an optimizer's parameters over a group; `former` is what it had before, which is closed by this.

    Raises `ConfigError` if it cannot be trained, or if the workers' parameters differ.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("LBFGS evaluates the loss several times in one update; use another optimizer")
    everything = [param for group in optimizer.param_groups for param in group["params"]]
    mask = [param.requires_grad for param in everything]
    params = _trainable(optimizer)
    if not params:
        raise ConfigError("the optimizer has no parameter that requires a gradient; set requires_grad=True on some")
    encoding = _encoding(optimizer, codec, params, former)
    exchange = make_exchange(group, params, by_atom=by_atom, knowledge=knowledge, encoding=encoding, seed=seed)
    if len(set(group.gather_bytes(exchange.digest(), purpose="session.track of an optimizer"))) > 1:
        raise ConfigError(
            "the workers' models differ in their parameters, or in how far their codec is; build the same model on "
            "every worker"
        )
    if former is not None:
        former.exchange.close()
    return Trained(optimizer, exchange, params, everything, mask, knowledge, encoding)


def take_up(trained: Trained, codec: AnyCodec) -> None:
    """Have an encoding of the parameters that require gradients now: a member whose state was taken over has those."""
    if trained.encoding is not None and trained.outdated():
        trained.encoding = _encoding(trained.optimizer, codec, _trainable(trained.optimizer), trained)


def _trainable(optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    """Those that require gradients, by name."""
    everything = [param for group in optimizer.param_groups for param in group["params"]]
    names = [name for group in optimizer.param_groups for name in group.get("param_names", [])]
    if len(names) != len(everything):
        names = [f"parameter {number}" for number in range(len(everything))]
    return [(name, param) for name, param in zip(names, everything, strict=True) if param.requires_grad]


def _encoding(
    optimizer: torch.optim.Optimizer, codec: AnyCodec, params: list[tuple[str, nn.Parameter]], former: Trained | None
) -> Encoding | None:
    if codec == NoCodec():
        return None
    before = None if former is None else former.encoding
    if before is not None and [id(param) for _, param in before.params] == [id(param) for _, param in params]:
        return before
    encoding = Encoding(codec, optimizer, params)
    if before is not None and (unsent := before.memory.parts().get(RESIDUAL)) is not None:
        encoding.memory.take(encoding.flat(before.keyed({RESIDUAL: unsent})), 1)
        if before.variance is not None and before.variance.held:
            encoding.memory.rescale(1.0 / before.variance.fresh)
    return encoding
