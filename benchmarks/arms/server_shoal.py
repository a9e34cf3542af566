"""The Trainer with any sync, for serverstep.py and serverrace.py: python server_shoal.py STEPS [options]

Writes the time and the loss of every step to the file STEPS; with --eval-every, evaluations to NOTEBOOK too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import chargpt
import dense
import torch
from curves import Notebook
from laps import Steps

import shoal

parser = argparse.ArgumentParser()
parser.add_argument("file", type=Path)
parser.add_argument("--sync", default="server")
parser.add_argument("--dense", type=float, metavar="MB", help="train a dense model of this size, not the character GPT")
parser.add_argument("--share", type=int, default=1, help="samples of a step for each worker, with --dense")
parser.add_argument("--optimizer", choices=dense.OPTIMIZERS, default="sgd", help="with --dense")
parser.add_argument("--workers", type=int, default=4)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--until", type=float, help="stop when the last --smooth steps have this mean loss")
parser.add_argument("--smooth", type=int, default=10)
parser.add_argument("--notebook", type=Path, help="for evaluations")
parser.add_argument("--eval-every", type=int)
parser.add_argument("--eval-until", type=float, help="stop at the first evaluation with this smoothed loss")
parser.add_argument("--codec", default="none")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--lab", help="the name of a lab that is up")
given = parser.parse_args()

steps = Steps(given.file)
notebook = Notebook(given.notebook or Path("/dev/null"))
torch.manual_seed(given.seed)
if given.dense:
    batch = given.share * given.workers
    work = {
        "model": dense.model(given.dense),
        "loss": dense.loss,
        "optimizer": lambda params: dense.optimizer(given.optimizer, params),
        "data": dense.data(batch * given.steps),
        "batch_size": batch,
    }
else:
    plays = chargpt.Plays()
    work = {
        "model": plays.model(),
        "loss": chargpt.loss,
        "optimizer": chargpt.optimizer,
        "schedule": chargpt.schedule,
        "data": plays.train,
        "batch_size": chargpt.BATCH,
        "eval_data": plays.validation if given.eval_every else None,
        "eval_every": given.eval_every,
    }


def note(event: shoal.core.events.AnyEvent) -> shoal.Stop | None:
    reached = False
    if isinstance(event, shoal.StepDone):
        steps.done(event.time, event.loss)
        reached = given.until is not None and steps.reached(given.until, given.smooth)
    elif isinstance(event, shoal.EvalDone):
        notebook.evaluated(event.step, event.metrics["loss"])
        reached = given.eval_until is not None and notebook.done(1, given.eval_until)
    return shoal.Stop("the loss is reached") if reached else None


shoal.Trainer(
    **work,
    steps=given.steps,
    workers=given.workers,
    sync=given.sync,
    codec=given.codec,
    **({"collective": "gloo"} if given.sync == "allreduce" else {}),
    seed=given.seed,
    data_workers=0,
    run_dir=given.file.parent / "run",
    checkpoint_every=1 << 30,
    engine="local" if given.lab is None else f"local:lab={given.lab}",
    callbacks=[note],
).fit()
