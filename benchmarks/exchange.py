"""What a faster exchange gives to training on this host: the Trainer against a hand-written loop with DDP over gloo.

examples
  python benchmarks/exchange.py                               both works, 2 and 4 workers
  python benchmarks/exchange.py --work wide --workers 2
  python benchmarks/exchange.py --check                       exit code 1 if a figure is missed

  wide    12.5 million parameters in four layers, SGD, 8 samples to a worker: 50 MB to exchange, little to compute
  gpt     the small GPT of run.py: much to compute, 4 MB to exchange

Arms take turns as in run.py; see there for what a round is. Run it with the interpreter that benchmarks/setup.sh made.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ratios import Interval
from run import BATCH, CALIBRATION, LEAD, SCRIPTS, Plan, quiet_rounds, round_count, summary
from turns import HERE, Arm, ArmFailed, Table

ARMS = ("shoal", "hand")
WORKERS = (2, 4)
WIDE_SHARE = 8  # as in wide.py, which imports torch: the harness does without
WORKS = ("wide", "gpt")
FEWEST_STEPS = 4  # in a turn; a step of four workers on two cores can take a third of a second

WIDE_TARGET = 1.3  # median
GPT_TARGET = 0.97  # lower end of the interval


def measure(work: str, workers: int, plan: Plan) -> dict[str, Any]:
    """Speed of the Trainer relative to the hand-written loop, with each round's seconds per step."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        arms = [arm_of(arm, work, workers, folder) for arm in ARMS]
        with Table(arms, share=share_of(work, workers), workers=workers, folder=folder) as table:
            print(f"{work}, {workers} workers: ready, torch {', '.join(table.torch)}", file=sys.stderr)
            first = [table.turn(arm, lead=LEAD, steps=CALIBRATION) / CALIBRATION for arm in ARMS]
            steps = max(FEWEST_STEPS, round(plan.turn / float(np.median(first))))
            kept, repeated = quiet_rounds(table, ARMS, steps, plan)
            waiting = {arm: seat.cpu_waiting for arm, seat in table.seats.items()}
    seconds = {arm: [values[arm] for values, _ in kept] for arm in ARMS}
    return {
        **summary(seconds),
        "work": work,
        "workers": workers,
        "rounds": plan.rounds,
        "rounds_repeated": repeated,
        "steps_per_turn": steps,
        "cpu_elsewhere": float(np.mean([elsewhere for _, elsewhere in kept])),
        "cpu_seconds_while_waiting": waiting,
        "seconds_per_step": seconds,
    }


def share_of(work: str, workers: int) -> int:
    """Samples of one worker in a step."""
    return WIDE_SHARE if work == "wide" else BATCH[work] // workers


def arm_of(name: str, work: str, workers: int, folder: Path) -> Arm:
    script = str(HERE / "arms" / f"{SCRIPTS[name]}.py")
    wide = (str(HERE / "wide.py"), script, f"wide-{workers}")
    command = (sys.executable, *(wide if work == "wide" else (script, work)))
    if name == "shoal":
        return Arm(name, (*command, str(workers), str(folder / "run")), per_rank=False)
    return Arm(name, command, per_rank=True)


def show(found: dict[str, Any]) -> None:
    turns = f"{found['rounds']} rounds of {found['steps_per_turn']} steps ({found['rounds_repeated']} repeated)"
    print(f"\n{found['work']}, {found['workers']} workers, {turns}")
    print(f"  {'arm':<8}{'ms per step':>12}{'middle half':>20}{'CPU s while waiting':>22}")
    for name, (low, middle, high) in found["milliseconds_per_step_quartiles"].items():
        waiting = found["cpu_seconds_while_waiting"][name]
        print(f"  {name:<8}{middle:>12.2f}{f'{low:.2f} .. {high:.2f}':>20}{waiting:>22.2f}")
    speed = _speed(found)
    print(f"  speed relative to hand {speed.median:.3f}, 95% interval {speed.low:.3f} .. {speed.high:.3f}")
    print(f"  other processes used {found['cpu_elsewhere']:.1%} of the machine in these rounds", flush=True)


def _speed(found: dict[str, Any]) -> Interval:
    return Interval(**found["relative_speed"]["hand"])


def missed(reports: Sequence[dict[str, Any]]) -> list[str]:
    """The figures that were not reached, in words."""
    said = []
    for found in reports:
        speed, what = _speed(found), f"{found['work']} with {found['workers']} workers"
        if found["work"] == "wide" and speed.median < WIDE_TARGET:
            said.append(f"{what}: {speed.median:.3f} times the hand-written loop instead of {WIDE_TARGET}")
        if found["work"] == "gpt" and speed.low < GPT_TARGET:
            said.append(f"{what}: the interval begins at {speed.low:.3f} and must not be below {GPT_TARGET}")
    return said


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--work", choices=[*WORKS, "all"], default="all", help="default all")
    add("--workers", type=int, choices=WORKERS, nargs="+", default=list(WORKERS), help="default 2 4")
    add("--rounds", type=round_count, default=20, help="rounds that count, one turn of both arms in each (default 20)")
    add("--turn", type=float, default=1.0, metavar="SECONDS", help="about how long a turn lasts (default 1)")
    add("--quiet", type=float, default=1.0, metavar="SHARE", help="repeat rounds where others used more CPU, as 0.05")
    add("--json", type=Path, metavar="FILE", help="also write all that was measured there")
    add("--check", action="store_true", help="exit with code 1 if a figure is missed")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    reports = []
    try:
        for work in WORKS if given.work == "all" else [given.work]:
            for workers in given.workers:
                reports.append(measure(work, workers, Plan(given.rounds, given.turn, given.quiet)))
                show(reports[-1])
    except ArmFailed as failure:
        print(f"\n{failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; the arms have ended", file=sys.stderr)
        return 130
    if given.json:
        given.json.write_text(json.dumps(reports, indent=1))
    said = missed(reports)
    for line in said:
        print(f"missed: {line}")
    return 1 if said and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
