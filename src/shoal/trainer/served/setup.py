"""What a run with `sync="server"` is made of, from what the user gave; and what it cannot be made of, in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.cluster.elasticity import Elasticity
from shoal.core.atoms import Course
from shoal.core.errors import ConfigError
from shoal.core.spec import Server
from shoal.data.fetch import check_data
from shoal.layouts.restore import restore
from shoal.syncs.recipe import Recipe, make_optimizer, make_schedule
from shoal.syncs.server.cutting import cut
from shoal.syncs.server.embeddings import find_tables, make_real
from shoal.syncs.server.optimizers import needs_whole
from shoal.syncs.server.pushcodec import has_codec
from shoal.syncs.server.setup import Memory, Setup
from shoal.syncs.server.tables import empty_cut, make_tables
from shoal.trainer.workers.start import Start
from shoal.wire.curve import Keys

_ASYNC_STEPS, _MOST_STEPS = 8, 34
"""Steps that may be open at once, where nothing else bounds them and at all: each costs the memory of a gradient."""


@dataclass(frozen=True)
class Served:
    """What a run with servers is made of, besides what every run has."""

    model: nn.Module
    recipe: Recipe
    sync: Server
    workers: int
    elasticity: Elasticity


def make_setup(served: Served, start: Start, hosts: Sequence[str]) -> Setup:
    """Give the model, its optimizer and its schedule the state that the run starts from, and cut it into shards.

    Raises ConfigError, and CheckpointMismatch, in words.
    """
    model, recipe, sync = served.model, served.recipe, served.sync
    loaded = start.loaded
    if loaded is not None:
        make_real(model, loaded)
        restore("model", model, loaded)
    optimizer = make_optimizer(recipe, model)
    found = find_tables(model, optimizer)
    tables = {id(table.weight) for table in found}
    params = [pair for pair in trained_params(model, optimizer) if id(pair[1]) not in tables]
    whole = needs_whole(optimizer) if params or not tables else False
    if tables and not params and has_codec(start.codec):
        raise ConfigError(
            f"codec={start.codec.name!r} is for dense gradients, and this model has only sparse tables, whose rows "
            "travel as they are; leave codec out"
        )
    for name, param in params:
        if param.device.type != "cpu":
            raise ConfigError(
                f"sync: {name!r} is on {param.device}; sync='server' trains on the CPU in this version, use 'allreduce'"
            )
    schedule = make_schedule(recipe, optimizer)
    if loaded is not None:
        restore("optimizer", optimizer, loaded)
        if schedule is not None:
            restore("schedule", schedule, loaded)
    dense = [(name, param.detach()) for name, param in params]
    pieces = cut(dense, whole=whole) if dense or not found else empty_cut()
    pieces, all_tables = make_tables(pieces, found)
    elasticity = served.elasticity
    seats = 2 * elasticity.most + 8
    steps = _ASYNC_STEPS if sync.bound is None else min(sync.bound + 2, _MOST_STEPS)
    version = 0 if loaded is None else int(loaded.trees["session"]["step"])
    return Setup(
        run=start.run_id,
        keys=Keys.make(),
        spec=sync,
        course=Course(check_data(recipe.data, "data", recipe.collate), recipe.batch_size),
        total=recipe.total_steps,
        version=version,
        cut=pieces,
        params=list(params),
        optimizer=optimizer,
        make_schedule=None if recipe.schedule is None else _scheduler(recipe),
        schedule_state=None if schedule is None else schedule.state_dict(),
        clip=recipe.clip,
        codec=start.codec,
        memory={
            host: Memory(pieces.size, len(pieces.shards), seats=seats, steps=steps) for host in dict.fromkeys(hosts)
        },
        journals=_journals(sync, start),
        seed=start.seed,
        extra={} if elasticity.faults is None else {"faults": elasticity.faults.for_servers()},
        tables=all_tables,
    )


def trained_params(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    """Those that the optimizer has and that require a gradient, in the optimizer's order."""
    names = {id(param): name for name, param in model.named_parameters()}
    return [
        (names[id(param)], param)
        for group in optimizer.param_groups
        for param in group["params"]
        if param.requires_grad
    ]


def _scheduler(recipe: Recipe) -> Callable[[torch.optim.Optimizer], Any]:
    return lambda optimizer: make_schedule(recipe, optimizer)


def _journals(sync: Server, start: Start) -> Path | None:
    if sync.durability != "disk":
        return None
    if start.run_dir is None:
        raise ConfigError("sync: durability=disk writes journals into the run's folder, and this run has none")
    return start.run_dir / "journals"
