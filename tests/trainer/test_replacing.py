"""Workers that die in runs that asked for nothing: they are replaced where they can be, and else it is said why not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal
from shoal.core.errors import GroupError
from shoal.core.events import AnyEvent
from shoal.trainer.session import Session
from shoal.trainer.step import Step

pytestmark = pytest.mark.timeout(90)

INPUTS = torch.randn(96, 6, generator=torch.Generator().manual_seed(3))
DATA = TensorDataset(INPUTS, INPUTS.sin().sum(1, keepdim=True))
STEPS = 18


def mlp() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def mse(net: nn.Module, batch: list[Tensor]) -> Tensor:
    return nn.functional.mse_loss(net(batch[0]), batch[1])


class Once:
    """Kills the process that calls it with SIGKILL, once in a test, and only on one worker."""

    def __init__(self, folder: Path, rank: int = 1) -> None:
        self.mark = folder / "killed"
        self.rank = rank

    def __call__(self, rank: int | None = None) -> None:
        if rank not in (None, self.rank):
            return
        try:
            os.close(os.open(self.mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    @property
    def struck(self) -> bool:
        return self.mark.exists()


class Seen:
    def __init__(self) -> None:
        self.events: list[AnyEvent] = []

    def __call__(self, event: AnyEvent) -> None:
        self.events.append(event)

    @property
    def steps(self) -> list[int]:
        return [event.step for event in self.events if isinstance(event, shoal.StepDone)]

    @property
    def texts(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, shoal.Notice)]

    @property
    def lost(self) -> list[int]:
        return [seat for event in self.events if isinstance(event, shoal.Regrouped) for seat in event.lost]


def trainer(net: nn.Module, **options: Any) -> shoal.Trainer:
    given: dict[str, Any] = {"batch_size": 16, "steps": STEPS, "workers": 2, **options}
    loss = given.pop("loss", mse)
    return shoal.Trainer(net, loss, lambda params: torch.optim.AdamW(params, lr=0.01), DATA, **given)


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-6)


# -- the Trainer -------------------------------------------------------------------------------------------------------


def killed_from_outside(**options: Any) -> Seen:
    """Worker 1 gets SIGKILL from the process that has started the run, once it has told of itself."""
    seen, struck = Seen(), []

    def kill(event: AnyEvent) -> None:
        seen(event)
        if isinstance(event, shoal.WorkerSeen) and event.worker == 1 and not struck:
            struck.append(event.pid)
            os.kill(event.pid, signal.SIGKILL)

    def slow(net: nn.Module, batch: list[Tensor]) -> Tensor:
        time.sleep(0.1)
        return mse(net, batch)

    trainer(options.pop("net"), loss=slow, callbacks=[kill], **options).fit()
    assert struck
    return seen


def test_a_worker_that_dies_is_replaced_though_nobody_asked_for_it() -> None:
    calm, net = mlp(), mlp()
    trainer(calm).fit()
    seen = killed_from_outside(net=net)
    assert seen.lost == [1] and seen.steps == list(range(1, STEPS + 1))
    assert any(text.startswith("worker 1 was killed by SIGKILL in step") for text in seen.texts)
    assert_close(calm.state_dict(), net.state_dict())


def test_where_that_is_not_wanted_a_death_ends_the_run() -> None:
    with pytest.raises(shoal.WorkerError, match="worker 1 was killed by SIGKILL") as error:
        killed_from_outside(net=mlp(), replace=False)
    assert error.value.worker == 1
    assert "not replaced" not in "".join(error.value.__notes__)


def test_that_goes_with_no_bounds_on_their_number() -> None:
    with pytest.raises(shoal.ConfigError, match="replace=False ends the run when a worker is lost"):
        trainer(mlp(), replace=False, min_workers=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_death_in_evaluate_is_survived(tmp_path: Path, rank: int) -> None:
    once = Once(tmp_path, rank)

    def predict(net: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        once(int(INPUTS[0].equal(batch[0][0])) ^ 1)  # worker 0 has the first sample
        return net(batch[0]), batch[1]

    net = mlp()
    calm = trainer(net, predict=lambda net, batch: (net(batch[0]), batch[1]), metrics=["mae"]).evaluate(DATA)
    assert trainer(net, predict=predict, metrics=["mae"]).evaluate(DATA) == pytest.approx(calm)
    assert once.struck


@pytest.mark.parametrize("rank", [0, 2])
def test_a_death_in_predict_is_survived(tmp_path: Path, rank: int) -> None:
    """Also if those who are left have other numbers than their place in the order of samples says."""
    once = Once(tmp_path, rank)

    def predict(net: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        at = next(at for at, sample in enumerate(INPUTS) if sample.equal(batch[0][0]))
        once(3 * at // len(INPUTS))
        return net(batch[0]), batch[1]

    net = mlp()
    torch.testing.assert_close(trainer(net, predict=predict, workers=3).predict(DATA), net(INPUTS).detach())
    assert once.struck


# -- own loops ---------------------------------------------------------------------------------------------------------


def own_loop(inside: Callable[[Session, int], None] = lambda session, number: None) -> Callable[[Session], Any]:
    """Trains; `inside` is called in the forward of each step."""

    def loop(session: Session) -> dict[str, Any]:
        torch.manual_seed(session.rank)  # made equal when it is tracked
        net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        if session.rank == 0:
            net.load_state_dict(mlp().state_dict())
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        session.track(net=net, optimizer=optimizer)
        for step in session.steps(DATA, 16, steps=STEPS):
            for batch in step:
                inside(session, step.number)
                step.backward(mse(net, batch))
            step.apply(optimizer)
        return {"net": net.state_dict(), "rank": session.rank}

    return loop


def launched(loop: Callable[[Session], Any], **options: Any) -> tuple[list[Any], Seen]:
    seen = Seen()
    return shoal.launch(loop, workers=2, callbacks=[seen], **options), seen


@pytest.mark.parametrize(("rank", "at"), [(1, 1), (0, 7), (1, 7)])
def test_in_an_own_loop_a_worker_is_replaced(tmp_path: Path, rank: int, at: int) -> None:
    once = Once(tmp_path, rank)
    calm, _ = launched(own_loop())

    def strike(session: Session, number: int) -> None:
        if number >= at:
            once(session.rank)
            time.sleep(0.02 if once.struck else 0.0)  # so that the new one comes before the end

    values, seen = launched(own_loop(strike))
    assert once.struck and seen.lost == [rank] and seen.steps == list(range(1, STEPS + 1))
    assert sorted(value["rank"] for value in values) == list(range(len(values)))
    for value in values:
        assert_close(calm[0]["net"], value["net"])


def test_who_has_a_step_from_another_one_does_what_follows_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exchange breaks when the others have it complete: they go on, and it copies, schedule and all."""

    def loop(session: Session) -> Any:
        whole, broken = Step._exchange, []

        def breaks(self: Step) -> None:
            whole(self)
            if session.rank == 1 and self.number == 5 and not broken:
                broken.append(self.number)
                raise GroupError("a peer is gone")

        monkeypatch.setattr(Step, "_exchange", breaks)
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        session.track(net=net, optimizer=optimizer, schedule=schedule)
        rates, losses = [], []
        for step in session.steps(DATA, 16, steps=12):
            for batch in step:
                step.backward(mse(net, batch))
            losses.append(step.apply(optimizer).loss)
            rates.append((step.number, optimizer.param_groups[0]["lr"]))
            schedule.step()
        figures = {"rates": rates, "losses": losses, "broken": broken, "lr": schedule.get_last_lr()}
        return {"net": net.state_dict(), **figures}

    first, second = sorted(launched(loop)[0], key=lambda value: len(value["broken"]))
    assert second["broken"] == [5] and len(second["rates"]) == 11
    for number, rate in second["rates"]:
        assert rate == pytest.approx(0.1 * 0.9**number)
    assert first["lr"] == second["lr"] == pytest.approx([0.1 * 0.9**12])
    for name, value in first["net"].items():
        assert torch.equal(value, second["net"][name])


