"""Evaluation, prediction and cross-validation: every sample once, on any number of workers, in order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, precision_score, recall_score, roc_auc_score
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal import DataError, Trainer, cross_validate


def data(size: int = 203, features: int = 6) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(size, features, generator=generator)
    noise = torch.randn(size, generator=generator)
    return TensorDataset(inputs, ((inputs[:, 0] + noise) > 0).long())


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def predict(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return model(batch[0]), batch[1]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.3)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 2))


NAMES = ["accuracy", "precision", "recall", "f1", "f1_micro", "auc", "perplexity"]


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    model = net()
    Trainer(model, loss, sgd, data(), batch_size=32, epochs=2, workers=2).fit()
    return model


def trainer(model: nn.Module, workers: int, **options: Any) -> Trainer:
    return Trainer(model, loss, sgd, data(), batch_size=32, workers=workers, predict=predict, metrics=NAMES, **options)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_metrics_are_those_of_scikit_learn(trained: nn.Module, workers: int) -> None:
    inputs, target = data().tensors
    modes = [module.training for module in trained.modules()]
    figures = trainer(trained, workers).evaluate(data())
    assert [module.training for module in trained.modules()] == modes
    with torch.no_grad():
        scores = trained.eval()(inputs)
    for module, mode in zip(trained.modules(), modes, strict=True):
        module.training = mode
    labels = scores.argmax(1)
    expected = {
        "accuracy": accuracy_score(target, labels),
        "precision": precision_score(target, labels, average="macro"),
        "recall": recall_score(target, labels, average="macro"),
        "f1": f1_score(target, labels, average="macro"),
        "f1_micro": f1_score(target, labels, average="micro"),
        "auc": roc_auc_score(target, scores[:, 1] - scores[:, 0]),
        "loss": float(F.cross_entropy(scores, target)),
        "perplexity": math.exp(float(F.cross_entropy(scores, target))),
    }
    assert figures.keys() == expected.keys()
    for name, value in expected.items():
        assert figures[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize("workers", [1, 3])
def test_predictions_come_in_order(trained: nn.Module, workers: int) -> None:
    inputs = data().tensors[0]
    outputs = trainer(trained, workers).predict(data())
    modes = [module.training for module in trained.modules()]
    with torch.no_grad():
        expected = trained.eval()(inputs)
    for module, mode in zip(trained.modules(), modes, strict=True):
        module.training = mode
    assert torch.allclose(outputs, expected, atol=1e-6)


def test_predictions_of_any_form_are_joined() -> None:
    def forms(model: nn.Module, batch: Any) -> Any:
        inputs = batch[0]
        numbers = inputs[:, 0].numpy()
        return {"array": numbers, "words": [f"{value:.2f}" for value in numbers], "pair": (inputs, inputs * 2)}, None

    outputs = Trainer(net(), loss, sgd, data(10), batch_size=4, workers=3, predict=forms).predict(data(10))
    inputs = data(10).tensors[0]
    assert np.array_equal(outputs["array"], inputs[:, 0].numpy())
    assert outputs["words"] == [f"{value:.2f}" for value in inputs[:, 0].tolist()]
    assert torch.equal(outputs["pair"][1], inputs * 2)


def test_more_workers_than_samples() -> None:
    figures = trainer(net(), 4).evaluate(data(2))
    assert figures["loss"] > 0 and trainer(net(), 4).predict(data(2)).shape == (2, 2)


def test_a_scalar_prediction_is_refused() -> None:
    bad = Trainer(net(), loss, sgd, data(), batch_size=8, workers=1, predict=lambda m, b: (m(b[0]).sum(), b[1]))
    with pytest.raises(DataError, match="one prediction per sample"):
        bad.predict(data(9))


def test_the_last_evaluation_is_the_result_and_uses_the_average() -> None:
    events: list[Any] = []
    model = net()
    run = Trainer(
        model,
        loss,
        sgd,
        data(),
        eval_data=data(57),
        predict=predict,
        metrics=["accuracy"],
        batch_size=32,
        epochs=3,
        eval_every=4,
        ema=0.9,
        workers=2,
        callbacks=[events.append],
    )
    result = run.fit()
    evaluated = [event.step for event in events if type(event).__name__ == "EvalDone"]
    assert evaluated == [4, 8, 12, 16, 20, 21]
    assert run.evaluate(data(57)) == result.metrics
    assert run.average is not None
    raw = {name: param.clone() for name, param in model.named_parameters()}
    assert any(not torch.equal(raw[name], value) for name, value in run.average.items())
    plain = Trainer(model, loss, sgd, data(), batch_size=32, workers=2, predict=predict, metrics=["accuracy"])
    assert plain.evaluate(data(57)) != result.metrics


def test_ema_is_the_textbook_average() -> None:
    model = nn.Linear(6, 2)
    reference = nn.Linear(6, 2)
    reference.load_state_dict(model.state_dict())
    average = [param.detach().clone() for param in reference.parameters()]
    optimizer = sgd(reference.parameters())
    whole = data(20).tensors
    for _ in range(5):
        optimizer.zero_grad()
        loss(reference, whole).backward()
        optimizer.step()
        for mean, param in zip(average, reference.parameters(), strict=True):
            mean.mul_(0.8).add_(param.detach(), alpha=0.2)
    run = Trainer(model, loss, sgd, data(20), batch_size=20, steps=5, workers=2, ema=0.8)
    run.fit()
    assert run.average is not None
    for value, mean in zip(run.average.values(), average, strict=True):
        assert torch.allclose(value, mean, atol=1e-6)


class Count:
    """A user's own metric, with a state of changing size."""

    name = "count"

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.rows: list[Tensor] = []

    def update(self, prediction: Tensor, target: Tensor) -> None:
        self.rows.append(target.double())

    def state(self) -> Any:
        return {"rows": torch.cat(self.rows) if self.rows else torch.empty(0, dtype=torch.float64)}

    def merge(self, state: Any) -> None:
        self.rows.append(state["rows"])

    def compute(self) -> dict[str, float]:
        rows = torch.cat(self.rows)
        return {"seen": float(len(rows)), "ones": float(rows.sum())}


@pytest.mark.parametrize("workers", [1, 4])
def test_own_metrics_are_merged(workers: int) -> None:
    run = Trainer(net(), loss, sgd, data(), batch_size=8, workers=workers, predict=predict, metrics=[Count()])
    figures = run.evaluate(data(37))
    assert figures["count_seen"] == 37 and figures["count_ones"] == float(data(37).tensors[1].sum())


def test_cross_validation_uses_every_sample_once_and_restores_the_weights() -> None:
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = Trainer(
        model, loss, sgd, data(50), batch_size=10, epochs=2, workers=2, predict=predict, metrics=[Count(), "accuracy"]
    )
    scores = cross_validate(run, folds=4)
    assert [fold["count_seen"] for fold in scores.folds] == [13, 13, 12, 12]
    assert sum(fold["count_ones"] for fold in scores.folds) == float(data(50).tensors[1].sum())
    assert [result.samples for result in scores.results] == [74, 74, 76, 76]
    assert scores.mean["accuracy"] == pytest.approx(np.mean([fold["accuracy"] for fold in scores.folds]))
    assert scores.std["accuracy"] == pytest.approx(np.std([fold["accuracy"] for fold in scores.folds]))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("folds", [1, 0, 51, 2.0, True])
def test_cross_validation_refuses_bad_numbers_of_folds(folds: Any) -> None:
    with pytest.raises(ValueError, match="folds="):
        cross_validate(Trainer(net(), loss, sgd, data(50), workers=1), folds=folds)
