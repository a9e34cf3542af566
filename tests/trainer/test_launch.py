"""Own loops: `shoal.launch` and what a session gives to them."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal
from shoal.comm.group import Group
from shoal.core import settings
from shoal.core.atoms import Course
from shoal.core.errors import ConfigError
from shoal.core.events import AnyEvent, CheckpointSaved, EpochDone, Notice, RunStarted, StepDone
from shoal.layouts.soundness import refuse_different
from shoal.testing.ranks import run_ranks
from shoal.testing.reference import batches_of, drawing
from shoal.trainer.session import Session

State = dict[str, Tensor]

generator = torch.Generator().manual_seed(9)
INPUTS = torch.randn(50, 6, generator=generator)
DATA = TensorDataset(INPUTS, INPUTS.sin().sum(1, keepdim=True))


def mlp() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def mse(net: nn.Module, batch: list[Tensor]) -> Tensor:
    return nn.functional.mse_loss(net(batch[0]), batch[1])


def assert_close(one: State, other: State, tolerance: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=tolerance, atol=tolerance)


def assert_same_bits(one: State, other: State) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(other[name], value), name


def refused(fn: Callable[[Session], Any], **options: Any) -> str:
    """What `launch` says to this loop. It must say it soon, whoever of the workers finds out."""
    begun = time.monotonic()
    with pytest.raises(shoal.ConfigError) as error:
        shoal.launch(fn, **{"workers": 2, **options})
    assert time.monotonic() - begun < 3.0
    return str(error.value)


# -- exactness ---------------------------------------------------------------------------------------------------------


def plain(batch_size: int, steps: int, *, clip: float | None = None, epochs_seed: int = 0) -> tuple[State, list[float]]:
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        ((_, indices),) = batches_of(Course(len(DATA), batch_size), step, seed=epochs_seed, by_atom=False)
        optimizer.zero_grad()
        loss = mse(net, list(DATA[indices]))
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return net.state_dict(), losses


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "batch_size, steps, options, clip",
    [
        (16, 9, {}, None),  # a short last step in each epoch
        (7, 9, {"micro_batch": 2}, 0.5),  # fewer samples than atoms would like, clipped
        (64, 3, {"data_workers": 1}, None),  # data smaller than a batch
        (3, 18, {}, None),  # a worker without samples
    ],
)
def test_a_loop_is_what_one_process_would_do(
    workers: int, batch_size: int, steps: int, options: dict[str, int], clip: float | None
) -> None:
    def loop(session: Session) -> dict[str, Any]:
        net = mlp()
        optimizer = torch.optim.AdamW(net.named_parameters(), lr=0.01)
        session.track(net=net, optimizer=optimizer)
        losses = []
        for step in session.steps(DATA, batch_size, steps=steps, **options):
            for batch in step:
                step.backward(mse(net, batch))
            losses.append(step.apply(optimizer, clip=clip).loss)
        return {"net": net.state_dict(), "losses": losses, "step": session.step}

    values = shoal.launch(loop, workers, seed=3)
    expected, losses = plain(batch_size, steps, clip=clip, epochs_seed=3)
    assert len(values) == workers
    for value in values:
        assert_close(expected, value["net"])
        assert value["losses"] == pytest.approx(losses, rel=1e-5, abs=1e-7)
        assert value["step"] == steps
        assert_same_bits(values[0]["net"], value["net"])


@pytest.mark.parametrize("workers", [1, 3])
def test_several_losses_per_batch_add_up_and_optimizers_need_not_be_tracked(workers: int) -> None:
    def loop(session: Session) -> State:
        net = mlp()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        for step in session.steps(DATA, 16, steps=5):
            for x, y in step:
                out = net(x)
                step.backward(0.25 * nn.functional.mse_loss(out, y), retain_graph=True)
                step.backward(0.75 * nn.functional.mse_loss(out, y))
            step.apply(optimizer)
        return net.state_dict()

    assert_close(plain(16, 5)[0], shoal.launch(loop, workers)[-1])


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_sums_and_weights(workers: int) -> None:
    """Samples count by a weight of their own: the gradient is the weighted mean over the step."""
    weights = DATA.tensors[1].abs() + 0.1

    def loss(net: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        x, y = batch
        weight = y.abs() + 0.1
        return (weight * (net(x) - y).square()).sum(), weight.sum()

    def loop(session: Session) -> dict[str, Any]:
        net = mlp()
        optimizer = torch.optim.SGD(net.named_parameters(), lr=0.1)
        session.track(net=net, optimizer=optimizer)
        updates = []
        for step in session.steps(DATA, 16, epochs=2):
            for batch in step:
                step.backward(loss(net, batch))
            update = step.apply(optimizer)
            updates.append([update.loss, update.weight])
        return {"net": net.state_dict(), "updates": updates}

    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    expected = []
    for step in range(8):
        ((_, indices),) = batches_of(Course(50, 16), step, seed=0, by_atom=False)
        optimizer.zero_grad()
        total, weight = loss(net, list(DATA[indices]))
        (total / weight).backward()
        optimizer.step()
        expected.append([(total / weight).item(), weights[indices].sum().item()])
    for value in shoal.launch(loop, workers):
        assert_close(net.state_dict(), value["net"])
        torch.testing.assert_close(torch.tensor(value["updates"]), torch.tensor(expected))


# -- several phases ----------------------------------------------------------------------------------------------------


def gan(norm: Callable[[int], nn.Module], batch_size: int, steps: int = 6) -> Callable[[Session], dict[str, State]]:
    """Two networks, two optimizers, noise, dropout: each step first trains the critic, then the maker."""

    def loop(session: Session) -> dict[str, State]:
        torch.manual_seed(2)
        maker = nn.Sequential(nn.Linear(3, 16), norm(16), nn.ReLU(), nn.Linear(16, 6))
        critic = nn.Sequential(nn.Linear(6, 16), norm(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1))
        # not Adam: it turns gradients that are zero but for rounding into whole steps
        makes = torch.optim.SGD(maker.named_parameters(), lr=0.05, momentum=0.9)
        judges = torch.optim.SGD(critic.named_parameters(), lr=0.05, momentum=0.9)
        session.track(maker=maker, critic=critic, makes=makes, judges=judges)
        for step in session.steps(DATA, batch_size, steps=steps):
            for real, _ in step:
                made = maker(torch.randn(len(real), 3)).detach()
                scores, others = critic(real), critic(made)
                step.backward(nn.functional.softplus(-scores).mean() + nn.functional.softplus(others).mean())
            step.apply(judges)
            for real, _ in step:
                made = maker(torch.randn(len(real), 3))
                step.backward({"loss": nn.functional.softplus(-critic(made)).mean(), "spread": made.std()})
            step.apply(makes, clip=1.0)
        return {"maker": maker.state_dict(), "critic": critic.state_dict()}

    return loop


def both(value: dict[str, State]) -> State:
    return {f"{net}.{name}": tensor for net, state in value.items() for name, tensor in state.items()}


def test_two_phases_are_what_one_process_would_do() -> None:
    """The plain loop runs whole batches with the same draws, in both phases."""
    course = Course(len(DATA), 20)
    nets: dict[str, nn.Module] = {}

    class Step:
        """Stands in for a step of a session, in one plain process."""

        def __init__(self, number: int) -> None:
            self.number, self.samples = number, course.step(number).samples
            self.phase = -1

        def __iter__(self) -> Iterator[Any]:
            for net in nets.values():
                net.zero_grad()
            self.phase += 1
            for part, indices in batches_of(course, self.number, seed=0, by_atom=False):
                with drawing(range(part.samples), list(nets.values()), step=self.number, phase=self.phase):
                    yield DATA[indices]

        def backward(self, loss: Any) -> None:
            (loss["loss"] if isinstance(loss, dict) else loss).backward()

        def apply(self, optimizer: torch.optim.Optimizer, clip: float | None = None) -> None:
            if clip is not None:
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], clip)
            optimizer.step()

    class Plain:
        def track(self, **things: Any) -> None:
            nets.update({name: thing for name, thing in things.items() if isinstance(thing, nn.Module)})

        def steps(self, data: Any, batch_size: int, steps: int) -> Iterator[Step]:
            return (Step(number) for number in range(steps))

    loop: Any = gan(nn.LayerNorm, 20)
    expected = both(loop(Plain()))
    for workers in (1, 2):
        assert_close(expected, both(shoal.launch(loop, workers)[-1]))


def test_two_phases_are_equal_for_any_number_of_workers() -> None:
    loop = gan(nn.LayerNorm, 20)
    alone = both(shoal.launch(loop, 1)[0])
    for workers in (2, 3):
        for value in shoal.launch(loop, workers):
            assert_close(alone, both(value))


def test_a_deterministic_loop_is_bitwise_equal_with_batch_norm_too() -> None:
    loop = gan(nn.BatchNorm1d, 50)
    alone = both(shoal.launch(loop, 1, deterministic=True)[0])
    assert alone["critic.1.num_batches_tracked"].item() > 0
    for workers in (2, 3, 4):
        for value in shoal.launch(loop, workers, deterministic=True):
            assert_same_bits(alone, both(value))


@pytest.mark.parametrize("norm, batch_size", [(nn.LayerNorm, 20), (nn.LayerNorm, 13), (nn.LayerNorm, 3)])
def test_a_deterministic_loop_is_bitwise_equal_for_odd_batches(norm: Any, batch_size: int) -> None:
    loop = gan(norm, batch_size, steps=8)
    alone = both(shoal.launch(loop, 1, deterministic=True)[0])
    for workers in (2, 3, 4):
        assert_same_bits(alone, both(shoal.launch(loop, workers, deterministic=True)[-1]))


def test_replicas_with_batch_norm_stay_equal() -> None:
    """Its statistics are over what a worker computes together, so only workers of one run are alike."""
    values = [both(value) for value in shoal.launch(gan(nn.BatchNorm1d, 20), 3)]
    assert_same_bits(values[0], values[1])
    assert_same_bits(values[0], values[2])


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_phase_changes_its_own_parameters_only(deterministic: bool) -> None:
    def loop(session: Session) -> list[bool]:
        torch.manual_seed(0)
        one, other = nn.Linear(6, 1), nn.Linear(6, 1)
        first = torch.optim.SGD(one.named_parameters(), lr=0.1)
        second = torch.optim.SGD(other.named_parameters(), lr=0.1)
        session.track(one=one, other=other, first=first, second=second)
        same = []
        for step in session.steps(DATA, 10, steps=3):
            before = other.weight.detach().clone()
            for x, y in step:
                step.backward(nn.functional.mse_loss(one(x) + other(x), y))
            step.apply(first)
            same.append(torch.equal(before, other.weight))
            before = one.weight.detach().clone()
            for x, y in step:
                step.backward(nn.functional.mse_loss(other(x), y))
            # what the first phase left on these parameters must be gone
            alone = torch.autograd.grad(nn.functional.mse_loss(other(INPUTS[:1]), DATA.tensors[1][:1]), other.weight)
            step.apply(second)
            same.append(torch.equal(before, one.weight) and alone[0].shape == other.weight.shape)
        return same

    assert all(all(value) for value in shoal.launch(loop, 2, deterministic=deterministic))


@pytest.mark.parametrize("deterministic", [False, True])
def test_parameters_may_be_frozen_for_a_phase_and_for_good(deterministic: bool) -> None:
    def loop(session: Session) -> dict[str, Any]:
        net = mlp()
        optimizer = torch.optim.SGD(net.named_parameters(), lr=0.1)
        session.track(net=net, optimizer=optimizer)
        frozen = []
        for step in session.steps(DATA, 10, steps=6):
            net[0].requires_grad_(step.number not in (2, 3))
            before = net[0].weight.detach().clone()
            for batch in step:
                step.backward(mse(net, batch))
            step.apply(optimizer)
            frozen.append(torch.equal(before, net[0].weight))
        return {"net": net.state_dict(), "frozen": frozen}

    alone = shoal.launch(loop, 1, deterministic=deterministic)[0]
    assert alone["frozen"] == [False, False, True, True, False, False]
    for value in shoal.launch(loop, 3, deterministic=deterministic):
        assert value["frozen"] == alone["frozen"]
        assert_close(alone["net"], value["net"])


# -- what a loop tells and asks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_logs_are_means_over_the_global_batch(workers: int) -> None:
    events: list[AnyEvent] = []

    def loop(session: Session) -> list[dict[str, float]]:
        net = mlp()
        optimizer = torch.optim.SGD(net.named_parameters(), lr=0.0)
        session.track(net=net, optimizer=optimizer)
        told = []
        for step in session.steps(DATA, 16, epochs=2):
            for x, y in step:
                step.backward({"loss": mse(net, [x, y]), "label": y.mean()})
                step.log(first=x[:, 0].mean(), one=1)
                if step.number >= 2:
                    step.log(late=2.0)
            told.append(step.apply(optimizer).logs)
        return told

    for told in shoal.launch(loop, workers, callbacks=[events.append]):
        for step, logs in enumerate(told):
            ((_, indices),) = batches_of(Course(50, 16), step, seed=0, by_atom=False)
            x, y = DATA[indices]
            expected = {"label": y.mean().item(), "first": x[:, 0].mean().item(), "one": 1.0}
            if step >= 2:
                expected["late"] = 2.0
            assert logs == pytest.approx(expected, rel=1e-5, abs=1e-6)
    done = [event for event in events if isinstance(event, StepDone)]
    assert [event.logs.keys() for event in done] == [logs.keys() for logs in told]
    assert [event.step for event in done] == list(range(1, 9))
    assert [event.epoch for event in done] == [0] * 4 + [1] * 4
    assert [event.samples for event in done] == [16, 16, 16, 2] * 2
    assert [event.epoch for event in events if isinstance(event, EpochDone)] == [0, 1]
    started = next(event for event in events if isinstance(event, RunStarted))
    assert (started.workers, started.total_steps, started.steps_per_epoch) == (workers, 8, 4)


def test_a_name_that_only_one_worker_logs() -> None:
    def loop(session: Session) -> list[dict[str, float]]:
        net = mlp()
        optimizer = torch.optim.SGD(net.named_parameters(), lr=0.0)
        session.track(net=net, optimizer=optimizer)
        told = []
        for step in session.steps(DATA, 16, steps=3):
            for batch in step:
                step.backward(mse(net, batch))
                if session.rank == 1:
                    step.log(rare=5.0)
            told.append(step.apply(optimizer).logs)
        return told

    for told in shoal.launch(loop, 2):
        assert told == [{"rare": 5.0}] * 3


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_gather_and_sum(workers: int) -> None:
    def fn(session: Session) -> dict[str, Any]:
        tree = {"rank": session.rank, "items": ["x"] * session.rank, "tensor": torch.full((2,), session.rank)}
        own = torch.tensor([1.0, session.rank], requires_grad=True)
        return {"told": session.gather(tree), "sum": session.sum(own), "own": own, "view": session.sum(own[1:])}

    for value in shoal.launch(fn, workers):
        assert [part["rank"] for part in value["told"]] == list(range(workers))
        assert [part["items"] for part in value["told"]] == [["x"] * rank for rank in range(workers)]
        assert value["told"][-1]["tensor"].tolist() == [workers - 1] * 2
        assert value["sum"].tolist() == [workers, sum(range(workers))]
        assert value["view"].tolist() == [sum(range(workers))]
    assert value["own"].tolist() == [1.0, workers - 1]


def test_return_values_are_trees_of_plain_things() -> None:
    def fn(session: Session) -> Any:
        return {
            "none": None,
            "text": "grüße",
            "bytes": b"\x00",
            "numbers": [1, 2.5, True, 2**60],
            "tuple": (1, "a"),
            "empty": torch.empty(0, 3),
            "half": torch.ones(2, dtype=torch.bfloat16),
            "array": torch.arange(4).numpy(),
            "rank": session.rank,
        }

    values = shoal.launch(fn, 2)
    assert [value["rank"] for value in values] == [0, 1]
    for value in values:
        assert value["none"] is None and value["text"] == "grüße" and value["bytes"] == b"\x00"
        assert value["numbers"] == [1, 2.5, True, 2**60] and value["tuple"] == (1, "a")
        assert value["empty"].shape == (0, 3) and value["half"].dtype == torch.bfloat16
        assert value["array"].tolist() == [0, 1, 2, 3]


def test_a_value_that_cannot_come_back_is_named() -> None:
    with pytest.raises(shoal.ShoalError, match="object"):
        shoal.launch(lambda session: {"thing": object()}, 2)


def test_a_callback_stops_the_loop_and_the_function_goes_on() -> None:
    def stop_at_3(event: AnyEvent) -> shoal.Stop | None:
        return shoal.Stop() if isinstance(event, StepDone) and event.step >= 3 else None

    def loop(session: Session) -> list[Any]:
        net = mlp()
        optimizer = torch.optim.SGD(net.named_parameters(), lr=0.0)
        session.track(net=net, optimizer=optimizer)
        for step in session.steps(DATA, 5, steps=100_000):
            for batch in step:
                step.backward(mse(net, batch))
            step.apply(optimizer)
        return [session.step, session.stopping]

    (first, why), second = shoal.launch(loop, 2, callbacks=[stop_at_3])
    assert [first, why] == second
    assert 3 <= first < 100_000 and why == "stopped"


# -- checkpoints -------------------------------------------------------------------------------------------------------


class StopAt:
    """A callback that ends a run at a step of its n-th loop; the loop must ask for it, so that it comes in time."""

    def __init__(self, step: int, loop: int = 0) -> None:
        self.step, self.loop, self.loops = step, loop, -1

    def __call__(self, event: AnyEvent) -> shoal.Stop | None:
        if isinstance(event, RunStarted):
            self.loops += 1
        reached = isinstance(event, StepDone) and event.step >= self.step and self.loops == self.loop
        return shoal.Stop() if reached else None


def asked_at(session: Session, step: int) -> None:
    """Wait at a step until whoever watches has had a chance to say stop: a test cannot wait for luck."""
    session.channel.decide(EpochDone(step=step, epoch=0, loss=0.0))


def trained(steps: int) -> Callable[[Session], dict[str, Any]]:
    def loop(session: Session) -> dict[str, Any]:
        torch.manual_seed(4)
        net = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.LayerNorm(16), nn.Linear(16, 1))
        net.register_buffer("seen", torch.tensor(0))
        optimizer = torch.optim.AdamW(net.named_parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        session.track(net=net, optimizer=optimizer, schedule=schedule)
        numbers = []
        for step in session.steps(DATA, 12, steps=steps):
            numbers.append(step.number)
            for batch in step:
                net.seen += 1
                step.backward({"loss": mse(net, batch), "norm": net[0].weight.norm()})
            step.apply(optimizer, clip=1.0)
            schedule.step()
            asked_at(session, step.number)
        rate = optimizer.param_groups[0]["lr"]
        return {"net": net.state_dict(), "numbers": numbers, "rate": rate, "stopping": session.stopping}

    return loop


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_loop_resumes_where_it_stopped_on_any_number_of_workers(tmp_path: Path, deterministic: bool) -> None:
    whole = shoal.launch(trained(14), 2, deterministic=deterministic)[0]
    assert whole["numbers"] == list(range(14))
    folder = tmp_path / "run"
    options: dict[str, Any] = {"run_dir": folder, "deterministic": deterministic, "resume": "last"}
    begins = 0
    for workers, stop in ((2, 3), (3, 8), (1, 14)):
        value = shoal.launch(trained(14), workers, callbacks=[StopAt(stop)], **options)[-1]
        # a step is told of with the next one, and the stop agreed on in the one after that
        assert value["numbers"][0] == begins and stop <= value["numbers"][-1] + 1 <= stop + 2
        begins = value["numbers"][-1] + 1
    assert begins == 14
    assert value["rate"] == whole["rate"]
    compare = assert_same_bits if deterministic else assert_close
    compare(whole["net"], value["net"])


def test_checkpoints_come_when_they_are_due(tmp_path: Path) -> None:
    events: list[AnyEvent] = []
    shoal.launch(trained(7), 2, run_dir=tmp_path / "run", checkpoint_every=3, keep=2, callbacks=[events.append])
    saved = [event.step for event in events if isinstance(event, CheckpointSaved)]
    assert saved == [3, 6, 7]
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert kept == ["step-000000006", "step-000000007"]


def two_loops(session: Session) -> dict[str, Any]:
    net = mlp()
    optimizer = torch.optim.AdamW(net.named_parameters(), lr=0.01)
    session.track(net=net, optimizer=optimizer)
    numbers: list[list[int]] = [[], []]
    for loop, (batch_size, steps) in enumerate([(10, 8), (25, 5)]):
        for step in session.steps(DATA, batch_size, steps=steps):
            numbers[loop].append(step.number)
            for batch in step:
                step.backward(mse(net, batch))
            step.apply(optimizer)
            asked_at(session, step.number)
        if session.stopping:
            break
    return {"net": net.state_dict(), "numbers": numbers}


@pytest.mark.parametrize("loop, stop", [(0, 3), (1, 2)])
def test_two_loops_one_after_the_other_resume_in_either(tmp_path: Path, loop: int, stop: int) -> None:
    whole = shoal.launch(two_loops, 2)[0]
    assert whole["numbers"] == [list(range(8)), list(range(5))]
    first = shoal.launch(two_loops, 2, run_dir=tmp_path / "run", callbacks=[StopAt(stop, loop)])[0]
    second = shoal.launch(two_loops, 3, run_dir=tmp_path / "run", resume="last")[0]
    assert first["numbers"][loop] and second["numbers"][loop][0] > 0
    for at in (0, 1):
        assert first["numbers"][at] + second["numbers"][at] == whole["numbers"][at]
    assert_close(whole["net"], second["net"])


def test_a_complete_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    first = shoal.launch(two_loops, 2, run_dir=tmp_path / "run")[0]
    again = shoal.launch(two_loops, 2, run_dir=tmp_path / "run", resume="last")[0]
    assert again["numbers"] == [[], []]
    assert_same_bits(first["net"], again["net"])


def test_a_run_that_starts_anew_puts_the_old_checkpoints_aside(tmp_path: Path) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    shoal.launch(trained(6), 1, run_dir=folder)
    # from another folder's checkpoint into this one: what was here must not be taken for this run's
    shoal.launch(trained(3), 1, run_dir=other)
    shoal.launch(trained(4), 1, run_dir=folder, resume=other)
    assert [path.name for path in (folder / "checkpoints").glob("step-*")] == ["step-000000004"]
    assert shoal.launch(trained(5), 1, run_dir=folder, resume="last")[0]["numbers"] == [4]
    assert len(list((folder / "earlier").iterdir())) == 1


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shoal.launch(trained(2), 1, run_dir=folder)

    def other_model(session: Session) -> None:
        session.track(net=nn.Linear(3, 1))

    with pytest.raises(shoal.CheckpointMismatch, match="another model"):
        shoal.launch(other_model, 2, run_dir=folder, resume="last")

    def other_names(session: Session) -> None:
        session.track(network=mlp())

    with pytest.raises(shoal.CheckpointMismatch, match="has no 'network'; it has net, optimizer, schedule"):
        shoal.launch(other_names, 2, run_dir=folder, resume="last")
    with pytest.raises(shoal.CheckpointMismatch, match="seed: 0 there, 5 here"):
        shoal.launch(trained(4), 2, run_dir=folder, resume="last", seed=5)
    assert shoal.launch(trained(4), 2, run_dir=folder, resume="last")[0]["numbers"] == [2, 3]


def test_without_a_folder_only_the_run_store_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    shoal.launch(trained(2), 2)
    assert {path.name for path in tmp_path.rglob("*")} == {"home", "shoal.db"}


def interrupted(folder: Path | None, *, track: bool = True) -> tuple[str, str]:
    """What is said of a loop that gets Ctrl-C: in its notices, and at the end."""
    supervisor = os.getpid()
    notices: list[str] = []

    def loop(session: Session) -> None:
        net = mlp()
        optimizer = torch.optim.SGD(net.named_parameters(), lr=0.1)
        if track:
            session.track(net=net, optimizer=optimizer)
        for step in session.steps(DATA, 10, steps=100_000):
            backwards(step, net)
            step.apply(optimizer)
            if step.number == 1:
                os.kill(supervisor, signal.SIGINT)

    note = lambda event: notices.append(event.text) if isinstance(event, Notice) else None  # noqa: E731
    with pytest.raises(shoal.Interrupted) as stopped:
        shoal.launch(loop, 1, run_dir=folder, callbacks=[note])
    return "\n".join(notices), stopped.value.message


def test_without_a_folder_ctrl_c_promises_no_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    at_once, at_the_end = interrupted(None)
    assert "stopping after the step in progress, without a checkpoint (launch has no run_dir=)" in at_once
    assert at_the_end.endswith("there is no checkpoint, for launch was given no run_dir=")
    assert "Resume" not in capsys.readouterr().err


def test_where_nothing_is_tracked_nothing_is_checkpointed_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at_once, at_the_end = interrupted(tmp_path, track=False)
    assert "nothing is tracked, so no checkpoint is written" in at_once
    assert at_the_end.endswith(f"there is no checkpoint in {tmp_path}: nothing was tracked, or no step was done")
    assert "Resume" not in capsys.readouterr().err
    assert not list(tmp_path.glob("checkpoints/step-*"))


def test_with_a_folder_ctrl_c_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with settings.using(settings.Settings(command=("run", "loop.py"))):
        at_once, at_the_end = interrupted(tmp_path)
    assert "with a checkpoint of what is tracked; press it again" in at_once
    how = "shoal run loop.py --resume last"
    (newest,) = re.findall(rf"its newest checkpoint is (\S+); go on with: {how}$", at_the_end)
    assert Path(newest).is_dir()
    assert re.search(rf"^Resume +{how}$", capsys.readouterr().err, re.MULTILINE)

    def untracked(session: Session) -> None:
        next(session.steps(DATA, 10, steps=100_000))

    assert "nothing is tracked that could have its state" in refused(untracked, run_dir=tmp_path, resume="last")


# -- what is refused ---------------------------------------------------------------------------------------------------


def in_a_step(body: Callable[[Any, nn.Module, Any], Any]) -> Callable[[Session], None]:
    """A loop that does `body(step, net, optimizer)` and nothing else."""

    def loop(session: Session) -> None:
        net = mlp()
        optimizer = torch.optim.SGD(net.named_parameters(), lr=0.1)
        session.track(net=net, optimizer=optimizer)
        for step in session.steps(DATA, 10, steps=2):
            body(step, net, optimizer)

    return loop


def backwards(step: Any, net: nn.Module) -> None:
    for batch in step:
        step.backward(mse(net, batch))


def apply_twice(step: Any, net: nn.Module, optimizer: Any) -> None:
    backwards(step, net)
    step.apply(optimizer)
    step.apply(optimizer)


def backward_after_the_loop(step: Any, net: nn.Module, optimizer: Any) -> None:
    for batch in step:
        loss = mse(net, batch)
        step.backward(loss, retain_graph=True)
    step.backward(loss)


def no_backward(step: Any, net: nn.Module, optimizer: Any) -> None:
    for batch in step:
        mse(net, batch)
    step.apply(optimizer)


def break_and_apply(step: Any, net: nn.Module, optimizer: Any) -> None:
    for batch in step:
        step.backward(mse(net, batch))
        break
    step.apply(optimizer)


def two_forms(step: Any, net: nn.Module, optimizer: Any) -> None:
    for batch in step:
        step.backward(mse(net, batch))
        step.backward((mse(net, batch), 3.0))


def backward(loss: Callable[[nn.Module, Any], Any]) -> Callable[[Any, nn.Module, Any], None]:
    def body(step: Any, net: nn.Module, optimizer: Any) -> None:
        for batch in step:
            step.backward(loss(net, batch))
        step.apply(optimizer)

    return body


MISUSES: dict[str, tuple[Callable[[Any, nn.Module, Any], Any], str]] = {
    "backward before the loop": (lambda step, net, _: step.backward(mse(net, list(DATA[:2]))), "belongs inside"),
    "backward after the loop": (backward_after_the_loop, "belongs inside"),
    "apply at once": (lambda step, net, optimizer: step.apply(optimizer), "belongs after"),
    "apply twice": (apply_twice, "applied already"),
    "no backward": (no_backward, "without step.backward"),
    "break, then apply": (break_and_apply, "gone through all batches"),
    "two forms": (two_forms, "same form throughout"),
    "a string": (backward(lambda net, batch: "loss"), "returned str"),
    "three values": (backward(lambda net, batch: (mse(net, batch), 1, 2)), "returned 3 values"),
    "no loss in it": (backward(lambda net, batch: {"losses": mse(net, batch)}), "no 'loss'"),
    "not a scalar": (backward(lambda net, batch: net(batch[0])), "not a scalar"),
    "detached": (backward(lambda net, batch: mse(net, batch).detach()), "detached"),
    "a negative weight": (backward(lambda net, batch: (mse(net, batch), -1.0)), "must not be negative"),
    "no weight at all": (backward(lambda net, batch: (mse(net, batch), 0.0)), "must have some weight"),
    "a log that is no number": (backward(lambda net, batch: {"loss": mse(net, batch), "x": "y"}), "'x'"),
}


@pytest.mark.parametrize("what", MISUSES)
def test_misuse_of_a_step(what: str) -> None:
    body, message = MISUSES[what]
    assert message in refused(in_a_step(body))


class Shapeless:
    """Something without a state."""


SESSIONS: dict[str, tuple[Callable[[Session], Any], str]] = {
    "no state": (lambda session: session.track(thing=Shapeless()), "thing=Shapeless has no state_dict"),
    "a name twice": (lambda session: [session.track(net=mlp()), session.track(net=mlp())], "'net' is taken"),
    "our own name": (lambda session: session.track(session=mlp()), "'session' is taken"),
    "other models": (
        lambda session: session.track(o=torch.optim.SGD(nn.Linear(2 + session.rank, 1).parameters())),
        "models differ",
    ),
    "nothing to train": (
        lambda session: session.track(o=torch.optim.SGD([torch.zeros(1)])),
        "no parameter that requires",
    ),
    "LBFGS": (lambda session: session.track(o=torch.optim.LBFGS(mlp().parameters())), "LBFGS"),
    "no samples in a step": (lambda session: next(session.steps(DATA, 0)), "batch_size=0; it must be at least 1"),
    "half a sample": (lambda session: next(session.steps(DATA, 2.5)), "batch_size=2.5"),  # type: ignore[arg-type]
    "no steps": (lambda session: next(session.steps(DATA, 2, steps=0)), "steps=0"),
    "less than no epochs": (lambda session: next(session.steps(DATA, 2, epochs=-1)), "epochs=-1"),
    "no micro batch": (lambda session: next(session.steps(DATA, 2, micro_batch=0)), "micro_batch=0"),
    "columns": (
        lambda session: next(session.steps((np.zeros((9, 2)), np.zeros(9)), 2)),
        "data is a tuple of 2 arrays with 9 rows each: these are columns",
    ),
}


@pytest.mark.parametrize("what", SESSIONS)
def test_misuse_of_a_session(what: str) -> None:
    fn, message = SESSIONS[what]
    assert message in refused(fn)


def test_empty_data_is_refused() -> None:
    with pytest.raises(shoal.DataError, match="data"):
        shoal.launch(lambda session: next(session.steps(TensorDataset(torch.zeros(0, 2)), 2)), 2)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"fn": 3}, "fn=3 is of type int"),
        ({"workers": 0}, "workers=0"),
        ({"workers": 10**6}, "workers=1000000"),
        ({"workers": "2"}, "workers='2'"),
        ({"workers": True}, "workers=True"),
        ({"seed": "x"}, "seed='x'"),
        ({"keep": 0, "run_dir": "here"}, "keep=0"),
        ({"checkpoint_every": 0, "run_dir": "here"}, "checkpoint_every=0"),
        ({"checkpoint_every": 2}, "need run_dir="),
        ({"resume": "last"}, "need run_dir="),
        ({"resume": "no-such-run", "run_dir": "here"}, "no-such-run"),
        ({"run_dir": 7}, "run_dir=7"),
        ({"engine": "ray"}, "'local'"),
        ({"callbacks": [3]}, "callback=3"),
    ],
)
def test_arguments_of_launch(
    arguments: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"fn": lambda session: None, "workers": 2, **arguments}
    assert message in refused(options.pop("fn"), **options)
    assert list(tmp_path.iterdir()) == []


def test_a_deterministic_loop_wants_its_optimizers_named() -> None:
    def loop(session: Session) -> None:
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in session.steps(DATA, 10, steps=1):
            backwards(step, net)
            step.apply(optimizer)

    assert "session.track(optimizer=optimizer)" in refused(loop, deterministic=True)


# -- when a worker fails -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_an_exception_in_a_worker_surfaces_with_its_traceback(culprit: int) -> None:
    def a_function_with_a_name(rank: int, number: int) -> None:
        if rank == culprit and number == 1:
            raise LookupError("no such thing")

    def loop(session: Session) -> None:
        net = mlp()
        optimizer = torch.optim.SGD(net.named_parameters(), lr=0.1)
        session.track(net=net, optimizer=optimizer)
        for step in session.steps(DATA, 10, steps=1000):
            for batch in step:
                a_function_with_a_name(session.rank, step.number)
                step.backward(mse(net, batch))
            step.apply(optimizer)

    begun = time.monotonic()
    message = f"worker {culprit} raised LookupError: no such thing"
    with pytest.raises(shoal.WorkerError, match=message) as caught:
        shoal.launch(loop, 3)
    assert time.monotonic() - begun < 3.0
    assert (caught.value.worker, caught.value.step) == (culprit, 1)
    assert "a_function_with_a_name" in str(caught.value.worker_traceback)
    assert "a_function_with_a_name" in caught.value.__notes__[0]


def test_an_exception_before_any_loop_surfaces() -> None:
    with pytest.raises(shoal.WorkerError, match="worker 1 raised ZeroDivisionError"):
        shoal.launch(lambda session: 1 // (1 - session.rank), 2)


def test_workers_that_part_ways_are_found_out() -> None:
    """One returns while the other waits for it in an operation."""
    begun = time.monotonic()
    with pytest.raises(shoal.ShoalError):
        shoal.launch(lambda session: session.sum(torch.ones(1)) if session.rank == 0 else 1 // 0, 2)
    assert time.monotonic() - begun < 3.0


@pytest.mark.parametrize("differs", ["depth", "width", "buffer", "order"])
def test_models_that_differ_between_workers_are_refused_before_anything_is_copied(differs: str) -> None:
    """Where each worker builds its own, as under a launcher."""

    def fn(group: Group) -> str:
        layers: list[nn.Module] = [nn.Linear(3, 4), nn.Linear(4, 5)]
        if group.rank == 1:
            changed: dict[str, list[nn.Module]] = {
                "depth": [*layers, nn.Linear(5, 5)],
                "width": [nn.Linear(3, 6), nn.Linear(6, 5)],
                "buffer": [*layers, nn.BatchNorm1d(5, affine=False)],
                "order": layers[::-1],
            }
            layers = changed[differs]
        try:
            refuse_different("net", nn.Sequential(*layers), group)
        except ConfigError as error:
            return str(error)
        return ""

    for told in run_ranks(3, fn):
        assert "the model 'net' of worker 1 has other parameters or buffers than that of worker 0" in told


# -- workers that do not do the same -----------------------------------------------------------------------------------


def lonely(call: Callable[[Session], Any], at: int) -> Callable[[Session], None]:
    """A loop in which worker 0 calls something alone after a step."""

    def fn(session: Session) -> None:
        net = mlp()
        optimizer = torch.optim.SGD(net.named_parameters(), lr=0.01)
        session.track(net=net, optimizer=optimizer)
        for step in session.steps(DATA, batch_size=10, epochs=2):
            for batch in step:
                step.backward(mse(net, batch))
            step.apply(optimizer)
            if session.rank == 0 and step.number == at:
                call(session)

    return fn


@pytest.mark.parametrize(("collective", "workers"), [("shm", 2), ("gloo", 3)])
def test_who_waits_for_a_worker_that_has_finished_is_told_soon(collective: str, workers: int) -> None:
    def loop(session: Session) -> None:
        session.sum(torch.ones(3))
        if session.rank == 1:
            session.gather(torch.ones(3))

    words = "worker 1 waits for worker 0"
    begun = time.monotonic()
    with pytest.raises(shoal.GroupError) as error:
        shoal.launch(loop, workers=workers, collective=collective)
    assert time.monotonic() - begun < 20
    text = str(error.value)
    assert text.startswith(words) and "finished; all workers must call the same operations" in text
    assert "session.gather(torch.ones(3))" in text  # where it waits


def test_a_worker_may_be_at_something_of_its_own_after_others_have_finished() -> None:
    def loop(session: Session) -> float:
        total = session.sum(torch.ones(1)).item()
        time.sleep(2.5 * session.rank)
        return total

    assert shoal.launch(loop, workers=2) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("name", "call", "at", "other"),
    [
        ("session.gather", lambda session: session.gather({"a": 1}), 2, "operation"),
        ("session.gather", lambda session: session.gather({"a": 1}), 0, "operation"),
        ("session.sum", lambda session: session.sum(torch.ones(3)), 4, "operation"),
    ],
)
def test_a_worker_that_is_alone_in_an_operation_is_named(name: str, call: Any, at: int, other: str) -> None:
    with pytest.raises(shoal.GroupError) as error:
        shoal.launch(lonely(call, at), workers=2)
    text = str(error.value)
    assert name in text and other in text and "all workers must call the same operations" in text


def test_sums_of_different_shapes_are_told_both() -> None:
    with pytest.raises(
        shoal.GroupError, match=r"session.sum of float32 \(\d,\) and worker \d in session.sum of float32"
    ):
        shoal.launch(lambda session: session.sum(torch.ones(2 + session.rank)), workers=2)


def test_tracked_modules_start_equal_however_a_worker_has_made_them() -> None:
    """In the tensors that they have: an optimizer made of them before trains them."""

    def fn(session: Session) -> dict[str, Any]:
        torch.manual_seed(session.rank)
        net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        net[1].running_mean.fill_(float(session.rank))
        own = [param.detach().clone() for param in net.parameters()]
        optimizer = torch.optim.SGD(net.named_parameters(), lr=0.1)
        session.track(net=net, optimizer=optimizer)
        start = [param.detach().clone() for param in net.parameters()]
        mean = net[1].running_mean.clone()
        for step in session.steps(DATA, batch_size=20, steps=1):
            for batch in step:
                step.backward(mse(net, batch))
            step.apply(optimizer)
        return {"own": own, "start": start, "mean": mean, "end": list(net.parameters())}

    first, second = shoal.launch(fn, workers=2)
    assert all(torch.equal(one, other) for one, other in zip(first["own"], second["start"], strict=True))
    assert not torch.equal(second["own"][0], second["start"][0]) and not second["mean"].any()
    assert all(torch.equal(one, other) for one, other in zip(first["end"], second["end"], strict=True))
    assert not torch.equal(first["end"][0], first["start"][0])


# -- a graph of one phase in the next ----------------------------------------------------------------------------------


def gan_parts() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(1)
    maker = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 6))
    return maker, nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def judged(judge: nn.Module, real: Tensor, made: Tensor) -> Tensor:
    return (judge(real) - 1).pow(2).mean() + judge(made.detach()).pow(2).mean()


def fooled(judge: nn.Module, made: Tensor) -> Tensor:
    return (judge(made) - 1).pow(2).mean()


def dcgan(session: Session) -> State:
    """As DCGAN has it: what was made for the judge is used again for its maker."""
    maker, judge = gan_parts()
    mine = torch.optim.SGD(maker.named_parameters(), lr=0.1)
    other = torch.optim.SGD(judge.named_parameters(), lr=0.1)
    session.track(maker=maker, judge=judge, mine=mine, other=other)
    for step in session.steps(INPUTS[:48], batch_size=24, epochs=2):
        made = []
        for real in step:
            made.append(maker(real))
            step.backward(judged(judge, real, made[-1]))
        step.apply(other)
        for _, one in zip(step, made, strict=True):
            step.backward(fooled(judge, one))
        step.apply(mine)
    return nn.ModuleList([maker, judge]).state_dict()


def plain_dcgan(parts: int) -> State:
    """The same in one process, with each batch in so many parts: buffers and gradients of a phase are their means."""
    both = nn.ModuleList(gan_parts())
    maker, judge = both
    mine, other = (torch.optim.SGD(net.parameters(), lr=0.1) for net in both)

    def phase(losses: list[Callable[[], Tensor]], optimizer: torch.optim.Optimizer) -> None:
        start, found = [buffer.clone() for buffer in both.buffers()], []
        both.zero_grad()
        for loss in losses:
            for buffer, before in zip(both.buffers(), start, strict=True):
                buffer.data.copy_(before)
            (loss() / parts).backward()
            found.append([buffer.clone() for buffer in both.buffers()])
        for buffer, values in zip(both.buffers(), zip(*found, strict=True), strict=True):
            buffer.data.copy_(torch.stack(values).double().mean(0))
        optimizer.step()

    for step in range(4):
        ((_, indices),) = batches_of(Course(48, 24), step, seed=0, by_atom=False)
        reals, made = INPUTS[indices].chunk(parts), list[Tensor]()

        def first(real: Tensor, made: list[Tensor] = made) -> Tensor:
            made.append(maker(real))
            return judged(judge, real, made[-1])

        phase([partial(first, real) for real in reals], other)
        phase([partial(fooled, judge, one) for one in made], mine)
    return both.state_dict()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_graph_of_one_phase_serves_in_the_next_with_batch_norm(workers: int) -> None:
    results = shoal.launch(dcgan, workers=workers)
    for result in results:
        assert_close(result, plain_dcgan(workers), 1e-6)
        assert_same_bits(result, results[0])


def test_a_graph_that_goes_back_through_a_merged_buffer_is_refused() -> None:
    """It would go back through another value than the forward had."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.scale.mul_(0.9).add_(0.1 * x.abs().mean().detach())
            return super().forward(x) * self.scale

    def fn(session: Session) -> None:
        net = Scaled(6, 1)
        net.register_buffer("scale", torch.ones(()))
        optimizer = torch.optim.SGD(net.named_parameters(), lr=0.1)
        session.track(net=net, optimizer=optimizer)
        for step in session.steps(INPUTS, batch_size=20, steps=1):
            kept = []
            for x in step:
                kept.append(net(x))
                step.backward(kept[-1].detach().mean() + net.weight.sum())
            step.apply(optimizer)
            for _, one in zip(step, kept, strict=True):
                step.backward(one.mean())
            step.apply(optimizer)

    with pytest.raises(shoal.WorkerError, match="modified by an inplace operation") as error:
        shoal.launch(fn, workers=2)
    assert "compute what a phase goes back through in that phase" in " ".join(error.value.facts.split())