def test_a_loop_that_changes_what_it_tracks_before_its_batches_is_told_when_a_worker_joins(tmp_path: Path) -> None:
    """The new one has that from the others, and does it once more: replicas part, and must not in silence."""
    once = Once(tmp_path)

    def loop(session: Session) -> Any:
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        session.track(net=net, optimizer=optimizer)
        for step in session.steps(DATA, 16, steps=60):
            with torch.no_grad():
                net[0].bias.add_(0.01)
            for batch in step:
                if step.number >= 3:
                    once(session.rank)
                    time.sleep(0.02)
                step.backward(mse(net, batch))
            step.apply(optimizer)
        return net.state_dict()

    try:
        first, *others = launched(loop)[0]
        # it came between two steps, where nothing is done twice
        assert all(torch.equal(value, other[name]) for other in others for name, value in first.items())
    except shoal.ConfigError as error:
        assert "differs between workers" in str(error) and "after step.apply" in str(error)
    assert once.struck


def refused(loop: Callable[[Session], Any], **options: Any) -> str:
    begun = time.monotonic()
    with pytest.raises(shoal.WorkerError, match="was killed by SIGKILL") as error:
        launched(loop, **options)
    assert time.monotonic() - begun < 10.0
    return "".join(error.value.__notes__)


def test_a_death_outside_of_the_loop_ends_the_run_and_says_why(tmp_path: Path) -> None:
    once = Once(tmp_path)

    def loop(session: Session) -> None:
        session.gather(session.rank)
        once(session.rank)
        session.gather(session.rank)

    assert "It was not replaced" in refused(loop)


