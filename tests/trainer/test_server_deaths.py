"""Runs with servers whose workers and servers die or stop: no gradient is lost or counted twice on any shard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.core.atoms import Course
from shoal.core.errors import NotFiniteError, WorkerError
from shoal.core.events import AnyEvent
from shoal.core.ordering import order_key
from shoal.core.permutation import Permutation
from shoal.syncs.server.clerk.clerk import CALM_STEPS
from shoal.syncs.server.lines import Lines
from shoal.syncs.server.messages import Lease, Push
from shoal.testing import FaultPlan
from shoal.testing.servers import audit_servers

SAMPLES, BATCH, EPOCHS = 320, 32, 2
STEPS = SAMPLES // BATCH * EPOCHS
SECONDS = 30.0
"""A run that takes longer hangs: its processes are ended, and it fails."""


class Points:
    """Samples that can be told apart."""

    def __init__(self, count: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 12, generator=generator)
        self.y = (self.x[:, :3].sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def plain() -> nn.Module:
    """Large enough for twelve shards."""
    return nn.Sequential(nn.Linear(12, 256), nn.ReLU(), nn.Linear(256, 2))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def slowly(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Long enough for a replacement to come before the run is over."""
    time.sleep(0.01)
    return loss(model, batch)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


@dataclass
class Seen:
    """What the watchers of a run were told."""

    events: list[AnyEvent] = field(default_factory=list)
    moments: dict[int, float] = field(default_factory=dict)
    """When each step was last told."""

    def __call__(self, event: AnyEvent) -> None:
        self.events.append(event)
        if isinstance(event, shoal.StepDone):
            self.moments[event.step] = time.monotonic()

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def steps(self) -> list[int]:
        return [event.step for event in self.of(shoal.StepDone)]

    @property
    def notices(self) -> str:
        return "\n".join(event.text for event in self.of(shoal.Notice))


@pytest.fixture(autouse=True)
def _deadline() -> Iterator[None]:
    """Ends all processes that a test has started, if it takes too long: whoever waits for them then fails."""

    def end() -> None:
        for process in psutil.Process().children(recursive=True):
            process.kill()

    timer = threading.Timer(SECONDS, end)
    timer.start()
    yield
    timer.cancel()
    timer.join()


def make(sync: str = "server", **options: Any) -> tuple[shoal.Trainer, Seen]:
    seen = Seen()
    options.setdefault("workers", 2)
    options.setdefault("epochs", EPOCHS)
    callbacks = [seen, *options.pop("callbacks", [])]
    trainer = shoal.Trainer(
        options.pop("model", plain),
        options.pop("loss", slowly),
        options.pop("optimizer", adamw),
        Points(),
        batch_size=BATCH,
        seed=5,
        sync=sync,
        callbacks=callbacks,
        **options,
    )
    return trainer, seen


def fit(sync: str = "server", **options: Any) -> tuple[shoal.Trainer, shoal.Result, Seen]:
    trainer, seen = make(sync, **options)
    return trainer, trainer.fit(), seen


def weights(trainer: shoal.Trainer) -> list[Tensor]:
    return [tensor.detach() for tensor in trainer.model.state_dict().values()]


_calm: dict[str, shoal.Trainer] = {}


def calm() -> shoal.Trainer:
    """The same run with allreduce, and nothing going wrong."""
    if not _calm:
        _calm["calm"] = fit("allreduce", loss=loss)[0]
    return _calm["calm"]


