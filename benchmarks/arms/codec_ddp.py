"""A hand-written loop with DDP over gloo, for codecrace.py: python codec_ddp.py NOTEBOOK [options]

One process per rank, started as by torchrun. The order of samples is the Trainer's. With --rank-of-hook the PowerSGD
hook of torch compresses, with error feedback and warm start, from the eleventh step on.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from shoal.engines.places import enter, read_lab

START = 10  # steps before the hook compresses
ONE_BUCKET = 1000  # MB

parser = argparse.ArgumentParser()
parser.add_argument("notebook", type=Path)
parser.add_argument("--rank-of-hook", type=int, help="without it nothing is compressed")
parser.add_argument("--default-buckets", action="store_true", help="with the hook: torch's, instead of a single one")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument("--most", type=int, help="steps, if the loss is not reached before")
parser.add_argument("--until", type=float, help="stop after --steps at the first evaluation with this smoothed loss")
parser.add_argument("--eval-every", type=int, help="steps; without it there is no evaluation")
parser.add_argument("--lab", help="the name of a lab that is up: a host for each rank")
parser.add_argument("--port", type=int, default=29500, help="in the lab")
given = parser.parse_args()

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if given.lab:  # before torch: a process with threads cannot move
    hosts = read_lab(given.lab)
    enter(hosts[rank])
    os.environ |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(given.port)}

import chargpt  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from curves import Notebook  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import default_collate  # noqa: E402

from shoal.core.permutation import Permutation  # noqa: E402
from shoal.trainer.step import order_key  # noqa: E402


def wrapped(model: torch.nn.Module) -> DistributedDataParallel:
    if given.rank_of_hook is None:
        return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    # Sums that callbacks start can be in another order on another rank: two buckets have been seen to mix them up.
    ddp = DistributedDataParallel(model, bucket_cap_mb=None if given.default_buckets else ONE_BUCKET)
    state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=given.rank_of_hook,
        start_powerSGD_iter=START,
        use_error_feedback=True,
        warm_start=True,
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return ddp


@torch.no_grad()
def evaluate() -> float:
    model.eval()
    own = plays.validation[rank::size]
    total = torch.zeros(1)
    for at in range(0, len(own), chargpt.BATCH):
        batch = own[at : at + chargpt.BATCH]
        total += chargpt.loss(model.module, default_collate(batch)) * len(batch)
    dist.all_reduce(total)
    model.train()
    return float(total) / len(plays.validation)


dist.init_process_group("gloo")
plays = chargpt.Plays()
torch.manual_seed(given.seed)
model = wrapped(plays.model())
optimizer = chargpt.optimizer(model.parameters())
schedule = chargpt.schedule(optimizer)
# Every rank has the same losses and decides alike; rank 0 writes them down.
notebook = Notebook(given.notebook if rank == 0 else Path(os.devnull))
order, share = Permutation(len(plays.train), order_key(given.seed, 0)), chargpt.BATCH // size

for step in range(given.steps if given.until is None else given.most):
    first = step * chargpt.BATCH + rank * share
    batch = default_collate([plays.train[index] for index in order.span(first, first + share).tolist()])
    notebook.travelled(step, "powersgd" if given.rank_of_hook is not None and step >= START else "none")
    optimizer.zero_grad(set_to_none=True)
    chargpt.loss(model, batch).backward()
    optimizer.step()
    schedule.step()
    if given.eval_every and (step + 1) % given.eval_every == 0:
        notebook.evaluated(step + 1, evaluate())
        if notebook.done(given.steps, given.until):
            break
dist.destroy_process_group()
