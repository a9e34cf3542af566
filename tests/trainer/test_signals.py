"""Runs that are stopped or killed from outside end in time, say what to do, and leave no process behind."""

from __future__ import annotations

import atexit
import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.cluster.channel.channel import INTERRUPTED, StopSignals
from shoal.core.events import AnyEvent, RunEnded, StepDone
from shoal.core.ordering import order_key
from shoal.core.permutation import Permutation
from shoal.proof.rehearse import playing

SCRIPT = textwrap.dedent(
    """
    import sys
    import time

    import torch
    from torch import nn

    import shoal
    from shoal.core.events import StepDone
    from shoal.proof.rehearse import playing

    pause, data_workers = float(sys.argv[1]), int(sys.argv[2])
    told = False
    calls = 0


    def loss(model, batch):
        global calls
        calls += playing() is None
        time.sleep(pause if calls > 1 else 0.2 * calls)
        return model(batch).square().mean()


    def tell(event):
        global told
        if isinstance(event, StepDone) and not told:
            told = True
            print("a step is done", flush=True)


    shoal.Trainer(
        nn.Linear(2, 1),
        loss,
        lambda params: torch.optim.SGD(params, lr=0.01),
        torch.randn(64, 2),
        batch_size=8,
        steps=1_000_000,
        workers=2,
        data_workers=data_workers,
        callbacks=[tell],
    ).fit()
    print("not stopped", flush=True)
    """
)


class Script:
    """A training script in a session of its own, from its first step on. What it writes goes below `folder`."""

    def __init__(self, folder: Path, *, pause: float = 0.005, data_workers: int = 0) -> None:
        self.folder = folder
        for name in ("home", "tmp"):
            (folder / name).mkdir()
        (folder / "train.py").write_text(SCRIPT)
        self.process = subprocess.Popen(
            [sys.executable, str(folder / "train.py"), str(pause), str(data_workers)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ
            | {"SHOAL_HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        first = self.process.stdout.readline()
        assert first == "a step is done\n", self.process.communicate()[1]
        self.descendants = self._lasting_descendants()

    def _lasting_descendants(self) -> list[psutil.Process]:
        """Without forks that examine the loss once more in the first epoch, which end by themselves."""
        script, before = psutil.Process(self.process.pid), None
        for _ in range(50):
            now = script.children(recursive=True)
            if now == before:
                break
            before = now
            time.sleep(0.1)
        return now

    def read_until(self, words: str) -> None:
        assert self.process.stderr is not None
        while words not in (line := self.process.stderr.readline()):
            assert line, f"stderr ended without {words!r}"

    def end(self) -> tuple[int, str]:
        """Wait for the end; the exit code and what was said."""
        out, said = self.process.communicate(timeout=10)
        assert out == ""
        return self.process.returncode, said

    def survivors(self, seconds: float) -> list[psutil.Process]:
        """Descendants that still live after so long. A zombie has ended, only its new parent has not looked yet."""
        deadline = time.monotonic() + seconds
        while (alive := [process for process in self.descendants if _lives(process)]) and time.monotonic() < deadline:
            time.sleep(0.01)
        return alive

    def kept(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "home").glob("runs/*/checkpoints/*"))


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def running(folder: Path, **settings: Any) -> Iterator[Script]:
    script = Script(folder, **settings)
    try:
        yield script
    finally:
        if script.process.poll() is None:
            script.process.kill()
        script.process.communicate(timeout=5)


@pytest.mark.parametrize(
    ("number", "to_all", "code", "named"),
    [
        pytest.param(signal.SIGINT, False, 130, "Ctrl-C", id="interrupted"),
        pytest.param(signal.SIGINT, True, 130, "Ctrl-C", id="interrupted from a terminal"),
        pytest.param(signal.SIGTERM, True, 75, "SIGTERM", id="terminated with all its processes"),
    ],
)
def test_a_signal_ends_the_run_with_a_checkpoint(
    tmp_path: Path, number: signal.Signals, to_all: bool, code: int, named: str
) -> None:
    with running(tmp_path, data_workers=1) as script:
        assert len(script.descendants) == 6, "a zygote, the coordinator, two workers, and a loader process for each"
        begun = time.monotonic()
        if to_all:
            os.killpg(script.process.pid, number)
        else:
            os.kill(script.process.pid, number)
        ended, said = script.end()
        assert time.monotonic() - begun < 3
        assert ended == code, said
        assert script.survivors(2) == []
    assert "Traceback" not in said
    assert f"{named}: stopping after the step in progress" in said
    found = re.search(rf"stopped by {named} at step (\d+), checkpointed in (\S+); go on with resume='(\S+)'", said)
    assert found, said
    assert (tmp_path / "home" / "runs" / found[3]).samefile(found[2])
    assert script.kept() == [f"step-{int(found[1]):09d}"]
    assert list((tmp_path / "tmp").glob("shoal-*")) == []


def test_what_ends_at_once_leaves_memory_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    last: list[Any] = []
    monkeypatch.setattr(atexit, "register", last.append)
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGINT)
        assert signals.asked == INTERRUPTED and last == []
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert last == [gc.freeze]


def test_a_second_interrupt_ends_the_run_at_once(tmp_path: Path) -> None:
    with running(tmp_path, pause=30.0, data_workers=1) as script:
        os.killpg(script.process.pid, signal.SIGINT)
        script.read_until("press it again to end at once")
        begun = time.monotonic()
        for _ in range(5):  # a key that is hit in anger
            os.killpg(script.process.pid, signal.SIGINT)
            time.sleep(0.01)
        code, said = script.end()
        assert time.monotonic() - begun < 2
        assert code == 130 and "Traceback" not in said
        assert "ended at once by a second Ctrl-C" in said
        assert script.survivors(2) == []
    assert script.kept() == []
    assert list((tmp_path / "tmp").glob("shoal-*")) == []


def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    with running(tmp_path, data_workers=1) as script:
        assert len(script.descendants) == 6
        script.process.kill()
        assert script.survivors(2) == []


# -- in this process ---------------------------------------------------------------------------------------------------


def square(model: nn.Module, batch: Any) -> Tensor:
    time.sleep(0.005)
    loss: Tensor = model(batch).square().mean()
    return loss


def make(**changed: Any) -> shoal.Trainer:
    given: dict[str, Any] = {
        "model": nn.Linear(2, 1),
        "loss": square,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.01),
        "data": torch.randn(64, 2),
        "batch_size": 8,
        "steps": 3,
        "workers": 2,
        "data_workers": 0,
    }
    return shoal.Trainer(**(given | changed))


