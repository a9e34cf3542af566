"""Handwritten digits: a small CNN tells ten digits apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.cli.demos.task import Source, Task

if TYPE_CHECKING:
    from torch import Tensor, nn, optim
    from torch.utils.data import TensorDataset

    from shoal.trainer.result import Result
    from shoal.trainer.trainer import Trainer

BATCH_SIZE = 64
TEST_SHARE = 0.2
SOURCE = Source(
    what="images",
    package="scikit-learn",
    module="sklearn",
    install="pip install 'shoal[demo]'",
    note="or: pip install scikit-learn",
)


def prepare() -> Task:
    """Load scikit-learn's digits. Raises ConfigError if scikit-learn is missing."""
    train, test = load_digits()

    def after(trainer: Trainer, result: Result) -> str:
        right = result.metrics["accuracy"]
        return f"It names {right:.1%} of {len(test)} digits right that it had never seen."

    return Task(
        title="Handwritten digits",
        about=f"{len(train):,} images to train on, {len(test):,} to test with.",
        model="A CNN",
        arguments={
            "model": build_net,
            "loss": loss,
            "optimizer": optimizer,
            "data": train,
            "eval_data": test,
            "predict": predict,
            "metrics": ["accuracy"],
            "batch_size": BATCH_SIZE,
        },
        epochs=10,
        example="digits.py",
        after=after,
    )


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """The training and the test set: pairs of an image (1×8×8, from 0 to 1) and its label. Always the same split."""
    import torch
    from torch.utils.data import TensorDataset

    try:
        from sklearn import datasets
    except ImportError as error:
        raise SOURCE.missing() from error
    bunch = datasets.load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    tested = round(TEST_SHARE * len(labels))
    test, train = order[:tested], order[tested:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def build_net() -> nn.Module:
    """A CNN for 8×8 images."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    from torch.nn import functional

    images, labels = batch
    return functional.cross_entropy(model(images), labels)


def predict(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    images, labels = batch
    return model(images), labels


def optimizer(params: Any) -> optim.Optimizer:
    from torch.optim import AdamW

    return AdamW(params, lr=3e-3)
