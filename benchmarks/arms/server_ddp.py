"""A hand-written loop with DDP over gloo, for serverstep.py and serverrace.py: python server_ddp.py STEPS [options]

One process per rank, started as by torchrun. Each writes the time and its loss of every step to the file STEPS.RANK.
Samples, their order and the rates are those of the Trainer.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from shoal.engines.places import enter, read_lab

parser = argparse.ArgumentParser()
parser.add_argument("file", type=Path)
parser.add_argument("--dense", type=float, metavar="MB", help="train a dense model of this size, not the character GPT")
parser.add_argument("--share", type=int, default=1, help="samples of a step for each rank, with --dense")
parser.add_argument("--optimizer", default="sgd", help="with --dense")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--alone", action="store_true", help="only forward and backward: no exchange, no optimizer")
parser.add_argument("--lab", help="the name of a lab that is up: a host for each rank")
parser.add_argument("--port", type=int, default=29500, help="in the lab")
given = parser.parse_args()

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if given.lab:  # before torch: a process with threads cannot move
    hosts = read_lab(given.lab)
    enter(hosts[rank])
    os.environ |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(given.port)}

import chargpt  # noqa: E402
import dense  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from laps import Steps  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import default_collate  # noqa: E402

from shoal.core.permutation import Permutation  # noqa: E402
from shoal.trainer.step import order_key  # noqa: E402

dist.init_process_group("gloo")
torch.manual_seed(given.seed)
if given.dense:
    batch, loss = given.share * size, dense.loss
    bare, data = dense.model(given.dense), dense.data(batch * given.steps)
    optimizer = dense.optimizer(given.optimizer, bare.parameters())
    schedule = None
else:
    plays = chargpt.Plays()
    batch, loss = chargpt.BATCH, chargpt.loss
    bare, data = plays.model(), plays.train
    optimizer = chargpt.optimizer(bare.parameters())
    schedule = chargpt.schedule(optimizer)
model = bare if given.alone else DistributedDataParallel(bare, gradient_as_bucket_view=True, static_graph=True)
order, share = Permutation(len(data), order_key(given.seed, 0)), batch // size
steps = Steps(given.file.with_suffix(f".{rank}"))

for step in range(given.steps):
    first = step * batch + rank * share
    inputs = default_collate(data.__getitems__(order.span(first, first + share).tolist()))
    optimizer.zero_grad(set_to_none=True)
    value = loss(model, inputs)
    value.backward()
    if not given.alone:
        optimizer.step()
        if schedule is not None:
            schedule.step()
    steps.done(time.time(), value.item())
dist.destroy_process_group()
