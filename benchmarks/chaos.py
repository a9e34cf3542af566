"""Random faults in short trainings, until so many have happened; every training must end as its calm twin does.

examples
  python benchmarks/chaos.py --faults 300 --seed 1              all kinds; with root, some of the trainings in a lab
  python benchmarks/chaos.py --faults 300 --seed 1 --deterministic
  python benchmarks/chaos.py --only 1003                        repeat one training, by the seed that was printed

Every 10 to 30 steps something is killed, stopped, slowed, cut or scaled: see `shoal.testing.chaos`. In the end the
weights must be those of the calm run (to 1e-5; bitwise if deterministic), every position of every step computed once,
replicas equal after each commit, committed steps growing one by one, and no process, thread or shared memory left. The
exit code is 1 if one of that did not hold.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from shoal.testing.chaos import Outcome, Trial
from shoal.testing.lab import Lab, why_no_lab
from shoal.testing.leaks import mark_descendants

PER_TRIAL = 20
"""Faults planned in one training."""
LAB_EVERY = 3
"""Of the trainings, one in so many is in a lab with two hosts."""
TRIALS_AT_MOST = 5
"""Times the trainings that would do if all that is planned happened."""


class Tally:
    """What happened so far, by kind."""

    def __init__(self) -> None:
        self.planned: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.lost: Counter[str] = Counter()
        self.problems: list[str] = []

    @property
    def fired(self) -> int:
        return sum(map(len, self.seconds.values())) + sum(self.lost.values())

    def add(self, trial: Trial, outcome: Outcome) -> None:
        self.planned.update(trial.kinds)
        for kind, _, seconds in outcome.fired:
            if seconds is None:
                self.lost[kind] += 1
            else:
                self.seconds[kind].append(seconds)
        self.problems += [f"seed {trial.seed}: {problem}" for problem in outcome.problems]

    def show(self) -> None:
        print(f"\n  {'kind':<28}{'planned':>8}{'happened':>10}{'recovered':>11}{'next commit, median':>21}{'worst':>9}")
        for kind in sorted(self.planned):
            times = self.seconds[kind]
            middle, worst = (f"{statistics.median(times):.3f} s", f"{max(times):.3f} s") if times else ("", "")
            happened = len(times) + self.lost[kind]
            print(f"  {kind:<28}{self.planned[kind]:>8}{happened:>10}{len(times):>11}{middle:>21}{worst:>9}")


@contextmanager
def lab_for(number: int, wanted: bool) -> Iterator[Lab | None]:
    if not wanted or number % LAB_EVERY != LAB_EVERY - 1:
        yield None
        return
    with Lab(hosts=2) as lab:
        yield lab


def one(seed: int, number: int, given: argparse.Namespace, tally: Tally) -> None:
    with lab_for(number, given.lab) as lab, tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        trial = Trial.drawn(seed, given.per_trial, deterministic=given.deterministic, lab=lab)
        outcome = trial.run(Path(folder))
    tally.add(trial, outcome)
    where = "in a lab" if lab is not None else "on this host"
    print(
        f"seed {seed}: {trial.work}, {trial.steps} steps {where}, {len(outcome.fired)} of {outcome.planned} faults "
        f"happened, {outcome.seconds:.1f} s, difference {outcome.difference:.2g}"
        + (f", {len(outcome.problems)} PROBLEMS" if outcome.problems else ""),
        flush=True,
    )
    for problem in outcome.problems:
        print(f"    {problem}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--faults", type=int, default=300, help="how many must have happened (default 300)")
    add("--per-trial", type=int, default=PER_TRIAL, help=f"how many are planned in one training (default {PER_TRIAL})")
    add("--seed", type=int, default=1, help="of everything that is drawn (default 1)")
    add("--only", type=int, metavar="SEED", help="one training, with the seed that was printed for it")
    add("--deterministic", action=argparse.BooleanOptionalAction, default=False, help="weights must be bitwise equal")
    add("--lab", action=argparse.BooleanOptionalAction, default=None, help="by default if this machine can hold one")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    reason = why_no_lab()
    if given.lab is None:
        given.lab = reason is None
        if reason is not None:
            print(f"without cuts: {reason}")
    os.environ["SHOAL_PROGRESS"] = "quiet"
    mark_descendants()
    torch.set_num_threads(1)
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="chaos-home-") as home:
        os.environ["SHOAL_HOME"] = home
        if given.only is not None:
            one(given.only, given.only - 1000 * given.seed if given.only >= 1000 else 0, given, tally)
        else:
            most = TRIALS_AT_MOST * -(-given.faults // given.per_trial)
            for number in range(most):
                if tally.fired >= given.faults:
                    break
                one(1000 * given.seed + number, number, given, tally)
    tally.show()
    for problem in tally.problems:
        print(f"problem: {problem}")
    if tally.problems:
        flags = f" --per-trial {given.per_trial} --seed {given.seed}" + " --deterministic" * given.deterministic
        print(f"repeat one training with: python benchmarks/chaos.py{flags} --only SEED")
        return 1
    if given.only is None and tally.fired < given.faults:
        print(f"only {tally.fired} faults happened; raise --per-trial")
        return 1
    print(f"{tally.fired} faults, and every training ended as its calm twin")
    return 0


if __name__ == "__main__":
    sys.exit(main())
