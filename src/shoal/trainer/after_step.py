"""What a user does with the model once per step, on every worker: `Trainer(after_step=fn(model))`."""

from __future__ import annotations

import torch
from torch import nn

from shoal.core.keys import derive
from shoal.draws.others import seed_others
from shoal.syncs.recipe import AfterStep


@torch.no_grad()
def do_after_step(do: AfterStep, model: nn.Module, *, seed: int, step: int) -> None:
    """Call it for this step, which was applied. What it draws is the same on every worker."""
    key = derive(seed, "after_step", step)
    torch.default_generator.manual_seed(key)
    seed_others(key)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(key)
    do(model)
