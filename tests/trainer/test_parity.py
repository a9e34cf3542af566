"""Any number of workers gives the weights of plain single-process PyTorch over the same samples."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from shoal import ExchangeSettled, StepDone, Trainer
from shoal.comm.buckets import Buckets
from shoal.core.traffic import KINDS
from shoal.syncs import allreduce
from shoal.testing.lab import Lab, why_no_lab
from shoal.testing.reference import reference_fit, relative_difference

TOLERANCE = 1e-5
STEPS = 20
WORKERS = [1, 2, 3, 4]


@dataclass
class Case:
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Any]
    data: Callable[[], Any]
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.AdamW(params, lr=1e-2)
    batch_size: int = 48
    by_atom: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    reference: dict[str, Any] = field(default_factory=dict)


def classes(size: int = 500, features: int = 12) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(size, features, generator=generator)
    return TensorDataset(inputs, (inputs[:, :3].sum(1) > 0).long())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))


def entropy(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(6)
    return TensorDataset(
        torch.randn(300, 1, 8, 8, generator=generator), torch.randint(0, 4, (300,), generator=generator)
    )


def cnn_with_frozen_norm() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)
    )
    norm = net[1]
    norm.running_mean.normal_(generator=torch.Generator().manual_seed(1))
    norm.eval()
    return net


class TinyGPT(nn.Module):
    """Two blocks with dropout; the token embedding is the output layer too."""

    def __init__(self, words: int = 17, width: int = 24, length: int = 10) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)
        block = [
            nn.TransformerEncoderLayer(width, 2, 48, dropout=0.1, batch_first=True, norm_first=True) for _ in range(2)
        ]
        self.blocks = nn.ModuleList(block)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("mask", torch.full((length, length), float("-inf")).triu(1))

    def forward(self, tokens: Tensor) -> Tensor:
        state = self.words(tokens) + self.places.weight
        for block in self.blocks:
            state = block(state, src_mask=self.mask)
        return self.head(self.norm(state))


def sentences(padding: bool = False) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(1, 17, (160, 11), generator=generator)
    if padding:
        lengths = torch.randint(1, 12, (160, 1), generator=generator)
        tokens = torch.where(torch.arange(11) < lengths, tokens, 0)
    return TensorDataset(tokens)


def next_token(model: nn.Module, batch: Any) -> Tensor:
    (tokens,) = batch
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def summed_tokens(model: nn.Module, batch: Any) -> Any:
    (tokens,) = batch
    target = tokens[:, 1:].flatten()
    total = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), target, ignore_index=0, reduction="sum")
    return {"loss": (total, (target != 0).sum()), "tokens": (target != 0).sum()}


class Routed(nn.Module):
    """`rare` is used by samples that are marked, `never` by none: some steps have no gradient for `rare` anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(12, 2)
        self.rare = nn.Linear(12, 2)
        self.never = nn.Linear(12, 2)

    def forward(self, inputs: Tensor, marked: Tensor) -> Tensor:
        out = self.common(inputs)
        if marked.any():
            out = out + torch.zeros_like(out).index_add(0, marked.nonzero()[:, 0], self.rare(inputs[marked]))
        return out


def routed_data() -> TensorDataset:
    inputs, labels = classes(300).tensors
    marked = torch.zeros(300, dtype=torch.bool)
    marked[::40] = True
    return TensorDataset(inputs, marked, labels)


def routed_loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, marked, labels = batch
    return F.cross_entropy(model(inputs, marked), labels)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def one_cycle(optimizer: torch.optim.Optimizer, total: int) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=total)


CASES = {
    "mlp": Case(mlp, entropy, classes),
    "mlp, sgd, schedule": Case(
        mlp, entropy, classes, sgd, options={"schedule": one_cycle}, reference={"schedule": one_cycle}
    ),
    "cnn with batch norm in eval": Case(cnn_with_frozen_norm, entropy, images, sgd, batch_size=36),
    # Not Adam: the gradient of attention's key bias is zero but for rounding, and Adam makes whole steps of rounding.
    "gpt with tied weights and dropout": Case(TinyGPT, next_token, sentences, sgd, batch_size=24, by_atom=True),
    "weighted by tokens": Case(
        lambda: TinyGPT().eval(), summed_tokens, lambda: sentences(padding=True), sgd, batch_size=24
    ),
    "parameters used by one worker or none": Case(Routed, routed_loss, routed_data, batch_size=10),
    "batch not divisible": Case(mlp, entropy, classes, batch_size=37),
    "last batch short": Case(mlp, entropy, lambda: classes(101), batch_size=25),
    "data smaller than the batch": Case(mlp, entropy, lambda: classes(13), batch_size=64),
    "fewer samples than workers": Case(mlp, entropy, lambda: classes(3), batch_size=2),
    "micro batch": Case(mlp, entropy, classes, options={"micro_batch": 3}),
    "micro batch and dropout": Case(
        TinyGPT, next_token, sentences, sgd, batch_size=64, by_atom=True, options={"micro_batch": 64}
    ),
    "clip": Case(mlp, entropy, classes, sgd, options={"clip": 0.05}, reference={"clip": 0.05}),
    "double precision": Case(
        lambda: mlp().double(), lambda m, b: F.cross_entropy(m(b[0].double()), b[1]), classes, sgd
    ),
}


