"""`python train.py` with Shoal; arguments: the time of the launch, the number of workers, a folder for the run."""

from __future__ import annotations

import sys

import first_step

from shoal import Trainer

Trainer(
    model=first_step.model(),
    loss=first_step.loss,
    optimizer=first_step.optimizer,
    data=first_step.data(),
    batch_size=first_step.BATCH,
    steps=first_step.STEPS,
    workers=int(sys.argv[2]),
    run_dir=sys.argv[3],
).fit()
