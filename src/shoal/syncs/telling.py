"""What a worker tells of itself and of the run."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import torch
from torch import nn

from shoal.cluster.usage import resident_bytes
from shoal.comm.group import Group
from shoal.comm.plan import Settled
from shoal.core.atoms import Course
from shoal.core.events import ExchangeSettled, RunStarted, WorkerSeen
from shoal.core.traffic import Traffic
from shoal.syncs.allreduce import Exchange


def run_started(
    step: int,
    run_id: str,
    run_dir: str | None,
    workers: int,
    course: Course,
    total: int,
    modules: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
) -> RunStarted:
    return RunStarted(
        step=step,
        run_id=run_id,
        run_dir=run_dir,
        workers=workers,
        total_steps=total,
        steps_per_epoch=course.steps_per_epoch,
        samples_per_epoch=course.size,
        batch_size=course.batch,
        parameters=sum(param.numel() for module in modules for param in module.parameters()),
        optimizers=[type(optimizer).__name__ for optimizer in optimizers],
    )


def worker_seen(step: int, worker: int, samples: int, seconds: dict[str, float], traffic: Traffic) -> WorkerSeen:
    return WorkerSeen(
        step=step,
        worker=worker,
        samples=samples,
        seconds=seconds,
        traffic=traffic,
        memory=resident_bytes(),
        pid=os.getpid(),
        host=socket.gethostname(),
    )


def exchange_settled(step: int, group: Group, exchange: Exchange, *, last: bool) -> ExchangeSettled | None:
    """How gradients are exchanged; None while that is not settled.

    Where there is nothing to settle, or the run ends before, only the group is told of.
    """
    settled = exchange.settled()
    if group.size == 1 or (settled is None and not exchange.by_atom and not last):
        return None
    figures = (settled or Settled(0.0, 0.0, []))._asdict()
    hosts = list(group.hosts)
    return ExchangeSettled(step=step, collective=group.collective, reason=group.reason, hosts=hosts, **figures)
