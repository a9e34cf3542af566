"""What is learnt of a draw: which dimension holds the samples, at which place in the code, in which turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.draws import here
from shoal.draws.forward import Forward, Keying
from shoal.draws.sites import SHARED, Names, Rule, Seen, as_tree, fits, from_tree, guess, learn
from shoal.draws.stand import standing

N = 13
X = torch.randn(N, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "shapes, rule",
    [
        ({24: (24, 5), 9: (9, 5), 15: (15, 5)}, Rule(0)),
        ({24: (24, 24), 9: (24, 9), 15: (24, 15)}, Rule(1)),
        ({24: (96, 5), 9: (36, 5), 15: (60, 5)}, Rule(0)),
        ({24: (3, 48), 9: (3, 18), 15: (3, 30)}, Rule(1)),
        # padded to another length in each part
        ({24: (24, 18), 9: (9, 18), 15: (15, 11)}, Rule(0)),
        ({24: (), 9: (), 15: ()}, SHARED),
        ({24: (24,), 9: (24,), 15: (24,)}, SHARED),
        ({24: (48, 24), 9: (18, 9), 15: (30, 15)}, Rule(1)),
        ({24: (24, 5)}, Rule(0)),
        ({24: (7, 24)}, Rule(1)),
        ({24: (48, 7)}, Rule(0)),
        ({24: (0, 24), 9: (0, 9), 15: (0, 15)}, Rule(1)),
    ],
)
def test_learning(shapes: dict[int, tuple[int, ...]], rule: Rule) -> None:
    rules, multiples = learn([Seen(3, samples, shape) for samples, shape in shapes.items()])
    assert rules == {3: rule} and from_tree(as_tree(rules)) == rules
    exact = rule == SHARED or all(shape[rule.dimension] == samples for samples, shape in shapes.items())
    assert multiples == ([] if exact else [3])
    assert all(fits(rule, samples, shape) for samples, shape in shapes.items())


def test_a_guess() -> None:
    assert guess(4, (3, 4)) == Rule(1) and guess(4, (8, 3)) == Rule(0)
    assert guess(4, (3, 8)) == guess(4, ()) == guess(4, (0, 3)) == guess(0, (3,)) == SHARED


def padded(rows: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


LENGTHS = [3, 5, 2, 4, 4, 11, 6, 1, 5, 2, 3, 4, 2]
SEQUENCES = [torch.randn(length, 6, generator=torch.Generator().manual_seed(length)) for length in LENGTHS]


class Cells(nn.Module):
    """A recurrent network by hand: as many draws as the longest sample has steps, then one more."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.drop, self.last = nn.RNNCell(6, 8), nn.Dropout(0.4), nn.Linear(8, 2)

    def forward(self, rows: list[Tensor]) -> Tensor:
        x, lengths = padded(rows), torch.tensor(list(map(len, rows)))
        state = torch.zeros(len(rows), 8)
        for step in range(x.shape[1]):
            new = self.drop(self.cell(x[:, step], state))
            state = torch.where((step < lengths)[:, None], new, state)
        noisy = state + 0.1 * torch.randn_like(state)
        return self.last(F.dropout(noisy, 0.3)).square().sum()


class Padded(nn.Module):
    """Draws for what is padding too."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.inner = form, nn.Linear(6, 6)

    def forward(self, rows: list[Tensor]) -> Tensor:
        x = self.inner(padded(rows))
        if self.form == "dropout":
            x = F.dropout(x, 0.5)
        elif self.form == "attention":
            bias = torch.zeros(len(rows), 1, 1, x.shape[1])
            for place, row in enumerate(rows):
                bias[place, :, :, len(row) :] = -torch.inf
            heads = x.view(*x.shape[:2], 2, 3).transpose(1, 2)
            attended = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias, dropout_p=0.4)
            x = attended.transpose(1, 2).reshape(x.shape)
        elif self.form == "noise":
            x = x * torch.randn_like(x)
        else:  # time first
            x = F.dropout(x.transpose(0, 1), 0.5).transpose(0, 1)
        return sum((x[place, : len(row)].square().sum() for place, row in enumerate(rows)), torch.zeros(()))


@pytest.mark.parametrize("form", ["dropout", "attention", "noise", "time first"])
def test_a_part_that_is_padded_to_another_length_draws_the_same(check: Any, form: str) -> None:
    model = Padded(form)
    check.gradients(model, lambda start, stop: model(SEQUENCES[start:stop]), N)


def test_a_loop_over_padded_steps_shifts_no_draw(check: Any) -> None:
    torch.manual_seed(1)
    model = Cells()
    check.gradients(model, lambda start, stop: model(SEQUENCES[start:stop]), N)


def test_multiples_with_samples_outside(check: Any) -> None:
    """Batch × heads."""
    check.values(lambda start, stop: F.dropout(X[start:stop].repeat_interleave(3, 0) + 3, 0.5), N)


@pytest.mark.parametrize("turned", [False, True])
def test_multiples_with_samples_inside(check: Any, turned: bool) -> None:
    """Two copies of a batch, one after the other; and time × batch."""

    def compute(start: int, stop: int) -> Tensor:
        x = X[start:stop]
        both = F.dropout(torch.cat([x, x, x], 0) + 3, 0.5)
        return both.view(3, len(x), -1).transpose(0, 1).contiguous()

    if turned:
        assert len({str(row) for row in check.values(compute, N, inner=True).reshape(3 * N, -1)}) == 3 * N
    else:
        with pytest.raises(AssertionError):
            check.values(compute, N)


class Layers(nn.Module):
    """LayerDrop: some layers are left out, at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(4))
        self.left_out: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.left_out = []
        for number, layer in enumerate(self.layers):
            if torch.rand(()) < 0.5:
                self.left_out.append(number)
            else:
                x = x + layer(x)
        return x


