"""Time from the launch of a training script to the end of its first step: `python train.py` with Shoal, and the
hand-written loop with torchrun.

examples
  python benchmarks/start.py                        4 workers, 7 launches of each, in turn
  python benchmarks/start.py --arms shoal --times 15
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from turns import HERE

TARGET = 3.0  # seconds, at 4 workers
DEADLINE = 120.0  # seconds, for a launch to end


def command(arm: str, workers: int, folder: Path) -> list[str]:
    """The launch of `arm`, with its time as the last thing computed before it."""
    if arm == "shoal":
        script = [sys.executable, str(HERE / "arms" / "start_shoal.py")]
    else:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
        script = [sys.executable, *launcher, str(HERE / "arms" / "start_hand.py")]
    return [*script, f"{time.time():.6f}", str(workers), str(folder / "run")]


def launch(arm: str, workers: int) -> float:
    """Seconds until the first worker had the first step done; the script runs to its end."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent / "src"), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        script = command(arm, workers, Path(folder))
        ended = subprocess.run(script, env=environment, cwd=folder, capture_output=True, text=True, timeout=DEADLINE)
    lines = ended.stdout.splitlines()
    done = [float(line.split()[-1]) for line in lines if line.startswith("first step ")]
    if ended.returncode or not done:
        sys.exit(f"{arm} ended with code {ended.returncode}, {len(done)} first steps:\n{ended.stdout}\n{ended.stderr}")
    return min(done)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4, help="how many (default 4, which divides the batch of 64)")
    parser.add_argument("--times", type=int, default=7, help="launches of each arm that count (default 7)")
    parser.add_argument("--arms", default="shoal,hand", help="which of shoal and hand (default both)")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    arms = given.arms.split(",")
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    for number in range(given.times + 1):
        for arm in arms:
            took = launch(arm, given.workers)
            if number:  # the first launch finds the files cold
                seconds[arm].append(took)
    print(f"seconds to the end of the first step, {given.workers} workers, {given.times} launches; target {TARGET}")
    for arm, times in seconds.items():
        print(f"  {arm:<8} median {np.median(times):.2f}   best {min(times):.2f}   worst {max(times):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
