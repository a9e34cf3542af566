"""How long a training is away after one of its workers was killed or stopped, or a link was cut.

examples
  python benchmarks/recovery.py                       50 kills of the elastic Trainer, 5 of torchrun, in turn
  python benchmarks/recovery.py --kills 10 --torchrun 1 --stops 0
  python benchmarks/recovery.py --check               exit code 1 if a figure is missed

10 million parameters (40 MB of gradients), steps of about 100 ms, 4 workers. One of them, any, is killed at a random
moment. From just before the SIGKILL to the moment when all survivors have committed their first step in a new term; of
that a step of three workers is what they would have needed anyway; its time is that of a calm training of three just
before. Then to the moment when four workers have committed a step together again. Sessions of the arms take turns.

  shoal      the Trainer with min_workers=2
  torchrun   DDP over gloo, started with --max-restarts and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which it does
             not come back; to its first step after the kill. It starts from nothing: loading a checkpoint would be more

A stop is SIGSTOP to a worker. A cut (in a lab, with root) lets nothing through between two hosts with two workers each,
until the next commit.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from commits import BATCH, BATCH_NAME, WORKERS, Training, TrainingFailed, shoal_command, shown, torchrun_command

from shoal.testing.lab import Lab, why_no_lab

PER_SESSION = 10
MEDIAN_TARGET, WORST_TARGET = 0.25, 1.0  # seconds beyond a step of three workers
BACK_TARGET = 1.0  # seconds to four members
RATIO_TARGET = 10.0
HEARTBEAT_BOUND = 2.0  # seconds; a stop or a cut may take three times as long
GIVE_UP = 60.0


@dataclass
class Found:
    """Seconds of each event of one kind."""

    away: list[float] = field(default_factory=list)
    """To the next commit."""
    beyond: list[float] = field(default_factory=list)
    """The same without a step of three workers."""
    back: list[float] = field(default_factory=list)
    """To the first step of four workers."""


@dataclass
class All:
    kills: Found = field(default_factory=Found)
    stops: Found = field(default_factory=Found)
    cuts: Found = field(default_factory=Found)
    torchrun: list[float] = field(default_factory=list)
    steps: dict[int, list[float]] = field(default_factory=lambda: {3: [], 4: []})
    torchrun_steps: list[float] = field(default_factory=list)


def harm_and_watch(training: Training, harm: Callable[[], None], mend: Callable[[], None]) -> tuple[float, float]:
    """Seconds from `harm` until all members of a newer term have committed a step, and until four have."""
    term, begun = training.ledgers.term(), time.monotonic()
    harm()

    def committed(members: Callable[[int], bool]) -> float | None:
        by_step: dict[tuple[int, int], list[float]] = {}
        for record in training.ledgers.records:
            if record.term > term and record.shares and members(len(record.shares)):
                times = by_step.setdefault((record.term, record.step), [])
                times.append(record.time)
                if len(times) == len(record.shares):
                    return max(times)
        return None

    training.await_that(lambda: committed(lambda count: True) is not None, "a step in a new term", GIVE_UP)
    mend()
    training.await_that(lambda: committed(WORKERS.__eq__) is not None, f"{WORKERS} workers again", GIVE_UP)
    first, full = committed(lambda count: True), committed(WORKERS.__eq__)
    assert first is not None and full is not None
    return first - begun, full - begun


def nothing() -> None:
    """To mend."""


def session(folder: Path, events: int, number: int, draw: random.Random, found: Found, everything: All) -> None:
    """One training of Shoal in which workers get this signal, again and again."""
    three = calm_step(folder.with_name(f"{folder.name}-calm"), everything)
    with Training(shoal_command(folder), folder) as training:
        gone = []
        for away, back in signalled(training, events, number, draw):
            gone.append(away)
            found.back.append(back)
        everything.steps[WORKERS] += training.ledgers.step_seconds(WORKERS)
    found.away += gone
    found.beyond += [away - three for away in gone]


def signalled(training: Training, events: int, number: int, draw: random.Random) -> Iterator[tuple[float, float]]:
    """Sends a worker this signal at a random moment, again and again; see harm_and_watch."""
    training.await_crew(steps=12)
    for _ in range(events):
        training.await_crew()
        time.sleep(draw.uniform(0.0, 0.25))
        training.ledgers.read()
        victim = draw.choice(sorted(training.ledgers.crew()))
        yield harm_and_watch(training, lambda pid=victim: os.kill(pid, number), nothing)  # type: ignore[misc]


def calm_step(folder: Path, everything: All) -> float:
    """The median time of a step of three workers."""
    with Training(shoal_command(folder, "--workers", "3"), folder) as training:
        training.await_crew(workers=3, steps=12)
        since = time.monotonic()
        training.await_crew(workers=3, steps=20)
        seconds = training.ledgers.step_seconds(3, since)
    everything.steps[3] += seconds
    return statistics.median(seconds)


def torchrun_session(folder: Path, draw: random.Random, everything: All) -> None:
    around = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with Training(torchrun_command(folder), folder, **around) as training:
        training.await_crew(steps=12)
        everything.torchrun_steps += training.ledgers.step_seconds(WORKERS)
        victim = draw.choice(sorted(training.ledgers.crew()))
        away, _ = harm_and_watch(training, lambda: os.kill(victim, signal.SIGKILL), nothing)
        everything.torchrun.append(away)


def cut_session(folder: Path, events: int, everything: All) -> None:
    with Lab(hosts=2) as lab, Training(shoal_command(folder, "--lab", lab.name), folder) as training:
        training.await_crew(steps=12)
        for _ in range(events):
            training.await_crew()
            away, back = harm_and_watch(training, lambda: lab.cut("a", "b"), lab.heal)
            everything.cuts.away.append(away)
            everything.cuts.back.append(back)


def measure(given: argparse.Namespace, home: Path) -> All:
    draw, everything = random.Random(given.seed), All()
    sessions = -(-given.kills // given.per_session)
    for number in range(max(sessions, given.torchrun)):
        if number < sessions:
            kills = min(given.per_session, given.kills - number * given.per_session)
            session(home / f"kill-{number}", kills, signal.SIGKILL, draw, everything.kills, everything)
            print(f"shoal {number + 1}: {shown(everything.kills.away)}", file=sys.stderr, flush=True)
        if number < given.torchrun:
            torchrun_session(home / f"torchrun-{number}", draw, everything)
            print(f"torchrun {number + 1}: {everything.torchrun[-1]:.2f} s", file=sys.stderr, flush=True)
    if given.stops:
        session(home / "stop", given.stops, signal.SIGSTOP, draw, everything.stops, everything)
    if given.cuts and (reason := why_no_lab()):
        print(f"no cuts: {reason}")
    elif given.cuts:
        cut_session(home / "cut", given.cuts, everything)
    return everything


def show(found: All) -> None:
    for members, seconds in found.steps.items():
        if seconds:
            print(f"a step of {members} workers: median {statistics.median(seconds) * 1e3:.0f} ms of {len(seconds)}")
    if found.torchrun_steps:
        print(f"a step of {WORKERS} under torchrun: median {statistics.median(found.torchrun_steps) * 1e3:.0f} ms")
    print(f"SIGKILL to the survivors' next commit                {shown(found.kills.away)}")
    print(f"  beyond a step of three workers                     {shown(found.kills.beyond)}")
    print(f"  until four workers train again                     {shown(found.kills.back)}")
    print(f"torchrun: SIGKILL to its next step                   {shown(found.torchrun)}")
    if found.torchrun and found.kills.away:
        print(f"  times Shoal's (medians)                            {ratio(found):.1f}")
    print(f"SIGSTOP to the others' next commit                   {shown(found.stops.away)}")
    print(f"cut between two hosts to the next commit             {shown(found.cuts.away)}")


def ratio(found: All) -> float:
    return statistics.median(found.torchrun) / statistics.median(found.kills.away)


def missed(found: All) -> list[str]:
    """The figures that were not reached, in words."""
    said = []
    for what, seconds, limit in (
        ("median beyond a step", [statistics.median(found.kills.beyond)] if found.kills.beyond else [], MEDIAN_TARGET),
        ("worst beyond a step", found.kills.beyond, WORST_TARGET),
        ("median until four workers", [statistics.median(found.kills.back)] if found.kills.back else [], BACK_TARGET),
        ("worst after a stop", found.stops.away, 3 * HEARTBEAT_BOUND),
        ("worst after a cut", found.cuts.away, 3 * HEARTBEAT_BOUND),
    ):
        if seconds and max(seconds) >= limit:
            said.append(f"{what}: {max(seconds):.3f} s, and it must be below {limit:g} s")
    if found.torchrun and found.kills.away and ratio(found) < RATIO_TARGET:
        said.append(f"{ratio(found):.1f} times as fast as torchrun, and it must be {RATIO_TARGET:g}")
    return said


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--kills", type=int, default=50, help="of Shoal's workers (default 50)")
    add("--per-session", type=int, default=PER_SESSION, help=f"kills in one training (default {PER_SESSION})")
    add(
        "--torchrun", type=int, default=5, help="kills of torchrun's workers, each in a training of its own (default 5)"
    )
    add("--stops", type=int, default=5, help="default 5")
    add("--cuts", type=int, default=5, help="default 5; needs root")
    add("--batch", type=int, default=BATCH, help=f"samples of a step: tune it for steps of 100 ms (default {BATCH})")
    add("--seed", type=int, default=1)
    add("--check", action="store_true", help="exit with code 1 if a figure is missed")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    os.environ[BATCH_NAME] = str(given.batch)
    with tempfile.TemporaryDirectory(prefix="bench-") as home:
        try:
            found = measure(given, Path(home))
        except TrainingFailed as failure:
            print(f"\n{failure}", file=sys.stderr)
            return 1
    show(found)
    said = missed(found)
    for line in said:
        print(f"missed: {line}")
    return 1 if said and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
