"""Compares this tree with an earlier commit: both are arms of one run and take turns, the first of them in turn too.

examples
  python benchmarks/before.py --commit 26522dd                          all of it
  python benchmarks/before.py --commit HEAD~3 --what step --workers 2   one thing
  python benchmarks/before.py --commit main --what start,server --rounds 21 --check
  python benchmarks/before.py --commit HEAD                             without changes: what the machine can resolve

The commit is checked out into a temporary git worktree, which is removed at the end, Ctrl-C included. Both arms run
these scripts, with this interpreter, and differ in the src that they import and in their SHOAL_HOME; what the scripts
call must exist in both. `new` is this tree as it is now, changes that are not committed included.

  step       time of a step of the tiny GPT, the deep MLP (run.py) and the wide MLP (exchange.py), in turns as there
  overhead   what a step takes beyond one of a plain loop with a DataLoader (plain) or without (bare), as overhead.py
  recovery   a worker of four is killed, min_workers=1, as recovery.py: to the survivors' next step, to four again
  server     a step with sync="server" as in serverstep.py: one server without copies, and the default of two with them
  start      from the call of fit() with default arguments to its first StepDone

Each round gives a ratio, new/old (start: a difference, new - old); their median has a 95% bootstrap interval, which

  beats 1.0      ends below 1: this tree is faster
  includes 1.0   or does, but ±x%: it is that wide, which is more than 2%; more --rounds narrow it
  within 2%      begins above 1, but below 1.02
  WORSE          begins above 1.02 (start: above 0.1 s). With --check the exit code is then 1
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import overhead
import serverstep
from commits import Training, TrainingFailed, shoal_command
from exchange import FEWEST_STEPS, WORKERS, arm_of, share_of
from goodput import bootstrap
from laps import Lap, Racer, lap
from ratios import FEWEST
from recovery import signalled
from run import CALIBRATION, LEAD, Plan, order, quiet_rounds
from serverstep import say
from turns import HERE, Arm, ArmFailed, Table, python_path

OLD, NEW = ARMS = ("old", "new")
ROOT = HERE.parent
NOISE = 0.02  # of a ratio
LATER = 0.1  # seconds that a start may take longer
WORKS = ("gpt", "mlp", "wide")
TURN = 1.0  # seconds
OVERHEAD_STEPS = 1000
KILLS = 5  # in a training; their median is the value of a round
SERVERS = ("1-none", "2-peer")


@dataclass(frozen=True)
class Row:
    """What both arms took in each round, in `unit`; compared by ratios, or by differences where one is allowed."""

    what: str
    unit: str
    took: dict[str, list[float]]
    elsewhere: float | None = None
    """The share of the CPU that other processes used."""
    allowed: float | None = None
    """How much more `new` may take."""
    asked: float | None = None
    """What `new` should stay below. It is told, and no more."""

    def compared(self) -> tuple[float, float, float]:
        pairs = list(zip(self.took[OLD], self.took[NEW], strict=True))
        return bootstrap([new / old if self.allowed is None else new - old for old, new in pairs])

    def worse(self) -> bool:
        return self.compared()[1] > (1 + NOISE if self.allowed is None else self.allowed)

    def verdict(self) -> str:
        if len(self.took[NEW]) < FEWEST:
            return f"fewer than {FEWEST} rounds say little"
        _, low, high = self.compared()
        if self.worse():
            said = "WORSE"
        elif self.allowed is not None:
            said = f"at most {self.allowed:g} {self.unit} later" if high <= self.allowed else "too wide to tell"
        elif low > 1:
            said = f"within {NOISE:.0%}"
        else:
            said = "beats 1.0" if high < 1 else "includes 1.0"
        if self.allowed is None and (wide := (high - low) / 2) > NOISE:
            said += f", ±{wide:.0%}"
        if self.asked is not None:
            met = "met" if np.median(self.took[NEW]) < self.asked else "NOT met"
            said += f"; < {self.asked:g} {self.unit} is asked: {met}"
        return said

    def __str__(self) -> str:
        middle, low, high = (f"{value:+.3f}" if self.allowed else f"{value:.3f}" for value in self.compared())
        old, new = (f"{np.median(self.took[arm]):.3f} {self.unit}" for arm in ARMS)
        others = "" if self.elsewhere is None else f"{self.elsewhere:.0%}"
        return f"{self.what:<26}{old:>12}{new:>12}{middle:>9}{f'{low} .. {high}':>19}{others:>8}  {self.verdict()}"


@dataclass(frozen=True)
class Pair:
    """The two trees, and how much to measure. The methods named in WHAT yield rows as they are measured."""

    trees: dict[str, Path]
    rounds: int
    workers: Sequence[int]

    def environment(self, arm: str, home: Path) -> dict[str, str]:
        """Modules are compiled once and kept in both trees, whatever the caller has set."""
        path = python_path(self.trees[arm])
        kept = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "", "SHOAL_HOME": str(home / arm / "home")}
        return {**kept, "SHOAL_PROGRESS": "quiet"}

    def seated(self, make: Callable[[Path], Arm], folder: Path) -> list[Arm]:
        return [
            replace(make(folder / arm), name=arm, tree=tree, environment=self.environment(arm, folder))
            for arm, tree in self.trees.items()
        ]

    def step(self, folder: Path) -> Iterator[Row]:
        for work, workers in ((work, workers) for work in WORKS for workers in self.workers):
            place = folder / f"{work}-{workers}"
            place.mkdir()
            arms = self.seated(partial(arm_of, "shoal", work, workers), place)
            with Table(arms, share=share_of(work, workers), workers=workers, folder=place) as table:
                say(f"step: {work} with {workers} workers is ready, {self.rounds} rounds")
                first = [table.turn(arm, lead=LEAD, steps=CALIBRATION) / CALIBRATION for arm in ARMS]
                steps = max(FEWEST_STEPS, round(TURN / float(np.median(first))))
                kept, _ = quiet_rounds(table, ARMS, steps, Plan(self.rounds, TURN, quiet=np.inf))
            took = {arm: [values[arm] * 1e3 for values, _ in kept] for arm in ARMS}
            yield Row(f"step {work}, {workers} workers", "ms", took, float(np.mean([share for _, share in kept])))

    def overhead(self, folder: Path) -> Iterator[Row]:
        loops = ("plain", "bare")
        arms = [*self.seated(partial(overhead.shoal, 1), folder), *map(overhead.plain, loops)]
        say(f"overhead: {self.rounds + 2} rounds of {len(arms)} x {OVERHEAD_STEPS} steps")
        rows, elsewhere = overhead.measure(arms, self.rounds, OVERHEAD_STEPS, folder)
        for loop in loops:
            took = {arm: [row[arm] - row[loop] for row in rows] for arm in ARMS}
            yield Row(f"overhead over {loop}", "ms", took, elsewhere, asked=overhead.STEP_TARGET)

    def in_rounds(self, what: str, measure: Callable[[str, int], Sequence[float]]) -> dict[str, np.ndarray]:
        """All rounds of each figure of `measure(arm, round)`, but for the first, in which files are cold."""
        found: dict[str, list[Sequence[float]]] = {arm: [] for arm in ARMS}
        for number in range(self.rounds + 1):
            for arm in order(ARMS, number):
                found[arm].append(measure(arm, number))
            say(f"{what}: " + (f"round {number} of {self.rounds}" if number else "warm"))
        return {arm: np.array(values[1:]).T for arm, values in found.items()}

    def recovery(self, folder: Path) -> Iterator[Row]:
        def killed(arm: str, number: int) -> Sequence[float]:
            draw, home = random.Random(number), folder / f"{number}-{arm}"  # both arms are killed at the same moments
            command = shoal_command(home, "--min-workers", "1")
            with Training(command, home, **self.environment(arm, home)) as training:
                events = list(signalled(training, KILLS, signal.SIGKILL, draw))
            return [float(value) for value in np.median(events, axis=0)]

        found = self.in_rounds("recovery", killed)
        for at, what in enumerate(("recovery: next step", "recovery: four workers")):
            yield Row(what, "s", {arm: found[arm][at].tolist() for arm in ARMS})

    def lapped(self, racer: Racer, figure: Callable[[Lap], float]) -> tuple[dict[str, list[float]], float]:
        """The figure of each lap that counts, and the share of the CPU that others used."""

        def once(arm: str, number: int) -> Sequence[float]:
            with tempfile.TemporaryDirectory(prefix="bench-") as home:
                one = lap(replace(racer, environment=self.environment(arm, Path(home))))
            return figure(one), one.elsewhere

        found = self.in_rounds(racer.name, once)
        return {arm: found[arm][0].tolist() for arm in ARMS}, float(np.mean([found[arm][1] for arm in ARMS]))

    def server(self, folder: Path) -> Iterator[Row]:
        sizes = {"megabytes": serverstep.MEGABYTES, "share": serverstep.SHARE, "steps": serverstep.STEPS}
        for kind in SERVERS:
            racer = serverstep.step_racer(kind, argparse.Namespace(**sizes, optimizer="adamw"))
            racer = replace(racer, name=f"server {kind}")
            yield Row(racer.name, "ms", *self.lapped(racer, lambda one: one.step_seconds() * 1e3))

    def start(self, folder: Path) -> Iterator[Row]:
        racer = Racer("start, new - old", "start_default.py", ())
        yield Row(racer.name, "s", *self.lapped(racer, lambda one: one.done[0]), allowed=LATER)


WHAT = ("step", "overhead", "recovery", "server", "start")


# ---- the earlier tree


class NoCommit(Exception):
    """There is nothing to compare with."""


def git(*command: str, check: bool = True) -> str:
    """Ctrl-C does not reach it: a worktree is made and removed as a whole."""
    ran = subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True, start_new_session=True)
    if check and ran.returncode:
        raise NoCommit(f"git {' '.join(command)} failed: {ran.stderr.strip()}")
    return ran.stdout.strip()


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A worktree of it. Raises NoCommit if there is no such commit here."""
    git("rev-parse", "--git-dir")
    found = git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}", check=False)
    if not found:
        raise NoCommit(f"--commit {commit}: {ROOT} has no such commit; `git log --oneline` lists those it has")
    with tempfile.TemporaryDirectory(prefix="bench-") as home:
        tree = Path(home) / "tree"
        try:
            git("worktree", "add", "--quiet", "--detach", str(tree), found)
            yield tree
        finally:
            git("worktree", "remove", "--force", "--force", str(tree), check=False)


