"""Compares training speed: arms take turns in one run, so what disturbs the machine disturbs all of them.

examples
  python benchmarks/run.py speed                              all models
  python benchmarks/run.py speed --work random --check        those that draw random numbers; exit code 1 if one is slow
  python benchmarks/run.py speed --work cnn,cnn:dry           one of them, with its dropout and without
  python benchmarks/run.py speed --work cnn:fused             and where all arms have AdamW(fused=True)
  python benchmarks/run.py speed --work mlp --rounds 60       narrower intervals
  python benchmarks/run.py speed --arms hand,hand             an arm against itself: what the machine can resolve
  python benchmarks/run.py speed --tree ../other              the Shoal of another folder

Run it with the interpreter that benchmarks/setup.sh made; every arm uses the same one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ratios import FEWEST, Interval, median_interval
from roster import BATCH, GROUPS, HAND, PLAIN, RANDOM, ROSTER, default_arms
from turns import HERE, Arm, ArmFailed, Table

SCRIPTS = {
    "shoal": "shoal_arm",
    "hand": "hand",
    "plain": "plain",
    "lightning": "lightning_arm",
    "accelerate": "accelerate_arm",
}
WORKERS = 2
LEAD = 3  # steps of a turn before its clock starts: caches and clock frequency settle
WARM_UP = 2  # rounds that do not count
PATIENCE = 8  # rounds tried for each that must be quiet
CALIBRATION = 10  # steps of the first warm-up round's turns, which tell how many steps a turn should have


@dataclass(frozen=True)
class Plan:
    """How much to measure: rounds that count, seconds of a turn, share of CPU that others may use in a round."""

    rounds: int
    turn: float
    quiet: float


def speed(works: Sequence[str], arms: Sequence[str] | None, plan: Plan, tree: Path) -> dict[str, Any]:
    """Runs every work in turn; prints as it goes and returns what it printed, with each round's seconds."""
    report = {}
    for work in works:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            seconds, notes = measure(work, numbered(arms or default_arms(work)), plan, Path(folder), tree)
        report[work] = {**summary(seconds), **notes, "seconds_per_step": seconds}
        show(work, report[work])
    return report


