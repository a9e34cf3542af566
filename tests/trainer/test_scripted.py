"""Workers that run the script, each in a process of its own: they are replaced as forked ones are. All for real."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

pytestmark = pytest.mark.timeout(180)
DEADLINE = 120.0

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal

mode, folder, victim = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
first, seat = "RANK" not in os.environ, os.environ.get("LOCAL_RANK")
INPUTS = torch.randn(96, 6, generator=torch.Generator().manual_seed(3))
DATA = TensorDataset(INPUTS, INPUTS.sin().sum(1, keepdim=True))
STEPS = 18
events, out = [], {}


def mlp(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def loss(net, batch):
    return nn.functional.mse_loss(net(batch[0]), batch[1])


def deadly(net, batch):
    # not in a fork, where a part of the first step is computed twice
    if os.getpid() == pid and seat == victim and not (folder / "joined").exists():
        calls.append(batch)
        if (folder / "killed").exists():
            (folder / "joined").touch()
        elif len(calls) == 5:
            (folder / "killed").touch()
            os.kill(pid, signal.SIGKILL)
    waited = 0
    while (folder / "killed").exists() and not (folder / "joined").exists() and waited < 100:
        time.sleep(0.02)  # so that the new one comes before the end
        waited += 1
    return loss(net, batch)


pid, calls = os.getpid(), []


def trainer(net, **options):
    given = {"loss": loss, "batch_size": 16, "steps": STEPS, "workers": 2, "engine": "local:start=script", **options}
    return shoal.Trainer(net, given.pop("loss"), lambda params: torch.optim.AdamW(params, lr=0.01), DATA, **given)


def state(net):
    return {name: value.flatten().tolist() for name, value in net.state_dict().items()}


def replaced():
    # other weights in every process: those of the first one count
    net = mlp(1 if first else 7 + int(seat))
    result = trainer(net, loss=deadly, callbacks=[events.append]).fit()
    out.update(weights=state(net), steps=result.steps, samples=result.samples)


def refused():
    trainer(mlp(), loss=deadly, replace=False).fit()


def twice():
    net = mlp(1 if first else 7)
    run_dir = folder / f"first-{first}"  # that of the first process counts
    one = trainer(net, run_dir=run_dir).fit()
    out["one"], out["folder"] = [one.run_id, state(net)], str(one.run_dir)
    out["evaluated"] = trainer(net).evaluate(DATA)
    try:
        trainer(mlp(), loss=lambda net, batch: 1 / 0).fit()
    except shoal.WorkerError as error:
        out["failed"] = str(error)
    two = trainer(net, loss=deadly, steps=2 * STEPS, ema=0.9, callbacks=[events.append])
    out["two"] = [two.fit().run_id, state(net)]
    out["average"] = {name: value.tolist() for name, value in two.average.items()}
    out["launched"] = shoal.launch(lambda session: [session.rank, session.workers], 2, engine="local:start=script")
    out["fewer"] = shoal.launch(lambda session: session.workers, 1, engine="local:start=script")


def early():
    if not first:
        print("no data here", flush=True)
        sys.exit(3)
    trainer(mlp()).fit()


def other():
    if first:
        trainer(mlp()).fit()
    else:
        trainer(mlp()).evaluate(DATA)


def inside():
    net = mlp()
    within = trainer(net)

    def evaluates(event):
        if isinstance(event, shoal.StepDone):
            within.evaluate(DATA)

    trainer(net, callbacks=[evaluates]).fit()


def forever():
    def slowly(net, batch):
        time.sleep(0.02)
        return loss(net, batch)

    def tell(event):
        if isinstance(event, shoal.StepDone) and event.step == 3:
            print("three steps are done", flush=True)

    trainer(mlp(), loss=slowly, steps=100_000, callbacks=[tell], run_dir=folder / "run").fit()


name = "out.json" if first else f"out-{seat}-{os.getpid()}.json"
try:
    globals()[mode]()
finally:
    changes = [[getattr(event, name, []) for name in ("lost", "joined")] for event in events]
    out["events"] = [[type(event).__name__, event.step, *change] for event, change in zip(events, changes)]
    out["texts"] = [event.text for event in events if isinstance(event, shoal.Notice)]
    (folder / name).write_text(json.dumps(out))
"""


class Ran:
    """What a script left."""

    def __init__(self, folder: Path, done: subprocess.CompletedProcess[str]) -> None:
        self.folder, self.code, self.said = folder, done.returncode, done.stdout + done.stderr
        found = folder / "out.json"
        self.out: dict[str, Any] = json.loads(found.read_text()) if found.exists() else {}

    @property
    def struck(self) -> bool:
        return (self.folder / "killed").exists()

    @property
    def steps(self) -> list[int]:
        return [step for kind, step, *_ in self.out["events"] if kind == "StepDone"]

    @property
    def lost(self) -> list[int]:
        return [seat for kind, _, lost, _ in self.out["events"] if kind == "Regrouped" for seat in lost]

    @property
    def joined(self) -> list[int]:
        return [seat for kind, _, _, joined in self.out["events"] if kind == "Regrouped" for seat in joined]

    def others(self) -> list[dict[str, Any]]:
        """What was left by processes of workers that came to the end of the script."""
        return [json.loads(path.read_text()) for path in self.folder.glob("out-*.json")]


