"""Whether the parameters are what they should be: finite, and equal on every worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from xxhash import xxh3_64_digest

from shoal.comm.group import Group
from shoal.core.errors import ConfigError, NotFiniteError

Params = Sequence[tuple[str, nn.Parameter]]
Tensors = Sequence[tuple[str, Tensor]]


def refuse_not_finite(params: Params, step: int) -> None:
    """A checkpoint of a model that is not finite would only be in the way of a sound one."""
    for name, param in params:
        if param.is_floating_point() and not torch.isfinite(param.detach().sum()):
            if bool(torch.isfinite(param).all()):
                continue
            raise NotFiniteError(
                f"parameter {name!r} is not finite after step {step}; it is not checkpointed. Lower the "
                "learning rate, or set clip=",
                step=step - 1,
            )


def refuse_different(name: str, module: nn.Module, group: Group) -> bool:
    """All workers must have the same tensors; whether they have the same values in them, too."""
    tensors = [pair for pair in (*module.named_parameters(), *module.named_buffers()) if not is_lazy(pair[1])]
    form = repr((name, [(each, tuple(tensor.shape), str(tensor.dtype)) for each, tensor in tensors])).encode()
    values = [(each, tensor) for each, tensor in tensors if is_plain(tensor)]
    mine = xxh3_64_digest(form) + digest_of(values)
    told = group.gather_bytes(mine, purpose=f"session.track({name}=...)")
    others = [worker for worker, theirs in enumerate(told) if theirs[:8] != told[0][:8]]
    if others:
        raise ConfigError(
            f"the model {name!r} of worker {others[0]} has other parameters or buffers than that of worker 0 (their "
            "names, shapes or types differ); build the same model on every worker"
        )
    return all(theirs == told[0] for theirs in told)


def refuse_parted(params: Params, group: Group) -> None:
    """After the first step: replicas must be equal, which a forward that changes parameters would break."""
    sums = [_digest(param) for _, param in params]
    told = group.gather_bytes(b"".join(sums), purpose="the comparison of parameters after the first step")
    for number, (name, _) in enumerate(params):
        at = slice(8 * number, 8 * number + 8)
        if any(other[at] != told[0][at] for other in told):
            raise ConfigError(
                f"parameter {name!r} differs between workers after the first step. Either its model was not "
                "tracked, so that it started differently: session.track(net=net); or something other than the "
                "optimizer changes it, in the forward or the loss: make it a buffer, or initialise it before training; "
                "or after_step= does not do the same on every worker; or, where a worker has joined, the loop changes "
                "what it tracks before the batches of a step: do that after step.apply"
            )


def digest_of(tensors: Tensors) -> bytes:
    """Equal where all of them are bitwise equal."""
    digest: bytes = xxh3_64_digest(b"".join(_digest(tensor) for _, tensor in tensors))
    return digest


def is_plain(tensor: Tensor) -> bool:
    """Whether it is all its values, one after the other."""
    return not is_lazy(tensor) and tensor.layout is torch.strided and tensor.device.type != "meta"


def fingerprint(param: Tensor) -> bytes:
    """Another one when the values are others, on this machine: where they are far from the processor, almost surely."""
    if param.device.type == "cpu":
        return _digest(param)
    return str(float(torch.linalg.vector_norm(param.detach().double()))).encode()


def _digest(param: Tensor) -> bytes:
    digest: bytes = xxh3_64_digest(_bytes(param))
    return digest


def _bytes(param: Tensor) -> Any:
    return param.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
