"""Runs whose workers die, stop, leave and join: they end where the calm run ends, and no sample is lost or doubled."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.comm.shm.group import ShmGroup
from shoal.core.atoms import Course
from shoal.core.errors import ConfigError, WorkerError
from shoal.core.events import AnyEvent
from shoal.syncs.allreduce import BucketExchange
from shoal.testing import FaultPlan, audit
from shoal.testing.lab import Lab, why_no_lab

SAMPLES, BATCH, EPOCHS = 320, 32, 2
STEPS = SAMPLES // BATCH * EPOCHS


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
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def slowly(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Long enough for a replacement to come before the run is over."""
    time.sleep(0.01)
    return loss(model, batch)


@dataclass
class Seen:
    """What the watchers of a run were told."""

    events: list[AnyEvent] = field(default_factory=list)

    def __call__(self, event: AnyEvent) -> None:
        self.events.append(event)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def steps(self) -> list[int]:
        return [event.step for event in self.of(shoal.StepDone)]

    @property
    def notices(self) -> str:
        return "\n".join(event.text for event in self.of(shoal.Notice))

    def pids(self, worker: int) -> set[int]:
        return {event.pid for event in self.of(shoal.WorkerSeen) if event.worker == worker}


def fit(model: Callable[[], nn.Module] = plain, **options: Any) -> tuple[shoal.Trainer, shoal.Result, Seen]:
    seen = Seen()
    options.setdefault("workers", 4)
    options.setdefault("eval_data", Points(64))
    options.setdefault("epochs", EPOCHS)
    callbacks = [seen, *options.pop("callbacks", [])]
    trainer = shoal.Trainer(
        model,
        options.pop("loss", slowly),
        options.pop("optimizer", lambda params: torch.optim.AdamW(params, lr=1e-2)),
        Points(),
        batch_size=options.pop("batch_size", BATCH),
        seed=5,
        callbacks=callbacks,
        **options,
    )
    return trainer, trainer.fit(), seen


def weights(trainer: shoal.Trainer) -> list[Tensor]:
    return [tensor.detach() for tensor in trainer.model.state_dict().values()]


def assert_same(one: shoal.Trainer, other: shoal.Trainer) -> None:
    for ours, theirs in zip(weights(one), weights(other), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def assert_whole(folder: Path, steps: int = STEPS, *, deterministic: bool = False) -> None:
    found = audit(folder, Course(SAMPLES, BATCH), steps, deterministic=deterministic)
    assert not found.problems, "\n".join(found.problems)


_calm: dict[Any, shoal.Trainer] = {}


def calm(model: Callable[[], nn.Module] = plain, **options: Any) -> shoal.Trainer:
    """The same run with nothing going wrong, on the usual path for a fixed number of workers."""
    key = model, frozenset(options.items())
    if key not in _calm:
        _calm[key] = fit(model, loss=loss, workers=2, **options)[0]
    return _calm[key]


@pytest.mark.parametrize("point", ["compute", "exchange", "bucket", "decide", "commit"])
def test_survivors_finish_the_step(point: str, tmp_path: Path) -> None:
    plan = FaultPlan().kill("worker-1", step=4, at=point).kill("worker-0", step=11, at=point).ledger(tmp_path)
    trainer, result, seen = fit(dropping, min_workers=1, faults=plan)
    assert len(plan.fired()) == 2
    assert result.steps == STEPS and seen.steps == list(range(1, STEPS + 1))
    assert_whole(tmp_path)
    assert_same(trainer, calm(dropping))
    assert len(seen.pids(2)) == len(seen.pids(3)) == 1, "a survivor was restarted"
    assert "worker 1 was killed by SIGKILL" in seen.notices
    lost = [event.lost for event in seen.of(shoal.Regrouped)]
    assert [1] in lost and [0] in lost


@pytest.mark.parametrize("point", ["evaluate", "checkpoint", "recover", "copy"])
def test_a_death_at_a_rare_moment(point: str, tmp_path: Path) -> None:
    """In an evaluation, a checkpoint, a recovery; and of the worker that others copy from."""
    plan = (
        FaultPlan().kill("worker-0", step=4, at=point).kill("worker-2", step=13, at=point).ledger(tmp_path / "ledger")
    )
    if point in ("recover", "copy"):
        plan.kill("worker-3", step=3).kill("worker-1", step=11)
    trainer, result, seen = fit(
        dropping, min_workers=1, faults=plan, eval_every=5, checkpoint_every=3, run_dir=tmp_path / "run"
    )
    assert len(plan.fired()) >= (1 if point == "checkpoint" else 2)  # only worker 0 checkpoints, whoever that is
    assert result.steps == STEPS and seen.steps == list(range(1, STEPS + 1))
    assert [event.step for event in seen.of(shoal.EvalDone)] == list(range(5, STEPS + 1, 5))
    assert_whole(tmp_path / "ledger")
    assert_same(trainer, calm(dropping))
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.is_dir())
    assert any(str(STEPS) in name for name in saved), saved


