"""What parameter servers give where one host is slow, and what stale gradients cost where none is.

examples
  python benchmarks/serverrace.py race                     lab of 4 hosts, one of them slow: time to a loss against DDP
  python benchmarks/serverrace.py race --durability none --codec fp16 --seeds 3
  python benchmarks/serverrace.py samples                  4 equal workers: samples to the loss at which bsp ends
  python benchmarks/serverrace.py race --check             exit code 1 if a figure is missed

Both train the character GPT of codecrace.py: 4.8 million parameters, global batch 32, AdamW, a warm-up of 50 steps. All
arms have the same initial weights, the same samples in each step, and the same rates.

race: three lab hosts with half a core and one with a sixth. DDP waits for the slow one in each step; servers give it
less to do.
  hand     a hand-written loop with DDP over gloo, each rank a quarter of the batch
  ssp      the Trainer with sync="server:mode=ssp,staleness=4"
  async    the same with mode=async
How stale gradients are depends on the speeds of the hosts, so every arm trains in the lab, from start to end, nothing
is put together from other runs. For each seed `hand` trains --steps steps. The loss to be reached is the mean over its
last 10 of these: training loss, which costs no arm any time, and which for stale gradients is that of the stale
weights. The others train until their last 10 steps have this loss, and at most 1.5 times the steps. Time counts from
the end of the first step. So that a slow minute of the machine does not decide, `hand` trains a short lap again after
each of the others, and its time is its number of steps times the median of its laps' seconds per step. The figure: ssp
and async need at most 0.6 of the time of hand. About 10 minutes a seed. By default servers run on the first of these
hosts, and share its CPU; --server-hosts gives them others.

samples: 4 workers on this host, of equal speed, validation loss every 25 steps (256 windows, smoothed over 3). For each
of 3 seeds: how many samples ssp and async need until they are at the loss at which bsp ends, relative to bsp. The
figure: at most 1.3, the median over seeds. About 25 minutes on two cores.

Run it with the interpreter that benchmarks/setup.sh made. A lab needs root.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from codecrace import WORKERS, file_name
from laps import Lap, Racer, lap
from turns import ArmFailed

from shoal.testing.lab import Lab, why_no_lab

HAND, BSP = "hand", "bsp"
MODES = {"bsp": "mode=bsp", "ssp": "mode=ssp,staleness=4", "async": "mode=async"}
STALE = ("ssp", "async")
SMOOTH = 10  # steps
BEYOND = 1.5  # times the steps: how far an arm may go that has not reached the loss
CPU, SLOW_CPU = 0.5, 0.167  # cores
RACE_STEPS, AGAIN_STEPS, AGAIN_LEAD = 120, 12, 3
SAMPLES_STEPS, EVAL_EVERY = 300, 25
PORT = 29500
MOST_TIME, MOST_SAMPLES = 0.6, 1.3


def server_racer(mode: str, given: argparse.Namespace, seed: int, steps: int, *more: str) -> Racer:
    sync = f"server:{MODES[mode]},servers={given.servers},durability={given.durability}"
    options = ("--sync", sync, "--codec", given.codec, "--workers", str(WORKERS), "--seed", str(seed))
    return Racer(file_name(mode), "server_shoal.py", (*options, "--steps", str(steps), *more))


def hand_racer(lab: Lab, seed: int, steps: int) -> Racer:
    options = ("--seed", str(seed), "--steps", str(steps), "--lab", lab.name, "--port", str(PORT))
    return Racer(HAND, "server_ddp.py", options, WORKERS)


# ---- race


def measure_race(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the loss by arm and seed."""
    seeds = []
    with Lab(hosts=WORKERS + given.server_hosts, rate=given.rate) as lab:
        for host in range(WORKERS):
            lab.shape(host, cpu=SLOW_CPU if host == WORKERS - 1 else CPU)
        if given.server_cpu is not None:
            for host in range(WORKERS, WORKERS + given.server_hosts):
                lab.shape(host, cpu=given.server_cpu)
        for seed in range(given.seeds):
            seeds.append(race_one(lab, seed, given))
    return {"seeds": seeds, "steps": given.steps, "ratios": ratios([one["seconds"] for one in seeds], HAND)}