def test_a_death_after_others_have_returned_ends_the_run(tmp_path: Path) -> None:
    once = Once(tmp_path)

    def loop(session: Session) -> int:
        if session.rank == 1:
            time.sleep(0.5)
            once(1)
        return session.rank

    assert "It was not replaced" in refused(loop)


def test_a_death_in_a_step_with_two_phases_ends_the_run(tmp_path: Path) -> None:
    once = Once(tmp_path)

    def loop(session: Session) -> None:
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        session.track(net=net, optimizer=optimizer)
        for step in session.steps(DATA, 16, steps=6):
            for phase in range(2):
                for batch in step:
                    if step.number == 3 and phase == 1:
                        once(session.rank)
                    step.backward(mse(net, batch))
                step.apply(optimizer)

    assert "one phase" in refused(loop)


def test_a_death_in_a_step_with_two_optimizers_ends_the_run(tmp_path: Path) -> None:
    once = Once(tmp_path)

    def loop(session: Session) -> None:
        net = mlp()
        first, second = (torch.optim.SGD(net[at].parameters(), lr=0.01) for at in (0, 2))
        session.track(net=net, first=first, second=second)
        for step in session.steps(DATA, 16, steps=6):
            for batch in step:
                if step.number == 3:
                    once(session.rank)
                step.backward(mse(net, batch))
            step.apply(first)
            step.apply(second)

    assert "one optimizer" in refused(loop)


def test_one_that_asks_the_others_before_it_joins_is_left_out(tmp_path: Path) -> None:
    """They are in the loop: nobody would answer. The run goes on without it, and says why."""
    once = Once(tmp_path)

    def strike(session: Session, number: int) -> None:
        if number >= 2:
            once(session.rank)
            time.sleep(0.1 if once.struck else 0.0)

    trains = own_loop(strike)

    def loop(session: Session) -> Any:
        session.gather(session.rank)
        return trains(session)

    values, seen = launched(loop)
    assert len(values) == 1 and seen.steps == list(range(1, STEPS + 1))
    assert any("its function has session.gather" in text for text in seen.texts)


def test_in_the_second_of_two_loops_the_others_go_on(tmp_path: Path) -> None:
    once = Once(tmp_path)

    def loop(strike: Callable[[int], None]) -> Callable[[Session], Any]:
        def both(session: Session) -> Any:
            net = mlp()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
            session.track(net=net, optimizer=optimizer)
            for turn, steps in ((0, 5), (1, 9)):
                for step in session.steps(DATA, 16, steps=steps):
                    for batch in step:
                        if turn == 1 and step.number == 3:
                            strike(session.rank)
                        step.backward(mse(net, batch))
                    step.apply(optimizer)
            return net.state_dict()

        return both

    calm, _ = launched(loop(lambda rank: None))
    values, seen = launched(loop(once))
    assert once.struck and seen.lost == [1]
    assert seen.steps == [*range(1, 6), *range(1, 10)]
    assert_close(calm[0], values[0])


def test_gradients_may_be_clipped_by_hand_where_they_are_whole() -> None:
    """With one optimizer, tracked before the loop, they are those of the whole step once its batches are through."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    norms = []
    for _ in range(4):
        optimizer.zero_grad()
        mse(net, list(DATA[:])).backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.05)))
        optimizer.step()

    def loop(session: Session) -> Any:
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        session.track(net=net, optimizer=optimizer)
        found = []
        for step in session.steps(DATA, len(DATA), steps=4):
            for inputs, targets in step:
                errors = (net(inputs) - targets).square()
                step.backward((errors.sum() * 2.0, 2.0 * len(inputs)))  # a weight of its own
            found.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.05)))
            step.apply(optimizer)
        return {"net": net.state_dict(), "norms": found}

    values, seen = launched(loop)
    assert values[0]["norms"] == pytest.approx(norms, rel=1e-5)
    assert_close(net.state_dict(), values[0]["net"])
    assert not any("was changed between" in text for text in seen.texts)
