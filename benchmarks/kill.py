"""Kills members of groups, again and again, at random moments, and looks how the others fare.

    python benchmarks/kill.py --rounds 100                # shared memory, and hierarchical on two hosts of a lab
    python benchmarks/kill.py --collectives gloo --rounds 20 --seed 7
    python benchmarks/kill.py --rounds 0 --ordering 60    # only: is anything read too early or too late, under load?

In every round a new crew of 2, 3 or 4 (hierarchical: 4 on 2 hosts) works, and the kernel sends SIGKILL to one of its
members, any of them, at a moment drawn evenly from the time that the work takes: a sum of 4 KB to 64 MB in a buffer of
the group or in any tensor, several sums at once, the allocation of a buffer, or the meeting itself. Every survivor must
raise within a second (in a meeting: within twice its timeout), everything it does later must raise too, and no process
and no shared memory may be left. Exits with 1 if one of that did not hold.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from shoal.comm.choose import make_group
from shoal.comm.group import Group
from shoal.core.errors import GroupError
from shoal.testing.departures import (
    NOTICED_WITHIN,
    Operation,
    Plan,
    Story,
    agreed_start,
    kill_at,
    killed_at_work,
    live_through,
    sleep_until,
    survive,
    trouble_of,
    waiting,
)
from shoal.testing.lab import Lab, why_no_lab
from shoal.testing.leaks import LeakCheck, LeakError, mark_descendants
from shoal.testing.ordering import Board, Ordering, busy_cores
from shoal.testing.ranks import RanksFailed, run_ranks

DEADLINE = 20.0
"""Seconds for one round."""
MEETING_TIMEOUT = 2.0
SMALLEST, LARGEST = 10, 24  # powers of two, of float32: 4 KB to 64 MB


@dataclass
class Tally:
    """What the rounds of one kind showed."""

    seconds: list[float] = field(default_factory=list)
    rounds: int = 0
    violations: int = 0
    leftovers: int = 0

    def line(self) -> str:
        times = "no survivor's time"
        if self.seconds:
            median, worst = statistics.median(self.seconds), max(self.seconds)
            times = f"raised after {1e3 * median:6.1f} ms (median), {1e3 * worst:7.1f} ms (worst)"
        return f"{self.rounds:4d} rounds   {times}   leftovers {self.leftovers}   violations {self.violations}"


# -- what is going on when it happens ----------------------------------------------------------------------------------


def sum_in_a_buffer(floats: int, group: Group) -> Operation:
    buffer = group.buffer(floats, torch.float32)
    return lambda: group.sum(buffer).wait()


def sum_of_a_tensor(floats: int, group: Group) -> Operation:
    buffer = torch.zeros(floats)
    return lambda: group.sum(buffer).wait()


def several_sums(floats: int, group: Group) -> Operation:
    parts = group.buffer(floats, torch.float32).split(floats // 7 + 1)

    def operation() -> None:
        for work in [group.sum(part) for part in parts]:
            work.wait()

    return operation


def allocation(floats: int, group: Group) -> Operation:
    return lambda: group.sum(group.buffer(floats, torch.float32)[:100]).wait()


WORKS: dict[str, Callable[[int, Group], Operation]] = {
    "sum in a buffer": sum_in_a_buffer,
    "sum of a tensor": sum_of_a_tensor,
    "several sums": several_sums,
    "allocation": allocation,
}
WEIGHTS = {"sum in a buffer": 5, "sum of a tensor": 3, "several sums": 2, "allocation": 1, "meeting": 1}


class Meeting:
    """A second group is met while a first one, of gloo, says when. Used by every member of one round."""

    def __init__(self, folder: Path, collective: str, lab: Lab | None, victim: int, part: float) -> None:
        self._folder = folder
        self._collective = collective
        self._lab = lab
        self._victim = victim
        self._part = part

    def __call__(self, group: Group) -> dict[str, Any]:
        begun = time.monotonic()
        self._meet(group, "first").close()
        spent = group.gather(torch.tensor([time.monotonic() - begun], dtype=torch.float64)).max()
        start = agreed_start(group)
        departure = start + self._part * float(spent)
        if group.rank == self._victim:
            kill_at(departure)
        sleep_until(start)
        said = ""
        try:
            met = self._meet(group, "second")
        except (GroupError, RuntimeError) as error:
            said = str(error).splitlines()[0] or "it broke"
        if said:
            return {"said": said, "seconds": time.monotonic() - departure, "silent": [], "later": 0.0}
        if group.rank == self._victim:
            time.sleep(DEADLINE)  # it lived to see the end of the meeting, and not much longer
        return survive(met, Plan(start, departure, lambda: met.sum(torch.ones(1000)).wait()), waiting)

    def _meet(self, group: Group, name: str) -> Group:
        distributed: Any = import_module("torch.distributed")
        store = distributed.FileStore(str(self._folder / name), group.size)
        store.set_timeout(timedelta(seconds=MEETING_TIMEOUT))
        hosts = self._lab.hosts if self._lab else []
        host = hosts[group.rank * len(hosts) // group.size].address if hosts else None
        return make_group(
            store,
            group.rank,
            group.size,
            torch.device("cpu"),
            timeout=timedelta(seconds=MEETING_TIMEOUT),
            host=host,
            collective=self._collective,
            run="kill",
        )


# -- rounds ------------------------------------------------------------------------------------------------------------


def one_round(tally: Tally, draw: random.Random, work: str, collective: str, lab: Lab | None) -> str:
    """One crew, one death. What did not hold; empty if all did."""
    size = 4 if lab else draw.choice([2, 3, 4])
    victim, part, floats = draw.randrange(size), draw.random(), int(2 ** draw.uniform(SMALLEST, LARGEST))
    values: list[Any] = []
    troubles: list[str] = []
    tally.rounds += 1
    try:
        with LeakCheck(grace=1.0), tempfile.TemporaryDirectory() as folder:
            if work == "meeting":
                fn: Callable[[Group], Any] = Meeting(Path(folder), collective, lab, victim, part)
            else:
                fn = partial(live_through, Story(killed_at_work, waiting, partial(WORKS[work], floats), part), victim)
            by = "gloo" if work == "meeting" else collective
            values = run_ranks(size, fn, DEADLINE, mortal=[victim], collective=by, lab=lab)
    except LeakError as error:
        tally.leftovers += 1
        troubles.append(str(error))
    except RanksFailed as error:
        troubles.append(str(error))
    within = 2 * MEETING_TIMEOUT if work == "meeting" else NOTICED_WITHIN
    for rank, value in enumerate(values):
        if rank != victim:
            tally.seconds += [value["seconds"]] if value["said"] else []
            troubles += [f"member {rank}: {trouble}"] if (trouble := trouble_of(value, within)) else []
    what = f"member {victim} of {size} killed at {part:.0%} of {work} ({4 * floats} bytes): "
    return what + "; ".join(troubles) if troubles else ""


def kill(collective: str, lab: Lab | None, rounds: int, seed: int) -> dict[str, Tally]:
    draw = random.Random(f"{seed} {collective}")
    tallies: dict[str, Tally] = defaultdict(Tally)
    for number in range(rounds):
        (work,) = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))
        trouble = one_round(tallies[work], draw, work, collective, lab)
        if trouble:
            tallies[work].violations += 1
            print(f"round {number + 1} of {collective}: {trouble}", flush=True)
    return tallies


def order(collective: str, lab: Lab | None, seconds: float, seed: int) -> str:
    """What was read too early or too late, under load; empty if nothing was."""
    for size in [4] if lab else [2, 4]:
        board, fn = Board(size, 4096), partial(_order, seconds, seed)
        try:
            with busy_cores():
                rounds = run_ranks(size, partial(fn, board), 2 * seconds + 30, collective=collective, lab=lab)
        except RanksFailed as error:
            return f"{size} members: {error}"
        print(f"{collective}, {size} members: {rounds[0]} rounds in order, with all cores busy")
    return ""


def _order(seconds: float, seed: int, board: Board, group: Group) -> int:
    return Ordering(group, board, 200_003, seed).run(seconds)


@contextmanager
def lab_for(collective: str) -> Iterator[Lab | None]:
    with Lab(2) if collective == "hierarchical" else nullcontext() as lab:
        yield lab


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collectives", default="shm,hierarchical", help="shm, hierarchical, gloo; by commas")
    parser.add_argument("--rounds", type=int, default=100, help="deaths for each collective (100)")
    parser.add_argument("--ordering", type=float, default=0.0, help="seconds of the ordering test, for each size (0)")
    parser.add_argument("--seed", type=int, default=4)
    options = parser.parse_args()
    mark_descendants()
    torch.set_num_threads(1)
    broken = False
    for collective in options.collectives.split(","):
        if collective == "hierarchical" and (reason := why_no_lab()):
            print(f"hierarchical: needs two hosts: {reason}", file=sys.stderr)
            return 1
        with lab_for(collective) as lab:
            tallies = kill(collective, lab, options.rounds, options.seed)
            trouble = order(collective, lab, options.ordering, options.seed) if options.ordering else ""
        for work, tally in sorted(tallies.items()):
            print(f"{collective:13} {work:16} {tally.line()}")
        if trouble:
            print(f"{collective}: not in order: {trouble}")
        broken = broken or bool(trouble) or any(tally.violations for tally in tallies.values())
    print(
        "not all held" if broken else f"all survivors raised within {NOTICED_WITHIN:g} s, and nothing was left behind"
    )
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
