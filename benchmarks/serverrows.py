"""Sparse tables on servers: the loss curve of one process, and workers that do not grow with the table.

examples
  python benchmarks/serverrows.py                     MovieLens-100k: SGD and Adagrad, bsp, against one process
  python benchmarks/serverrows.py --steps 100 --check
  python benchmarks/serverrows.py memory              a table of 10 M rows of 16 numbers on 2 servers
  python benchmarks/serverrows.py memory --rows 1000000
  (either with --check: exit code 1 if a figure is missed)

curve
  The recommender of `shoal demo movies` with nn.Embedding(sparse=True), on 2 workers and 2 servers; the other arm is
  plain PyTorch in this process, over the same samples in the same order. The figure is the largest difference between
  the losses of a step.

memory
  Each worker reads /proc/self/smaps_rollup at its first forward, before any row has come (its base), and at each later
  one. Three figures of the growth since then: `own`, memory that is the worker's alone (Private_Clean +
  Private_Dirty) and its part of what is shared for writing (Pss_Shmem); Pss; and Rss, which counts all that is shared
  in full. The largest of them must be below 300 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from shoal import StepDone, Trainer
from shoal.cli.demos.movies import FILMS, USERS, load_ratings
from shoal.testing.reference import reference_fit

TOLERANCE = 1e-4
MOST_MB = 300.0
MB = 1 << 20
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.5),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
}


class Taste(nn.Module):
    """stars = mean + how kind the user is + how good the film is + how well their tastes fit."""

    def __init__(self, mean: float, width: int = 16) -> None:
        super().__init__()
        self.mean = mean
        self.users, self.films = (nn.Embedding(count, width, sparse=True) for count in (USERS, FILMS))
        self.kindness, self.quality = (nn.Embedding(count, 1, sparse=True) for count in (USERS, FILMS))
        self.gain = nn.Parameter(torch.ones(()))
        for table in (self.users, self.films, self.kindness, self.quality):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, users: Tensor, films: Tensor) -> Tensor:
        fit = (self.users(users) * self.films(films)).sum(1)
        return self.mean + (self.kindness(users) + self.quality(films)).squeeze(1) + self.gain * fit


def loss(net: nn.Module, batch: Any) -> Tensor:
    users, films, stars = batch
    return nn.functional.mse_loss(net(users, films), stars)


def curve(steps: int, servers: int) -> dict[str, Any]:
    train, _ = load_ratings().split()
    assert isinstance(train, TensorDataset)
    mean = float(train.tensors[2].mean())
    figures = {}
    for name, optimizer in OPTIMIZERS.items():
        losses: list[float] = []

        def tell(event: Any, losses: list[float] = losses) -> None:
            if isinstance(event, StepDone):
                losses.append(event.loss)

        torch.manual_seed(0)
        ours = Taste(mean)
        sync = f"server:servers={servers}"
        Trainer(ours, loss, optimizer, train, workers=2, batch_size=500, steps=steps, sync=sync, callbacks=[tell]).fit()
        torch.manual_seed(0)
        theirs = Taste(mean)
        with torch.sparse.check_sparse_tensor_invariants(False):
            alone = reference_fit(theirs, loss, optimizer, train, batch_size=500, steps=steps)
        worst = max(abs(one - other) for one, other in zip(losses, alone, strict=True))
        figures[name] = {"steps": steps, "first": alone[0], "last": alone[-1], "difference": worst}
        print(f"{name:8} {steps} steps  loss {alone[0]:.4f} … {alone[-1]:.4f}  largest difference {worst:.2e}")
    return figures


# -- memory ------------------------------------------------------------------------------------------------------------


class Draws(Dataset[Tensor]):
    """Ids of a sample, by its number."""

    def __init__(self, size: int, rows: int) -> None:
        self.size, self.rows = size, rows

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> Tensor:
        return torch.randint(0, self.rows, (32,), generator=torch.Generator().manual_seed(number))


class Wide(nn.Module):
    def __init__(self, rows: int, folder: Path) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 16, sparse=True, device="meta")
        self.out = nn.Linear(16, 1)
        self.folder = folder

    def forward(self, ids: Tensor) -> Tensor:
        with (self.folder / f"{os.getpid()}").open("a") as file:
            print(json.dumps(memory()), file=file)
        return self.out(self.table(ids).mean(1))


def memory() -> dict[str, float]:
    """Of this process, in MB."""
    told = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split()[:2]
        told[name.rstrip(":")] = int(value) / 1024
    private = told["Private_Clean"] + told["Private_Dirty"]
    return {"own": private + told["Pss_Shmem"], "pss": told["Pss"], "rss": told["Rss"]}


def wide_loss(net: nn.Module, batch: Any) -> Tensor:
    return net(batch).square().mean()


def run_memory(rows: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        net = Wide(rows, Path(folder))
        sync = "server:servers=2,durability=none"
        optimizer = OPTIMIZERS["SGD"]
        data = Draws(steps * 1024, rows)
        Trainer(net, wide_loss, optimizer, data, workers=2, batch_size=1024, steps=steps, sync=sync).fit()
        workers = []
        for path in sorted(Path(folder).iterdir()):
            told = [json.loads(line) for line in path.read_text().splitlines()]
            workers.append({key: max(each[key] for each in told) - told[0][key] for key in told[0]} | {"base": told[0]})
    size = net.table.weight.numel() * net.table.weight.element_size() / MB
    assert net.table.weight.device.type == "cpu"
    print(f"table {rows:,} × 16: {size:.0f} MB on 2 servers; {steps} steps of 1,024 samples of 32 rows on 2 workers")
    for number, worker in enumerate(workers):
        base = worker["base"]
        print(
            f"worker {number}: over its base by {worker['own']:.1f} MB of its own and shared for writing, "
            f"{worker['pss']:.1f} MB of Pss, {worker['rss']:.1f} MB of Rss "
            f"(base {base['own']:.1f}, {base['pss']:.1f}, {base['rss']:.1f})"
        )
    return {"table": size, "workers": workers}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["curve", "memory"], default="curve")
    parser.add_argument("--steps", type=int, help="by default 200 for the curve, 40 for memory")
    parser.add_argument("--servers", type=int, default=2, help="for the curve")
    parser.add_argument("--rows", type=int, default=10_000_000, help="of the table, for memory")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a figure is missed")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    if given.what == "curve":
        figures = curve(given.steps or 200, given.servers)
        good = all(each["difference"] <= TOLERANCE for each in figures.values())
    else:
        figures = run_memory(given.rows, given.steps or 40)
        good = len(figures["workers"]) == 2 and all(
            max(each["own"], each["pss"], each["rss"]) < MOST_MB for each in figures["workers"]
        )
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1))
    print("all figures hold" if good else "a figure is missed")
    return 0 if good or not given.check else 1


if __name__ == "__main__":
    sys.exit(main())
