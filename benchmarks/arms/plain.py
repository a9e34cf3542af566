"""One process without anything around it: the loop of the PyTorch tutorial, or (`bare`) one without a DataLoader."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, default_collate
from work import WORKS, Batch

work, kind = WORKS[sys.argv[1]], sys.argv[2]
torch.manual_seed(0)
model, data = work.model(), work.data()
optimizer = work.optimizer(model.parameters())


def bare_batches() -> Iterator[Batch]:
    order = torch.randperm(len(data)).view(-1, work.batch_size)
    for indices in order:
        yield default_collate(data.__getitems__(indices.tolist()))


while True:
    for batch in bare_batches() if kind == "bare" else DataLoader(data, batch_size=work.batch_size, shuffle=True):
        optimizer.zero_grad(set_to_none=True)
        work.loss(model, batch).backward()
        optimizer.step()