def check_import(pair: Pair, arm: str, folder: Path) -> None:
    """That it has a Shoal that works here, and not another one is imported."""
    command = [sys.executable, "-c", "import shoal; shoal.Trainer; print(shoal.__file__)"]
    around = {**os.environ, **pair.environment(arm, folder)}
    ran = subprocess.run(command, env=around, cwd=folder, capture_output=True, text=True)
    if ran.returncode or not Path(ran.stdout.strip()).is_relative_to(pair.trees[arm].resolve() / "src"):
        raise NoCommit(f"the {arm} tree, {pair.trees[arm]}, has no Shoal to import:\n{ran.stdout}{ran.stderr}")


# ---- the command


def some_of(known: Sequence[str], text: str) -> list[str]:
    if unknown := [name for name in text.split(",") if name not in known]:
        raise argparse.ArgumentTypeError(f"got {', '.join(unknown)}; give some of {','.join(known)}")
    return [name for name in known if name in text.split(",")]


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, counts = parser.add_argument, [str(workers) for workers in WORKERS]
    add("--commit", required=True, help="what to compare this tree with: a hash, a branch, HEAD~3 and so on")
    add("--what", type=partial(some_of, WHAT), default=list(WHAT), help=f"some of {','.join(WHAT)} (default all)")
    add("--rounds", type=int, default=9, help=f"that count; an interval needs at least {FEWEST} (default 9)")
    add("--workers", type=partial(some_of, counts), default=counts, help=f"for step (default {','.join(counts)})")
    add("--json", type=Path, metavar="FILE", help="also write each round's figures there")
    add("--check", action="store_true", help="exit with code 1 if something is worse")
    parsed = parser.parse_args(given)
    if parsed.rounds < (FEWEST if parsed.check else 1):
        parser.error(f"--rounds {parsed.rounds}: an interval that decides (--check) needs at least {FEWEST}")
    return parsed


