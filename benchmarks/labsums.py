"""Sums between lab hosts: a group against flat gloo, with the bytes that leave each host for one sum."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from race import DEADLINE, DTYPE, MB, Plan, Spread, another_group, check_sum, named, race, ratios, say, slowest, spread
from torch import Tensor

from shoal.comm.group import Group
from shoal.core.traffic import NETWORK
from shoal.engines.places import Place
from shoal.engines.places import spread as spread_over
from shoal.testing.lab import Lab
from shoal.testing.lab.counters import read_counters
from shoal.testing.ranks import run_ranks

SIZES = [4 * MB, 16 * MB, 64 * MB]
HOSTS, WORKERS = 2, 4
TIMES_GLOO = {16 * MB: 1.5}
ORDERS = {"blocks": (0, 1, 2, 3), "turns": (0, 2, 1, 3)}  # ranks of the processes; the first two are on one host
COUNTERS_AGREE = 0.03


@dataclass(frozen=True)
class Row:
    """One size: seconds of a sum, and the bytes that the busiest host sent for it, by kernel and by account."""

    size: int
    rounds: int
    seconds: dict[str, Spread]
    kernel: dict[str, float]
    account: dict[str, float]
    speed: Spread


def measure(sizes: Sequence[int], rate: str, order: str, collective: str, plan: Plan) -> list[Row]:
    """Measures and prints the table of two lab hosts."""
    with Lab(hosts=HOSTS, rate=rate) as lab, tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for name in ("flat", "other"):
            Path(folder, name).mkdir()
        places = spread_over(lab.hosts, WORKERS)
        body = _member(sizes, collective, plan, Path(folder), list(zip(ORDERS[order], places, strict=True)))
        members = run_ranks(WORKERS, body, DEADLINE, collective="gloo", lab=lab)
    hosts = [place.name for place in places]
    rows = [_row(size, hosts, members) for size in sizes]
    _show(rows, rate, collective)
    return rows


def _member(
    sizes: Sequence[int], collective: str, plan: Plan, folder: Path, seats: Sequence[tuple[int, Place]]
) -> Callable[[Group], Any]:
    """`seats` has the rank and the place of each process; those of a host follow each other."""

    def body(referee: Group) -> dict[str, Any]:
        rank, place = seats[referee.rank]
        with (
            another_group(referee, "gloo", rank, place.address, folder / "flat") as gloo,
            another_group(referee, collective, rank, place.address, folder / "other") as group,
        ):
            meters = {
                "kernel": lambda: read_counters(place).sent,
                "account": lambda: network_bytes(gloo) + network_bytes(group),
            }
            count = max(sizes) // DTYPE.itemsize
            of_gloo, placed = gloo.buffer(count, DTYPE), group.buffer(count, DTYPE)
            found = {}
            for size in sizes:
                arms = _arms(gloo, of_gloo, group, placed, size // DTYPE.itemsize)
                found[str(size)] = race(referee, arms, plan, meters)
                say(referee, f"{gloo.size} workers on {HOSTS} hosts: {named(size)} measured")
            return found

    return body


def _arms(gloo: Group, of_gloo: Tensor, group: Group, placed: Tensor, count: int) -> dict[str, Callable[[], None]]:
    check_sum(gloo, of_gloo[:count])
    check_sum(group, placed[:count])
    return {
        "gloo": lambda: gloo.sum(of_gloo[:count]).wait(),
        "placed": lambda: group.sum(placed[:count]).wait(),
    }


def network_bytes(group: Group) -> int:
    """What this member has sent to other hosts, by its account."""
    return sum(flow.bytes for flow in group.account.now().flows if flow.link == NETWORK)


def _row(size: int, hosts: Sequence[str], members: Sequence[Any]) -> Row:
    found = [member[str(size)] for member in members]
    seconds = slowest(found)
    return Row(
        size,
        len(seconds["gloo"]),
        {arm: spread(values) for arm, values in seconds.items()},
        {arm: _busiest(hosts, [one[arm]["kernel"] for one in found], max) for arm in seconds},
        {arm: _busiest(hosts, [one[arm]["account"] for one in found], sum) for arm in seconds},
        ratios(seconds["gloo"], seconds["placed"]),
    )


def _busiest(hosts: Sequence[str], values: Sequence[list[float]], join: Callable[[list[float]], float]) -> float:
    """Bytes of a sum (median of rounds) on the host that sent most, its members' values joined by `join`."""
    medians = [float(np.median(one)) for one in values]
    return max(join([median for at, median in zip(hosts, medians, strict=True) if at == host]) for host in set(hosts))


def _show(rows: Sequence[Row], rate: str, collective: str) -> None:
    workers = f"{HOSTS} lab hosts with {WORKERS // HOSTS} workers each at {rate}"
    print(f"\nsum over {workers}, {collective} against flat gloo; medians (5% .. 95% of rounds)")
    print(f"{'size':>8}{'rounds':>8}  {'arm':<14}{'ms':>10}{'times gloo':>26}{'MB sent: kernel':>17}{'account':>11}")
    for row in rows:
        for arm, name in (("gloo", "gloo"), ("placed", collective)):
            speed = str(row.speed) if arm == "placed" else ""
            sent = f"{row.kernel[arm] / MB:>17.3f}{row.account[arm] / MB:>11.3f}"
            time = f"{row.seconds[arm].median * 1e3:>10.1f}"
            print(f"{named(row.size):>8}{row.rounds:>8}  {name:<14}{time}{speed:>26}{sent}")
    print("MB sent: by the host that sent most, to the other one, for one sum", flush=True)


def missed(rows: Sequence[Row]) -> list[str]:
    said = []
    for row in rows:
        least = TIMES_GLOO.get(row.size, 1.0)
        if row.speed.median < least:
            said.append(f"{named(row.size)}: {row.speed.median:.2f} times flat gloo instead of {least:g}")
        # a ring over hosts: each sends every part but its own twice
        wanted = 2 * (HOSTS - 1) / HOSTS * row.size
        if abs(row.kernel["placed"] / wanted - 1) > COUNTERS_AGREE:
            sent = f"{row.kernel['placed'] / MB:.3f} MB left a host instead of {wanted / MB:.3f}"
            said.append(f"{named(row.size)}: {sent}, those of one worker per host")
        for arm, kernel in row.kernel.items():
            if abs(row.account[arm] / kernel - 1) > COUNTERS_AGREE:
                difference = f"account and kernel differ by {row.account[arm] / kernel - 1:+.1%}"
                said.append(f"{named(row.size)}, {arm}: {difference}, more than {COUNTERS_AGREE:.0%}")
    return said