def build(case: Case) -> nn.Module:
    torch.manual_seed(3)
    return case.model()


_references: dict[str, nn.Module] = {}


def reference(name: str) -> nn.Module:
    if name not in _references:
        case = CASES[name]
        net = build(case)
        reference_fit(
            net,
            case.loss,
            case.optimizer,
            case.data(),
            batch_size=case.batch_size,
            steps=STEPS,
            by_atom=case.by_atom,
            **case.reference,
        )
        _references[name] = net
    return _references[name]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", CASES)
def test_weights_equal_those_of_one_process(name: str, workers: int) -> None:
    case = CASES[name]
    net = build(case)
    before = copy.deepcopy(net)
    result = Trainer(
        model=net,
        loss=case.loss,
        optimizer=case.optimizer,
        data=case.data(),
        batch_size=case.batch_size,
        steps=STEPS,
        workers=workers,
        **case.options,
    ).fit()
    assert result.steps == STEPS and result.workers == workers
    assert relative_difference(net, before) > 1e-3, "nothing was trained"
    assert relative_difference(net, reference(name)) < TOLERANCE


@pytest.mark.parametrize("name", ["mlp", "gpt with tied weights and dropout", "parameters used by one worker or none"])
def test_gradients_that_leave_during_backward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models have one bucket; with many, most leave while backward still runs."""
    monkeypatch.setattr(allreduce, "Buckets", partial(Buckets, cap=2000))
    case = CASES[name]
    net = build(case)
    Trainer(
        net, case.loss, case.optimizer, case.data(), batch_size=case.batch_size, steps=STEPS, workers=3, **case.options
    ).fit()
    assert relative_difference(net, reference(name)) < TOLERANCE


@pytest.mark.parametrize("name", ["mlp", "double precision", "last batch short"])
def test_weights_do_not_depend_on_how_workers_sum(name: str) -> None:
    """Other tests use shared memory, as runs on one host do."""
    case = CASES[name]
    net = build(case)
    events: list[Any] = []
    Trainer(
        net,
        case.loss,
        case.optimizer,
        case.data(),
        batch_size=case.batch_size,
        steps=STEPS,
        workers=3,
        collective="gloo",
        callbacks=[events.append],
        **case.options,
    ).fit()
    assert [event.collective for event in events if isinstance(event, ExchangeSettled)] == ["gloo"]
    assert relative_difference(net, reference(name)) < TOLERANCE


@pytest.mark.skipif(why_no_lab() is not None, reason=f"no lab: {why_no_lab()}")
@pytest.mark.parametrize("name", ["mlp", "gpt with tied weights and dropout", "parameters used by one worker or none"])
def test_eight_workers_on_two_hosts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allreduce, "Buckets", partial(Buckets, cap=2000))
    case = CASES[name]
    net = build(case)
    events: list[Any] = []
    with Lab(hosts=2) as lab:
        Trainer(
            net,
            case.loss,
            case.optimizer,
            case.data(),
            batch_size=case.batch_size,
            steps=STEPS,
            workers=8,
            engine=f"local:lab={lab.name}",
            callbacks=[events.append],
            **case.options,
        ).fit()
    settled = [event for event in events if isinstance(event, ExchangeSettled)]
    assert [(event.collective, event.hosts) for event in settled] == [("hierarchical", [0] * 4 + [1] * 4)]
    assert relative_difference(net, reference(name)) < TOLERANCE


def test_what_workers_print_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    def talkative(model: nn.Module, batch: Any) -> Tensor:
        print("in the loss")
        return entropy(model, batch)

    Trainer(mlp(), talkative, sgd, classes(), batch_size=48, steps=2, workers=2).fit()
    assert capfd.readouterr().out.count("in the loss") == 4


@pytest.mark.parametrize("case", ["gpt with tied weights and dropout", "last batch short", "mlp"])
def test_deterministic_runs_are_bitwise_equal(case: str) -> None:
    spec = CASES[case]
    nets = []
    for workers in WORKERS:
        net = build(spec)
        Trainer(
            net,
            spec.loss,
            spec.optimizer,
            spec.data(),
            batch_size=spec.batch_size,
            steps=8,
            workers=workers,
            deterministic=True,
            clip=1.0,
        ).fit()
        nets.append(net)
    for net in nets[1:]:
        for (name, ours), theirs in zip(net.state_dict().items(), nets[0].state_dict().values(), strict=True):
            assert torch.equal(ours, theirs), name
    assert relative_difference(nets[0], build(spec)) > 1e-4


def norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))


def test_deterministic_batch_norm_is_bitwise_equal_with_its_statistics() -> None:
    states = []
    for workers in WORKERS:
        torch.manual_seed(3)
        net = norm_net()
        Trainer(net, entropy, sgd, classes(), batch_size=48, steps=6, workers=workers, deterministic=True).fit()
        states.append(net.state_dict())
    for state in states[1:]:
        for name, value in state.items():
            assert torch.equal(value, states[0][name]), name
    assert int(states[0]["1.num_batches_tracked"]) == 6


def test_batch_norm_statistics_are_the_mean_over_what_was_computed_together() -> None:
    torch.manual_seed(3)
    net = nn.Sequential(nn.BatchNorm1d(12), nn.Linear(12, 2))
    data = classes(48)
    Trainer(net, entropy, sgd, data, batch_size=48, steps=1, workers=2).fit()
    inputs = data.tensors[0]
    # the mean of the workers' means is the mean; running = 0.9 · 0 + 0.1 · mean
    assert torch.allclose(net[0].running_mean, 0.1 * inputs.mean(0), atol=1e-6)
    assert int(net[0].num_batches_tracked) == 1


def test_batch_norm_beside_dropout_sees_all_that_a_worker_computes() -> None:
    """Not atoms of one or two samples, which BatchNorm refuses, or learns badly from."""
    torch.manual_seed(3)
    net = norm_net()
    result = Trainer(net, entropy, sgd, classes(110), batch_size=50, epochs=2, workers=2).fit()
    assert result.steps == 6 and int(net[1].num_batches_tracked) == 6


class Noisy(Dataset[Any]):
    """Augments with all three generators that people use."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Tensor:
        import random

        import numpy

        noise = torch.rand(4) + random.random() + float(numpy.random.rand())
        return torch.full((4,), float(index)) + noise


