"""What a step with parameter servers takes: against allreduce on one host, and with more servers between hosts.

examples
  python benchmarks/serverstep.py                          16 MB, 2 workers on this host, servers against allreduce
  python benchmarks/serverstep.py --optimizer adamw --share 32
  python benchmarks/serverstep.py servers                  lab of 4+2 hosts: 2 servers against 1, by the speed of links
  python benchmarks/serverstep.py servers --rates 1gbit --megabytes 16
  python benchmarks/serverstep.py --check                  exit code 1 if a figure is missed

step: a dense model on 2 workers of this host, one compute thread each
  allreduce         the Trainer with sync="allreduce", collective="gloo": what the others are compared with
  hand              a hand-written loop with DDP over gloo
  alone             forward and backward only, on both workers at once: what there is to compute in a step
  1-none, 1-peer    the Trainer with sync="server", mode bsp, so many servers with this durability
  2-none, 2-peer    (with 1-peer a second process keeps the copy)
The figure: a step with servers takes at most 1.5 times as long as with allreduce.

servers: a large dense model, one sample to each of 4 workers on hosts of their own; each server has a host of its own
too, behind the same kind of link; nothing is copied (durability=none). The figure: at 1 Gbit/s 2 servers do 1.6 times
the steps of 1. What one link would need for the bytes of a step is told as a share of what the step took: far below
100% means that something else, such as the CPU that all hosts of a lab share, was the limit; slower links show the
figure without it.

Arms cannot be halted between steps here, so each trains some steps from start to end (a *lap*, see laps.py), and a
round is one lap of every arm, in an order that rotates and reverses. Start-up and the first steps are not on the clock.
Ratios are taken within a round; the first round does not count. Run it with the interpreter that benchmarks/setup.sh
made; a lab needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from laps import Lap, Racer, lap
from ratios import FEWEST, Interval, median_interval
from run import order
from turns import ArmFailed

from shoal.testing.lab import Lab, why_no_lab
from shoal.testing.lab.shape import read_rate

BASE = "allreduce"
STEP_ARMS = (BASE, "hand", "alone", "1-none", "1-peer", "2-none", "2-peer")
WORKERS, MEGABYTES, SHARE, STEPS = 2, 16.0, 16, 40
MOST_OF_ALLREDUCE = 1.5  # times its seconds per step, median

LAB_WORKERS, MOST_SERVERS = 4, 2
RATES = ("1gbit", "200mbit")
SECONDS_ON_ONE = 2.2  # that the bytes of a step should take on the link of a single server; gives the model's size
LAB_STEPS, LAB_LEAD = 9, 3
FIGURE_RATE, LEAST_OF_TWO = "1gbit", 1.6
PAYLOAD = 0.95  # of a link's rate: the rest is headers


def step_racer(arm: str, given: argparse.Namespace) -> Racer:
    dense = ("--dense", str(given.megabytes), "--share", str(given.share), "--optimizer", given.optimizer)
    common = (*dense, "--steps", str(given.steps))
    if arm in ("hand", "alone"):
        return Racer(arm, "server_ddp.py", (*common, *(("--alone",) if arm == "alone" else ())), WORKERS)
    sync = BASE
    if arm != BASE:
        servers, durability = arm.split("-")
        sync = f"server:mode=bsp,servers={servers},durability={durability}"
    return Racer(arm, "server_shoal.py", (*common, "--workers", str(WORKERS), "--sync", sync))


def race(racers: Sequence[Racer], rounds: int, lead: int) -> dict[str, Any]:
    """Seconds per step by arm and round, and what other processes used of the machine."""
    by_name = {racer.name: racer for racer in racers}
    laps: dict[str, list[Lap]] = {name: [] for name in by_name}
    for number in range(rounds + 1):
        for name in order(list(by_name), number):
            one = lap(by_name[name])
            if number:
                laps[name].append(one)
        say(f"round {number} of {rounds}" if number else "warm")
    return {
        "seconds_per_step": {name: [one.step_seconds(lead) for one in ran] for name, ran in laps.items()},
        "cpu": {name: float(np.median([one.used for one in ran])) for name, ran in laps.items()},
        "cpu_elsewhere": float(np.mean([one.elsewhere for ran in laps.values() for one in ran])),
        "rounds": rounds,
    }


# ---- step


def measure_step(given: argparse.Namespace) -> dict[str, Any]:
    found = race([step_racer(arm, given) for arm in given.arms], given.rounds, lead=4)
    seconds = found["seconds_per_step"]
    found["times"] = {
        arm: vars(median_interval([own / base for own, base in zip(values, seconds[BASE], strict=True)]))
        for arm, values in seconds.items()
    }
    what = f"{given.megabytes:g} MB, {given.optimizer}, {WORKERS} workers, {given.share} samples each"
    print(f"\n{what}; {given.rounds} rounds of {given.steps} steps")
    print(f"  {'arm':<12}{'ms per step':>12}{'middle half':>18}{'times ' + BASE:>28}")
    for arm, values in seconds.items():
        low, middle, high = (1e3 * value for value in np.percentile(values, [25, 50, 75]))
        print(f"  {arm:<12}{middle:>12.1f}{f'{low:.1f} .. {high:.1f}':>18}{in_words(found['times'][arm]):>28}")
    print(f"  other processes used {found['cpu_elsewhere']:.1%} of the machine", flush=True)
    return found


def step_missed(found: dict[str, Any]) -> list[str]:
    said = []
    for arm, times in found["times"].items():
        if arm.partition("-")[2] and times["median"] > MOST_OF_ALLREDUCE:
            said.append(f"{arm}: {times['median']:.2f} times the step of {BASE}, and {MOST_OF_ALLREDUCE} is allowed")
    return said


# ---- servers


def measure_servers(given: argparse.Namespace) -> list[dict[str, Any]]:
    with Lab(hosts=LAB_WORKERS + MOST_SERVERS) as lab:
        return [one_rate(lab, rate, given) for rate in given.rates]


def one_rate(lab: Lab, rate: str, given: argparse.Namespace) -> dict[str, Any]:
    lab.shape(rate=rate)
    bytes_per_second = PAYLOAD * (read_rate(rate) or 0) / 8
    megabytes = given.megabytes or round(SECONDS_ON_ONE / 2 / LAB_WORKERS * bytes_per_second / (1 << 20))
    racers = [lab_racer(servers, megabytes, lab, given) for servers in (1, MOST_SERVERS)]
    found = race(racers, given.rounds, LAB_LEAD)
    one, two = (found["seconds_per_step"][racer.name] for racer in racers)
    speed = median_interval([base / own for base, own in zip(one, two, strict=True)])
    found |= {"rate": rate, "megabytes": megabytes, "mode": given.mode, "speed": vars(speed)}
    print(f"\n{rate}: {LAB_WORKERS} workers, {megabytes:g} MB, mode {given.mode}, {given.rounds} rounds")
    print(f"  {'servers':<10}{'s per step':>11}{'middle half':>18}{'link':>8}{'CPU':>8}")
    for servers, racer in zip((1, MOST_SERVERS), racers, strict=True):
        low, middle, high = np.percentile(found["seconds_per_step"][racer.name], [25, 50, 75])
        link = 2 * LAB_WORKERS * megabytes * (1 << 20) / servers / bytes_per_second / middle
        quarters = f"{low:.3f} .. {high:.3f}"
        print(f"  {servers:<10}{middle:>11.3f}{quarters:>18}{link:>8.0%}{found['cpu'][racer.name]:>8.0%}")
    print(f"  steps per second with {MOST_SERVERS} servers, times those with 1: {in_words(found['speed'])}")
    print("  link: what the bytes of a step need on a server's link, one direction after the other")
    print(f"  other processes used {found['cpu_elsewhere']:.1%} of the machine", flush=True)
    return found


def lab_racer(servers: int, megabytes: float, lab: Lab, given: argparse.Namespace) -> Racer:
    sync = f"server:mode={given.mode},servers={servers},durability=none"
    options = ("--dense", str(megabytes), "--sync", sync, "--workers", str(LAB_WORKERS), "--lab", lab.name)
    return Racer(str(servers), "server_shoal.py", (*options, "--codec", given.codec, "--steps", str(given.steps)))


def servers_missed(reports: Sequence[dict[str, Any]]) -> list[str]:
    return [
        f"2 servers do {found['speed']['median']:.2f} times the steps of 1 at {found['rate']}, not {LEAST_OF_TWO}"
        for found in reports
        if found["rate"] == FIGURE_RATE and found["speed"]["median"] < LEAST_OF_TWO
    ]


# ---- command line


def in_words(interval: dict[str, float]) -> str:
    one = Interval(**interval)
    return f"{one.median:.2f} ({one.low:.2f} .. {one.high:.2f})"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("what", choices=["step", "servers"], nargs="?", default="step", help="default step")
    add("--rounds", type=int, default=7, help=f"that count, at least {FEWEST} (default 7)")
    add("--megabytes", type=float, help=f"of the model (step: {MEGABYTES:g}; servers: what fits the link)")
    add("--steps", type=int, help=f"of a lap (step: {STEPS}; servers: {LAB_STEPS})")
    add(
        "--arms",
        nargs="+",
        choices=STEP_ARMS,
        default=list(STEP_ARMS),
        help=f"step: default all; {BASE} is one of them",
    )
    add("--share", type=int, default=SHARE, help=f"step: samples of each worker (default {SHARE})")
    add("--optimizer", choices=["sgd", "momentum", "adamw"], default="adamw", help="step: default adamw")
    add("--rates", nargs="+", default=list(RATES), help=f"servers: of each host's link (default {' '.join(RATES)})")
    add("--mode", choices=["bsp", "ssp", "async"], default="bsp", help="servers: default bsp")
    add("--codec", default="none", help="servers: of pushes (default none)")
    add("--json", type=Path, metavar="FILE", help="also write all that was measured there")
    add("--check", action="store_true", help="exit with code 1 if a figure is missed")
    given = parser.parse_args()
    if given.rounds < FEWEST:
        parser.error(f"--rounds {given.rounds}: an interval needs at least {FEWEST}")
    if BASE not in given.arms:
        parser.error(f"--arms: {BASE} must be one of them")
    if given.what == "step":
        given.megabytes = given.megabytes or MEGABYTES
    given.steps = given.steps or (STEPS if given.what == "step" else LAB_STEPS)
    return given


def run(given: argparse.Namespace) -> int:
    found: Any
    if given.what == "step":
        found = measure_step(given)
        said = step_missed(found)
    else:
        if reason := why_no_lab():
            say(f"no lab, so nothing is measured: {reason}")
            return 1
        found = measure_servers(given)
        said = servers_missed(found)
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
