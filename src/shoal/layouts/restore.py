"""Giving tracked objects their state from a checkpoint, and saying in words why one does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from shoal.checkpoint.replan import refuse_longer_cycle
from shoal.core.atoms import Course
from shoal.core.errors import CheckpointMismatch
from shoal.core.progress import Progress
from shoal.layouts.single import Buffers

if TYPE_CHECKING:
    from shoal.checkpoint import Loaded


def session_tree(
    step: int, course: Course, seed: int, progress: Progress, buffers: Buffers, loop: int = 0
) -> dict[str, Any]:
    """Where a run is, as its checkpoints say it; the same for every sync."""
    here = {"loop": loop, "step": step, "seed": seed, "size": course.size, "batch": course.batch}
    figures = {"logs": progress.log_names, "epoch": progress.epoch}
    return {**here, **figures, "buffers": list(buffers.known), "counts": buffers.counts()}


def refuse_other_course(saved: Mapping[str, Any], course: Course, seed: int) -> None:
    """`saved` is the `session_tree` of a checkpoint that a run is to go on from."""
    here = {"size": course.size, "batch": course.batch, "seed": seed}
    differing = [f"{key}: {saved[key]} there, {here[key]} here" for key in here if saved[key] != here[key]]
    if differing:
        raise CheckpointMismatch(
            f"the checkpoint at step {saved['step']} is of another course through the data ({'; '.join(differing)}), "
            "so its position would mean other samples; use the same data, batch_size and seed, or start a new run "
            "from its weights"
        )


def restore(name: str, thing: Any, loaded: Loaded) -> None:
    """Give a tracked object its state from a checkpoint. Raises `CheckpointMismatch` in words."""
    if name not in loaded.trees:
        known = ", ".join(sorted(tree for tree in loaded.trees if tree != "session"))
        raise CheckpointMismatch(
            f"{loaded.path} has no {name!r}; it has {known}. Resume with the arguments that its run had, or start "
            "a new run"
        )
    state = loaded.trees[name]
    if isinstance(thing, nn.Module):
        _compare(thing, state, loaded)
    if isinstance(thing, torch.optim.Optimizer):
        _compare_optimizer(thing, state, loaded)
    if isinstance(thing, LRScheduler):
        refuse_longer_cycle(thing, state, loaded.path)
    try:
        thing.load_state_dict(state)
    except (ValueError, KeyError, RuntimeError, TypeError) as error:
        raise CheckpointMismatch(f"{name!r} in {loaded.path} does not fit this run: {error}") from error


def _compare_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], loaded: Loaded) -> None:
    """Another optimizer keeps other things of a parameter: to go on with these would fail at its first step."""
    there, here = state["param_groups"], optimizer.state_dict()["param_groups"]
    missing = sorted(set(here[0]) - set(there[0]) - {"params", "param_names", "initial_lr"})
    if missing:
        raise CheckpointMismatch(
            f"{loaded.path} is of a run with another optimizer: its state has no {', '.join(missing)}, which "
            f"{type(optimizer).__name__} needs. Resume with the optimizer that it had, or start a new run from its "
            "weights"
        )
    sizes = [[len(group["params"]) for group in groups] for groups in (there, here)]
    if sizes[0] != sizes[1]:
        raise CheckpointMismatch(
            f"{loaded.path}: its optimizer has groups of {sizes[0]} parameters, and this one of {sizes[1]}. Resume "
            "with the same parameter groups, or start a new run from its weights"
        )


def _compare(module: nn.Module, state: Mapping[str, Tensor], loaded: Loaded) -> None:
    own = module.state_dict()
    missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    shapes = [
        f"{key} is {tuple(state[key].shape)} there and {tuple(own[key].shape)} here"
        for key in own
        if key in state and isinstance(own[key], Tensor) and own[key].shape != state[key].shape
    ]
    if missing or extra or shapes:
        parts = [
            f"{title}: {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
            for title, names in (("not in it", missing), ("only in it", extra), ("of another shape", shapes))
            if names
        ]
        raise CheckpointMismatch(
            f"{loaded.path} is a checkpoint of another model ({'; '.join(parts)}); use the model it was made "
            "with, or start without resume"
        )