@pytest.mark.parametrize(("rank", "position"), [(0, 0), (2, 7)])
def test_a_killed_worker_is_named_and_ends_the_run(tmp_path: Path, rank: int, position: int) -> None:
    """The worker is known by the sample that it computes in the first step."""
    at = 0.0
    data = torch.arange(64.0).repeat(2, 1).T
    sample = Permutation(64, order_key(0, 0)).span(position, position + 1)[0]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if (batch == sample).any() and playing() is None:
            with suppress(FileExistsError), open(tmp_path / "pid", "x") as file:
                file.write(str(os.getpid()))
        return square(model, batch / 64)

    def kill(event: AnyEvent) -> None:
        nonlocal at
        if isinstance(event, StepDone) and not at:
            at = time.monotonic()
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

    with pytest.raises(shoal.WorkerError, match=f"worker {rank} was killed by SIGKILL.*memory") as failed:
        make(loss=loss, data=data, workers=3, steps=1_000_000, data_workers=1, replace=False, callbacks=[kill]).fit()
    assert time.monotonic() - at < 3
    assert failed.value.worker == rank


@pytest.mark.parametrize(
    ("number", "kind", "code"), [(signal.SIGTERM, shoal.Preempted, 75), (signal.SIGINT, shoal.Interrupted, 130)]
)
def test_a_signal_after_the_last_step_still_ends_the_script(
    tmp_path: Path, number: signal.Signals, kind: type[shoal.Stopped], code: int
) -> None:
    handlers = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]

    def late(event: AnyEvent) -> None:
        if isinstance(event, RunEnded):
            assert event.reason == "complete"
            os.kill(os.getpid(), number)

    trainer = make(run_dir=tmp_path, callbacks=[late])
    with pytest.raises(kind) as stopped:
        trainer.fit()
    assert stopped.value.code == code
    assert "at step 3" in stopped.value.message
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert make(run_dir=tmp_path, resume="last").fit().steps == 3


def test_one_interrupt_ends_an_evaluation() -> None:
    supervisor = os.getpid()

    def interrupt(model: nn.Module, batch: Any) -> Tensor:
        os.kill(supervisor, signal.SIGINT)
        time.sleep(30)
        raise AssertionError("not ended")

    begun = time.monotonic()
    # a shell starts what it puts into the background with SIGINT ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            make(loss=interrupt, workers=1).evaluate(torch.randn(4, 2))
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begun < 3


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    handlers = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    seen: list[Any] = []

    def fit() -> None:
        watch = lambda event: seen.append(signal.getsignal(signal.SIGTERM))  # noqa: E731
        seen.append(make(callbacks=[watch]).fit().steps)

    thread = threading.Thread(target=fit)
    thread.start()
    thread.join(20)
    assert seen[-1] == 3 and set(seen[:-1]) == {handlers[0]}
