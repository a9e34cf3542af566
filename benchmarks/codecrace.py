"""What codecs give where hosts are far apart: time to a loss, against a hand-written loop and torch's PowerSGD hook.

examples
  python benchmarks/codecrace.py train                     validation curves, 3 seeds (hours); run again, it goes on
  python benchmarks/codecrace.py time                      seconds and bytes of a step on 4 lab hosts at 100 Mbit/s
  python benchmarks/codecrace.py report --check            both together; exit code 1 if a figure is missed
  python benchmarks/codecrace.py train --arms hand int8 --seeds 1 --steps 100
  python benchmarks/codecrace.py time --hosts 8 --arms none int8 onebit

A character GPT of 4.8 million parameters (6 layers of width 256, context 64) on Shakespeare, global batch 32, AdamW
(in all arms torch's fused kernel) with a warm-up of 50 steps and a constant rate afterwards. All arms have the same
initial weights, batches, rates and evaluations (every 25 steps, 256 windows of text that is not trained on).

  hand                 a hand-written loop with DDP over gloo
  hook-1, -2, -4       the same with torch's PowerSGD hook at this rank, from the eleventh step on, in one bucket
  hook-4-default       the same with torch's default buckets (for `time`; its curve is that of hook-4)
  none, fp16, ...      the Trainer with this codec, over gloo

Training runs unshaped, 4 workers on this host: what a link is like does not change the numbers that are summed. Its
steps are timed in a lab, and the time to a loss is the sum of the times that its steps would have taken there: each
step counts as a step of its phase, as the training notes for each step which codec its gradients went by. The loss to
be reached is the one at which `hand` ends with the same seed; curves are smoothed over three evaluations. Who is not
there yet after as many steps goes on, but not for ever.

In `time` all arms are alive at once and take turns (see turns.py). All begin shaped, which gives the phase before a
codec's own; arms with a long warm-up then go through it unshaped; then rounds are timed, shaped, in another order each.
Run it with the interpreter that benchmarks/setup.sh made.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from codecrace_report import HAND, HOOK, curve_of, missed, show
from curves import Curve, Turn, by_codec, read_curve
from run import order
from turns import HERE, Arm, ArmFailed, Table, rank_environments

from shoal.core import spec
from shoal.core.errors import ConfigError
from shoal.testing.lab import Lab, why_no_lab

CODECS = ("none", "fp16", "bf16", "int8", "powersgd:rank=32", "onebit", "topk:density=0.01")
HOOKS = ("hook-1", "hook-2", "hook-4")
ARMS = (HAND, *HOOKS, *CODECS)
WORKERS, BATCH = 4, 32
SEEDS, STEPS, EVAL_EVERY = 3, 600, 25
BEYOND = 1.5  # times the steps: how far an arm may go that has not reached the loss
RATE, ROUNDS, TURN_STEPS, LEAD = "100mbit", 5, 8, 2
LONG_WARM_UP = ("powersgd", "onebit", "topk", "auto")
WARM_TURNS = 3  # shaped turns at first, of arms with a long warm-up; others have one
AT_ONCE, LEAST_WARM_UP, MOST_WARM_UP = 25, 150, 600  # steps of an unshaped turn, and of all of them
START_WITHIN, SILENT_FOR = 600.0, 180.0  # seconds
DEFAULT_FILE = Path("build/codecrace.json")


@dataclass(frozen=True)
class Plan:
    """How long an arm trains."""

    steps: int
    most: int
    eval_every: int


# ---- commands of the arms


def arm_command(name: str, folder: Path, notebook: Path, workers: int, *options: str) -> tuple[tuple[str, ...], bool]:
    """The command line of an arm, and whether it is started once for each rank."""
    scripts = HERE / "arms"
    if hook := HOOK.fullmatch(name):
        chosen = ("--rank-of-hook", hook[1], *(("--default-buckets",) if hook[2] else ()))
        return (sys.executable, str(scripts / "codec_ddp.py"), str(notebook), *chosen, *options), True
    if name == HAND:
        return (sys.executable, str(scripts / "codec_ddp.py"), str(notebook), *options), True
    where = (str(folder / "run"), str(notebook), "--workers", str(workers))
    return (sys.executable, str(scripts / "codec_shoal.py"), name, *where, *options), False


def file_name(arm: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", arm)


# ---- train


def train(arms: Sequence[str], seeds: Sequence[int], plan: Plan, file: Path) -> None:
    """Curves of all arms, those that the file has left out; `hand` first, as its loss tells others when to stop."""
    for seed in seeds:
        for arm in sorted(arms, key=lambda name: name != HAND):
            found = read(file)
            if (had := curve_of(found, arm, seed)) and had.evals[-1][0] >= plan.steps:
                continue
            target = curve_of(found, HAND, seed)
            until = target.at(plan.steps) if target and arm != HAND and target.evals[-1][0] >= plan.steps else None
            begun = time.monotonic()
            curve = train_one(arm, seed, plan, until)
            put(file, found, arm, seed, curve, plan)
            took, (steps, loss) = time.monotonic() - begun, curve.smoothed()[-1]
            say(f"{arm}, seed {seed}: loss {loss:.4f} after {steps} steps, {took:.0f} s")


def train_one(arm: str, seed: int, plan: Plan, until: float | None) -> Curve:
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        options = ["--seed", str(seed), "--steps", str(plan.steps), "--eval-every", str(plan.eval_every)]
        if until is not None:
            options += ["--until", str(until), "--most", str(plan.most)]
        command, per_rank = arm_command(arm, folder, folder / "notebook", WORKERS, *options)
        run_to_end(arm, command, rank_environments(WORKERS) if per_rank else [{}], folder)
        return read_curve(folder / "notebook")


def run_to_end(arm: str, command: Sequence[str], environments: Sequence[Mapping[str, str]], folder: Path) -> None:
    """Raises ArmFailed, with the last lines of what it wrote, if a process of the arm fails; none is left then."""
    log, paths = folder / "log", [str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    shared = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    processes = []
    try:
        for environment in environments:
            with log.open("ab") as out:
                whole = {**shared, **environment}
                processes.append(
                    subprocess.Popen(
                        command, env=whole, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
                    )
                )
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                break
            time.sleep(0.2)
    finally:
        left = [process for process in processes if process.poll() is None]
        for process in left:
            process.terminate()
        for process in left:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if any(process.returncode for process in processes):
        lines = "\n".join(f"  | {line}" for line in log.read_text(errors="replace").splitlines()[-25:])
        raise ArmFailed(f"arm {arm} failed. Its last lines:\n{lines}")


# ---- time


@dataclass
class Timed:
    """An arm at the table: how many steps it has done, and what its turns took, those at first and those that count."""

    arm: str
    notebook: Path
    steps: int = 1  # the first is done before an arm takes turns
    early: list[Turn] = field(default_factory=list)
    late: list[Turn] = field(default_factory=list)
    failure: str = ""

    def codec(self) -> str:
        """By which its last step went."""
        return read_curve(self.notebook).codec_at(self.steps - 1)

    def settled(self) -> bool:
        name = self.arm.partition(":")[0]
        return not is_long(self.arm) or name == "auto" or name in self.codec().split("+")


def time_steps(arms: Sequence[str], rate: str, rounds: int, turn_steps: int, hosts: int) -> dict[str, Any]:
    """Seconds and bytes of a step of every arm in every phase, with the rounds' spread."""
    with Lab(hosts=hosts, rate=rate) as lab, tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        seats, timed = [], {}
        for number, arm in enumerate(arms):
            own = folder / file_name(arm)
            own.mkdir()
            timed[arm] = Timed(arm, own / "notebook")
            port = ("--port", str(29500 + number)) if arm == HAND or HOOK.fullmatch(arm) else ()
            command, per_rank = arm_command(arm, own, own / "notebook", hosts, "--lab", lab.name, *port)
            seats.append(Arm(file_name(arm), command, per_rank))
        with Table(seats, share=BATCH // hosts, workers=hosts, folder=folder, deadline=START_WITHIN) as table:
            say(f"{len(arms)} arms ready on {hosts} hosts, torch {', '.join(table.torch)}")
            table.deadline = SILENT_FOR
            time_phases(table, lab, list(timed.values()), rate, rounds, turn_steps)
            elsewhere = table.cpu_elsewhere / table.cpu_available
    measured = {one.arm: by_codec(one.early, one.late) for one in timed.values() if not one.failure}
    return {
        "rate": rate,
        "hosts": hosts,
        "rounds": rounds,
        "steps_per_turn": turn_steps,
        "cpu_elsewhere": elsewhere,
        "arms": measured,
        "failures": {one.arm: one.failure for one in timed.values() if one.failure},
    }


def is_long(arm: str) -> bool:
    """Whether its warm-up is longer than a turn."""
    return arm.partition(":")[0] in LONG_WARM_UP


def time_phases(table: Table, lab: Lab, arms: Sequence[Timed], rate: str, rounds: int, turn_steps: int) -> None:
    for one in arms:
        for _ in range(WARM_TURNS if is_long(one.arm) else 1):
            timed_turn(table, lab, one, one.early, turn_steps)
    lab.shape(rate="none")
    for one in arms:
        while is_long(one.arm) and one.steps < MOST_WARM_UP:
            settled = one.settled() and one.steps >= LEAST_WARM_UP  # what is rare later is frequent at first
            table.turn(file_name(one.arm), lead=0, steps=AT_ONCE)
            one.steps += AT_ONCE
            if settled:
                break  # one turn more than needed: the first steps with a codec are also used to judge it
        note = "" if one.settled() else ", and that is not its own: it is timed all the same"
        say(f"{one.arm}: timed from step {one.steps} on; its gradients go by {one.codec()}{note}")
    lab.shape(rate=rate)
    by_name = {one.arm: one for one in arms}
    for number in range(rounds):
        for arm in order(list(by_name), number):
            if not by_name[arm].failure:
                timed_turn(table, lab, by_name[arm], by_name[arm].late, turn_steps)
        say(f"round {number + 1} of {rounds}")


def timed_turn(table: Table, lab: Lab, one: Timed, into: list[Turn], steps: int) -> None:
    before = [lab.counters(host).sent for host in lab.hosts]
    try:
        seconds = table.turn(file_name(one.arm), lead=LEAD, steps=steps)
    except ArmFailed as failure:
        if not one.arm.endswith("-default"):
            raise
        one.failure = str(failure)  # two buckets of the hook are known to get mixed up
        say(one.failure)
        return
    sent = max(lab.counters(host).sent - was for host, was in zip(lab.hosts, before, strict=True))
    first = one.steps
    one.steps += LEAD + steps
    time.sleep(0.2)  # the notebook is written by another process than the workers
    curve = read_curve(one.notebook)
    codecs = [curve.codec_at(step) for step in range(first, one.steps)]
    into.append(Turn(seconds, Counter(codecs[LEAD:]), sent, Counter(codecs)))


# ---- the file


def read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return {"train": {}, "time": {}, **found}


def write(file: Path, found: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(json.dumps(found, indent=1))
    new.replace(file)


def put(file: Path, found: dict[str, Any], arm: str, seed: int, curve: Curve, plan: Plan) -> None:
    found["train"].setdefault(arm, {})[str(seed)] = {**asdict(curve), "planned": plan.steps}
    write(file, found)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- command line


def arm_name(text: str) -> str:
    if text == HAND or HOOK.fullmatch(text):
        return text
    try:
        spec.parse("codec", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{error}; or {HAND}, hook-RANK, hook-RANK-default") from None
    return text


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="validation curves, unshaped")
    timing = commands.add_parser("time", help="seconds of a step between lab hosts (needs root)")
    telling = commands.add_parser("report", help="both together")
    for one in (training, timing, telling):
        one.add_argument("--file", type=Path, default=DEFAULT_FILE, help=f"where results are (default {DEFAULT_FILE})")
    for one in (training, telling):
        one.add_argument("--steps", type=int, default=STEPS, help=f"after which losses are compared (default {STEPS})")
    for one in (training, timing):
        one.add_argument("--arms", type=arm_name, nargs="+", default=list(ARMS), help=f"default {' '.join(ARMS)}")
    add = training.add_argument
    add("--seeds", type=int, default=SEEDS, help=f"how many (default {SEEDS})")
    add("--most", type=int, help=f"steps of an arm that has not reached the loss (default {BEYOND:g} times --steps)")
    add("--eval-every", type=int, default=EVAL_EVERY, help=f"steps, of which --steps is a multiple ({EVAL_EVERY})")
    add = timing.add_argument
    add("--rate", default=RATE, help=f"of each host's link (default {RATE})")
    add("--rounds", type=int, default=ROUNDS, help=f"one turn of every arm in each (default {ROUNDS})")
    add("--turn-steps", type=int, default=TURN_STEPS, help=f"steps of a turn that count (default {TURN_STEPS})")
    add("--hosts", type=int, default=WORKERS, help=f"with a worker each (default {WORKERS})")
    telling.add_argument("--check", action="store_true", help="exit with code 1 if a figure is missed")
    given = parser.parse_args()
    if given.command == "train" and given.steps % given.eval_every:
        parser.error(f"--steps {given.steps} must be a multiple of --eval-every {given.eval_every}")
    return given


def run(given: argparse.Namespace) -> int:
    if given.command == "train":
        plan = Plan(given.steps, given.most or round(BEYOND * given.steps), given.eval_every)
        train(given.arms, range(given.seeds), plan, given.file)
    elif given.command == "time":
        if reason := why_no_lab():
            say(f"no lab, so nothing is timed: {reason}")
            return 1
        timed = time_steps(given.arms, given.rate, given.rounds, given.turn_steps, given.hosts)
        found = read(given.file)
        found["time"][f"{given.hosts} hosts"] = timed
        write(given.file, found)
    else:
        found = read(given.file)
        show(found, given.steps)
        said = missed(found, given.steps)
        for line in said:
            print(f"missed: {line}")
        return 1 if said and given.check else 0
    return 0


def main() -> int:
    given = arguments()
    with tempfile.TemporaryDirectory(prefix="bench-") as home:
        os.environ |= {"SHOAL_HOME": home, "SHOAL_PROGRESS": "quiet", "SHOAL_STORE": "none"}
        try:
            return run(given)
        except ArmFailed as failure:
            say(f"\n{failure}")
            return 1
        except KeyboardInterrupt:
            say("\nstopped; the arms have ended, and what is measured is kept")
            return 130


if __name__ == "__main__":
    sys.exit(main())
