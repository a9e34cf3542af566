"""Whether the traffic account is right: training on two lab hosts, counted by workers and by the kernel. Needs root.

examples
  python benchmarks/account.py                                 gloo, then hierarchical
  python benchmarks/account.py --collective hierarchical --steps 100

The account is of payload, on the link `network`. The kernel counts what leaves the interface of each host from before
the workers start until they have ended: the same payload with the headers of Ethernet, IP and TCP, acknowledgements,
and what the workers say to meet. The exit code is 1 if they differ by more than 3% on a host.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from wide import CLASSES, INPUTS, WideMLP
from work import Pool, class_loss

from shoal import Trainer
from shoal.core.events import AnyEvent, WorkerSeen
from shoal.core.traffic import NETWORK, Traffic
from shoal.engines.places import spread
from shoal.testing.lab import Lab

HOSTS, WORKERS = 2, 4
COLLECTIVES = ("gloo", "hierarchical")
WIDTH = 1536  # 4.9 million parameters, 20 MB
BATCH = 32
AGREE = 0.03


@dataclass(frozen=True)
class Count:
    """Bytes that one host sent to the other."""

    host: str
    account: int
    kernel: int

    @property
    def difference(self) -> float:
        """Of the account from the kernel's count, as a part of the latter."""
        return self.account / self.kernel - 1 if self.kernel else float("inf")


def count(lab: Lab, collective: str, steps: int) -> list[Count]:
    """Trains once and returns what each host sent."""
    before = {place.name: lab.counters(place).sent for place in lab.hosts}
    accounts = train(lab, collective, steps)
    placed = spread(lab.hosts, WORKERS)
    return [
        Count(
            place.name,
            sum(network_bytes(accounts[worker]) for worker, where in enumerate(placed) if where.name == place.name),
            lab.counters(place).sent - before[place.name],
        )
        for place in lab.hosts
    ]


def train(lab: Lab, collective: str, steps: int) -> dict[int, Traffic]:
    """The account of each worker, over the whole run."""
    accounts: dict[int, Traffic] = {}

    def note(event: AnyEvent) -> None:
        if isinstance(event, WorkerSeen):
            accounts[event.worker] = event.traffic  # since the start: the last one is of all

    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        os.environ |= {"SHOAL_HOME": folder, "SHOAL_PROGRESS": "quiet"}
        Trainer(
            model=lambda: WideMLP(WIDTH),
            loss=class_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
            data=Pool(INPUTS, CLASSES, BATCH * steps),
            batch_size=BATCH,
            steps=steps,
            workers=WORKERS,
            engine=f"local:lab={lab.name}",
            collective=collective,
            run_dir=Path(folder) / "run",
            callbacks=[note],
        ).fit()
    return accounts


def network_bytes(traffic: Traffic) -> int:
    return sum(flow.bytes for flow in traffic.flows if flow.link == NETWORK)


def show(collective: str, counts: Sequence[Count], steps: int) -> None:
    print(f"\n{collective}, {steps} steps")
    print(f"  {'host':<16}{'account MB':>14}{'kernel MB':>14}{'MB per step':>14}{'difference':>12}")
    for one in counts:
        amounts = f"{one.account / 1e6:>14.3f}{one.kernel / 1e6:>14.3f}{one.kernel / 1e6 / steps:>14.3f}"
        print(f"  {one.host:<16}{amounts}{one.difference:>+12.2%}")
    sys.stdout.flush()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collective", choices=COLLECTIVES, help="default: one after the other")
    parser.add_argument("--steps", type=int, default=40, help="default 40")
    parser.add_argument("--rate", default="1gbit", help="of each host's link (default 1gbit)")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    agree = True
    with Lab(hosts=HOSTS, rate=given.rate) as lab:
        print(f"{HOSTS} lab hosts with {WORKERS // HOSTS} workers each at {given.rate}; MB are 10^6 bytes")
        for collective in [given.collective] if given.collective else COLLECTIVES:
            counts = count(lab, collective, given.steps)
            show(collective, counts, given.steps)
            agree = agree and all(abs(one.difference) <= AGREE for one in counts)
    print(f"\naccount and kernel {'agree' if agree else 'DISAGREE'}: the limit is {AGREE:.0%} on every host")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
