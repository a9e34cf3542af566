"""The true weight of cross_entropy and nll_loss, taken by itself: any split gives what one plain process gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy, nll_loss
from torch.utils.data import TensorDataset

import shoal
from shoal.cluster.channel.channel import DirectChannel
from shoal.comm.group import SoloGroup
from shoal.core.events import Notice, StepDone
from shoal.proof import counted
from shoal.testing.reference import sample_order
from shoal.trainer.session import Session

_generator = torch.Generator().manual_seed(0)
COUNT, BATCH = 72, 24
X = torch.randn(COUNT, 6, generator=_generator)
Y = torch.randint(0, 3, (COUNT,), generator=_generator)
MASKED = torch.where(torch.rand(COUNT, generator=_generator) < 0.4, -100, Y)
RARE = torch.where(torch.arange(COUNT) % 9 == 0, Y, -100)
"""Most parts of a batch have none that counts."""
PIXELS = torch.randint(0, 3, (COUNT, 2, 2), generator=_generator)
PIXELS[torch.rand(COUNT, 2, 2, generator=_generator) < 0.3] = 9
CLASSES = torch.tensor([1.0, 5.0, 0.25])
DATA = TensorDataset(X, Y, MASKED, RARE, PIXELS)

Loss = Callable[[Any, Any], Any]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 12))


def labels(model: Any, batch: Any) -> Tensor:
    return model(batch[0])[:, :3]  # type: ignore[no-any-return]


def maps(model: Any, batch: Any) -> Tensor:
    return model(batch[0]).view(-1, 3, 2, 2)  # type: ignore[no-any-return]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.3, momentum=0.9)


_module = nn.CrossEntropyLoss(weight=CLASSES, ignore_index=1)

LOSSES: dict[str, Loss] = {
    "plain": lambda m, b: F.cross_entropy(labels(m, b), b[1]),
    "class weights": lambda m, b: F.cross_entropy(labels(m, b), b[1], weight=CLASSES),
    "imported by name, by position": lambda m, b: cross_entropy(labels(m, b), b[1], CLASSES, None, 2),
    "ignored": lambda m, b: F.cross_entropy(labels(m, b), b[2]),
    "most ignored": lambda m, b: F.cross_entropy(labels(m, b), b[3]),
    "label smoothing": lambda m, b: F.cross_entropy(labels(m, b), b[2], CLASSES, label_smoothing=0.2),
    "probabilities": lambda m, b: F.cross_entropy(labels(m, b), b[0][:, :3].softmax(1), CLASSES),
    "maps": lambda m, b: F.cross_entropy(maps(m, b), b[4], CLASSES, ignore_index=9),
    "nll": lambda m, b: nll_loss(labels(m, b).log_softmax(1), b[2], weight=CLASSES),
    "nll of maps": lambda m, b: F.nll_loss(maps(m, b).log_softmax(1), b[4], ignore_index=9),
    "module": lambda m, b: _module(labels(m, b), b[1]),
    "dict": lambda m, b: {"loss": F.cross_entropy(labels(m, b), b[2], CLASSES), "one": 1.0},
}


def value_of(returned: Any) -> Tensor:
    return returned["loss"] if isinstance(returned, dict) else returned  # type: ignore[no-any-return]


def plainly(model: nn.Module, loss: Loss, data: TensorDataset = DATA, epochs: int = 2) -> list[float]:
    """One process, whole batches, no Shoal."""
    optimizer, losses = sgd(model.parameters()), []
    for epoch in range(epochs):
        order = sample_order(COUNT, epoch=epoch)
        for start in range(0, COUNT, BATCH):
            optimizer.zero_grad()
            value = value_of(loss(model, data[order[start : start + BATCH]]))
            value.backward()
            optimizer.step()
            losses.append(value.item())
    return losses


def close(one: nn.Module, other: nn.Module, tolerance: float = 1e-6) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    with torch.no_grad():
        return all(float((a - b).norm() / (b.norm() + 1e-12)) < tolerance for a, b in pairs)


# -- parts, in this process --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_parts_add_up_to_the_batch(name: str) -> None:
    loss, events, losses = LOSSES[name], [], []
    model, plain = net(), net()
    session = Session(SoloGroup(), DirectChannel(events.append, None), device=torch.device("cpu"), strict=True)  # type: ignore[arg-type]
    optimizer = sgd(model.named_parameters())
    session.track(model=model, optimizer=optimizer)
    for step in session.steps(DATA, BATCH, epochs=2, micro_batch=5):
        for batch in step:
            step.backward(loss(model, batch))
        losses.append(step.apply(optimizer).loss)
    session.close()
    assert losses == pytest.approx(plainly(plain, loss), rel=1e-6)
    assert close(model, plain) and not [event for event in events if isinstance(event, Notice)]
    if name != "most ignored":  # where a forward has no weight, weights are not in samples
        assert session.keyed.unit in (1.0, 4.0)


def weight_in(make: Callable[[], Tensor]) -> float | None:
    with counted.counting():
        counted.begin()
        try:
            return counted.weight_of(make())
        finally:
            counted.end()


def test_it_counts_what_is_returned_itself_and_is_a_mean() -> None:
    guesses = torch.randn(4, 3, requires_grad=True)
    targets = torch.tensor([0, 1, -100, 0])
    assert weight_in(lambda: F.cross_entropy(guesses, targets)) == 3.0
    assert weight_in(lambda: F.cross_entropy(guesses[0], targets[0])) == 1.0
    assert weight_in(lambda: F.cross_entropy(guesses, targets, CLASSES)) == 7.0
    assert weight_in(lambda: F.cross_entropy(guesses, targets, reduction="sum")) is None
    assert weight_in(lambda: F.cross_entropy(guesses, targets, reduction="none").mean()) is None
    assert weight_in(lambda: F.cross_entropy(guesses, targets) * 1.0) is None
    assert weight_in(lambda: F.cross_entropy(guesses, torch.full((4,), -100))) == 0.0
    with pytest.warns(UserWarning, match="size_average"):
        assert weight_in(lambda: F.cross_entropy(guesses, targets, size_average=False)) is None
    # outside, nothing is in its place
    result = F.cross_entropy(guesses, targets)
    assert counted.weight_of(result) is None


def test_it_lets_functions_of_functions_be() -> None:
    guesses, targets = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    each = torch.func.vmap(F.cross_entropy)
    assert weight_in(lambda: each(guesses, targets).mean()) is None
    assert weight_in(lambda: F.cross_entropy(guesses.to("meta"), targets.to("meta"))) is None


def test_a_weight_that_depends_on_the_model_is_refused() -> None:
    def dice(model: Any, batch: Any) -> Any:
        chances = labels(model, batch).softmax(1)[:, 1]
        return -2 * (chances * batch[1]).sum(), chances.sum()

    def constant(model: Any, batch: Any) -> Any:
        total, weight = dice(model, batch)
        return total, weight.detach()

    def train(loss: Loss) -> None:
        session = Session(SoloGroup(), DirectChannel(None, None), device=torch.device("cpu"))
        model = net()
        optimizer = sgd(model.named_parameters())
        session.track(model=model, optimizer=optimizer)
        try:
            for step in session.steps(DATA, BATCH, steps=1, micro_batch=5):
                for batch in step:
                    step.backward(loss(model, batch))
                step.apply(optimizer)
        finally:
            session.close()

    with pytest.raises(shoal.ConfigError, match=r"depends on the model.*weight\.detach\(\)"):
        train(dice)
    train(constant)


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "options"),
    [(1, {}), (2, {}), (3, {}), (2, {"deterministic": True}), (2, {"sync": "server:mode=bsp"})],
    ids=["1", "2", "3", "deterministic", "servers"],
)
def test_any_number_of_workers_gives_what_one_process_gives(workers: int, options: dict[str, Any]) -> None:
    """In some steps a worker has no target that counts."""

    def loss(model: Any, batch: Any) -> Any:
        return F.cross_entropy(labels(model, batch), batch[3], CLASSES)

    assert any(bool((RARE[sample_order(COUNT)[start : start + 8]] == -100).all()) for start in range(0, COUNT, 8))
    model, plain, told = net(), net(), []
    trainer = shoal.Trainer(
        model,
        loss,
        sgd,
        DATA,
        eval_data=DATA,
        batch_size=BATCH,
        epochs=2,
        workers=workers,
        strict=True,
        callbacks=[lambda event: told.append(event.loss) if isinstance(event, StepDone) else None],
        **options,
    )
    result = trainer.fit()
    losses = plainly(plain, loss)
    assert told == pytest.approx(losses, rel=1e-6) and close(model, plain)
    weights = [float(CLASSES[RARE[i]]) if RARE[i] >= 0 else 0.0 for i in range(COUNT)]
    order = sample_order(COUNT, epoch=1)
    shares = [sum(weights[i] for i in order[start : start + BATCH]) for start in range(0, COUNT, BATCH)]
    mean = sum(loss * share for loss, share in zip(losses[3:], shares, strict=True)) / sum(shares)
    assert result.loss == pytest.approx(mean, rel=1e-6)
    with torch.no_grad():
        assert result.metrics["loss"] == pytest.approx(value_of(loss(plain, DATA[:])).item(), rel=1e-6)


def test_with_a_codec_the_weights_are_those_of_one_process() -> None:
    model, plain = net(), net()
    options = {"batch_size": BATCH, "epochs": 2, "workers": 2, "strict": True, "codec": "fp16"}
    shoal.Trainer(model, LOSSES["class weights"], sgd, DATA, **options).fit()
    plainly(plain, LOSSES["class weights"])
    assert close(model, plain, 1e-3)


def test_a_hugging_face_model_with_padded_labels() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = torch.randint(0, 40, (COUNT, 9), generator=_generator)
    lengths = torch.randint(2, 10, (COUNT, 1), generator=_generator)
    marked = torch.where(torch.arange(9) < lengths, tokens, -100)
    data = TensorDataset(tokens, marked)
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=40, n_positions=9, attn_pdrop=0.0, embd_pdrop=0.0)
    config.resid_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    plain = copy.deepcopy(model)

    def loss(model: Any, batch: Any) -> Any:
        return model(input_ids=batch[0], labels=batch[1]).loss

    shoal.Trainer(model, loss, sgd, data, batch_size=BATCH, epochs=1, workers=2, strict=True).fit()
    plainly(plain, loss, data, epochs=1)
    assert close(model, plain, 1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_models_are_trained_and_what_they_compute_inside_is_not_counted() -> None:
    class Whole(nn.Module):
        """The loss is part of what is compiled."""

        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(self.net(x)[:, :3], targets)

    def fit(model: Any, loss: Loss) -> tuple[Any, list[str]]:
        texts: list[str] = []
        watch = [lambda event: texts.append(event.text) if isinstance(event, Notice) else None]
        shoal.Trainer(model, loss, sgd, DATA, batch_size=BATCH, epochs=2, workers=2, callbacks=watch).fit()
        return model, texts

    model, plain = net(), net()
    model.compile(backend="aot_eager")
    trained, texts = fit(model, LOSSES["ignored"])
    plainly(plain, LOSSES["ignored"])
    assert close(trained, plain, 1e-5) and not texts
    inside = Whole()
    inside.compile(backend="aot_eager")
    _, texts = fit(inside, lambda m, b: m(b[0], b[2]))
    assert len(texts) == 1 and "is a weighted mean" in texts[0]
    whole, plain_whole = Whole(), Whole()
    whole.compile(backend="aot_eager")
    _, texts = fit(whole, lambda m, b: m(b[0], b[1]))  # all targets count: a mean over samples
    plainly(plain_whole, lambda m, b: m(b[0], b[1]))
    assert close(whole, plain_whole, 1e-5) and not texts
