"""Accelerate, as its quick tour shows it. One process per rank, started as by torchrun."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch.utils.data import DataLoader
from works import WORKS

work = WORKS[sys.argv[1]]
torch.manual_seed(0)
accelerator = Accelerator(
    cpu=True,
    kwargs_handlers=[
        InitProcessGroupKwargs(backend="gloo", timeout=timedelta(hours=2)),
        DistributedDataParallelKwargs(gradient_as_bucket_view=True, static_graph=True),
    ],
)
model = work.model()
optimizer = work.optimizer(model.parameters())
share = work.batch_size // accelerator.num_processes
loader = DataLoader(work.data(), batch_size=share, shuffle=True, collate_fn=work.collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(1000):
    loader.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(work.loss(model, batch))
        optimizer.step()