def race_one(lab: Lab, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    first = lap(hand_racer(lab, seed, given.steps))
    target = first.smoothed(SMOOTH)[-1]
    steps = {HAND: steps_to(first, target)}
    hands, elsewhere = [first.step_seconds()], [first.elsewhere]
    say(f"seed {seed}, {HAND}: loss {target:.4f} after {steps[HAND]} steps of {hands[0]:.2f} s")
    seconds: dict[str, float | None] = {}
    per_step, losses = {}, {}
    for arm in given.arms:
        until = ("--until", str(target), "--smooth", str(SMOOTH), "--lab", lab.name)
        one = lap(server_racer(arm, given, seed, math.ceil(BEYOND * given.steps), *until))
        steps[arm] = count = steps_to(one, target)
        seconds[arm] = None if count is None else one.done[count - 1] - one.done[0]
        per_step[arm], losses[arm] = one.step_seconds(), one.smoothed(SMOOTH)[-1]
        again = lap(hand_racer(lab, seed, AGAIN_STEPS))
        hands.append(again.step_seconds(AGAIN_LEAD))
        elsewhere += [one.elsewhere, again.elsewhere]
        note = f"{count} steps" if count else f"not there after {len(one.done)} steps, at {losses[arm]:.4f}"
        say(f"seed {seed}, {arm}: {note} of {per_step[arm]:.2f} s; {HAND} again: {hands[-1]:.2f} s")
    per_step[HAND] = statistics.median(hands)
    seconds[HAND] = ((steps[HAND] or given.steps) - 1) * per_step[HAND]
    return {
        "seed": seed,
        "target": target,
        "seconds": seconds,
        "steps": steps,
        "seconds_per_step": per_step,
        "losses": losses,
        "hand_laps": hands,
        "cpu_elsewhere": statistics.fmean(elsewhere),
    }


def steps_to(one: Lap, target: float) -> int | None:
    """After how many steps the mean over the last ones was first at this loss."""
    return next((at + 1 for at, loss in enumerate(one.smoothed(SMOOTH)) if loss <= target), None)


def show_race(found: dict[str, Any], given: argparse.Namespace) -> None:
    where = f"{given.servers} servers, durability {given.durability}, codec {given.codec}"
    where += f", on {given.server_hosts} hosts of their own" if given.server_hosts else ", on workers' hosts"
    print(f"\n3 hosts with {CPU} cores, one with {SLOW_CPU}; {where}")
    print(f"  {'seed':<6}{'arm':<8}{'steps':>7}{'s per step':>12}{'s to the loss':>15}{'of hand':>9}")
    for one in found["seeds"]:
        for arm in (HAND, *given.arms):
            took = one["seconds"][arm]
            share = "" if took is None else f"{took / one['seconds'][HAND]:.2f}"
            row = f"{one['steps'][arm] or 'never':>7}{one['seconds_per_step'][arm]:>12.2f}"
            print(f"  {one['seed']:<6}{arm:<8}{row}{'never' if took is None else f'{took:.1f}':>15}{share:>9}")
        laps = ", ".join(f"{value:.2f}" for value in one["hand_laps"])
        print(
            f"        loss {one['target']:.4f}; laps of hand: {laps} s; others used {one['cpu_elsewhere']:.1%} of CPU"
        )
    for arm in given.arms:
        print(f"  time of {arm} relative to hand: {spread(found['ratios'][arm])}", flush=True)


# ---- samples


def measure_samples(given: argparse.Namespace) -> dict[str, Any]:
    seeds = []
    for seed in range(given.seeds):
        evals = ("--notebook", "notebook", "--eval-every", str(given.eval_every))
        curve = lap(server_racer(BSP, given, seed, given.steps, *evals)).curve
        assert curve is not None
        target = curve.at(given.steps)
        steps = {BSP: curve.steps_to(target)}
        say(f"seed {seed}, {BSP}: loss {target:.4f} after {given.steps} steps")
        losses = {BSP: target}
        for arm in given.arms:
            most = math.ceil(BEYOND * given.steps / given.eval_every) * given.eval_every
            one = lap(server_racer(arm, given, seed, most, *evals, "--eval-until", str(target))).curve
            assert one is not None
            steps[arm], losses[arm] = one.steps_to(target), one.smoothed()[-1][1]
            say(f"seed {seed}, {arm}: {steps[arm] or 'never'}, loss {losses[arm]:.4f} after {one.evals[-1][0]} steps")
        seeds.append({"seed": seed, "target": target, "steps": steps, "losses": losses})
    return {"seeds": seeds, "steps": given.steps, "ratios": ratios([one["steps"] for one in seeds], BSP)}


def show_samples(found: dict[str, Any], given: argparse.Namespace) -> None:
    print(f"\n{WORKERS} equal workers, {found['steps']} steps of bsp, {len(found['seeds'])} seeds")
    for one in found["seeds"]:
        reached = ", ".join(f"{arm} {steps and round(steps)}" for arm, steps in one["steps"].items())
        print(f"  seed {one['seed']}: loss {one['target']:.4f} after steps: {reached}")
    for arm in given.arms:
        print(f"  samples of {arm} relative to bsp: {spread(found['ratios'][arm])}", flush=True)


# ---- both


def ratios(found: Sequence[dict[str, float | None]], base: str) -> dict[str, list[float]]:
    """By arm, for each seed; infinite where the loss was not reached."""
    arms = [arm for arm in found[0] if arm != base]
    return {arm: [(one[arm] or math.inf) / (one[base] or math.nan) for one in found] for arm in arms}


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} .. {max(values):.2f} of {len(values)} seeds)"


