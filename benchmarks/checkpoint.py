"""What a checkpoint costs the training loop, against a blocking `torch.save` of the same to the same disk.

    python benchmarks/checkpoint.py                 # one process that computes
    python benchmarks/checkpoint.py --neighbours 1  # another process computes as much beside it, as workers do

60 M parameters with AdamW are 720 MB. Each round runs three arms of a few steps each, in turn: without a save, with
`torch.save` at the start, with `Checkpoints` at the start. *Stall* is the time spent in calls that save; *lost* is the
time of the arm less that of the arm without a save in the same round, so it includes what the writing thread takes
from the computing one. On a busy machine look at the processor time as well, which hardly depends on who else computes.
`Checkpoints` also hashes, syncs to the disk and deletes the save before; `torch.save` does not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.checkpoint import Checkpoints

WIDTH, LAYERS = 2236, 12


@dataclass
class Arm:
    """Seconds that some steps took. `process_cpu` is complete once the time at the end of all work is added."""

    wall: float
    stall: float
    loop_cpu: float
    process_cpu: float


class Loop:
    """A plain training loop with a place for a save before the step and one before the optimizer."""

    def __init__(self, batch: int) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.input = torch.randn(batch, WIDTH)
        self.compute()
        self.optimizer.step()

    def compute(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self.input).square().mean().backward()

    def trees(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def run(self, steps: int, save: Callable[[], float], before_update: Callable[[], float]) -> Arm:
        """One save, before the first step."""
        loop_cpu, process_cpu = time.thread_time(), time.process_time()
        begun = time.perf_counter()
        stall = save()
        for _ in range(steps):
            self.compute()
            stall += before_update()
            self.optimizer.step()
        return Arm(time.perf_counter() - begun, stall, time.thread_time() - loop_cpu, -process_cpu)


def torch_save(loop: Loop, path: Path) -> float:
    begun = time.perf_counter()
    torch.save(loop.trees(), path)
    return time.perf_counter() - begun


def measure(folder: Path, rounds: int, steps: int, batch: int) -> dict[str, Any]:
    loop = Loop(batch)
    checkpoints = Checkpoints(folder / "checkpoints", keep=1, warn=print)
    numbers = iter(range(10**9))

    def ours() -> float:
        begun = time.perf_counter()
        checkpoints.begin(next(numbers), loop.trees(), {})
        return time.perf_counter() - begun

    def nothing() -> float:
        return 0.0

    rows: list[dict[str, float]] = []
    for number in range(rounds + 1):
        plain = loop.run(steps, nothing, nothing)
        plain.process_cpu += time.process_time()
        blocking = loop.run(steps, lambda: torch_save(loop, folder / "torch.pt"), nothing)
        (folder / "torch.pt").unlink()
        saving = loop.run(steps, ours, checkpoints.wait_copied)
        tail_begun = time.perf_counter()
        checkpoints.finish()
        tail = time.perf_counter() - tail_begun
        saving.process_cpu += time.process_time()
        os.sync()
        row = {
            "steps_s": plain.wall,
            "torch_save_s": blocking.stall,
            "torch_lost_s": blocking.wall - plain.wall,
            "torch_loop_cpu_s": blocking.loop_cpu - plain.loop_cpu,
            "stall_s": saving.stall,
            "lost_s": saving.wall - plain.wall,
            "loop_cpu_s": saving.loop_cpu - plain.loop_cpu,
            "all_cpu_s": saving.process_cpu - plain.process_cpu,
            "tail_s": tail,
        }
        if number:  # the first round warms up
            rows.append(row)
    saved = checkpoints.check()
    checkpoints.close()
    assert saved is not None
    return {"bytes": saved.bytes, "steps": steps, "rounds": rows, "summary": summarize(rows)}


def summarize(rows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    base = statistics.median(columns["torch_save_s"])
    columns["stall_ratio"] = [stall / base for stall in columns["stall_s"]]
    columns["lost_ratio"] = [lost / base for lost in columns["lost_s"]]
    return {
        key: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for key, values in columns.items()
    }


def neighbour(batch: int) -> None:
    torch.set_num_threads(1)
    loop = Loop(batch)
    while True:
        loop.compute()
        loop.optimizer.step()


def show(result: dict[str, Any]) -> None:
    labels = {
        "steps_s": "steps without a save",
        "torch_save_s": "torch.save, blocking",
        "torch_lost_s": "  lost in all",
        "torch_loop_cpu_s": "  processor time of the loop",
        "stall_s": "shoal, stall",
        "lost_s": "  lost in all",
        "loop_cpu_s": "  processor time of the loop",
        "all_cpu_s": "  and of the writing thread",
        "tail_s": "  still writing at the end",
    }
    rounds = len(result["rounds"])
    print(f"{result['bytes'] / 1e6:.0f} MB, {rounds} rounds of {result['steps']} steps: median [min, max]")
    for key, label in labels.items():
        row = result["summary"][key]
        print(f"  {label:28} {row['median']:7.3f} s [{row['min']:7.3f}, {row['max']:7.3f}]")
    for key, label, limit in (("stall_ratio", "stall", 0.10), ("lost_ratio", "lost", 0.40)):
        row = result["summary"][key]
        verdict = "holds" if row["median"] <= limit else "MISSED"
        print(
            f"  {label + ' / torch.save':28} {row['median']:7.1%}   [{row['min']:7.1%}, {row['max']:7.1%}]"
            f"   at most {limit:.0%}: {verdict}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="steps of an arm")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--neighbours", type=int, default=0, help="further processes that compute as much")
    parser.add_argument("--folder", type=Path, default=None, help="a folder on the disk to be measured")
    parser.add_argument("--json", type=Path, default=None, help="write the numbers there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=neighbour, args=(options.batch,), daemon=True) for _ in range(options.neighbours)]
    for other in others:
        other.start()
    folder = Path(tempfile.mkdtemp(prefix="shoal-checkpoint-", dir=options.folder))
    try:
        result = measure(folder, options.rounds, options.steps, options.batch)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for other in others:
            other.kill()
            other.join()
    result["neighbours"] = options.neighbours
    show(result)
    text = json.dumps(result)
    if options.json is not None:
        options.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
