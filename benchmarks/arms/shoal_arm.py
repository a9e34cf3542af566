"""Shoal, as its quick start shows it: one process, which makes its own workers."""

from __future__ import annotations

import sys

import torch
from works import WORKS

from shoal import Trainer

work, workers, run_dir = WORKS[sys.argv[1]], int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
Trainer(
    model=work.model(),
    loss=work.loss,
    optimizer=work.optimizer,
    data=work.data(),
    collate=work.collate,
    batch_size=work.batch_size,
    epochs=1000,
    workers=workers,
    run_dir=run_dir,
).fit()
