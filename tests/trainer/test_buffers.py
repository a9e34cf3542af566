"""Buffers and weights of losses, over workers: what one process would have, or a word that says why not."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal
from shoal import ConfigError, Session, Trainer
from shoal.core.events import AnyEvent, Notice, StepDone

ROWS, BATCH, STEPS = 64, 28, 6
WORDS = {"queue": "concat", "pointer": f"sum:modulo={ROWS}", "used": "sum:decay=0.9"}


class Net(nn.Module):
    """Every kind of buffer, none of which has a say in the output."""

    seen: Tensor
    calls: Tensor
    count: Tensor
    mean: Tensor
    queue: Tensor
    pointer: Tensor
    used: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1).double()
        self.register_buffer("seen", torch.tensor(2**40))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("count", torch.tensor(2.0**30, dtype=torch.float64))
        self.register_buffer("mean", torch.full((4,), 1 / 3, dtype=torch.float64))
        self.register_buffer("queue", torch.randn(ROWS, 4))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("used", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        self.calls += 1
        self.count += 1
        self.mean.lerp_(x.mean(0), 0.01)
        self.queue[(torch.arange(len(x)) + int(self.pointer)) % ROWS] = x.float()
        self.pointer[0] = (int(self.pointer) + len(x)) % ROWS
        self.used.mul_(0.9).add_(torch.bincount(x.argmax(1) % 3, minlength=3), alpha=0.1)
        output: Tensor = self.net(x)
        return output


def data() -> TensorDataset:
    return TensorDataset(torch.randn(150, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))


def weighted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    weight = batch[0][:, 0].abs() + 0.1
    return ((model(batch[0])[:, 0] - batch[0].sum(1)) ** 2 * weight).sum(), weight.sum()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def fit(buffers: dict[str, str] | None = None, **options: Any) -> tuple[Net, list[AnyEvent]]:
    events: list[AnyEvent] = []
    net = Net()
    given = {"batch_size": BATCH, "steps": STEPS, "buffers": buffers, **options}
    Trainer(net, weighted, sgd, data(), callbacks=[events.append], **given).fit()
    return net, events


@cache
def alone() -> tuple[dict[str, Tensor], list[float]]:
    net, events = fit(workers=1)
    assert not notices(events)
    return net.state_dict(), [event.loss for event in events if isinstance(event, StepDone)]


def notices(events: list[AnyEvent]) -> list[str]:
    return [event.text for event in events if isinstance(event, Notice)]


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 2},
        {"workers": 3, "micro_batch": 5},
        {"workers": 2, "deterministic": True},
        {"workers": 2, "min_workers": 1, "max_workers": 2},
        {"workers": 2, "sync": "server"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_buffers_are_those_of_one_process(options: dict[str, Any]) -> None:
    net, events = fit(WORDS, **options)
    for name, value in alone()[0].items():
        tolerance = {"rtol": 1e-14, "atol": 1e-15} if value.dtype == torch.float64 else {}
        torch.testing.assert_close(
            net.state_dict()[name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )
    losses = [event.loss for event in events if isinstance(event, StepDone)]
    assert losses == pytest.approx(alone()[1], rel=1e-14)
    assert not [text for text in notices(events) if "buffers=" in text]


def test_one_worker_with_servers_has_them_bit_for_bit() -> None:
    net, _ = fit(WORDS, workers=1, sync="server")
    for name, value in net.named_buffers():
        assert torch.equal(value, alone()[0][name]), name


def test_weights_travel_in_double_precision_beside_a_codec() -> None:
    net, events = fit(WORDS, workers=2, codec="int8", steps=2)
    first = next(event for event in events if isinstance(event, StepDone))
    assert first.loss == pytest.approx(alone()[1][0], rel=1e-15)
    assert net.seen.item() == 2**40 + 2 * BATCH and net.calls.item() == 2


@pytest.mark.parametrize("sync", ["allreduce", "server"])
def test_what_cannot_be_a_mean_is_named_once(sync: str) -> None:
    net, events = fit(workers=2, sync=sync)
    told = [text for text in notices(events) if "buffers=" in text]
    assert len(told) == 3
    for name, word in WORDS.items():
        assert len([text for text in told if f'buffers={{"{name}": "{word}"}}' in text]) == 1
    assert net.seen.item() == 2**40 + 150  # five full steps and a short one


def test_names_and_words_are_checked_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="no buffer is called 'queues'; did you mean 'queue'"):
        fit({"queues": "concat"})
    with pytest.raises(ConfigError, match="'queue' is to be 'concat'; with sync='server:mode=ssp'"):
        fit({"queue": "concat"}, sync="server:mode=ssp")


def test_own_loops_say_it_where_they_begin() -> None:
    def train(session: Session) -> dict[str, Any]:
        net = Net()
        optimizer = sgd(net.parameters())
        session.track(net=net, optimizer=optimizer)
        for step in session.steps(data(), BATCH, steps=STEPS, buffers={**WORDS, "net.seen": "sum"}):
            for batch in step:
                step.backward(weighted(net, batch))
            step.apply(optimizer)
        return dict(net.state_dict())

    for found in shoal.launch(train, workers=2):
        for name, value in alone()[0].items():
            torch.testing.assert_close(found[name], value)
