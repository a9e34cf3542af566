"""Slices by measured speed: slow workers compute less, the result is that of one process; doubt keeps them equal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal
from shoal.cluster.channel.channel import DirectChannel
from shoal.comm.group import SoloGroup
from shoal.testing.reference import reference_fit, relative_difference
from shoal.trainer.session import Session

STEPS = 40
BATCH = 48
_generator = torch.Generator().manual_seed(0)
X = torch.randn(480, 8, generator=_generator)
DATA = TensorDataset(X, X.sum(1, keepdim=True))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1))


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2)


def mean(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def root(model: nn.Module, batch: Any) -> Tensor:
    """Samples see each other."""
    return mean(model, batch).sqrt()


def train(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], workers: int = 2, **options: Any
) -> list[list[int]]:
    """With the last worker three times as slow as the others; how many samples each has computed in each step."""

    def body(session: shoal.Session) -> tuple[list[int], list[Tensor]]:
        optimizer = adam(model.named_parameters())
        session.track(model=model, optimizer=optimizer)
        counts = []
        for step in session.steps(DATA, BATCH, steps=STEPS):
            count = 0
            for batch in step:
                step.backward(loss(model, batch))
                count += len(batch[0])
                time.sleep(len(batch[0]) * (6e-4 if session.rank == workers - 1 else 2e-4))
            step.apply(optimizer)
            counts.append(count)
        return counts, [param.detach() for param in model.parameters()]

    told = shoal.launch(body, workers=workers, **options)
    with torch.no_grad():
        for param, value in zip(model.parameters(), told[0][1], strict=True):
            param.copy_(value)
    return [counts for counts, _ in told]


@pytest.mark.parametrize("workers", [2, 3])
def test_a_slow_worker_computes_less_and_the_result_is_that_of_one_process(workers: int) -> None:
    model, plain = net(), net()
    counts = train(model, mean, workers)
    assert all(sum(step) == BATCH for step in zip(*counts, strict=True))
    assert [own[0] for own in counts] == [BATCH // workers] * workers
    fast, slow = counts[0][-1], counts[-1][-1]
    assert slow < 0.7 * fast, counts
    reference_fit(plain, mean, adam, DATA, batch_size=BATCH, steps=STEPS)
    assert relative_difference(model, plain) < 1e-5


@pytest.mark.parametrize(
    ("model", "loss", "options"),
    [(net, root, {}), (normalised, mean, {}), (net, mean, {"deterministic": True})],
    ids=["samples that see each other", "batch norm", "deterministic"],
)
def test_where_the_split_is_seen_time_has_no_say(
    model: Callable[[], nn.Module], loss: Callable[[nn.Module, Any], Tensor], options: dict[str, Any]
) -> None:
    counts = train(model(), loss, **options)
    assert counts == [[BATCH // 2] * STEPS] * 2


def test_a_pace_that_was_told_in_a_phase_that_broke_does_not_count() -> None:
    """Those who come after it may be other members, and more or fewer."""
    session = Session(SoloGroup(), DirectChannel(None, None), device=torch.device("cpu"))
    model = net()
    optimizer = adam(model.named_parameters())
    session.track(model=model, optimizer=optimizer)
    for step in session.steps(DATA, BATCH, steps=1):
        step._pace = (1.0, 2.0, 3.0)
        for batch in step:
            step.backward(mean(model, batch))
        assert step._pace == ()
        step.apply(optimizer)
    session.close()


@pytest.mark.slow
def test_more_workers_than_atoms_compute_and_agree() -> None:
    """64 processes on whatever this machine has."""
    model, plain = net(), net()
    seen: dict[int, int] = {}

    def note(event: Any) -> None:
        if isinstance(event, shoal.WorkerSeen):
            seen[event.worker] = event.samples

    shoal.Trainer(model, mean, adam, DATA, batch_size=96, steps=5, workers=64, callbacks=[note]).fit()
    reference_fit(plain, mean, adam, DATA, batch_size=96, steps=5)
    assert relative_difference(model, plain) < 1e-5
    assert len(seen) == 64 and all(count in (5, 10) for count in seen.values()), seen
