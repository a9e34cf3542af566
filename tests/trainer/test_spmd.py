"""Scripts that run once per worker: under torchrun, under srun, and started again by `fit` itself. All for real."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch

import shoal
from shoal.core.spec import Local
from shoal.engines.world import World
from shoal.trainer.workers import scripted, spmd, start

pytestmark = pytest.mark.timeout(120)
DEADLINE = 60.0

TASK = """
import json, os, sys, time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.core.events import StepDone

INPUTS = torch.randn(60, 4, generator=torch.Generator().manual_seed(3))
DATA = TensorDataset(INPUTS, INPUTS.sin().sum(1, keepdim=True))


def make(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))


def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def trainer(net, **options):
    return shoal.Trainer(
        net,
        **{
            "loss": loss,
            "optimizer": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
            "data": DATA,
            "eval_data": DATA,
            "predict": lambda model, batch: (model(batch[0]), batch[1]),
            "metrics": ["mse"],
            "batch_size": 16,
            "epochs": 2,
            "workers": 2,
            "seed": 5,
            **options,
        },
    )


def weights(net):
    return [value.flatten().tolist() for value in net.state_dict().values()]


def told(result):
    figures = [result.steps, result.samples, result.workers, result.loss, result.metrics]
    return [result.run_id, str(result.run_dir), *figures]
"""

SCRIPT = (
    TASK
    + """
mode, folder = sys.argv[1], Path(sys.argv[2])
rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
net = make(100 + rank)  # other weights on every worker
out = {}


def everything():
    plain = trainer(net, ema=0.9, run_dir=folder / "plain")
    out["plain"] = told(plain.fit())
    out["plain weights"] = weights(net)
    out["average"] = [value.flatten().tolist() for value in plain.average.values()]
    out["evaluate"] = plain.evaluate()
    out["predict"] = plain.predict(DATA).flatten().tolist()
    exact = make(100 + rank)
    out["exact"] = told(trainer(exact, deterministic=True).fit())
    out["exact weights"] = weights(exact)
    folds = shoal.cross_validate(trainer(make(100 + rank), epochs=1), folds=2)
    out["folds"] = [folds.folds, folds.mean]
    out["launch"] = shoal.launch(lambda session: [session.rank, session.workers], workers=3)
    own, _ = torch.utils.data.random_split(DATA, [40, 20], torch.Generator().manual_seed(rank))
    for name, options in (("data", {"data": own}), ("eval_data", {"eval_data": own})):
        try:
            trainer(net, **options).fit()
        except shoal.ConfigError as error:
            out[name] = str(error)


def fit():
    engine = "local:start=script" if mode == "script" else "local"
    out["fit"] = told(trainer(net, run_dir=folder / "run", engine=engine).fit())
    out["weights"] = weights(net)


def fail():
    calls = 0

    def bad_loss(model, batch):
        nonlocal calls
        calls += 1
        if rank == 1 and calls > 1:
            raise LookupError("nothing there")
        return loss(model, batch)

    trainer(net, loss=bad_loss, run_dir=folder / "run").fit()


def forever(engine="local"):
    def slowly(model, batch):
        time.sleep(0.01)
        if rank == 1 and (folder / "please-hang").exists():
            (folder / "hanging").touch()
            time.sleep(1000)
        return loss(model, batch)

    def tell(event):
        if isinstance(event, StepDone) and event.step == 3:
            print("three steps are done", flush=True)

    options = {"loss": slowly, "callbacks": [tell], "engine": engine, "run_dir": folder / "run", "eval_data": None}
    try:
        trainer(net, epochs=None, steps=100_000, **options).fit()
    except shoal.Stopped as stopped:
        out["stopped"] = [stopped.code, stopped.message]
        raise


try:
    {"all": everything, "fit": fit, "script": fit, "fail": fail, "forever": forever}.get(
        mode, lambda: forever("local:start=script")
    )()
finally:
    (folder / f"rank-{rank}.json").write_text(json.dumps(out))
"""
)


@pytest.fixture(scope="module")
def task() -> dict[str, Any]:
    """What the scripts define, for the same in this process."""
    namespace: dict[str, Any] = {}
    exec(TASK, namespace)
    return namespace


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


class Job:
    """A command with a deadline; whatever it started ends with it."""

    def __init__(self, folder: Path, command: Sequence[str], **variables: str) -> None:
        self.folder = folder
        self._errors = folder / f"stderr-{time.monotonic_ns()}"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC_"))}
        with open(self._errors, "wb") as errors:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                env=clean | {"OMP_NUM_THREADS": "1", "SHOAL_HOME": str(folder / "home"), **variables},
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        # the processes of its session, and those that torchrun has given one of their own
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def end(self) -> int:
        """Its exit code."""
        try:
            return self.process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            pytest.fail(f"not done after {DEADLINE:g} s:\n{self.said()}")

    def read(self, line: str) -> None:
        """Wait for a line on its stdout."""
        assert self.process.stdout is not None
        while (found := self.process.stdout.readline()) != f"{line}\n":
            assert found, f"ended without saying {line!r}:\n{self.said()}"

    def said(self) -> str:
        return self._errors.read_text()

    def results(self, ranks: int = 2) -> list[dict[str, Any]]:
        return [json.loads((self.folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def torchrun(folder: Path, mode: str, ranks: int = 2) -> Job:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return Job(folder, [*start, str(folder / "train.py"), mode, str(folder)])


def script(folder: Path, mode: str) -> Job:
    return Job(folder, [sys.executable, str(folder / "train.py"), mode, str(folder)])


def forked(task: dict[str, Any], run_dir: Path, **options: Any) -> tuple[shoal.Result, list[list[float]]]:
    """The same training by workers forked from here, from worker 0's weights."""
    net = task["make"](100)
    result = task["trainer"](net, run_dir=run_dir, **options).fit()
    return result, task["weights"](net)