def environment(folder: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC_"))}
    return clean | {"OMP_NUM_THREADS": "1", "SHOAL_HOME": str(folder / "home"), "TMPDIR": str(folder)}


def command(folder: Path, mode: str, victim: int | None) -> list[str]:
    (folder / "train.py").write_text(SCRIPT)
    return [sys.executable, str(folder / "train.py"), mode, str(folder), str(victim)]


def ran(folder: Path, mode: str, victim: int | None = None) -> Ran:
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        command(folder, mode, victim), env=environment(folder), timeout=DEADLINE, capture_output=True, text=True
    )
    assert not list(folder.glob("shoal-*")), "a scratch folder was left"
    return Ran(folder, done)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    found = ran(tmp_path_factory.mktemp("calm"), "replaced")
    assert found.code == 0 and not found.struck, found.said
    return found


@pytest.fixture(scope="module")
def calm_twice(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    found = ran(tmp_path_factory.mktemp("calm"), "twice")
    assert found.code == 0 and not found.struck, found.said
    return found


def assert_close(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(torch.tensor(other[name]), torch.tensor(value), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_dies_is_replaced(tmp_path: Path, calm: Ran, victim: int) -> None:
    found = ran(tmp_path, "replaced", victim)
    assert found.code == 0 and found.struck, found.said
    assert found.lost == found.joined == [victim] and found.steps == list(range(1, 19))
    assert any(f"worker {victim} was killed by SIGKILL" in text for text in found.out["texts"])
    assert (found.out["steps"], found.out["samples"]) == (calm.out["steps"], calm.out["samples"])
    assert_close(calm.out["weights"], found.out["weights"])


def test_all_processes_of_the_script_have_the_same_result(calm: Ran) -> None:
    others = calm.others()
    assert len(others) == 2
    for other in others:
        assert [other[name] for name in ("weights", "steps", "samples")] == [
            calm.out[name] for name in ("weights", "steps", "samples")
        ]
        assert not other["events"]  # callbacks are for the first process


def test_where_that_is_not_wanted_a_death_ends_the_run(tmp_path: Path) -> None:
    found = ran(tmp_path, "refused", 1)
    assert found.code == 1 and found.struck
    assert "WorkerError: worker 1 was killed by SIGKILL" in found.said


def test_a_script_has_several_runs(calm_twice: Ran) -> None:
    out = calm_twice.out
    assert out["launched"] == [[0, 2], [1, 2]] and out["fewer"] == [1]
    assert "raised ZeroDivisionError" in out["failed"]
    others = calm_twice.others()
    # those of the run that failed were ended, and others have come to the end in their place
    assert len(others) == 2
    for other in others:
        for name in ("one", "folder", "evaluated", "two", "average", "launched", "fewer", "failed"):
            assert other[name] == out[name], name


@pytest.mark.parametrize("victim", [0, 1])
def test_in_a_later_run_a_worker_is_replaced_too(tmp_path: Path, calm_twice: Ran, victim: int) -> None:
    """The new process is given the outcome of the runs before, also that one of them failed."""
    found = ran(tmp_path, "twice", victim)
    assert found.code == 0 and found.struck, found.said
    assert found.lost == found.joined == [victim] and found.steps == list(range(1, 37))
    assert_close(calm_twice.out["two"][1], found.out["two"][1])
    assert_close(calm_twice.out["average"], found.out["average"])
    assert found.out["launched"] == [[0, 2], [1, 2]]


def test_a_script_that_does_not_come_to_the_run_ends_it_with_the_reason(tmp_path: Path) -> None:
    found = ran(tmp_path, "early")
    assert found.code == 1 and "no data here" in found.said
    assert "left with exit code 3 before it came to this call" in found.said


def test_workers_that_make_another_call_are_refused(tmp_path: Path) -> None:
    found = ran(tmp_path, "other")
    assert found.code == 1 and "has come to another call (Trainer.evaluate" in found.said


def test_a_callback_cannot_start_a_run(tmp_path: Path) -> None:
    found = ran(tmp_path, "inside")
    assert found.code == 1 and "while another one of this script is under way" in found.said


def processes_of(script: subprocess.Popen[str]) -> list[psutil.Process]:
    first = psutil.Process(script.pid)
    return [first, *first.children(recursive=True)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_first_process_ends_all_of_them(tmp_path: Path, number: signal.Signals) -> None:
    with open(tmp_path / "errors", "w") as errors:
        script = subprocess.Popen(
            command(tmp_path, "forever", None),
            env=environment(tmp_path),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    try:
        assert script.stdout is not None
        while (line := script.stdout.readline()) != "three steps are done\n":
            assert line, (tmp_path / "errors").read_text()
        processes = processes_of(script)
        assert len(processes) >= 5  # besides, the zygote, the coordinator, and two workers
        if number == signal.SIGINT:
            os.killpg(script.pid, number)  # as a terminal does
        else:
            script.send_signal(number)
        code = script.wait(DEADLINE)
        _, alive = psutil.wait_procs(processes, timeout=10)
        assert alive == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
        script.communicate()
    said = (tmp_path / "errors").read_text()
    expected = {signal.SIGTERM: 75, signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}
    assert code == expected[number], said
    assert "Traceback" not in said
    if number != signal.SIGKILL:
        assert said.count("checkpointed in") == 1
        assert list((tmp_path / "run" / "checkpoints").glob("step-*/manifest.json"))
