"""`fit()` with nothing asked for, for before.py: python start_default.py FILE, which gets the seconds to each step."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import first_step
from laps import Steps
from work import class_loss

import shoal

steps, began = Steps(Path(sys.argv[1])), 0.0


def note(event: shoal.core.events.AnyEvent) -> None:
    if isinstance(event, shoal.StepDone):
        steps.done(event.time - began, event.loss)


trainer = shoal.Trainer(
    model=first_step.model(),
    loss=class_loss,
    optimizer=first_step.optimizer,
    data=first_step.data(),
    batch_size=first_step.BATCH,
    callbacks=[note],
)
began = time.time()
trainer.fit()