def test_augmentation_does_not_depend_on_workers_or_loaders() -> None:
    nets = []
    for workers, loaders in ((1, 0), (3, 0), (2, 2)):
        torch.manual_seed(0)
        net = nn.Linear(4, 1)
        Trainer(
            net,
            lambda model, batch: (model(batch) - batch.sum(1, keepdim=True)).abs().mean(),
            lambda params: torch.optim.SGD(params, lr=1e-4),
            Noisy(),
            batch_size=20,
            epochs=2,
            workers=workers,
            data_workers=loaders,
        ).fit()
        nets.append(net)
    assert max(relative_difference(net, nets[0]) for net in nets) < TOLERANCE


def test_a_model_that_starts_to_draw_random_numbers_later_stays_exact() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, inputs: Tensor) -> Tensor:
            self.calls += 1
            out: Tensor = self.inner(inputs)
            return F.dropout(out, 0.5) if int(self.calls) > 3 else out

    nets = []
    for workers in (1, 2, 3):
        torch.manual_seed(3)
        net = Late()
        Trainer(net, entropy, sgd, classes(), batch_size=48, steps=8, workers=workers).fit()
        nets.append(net)
    assert max(relative_difference(net, nets[0]) for net in nets) < TOLERANCE
    assert int(nets[0].calls) == 8


def test_plateau_steps_on_the_loss_of_each_step_without_eval_data() -> None:
    def plateau(optimizer: torch.optim.Optimizer, total: int) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)

    rates: list[float] = []

    def watch(event: Any) -> None:
        if type(event).__name__ == "StepDone":
            rates.append(event.rates[0])

    net = mlp()
    Trainer(net, entropy, sgd, classes(), batch_size=48, steps=6, workers=2, schedule=plateau, callbacks=[watch]).fit()
    assert len(rates) == 6 and rates[-1] < rates[0]


def test_sample_counts_logs_and_seconds_of_the_result() -> None:
    events: list[Any] = []
    net = build(CASES["weighted by tokens"])
    result = Trainer(
        net, summed_tokens, sgd, sentences(padding=True), batch_size=50, epochs=2, workers=2, callbacks=[events.append]
    ).fit()
    assert (result.steps, result.epochs, result.samples) == (8, 2, 320)
    assert set(result.seconds) == {"compute", "exchange", "data", "eval", "checkpoint", "idle"}
    assert result.bytes_sent > 0 and result.wall_seconds >= max(result.seconds.values())
    steps = [event for event in events if type(event).__name__ == "StepDone"]
    assert [event.step for event in steps] == list(range(1, 9))
    assert all(event.logs["tokens"] > 0 for event in steps)


def test_gradients_of_deterministic_runs_are_counted_as_gradients() -> None:
    events: list[Any] = []
    Trainer(
        mlp(), entropy, sgd, classes(), batch_size=48, steps=3, workers=2, deterministic=True, callbacks=[events.append]
    ).fit()
    steps = [event.traffic for event in events if isinstance(event, StepDone)]
    sent = {kind: sum(flow.bytes for step in steps for flow in step.flows if flow.kind == kind) for kind in KINDS}
    size = 4 * sum(param.numel() for param in mlp().parameters())
    assert sent["gradient"] >= len(steps) * size and sent["control"] < size, sent