def test_deterministic_runs_stay_bitwise_equal(tmp_path: Path) -> None:
    plan = FaultPlan().kill("worker-1", step=3, at="exchange").kill("worker-0", step=8).ledger(tmp_path)
    trainer, _, _ = fit(dropping, min_workers=1, deterministic=True, faults=plan)
    assert len(plan.fired()) == 2
    assert_whole(tmp_path, deterministic=True)
    for ours, theirs in zip(weights(trainer), weights(calm(dropping, deterministic=True)), strict=True):
        assert torch.equal(ours, theirs)


def test_two_at_once(tmp_path: Path) -> None:
    plan = FaultPlan().kill("worker-1", step=6, at="exchange").kill("worker-2", step=6, at="exchange").ledger(tmp_path)
    trainer, _, seen = fit(min_workers=1, faults=plan)
    assert len(plan.fired()) == 2 and seen.steps == list(range(1, STEPS + 1))
    assert_whole(tmp_path)
    assert_same(trainer, calm())


def with_everything() -> nn.Module:
    net = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    net.register_buffer("passing", torch.zeros(3), persistent=False)
    return net


def test_all_state_reaches_a_joiner(tmp_path: Path) -> None:
    """Momentum, schedule, average, statistics of BatchNorm: with deterministic atoms all of it is bitwise the same."""

    def schedule(optimizer: torch.optim.Optimizer, steps: int) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=steps)

    options: dict[str, Any] = {"schedule": schedule, "ema": 0.9, "clip": 1.0, "deterministic": True}
    options["optimizer"] = lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)
    plan = FaultPlan().kill("worker-1", step=3).ledger(tmp_path)
    for step, name in ((9, "worker-0"), (12, "worker-2"), (15, "worker-3")):
        plan.kill(name, step=step, at="exchange")  # in the end only joiners are left
    trainer, _, _ = fit(with_everything, min_workers=1, faults=plan, **options)
    assert len(plan.fired()) == 4
    assert_whole(tmp_path, deterministic=True)
    quiet = fit(with_everything, workers=2, **options)[0]
    for ours, theirs in zip(weights(trainer), weights(quiet), strict=True):
        assert torch.equal(ours, theirs)
    assert trainer.average is not None and quiet.average is not None
    for name, value in trainer.average.items():
        assert torch.equal(value, quiet.average[name])


