"""Things that people do now and then, each of which once went wrong or could."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal
from shoal.core.events import AnyEvent, EvalDone
from shoal.testing.reference import relative_difference


def points(size: int = 60) -> TensorDataset:
    inputs = torch.randn(size, 6, generator=torch.Generator().manual_seed(4))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


DATA = points()


def square(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def fit(model: nn.Module, workers: int = 2, **changed: Any) -> shoal.Result:
    given: dict[str, Any] = {"loss": square, "optimizer": sgd, "data": DATA, "batch_size": 12, "steps": 6}
    return shoal.Trainer(model, workers=workers, **(given | changed)).fit()


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def test_several_optimizers_after_one_backward() -> None:
    def loop(session: shoal.Session) -> Any:
        net = two_layers()
        first, second = sgd(net[0].named_parameters()), sgd(net[2].named_parameters())
        session.track(net=net, first=first, second=second)
        for step in session.steps(DATA, 12, steps=6):
            for batch in step:
                step.backward({"loss": square(net, batch), "seen": len(batch[0])})
            step.apply(first)
            step.apply(second)
        return net.state_dict()

    one = two_layers()
    fit(one, 1)
    for deterministic in (False, True):
        for told in shoal.launch(loop, 2, deterministic=deterministic):
            other = two_layers()
            other.load_state_dict(told)
            assert relative_difference(other, one) < 1e-5


def test_an_optimizer_that_gets_parameters_later() -> None:
    def loop(session: shoal.Session) -> Any:
        net = two_layers()
        optimizer = sgd(net[2].parameters())
        session.track(net=net, optimizer=optimizer)
        for step in session.steps(DATA, 12, steps=6):
            for batch in step:
                step.backward(square(net, batch))
            step.apply(optimizer)
            if step.number == 2:
                optimizer.add_param_group({"params": list(net[0].parameters())})
        return net.state_dict()

    (alone,) = shoal.launch(loop, 1)
    first, second = shoal.launch(loop, 2)
    for name, value in alone.items():
        assert torch.equal(first[name], second[name]), name
        assert torch.allclose(first[name], value, atol=1e-6), name


def test_a_stop_leaves_later_loops_for_the_resumed_run(tmp_path: Path) -> None:
    def loop(session: shoal.Session) -> list[int]:
        net = two_layers()
        optimizer = sgd(net.named_parameters())
        session.track(net=net, optimizer=optimizer)
        done = []
        for number in range(3):
            for step in session.steps(DATA, 12, epochs=1):
                for batch in step:
                    step.backward(square(net, batch))
                step.apply(optimizer)
                done.append(5 * number + step.number)
                if not resumed and len(done) == 3:
                    session.stop()
        return done

    resumed = False
    assert shoal.launch(loop, 2, run_dir=tmp_path)[0] == [0, 1, 2]
    resumed = True
    assert shoal.launch(loop, 2, run_dir=tmp_path, resume="last")[0] == list(range(3, 15))


def test_parameters_that_are_not_the_models_are_refused() -> None:
    stray = nn.Parameter(torch.zeros(1))
    with pytest.raises(shoal.ConfigError, match="1 of them not the model's"):
        fit(two_layers(), optimizer=lambda params: torch.optim.SGD([p for _, p in params] + [stray], lr=0.1))


def test_a_forward_that_changes_parameters_is_found_out() -> None:
    class Starts(nn.Module):
        """Initialises its scale from the first data it sees, as activation norm does."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 1)
            self.scale = nn.Parameter(torch.ones(6))
            self.fresh = True

        def forward(self, inputs: Tensor) -> Tensor:
            if self.fresh:
                self.scale.data.copy_(1 / inputs.std(0))
                self.fresh = False
            out: Tensor = self.inner(inputs * self.scale)
            return out

    with pytest.raises(shoal.ConfigError, match="'scale' differs between workers"):
        fit(Starts())


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.cfloat))
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.out = nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.out(torch.fft.irfft(torch.fft.rfft(inputs) * self.weight * self.turns, n=6))
        return out


def test_complex_parameters_and_buffers() -> None:
    nets = []
    for workers in (1, 3):
        nets.append(Spectral())
        fit(nets[-1], workers)
    for ours, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    assert torch.equal(nets[1].turns, Spectral().turns) and int(nets[1].calls) == 6


def test_buffers_that_appear_or_grow() -> None:
    class Appears(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 1)
            self.register_buffer("mask", None)

        def forward(self, inputs: Tensor) -> Tensor:
            if self.mask is None:
                self.mask = torch.ones(6)
            out: Tensor = self.inner(inputs * self.mask)
            return out

    class Grows(Appears):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("log", torch.zeros(0))

        def forward(self, inputs: Tensor) -> Tensor:
            self.log = torch.cat([self.log, torch.ones(1)])
            return super().forward(inputs)

    net = Appears()
    before = net.inner.weight.clone()
    assert fit(net).steps == 6 and not torch.equal(net.inner.weight, before)
    with pytest.raises(shoal.ConfigError, match="'log' of a Grows changes its shape"):
        fit(Grows())


def test_weights_that_are_not_finite_are_not_checkpointed(tmp_path: Path) -> None:
    class Root(torch.autograd.Function):
        """A finite value with a gradient that is not."""

        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * float("nan")

    def poisoned(model: nn.Module, batch: Any) -> Tensor:
        value = square(model, batch)
        return Root.apply(value) if int(model.steps) > 3 else value  # type: ignore[no-any-return]

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 1)
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def forward(self, inputs: Tensor) -> Tensor:
            self.steps += 1
            out: Tensor = self.inner(inputs)
            return out

    with pytest.raises(shoal.NotFiniteError, match=r"'inner\.weight' is not finite after step 4"):
        fit(Counting(), loss=poisoned, run_dir=tmp_path, checkpoint_every=1)
    assert [path.name for path in sorted((tmp_path / "checkpoints").glob("step-*"))][-1] == "step-000000003"


def test_a_stop_at_an_evaluation_takes_effect_there() -> None:
    def enough(event: AnyEvent) -> shoal.Stop | None:
        return shoal.Stop("enough") if isinstance(event, EvalDone) and event.step == 2 else None

    result = fit(two_layers(), eval_data=DATA, eval_every=2, callbacks=[enough])
    assert (result.steps, result.stopped) == (2, "enough")


def test_a_collate_that_draws_is_the_same_in_the_worker_and_in_a_loader() -> None:
    def mixing(items: list[Any]) -> Any:
        inputs, targets = zip(*items, strict=True)
        return torch.stack(inputs) * random.random(), torch.stack(targets)

    nets = []
    for loaders in (0, 1):
        nets.append(two_layers())
        fit(nets[-1], collate=mixing, data_workers=loaders)
    assert relative_difference(nets[0], nets[1]) == 0.0


def test_predictions_of_many_small_parts() -> None:
    """More than fit into the header of a message, if they were sent as they come."""
    trainer = shoal.Trainer(
        two_layers(),
        square,
        sgd,
        DATA,
        workers=2,
        predict=lambda model, batch: ([f"{row:02000d}" for row in range(len(batch[0]))], None),
        batch_size=2,
    )
    assert len(trainer.predict(torch.zeros(20_000, 1))) == 20_000
