"""Lightning with everything off that is not training. One process per rank, started as by torchrun."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader
from work import Batch
from works import WORKS

work, workers = WORKS[sys.argv[1]], int(os.environ["WORLD_SIZE"])


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = work.model()

    def training_step(self, batch: Batch) -> torch.Tensor:
        return work.loss(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return work.optimizer(self.model.parameters())


torch.manual_seed(0)
strategy = DDPStrategy(
    process_group_backend="gloo", timeout=timedelta(hours=2), gradient_as_bucket_view=True, static_graph=True
)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=workers,
    strategy=strategy,
    max_epochs=1000,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
share = work.batch_size // workers
trainer.fit(Module(), DataLoader(work.data(), batch_size=share, shuffle=True, collate_fn=work.collate))
