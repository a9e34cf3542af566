"""What the run store costs: to read when it is large, and to write while a run goes on.

examples
  python benchmarks/store.py fill --folder big        a store of 1,000 runs with 10,000 steps each
  python benchmarks/store.py read --folder big        how long `shoal runs` and `shoal show RUN` take with it
  python benchmarks/store.py cost                     steps per second with a store and without
"""

from __future__ import annotations

import argparse
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from ratios import FEWEST, median_interval

TARGET_SECONDS = 0.5
COST_TARGET = 0.01
BATCH, WIDTH, ITEMS = 64, 64, 6400
WINDOW_SECONDS, SETTLE_SECONDS = 4.0, 1.5


def fill(folder: Path, runs: int, steps: int) -> None:
    from shoal.store.store import Store

    os.environ["SHOAL_HOME"] = str(folder)
    begun = time.perf_counter()
    with Store.open() as store:
        for number in range(runs):
            _fill_run(store, number, steps)
            if number % 100 == 99:
                print(f"{number + 1} runs after {time.perf_counter() - begun:.0f} s", flush=True)
    print(f"{runs} runs of {steps} steps: {_size(folder) / 1e6:.0f} MB, {time.perf_counter() - begun:.0f} s")


def _fill_run(store: object, number: int, steps: int) -> None:
    """As a recorder writes it, but for the steps, which go to the driver without being events first."""
    from shoal.core.events import CheckpointSaved, EvalDone, RunStarted, WorkerSeen
    from shoal.core.settings import Setting
    from shoal.core.traffic import Flow, Traffic
    from shoal.store.environment import environment
    from shoal.store.values import NewRun, RunEnd
    from shoal.store.writing import RunWriter

    now = time.time()
    config = {f"setting_{place}": Setting(place * 1.5, "default") for place in range(30)}
    new = NewRun(
        id=f"{number:04d}-{random.Random(number).randrange(16**6):06x}",
        name=f"experiment-{number % 50}",
        created=now - 3600 * (1000 - number),
        workers=4,
        run_dir=f"runs/{number}",
        script="train.py",
        command=["train.py", "--rate", "0.1"],
        config=config,
        environment=environment(),
    )
    writer = RunWriter(store, new)  # type: ignore[arg-type]
    writer.begin()
    shape = dict(workers=4, total_steps=steps, steps_per_epoch=steps // 10, samples_per_epoch=steps * 3, batch_size=32)
    events = [RunStarted(step=0, run_id=new.id, run_dir=new.run_dir, **shape)]
    for epoch in range(10):
        at = (epoch + 1) * steps // 10
        events.append(EvalDone(step=at, epoch=epoch, metrics={"accuracy": 0.5 + epoch / 25}))
        events.append(CheckpointSaved(step=at, path=f"runs/{number}/checkpoints/{at}", best=epoch == 9))
    for worker in range(4):
        seconds = {"compute": 80.0, "exchange": 10.0, "data": 5.0}
        account = Traffic([Flow("gradient", "none", "memory", 10**9, steps * 24)], steps * 13, 12.0, 10.0)
        events.append(WorkerSeen(step=steps, worker=worker, samples=steps * 8, seconds=seconds, traffic=account))
    writer.write(events, RunEnd(status="complete", step=steps, loss=0.1, metrics={"accuracy": 0.9}))
    marks = f"INSERT INTO shoal_steps VALUES ({', '.join('?' * 14)})"
    key = writer.key
    sent = (10**5, 24, 13, 0.0012, 0.0010)
    rows = [
        (key, step, now + step * 0.01, step * 10 // steps, math.exp(-step / steps) + 0.1, 32, 0.1, 1.0, None, *sent)
        for step in range(1, steps + 1)
    ]
    with store.writing() as connection:  # type: ignore[attr-defined]
        connection.exec_driver_sql(marks, rows)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("shoal.db*"))


def read(folder: Path, rounds: int) -> None:
    from shoal.store.store import Store

    os.environ["SHOAL_HOME"] = str(folder)
    with Store.open(create=False) as store:
        listed = store.runs()
        some = listed[len(listed) // 2].id
    print(f"{len(listed)} runs, {_size(folder) / 1e6:.0f} MB; medians of {rounds}, lowest .. highest")
    _report("Store.open + runs(limit=50)", _timed(_list, rounds))
    _report("Store.open + find, steps(most=200), events, ...", _timed(lambda: _show(some), rounds))
    _report("import of SQLAlchemy alone", _timed(lambda: _command("-c", "import sqlalchemy"), rounds))
    _report("shoal --version", _timed(lambda: _command("-m", "shoal.cli", "--version"), rounds))
    _report("shoal runs", _timed(lambda: _command("-m", "shoal.cli", "runs"), rounds), TARGET_SECONDS)
    _report("shoal show RUN", _timed(lambda: _command("-m", "shoal.cli", "show", some), rounds), TARGET_SECONDS)


def _list() -> None:
    from shoal.store.store import Store

    with Store.open(create=False) as store:
        store.runs(limit=50)


def _show(run: str) -> None:
    from shoal.store.store import Store

    with Store.open(create=False) as store:
        found = store.find(run)
        store.steps(found.id, most=200)
        store.events(found.id)
        store.checkpoints(found.id)
        store.workers(found.id)


def _command(*arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{arguments} failed: {done.stderr[-2000:]}")


def _timed(action: Callable[[], None], rounds: int) -> list[tuple[float, float]]:
    """Wall time and CPU time, children included. The second says what the first would be on an idle machine."""
    action()  # what is read once is in memory then, as it is for a person who looks twice
    times = []
    for _ in range(rounds):
        begun, used = time.perf_counter(), sum(os.times()[:4])
        action()
        times.append((time.perf_counter() - begun, sum(os.times()[:4]) - used))
    return times


def _report(what: str, times: list[tuple[float, float]], target: float | None = None) -> None:
    walls = [wall * 1e3 for wall, _ in times]
    cpu = np.mean([cpu * 1e3 for _, cpu in times])  # a mean: the clock of CPU time ticks every 10 ms
    aim = f"  (target < {target} s)" if target else ""
    print(f"  {what:<48} {np.median(walls):7.1f} ms   {min(walls):.1f} .. {max(walls):.1f}   CPU {cpu:.1f} ms{aim}")


def cost(rounds: int) -> None:
    """One training whose steps are recorded in every other window of time: whatever else changes, changes for both."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    from shoal import Stop, Trainer
    from shoal.core.events import AnyEvent, StepDone
    from shoal.store.recorder import Recorder

    times: list[float] = []
    record = Recorder.__call__

    def record_in_turns(recorder: Recorder, event: AnyEvent) -> None:
        if not isinstance(event, StepDone) or _window(event.time, times) % 2:
            record(recorder, event)

    def note(event: AnyEvent) -> Stop | None:
        if isinstance(event, StepDone):
            times.append(event.time)
            return Stop() if _window(event.time, times) >= 2 * rounds + 2 else None
        return None

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 10))
    data = TensorDataset(torch.randn(ITEMS, WIDTH), torch.randint(10, (ITEMS,)))
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        os.environ |= {"SHOAL_HOME": folder, "SHOAL_PROGRESS": "quiet"}
        os.environ.pop("SHOAL_STORE", None)
        Recorder.__call__ = record_in_turns  # type: ignore[method-assign]
        Trainer(
            model,
            loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            data=data,
            workers=2,
            batch_size=BATCH,
            steps=10**9,
            run_dir=Path(folder) / "run",
            callbacks=[note],
        ).fit()
        recorded = _recorded(Path(folder))
    _print_cost(_rates(times, rounds), recorded, len(times))


def _window(when: float, times: Sequence[float]) -> int:
    return int((when - times[0]) / WINDOW_SECONDS) if times else 0


def _rates(times: Sequence[float], rounds: int) -> dict[str, list[float]]:
    """Steps per second in each window, without its beginning, in which what came before may still be written."""
    rates: dict[str, list[float]] = {"none": [], "store": []}
    for window in range(2, 2 * rounds + 2):  # the first two fill caches
        begin = times[0] + window * WINDOW_SECONDS + SETTLE_SECONDS
        end = times[0] + (window + 1) * WINDOW_SECONDS
        inside = [when for when in times if begin <= when < end]
        rates["store" if window % 2 else "none"].append((len(inside) - 1) / (inside[-1] - inside[0]))
    return rates


def _print_cost(rates: dict[str, list[float]], recorded: int, steps: int) -> None:
    ratios = [without / having for having, without in zip(rates["store"], rates["none"], strict=True)]
    added = median_interval([ratio - 1 for ratio in ratios])
    print(
        f"2 workers, {len(ratios)} pairs of windows of {WINDOW_SECONDS:g} s; {recorded} of {steps} steps were recorded"
    )
    for arm, values in rates.items():
        print(f"  {arm:<6} {np.median(values):7.1f} steps/s   {min(values):.1f} .. {max(values):.1f}")
    print(
        f"  the store adds {added.median:+.2%} to a step, 95% interval {added.low:+.2%} .. {added.high:+.2%} "
        f"(target < {COST_TARGET:.0%})"
    )


def _recorded(folder: Path) -> int:
    from shoal.store.store import Store

    with Store.open(f"sqlite:///{folder / 'shoal.db'}", create=False) as store:
        return sum(len(store.steps(run.id)) for run in store.runs())


def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
    else:
        with tempfile.TemporaryDirectory(prefix="bench-store-") as name:
            yield Path(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["fill", "read", "cost"])
    parser.add_argument("--folder", type=Path, help="of the store; without it `read` fills one of its own first")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10_000, help="per run")
    parser.add_argument("--rounds", type=int, default=15, help=f"at least {FEWEST} for cost")
    given = parser.parse_args()
    for folder in _folder(given.folder):
        match given.what:
            case "fill":
                fill(folder, given.runs, given.steps)
            case "read":
                if not (folder / "shoal.db").exists():
                    fill(folder, given.runs, given.steps)
                read(folder, given.rounds)
            case "cost":
                cost(given.rounds)


if __name__ == "__main__":
    main()
