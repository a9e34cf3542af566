"""Train on a table: tell malignant tumours from benign ones by 30 measurements (569 rows from scikit-learn).

pip install scikit-learn
python examples/tabular.py --workers 2
"""

import argparse
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal import Trainer

try:
    from sklearn.datasets import load_breast_cancer
except ImportError:
    sys.exit("This example reads its table from scikit-learn, which is missing: pip install scikit-learn")

parser = argparse.ArgumentParser(description="Train on a table of measurements.")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--quick", action="store_true", help="a few epochs, to see that it runs")
args = parser.parse_args()

table = load_breast_cancer()
columns = torch.tensor(table.data, dtype=torch.float32)
malignant = torch.tensor(table.target == 0, dtype=torch.float32)
order = torch.randperm(len(columns), generator=torch.Generator().manual_seed(0))
test, train = order[:170], order[170:]

# Columns differ in size by a factor of 10,000. Mean and deviation come from the training rows alone: the test rows
# must not have a say in anything before they are used.
mean, deviation = columns[train].mean(0), columns[train].std(0)
columns = (columns - mean) / deviation


def net():
    return nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))


def loss(model, batch):
    x, y = batch
    return nn.functional.binary_cross_entropy_with_logits(model(x), y)


def predict(model, batch):
    x, y = batch
    return model(x).sigmoid(), y  # probabilities: what `auc` orders by and `recall` cuts at one half


trainer = Trainer(
    model=net,
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    data=TensorDataset(columns[train], malignant[train]),
    eval_data=TensorDataset(columns[test], malignant[test]),
    predict=predict,
    metrics=["auc", "accuracy"],
    batch_size=50,
    epochs=3 if args.quick else 20,
    workers=args.workers,
)
result = trainer.fit()

chances = trainer.predict(TensorDataset(columns[test], malignant[test]))
found = (chances[malignant[test] == 1] > 0.5).float().mean()
usual = max(malignant[test].mean(), 1 - malignant[test].mean())
print(f"area under the ROC curve {result.metrics['auc']:.4f} (0.5 is guessing)")
print(f"{result.metrics['accuracy']:.1%} right, where always saying the usual class would be {usual:.1%}")
print(f"{found:.1%} of {int(malignant[test].sum())} malignant tumours found")
