"""A dense model of so many megabytes, and as little to compute as one likes: what the arms of serverstep.py train."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from wide import CLASSES, INPUTS, WideMLP
from work import Pool, class_loss

OPTIMIZERS = ("sgd", "momentum", "adamw")
STORED = 512  # samples that there are; more would only fill caches

loss = class_loss


def model(megabytes: float) -> nn.Module:
    """WideMLP with as many parameters in single precision, to a per cent: two square layers, and little besides."""
    fixed = INPUTS + CLASSES + 3  # parameters for each unit of width, besides those of the square layers
    width = (math.sqrt(fixed**2 + 8 * megabytes * (1 << 20) / 4) - fixed) / 4
    return WideMLP(round(width))


def data(samples: int) -> Pool:
    return Pool(INPUTS, CLASSES, samples, STORED)


def optimizer(name: str, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-4)
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9 if name == "momentum" else 0.0)
