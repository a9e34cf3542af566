"""What a run tracks on one worker: modules, optimizers and whatever else has a state, equal on all workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.tree import pack


class Replica:
    """The tracked objects by name."""

    def __init__(self) -> None:
        self.tracked: dict[str, Any] = {}

    def modules(self) -> list[nn.Module]:
        return [thing for thing in self.tracked.values() if isinstance(thing, nn.Module)]

    def named(self) -> list[tuple[str, nn.Module]]:
        """The modules, each with what the names of its parts begin with: nothing where there is one module."""
        modules = [(name, thing) for name, thing in self.tracked.items() if isinstance(thing, nn.Module)]
        return modules if len(modules) > 1 else [("", thing) for _, thing in modules]

    def named_modules(self) -> dict[str, nn.Module]:
        return {name: thing for name, thing in self.tracked.items() if isinstance(thing, nn.Module)}

    def trees(self) -> dict[str, Any]:
        """The state of each, as a checkpoint holds it. The tensors are the live ones."""
        return {name: thing.state_dict() for name, thing in self.tracked.items()}

    def passing(self) -> list[dict[str, Tensor]]:
        """For each module the buffers that a checkpoint leaves out, and that a worker which joins needs."""
        return [
            {name: buffer for name, buffer in module.named_buffers() if name not in module.state_dict()}
            for module in self.modules()
        ]

    def trains(self) -> list[list[bool]]:
        """For each module which of its parameters require a gradient: a loss or a callback may thaw some."""
        return [[param.requires_grad for param in module.parameters()] for module in self.modules()]

    @torch.no_grad()
    def load(self, trees: Mapping[str, Any], passing: list[dict[str, Tensor]], trains: list[list[bool]]) -> None:
        """Take over the state of another worker."""
        for module, wanted in zip(self.modules(), trains, strict=True):
            for param, on in zip(module.parameters(), wanted, strict=True):
                param.requires_grad_(on)
        for name, thing in self.tracked.items():
            thing.load_state_dict(trees[name])
        for module, buffers in zip(self.modules(), passing, strict=True):
            for name, buffer in module.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])

    def signature(self) -> list[Any]:
        """What must be the same on all workers of a run."""
        parts: list[Any] = []
        for name, thing in self.tracked.items():
            parts.append((name, type(thing).__name__))
            if isinstance(thing, nn.Module):
                parts += [(key, tuple(value.shape), str(value.dtype)) for key, value in thing.named_parameters()]
        return parts

    def changed_by_anyone(self, trees: Mapping[str, Any], mine: set[int]) -> list[Tensor]:
        """Tensors that an own loop may change before `Step.apply`: all but those of the optimizers that it applies."""
        params = [param for module in self.modules() for param in module.parameters() if id(param) not in mine]
        fixed = {name for name, thing in self.tracked.items() if isinstance(thing, nn.Module | torch.optim.Optimizer)}
        others = [tensor for name, tree in trees.items() if name not in fixed for tensor in pack(tree)[1]]
        return [*params, *others]
