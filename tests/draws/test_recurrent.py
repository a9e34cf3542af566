"""Recurrent networks with dropout between their layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")

N, TIME, WIDTH = 13, 7, 5
X = torch.randn(N, TIME, WIDTH, generator=torch.Generator().manual_seed(1))
LENGTHS = torch.tensor([3, 7, 1, 4, 4, 2, 6, 5, 5, 1, 2, 3, 4])

MODELS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": lambda **more: nn.LSTM(WIDTH, 6, 3, dropout=0.4, **more),
    "lstm, both ways": lambda **more: nn.LSTM(WIDTH, 6, 2, dropout=0.4, bidirectional=True, **more),
    "lstm, projected": lambda **more: nn.LSTM(WIDTH, 6, 2, dropout=0.4, proj_size=3, **more),
    "lstm, all of it": lambda **more: nn.LSTM(
        WIDTH, 6, 3, dropout=0.4, proj_size=3, bias=False, bidirectional=True, **more
    ),
    "gru": lambda **more: nn.GRU(WIDTH, 6, 3, dropout=0.4, **more),
    "gru, no bias": lambda **more: nn.GRU(WIDTH, 6, 2, dropout=0.4, bias=False, bidirectional=True, **more),
    "rnn": lambda **more: nn.RNN(WIDTH, 6, 2, dropout=0.4, **more),
    "rnn, relu": lambda **more: nn.RNN(WIDTH, 6, 2, dropout=0.4, nonlinearity="relu", bidirectional=True, **more),
}


def ends(states: Tensor | tuple[Tensor, ...]) -> Tensor:
    return sum((state.square().sum() for state in states), torch.zeros(()))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_add_up(check: Any, name: str, batch_first: bool) -> None:
    torch.manual_seed(2)
    model = MODELS[name](batch_first=batch_first)

    def loss(start: int, stop: int) -> Tensor:
        out, states = model(X[start:stop] if batch_first else X[start:stop].transpose(0, 1))
        return out.square().sum() + ends(states)

    check.gradients(model, loss, N)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_packed_sequences_add_up(check: Any, name: str, ordered: bool) -> None:
    """The longest sequence lies in one part only."""
    torch.manual_seed(2)
    model = MODELS[name](batch_first=True)
    lengths = LENGTHS.sort(descending=True).values if ordered else LENGTHS

    def loss(start: int, stop: int) -> Tensor:
        packed = pack_padded_sequence(X[start:stop], lengths[start:stop], batch_first=True, enforce_sorted=ordered)
        out, states = model(packed)
        return pad_packed_sequence(out, batch_first=True)[0].square().sum() + ends(states)

    check.gradients(model, loss, N)


@pytest.mark.parametrize("name", MODELS)
def test_it_computes_what_torch_does(check: Any, name: str) -> None:
    """Hardly anything is dropped, so both must come to the same."""
    torch.manual_seed(2)
    model = MODELS[name](batch_first=True)
    packed = pack_padded_sequence(X, LENGTHS, batch_first=True, enforce_sorted=False)
    for given in (X, packed):
        model.dropout = 1e-11
        ours, our_ends = check.play(lambda start, stop, given=given: model(given), N).part(0, N)[0]
        model.dropout = 0.0
        theirs, their_ends = model(given)
        if isinstance(theirs, PackedSequence):
            ours, theirs = ours.data, theirs.data
        assert check.difference(ours, theirs) < 1e-6
        assert type(our_ends) is type(their_ends) and abs(ends(our_ends) - ends(their_ends)) < 1e-4


def test_steps_of_a_packed_sequence_get_masks_of_their_own(check: Any) -> None:
    model = nn.RNN(WIDTH, 50, 2, dropout=0.5, batch_first=True)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
        model.bias_ih_l0.fill_(1.0)
        model.weight_ih_l1.copy_(torch.eye(50))
    play = check.play(
        lambda start, stop: model(pack_padded_sequence(X, LENGTHS, batch_first=True, enforce_sorted=False))[0], N
    )
    masks = play.part(0, N)[0].data.detach() != 0
    assert len({tuple(mask.tolist()) for mask in masks}) == int(LENGTHS.sum())


def test_without_dropout_nothing_is_drawn(check: Any) -> None:
    for model in (nn.LSTM(WIDTH, 6, 2, batch_first=True), MODELS["lstm"](batch_first=True).eval()):
        forward = check.play(lambda start, stop, model=model: model(X), N).part(0, N)[1]
        assert not forward.drew and not forward.moved()