def test_growing_and_shrinking_twice_in_an_epoch(tmp_path: Path) -> None:
    wanted = [4, 1, 4, 1]
    sizes: list[int] = []
    changed = tmp_path / "changed"
    asked = 0

    def scale(event: AnyEvent) -> shoal.Scale | None:
        """Asks for the next number of workers once there are as many as were asked for last."""
        nonlocal asked
        if isinstance(event, shoal.Regrouped):
            sizes.append(len(event.workers))
            if asked and sizes[-1] == wanted[0]:
                wanted.pop(0)
                asked = 0
        if not wanted:
            changed.touch()
        if asked or not wanted or not isinstance(event, shoal.StepDone):
            return None
        asked = wanted[0]
        return shoal.Scale(asked)

    def patient_loss(model: nn.Module, batch: Any) -> Tensor:
        # processes have to start meanwhile
        time.sleep(0.0 if changed.exists() else 0.1)
        return loss(model, batch)

    plan = FaultPlan().ledger(tmp_path / "ledger")
    seen = Seen()
    trainer = shoal.Trainer(
        plain,
        patient_loss,
        lambda params: torch.optim.AdamW(params, lr=1e-2),
        Points(),
        batch_size=8,
        seed=5,
        epochs=1,
        workers=1,
        min_workers=1,
        max_workers=4,
        faults=plan,
        callbacks=[seen, scale],
    )
    trainer.fit()
    assert seen.steps == list(range(1, 41))
    assert not wanted, (wanted, sizes)
    found = audit(tmp_path / "ledger", Course(SAMPLES, 8), 40)
    assert not found.problems, "\n".join(found.problems)
    quiet = shoal.Trainer(
        plain, loss, lambda params: torch.optim.AdamW(params, lr=1e-2), Points(), batch_size=8, seed=5, workers=2
    )
    quiet.fit()
    assert_same(trainer, quiet)


def test_a_stopped_worker_is_noticed_and_replaced(tmp_path: Path) -> None:
    plan = FaultPlan().stop("worker-2", step=5).ledger(tmp_path)
    begun = time.monotonic()
    trainer, _, seen = fit(min_workers=1, faults=plan)
    assert time.monotonic() - begun < 15
    assert seen.steps == list(range(1, STEPS + 1))
    assert "worker 2" in seen.notices and "stopped" in seen.notices
    assert_whole(tmp_path)
    assert_same(trainer, calm())


def test_a_worker_that_holds_the_interpreter_is_slow_not_dead(tmp_path: Path) -> None:
    plan = FaultPlan().slow("worker-1", step=5, seconds=4.0, hold=True).ledger(tmp_path)
    _, _, seen = fit(min_workers=1, faults=plan)
    assert len(plan.fired()) == 1
    assert not seen.of(shoal.Regrouped), "somebody was killed for being slow"
    assert all(len(seen.pids(worker)) == 1 for worker in range(4))


@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_coordinator_may_be_killed(times: int, tmp_path: Path) -> None:
    plan = FaultPlan().ledger(tmp_path)
    for number in range(times):
        plan.kill("coordinator", step=3 + 2 * number)
    plan.kill("worker-1", step=5 if times == 1 else 4)
    trainer, _, seen = fit(min_workers=1, faults=plan)
    assert len(plan.fired()) == times + 1 and seen.steps == list(range(1, STEPS + 1))
    assert_whole(tmp_path)
    assert_same(trainer, calm())


def test_below_the_least_number_the_run_waits(tmp_path: Path) -> None:
    plan = FaultPlan().kill("worker-1", step=5).ledger(tmp_path)
    trainer, _, seen = fit(workers=2, min_workers=2, faults=plan)
    assert seen.steps == list(range(1, STEPS + 1))
    assert all(len(event.workers) == 2 for event in seen.of(shoal.Regrouped))
    assert_whole(tmp_path)
    assert_same(trainer, calm())


def test_everything_lost_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    plan = FaultPlan().kill("worker-0", step=9, at="exchange").kill("worker-1", step=9, at="exchange")
    trainer, result, seen = fit(
        workers=2, min_workers=1, restarts=1, faults=plan, checkpoint_every=4, run_dir=tmp_path / "run"
    )
    assert len(plan.fired()) == 2
    assert result.steps == STEPS and seen.steps[-1] == STEPS
    assert "going on from step 8" in seen.notices
    assert_same(trainer, calm())


def test_everything_lost_without_restarts_is_an_error(tmp_path: Path) -> None:
    plan = FaultPlan().kill("worker-0", step=2, at="exchange").kill("worker-1", step=2, at="exchange")
    with pytest.raises(WorkerError, match="lost") as caught:
        fit(workers=2, min_workers=1, restarts=0, faults=plan)
    assert "worker 0 was killed by SIGKILL in step 3" in str(caught.value)


