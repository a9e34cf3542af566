"""What Shoal adds to a step, and whether its supervisor grows: a model so small that there is nothing else to measure.

examples
  python benchmarks/overhead.py step                  time per step beyond a plain loop, one worker
  python benchmarks/overhead.py memory                memory of the processes that do not compute, over 10,000 steps
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from ratios import FEWEST, median_interval
from run import order
from turns import HERE, Arm, ArmFailed, Table, tree

BATCH = 8  # of the work `tiny` in work.py
STEP_TARGET = 0.3  # milliseconds


def shoal(workers: int, folder: Path) -> Arm:
    script = str(HERE / "arms" / "shoal_arm.py")
    return Arm("shoal", (sys.executable, script, "tiny", str(workers), str(folder / "run")), per_rank=False)


def plain(kind: str) -> Arm:
    return Arm(kind, (sys.executable, str(HERE / "arms" / "plain.py"), "tiny", kind), per_rank=True)


def step(rounds: int, steps: int) -> None:
    """Shoal against a plain loop with a DataLoader and against one that calls data set and collate itself."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        rows, elsewhere = measure([shoal(1, folder), plain("plain"), plain("bare")], rounds, steps, folder)
    print(f"one worker, {rounds} rounds of {steps} steps; other processes used {elsewhere:.1%} of the machine")
    for arm in rows[0]:
        print(f"  {arm:<8} {np.median([row[arm] for row in rows]):.3f} ms per step")
    for arm in ("plain", "bare"):
        added = median_interval([row["shoal"] - row[arm] for row in rows])
        interval = f"95% interval {added.low:.3f} .. {added.high:.3f}"
        print(f"  shoal - {arm:<6}{added.median:.3f} ms, {interval} (target < {STEP_TARGET})")


def measure(arms: Sequence[Arm], rounds: int, steps: int, folder: Path) -> tuple[list[dict[str, float]], float]:
    """Milliseconds per step of every arm in each round that counts, and the share of the CPU that others used."""
    with Table(arms, share=BATCH, workers=1, folder=folder) as table:
        rows = [_round(table, order(list(table.seats), number), steps) for number in range(rounds + 2)][2:]
        return rows, table.cpu_elsewhere / table.cpu_available


def _round(table: Table, arms: Sequence[str], steps: int) -> dict[str, float]:
    return {arm: table.turn(arm, lead=50, steps=steps) / steps * 1e3 for arm in arms}


def memory(steps: int, samples: int) -> None:
    """Resident memory of every Shoal process that is not a worker, sampled `samples` times over `steps` steps."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        with Table([shoal(2, folder)], share=BATCH // 2, workers=2, folder=folder) as table:
            table.turn("shoal", lead=0, steps=1000)  # caches fill, threads start
            seat = table.seats["shoal"]
            watched = [process for process in tree(seat) if process.pid not in seat.ranks]
            resident: dict[int, list[float]] = {process.pid: [] for process in watched}
            for _ in range(samples):
                table.turn("shoal", lead=0, steps=steps // samples)
                for process in watched:
                    resident[process.pid].append(process.memory_info().rss / 2**10)
            supervisor = seat.processes[0].pid
    print(f"resident memory over {steps} steps, {samples} samples, after 1000 steps that do not count")
    for pid, values in resident.items():
        slope = float(np.polyfit(np.linspace(0, steps, len(values)), values, 1)[0]) * 1000
        who = "supervisor" if pid == supervisor else "child"
        print(f"  {who:<11} {values[0] / 2**10:.1f} MB to {values[-1] / 2**10:.1f} MB, {slope:+.1f} KB per 1000 steps")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("step", help="time per step beyond a plain loop")
    one.add_argument("--rounds", type=int, default=20, help=f"at least {FEWEST} (default 20)")
    one.add_argument("--steps", type=int, default=1000, help="steps in a turn (default 1000)")
    two = commands.add_parser("memory", help="memory of the supervisor")
    two.add_argument("--steps", type=int, default=10_000, help="how many in all (default 10000)")
    two.add_argument("--samples", type=int, default=50, help="how often memory is read (default 50)")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    try:
        step(given.rounds, given.steps) if given.command == "step" else memory(given.steps, given.samples)
    except ArmFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
