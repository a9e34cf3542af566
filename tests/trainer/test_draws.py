"""Runs of models that draw: the same on any number of workers, through deaths, resumes and small forwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal
from shoal.core.events import AnyEvent, Notice
from shoal.testing import FaultPlan
from shoal.testing.reference import reference_fit, relative_difference
from shoal.trainer.session import Session

SIZE, BATCH, STEPS = 8, 22, 4
TOLERANCE = 1e-5


def samples(count: int = 70) -> TensorDataset:
    """Pictures of 8 × 8, which are also sequences of 8 vectors; and words."""
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(count, SIZE, SIZE, generator=generator)
    return TensorDataset(pictures, torch.randint(0, 10, (count, SIZE), generator=generator))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.drop = nn.Embedding(10, 8), nn.Parameter(torch.zeros(SIZE, 8)), nn.Dropout(0.1)
        self.heads, self.joined, self.out = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        y = self.drop(self.words(words) + self.places)
        q, k, v = (part.view(len(y), SIZE, 2, 4).transpose(1, 2) for part in self.heads(y).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True).transpose(1, 2).flatten(2)
        logits = self.out(y + self.drop(self.joined(mixed)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
        self.maps, self.last = nn.Dropout2d(0.25), nn.Linear(16, 10)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        y = self.maps(F.relu(self.first(x[:, None])))
        y = F.max_pool2d(F.rrelu(self.second(y), training=self.training), 2)
        return F.cross_entropy(self.last(F.dropout(y.flatten(1), 0.5, self.training)), words[:, 0])


class Encoder(nn.Module):
    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(SIZE, 2, 16, batch_first=batch_first)
        self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.batch_first, self.out = batch_first, nn.Linear(SIZE, 10)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        y = self.inner(x) if self.batch_first else self.inner(x.transpose(0, 1)).transpose(0, 1)
        return F.cross_entropy(self.out(y.mean(1)), words[:, 0])


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.coder, self.decoder = nn.Linear(64, 8), nn.Linear(4, 64)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        mean, spread = self.coder(x.flatten(1)).chunk(2, 1)
        made = self.decoder(mean + torch.randn_like(spread) * (spread / 2).exp())
        loss = (made - x.flatten(1)).square().sum(1) - 0.5 * (1 + spread - mean.square() - spread.exp()).sum(1)
        return loss.mean() / 20


class Denoiser(nn.Module):
    """With noise in its input, a masked part, and one factor for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 64))

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        noisy = x + 0.3 * torch.randn(x.shape) * (0.5 + torch.rand(()))
        noisy = noisy * torch.bernoulli(torch.full((len(x), SIZE, 1), 0.8))
        return (self.inner(noisy.flatten(1)) - x.flatten(1)).square().mean()


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.inner, self.out = kind(SIZE, 6, 2, dropout=0.3, **options), nn.LazyLinear(10)
        self.first = self.inner.batch_first
        self(torch.zeros(2, SIZE, SIZE), torch.zeros(2, 1, dtype=torch.int64))

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        y = self.inner(x if self.first else x.transpose(0, 1))[0]
        return F.cross_entropy(self.out(y[:, -1] if self.first else y[-1]), words[:, 0])


class Twice(nn.Module):
    """The batch two times over, one after the other: samples vary faster. And a layer that is left out at random."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.layer = nn.Linear(64, 8), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3))

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        y = F.dropout(self.inner(torch.cat([x, x]).flatten(1)), 0.4)
        if torch.rand(()) < 0.6:
            y = y + self.layer(y)
        one, other = y.chunk(2)
        return (one - other).square().mean() + y.square().mean()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(64, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 10), nn.AlphaDropout(0.1)
        )

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        out = torch.utils.checkpoint.checkpoint(self.inner, x.flatten(1), use_reentrant=False)
        return F.cross_entropy(F.gumbel_softmax(out) * 5, words[:, 0])


class All(nn.Module):
    """Models side by side, with nothing in common: one run tells of all."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        parts: dict[str, nn.Module] = {
            "gpt": GPT(),
            "cnn": CNN(),
            "encoder": Encoder(batch_first=True),
            "encoder, time first": Encoder(batch_first=False),
            "vae": VAE(),
            "denoiser": Denoiser(),
            "lstm": Recurrent(nn.LSTM, batch_first=True, bidirectional=True),
            "gru": Recurrent(nn.GRU),
            "twice": Twice(),
            "checkpointed": Checkpointed(),
        }
        self.parts = nn.ModuleDict({name: part for name, part in parts.items() if name in names or not names})

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        return torch.stack([part(x, words) for part in self.parts.values()]).sum()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(*batch)  # type: ignore[no-any-return]


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def fit(model: Callable[[], nn.Module], *, steps: int = STEPS, **options: Any) -> tuple[nn.Module, list[AnyEvent]]:
    events: list[AnyEvent] = []
    options.setdefault("callbacks", [events.append])
    trainer = shoal.Trainer(
        model, options.pop("loss", loss), optimizer, samples(), batch_size=BATCH, steps=steps, seed=4, **options
    )
    trainer.fit()
    assert isinstance(trainer.model, nn.Module)
    return trainer.model, events