def compare(given: argparse.Namespace) -> list[Row]:
    """Prints each row when it is there."""
    rows = []
    with checked_out(given.commit) as tree, tempfile.TemporaryDirectory(prefix="bench-") as home:
        pair = Pair({OLD: tree, NEW: ROOT}, given.rounds, [int(count) for count in given.workers])
        for arm in ARMS:
            check_import(pair, arm, Path(home))
        print(f"old: {git('log', '-1', '--format=%h %s', given.commit)}")
        print(f"new: {git('describe', '--always', '--dirty')} in {ROOT}; {given.rounds} rounds\n")
        print(f"{'what':<26}{'old':>12}{'new':>12}{'new/old':>9}{'95% interval':>19}{'others':>8}", flush=True)
        for what in given.what:
            (folder := Path(home) / what).mkdir()
            for row in getattr(pair, what)(folder):
                rows.append(row)
                print(row, flush=True)
    return rows


def main() -> int:
    given = arguments()
    for number in (signal.SIGINT, signal.SIGTERM):  # both end the arms and remove the worktree
        signal.signal(number, signal.default_int_handler)
    try:
        rows = compare(given)
    except NoCommit as failure:
        say(f"before.py: {failure}")
        return 2
    except (ArmFailed, TrainingFailed) as failure:
        say(f"\n{failure}")
        return 1
    except KeyboardInterrupt:
        say("\nstopped; the arms have ended, and the worktree is removed")
        return 130
    if given.json:
        given.json.write_text(json.dumps([asdict(row) | {"compared": row.compared()} for row in rows], indent=1))
    return 1 if given.check and any(row.worse() for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
