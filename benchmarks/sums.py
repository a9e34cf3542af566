"""How fast a group sums, against gloo: both groups live in the same processes and take turns.

examples
  python benchmarks/sums.py host                        shared memory, 4 B to 400 MB, 2 and 4 workers
  python benchmarks/sums.py host --collective gloo      gloo against itself: what the machine can resolve
  python benchmarks/sums.py lab                         two lab hosts with 2 workers each at 1 Gbit/s; needs root

`host` shows three ways for each size, and with them how long one worker takes to copy as much memory (memcpy):
  gloo      over loopback
  in place  the buffer came from `group.buffer`
  copied    the tensor is the caller's own
GB/s is bytes of the buffer per second. With --check the exit code is 1 if a figure is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import labsums
import torch
from race import (
    DEADLINE,
    DTYPE,
    KB,
    MB,
    Plan,
    Spread,
    another_group,
    check_sum,
    named,
    race,
    ratios,
    say,
    size_of,
    slowest,
    spread,
)

from shoal.comm.group import Group
from shoal.testing.ranks import RanksFailed, run_ranks

SIZES = [4, 64, KB, 4 * KB, 16 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 16 * MB, 64 * MB, 100 * MB, 200 * MB, 400 * MB]
WORKERS = [2, 4]
TIMES_GLOO = {16 * KB: 10.0, MB: 8.0, 16 * MB: 4.0, 100 * MB: 2.0}  # with 2 workers, in place
SHARE_OF_MEMCPY = {16 * MB: 0.45}  # with 2 workers, in place

FEWEST_ROUNDS = 5
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Row:
    """One size: seconds of a sum and of a memcpy, and the ratios of each round."""

    size: int
    workers: int
    rounds: int
    gloo: Spread
    placed: Spread
    copied: Spread
    memcpy: Spread
    placed_speed: Spread
    copied_speed: Spread
    of_memcpy: Spread


def measure(sizes: Sequence[int], workers: Sequence[int], collective: str, plan: Plan) -> list[Row]:
    """Measures and prints a table for each number of workers."""
    rows = []
    for count in workers:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            members = run_ranks(count, _member(sizes, collective, plan, Path(folder)), DEADLINE, collective="gloo")
        found = [_row(size, [member[str(size)] for member in members]) for size in sizes]
        _show(found, collective)
        rows += found
    return rows


def _member(sizes: Sequence[int], collective: str, plan: Plan, folder: Path) -> Callable[[Group], Any]:
    def body(gloo: Group) -> dict[str, Any]:
        with another_group(gloo, collective, gloo.rank, LOOPBACK, folder) as group:
            buffers = _Buffers(gloo, group, max(sizes))
            found = {}
            for size in sizes:
                buffers.check(size)
                found[str(size)] = race(gloo, buffers.arms(size), plan)
                say(gloo, f"{gloo.size} workers: {named(size)} measured")
            return found

    return body


class _Buffers:
    """The tensors of one member, as large as the largest size; smaller sizes use their beginning.

    They hold zeros while the clock runs, which sums leave as they are.
    """

    def __init__(self, gloo: Group, group: Group, largest: int) -> None:
        count = largest // DTYPE.itemsize
        self._gloo, self._group = gloo, group
        self._of_gloo, self._placed, self._own = (
            gloo.buffer(count, DTYPE),
            group.buffer(count, DTYPE),
            torch.zeros(count),
        )
        for buffer in (self._of_gloo, self._placed, self._own):
            buffer.fill_(0.0)  # has every page exist
        gloo.barrier()

    def arms(self, size: int) -> dict[str, Callable[[], None]]:
        count = size // DTYPE.itemsize
        of_gloo, placed, own = self._of_gloo[:count], self._placed[:count], self._own[:count]

        def memcpy() -> None:
            if self._gloo.rank == 0:
                own.copy_(of_gloo)

        return {
            "gloo": lambda: self._gloo.sum(of_gloo).wait(),
            "placed": lambda: self._group.sum(placed).wait(),
            "copied": lambda: self._group.sum(own).wait(),
            "memcpy": memcpy,
        }

    def check(self, size: int) -> None:
        """That every way sums what it should: what is fast and wrong must not be measured."""
        count = size // DTYPE.itemsize
        for group, buffer in ((self._gloo, self._of_gloo), (self._group, self._placed), (self._group, self._own)):
            check_sum(group, buffer[:count])


def _row(size: int, members: Sequence[Any]) -> Row:
    seconds = slowest(members)
    gloo, placed, copied, memcpy = (seconds[name] for name in ("gloo", "placed", "copied", "memcpy"))
    return Row(
        size=size,
        workers=len(members),
        rounds=len(gloo),
        gloo=spread(gloo),
        placed=spread(placed),
        copied=spread(copied),
        memcpy=spread(memcpy),
        placed_speed=ratios(gloo, placed),
        copied_speed=ratios(gloo, copied),
        of_memcpy=ratios(memcpy, placed),
    )


def _show(rows: Sequence[Row], collective: str) -> None:
    print(
        f"\nsum over {rows[0].workers} workers of this host, {collective} against gloo; medians (5% .. 95% of rounds)"
    )
    heads = f"{'size':>8}{'rounds':>8}{'gloo ms':>11}{'in place ms':>13}{'times gloo':>26}"
    print(f"{heads}{'copied ms':>12}{'times gloo':>26}{'GB/s':>8}{'of memcpy':>11}")
    for row in rows:
        first = f"{named(row.size):>8}{row.rounds:>8}{row.gloo.median * 1e3:>11.3f}{row.placed.median * 1e3:>13.4f}"
        second = f"{row.placed_speed!s:>26}{row.copied.median * 1e3:>12.4f}{row.copied_speed!s:>26}"
        rate = row.size / row.placed.median / 1e9
        print(f"{first}{second}{rate:>8.3f}{row.of_memcpy.median:>11.1%}")
    sys.stdout.flush()


def missed(rows: Sequence[Row]) -> list[str]:
    said = []
    for row in rows:
        what = f"{named(row.size)} with {row.workers} workers"
        least = max(1.0, TIMES_GLOO.get(row.size, 1.0) if row.workers == 2 else 1.0)
        if row.placed_speed.median < least:
            said.append(f"{what}, in place: {row.placed_speed.median:.2f} times gloo instead of {least:g}")
        if row.copied_speed.median < 1.0:
            said.append(f"{what}, copied: {row.copied_speed.median:.2f} times gloo instead of 1")
        share = SHARE_OF_MEMCPY.get(row.size, 0.0) if row.workers == 2 else 0.0
        if row.of_memcpy.median < share:
            said.append(f"{what}, in place: {row.of_memcpy.median:.1%} of memcpy instead of {share:.0%}")
    return said


# ---- the command


def round_count(text: str) -> int:
    if (count := int(text)) < FEWEST_ROUNDS:
        raise argparse.ArgumentTypeError(f"got {count}; a median of less than {FEWEST_ROUNDS} rounds says little")
    return count


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("host", help="workers of this host")
    one.add_argument("--workers", type=int, nargs="+", default=WORKERS, help="default 2 4")
    one.set_defaults(collective="shm", sizes=SIZES)
    each = labsums.WORKERS // labsums.HOSTS
    two = commands.add_parser("lab", help=f"{labsums.HOSTS} lab hosts with {each} workers each")
    two.add_argument("--rate", default="1gbit", help="of each host's link (default 1gbit)")
    order = "ranks 0 and 1 share a host (blocks, default), or 0 and 2 (turns), where gloo's ring crosses twice as often"
    two.add_argument("--order", choices=labsums.ORDERS, default="blocks", help=order)
    two.set_defaults(collective="hierarchical", sizes=labsums.SIZES)
    for command in (one, two):
        add = command.add_argument
        add("--sizes", type=size_of, nargs="+", metavar="SIZE", help="as 4 16KB 100MB")
        choices = ("gloo", command.get_default("collective"))
        add("--collective", choices=choices, help=f"what to compare with gloo (default {choices[1]})")
        add("--seconds", type=float, default=6.0, help="about how long to measure one size (default 6)")
        add("--rounds", type=round_count, default=7, help="the fewest for a size, whatever they take (default 7)")
        add("--json", type=Path, metavar="FILE", help="also write all figures there")
        add("--check", action="store_true", help="exit with code 1 if a figure is missed")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    plan = Plan(given.seconds, given.rounds)
    rows: Sequence[Row | labsums.Row]
    try:
        if given.command == "host":
            rows = here = measure(given.sizes, given.workers, given.collective, plan)
            said = missed(here)
        else:
            rows = between = labsums.measure(given.sizes, given.rate, given.order, given.collective, plan)
            said = labsums.missed(between)
    except RanksFailed as failure:
        print(f"\n{failure}", file=sys.stderr)
        return 1
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    for line in said:
        print(f"missed: {line}")
    return 1 if said and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
