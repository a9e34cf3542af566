"""The loop a competent user writes: DistributedDataParallel over gloo. One process per rank, started as by torchrun."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from works import WORKS

work = WORKS[sys.argv[1]]
dist.init_process_group("gloo", timeout=timedelta(hours=2))
torch.manual_seed(0)
model = DistributedDataParallel(work.model(), gradient_as_bucket_view=True, static_graph=True)
optimizer = work.optimizer(model.parameters())
data = work.data()
loader = DataLoader(
    data,
    batch_size=work.batch_size // dist.get_world_size(),
    sampler=DistributedSampler(data),
    collate_fn=work.collate,
)

for epoch in range(1000):
    loader.sampler.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad(set_to_none=True)
        work.loss(model, batch).backward()
        optimizer.step()
