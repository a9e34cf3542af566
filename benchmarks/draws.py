"""Works that draw random numbers in their forward, as dropout does.

Each of them also without (`cnn:dry`), and with AdamW's fused kernel in all arms (`cnn:fused`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import turn
from torch import Tensor, nn
from work import SYMBOLS, Batch, TinyGPT, Windows, Work, class_loss, gpt_loss, plays

EPOCH = 20_000  # steps: longer than a run, so no arm meets the end of an epoch
PIXELS = 28 * 28
CLASSES = 10


class Stored:
    """`count` items drawn from a few thousand stored ones; an item is a row of the tensor, or of each of several."""

    def __init__(self, count: int, *columns: Any) -> None:
        self.count, self.columns, self.stored = count, columns, len(columns[0])

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        row = tuple(column[index % self.stored] for column in self.columns)
        return row if len(row) > 1 else row[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] for index in indices]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def labels(stored: int = 4096) -> Tensor:
    return torch.randint(CLASSES, (stored,), generator=seeded())


def images(stored: int = 4096) -> Tensor:
    """Grey values from 0 to 1, most of them dark as those of written digits are."""
    return torch.rand(stored, PIXELS, generator=seeded()).pow_(4)


def text(batch_size: int) -> Windows:
    return Windows(plays(), batch_size * EPOCH)


# ---- a GPT: dropout of 0.1 after the embedding, in attention and at the end of each branch


def gpt(wet: bool) -> Work:
    return Work(partial(TinyGPT, 0.1 * wet), partial(text, 32), gpt_loss, batch_size=32)


# ---- the CNN for MNIST of PyTorch's examples


class CNN(nn.Module):
    def __init__(self, wet: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.after_pool, self.after_hidden = nn.Dropout(0.25 * wet), nn.Dropout(0.5 * wet)
        self.hidden, self.out = nn.Linear(9216, 128), nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.second(F.relu(self.first(x)))), 2)
        x = F.relu(self.hidden(self.after_pool(x).flatten(1)))
        out: Tensor = self.out(self.after_hidden(x))
        return out


def digits(batch_size: int) -> Stored:
    return Stored(batch_size * EPOCH, images().view(-1, 1, 28, 28), labels())


def cnn(wet: bool) -> Work:
    return Work(partial(CNN, wet), partial(digits, 64), class_loss, batch_size=64)


# ---- torch's own transformer, which tells sequences of tokens apart


class Encoder(nn.Module):
    def __init__(self, wet: bool, width: int = 128, depth: int = 3) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(1000, width), nn.Parameter(torch.zeros(32, width))
        dropout = 0.1 * wet  # as it is by default
        layer = nn.TransformerEncoderLayer(width, 4, dim_feedforward=4 * width, dropout=dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, depth)
        self.out = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.out(self.layers(self.token(tokens) + self.position).mean(1))
        return out


def sequences(batch_size: int) -> Stored:
    return Stored(batch_size * EPOCH, torch.randint(1000, (4096, 32), generator=seeded()), labels())


def encoder(wet: bool) -> Work:
    return Work(partial(Encoder, wet), partial(sequences, 32), class_loss, batch_size=32)


# ---- a BERT of Hugging Face, made from a config, for sequences of 12 to 48 tokens


def bert_model(wet: bool) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    dropout = 0.1 * wet  # as it is by default
    config = BertConfig(
        vocab_size=1000,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=64,
        num_labels=CLASSES,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    made: nn.Module = BertForSequenceClassification(config)
    return made


def sentences(batch_size: int, stored: int = 4096) -> Stored:
    generator = seeded()
    lengths = torch.randint(12, 49, (stored,), generator=generator).tolist()
    tokens = [torch.randint(1, 1000, (length,), generator=generator) for length in lengths]
    return Stored(batch_size * EPOCH, tokens, labels(stored))


def padded(items: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The batch that a Hugging Face model takes by name; no token is 0."""
    ids = nn.utils.rnn.pad_sequence([tokens for tokens, _ in items], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.stack([label for _, label in items])}


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    turn.tick(len(batch["labels"]))
    found: Tensor = model(**batch).loss
    return found


def bert(wet: bool) -> Work:
    return Work(partial(bert_model, wet), partial(sentences, 32), own_loss, batch_size=32, collate=padded)


# ---- the VAE of PyTorch's examples, with the mean over samples instead of their sum


class VAE(nn.Module):
    def __init__(self, wet: bool) -> None:
        super().__init__()
        self.wet = wet
        self.first, self.mean, self.spread = nn.Linear(PIXELS, 400), nn.Linear(400, 20), nn.Linear(400, 20)
        self.hidden, self.out = nn.Linear(20, 400), nn.Linear(400, PIXELS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen = F.relu(self.first(x))
        mean, log_variance = self.mean(seen), self.spread(seen)
        deviation = torch.exp(0.5 * log_variance)
        code = mean + (torch.randn_like(deviation) if self.wet else 0.5) * deviation
        return torch.sigmoid(self.out(F.relu(self.hidden(code)))), mean, log_variance


def vae_loss(model: nn.Module, inputs: Batch) -> Tensor:
    turn.tick(len(inputs))
    made, mean, log_variance = model(inputs)
    error = F.binary_cross_entropy(made, inputs, reduction="sum")
    divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
    return (error + divergence) / len(inputs)


def pictures(batch_size: int) -> Stored:
    return Stored(batch_size * EPOCH, images())


def vae(wet: bool) -> Work:
    return Work(partial(VAE, wet), partial(pictures, 128), vae_loss, batch_size=128)


# ---- a denoising autoencoder: the noise is drawn in the loss


def autoencoder() -> nn.Module:
    encode = (nn.Linear(PIXELS, 512), nn.ReLU(), nn.Linear(512, 128), nn.ReLU())
    return nn.Sequential(*encode, nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, PIXELS), nn.Sigmoid())


def denoiser_loss(wet: bool, model: nn.Module, inputs: Batch) -> Tensor:
    turn.tick(len(inputs))
    noisy = inputs + 0.3 * torch.randn_like(inputs) if wet else inputs
    return F.mse_loss(model(noisy), inputs)


def denoiser(wet: bool) -> Work:
    return Work(autoencoder, partial(pictures, 128), partial(denoiser_loss, wet), batch_size=128)


# ---- recurrent language models: dropout between their two layers


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM | nn.GRU], wet: bool, width: int = 128) -> None:
        super().__init__()
        self.token = nn.Embedding(SYMBOLS, width)
        self.layers = kind(width, width, num_layers=2, dropout=0.3 * wet, batch_first=True)
        self.out = nn.Linear(width, SYMBOLS)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.out(self.layers(self.token(tokens))[0])
        return out


def recurrent(kind: type[nn.LSTM | nn.GRU], wet: bool) -> Work:
    return Work(partial(Recurrent, kind, wet), partial(text, 32), gpt_loss, batch_size=32)


MAKERS: dict[str, Callable[[bool], Work]] = {
    "gpt-dropout": gpt,
    "cnn": cnn,
    "encoder": encoder,
    "bert": bert,
    "vae": vae,
    "denoiser": denoiser,
    "lstm": partial(recurrent, nn.LSTM),
    "gru": partial(recurrent, nn.GRU),
}
WORKS = {name + end: make(wet) for name, make in MAKERS.items() for end, wet in (("", True), (":dry", False))}
WORKS |= {f"{name}:fused": replace(WORKS[name], fused=True) for name in MAKERS}