def test_an_exception_of_user_code_ends_the_run_with_its_traceback() -> None:
    def broken(model: nn.Module, batch: Any) -> Tensor:
        if os.getpid() % 2 >= 0 and batch[0].shape[0] and torch.is_grad_enabled():
            broken.count += 1  # type: ignore[attr-defined]
            if broken.count == 4:  # type: ignore[attr-defined]
                raise RuntimeError("a bad idea of mine")
        return loss(model, batch)

    broken.count = 0  # type: ignore[attr-defined]
    with pytest.raises(WorkerError, match="a bad idea of mine") as caught:
        fit(loss=broken, min_workers=1)
    assert "in broken" in str(caught.value.worker_traceback)


def test_a_stop_at_an_evaluation_that_a_joiner_takes_part_in(tmp_path: Path) -> None:
    """It finds the evaluation missed, and must not begin the step that the others do not take any more."""
    held = {"evaluated": 0}

    def stop(event: AnyEvent) -> shoal.Stop | None:
        return shoal.Stop() if isinstance(event, shoal.EvalDone) and event.step == 10 else None

    def waits(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if not torch.is_grad_enabled():
            time.sleep(0.1)  # long enough for the replacement to be there before the evaluation is done again
            held["evaluated"] += 1
        return slowly(model, batch)

    plan = FaultPlan().kill("worker-1", step=8, at="exchange").kill("worker-2", step=9, at="evaluate")
    _, result, seen = fit(
        loss=waits, workers=3, min_workers=3, faults=plan, eval_every=10, callbacks=[stop], run_dir=tmp_path / "run"
    )
    assert len(plan.fired()) == 2
    assert result.stopped == "a callback asked for it" and result.steps == 10
    assert seen.steps == list(range(1, 11))
    assert [event.step for event in seen.of(shoal.EvalDone)] == [10]
    assert (tmp_path / "run" / "checkpoints" / "step-000000010").is_dir()


@pytest.mark.parametrize("step", [0, 1])
def test_one_that_is_overtaken_in_the_first_steps(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 0 has applied the step, worker 2 has died with it, and worker 1 is late: it may have to copy the result.

    It comes late to the exchange, so that it can do its part at once, and later still to the end of it.
    """
    start, finish = BucketExchange.finish, ShmGroup._finish
    waited: list[int] = []

    def late_start(self: BucketExchange, *vectors: Any) -> tuple[Tensor, Tensor]:
        waited.append(0)
        if self._buckets._group.rank == 1 and len(waited) == step + 1:
            time.sleep(0.3)
        return start(self, *vectors)

    def late_end(self: ShmGroup, work: Any) -> None:
        if self.rank == 1 and len(waited) == step + 1:
            time.sleep(0.5)
        finish(self, work)

    monkeypatch.setattr(BucketExchange, "finish", late_start)
    monkeypatch.setattr(ShmGroup, "_finish", late_end)
    plan = FaultPlan().kill("worker-2", step=step, at="decide").ledger(tmp_path)
    trainer, _, seen = fit(workers=3, min_workers=1, faults=plan)
    assert len(plan.fired()) == 1 and seen.steps == list(range(1, STEPS + 1))
    assert_whole(tmp_path)
    assert_same(trainer, calm())


def test_the_best_checkpoint_is_not_lost_with_the_worker_that_saves_it(tmp_path: Path) -> None:
    plan = FaultPlan().kill("worker-0", step=9, at="checkpoint")
    _, _, seen = fit(
        workers=3, min_workers=1, faults=plan, eval_every=10, checkpoint_every=1000, run_dir=tmp_path / "run"
    )
    assert len(plan.fired()) == 1
    best = min(seen.of(shoal.EvalDone), key=lambda event: event.metrics["loss"])
    told = [event for event in seen.of(shoal.CheckpointSaved) if event.best]
    assert told and told[-1].step == best.step
    assert any(event.step == 10 for event in told), "that of the first evaluation, which worker 0 died with"


def test_what_was_thawed_is_thawed_on_a_joiner(tmp_path: Path) -> None:
    def frozen() -> nn.Module:
        net = plain()
        net[0].requires_grad_(False)
        return net

    def thaws(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        if torch.is_grad_enabled():
            thaws.calls += 1  # type: ignore[attr-defined]
            if thaws.calls == 6:  # type: ignore[attr-defined]
                model[0].requires_grad_(True)
        return slowly(model, batch)

    thaws.calls = 0  # type: ignore[attr-defined]
    options: dict[str, Any] = {"loss": thaws, "optimizer": lambda params: torch.optim.SGD(params, lr=0.1)}
    plan = FaultPlan().kill("worker-1", step=10).ledger(tmp_path)
    trainer, _, seen = fit(frozen, workers=3, min_workers=1, faults=plan, **options)
    assert len(plan.fired()) == 1 and seen.steps == list(range(1, STEPS + 1))
    assert_whole(tmp_path)
    for workers in (1, 3):
        thaws.calls = 0  # type: ignore[attr-defined]
        assert_same(trainer, fit(frozen, workers=workers, **options)[0])


def test_a_replacement_that_never_starts_does_not_keep_a_run_that_is_done() -> None:
    made = mmap.mmap(-1, 1)

    def optimizer(params: Any) -> torch.optim.Optimizer:
        made[0] += 1
        if made[0] == 4:
            time.sleep(1000)
        return torch.optim.SGD(params, lr=0.1)

    plan = FaultPlan().kill("worker-1", step=5)
    begun = time.monotonic()
    _, result, _ = fit(optimizer=optimizer, workers=3, min_workers=1, faults=plan)
    assert result.steps == STEPS and made[0] == 4
    assert time.monotonic() - begun < 20


def test_two_deaths_on_the_same_atoms_name_the_samples() -> None:
    def poisonous(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if torch.is_grad_enabled() and bool((batch[0] == Points().x[17]).all(1).any()):
            os.kill(os.getpid(), signal.SIGKILL)
        return slowly(model, batch)

    with pytest.raises(WorkerError, match="positions") as caught:
        fit(loss=poisonous, min_workers=1)
    assert caught.value.positions is not None and caught.value.step is not None
    first, last = caught.value.positions
    assert 0 <= first <= last < SAMPLES
    assert "data[17]" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 2, "min_workers": 3}, "min_workers=3 is more than workers=2"),
        ({"workers": 2, "min_workers": 2, "max_workers": 1}, "min_workers=2 is more than max_workers=1"),
        ({"workers": 3, "max_workers": 2}, "max_workers=2 is less than workers=3"),
        ({"workers": 2, "min_workers": 0}, "min_workers"),
        ({"workers": 2, "max_workers": 10**6}, "outside"),
        ({"workers": 2, "restarts": -1}, "restarts"),
        ({"workers": 2, "min_workers": 1.5}, "min_workers"),
    ],
)
def test_bad_bounds_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fit(**options)


SCRIPT = """
    import sys, time, torch
    from torch import nn
    import shoal
    from tests.trainer.test_elastic import Points, plain, loss

    def slow(model, batch):
        time.sleep(0.05)
        return loss(model, batch)

    def tell(event):
        if isinstance(event, shoal.StepDone):
            print("step", event.step, flush=True)

    shoal.Trainer(
        plain, slow, lambda params: torch.optim.SGD(params, lr=0.1), Points(), batch_size=8, epochs=50, workers=3,
        min_workers=1, run_dir=sys.argv[1], callbacks=[tell],
    ).fit()
"""


def start_script(folder: Path) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "SHOAL_PROGRESS": "quiet"}
    return subprocess.Popen(
        [sys.executable, str(script), str(folder / "run")], stdout=subprocess.PIPE, text=True, env=environment
    )


def await_step(process: subprocess.Popen[str], step: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.split() == ["step", str(step)]:
            return
    raise AssertionError("the script ended early")


def test_when_the_supervisor_is_killed_workers_checkpoint_and_end(tmp_path: Path) -> None:
    process = start_script(tmp_path)
    try:
        await_step(process, 5)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 5  # zygote, coordinator, workers
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(family, timeout=15)
        assert not alive, alive
    finally:
        process.kill()
        process.communicate()
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.is_dir()]
    assert saved, "nothing was checkpointed"


def test_sigterm_ends_an_elastic_run_with_a_checkpoint(tmp_path: Path) -> None:
    process = start_script(tmp_path)
    try:
        await_step(process, 4)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 75
    assert any(path.is_dir() for path in (tmp_path / "run" / "checkpoints").iterdir())


def test_where_nobody_is_replaced_a_long_wait_is_told(tmp_path: Path) -> None:
    """That a process is stopped; and who waits for whom, where, with the waiting worker's stack."""
    stopped: list[int] = []

    def stop_one(event: AnyEvent) -> None:
        if isinstance(event, shoal.StepDone) and event.step >= 8 and not stopped and told.pids(1):
            stopped.extend(told.pids(1))
            (tmp_path / str(stopped[0])).touch()
        if isinstance(event, shoal.Notice) and "has waited" in event.text:
            os.kill(stopped[0], signal.SIGCONT)

    def loss_that_may_stop(model: nn.Module, batch: Any) -> Tensor:
        time.sleep(0.15)
        asked = tmp_path / str(os.getpid())
        if asked.exists():
            asked.unlink()
            os.kill(os.getpid(), signal.SIGSTOP)  # not in an exchange, where it would be one that waits itself
        return loss(model, batch)

    told = Seen()
    trainer = shoal.Trainer(
        plain,
        loss_that_may_stop,
        lambda params: torch.optim.SGD(params, lr=0.1),
        Points(),
        batch_size=BATCH,
        steps=STEPS,
        workers=2,
        replace=False,
        callbacks=[told, stop_one],
    )
    trainer.fit()
    assert told.steps == list(range(1, STEPS + 1))
    assert told.of(shoal.Regrouped) == []
    texts = [notice.text for notice in told.of(shoal.Notice)]
    assert any("worker-1 stands still" in text and "The run waits for it: with replace=False" in text for text in texts)
    [text] = [text for text in texts if "has waited" in text]
    assert "worker-0 has waited" in text and "for worker-1 in step" in text and "without them" not in text
    assert "waits here:" in text and 'File "' in text


@pytest.mark.slow
@pytest.mark.skipif(why_no_lab() is not None, reason=f"no lab: {why_no_lab()}")
@pytest.mark.parametrize("pair", [("a", "b"), ("b", "c")], ids=["from the coordinator", "from a peer"])
def test_a_cut_ends_in_one_membership(pair: tuple[str, str], tmp_path: Path) -> None:
    """The coordinator is on host a, with worker 0: worker 1 loses it, and not worker 2; or worker 2, and not it."""
    with Lab(hosts=3) as lab:
        plan = FaultPlan().cut(*pair, step=10, lab=lab.name, seconds=20.0).ledger(tmp_path)
        trainer, _, seen = fit(
            loss=lambda model, batch: (time.sleep(0.3), loss(model, batch))[1],
            workers=3,
            min_workers=1,
            faults=plan,
            engine=f"local:lab={lab.name}",
            eval_data=None,
        )
    assert len(plan.fired()) == 1 and seen.steps == list(range(1, STEPS + 1))
    changes = seen.of(shoal.Regrouped)
    assert len(changes[0].workers) == 2 and len(changes[0].lost) == 1
    assert all(later.term > earlier.term for earlier, later in pairwise(changes))
    assert_whole(tmp_path)
    assert_same(trainer, calm())


@pytest.mark.slow
def test_as_many_workers_as_anybody_asks_for(tmp_path: Path) -> None:
    """64 processes on whatever this machine has, and one of them dies: 64 meet, then 63, then 64 if there is time."""
    batch, steps = 80, SAMPLES // 80 * EPOCHS
    plan = FaultPlan().kill("worker-20", step=3, at="exchange").ledger(tmp_path)
    trainer, result, seen = fit(batch_size=batch, workers=64, min_workers=1, faults=plan)
    assert len(plan.fired()) == 1
    assert result.steps == steps and seen.steps == list(range(1, steps + 1))
    found = audit(tmp_path, Course(SAMPLES, batch), steps, deterministic=False)
    assert not found.problems, "\n".join(found.problems)
    changes = seen.of(shoal.Regrouped)
    assert changes[0].lost == [20] and len(changes[0].workers) == 63
    assert {event.worker for event in seen.of(shoal.WorkerSeen)} == set(range(64))
    assert_same(trainer, calm(batch_size=batch))