def missed(found: dict[str, Any], most: float, what: str) -> list[str]:
    return [
        f"{arm}: {statistics.median(values):.2f} of the {what}, and {most} is allowed"
        for arm, values in found["ratios"].items()
        if not statistics.median(values) <= most
    ]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    racing = commands.add_parser("race", help="time to a loss with a slow host (needs root)")
    counting = commands.add_parser("samples", help="samples to a loss with equal workers")
    for one, steps, seeds in ((racing, RACE_STEPS, 1), (counting, SAMPLES_STEPS, 3)):
        add = one.add_argument
        add("--arms", nargs="+", choices=STALE, default=list(STALE), help=f"default {' '.join(STALE)}")
        add("--steps", type=int, default=steps, help=f"after which the loss is the one to be reached (default {steps})")
        add("--seeds", type=int, default=seeds, help=f"how many (default {seeds})")
        add("--servers", type=int, default=2, help="default 2")
        add("--durability", choices=["none", "peer", "disk"], default="peer", help="default peer")
        add("--codec", default="none", help="of pushes to other hosts (default none)")
        add("--json", type=Path, metavar="FILE", help="also write all that was measured there")
        add("--check", action="store_true", help="exit with code 1 if a figure is missed")
    add = racing.add_argument
    add("--rate", help="of each host's link (default: no limit)")
    add("--server-hosts", type=int, default=0, help="hosts for servers alone (default 0: on those of workers)")
    add("--server-cpu", type=float, help="cores of each of these (default: no limit)")
    counting.add_argument("--eval-every", type=int, default=EVAL_EVERY, help=f"steps (default {EVAL_EVERY})")
    given = parser.parse_args()
    if given.command == "samples" and given.steps % given.eval_every:
        parser.error(f"--steps {given.steps} must be a multiple of --eval-every {given.eval_every}")
    if given.command == "race" and given.steps <= SMOOTH:
        parser.error(f"--steps {given.steps} must be more than the {SMOOTH} that losses are averaged over")
    return given


def run(given: argparse.Namespace) -> int:
    if given.command == "race":
        if reason := why_no_lab():
            say(f"no lab, so nothing is measured: {reason}")
            return 1
        found = measure_race(given)
        show_race(found, given)
        said = missed(found, MOST_TIME, "time of hand")
    else:
        found = measure_samples(given)
        show_samples(found, given)
        said = missed(found, MOST_SAMPLES, "samples of bsp")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    for line in said:
        print(f"missed: {line}")
    return 1 if said and given.check else 0


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
            say("\nstopped; the arms have ended")
            return 130


if __name__ == "__main__":
    sys.exit(main())
