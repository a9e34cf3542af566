"""Activations that are computed again in the backward pass get the masks that they had."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from shoal.draws import here
from shoal.draws.stand import standing

N, TIME, WIDTH = 13, 5, 8
X = torch.randn(N, TIME, WIDTH, generator=torch.Generator().manual_seed(1))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return F.scaled_dot_product_attention(y, y, y, dropout_p=0.4, is_causal=True)


class Recurring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(WIDTH, WIDTH, 3, dropout=0.4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)[0]
        return out


class Noisy(nn.Module):
    """Draws in turns, some for all samples together."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = F.dropout(self.inner(x) + torch.randn_like(x), 0.3) * (1 + torch.rand(()))
        return x


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
    "attention": Attending,
    "recurrent": Recurring,
    "noise": Noisy,
}


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()  # without it, reentrant checkpoints give no gradients
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
            x = F.dropout(x, 0.1)
        return x


@pytest.mark.parametrize("block", BLOCKS)
def test_gradients_are_those_without_it(check: Any, block: str) -> None:
    found = []
    for reentrant in (None, True, False):
        torch.manual_seed(2)
        model = Net(BLOCKS[block], reentrant)
        play = check.play(lambda start, stop, model=model: model(X[start:stop]).square().sum().backward(), N, [model])
        play.learn()
        model.zero_grad()
        play.parts()
        found.append([param.grad for param in model.parameters()])
        check.gradients(model, lambda start, stop, model=model: model(X[start:stop]).square().sum(), N)
    for other in found[1:]:
        assert max(map(check.difference, other, found[0])) < 1e-6


def test_a_replay_is_no_new_draw(check: Any) -> None:
    model = Net(BLOCKS["noise"], False)
    play = check.play(lambda start, stop: model(X[start:stop]).square().sum(), N, [model])
    loss, forward = play.part(0, N)
    assert not forward.moved()
    # backward here, as a step does it: after it was judged
    drawn = len(forward._tokens)
    with standing():
        here.enter(forward)
        loss.backward()
        here.enter(None)
    assert len(forward._tokens) == drawn and not forward.strange


def test_blocks_in_a_row(check: Any) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(*(BLOCKS["dropout"]() for _ in range(4)))

    def loss(start: int, stop: int) -> Tensor:
        x = X[start:stop].clone().requires_grad_()
        out: Tensor = checkpoint_sequential(model, 2, x, use_reentrant=False)
        return out.square().sum()

    check.gradients(model, loss, N)


def test_masks_of_large_tensors_are_let_go(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is there to save memory: nothing of a block may stay but its input."""
    made: list[weakref.ref[Any]] = []
    original = numpy.empty

    def empty(shape: Any, dtype: Any = float) -> Any:
        found = original(shape, dtype)
        if found.dtype == bool:
            made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(numpy, "empty", empty)
    x = torch.randn(N, 4000, requires_grad=True)
    for recomputed in (True, False):
        made.clear()

        def drop(x: Tensor) -> Tensor:
            return F.dropout(x, 0.5)

        def compute(start: int, stop: int, recomputed: bool = recomputed) -> Any:
            return checkpoint(drop, x, use_reentrant=False) if recomputed else drop(x)

        out = check.play(compute, N).part(0, N)[0]
        gc.collect()
        assert out.requires_grad and len(made) == 1 and (made[0]() is None) == recomputed
