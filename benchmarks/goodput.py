"""What being elastic costs: with workers that die, and with workers that do not.

examples
  python benchmarks/goodput.py kills                  a kill every 60 steps against a calm run
  python benchmarks/goodput.py calm                   elasticity on against off, nothing goes wrong
  python benchmarks/goodput.py kills --check          exit code 1 if the figure is missed

kills   10 million parameters, steps of about 100 ms, 4 workers, all with min_workers=2. Trainings of the same steps
        take turns, calm and with one worker killed every 60 steps, each of them in turn. The ratio of a pair is the
        calm one's time from its first to its last commit over that of the other.
calm    the small GPT and the deep MLP of run.py on 2 workers, with min_workers= and without, in turns as in run.py. The
        bound is the upper end of a 95% bootstrap interval of the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from commits import Training, TrainingFailed, shoal_command
from run import BATCH, CALIBRATION, LEAD, Plan, quiet_rounds, round_count
from turns import HERE, Arm, ArmFailed, Table

KILL_EVERY = 60
GOODPUT_TARGET = 0.95
COST_TARGET = 0.02
WORKERS = 2
ARMS = ("off", "on")
RESAMPLES = 10_000


# ---- with kills


def kills(rounds: int, steps: int) -> float:
    """The median of the ratios."""
    ratios = []
    with tempfile.TemporaryDirectory(prefix="bench-") as home:
        for number in range(rounds):
            order = ("calm", "killed") if number % 2 else ("killed", "calm")
            seconds = {kind: train(Path(home) / f"{kind}-{number}", steps, kind == "killed") for kind in order}
            ratios.append(seconds["calm"] / seconds["killed"])
            each = seconds["calm"] / (steps - 1) * 1e3
            print(
                f"  pair {number + 1}: calm {seconds['calm']:.1f} s ({each:.0f} ms a step), with kills "
                f"{seconds['killed']:.1f} s, goodput {ratios[-1]:.3f}",
                flush=True,
            )
    return statistics.median(ratios)


def train(folder: Path, steps: int, killed: bool) -> float:
    """Seconds from the first commit to the last."""
    options = ["--steps", str(steps), *(["--kill-every", str(KILL_EVERY)] if killed else [])]
    with Training(shoal_command(folder, *options), folder) as training:
        training.await_end(60 + steps)
        records = training.ledgers.records
    if {record.step for record in records} != set(range(steps)):
        raise TrainingFailed(f"{len({record.step for record in records})} of {steps} steps were committed")
    return max(record.time for record in records) - min(record.time for record in records)


# ---- without


def calm(work: str, plan: Plan) -> list[float]:
    """Time with elasticity over time without, of each round."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        arms = [Arm(arm, _command(arm, work, folder), per_rank=False) for arm in ARMS]
        with Table(arms, share=BATCH[work] // WORKERS, workers=WORKERS, folder=folder) as table:
            first = [table.turn(arm, lead=LEAD, steps=CALIBRATION) / CALIBRATION for arm in ARMS]
            kept, repeated = quiet_rounds(table, ARMS, max(4, round(plan.turn / float(np.median(first)))), plan)
    elsewhere = float(np.mean([share for _, share in kept]))
    off = np.median([values["off"] for values, _ in kept]) * 1e3
    print(
        f"  {work}: {off:.2f} ms a step without; others used {elsewhere:.1%} of the machine; {repeated} rounds repeated"
    )
    return [values["on"] / values["off"] for values, _ in kept]


def _command(arm: str, work: str, folder: Path) -> tuple[str, ...]:
    script = "shoal_arm.py" if arm == "off" else "shoal_elastic_arm.py"
    return (sys.executable, str(HERE / "arms" / script), work, str(WORKERS), str(folder / arm))


def bootstrap(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and a 95% interval of it by drawing rounds with replacement."""
    drawn = np.random.default_rng(0).choice(np.asarray(values), (RESAMPLES, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(np.median(values)), float(low), float(high)


# ---- the command


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    with_kills = commands.add_parser("kills")
    with_kills.add_argument("--rounds", type=int, default=5, help="pairs (default 5)")
    with_kills.add_argument("--steps", type=int, default=310, help="of each training (default 310: 5 kills)")
    without = commands.add_parser("calm")
    without.add_argument("--rounds", type=round_count, default=20, help="default 20")
    without.add_argument("--turn", type=float, default=0.6, metavar="SECONDS", help="of an arm (default 0.6)")
    without.add_argument(
        "--quiet", type=float, default=1.0, metavar="SHARE", help="repeat rounds where others used more"
    )
    without.add_argument("--work", choices=["gpt", "mlp", "all"], default="all")
    for command in (with_kills, without):
        command.add_argument("--check", action="store_true", help="exit with code 1 if a figure is missed")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    held = True
    try:
        if given.command == "kills":
            found = kills(given.rounds, given.steps)
            held = found >= GOODPUT_TARGET
            print(f"goodput with a kill every {KILL_EVERY} steps: median {found:.3f} (target {GOODPUT_TARGET})")
        else:
            for work in ("gpt", "mlp") if given.work == "all" else (given.work,):
                middle, low, high = bootstrap(calm(work, Plan(given.rounds, given.turn, given.quiet)))
                held = held and high - 1 <= COST_TARGET
                print(
                    f"  cost of elasticity for {work}: {middle - 1:+.2%}, 95% {low - 1:+.2%} .. {high - 1:+.2%} "
                    f"(target: at most {COST_TARGET:.0%})"
                )
    except (ArmFailed, TrainingFailed) as failure:
        print(f"\n{failure}", file=sys.stderr)
        return 1
    return 1 if given.check and not held else 0


if __name__ == "__main__":
    sys.exit(main())