def test_layers_that_are_left_out_shift_nothing(check: Any) -> None:
    torch.manual_seed(1)
    model = Layers()
    play = check.play(lambda start, stop: model(X[start:stop]), N, [model])
    left_out = set()
    for seed in range(12):
        play.seed = seed
        play.learn()
        whole = play.parts()[0]
        left_out.add(tuple(model.left_out))
        for cuts in check.cuts:
            assert check.difference(torch.cat(play.parts(*cuts)), whole) < 1e-6
    assert len(left_out) > 4


def test_a_layer_draws_the_same_whether_or_not_another_one_is_left_out(check: Any) -> None:
    first, second = nn.Dropout(0.5), nn.Dropout(0.5)
    whole = nn.ModuleList([first, second])
    ones = torch.ones(N, 20)

    def compute(*used: nn.Module) -> Tensor:
        return check.play(lambda start, stop: [module(ones) for module in used], N, [whole]).part(0, N)[0][-1]

    assert torch.equal(compute(first, second), compute(second))
    assert not torch.equal(compute(first), compute(second))


def test_turns_of_one_place_differ(check: Any) -> None:
    drop = nn.Dropout(0.5)
    masks = check.play(lambda start, stop: [drop(torch.ones(N, 50)) for _ in range(3)], N).part(0, N)[0]
    assert not any(torch.equal(one, other) for at, one in enumerate(masks) for other in masks[:at])


def test_two_places_on_one_line_differ(check: Any) -> None:
    one, other = check.play(
        lambda start, stop: (F.dropout(torch.ones(N, 50), 0.5), F.dropout(torch.ones(N, 50), 0.5)), N
    ).part(0, N)[0]
    assert not torch.equal(one, other)


def test_who_calls_a_model_has_no_say(check: Any) -> None:
    """A reference, an evaluation and a loop of one's own get the same numbers."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))

    def deeper(start: int, stop: int) -> Tensor:
        return (lambda: model(X[start:stop]))()

    one = check.play(lambda start, stop: model(X[start:stop]), N, [model]).part(0, N)[0]
    assert torch.equal(check.play(deeper, N, [model]).part(0, N)[0], one)


def test_a_place_that_draws_in_different_ways_is_told_of(check: Any) -> None:
    wide = False

    def compute(start: int, stop: int) -> Tensor:
        x = X[start:stop]
        return F.dropout(x.T if wide else x, 0.5)

    play = check.play(compute, N).learn()
    wide = True
    assert play.part(0, 4)[1].strange


def test_workers_agree() -> None:
    one, other = Keying(), Keying()
    one.learn({1: Rule(0), 2: SHARED})
    other.learn({2: SHARED, 3: Rule(1, inner=True)})
    for keying in (one, other):
        assert keying.agree([{1: Rule(0), 2: SHARED}, {2: SHARED, 3: Rule(1, inner=True)}]) == []
        assert keying.rules == {1: Rule(0), 2: SHARED, 3: Rule(1, inner=True)} and not keying.fresh
    assert one.agree([{4: Rule(0)}, {4: Rule(1)}]) == [4]
    one.learn({1: SHARED})
    assert not one.fresh and one.rule(1) == Rule(0)


def test_a_fresh_rule_of_none_is_a_rule() -> None:
    keying = Keying()
    keying.learn({5: SHARED})
    assert keying.rule(5) == SHARED and keying.rule(6) is None


def test_what_a_draw_costs_apart_from_its_numbers() -> None:
    """About 7 µs on one core of a small machine; this is to catch ten times as much."""
    import time

    model = nn.Sequential(nn.Sequential(nn.Dropout(0.5)))
    keying = Keying()
    keying.names = Names([model])
    forward = Forward(keying, range(2), 1)
    x = torch.ones(2, 1)
    with standing():
        forward.begin()
        here.enter(forward)
        try:
            fastest = float("inf")
            for _ in range(200):
                begun = time.perf_counter()
                forward.draw("dropout", x.shape)
                fastest = min(fastest, time.perf_counter() - begun)
        finally:
            here.enter(None)
    assert fastest < 70e-6
