"""What becomes of a schedule when the run that resumes it has another length than the one that it was made for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, PolynomialLR

from shoal.core.errors import CheckpointMismatch

_MOVES = frozenset(
    [
        *("last_epoch", "_step_count", "_last_lr", "base_lrs", "_get_lr_called_within_step", "_is_initial"),
        *("T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter"),
    ]
)
"""What steps change in torch's schedules, and rates that a checkpoint's optimizer has. The rest is their shape."""

_AFTER: dict[type, str] = {CosineAnnealingLR: "rises again", PolynomialLR: "is 0"}
"""How the rate goes on after the end of a schedule, where that is not what one would expect."""


def refuse_longer_cycle(schedule: Any, state: Mapping[str, Any], path: object) -> None:
    """Raises CheckpointMismatch for the state of a OneCycleLR that ends before the one that is given now."""
    for part, _, kept in _parts(schedule, schedule.state_dict(), state):
        if isinstance(part, OneCycleLR) and (end := kept.get("total_steps", part.total_steps)) < part.total_steps:
            raise CheckpointMismatch(
                f"{path} has a OneCycleLR of {end} steps, and this run gives it {part.total_steps}: its curve ends at "
                f"step {end}, and it cannot be stepped any further. Resume with the epochs= or steps= that it had, or "
                "start a new run, without resume=, from its weights (docs/checkpoints.md)"
            )


def new_length(schedule: Any, made: Any, kept: Any, planned: int | None, total: int) -> str | None:
    """What to say of it, if anything. `made` is the state of a schedule for the new length, `kept` the resumed one."""
    if planned is None or planned == total:
        return None
    begin = f"the schedule was made for {planned} steps and the run now has {total}"
    parts = list(_parts(schedule, made, kept))
    stays = [words for _, new, old in parts for words in _stays(new, old)]
    if stays:
        kinds = [type(part) for part, _, _ in parts if type(part) in _AFTER and planned < total]
        after = "".join(f"; after its end the rate of {kind.__name__} {_AFTER[kind]}" for kind in kinds)
        anew = "For another one, start a new run from these weights"
        return f"{begin}; it keeps its former shape: {', '.join(stays)}{after}. {anew}"
    if any(not state for _, new, _ in parts for state in new.get("lr_lambdas", ())):
        now = f"from the second step on its rate is what they say now{_jump(schedule, kept)}"
        return f"{begin}; functions are not in a checkpoint, so {now}"
    if not type(schedule).__module__.startswith("torch."):
        return f"{begin}; what its state in the checkpoint says of its shape stays as it was"
    return None  # its shape does not depend on the length


def _parts(schedule: Any, made: Any, kept: Any) -> Iterator[tuple[Any, Mapping[str, Any], Mapping[str, Any]]]:
    """The schedule and those that it is made of, each with both states."""
    if isinstance(made, Mapping) and isinstance(kept, Mapping):
        yield schedule, made, kept
        inner = getattr(schedule, "_schedulers", ()), made.get("_schedulers", ()), kept.get("_schedulers", ())
        for part in zip(*inner, strict=False):
            yield from _parts(*part)


def _stays(made: Mapping[str, Any], kept: Mapping[str, Any]) -> Iterator[str]:
    """What the checkpoint says of the shape, where that is not what is given now."""
    for name in sorted(made.keys() & kept.keys() - _MOVES):
        new, old = _figures(made[name]), _figures(kept[name])
        if new != old and None not in (new, old):
            yield f"{name.lstrip('_')} is {old}, not {new}"
    for new, old in zip(made.get("lr_lambdas", ()), kept.get("lr_lambdas", ()), strict=False):
        if new and old:  # objects that are called, with what they have
            yield from _stays(new, old)


def _figures(value: Any) -> Any:
    """A number or a list of numbers; None for anything else."""
    if isinstance(value, Mapping):
        value = sorted(value)  # milestones, with how often each is one
    if isinstance(value, list | tuple):
        return list(value) if value and all(isinstance(each, int | float) for each in value) else None
    return value if isinstance(value, int | float) else None


def _jump(schedule: Any, kept: Mapping[str, Any]) -> str:
    """Of a LambdaLR: where its rate is now, if it was elsewhere."""
    if not isinstance(schedule, LambdaLR):
        return ""
    step, before = kept["last_epoch"], float(kept["_last_lr"][0])
    now = float(kept["base_lrs"][0]) * schedule.lr_lambdas[0](step)
    return "" if math.isclose(now, before, rel_tol=1e-6) else f" ({now:.3g} at step {step}, where it was {before:.3g})"
