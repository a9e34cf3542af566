"""Train two tasks at once: one network names a handwritten digit and redraws it from 10 numbers.

    pip install scikit-learn
    python examples/multitask.py --workers 2

Both heads share the body, so both losses shape it. Logging them by name shows which of the two still moves.
"""

import argparse
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal import StepDone, Trainer

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("This example reads its images from scikit-learn, which is missing: pip install scikit-learn")

parser = argparse.ArgumentParser(description="Train two tasks at once.")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--quick", action="store_true", help="one epoch, to see that it runs")
args = parser.parse_args()

digits = load_digits()  # 1,797 images of 8×8 pixels
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
test, train = order[:360], order[360:]


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.label = nn.Sequential(nn.ReLU(), nn.Linear(10, 10))
        self.picture = nn.Sequential(nn.ReLU(), nn.Linear(10, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x):
        code = self.body(x)
        return self.label(code), self.picture(code)


def loss(model, batch):
    x, y = batch
    scores, drawn = model(x)
    naming = nn.functional.cross_entropy(scores, y)
    drawing = nn.functional.mse_loss(drawn, x)
    # "loss" is what is minimised. Everything else is averaged over the whole batch and comes with every StepDone.
    # The factor brings both to about the same size; without it the network would care about names alone.
    return {"loss": naming + 10 * drawing, "naming": naming, "drawing": drawing}


history = []


def watch(event):
    if isinstance(event, StepDone):
        history.append(event.logs)


trainer = Trainer(
    model=TwoHeads,
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
    data=TensorDataset(images[train], labels[train]),
    eval_data=TensorDataset(images[test], labels[test]),
    predict=lambda model, batch: (model(batch[0])[0], batch[1]),
    metrics=["accuracy"],
    batch_size=64,
    epochs=1 if args.quick else 30,
    workers=args.workers,
    callbacks=[watch],
)
result = trainer.fit()

for name in ("naming", "drawing"):
    print(f"loss of {name:8} {history[0][name]:.3f} at the first step, {history[-1][name]:.3f} at the last")
print(f"names {result.metrics['accuracy']:.1%} of {len(test)} images right that it never saw; one of them, redrawn:")
with torch.no_grad():
    drawn = trainer.model(images[test[:1]])[1]
for left, right in zip(images[test[0]].view(8, 8).tolist(), drawn.view(8, 8).tolist(), strict=True):
    print(
        "  " + "   ".join("".join(2 * " .:*#"[int(4.99 * min(max(ink, 0), 1))] for ink in row) for row in (left, right))
    )