def assert_close(found: list[list[float]], expected: list[list[float]]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-6, atol=1e-6)


def test_torchrun_does_what_forked_workers_do(folder: Path, task: dict[str, Any]) -> None:
    with torchrun(folder, "all") as job:
        assert job.end() == 0, job.said()
        first, second = job.results()
    # every worker has the whole result, down to the folder of the run
    assert first == second
    run_id, run_dir, steps, samples, workers, loss, metrics = first["plain"]
    assert (run_dir, steps, samples, workers) == (str(folder / "plain"), 8, 120, 2)
    assert json.loads((folder / "plain" / "run.json").read_text())["run_id"] == run_id
    assert Path(first["exact"][1]).is_dir()

    net = task["make"](100)
    trainer = task["trainer"](net, ema=0.9, run_dir=folder / "forked")
    result = trainer.fit()
    assert (loss, metrics) == (pytest.approx(result.loss), pytest.approx(result.metrics))
    assert_close(first["plain weights"], task["weights"](net))
    assert_close(first["average"], [value.flatten().tolist() for value in trainer.average.values()])
    assert first["evaluate"] == pytest.approx(trainer.evaluate())
    assert_close([first["predict"]], [trainer.predict(task["DATA"]).flatten().tolist()])
    assert first["exact weights"] == forked(task, folder / "exact", deterministic=True)[1]
    folds = shoal.cross_validate(task["trainer"](task["make"](100), epochs=1), folds=2)
    for found, expected in zip(first["folds"][0], folds.folds, strict=True):
        assert found == pytest.approx(expected)
    for name in ("data", "eval_data"):
        assert re.match(rf"{name}\[\d+\] is another item on worker 1 than on worker 0; each worker has", first[name])
    # the launcher's number counts, and that is said
    assert first["launch"] == [[0, 2], [1, 2]]
    assert "workers=3, but torchrun has started 2" in job.said()


def test_torchrun_shows_the_exception_of_one_worker(folder: Path) -> None:
    with torchrun(folder, "fail") as job:
        assert job.end() != 0
        said = job.said()
    assert "LookupError: nothing there" in said and "in bad_loss" in said
    assert re.search(
        r"worker \d of 2 · step \d+ · data positions \d+–\d+ of the epoch\n  at .*\.py:\d+ in bad_loss", said
    )


