"""What a `collate` draws with torch belongs to the position of each sample, not to who is collated with it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.data.fetch import Fetcher, Positions
from shoal.data.loader import Loader

SIZE, LENGTH, WORDS = 12, 9, 1000


class Sentences:
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(LENGTH) + 10 * index


class Uneven(Sentences):
    """The longest sentence is at one position only."""

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index)[: LENGTH if index == 85 else 3 + index % 4]


def masked(items: list[Tensor]) -> dict[str, Tensor]:
    """As for masked language models: some words are to be guessed; most of these are hidden, some are replaced."""
    words = torch.nn.utils.rnn.pad_sequence(items, batch_first=True)
    words = F.pad(words, (0, LENGTH - words.shape[1]))  # so that batches can be compared
    lengths = max(map(len, items))
    inner = words[:, :lengths].clone()
    guessed = torch.bernoulli(torch.full(inner.shape, 0.4)).bool()
    hidden = torch.bernoulli(torch.full(inner.shape, 0.8)).bool() & guessed
    replaced = torch.bernoulli(torch.full(inner.shape, 0.5)).bool() & guessed & ~hidden
    inner[hidden] = -1
    inner[replaced] = torch.randint(WORDS, inner.shape)[replaced]
    for row, item in zip(inner, items, strict=True):
        row[len(item) :] = 0  # what is drawn for padding is of no account
    return {"words": F.pad(inner, (0, LENGTH - lengths)), "noise": torch.randn(len(items), 2)}


def collated(fetcher: Fetcher, *edges: int, key: int = 5) -> list[Tensor]:
    bounds = [0, *edges, SIZE]
    request = tuple(Positions([90 - n for n in range(a, b)], key, a) for a, b in pairwise(bounds))
    batches = fetcher.fetch(request)
    return [torch.cat([batch[name] for batch in batches]) for name in ("words", "noise")]


@pytest.mark.parametrize("data", [Sentences, Uneven])
def test_apart_or_together(data: Callable[[], Any]) -> None:
    expected = collated(Fetcher(data(), masked))
    rows = expected[0]
    assert ((rows == -1).any(1).sum() > 6) and len({tuple(row) for row in expected[1].tolist()}) == SIZE
    warm = Fetcher(data(), masked)
    for edges in ((5,), (4, 6, 9), (2, 4, 6, 8, 10), ()):
        for fetcher in (Fetcher(data(), masked), warm):
            assert all(map(torch.equal, collated(fetcher, *edges), expected))
    assert not torch.equal(collated(warm, key=6)[1], expected[1])


def test_single_samples() -> None:
    fetcher = Fetcher(Sentences(), masked)
    expected = collated(fetcher)
    for each in (fetcher, Fetcher(Sentences(), masked)):
        assert all(map(torch.equal, collated(each, *range(1, SIZE)), expected))


def test_by_a_process() -> None:
    loader = Loader({"data": Fetcher(Uneven(), masked)}, processes=1, spare_cores=0.0)
    request = Positions(range(90, 90 - 7, -1), 5, 0), Positions(range(83, 90 - SIZE, -1), 5, 7)
    try:
        batches = loader.open("data", lambda number: request if number == 0 else None).take()
    finally:
        loader.close()
    assert batches is not None
    expected = collated(Fetcher(Uneven(), masked))
    for name, value in zip(("words", "noise"), expected, strict=True):
        assert torch.equal(torch.cat([batch[name] for batch in batches]), value)
