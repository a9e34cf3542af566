"""The elastic Trainer with 40 MB of gradients, for recovery.py and goodput.py: python elastic.py FOLDER [options]"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from commits import BATCH, WIDTH, WORKERS
from wide import CLASSES, INPUTS, WideMLP
from work import Pool, class_loss

from shoal import Trainer
from shoal.testing import FaultPlan

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--steps", type=int, default=100_000)
parser.add_argument("--workers", type=int, default=WORKERS)
parser.add_argument("--min-workers", type=int, default=2)
parser.add_argument("--lab", help="the name of a lab that is up")
parser.add_argument("--kill-every", type=int, help="a worker, each of them in turn")
given = parser.parse_args()

plan = FaultPlan().ledger(given.folder / "ledger", digests=False)
if given.kill_every:
    plan.kill(every=given.kill_every, workers=given.workers, times=max(1, (given.steps - 10) // given.kill_every))
torch.manual_seed(0)
Trainer(
    model=lambda: WideMLP(WIDTH),
    loss=class_loss,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    data=Pool(INPUTS, CLASSES, BATCH * given.steps),
    batch_size=BATCH,
    steps=given.steps,
    workers=given.workers,
    min_workers=given.min_workers,
    max_workers=WORKERS,
    faults=plan,
    data_workers=0,
    run_dir=given.folder / "run",
    engine="local" if given.lab is None else f"local:lab={given.lab}",
).fit()
