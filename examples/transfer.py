"""Transfer: load a trained network from a file, replace its head, train the head alone, then all of it gently.

    pip install scikit-learn safetensors
    python examples/transfer.py --workers 2

A network that has learnt the digits 0 to 4 is to tell 5 to 9 apart, from 50 labelled images only.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal import Trainer

try:
    from safetensors.torch import load_file, save_file
    from sklearn.datasets import load_digits
except ImportError as error:
    sys.exit(f"This example needs {error.name}, which is missing: pip install scikit-learn safetensors")

parser = argparse.ArgumentParser(description="Load trained weights from a file and train on.")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
args = parser.parse_args()

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
low = TensorDataset(images[labels < 5], labels[labels < 5])
high = TensorDataset(images[labels >= 5], labels[labels >= 5] - 5)
few, test = TensorDataset(*high[:50]), TensorDataset(*high[50:])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.early = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU())
        self.late = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.head = nn.Linear(32 * 4 * 4, 5)

    def forward(self, x):
        return self.head(self.late(self.early(x)))


def loss(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def train(net, data, steps, optimizer):
    trainer = Trainer(
        net,
        loss,
        optimizer,
        data,
        eval_data=test,
        predict=lambda model, batch: (model(batch[0]), batch[1]),
        metrics=["accuracy"],
        batch_size=50,
        steps=2 if args.quick else steps,
        eval_every=steps,  # at the end only
        workers=args.workers,
    )
    return trainer.fit().metrics["accuracy"]


def plain(params):
    return torch.optim.AdamW(params, lr=3e-3)


def layer_wise(params):
    """The closer a layer is to the images, the more general is what it has learnt, and the less it should move."""
    rates = {"early": 1e-4, "late": 5e-4, "head": 3e-3}
    groups = [
        {"params": [(name, param) for name, param in params if name.startswith(part)], "lr": rate}
        for part, rate in rates.items()
    ]
    return torch.optim.AdamW(groups)


with tempfile.TemporaryDirectory() as folder:
    # 1. The trained network. A run's own checkpoints hold such a file too: checkpoints/step-…/model.safetensors.
    torch.manual_seed(0)
    file = Path(folder) / "low-digits.safetensors"
    taught = Net()
    train(taught, low, steps=150, optimizer=plain)
    save_file(taught.state_dict(), file)

    # 2. Load it, with a new head for the new labels.
    net = Net()
    net.load_state_dict(load_file(file))
    net.head = nn.Linear(32 * 4 * 4, 5)

# 3. Freeze everything but the head. Frozen parameters are not given to the optimizer, and cost no gradient.
net.requires_grad_(False)
net.head.requires_grad_(True)
head_alone = train(net, few, steps=40, optimizer=plain)

# 4. Unfreeze, and train on with a rate of its own for each part.
net.requires_grad_(True)
all_of_it = train(net, few, steps=40, optimizer=layer_wise)

from_nothing = train(Net(), few, steps=80, optimizer=plain)
print(f"right on {len(test)} images of 5 to 9, after training on {len(few)} of them:")
print(f"  from nothing              {from_nothing:.1%}")
print(f"  new head on a frozen body {head_alone:.1%}")
print(f"  then all of it, gently    {all_of_it:.1%}")
