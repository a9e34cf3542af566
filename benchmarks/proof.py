"""What the proof on the first batch costs: seconds until worker 0 has its finding, and what two steps take.

examples
  python benchmarks/proof.py                         all models of run.py, 5 trainings each
  python benchmarks/proof.py --work cnn,bert --check exit code 1 if one costs more than two steps and more than 0.2 s
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import turn
from roster import GROUPS
from run import work_list
from works import WORKS

from shoal import StepDone, Trainer
from shoal.proof import rehearse
from shoal.proof.examine import Finding

WORKERS, STEPS, LEAD = 2, 16, 4
BOUND = 0.2  # seconds, or two steps if that is more


@dataclass(frozen=True)
class Cost:
    """Seconds of one training's proof and step, and what it found."""

    proof: float
    step: float
    kind: str


def noted(file: Path) -> None:
    """Have every worker that is forked from now on write how long it waited for its rehearsal, and for what."""
    read = rehearse._read

    def timed(pipe: int, pid: int) -> Finding:
        began = time.perf_counter()
        finding = read(pipe, pid)
        with file.open("a") as out:
            out.write(f"{time.perf_counter() - began} {finding.kind}\n")
        return finding

    rehearse._read = timed


def train(name: str, file: Path, folder: Path) -> Cost:
    file.write_text("")
    work, ended = WORKS[name], []
    Trainer(
        work.model,
        work.loss,
        work.optimizer,
        work.data(),
        batch_size=work.batch_size,
        collate=work.collate,
        steps=STEPS,
        workers=WORKERS,
        run_dir=str(folder),
        callbacks=[lambda event: ended.append(event.time) if isinstance(event, StepDone) else None],
    ).fit()
    lines = [line.split() for line in file.read_text().splitlines()]
    steps = [after - before for before, after in zip(ended[LEAD:], ended[LEAD + 1 :], strict=False)]
    # every worker plays it at the same time; all go on when the last has its finding
    return Cost(max(float(line[0]) for line in lines), statistics.median(steps), lines[0][1])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=work_list, default=GROUPS["all"], metavar="WORKS", help="as in run.py")
    parser.add_argument("--times", type=int, default=5, help="trainings of each (default 5)")
    parser.add_argument("--check", action="store_true", help="exit with code 1 if one costs too much")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    turn.tick = lambda *_: None  # nobody takes turns here
    missed = []
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        file = Path(name) / "noted"
        noted(file)
        print("| work | proof, seconds (least – most) | two steps | found |\n|---|---|---|---|")
        for work in given.work:
            costs = [train(work, file, Path(name) / f"{work}-{number}") for number in range(given.times)]
            proofs, two = [cost.proof for cost in costs], 2 * statistics.median(cost.step for cost in costs)
            middle, found = statistics.median(proofs), ", ".join(sorted({cost.kind for cost in costs}))
            print(
                f"| `{work}` | {middle:.3f} ({min(proofs):.3f} – {max(proofs):.3f}) | {two:.3f} | {found} |", flush=True
            )
            if middle > max(BOUND, two):
                missed.append(f"missed: {work}: {middle:.3f} s")
    print(*missed, sep="\n")
    return 1 if missed and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
