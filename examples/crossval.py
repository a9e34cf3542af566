"""Cross-validate: tell three kinds of wine apart by 13 measurements (178 rows from scikit-learn), five times over.

    pip install scikit-learn
    python examples/crossval.py --workers 2

With so few rows a single split says little: which 36 rows happen to be tested moves the score by several percent.
"""

import argparse
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal

try:
    from sklearn.datasets import load_wine
except ImportError:
    sys.exit("This example reads its table from scikit-learn, which is missing: pip install scikit-learn")

parser = argparse.ArgumentParser(description="Cross-validate on a small table.")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--quick", action="store_true", help="two folds of two epochs, to see that it runs")
args = parser.parse_args()

wine = load_wine()
data = TensorDataset(torch.tensor(wine.data, dtype=torch.float32), torch.tensor(wine.target))


def net():
    # The first layer standardises the columns. As it is part of the model, it learns their means and deviations anew
    # in every fold, from the rows trained on: the fold left out has no say in it.
    return nn.Sequential(nn.BatchNorm1d(13, affine=False), nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 3))


def loss(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


trainer = shoal.Trainer(
    model=net,
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    data=data,
    predict=lambda model, batch: (model(batch[0]), batch[1]),
    metrics=["accuracy"],
    batch_size=30,
    epochs=2 if args.quick else 20,
    workers=args.workers,
)
scores = shoal.cross_validate(trainer, folds=2 if args.quick else 5)

for number, figures in enumerate(scores.folds, start=1):
    print(f"fold {number}: {figures['accuracy']:.1%} right, loss {figures['loss']:.3f}")
print(f"mean {scores.mean['accuracy']:.1%}, give or take {scores.std['accuracy']:.1%}")
