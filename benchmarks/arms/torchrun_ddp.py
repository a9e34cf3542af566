"""What torchrun restarts: DDP over gloo with the model and step of elastic.py. It starts from nothing again."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from commits import BATCH, WIDTH
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from wide import CLASSES, INPUTS, WideMLP
from work import Pool, class_loss

from shoal.testing.ledger import Ledger

ledger = Ledger(Path(sys.argv[1]) / "ledger", digests=False)
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(WideMLP(WIDTH), gradient_as_bucket_view=True, static_graph=True)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = Pool(INPUTS, CLASSES, BATCH * 100_000)
share = BATCH // size
term = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
for step, batch in enumerate(DataLoader(data, batch_size=share, sampler=DistributedSampler(data, shuffle=False))):
    optimizer.zero_grad(set_to_none=True)
    class_loss(model, batch).backward()
    optimizer.step()
    spans = {other: [(other * share, (other + 1) * share)] for other in range(size)}
    ledger.write(worker=rank, term=term, step=step, spans=spans, digest=str)
