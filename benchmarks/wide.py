"""Training that is bound by its exchange: a wide MLP with 50 MB of gradients and few samples to each step.

Run as an arm, with the script of the arm and its arguments: python wide.py arms/hand.py wide-2
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from work import Pool, Work, class_loss
from works import WORKS

SHARE = 8  # samples of a worker in each step
WORKERS = (2, 4)
INPUTS, WIDTH, CLASSES = 128, 2464, 10  # 12.49 million parameters


class WideMLP(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        widths = [INPUTS, width, width, width]
        hidden = [layer for before, after in pairwise(widths) for layer in (nn.Linear(before, after), nn.ReLU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(width, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class PlainWork(Work):
    """Work for an optimizer without state, so that a step is little more than its exchange."""

    def optimizer(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-3)


def add_works() -> None:
    """The global batch grows with the workers, so each number of them has a work of its own."""
    for workers in WORKERS:
        batch = SHARE * workers
        WORKS[f"wide-{workers}"] = PlainWork(WideMLP, partial(Pool, INPUTS, CLASSES, batch * 20_000), class_loss, batch)


if __name__ == "__main__":
    add_works()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
