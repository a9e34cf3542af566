"""The hand-written loop, for torchrun; arguments: the time of the launch, the number of workers."""

from __future__ import annotations

import first_step
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
model = DistributedDataParallel(first_step.model())
optimizer = first_step.optimizer(model.parameters())
data = first_step.data()
loader = DataLoader(data, batch_size=first_step.BATCH // dist.get_world_size(), sampler=DistributedSampler(data))
for batch in loader:
    optimizer.zero_grad()
    first_step.loss(model, batch).backward()
    optimizer.step()
dist.barrier()  # a rank that leaves while another is in its last operation makes that one abort
dist.destroy_process_group()
