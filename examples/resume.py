"""Kill a training in the middle, go on from its last checkpoint, and get what an undisturbed training gets.

    pip install scikit-learn
    python examples/resume.py --workers 2

The training to be killed runs in a process of its own, which gets a SIGKILL: no goodbye, no time to save anything.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal import CheckpointSaved, Trainer

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("This example reads its images from scikit-learn, which is missing: pip install scikit-learn")

parser = argparse.ArgumentParser(description="Kill a training and go on.")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--quick", action="store_true", help="fewer steps, to see that it runs")
parser.add_argument("--victim", metavar="FOLDER", help="be the training that gets killed (used by the script itself)")
args = parser.parse_args()

STEPS = 100 if args.quick else 1000
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
data = TensorDataset(images, torch.tensor(digits.target))


def loss(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def train(folder, callbacks=()):
    trainer = Trainer(
        model=lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10)),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),  # with state of its own, which must come back too
        schedule=lambda optimizer, total: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total),
        data=data,
        batch_size=64,
        steps=STEPS,
        workers=args.workers,
        run_dir=folder,
        resume="last",  # where there is no checkpoint yet, it starts from the beginning: the same call serves for both
        checkpoint_every=STEPS // 10,
        callbacks=callbacks,
    )
    trainer.fit()
    return trainer.model


def tell(event):
    """What the victim says on its standard output, so that we know when to strike."""
    if isinstance(event, CheckpointSaved):
        print("saved", event.step, flush=True)


if args.victim:
    train(args.victim, [tell])
    sys.exit()

with tempfile.TemporaryDirectory() as folder:
    whole = train(Path(folder, "whole"))

    killed = Path(folder, "killed")
    command = [sys.executable, __file__, "--workers", str(args.workers), "--victim", str(killed)]
    with subprocess.Popen(command + ["--quick"] * args.quick, stdout=subprocess.PIPE, text=True) as victim:
        for line in victim.stdout:
            if line == f"saved {STEPS // 2}\n":
                victim.kill()

    began = []
    resumed = train(killed, [lambda event: began.append(event.step)])  # the first event says where it begins

weights, others = whole.state_dict(), resumed.state_dict()
difference = max(float((weights[name] - others[name]).abs().max()) for name in weights)
print(f"ended by signal {-victim.returncode} in the middle of {STEPS} steps; went on from step {began[0]}")
print(f"largest difference to the weights of the training that was left alone: {difference}")