def assert_calm(trainer: shoal.Trainer) -> None:
    for ours, theirs in zip(weights(trainer), weights(calm()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def assert_whole(folder: Path, seen: Seen, steps: int = STEPS, *, arrival: bool = False) -> None:
    """Every atom once on every shard; and what was told to be applied was not applied again later."""
    found = audit_servers(folder, Course(SAMPLES, BATCH), steps, digests=not arrival)
    assert not found.problems, "\n".join(found.problems)
    assert found.shards == 12
    late = {step: moment for step, moment in found.last.items() if moment > seen.moments[step + 1]}
    assert not late, f"steps that were told, and applied again afterwards: {late}"


SERVER_POINTS = ["push", "pushed", "close", "closed", "apply", "applied"]


@pytest.mark.parametrize("name", ["server-0", "server-1"])
@pytest.mark.parametrize("point", SERVER_POINTS)
def test_a_server_dies_and_nothing_is_lost(point: str, name: str, tmp_path: Path) -> None:
    plan = FaultPlan().kill(name, step=4, at=point).ledger(tmp_path)
    trainer, result, seen = fit(min_workers=1, faults=plan)
    assert len(plan.fired()) == 1
    assert result.steps == STEPS and seen.steps == list(range(1, STEPS + 1))
    assert_whole(tmp_path, seen)
    assert_calm(trainer)
    assert f"server {name[-1]} was killed by SIGKILL" in seen.notices


@pytest.mark.parametrize("point", ["compute", "exchange", "commit"])
def test_a_worker_dies_and_its_samples_are_computed_by_others(point: str, tmp_path: Path) -> None:
    plan = FaultPlan().kill("worker-1", step=4, at=point).kill("worker-0", step=11, at=point).ledger(tmp_path)
    trainer, result, seen = fit(workers=3, min_workers=1, faults=plan)
    assert len(plan.fired()) == 2
    assert result.steps == STEPS and seen.steps == list(range(1, STEPS + 1))
    assert_whole(tmp_path, seen)
    assert_calm(trainer)
    assert "worker 1 was killed by SIGKILL" in seen.notices


def dies_between_servers(monkeypatch: pytest.MonkeyPatch, seat: int, step: int) -> None:
    """This worker dies when one server has counted its gradient of this step, and before it tells the other.

    Or of a later one: it may have nothing of that step.
    """
    send = Lines.send
    told: list[int] = []
    leases: list[Lease] = []

    def sending(self: Lines, server: int, body: Any, frames: Any = ()) -> bool:
        if isinstance(body, Push) and self._seat == seat and body.lease.step >= step:
            if leases and body.lease != leases[-1]:
                told.clear()
            leases.append(body.lease)
            if told and server not in told:
                assert self._lines[told[0]].wait(SECONDS), "the first server has answered"
                os.kill(os.getpid(), signal.SIGKILL)
            told.append(server)
        return send(self, server, body, frames)

    monkeypatch.setattr(Lines, "send", sending)


@pytest.mark.parametrize("mode", ["bsp", "ssp", "async"])
def test_a_worker_dies_between_two_servers(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dies_between_servers(monkeypatch, seat=1, step=5)
    trainer, _, seen = fit(f"server:mode={mode}", min_workers=1, faults=FaultPlan().ledger(tmp_path))
    assert "worker 1 was killed by SIGKILL" in seen.notices
    assert seen.steps == list(range(1, STEPS + 1))
    assert_whole(tmp_path, seen)
    if mode == "bsp":
        assert_calm(trainer)


@pytest.mark.parametrize("mode", ["ssp", "async"])
@pytest.mark.parametrize(
    ("point", "apply"), [("pushed", "step"), ("apply", "step"), ("applied", "step"), ("pushed", "arrival")]
)
def test_stale_runs_count_every_atom_once(point: str, mode: str, apply: str, tmp_path: Path) -> None:
    """While a worker takes long the others go ahead of it; a server dies, and one of the workers."""
    plan = FaultPlan().kill("server-0", step=CALM_STEPS + 4, at=point).ledger(tmp_path)
    for step in range(CALM_STEPS + 5, CALM_STEPS + 19):
        plan.kill("worker-1", step=step)  # in the first of these that it computes something of
    calls = 0

    def once_very_slowly(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Whoever is the first to be called so often, of all workers."""
        nonlocal calls
        calls += 1
        if calls == CALM_STEPS + 4:
            with suppress(FileExistsError):
                (tmp_path / "slow").touch(exist_ok=False)
                time.sleep(0.6)
        return slowly(model, batch)

    sync = f"server:mode={mode},apply={apply}"
    _, result, seen = fit(sync, loss=once_very_slowly, workers=3, min_workers=1, epochs=3, faults=plan)
    assert len(plan.fired()) == 2
    steps = SAMPLES // BATCH * 3
    assert result.steps == steps and seen.steps == list(range(1, steps + 1))
    assert len(seen.of(shoal.ServersSeen)[-1].staleness) > 1, "nothing was stale"
    assert_whole(tmp_path, seen, steps, arrival=apply == "arrival")
    assert result.loss < 0.6


def test_workers_that_cannot_even_begin_end_the_run() -> None:
    parent = os.getpid()

    class Deadly(nn.Linear):
        def named_parameters(self, *given: Any, **more: Any) -> Iterator[tuple[str, nn.Parameter]]:
            if os.getpid() != parent:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().named_parameters(*given, **more)

    with pytest.raises(WorkerError, match="new ones ended before they were ready"):
        fit(model=lambda: Deadly(12, 2), min_workers=1)


@pytest.mark.parametrize("point", SERVER_POINTS)
def test_a_server_reads_its_journal(point: str, tmp_path: Path) -> None:
    plan = FaultPlan().kill("server-1", step=4, at=point).kill("server-0", step=12, at=point).ledger(tmp_path / "kept")
    trainer, result, seen = fit("server:durability=disk", min_workers=1, faults=plan, run_dir=tmp_path / "run")
    assert len(plan.fired()) == 2
    assert result.steps == STEPS and seen.steps == list(range(1, STEPS + 1))
    assert_whole(tmp_path / "kept", seen)
    assert_calm(trainer)


def test_without_copies_the_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    plan = FaultPlan().kill("server-1", step=10).ledger(tmp_path / "kept")
    trainer, result, seen = fit(
        "server:durability=none", min_workers=1, faults=plan, checkpoint_every=4, run_dir=tmp_path / "run"
    )
    assert len(plan.fired()) == 1 and result.steps == STEPS
    assert "there were no copies of it" in seen.notices and "going on from step 8" in seen.notices
    assert_whole(tmp_path / "kept", seen)
    assert_calm(trainer)


def test_both_copies_lost_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    plan = FaultPlan().kill("server-1", step=10).kill("server-0", step=10).ledger(tmp_path / "kept")
    trainer, result, seen = fit(min_workers=1, faults=plan, checkpoint_every=4, run_dir=tmp_path / "run")
    assert len(plan.fired()) == 2 and result.steps == STEPS
    assert "going on from step 8" in seen.notices
    assert_whole(tmp_path / "kept", seen)
    assert_calm(trainer)


def test_both_copies_lost_before_any_checkpoint_begins_anew(tmp_path: Path) -> None:
    plan = FaultPlan().kill("server-1", step=3).kill("server-0", step=3).ledger(tmp_path / "kept")
    trainer, result, seen = fit(min_workers=1, faults=plan, run_dir=tmp_path / "run")
    assert len(plan.fired()) == 2 and result.steps == STEPS
    assert "going on from the beginning" in seen.notices
    assert_whole(tmp_path / "kept", seen)
    assert_calm(trainer)


def test_lost_without_restarts_says_how_to_go_on(tmp_path: Path) -> None:
    plan = FaultPlan().kill("server-1", step=10)
    run = {"run_dir": tmp_path / "run", "checkpoint_every": 4, "min_workers": 1}
    with pytest.raises(WorkerError, match="there were no copies of it") as caught:
        fit("server:durability=none", restarts=0, faults=plan, **run)
    assert any("resume='last' goes on from its last checkpoint" in note for note in caught.value.__notes__)
    trainer, result, seen = fit("server:durability=none", resume="last", **run)
    assert seen.steps == list(range(9, STEPS + 1)) and result.steps == STEPS
    assert_calm(trainer)


def test_servers_die_one_after_the_other(tmp_path: Path) -> None:
    """Each time with copies made anew in between."""
    plan = FaultPlan().ledger(tmp_path)
    for step, name in ((2, "server-0"), (20, "server-1"), (38, "server-2"), (56, "server-0")):
        plan.kill(name, step=step, at="closed")
    trainer, seen = make("server:servers=3", min_workers=1, faults=plan, epochs=8)
    trainer.fit()
    assert len(plan.fired()) == 4
    assert seen.steps == list(range(1, 81))
    assert_whole(tmp_path, seen, 80)


def test_a_stopped_worker_gives_its_lease_away(tmp_path: Path) -> None:
    plan = FaultPlan().stop("worker-1", step=5).ledger(tmp_path)
    trainer, _, seen = fit(min_workers=1, faults=plan)
    assert len(plan.fired()) == 1
    assert seen.steps == list(range(1, STEPS + 1))
    assert_whole(tmp_path, seen)
    assert_calm(trainer)


def test_a_worker_that_stops_shortly_comes_back(tmp_path: Path) -> None:
    """What it computed meanwhile was computed by another: it counts once."""
    plan = FaultPlan().stop("worker-1", step=5, seconds=2.0, at="exchange").ledger(tmp_path)
    trainer, _, seen = fit(min_workers=1, faults=plan)
    assert len(plan.fired()) == 1
    assert seen.steps == list(range(1, STEPS + 1))
    assert_whole(tmp_path, seen)
    assert_calm(trainer)


@pytest.mark.parametrize("point", ["pushed", "closed"])
def test_a_stopped_server_is_replaced(point: str, tmp_path: Path) -> None:
    plan = FaultPlan().stop("server-1", step=5, at=point).ledger(tmp_path)
    trainer, _, seen = fit(min_workers=1, faults=plan)
    assert len(plan.fired()) == 1
    assert seen.steps == list(range(1, STEPS + 1))
    assert "server 1 was killed, because it stands still" in seen.notices
    assert_whole(tmp_path, seen)
    assert_calm(trainer)


@pytest.mark.parametrize("mode", ["bsp", "ssp"])
def test_a_worker_dies_while_it_evaluates(mode: str, tmp_path: Path) -> None:
    """Whichever it is: the first that does."""
    plan = FaultPlan().ledger(tmp_path)
    for seat in range(2):
        plan.kill(f"worker-{seat}", step=4, at="evaluate")
    trainer, _, seen = fit(f"server:mode={mode}", min_workers=1, faults=plan, eval_data=Points(64), eval_every=5)
    assert plan.fired()
    assert [event.step for event in seen.of(shoal.EvalDone)] == [5, 10, 15, 20]
    assert_whole(tmp_path, seen)
    if mode == "bsp":
        assert_calm(trainer)


@pytest.mark.parametrize("name", ["server-0", "worker-0"])
def test_a_death_while_a_checkpoint_is_made(name: str, tmp_path: Path) -> None:
    """Servers have kept the version, and one dies before it has sent its part."""
    plan = FaultPlan().ledger(tmp_path / "kept")
    plan.kill(name, step=7, at="applied" if name == "server-0" else "compute")
    trainer, _, seen = fit(min_workers=1, faults=plan, checkpoint_every=4, run_dir=tmp_path / "run")
    assert len(plan.fired()) == 1
    assert [event.step for event in seen.of(shoal.CheckpointSaved)] == [4, 8, 12, 16, 20]
    assert_whole(tmp_path / "kept", seen)
    assert_calm(trainer)
    resumed, _ = make(min_workers=1, run_dir=tmp_path / "run", resume="last", epochs=EPOCHS)
    assert resumed.fit().steps == STEPS
    assert_calm(resumed)


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["peer", "disk"])
def test_what_is_kept_for_a_checkpoint_survives(durability: str, tmp_path: Path) -> None:
    """A version is evaluated for so long that all servers are others, when it is sent for."""

    def late(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if not torch.is_grad_enabled():
            time.sleep(0.4)
        return slowly(model, batch)

    plan = FaultPlan().kill("server-0", step=4, at="applied").kill("server-1", step=25, at="applied")
    plan.ledger(tmp_path / "kept")
    _, _, seen = fit(
        f"server:durability={durability}",
        loss=late,
        min_workers=1,
        faults=plan,
        epochs=4,
        eval_data=Points(64),
        eval_every=5,
        checkpoint_every=5,
        run_dir=tmp_path / "run",
    )
    assert len(plan.fired()) == 2
    assert [event.step for event in seen.of(shoal.EvalDone)] == list(range(5, 41, 5))
    assert [event.step for event in seen.of(shoal.CheckpointSaved)] == list(range(5, 41, 5))
    assert_whole(tmp_path / "kept", seen, 40)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["server", "worker"])
def test_one_that_stops_while_it_evaluates_is_replaced(name: str, tmp_path: Path) -> None:
    plan = FaultPlan().ledger(tmp_path / "kept")
    for number in range(2):
        if name == "worker":
            plan.stop(f"worker-{number}", step=4, at="evaluate")
    if name == "server":
        plan.stop("server-1", step=4, at="applied")
    trainer, _, seen = fit(min_workers=1, faults=plan, eval_data=Points(64), eval_every=5)
    assert plan.fired()
    assert [event.step for event in seen.of(shoal.EvalDone)] == [5, 10, 15, 20]
    assert_whole(tmp_path / "kept", seen)
    assert_calm(trainer)


def test_samples_that_end_two_workers_end_the_run(tmp_path: Path) -> None:
    def deadly(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if torch.is_grad_enabled() and bool((batch[0] == Points().x[17]).all(1).any()):
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(model, batch)

    with pytest.raises(WorkerError, match="two workers died in step") as caught:
        fit(loss=deadly, min_workers=1)
    error = caught.value
    assert error.positions is not None and error.step is not None
    first, last = error.positions
    order = Permutation(SAMPLES, order_key(5, error.step // (SAMPLES // BATCH)))
    assert 17 in order.span(first, last + 1).tolist()
    assert "these samples are data[" in "".join(error.__notes__)


def test_where_nobody_is_replaced_a_workers_death_ends_the_run(tmp_path: Path) -> None:
    def deadly(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        deadly.calls += 1  # type: ignore[attr-defined]
        if deadly.calls == 4:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(model, batch)

    deadly.calls = 0  # type: ignore[attr-defined]
    with pytest.raises(WorkerError, match="SIGKILL"):
        fit(loss=deadly, replace=False)


def test_without_min_workers_a_servers_death_is_survived(tmp_path: Path) -> None:
    pids: list[int] = []

    def strike(event: AnyEvent) -> None:
        if isinstance(event, shoal.StepDone) and event.step == 5 and not pids:
            pids.append(server_pids()[0])
            os.kill(pids[0], signal.SIGKILL)

    trainer, _, seen = fit(callbacks=[strike])
    assert len(pids) == 1
    assert seen.steps == list(range(1, STEPS + 1))
    assert_calm(trainer)


def server_pids() -> list[int]:
    """Of the servers of the run in progress: they, and nobody else, have their logs open for writing."""
    found = []
    for process in psutil.Process().children(recursive=True):
        out = os.readlink(f"/proc/{process.pid}/fd/1")
        if Path(out).name.startswith("server-"):
            found.append(process.pid)
    return sorted(found)


def test_an_exception_in_the_loss_ends_the_run_with_its_traceback() -> None:
    def broken(model: nn.Module, batch: Any) -> Tensor:
        broken.count += 1  # type: ignore[attr-defined]
        if broken.count == 4:  # type: ignore[attr-defined]
            raise RuntimeError("a bad idea of mine")
        return loss(model, batch)

    broken.count = 0  # type: ignore[attr-defined]
    with pytest.raises(WorkerError, match="a bad idea of mine") as caught:
        fit(loss=broken, min_workers=1)
    assert "in broken" in str(caught.value.worker_traceback)


class Bad(torch.optim.SGD):
    """Fails in its third step, on a server."""

    works_on = "elements"
    taken = 0

    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        if self.taken == 3:
            raise RuntimeError("an optimizer's bad idea")
        return super().step(closure)


class BadSchedule(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self) -> list[float]:
        if self.last_epoch == 3:
            raise RuntimeError("a schedule's bad idea")
        return [0.1 for _ in self.optimizer.param_groups]


@pytest.mark.parametrize(
    ("options", "words", "where"),
    [
        ({"optimizer": lambda params: Bad(params, lr=0.1)}, "an optimizer's bad idea", "in step"),
        ({"schedule": lambda optimizer, steps: BadSchedule(optimizer)}, "a schedule's bad idea", "in get_lr"),
    ],
)
def test_an_exception_on_a_server_ends_the_run_with_its_traceback(
    options: dict[str, Callable[..., Any]], words: str, where: str
) -> None:
    with pytest.raises(WorkerError, match=words) as caught:
        fit(min_workers=1, **options)
    assert "server" in str(caught.value)
    assert where in str(caught.value.worker_traceback)


def test_a_loss_that_is_not_a_number_ends_the_run() -> None:
    def bad(model: nn.Module, batch: Any) -> Tensor:
        bad.count += 1  # type: ignore[attr-defined]
        return loss(model, batch) * (torch.nan if bad.count == 4 else 1.0)  # type: ignore[attr-defined]

    bad.count = 0  # type: ignore[attr-defined]
    with pytest.raises(NotFiniteError, match="the loss is nan"):
        fit(loss=bad, min_workers=1)


SCRIPT = textwrap.dedent(
    """
    import sys

    sys.path.insert(0, sys.argv[1])
    import test_server_deaths as this
    import shoal


    def tell(event):
        if isinstance(event, shoal.StepDone) and event.step == 3:
            print("so far", flush=True)


    this.make(sys.argv[2], run_dir=sys.argv[3], min_workers=1, callbacks=[tell], epochs=400)[0].fit()
    """
)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_run_that_is_stopped_goes_on_where_it_was(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """Checkpointed at a step in the middle; from there it ends where one ends that was never stopped."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), str(Path(__file__).parent), "server", str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "so far\n"
    process.send_signal(number)
    _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == code, said
    assert "checkpointed in" in said
    kept = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    at = int(kept[-1].name.removeprefix("step-"))
    assert 3 <= at < 4000
    epochs = at // (SAMPLES // BATCH) + 2
    plan = FaultPlan().ledger(tmp_path / "kept")
    resumed, seen = make(run_dir=tmp_path / "run", resume="last", epochs=epochs, min_workers=1, faults=plan)
    resumed.fit()
    assert seen.steps == list(range(at + 1, epochs * (SAMPLES // BATCH) + 1))
    whole = fit("allreduce", loss=loss, epochs=epochs)[0]
    for ours, theirs in zip(weights(resumed), weights(whole), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_gradients_of_workers_that_live_never_lie_in_one_place(tmp_path: Path) -> None:
    """One worker lives all the while, and the other one dies so often that seats begin again where it sits."""
    plan = FaultPlan().ledger(tmp_path)
    joined: list[int] = []

    def deadly(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        deadly.calls += 1  # type: ignore[attr-defined]
        if deadly.calls == 2 and Path(os.readlink("/proc/self/fd/1")).stem != "worker-0":  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)
        return slowly(model, batch)

    deadly.calls = 0  # type: ignore[attr-defined]

    def look(event: AnyEvent) -> shoal.Stop | None:
        if isinstance(event, shoal.Regrouped):
            assert 0 in event.workers
            joined.extend(event.joined)
        return shoal.Stop() if isinstance(event, shoal.StepDone) and len(joined) > 13 else None

    trainer, seen = make(loss=deadly, min_workers=1, faults=plan, epochs=300, callbacks=[look])
    steps = trainer.fit().steps
    assert joined[:14] == [*range(2, 12), *range(1, 5)], "each in its turn, but for that of worker 0"
    assert_whole(tmp_path, seen, steps)


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_the_coordinator_ends_and_nobody_waits_for_it(how: str, tmp_path: Path) -> None:
    """It decides who there is. What is computed and applied, the clerk says: the steps go on meanwhile."""
    plan = FaultPlan().ledger(tmp_path)
    (plan.kill if how == "kill" else plan.stop)("coordinator", step=CALM_STEPS + 1)
    for step in range(CALM_STEPS + 3, STEPS):
        plan.kill("worker-1", step=step)  # in the first of these that it computes something of
    trainer, _, seen = fit(faults=plan)
    assert len(plan.fired()) == 2
    assert seen.steps == list(range(1, STEPS + 1))
    assert_whole(tmp_path, seen)
    assert_calm(trainer)


def test_below_the_least_number_nobody_computes(tmp_path: Path) -> None:
    """The run goes on once another one is there."""
    plan = FaultPlan().ledger(tmp_path)
    for step in range(4, STEPS):
        plan.kill("worker-1", step=step)
    trainer, _, seen = fit(min_workers=2, faults=plan)
    assert len(plan.fired()) == 1
    (change,) = seen.of(shoal.Regrouped)
    assert (change.workers, change.lost, change.joined) == ([0, 2], [1], [2])
    assert_whole(tmp_path, seen)
    assert_calm(trainer)


def test_ten_deaths_by_one_signal_end_the_run() -> None:
    """Whoever is not the first worker dies in its third forward, each time of other samples."""

    def deadly(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        deadly.calls += 1  # type: ignore[attr-defined]
        if deadly.calls == 3 and Path(os.readlink("/proc/self/fd/1")).stem != "worker-0":  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)
        return slowly(model, batch)

    deadly.calls = 0  # type: ignore[attr-defined]
    with pytest.raises(WorkerError, match="10 workers died of the same signal within 100 steps"):
        fit(loss=deadly, epochs=300)