def measure(
    work: str, arms: Sequence[str], plan: Plan, folder: Path, tree: Path
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Seconds per step of every arm in every round that counts, and notes on how quiet the machine was."""
    started, share = [arm(name, work, folder) for name in arms], BATCH[work] // WORKERS
    with Table(started, share=share, workers=WORKERS, folder=folder, tree=tree) as table:
        ready = f"{work}: {len(arms)} arms ready, torch {', '.join(table.torch)}, Shoal of {table.source}"
        print(ready, file=sys.stderr)
        first = [table.turn(name, lead=LEAD, steps=CALIBRATION) / CALIBRATION for name in arms]
        steps = max(CALIBRATION, round(plan.turn / float(np.median(first))))
        kept, repeated = quiet_rounds(table, arms, steps, plan)
        notes = {
            "rounds": plan.rounds,
            "rounds_repeated": repeated,
            "steps_per_turn": steps,
            "torch": sorted(table.torch),
            "shoal": str(table.source),
            "cpu_elsewhere": float(np.mean([elsewhere for _, elsewhere in kept])),
            "cpu_seconds_while_waiting": {name: seat.cpu_waiting for name, seat in table.seats.items()},
        }
    return {name: [seconds[name] for seconds, _ in kept] for name in arms}, notes


def quiet_rounds(
    table: Table, arms: Sequence[str], steps: int, plan: Plan
) -> tuple[list[tuple[dict[str, float], float]], int]:
    """Each round that counts, as seconds per step by arm and CPU share of others; and how many did not count.

    Whether a round counts depends on what other processes did, never on its times: that would be choosing results.
    """
    kept: list[tuple[dict[str, float], float]] = []
    for number in range(WARM_UP - 1 + PATIENCE * plan.rounds):
        one = one_round(table, order(arms, number), steps)
        if number >= WARM_UP - 1 and one[1] <= plan.quiet:
            kept.append(one)
        if sys.stderr.isatty():
            print(f"\r{len(kept)} of {plan.rounds} rounds ", end="", file=sys.stderr, flush=True)
        if len(kept) == plan.rounds:
            return kept, number + 1 - (WARM_UP - 1) - plan.rounds
    raise ArmFailed(
        f"only {len(kept)} of {PATIENCE * plan.rounds} rounds were quiet (others below {plan.quiet:.0%} of the CPU) "
        f"and {plan.rounds} must be: end what else is running, or raise --quiet"
    )


def one_round(table: Table, arms: Sequence[str], steps: int) -> tuple[dict[str, float], float]:
    elsewhere, available = table.cpu_elsewhere, table.cpu_available
    seconds = {name: table.turn(name, lead=LEAD, steps=steps) / steps for name in arms}
    return seconds, (table.cpu_elsewhere - elsewhere) / (table.cpu_available - available)


def arm(name: str, work: str, folder: Path) -> Arm:
    kind = name.split("#")[0]
    command = (sys.executable, str(HERE / "arms" / f"{SCRIPTS[kind]}.py"), work)
    if kind == "shoal":
        return Arm(name, (*command, str(WORKERS), str(folder / name)), per_rank=False)
    if kind == "plain":
        return Arm(name, (*command, "plain"), per_rank=True, alone=True)
    return Arm(name, command, per_rank=True)


def numbered(arms: Sequence[str]) -> list[str]:
    """Names for the arms; one that is listed again gets a number, so an arm can run against itself."""
    return [name if name not in arms[:at] else f"{name}#{arms[:at].count(name) + 1}" for at, name in enumerate(arms)]


def order(arms: Sequence[str], number: int) -> list[str]:
    """Rotated by one every round, and reversed in every other rotation: all are first equally often, and none always
    comes after the same one."""
    rotation, at = divmod(number, len(arms))
    rotated = [*arms[at:], *arms[:at]]
    return rotated[::-1] if rotation % 2 else rotated


def summary(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Speed of the first of `shoal`, or else the first arm, relative to every other: ratios of the same round."""
    base = "shoal" if "shoal" in seconds else next(iter(seconds))
    relative = {
        name: asdict(median_interval([other / own for other, own in zip(values, seconds[base], strict=True)]))
        for name, values in seconds.items()
        if name != base
    }
    steps = {name: [float(q) * 1e3 for q in np.percentile(values, [25, 50, 75])] for name, values in seconds.items()}
    return {"base": base, "relative_speed": relative, "milliseconds_per_step_quartiles": steps}


def show(work: str, found: dict[str, Any]) -> None:
    turns = f"{found['rounds']} rounds of {found['steps_per_turn']} steps ({found['rounds_repeated']} repeated)"
    print(f"\n{work}: {WORKERS} workers, global batch {BATCH[work]}, {turns}")
    print(f"  {'arm':<14}{'ms per step':>12}{'middle half':>20}{'CPU s while waiting':>22}")
    for name, (low, middle, high) in found["milliseconds_per_step_quartiles"].items():
        waiting = found["cpu_seconds_while_waiting"][name]
        print(f"  {name:<14}{middle:>12.2f}{f'{low:.2f} .. {high:.2f}':>20}{waiting:>22.2f}")
    print(f"  {'speed of ' + found['base'] + ' relative to':<26}{'median':>8}{'95% interval':>20}")
    for name, values in found["relative_speed"].items():
        interval = Interval(**values)
        print(f"  {name:<26}{interval.median:>8.3f}{f'{interval.low:.3f} .. {interval.high:.3f}':>20}")
    print(f"  other processes used {found['cpu_elsewhere']:.1%} of the machine in these rounds\n", flush=True)


def overview(report: dict[str, Any]) -> None:
    """The speeds of Shoal in all works, as a table for README.md."""
    names = list(dict.fromkeys(name for found in report.values() for name in found["relative_speed"]))
    print(f"| work | ms a step of {next(iter(report.values()))['base']} | " + " | ".join(names) + " |")
    print("|---" * (2 + len(names)) + "|")
    for work, found in report.items():
        own = found["milliseconds_per_step_quartiles"][found["base"]][1]
        cells = [_cell(found["relative_speed"].get(name)) for name in names]
        print(f"| `{work}` | {own:.1f} | " + " | ".join(cells) + " |")


def _cell(values: dict[str, float] | None) -> str:
    if values is None:
        return ""
    interval = Interval(**values)
    return f"{interval.median:.3f} ({interval.low:.3f} – {interval.high:.3f})"


def missed(report: dict[str, Any]) -> list[str]:
    """The figures of roster.py that were measured and not reached, in words."""
    said = []
    for work, found in report.items():
        relative = {name: Interval(**values) for name, values in found["relative_speed"].items()}
        if found["base"] != "shoal":
            continue
        if "hand" in relative and relative["hand"].low < HAND.get(work, 0.0):
            said.append(f"{work}: relative to hand the interval begins at {relative['hand'].low:.3f}, not {HAND[work]}")
        if "plain" in relative and relative["plain"].median < PLAIN.get(work, 0.0):
            said.append(f"{work}: {relative['plain'].median:.3f} times one plain process instead of {PLAIN[work]}")
    return said


def work_list(text: str) -> list[str]:
    """Names and groups of them, each work once."""
    works = [work for name in text.split(",") for work in GROUPS.get(name, [name])]
    if unknown := sorted(set(works) - set(ROSTER)):
        known = f"{', '.join([*GROUPS['all'], *GROUPS])}, and NAME:dry and NAME:fused for {', '.join(RANDOM)}"
        raise argparse.ArgumentTypeError(f"got {', '.join(unknown)}; works are {known}")
    return list(dict.fromkeys(works))


def arm_list(text: str) -> list[str]:
    arms = text.split(",")
    if unknown := sorted(set(arms) - set(SCRIPTS)):
        raise argparse.ArgumentTypeError(f"got {', '.join(unknown)}; arms are {', '.join(SCRIPTS)}")
    return arms


def round_count(text: str) -> int:
    if (count := int(text)) < FEWEST:
        raise argparse.ArgumentTypeError(f"got {count}; a 95% interval needs at least {FEWEST} rounds")
    return count


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("speed", help=f"time per training step on {WORKERS} workers")
    add = one.add_argument
    works = f"some of {','.join(GROUPS['all'])}, cnn:dry, cnn:fused and so on, or of {','.join(GROUPS)} (default all)"
    which = f"some of {','.join(SCRIPTS)}; all are compared with shoal, or else with the first"
    usual = f"default {','.join(default_arms('gpt'))}, and {','.join(default_arms('cnn'))} for the others"
    add("--work", type=work_list, default=GROUPS["all"], metavar="WORKS", help=works)
    add("--arms", type=arm_list, metavar="ARMS", help=f"{which} ({usual})")
    add("--rounds", type=round_count, default=40, help="rounds that count, one turn of every arm in each (default 40)")
    add("--turn", type=float, default=0.6, metavar="SECONDS", help="about how long a turn lasts (default 0.6)")
    add("--quiet", type=float, default=1.0, metavar="SHARE", help="repeat rounds where others used more CPU, as 0.05")
    add("--tree", type=Path, default=HERE.parent, metavar="FOLDER", help="whose src/shoal to measure")
    add("--json", type=Path, metavar="FILE", help="also write all that was measured there")
    add("--check", action="store_true", help="exit with code 1 if a figure is missed")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    try:
        plan = Plan(given.rounds, given.turn, given.quiet)
        found = speed(given.work, given.arms, plan, given.tree)
    except ArmFailed as failure:
        print(f"\n{failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; the arms have ended", file=sys.stderr)
        return 130
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    overview(found)
    said = missed(found)
    for line in said:
        print(f"missed: {line}")
    return 1 if said and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
