"""The Trainer with a codec, for codecrace.py: python codec_shoal.py CODEC FOLDER NOTEBOOK [options]"""

from __future__ import annotations

import argparse
from pathlib import Path

import chargpt
import torch
from curves import Notebook

import shoal
from shoal.core.traffic import GRADIENT, Traffic

parser = argparse.ArgumentParser()
parser.add_argument("codec")
parser.add_argument("folder", type=Path)
parser.add_argument("notebook", type=Path)
parser.add_argument("--workers", type=int, default=4)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument("--most", type=int, help="steps, if the loss is not reached before")
parser.add_argument("--until", type=float, help="stop after --steps at the first evaluation with this smoothed loss")
parser.add_argument("--eval-every", type=int, help="steps; without it there is no evaluation")
parser.add_argument("--lab", help="the name of a lab that is up")
given = parser.parse_args()

notebook, plays = Notebook(given.notebook), chargpt.Plays()


def codec_of(traffic: Traffic) -> str:
    """Joined by + if a step had several. Small tensors always travel as they are, and do not count."""
    encoded = {flow.codec for flow in traffic.flows if flow.kind == GRADIENT and flow.codec != "none"}
    return "+".join(sorted(encoded)) or "none"


def note(event: shoal.core.events.AnyEvent) -> shoal.Stop | None:
    if isinstance(event, shoal.StepDone) and event.traffic is not None:
        notebook.travelled(event.step - 1, codec_of(event.traffic))
    elif isinstance(event, shoal.ExchangeSettled):
        print(event, flush=True)
    elif isinstance(event, shoal.EvalDone):
        notebook.evaluated(event.step, event.metrics["loss"])
        if notebook.done(given.steps, given.until):
            return shoal.Stop("the loss is reached")
    return None


torch.manual_seed(given.seed)
shoal.Trainer(
    model=plays.model(),
    loss=chargpt.loss,
    optimizer=chargpt.optimizer,
    schedule=chargpt.schedule,
    data=plays.train,
    eval_data=plays.validation if given.eval_every else None,
    eval_every=given.eval_every,
    batch_size=chargpt.BATCH,
    steps=given.steps if given.until is None else given.most,
    workers=given.workers,
    codec=given.codec,
    collective="gloo",
    seed=given.seed,
    data_workers=0,
    run_dir=given.folder,
    checkpoint_every=1 << 30,  # by default every five minutes, with a plain sum of residuals: no part of a step
    engine="local" if given.lab is None else f"local:lab={given.lab}",
    callbacks=[note],
).fit()