def notices(events: list[AnyEvent]) -> list[str]:
    return [event.text for event in events if isinstance(event, Notice) and not event.quiet]


@pytest.fixture(scope="module")
def expected() -> All:
    model = All()
    reference_fit(model, loss, optimizer, samples(), batch_size=BATCH, steps=STEPS, seed=4)
    return model


def assert_same(model: Any, expected: All) -> None:
    apart = {name: relative_difference(part, expected.parts[name]) for name, part in model.parts.items()}
    assert {name for name, value in apart.items() if value > TOLERANCE} == set(), apart


@pytest.mark.parametrize("options", [{"workers": 1}, {"workers": 2}, {"workers": 3, "micro_batch": 3}, {"workers": 4}])
def test_any_number_of_workers(expected: All, options: dict[str, Any]) -> None:
    model, events = fit(All, **options)
    assert_same(model, expected)
    assert notices(events) == []


def test_a_death(expected: All, tmp_path: Path) -> None:
    plan = FaultPlan().kill("worker-1", step=2, at="exchange").ledger(tmp_path)
    model, _ = fit(All, workers=3, min_workers=1, faults=plan)
    assert len(plan.fired()) == 1
    assert_same(model, expected)


def test_a_resume(expected: All, tmp_path: Path) -> None:
    fit(All, workers=2, steps=2, run_dir=tmp_path)
    model, _ = fit(All, workers=1, run_dir=tmp_path, resume="last")
    assert_same(model, expected)


def test_bitwise() -> None:
    some = partial(All, "cnn", "vae", "twice")
    one, two, three = (fit(some, workers=workers, steps=2, deterministic=True)[0] for workers in (1, 2, 3))
    for name, value in one.state_dict().items():
        assert torch.equal(two.state_dict()[name], value) and torch.equal(three.state_dict()[name], value), name


def small() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 2))


def test_what_is_learnt_is_part_of_the_state(tmp_path: Path) -> None:
    def loop(session: Session) -> list[list[list[int]]]:
        model = small()
        made = optimizer(model.named_parameters())
        session.track(model=model, optimizer=made)
        told = []
        for step in session.steps(samples(), BATCH, steps=2):
            for batch in step:
                step.backward(model(batch[0]).square().mean())
            step.apply(made)
            told.append(session.state()["session"]["draws"]["rules"])
        return told

    one, other = shoal.launch(loop, workers=2)
    assert one == other and len(one[-1]) == 1 and one[-1][0][1:] == [0, 0]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_draws_past_us_are_seeded_by_the_forward_and_told_of() -> None:
    def drop(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)

    script = torch.jit.script(drop)
    events: list[AnyEvent] = []

    def loop(session: Session) -> list[tuple[bool, ...]]:
        model = small()
        made = optimizer(model.named_parameters())
        session.track(model=model, optimizer=made)
        masks = []
        for step in session.steps(samples(), BATCH, steps=3, micro_batch=4):
            for batch in step:
                kept = script(torch.ones(len(batch[0]), 64)) + F.dropout(torch.ones(len(batch[0]), 64), 0.5)
                step.backward((model(batch[0]).square().mean(1, keepdim=True) * kept).mean())
                masks += [tuple((row > 0).tolist()) for row in kept]
            step.apply(made)
        return masks

    one, other = shoal.launch(loop, workers=2, callbacks=[events.append])
    masks = one + other
    # the forward in which it was noticed was computed once more
    assert len(masks) >= 66 and len(set(masks)) >= 66
    assert len([text for text in notices(events) if "by the forward" in text or "past" in text]) == 1


def test_predictions_that_draw() -> None:
    """Monte Carlo dropout: what a sample gets depends on its index alone."""
    model = small()

    def predict(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        model.train()
        copies = model(batch[0].repeat(3, 1, 1)).view(3, len(batch[0]), -1).transpose(0, 1)
        again = torch.stack([model(batch[0]) for _ in range(3)], 1)
        return copies + again + 0.1 * torch.randn(len(batch[0]), 1, 1)

    found = []
    for workers, size in ((1, 22), (2, 9), (3, 4)):
        trainer = shoal.Trainer(
            model, loss, optimizer, samples(), batch_size=size, steps=1, workers=workers, predict=predict, seed=4
        )
        found.append(trainer.predict(samples(37)))
    assert found[0].shape == (37, 3, 2) and float(found[0].std(1).min()) > 0
    for other in found[1:]:
        assert torch.allclose(other, found[0], atol=1e-6)


@pytest.mark.slow
def test_bert() -> None:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(**sizes, intermediate_size=16, max_position_embeddings=SIZE, num_labels=10)

    def make() -> nn.Module:
        torch.manual_seed(3)
        return BertForSequenceClassification(config)

    def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(input_ids=batch[1], labels=batch[1][:, 0]).loss  # type: ignore[no-any-return]

    expected = make()
    reference_fit(expected, classify, optimizer, samples(), batch_size=BATCH, steps=STEPS, seed=4)
    for workers in (1, 3):
        model, _ = fit(make, workers=workers, loss=classify)
        for made in (model, expected):
            for name, param in made.named_parameters():
                if name.endswith("key.bias"):  # without a gradient, but for rounding
                    param.data.zero_()
        assert relative_difference(model, expected) < TOLERANCE
