"""Train a small network on scikit-learn's handwritten digits.

pip install scikit-learn
python examples/digits.py --workers 2
"""

import argparse
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal import Trainer

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("This example reads its images from scikit-learn, which is missing: pip install scikit-learn")

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--quick", action="store_true", help="one epoch, to see that it runs")
args = parser.parse_args()

torch.manual_seed(0)
digits = load_digits()  # 1,797 images of 8×8 pixels
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels))
test, train = order[:360], order[360:]

net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def loss(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


trainer = Trainer(
    model=net,
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
    data=TensorDataset(images[train], labels[train]),
    eval_data=TensorDataset(images[test], labels[test]),
    predict=lambda model, batch: (model(batch[0]), batch[1]),
    metrics=["accuracy"],
    batch_size=64,  # of all workers together
    epochs=1 if args.quick else 20,
    workers=args.workers,
)
result = trainer.fit()
print(f"{result.metrics['accuracy']:.1%} right on {len(test)} images it never saw, after {result.steps} steps")
