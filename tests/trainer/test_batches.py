"""Batches that are mappings or dataclasses: the same in the worker and from a loader process, in all that is done."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.data.device import moved


class Encoding(UserDict[str, Any]):
    """As `transformers.BatchEncoding`, it gives its items as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


@dataclass
class Pair:
    x: Tensor
    y: Tensor


class Named(NamedTuple):
    x: Tensor
    y: Tensor


class Mover(UserDict[str, Any]):
    """Knows itself how to be moved."""

    def to(self, device: torch.device) -> str:
        return f"on {device}"


@pytest.mark.parametrize("kind", [lambda x, y: Encoding(x=x, y=y), Pair, Named])
def test_a_batch_keeps_its_class_when_it_is_moved(kind: Any) -> None:
    batch = kind(torch.ones(2), [torch.ones(3), "text"])
    found = moved(batch, torch.device("meta"))
    assert type(found) is type(batch)
    assert found.x.device.type == found.y[0].device.type == "meta" and found.y[1] == "text"
    assert batch.x.device.type == "cpu"


def test_what_can_move_itself_does() -> None:
    meta = torch.device("meta")
    assert moved([Mover(), {"to": torch.ones(1)}], meta)[0] == "on meta"
    assert moved({"to": torch.ones(1)}, meta)["to"].device == meta


def fitted(collate: Any, data_workers: int) -> tuple[list[Tensor], Any]:
    inputs = torch.linspace(-1.0, 1.0, 24).unsqueeze(1)
    torch.manual_seed(0)
    trainer = shoal.Trainer(
        nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.2), nn.Linear(4, 1)),
        lambda model, batch: nn.functional.mse_loss(model(batch.pair.x), batch.pair.y),
        lambda params: torch.optim.SGD(params, lr=0.1),
        [(x, 2 * x) for x in inputs],
        eval_data=[(x, 2 * x) for x in inputs[:6]],
        collate=collate,
        predict=lambda model, batch: Encoding(given=model(batch.pair.x)),
        batch_size=8,
        steps=4,
        workers=2,
        data_workers=data_workers,
    )
    trainer.fit()
    given = trainer.predict([(x, x) for x in inputs[:5]]) if data_workers else None
    return [param.detach() for param in trainer.model.parameters()], given


def as_encoding(items: list[Any]) -> Encoding:
    pair = Pair(*map(torch.stack, zip(*items, strict=True)))
    return Encoding(pair=pair)


def test_training_is_the_same_inline_and_with_loader_processes() -> None:
    (inline, _), (found, given) = fitted(as_encoding, 0), fitted(as_encoding, 1)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, inline, strict=True))
    assert given["given"].shape == (5, 1)