def test_an_item_that_a_worker_of_its_own_cannot_fetch_shows_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here Shoal's error and the user's are of one process: leaving out the frames of one must not lose the other."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
    monkeypatch.setattr(spmd, "_store", None)

    class Torn(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            raise OSError("torn")

    with pytest.raises(shoal.DataError) as caught:
        shoal.Trainer(
            torch.nn.Linear(1, 1), lambda model, batch: batch.sum(), torch.optim.SGD, Torn(), batch_size=4
        ).fit()
    assert "in __getitem__" in str(caught.value.worker_traceback)
    assert "worker 0 of 1 · step 1" in caught.value.__notes__[0] and "OSError: torn" in caught.value.__notes__[0]


def test_sigterm_to_torchrun_checkpoints_and_the_run_goes_on_elsewhere(folder: Path, task: dict[str, Any]) -> None:
    with torchrun(folder, "forever") as job:
        job.read("three steps are done")
        job.process.terminate()
        job.end()
        ends = [result["stopped"] for result in job.results()]
    assert [code for code, _ in ends] == [75, 75]
    assert "stopped by SIGTERM" in ends[0][1] and "resume='last'" in ends[0][1]
    (checkpoint,) = (folder / "run" / "checkpoints").glob("step-*")
    step = int(checkpoint.name.removeprefix("step-"))
    assert step >= 3
    options = {"epochs": None, "steps": step + 4, "eval_data": None}
    result, found = forked(task, folder / "run", resume="last", workers=3, **options)
    assert result.steps == step + 4
    assert_close(found, forked(task, folder / "whole", **options)[1])


def free_slurm_variables() -> dict[str, str]:
    """Those of a job whose derived port is free here."""
    while True:
        variables = {"SLURM_JOB_ID": str(random.randrange(10**6)), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}
        variables |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_JOB_NUM_NODES": "1"}
        world = World.detect(variables | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
        assert world is not None
        with socket.socket() as probe:
            try:
                probe.bind((world.address, world.port))
            except OSError:
                continue
        return variables


def test_tasks_of_srun_find_each_other(folder: Path, task: dict[str, Any]) -> None:
    variables = free_slurm_variables()
    command = [sys.executable, str(folder / "train.py"), "fit", str(folder)]
    with (
        Job(folder, command, SLURM_PROCID="1", SLURM_LOCALID="1", **variables) as one,
        Job(folder, command, SLURM_PROCID="0", SLURM_LOCALID="0", **variables) as zero,
    ):
        assert (zero.end(), one.end()) == (0, 0), zero.said() + one.said()
        first, second = zero.results()
    assert first == second
    assert_close(first["weights"], forked(task, folder / "forked")[1])


def test_a_script_starts_itself_once_per_worker(folder: Path, task: dict[str, Any]) -> None:
    with script(folder, "script") as job:
        assert job.end() == 0, job.said()
        first, second = job.results()
    assert first == second
    assert_close(first["weights"], forked(task, folder / "forked")[1])


def runs(process: psutil.Process, script: str) -> bool:
    """Not so what a worker starts for a moment, as `git` to ask for the commit."""
    try:
        return any(word.endswith(script) for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def test_a_script_and_its_workers_end_together(folder: Path) -> None:
    with script(folder, "forever itself") as job:
        job.read("three steps are done")
        first = psutil.Process(job.process.pid)
        processes = [first, *(each for each in first.children(recursive=True) if runs(each, "train.py"))]
        assert len(processes) == 5  # besides, the zygote, the coordinator, and two workers
        # busy with its own things, a worker would not notice by itself that its supervisor is gone
        (folder / "please-hang").touch()
        deadline = time.monotonic() + DEADLINE
        while not (folder / "hanging").exists():
            assert time.monotonic() < deadline, job.said()
            time.sleep(0.01)
        first.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(processes[1:], timeout=10)
        assert alive == []
        job.end()


@pytest.mark.parametrize("program", ["-c", "kernel.py"])
def test_without_a_file_there_is_no_script_to_start(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -c`, and a notebook: its kernel is a file, but not the one whose code runs."""
    (tmp_path / "kernel.py").touch()
    monkeypatch.setattr(sys, "argv", [program if program == "-c" else str(tmp_path / program)])
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    begun = time.monotonic()
    with pytest.raises(shoal.ConfigError, match=r"not started from a file.*engine='local:start=fork'"):
        shoal.launch(lambda session: None, 2, engine="local:start=script")
    assert time.monotonic() - begun < 3.0


# -- what is decided before the workers meet ---------------------------------------------------------------------------


def test_a_worker_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spmd, "_store", None)
    monkeypatch.setattr(spmd, "_MEETING_TIMEOUT", timedelta(seconds=0.3))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    world = World(rank=0, size=3, local_rank=0, address="127.0.0.1", port=port, launcher="slurm")
    with pytest.raises(shoal.GroupError, match=rf"worker 0 of 3 .*127.0.0.1:{port} \(workers 1, 2 did not come\)"):
        spmd._meet(world, 1)


def test_nobody_serves_where_worker_0_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spmd, "_store", None)
    monkeypatch.setattr(spmd, "_MEETING_TIMEOUT", timedelta(seconds=0.3))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    world = World(rank=1, size=2, local_rank=0, address="127.0.0.1", port=port, launcher="slurm")
    with pytest.raises(shoal.GroupError, match=r"worker 1 of 2 could not meet .*; check MASTER_ADDR and MASTER_PORT"):
        spmd._meet(world, 1)


def test_workers_that_found_other_checkpoints_are_refused() -> None:
    class Two:
        """A session whose other worker found nothing."""

        def gather_for(self, purpose: str, value: Any) -> list[Any]:
            return [value, None]

    class Found:
        path = Path("step-000000007")

    session: Any = Two()
    loaded: Any = Found()
    spmd._refuse_other_checkpoints(session, None)
    with pytest.raises(shoal.CheckpointError, match=r"worker 0: step-000000007, worker 1: none.*all share"):
        spmd._refuse_other_checkpoints(session, loaded)


def test_with_cuda_there_is_a_worker_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert start.default_workers(Local()) == start.default_workers(Local(start="script")) == 3
    assert start.default_workers(Local(start="fork")) == len(os.sched_getaffinity(0))
    assert scripted.device_of(2) == torch.device("cuda", 2) and scripted.device_of(4) == torch.device("cuda", 1)
    with pytest.raises(shoal.ConfigError, match="4 workers, and this machine has 3 GPUs"):
        scripted.refuse_without_gpu(4)
    world = World(rank=5, size=8, local_rank=2, address="", port=1, launcher="torchrun")
    assert spmd._device(world) == torch.device("cuda", 2)
    with pytest.raises(shoal.ConfigError, match=r"worker 5 has no GPU: it is number 4 on its machine, which has 3"):
        spmd._device(replace(world, local_rank=3))
