"""One process without anything around it: the loop of the PyTorch tutorial, or (`bare`) one without a DataLoader."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, default_collate
from work import Batch
from works import WORKS

work, kind = WORKS[sys.argv[1]], sys.argv[2]
torch.manual_seed(0)
model, data = work.model(), work.data()
optimizer = work.optimizer(model.parameters())
collate = work.collate or default_collate


def bare_batches() -> Iterator[Batch]:
    order = torch.randperm(len(data)).view(-1, work.batch_size)
    for indices in order:
        yield collate(data.__getitems__(indices.tolist()))


def loaded_batches() -> DataLoader[Batch]:
    return DataLoader(data, batch_size=work.batch_size, shuffle=True, collate_fn=collate)


while True:
    for batch in bare_batches() if kind == "bare" else loaded_batches():
        optimizer.zero_grad(set_to_none=True)
        work.loss(model, batch).backward()
        optimizer.step()
