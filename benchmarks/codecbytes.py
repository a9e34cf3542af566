"""Bytes that leave hosts for a step of training with each codec, by the kernel's counters, against `none`. Needs root.

examples
  python benchmarks/codecbytes.py                           4 lab hosts with a worker each, SGD and AdamW
  python benchmarks/codecbytes.py --workers 8               the same with 8: no limits are set for these
  python benchmarks/codecbytes.py --check --json found.json
  python benchmarks/codecbytes.py --codecs int8 onebit --optimizers adamw --steps 100

An MLP of 2 million parameters. The counters of the hosts' interfaces are read by the workers themselves, after their
optimizer's step, so that all that a number of steps sent is between two readings: payloads with the headers of
Ethernet, IP and TCP, acknowledgements, small tensors that are not encoded, and what workers agree on. The steps that
are counted begin when gradients have gone by the codec itself for a while: what is exchanged otherwise before, as with
onebit and topk under Adam until its variance is held, does not count here. With --check the exit code is 1 if a codec
sends more than its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from wide import CLASSES, INPUTS, WideMLP
from work import Pool, class_loss

from shoal import Trainer
from shoal.core import spec
from shoal.core.events import AnyEvent, ExchangeSettled, Stop
from shoal.core.events import StepDone as Step
from shoal.core.traffic import GRADIENT
from shoal.engines.places import Place
from shoal.testing.lab import Lab
from shoal.testing.lab.counters import read_counters

PLAIN = "none"
CODECS = (PLAIN, "fp16", "bf16", "int8", "onebit", "topk:density=0.01", "powersgd:rank=32")
LIMITS = {"fp16": 0.52, "int8": 0.28, "onebit": 0.05, "topk:density=0.01": 0.05}
"""Times the bytes of `none`, with LIMITED workers."""
LIMITED = 4
WIDTH = 960  # 2.0 million parameters, 7.9 MB
SHARE = 4  # samples of a worker in each step
SETTLING = 20
"""Steps that do not count after the codec, or how it is used, was last seen to change."""
MOST_STEPS = 2000
"""A run in which the codec was not used by then will not use it."""
OPTIMIZERS: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
}


class Unused(Exception):
    """A codec was not used for as many steps as are to be counted."""


@dataclass(frozen=True)
class Row:
    """One codec with one optimizer: bytes that a host sends for a step, on average over hosts and steps."""

    workers: int
    optimizer: str
    codec: str
    begin: int
    steps: int
    sent: float
    ratio: float
    limit: float | None

    @property
    def missed(self) -> bool:
        return self.limit is not None and self.ratio > self.limit


class Readings:
    """What left a worker's host since the lab came up, after each step: written by workers, one file each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()

    def taken_by(
        self, make: Callable[[Iterable[Any]], torch.optim.Optimizer]
    ) -> Callable[[Any], torch.optim.Optimizer]:
        """An optimizer that takes one after each of its steps."""

        def build(parameters: Iterable[Any]) -> torch.optim.Optimizer:
            optimizer = make(parameters)
            here = Place("here", "", os.getpid())
            file = self._folder / str(os.getpid())

            def read(*_: object) -> None:
                with file.open("a") as lines:
                    lines.write(f"{read_counters(here).sent}\n")

            optimizer.register_step_post_hook(read)
            return optimizer

        return build

    def between(self, begin: int, steps: int) -> float:
        """Bytes of a host for a step, from after step `begin` on."""
        hosts = [[int(line) for line in file.read_text().split()] for file in self._folder.iterdir()]
        sent = [readings[begin + steps - 1] - readings[begin - 1] for readings in hosts]
        return sum(sent) / len(sent) / steps


class Window:
    """The steps that are counted: a callback that sees when they begin, and ends the run after them."""

    def __init__(self, codec: str, steps: int) -> None:
        self._name = spec.parse("codec", codec).name
        self._steps = steps
        self.begin = 0
        """The step after which they begin; 0 until the codec has been seen."""
        self._end = 0

    def __call__(self, event: AnyEvent) -> Stop | None:
        if isinstance(event, ExchangeSettled):
            self._begin_after(event.step)
        if isinstance(event, Step) and event.traffic is not None:
            used = {flow.codec for flow in event.traffic.flows if flow.kind == GRADIENT and flow.bytes}
            if self._name not in used:
                self.begin = 0
            elif not self.begin:
                self._begin_after(event.step)
            if self.begin and event.step > self.begin + self._steps:
                self._end = event.step
                return Stop("enough steps were counted")
        return None

    def _begin_after(self, step: int) -> None:
        self.begin = step + SETTLING

    @property
    def complete(self) -> bool:
        return self._end > 0


def measure(lab: Lab, workers: int, optimizer: str, codec: str, steps: int) -> tuple[int, float]:
    """Trains until enough steps were counted; after which step they began, and the bytes of a host for one of them."""
    window = Window(codec, steps)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        os.environ |= {"SHOAL_HOME": folder, "SHOAL_PROGRESS": "quiet"}
        readings = Readings(Path(folder) / "readings")
        Trainer(
            model=lambda: WideMLP(WIDTH),
            loss=class_loss,
            optimizer=readings.taken_by(OPTIMIZERS[optimizer]),
            data=Pool(INPUTS, CLASSES, SHARE * workers * MOST_STEPS),
            batch_size=SHARE * workers,
            steps=MOST_STEPS,
            workers=workers,
            engine=f"local:lab={lab.name}",
            codec=codec,
            run_dir=Path(folder) / "run",
            callbacks=[window],
        ).fit()
        if not window.complete:
            raise Unused(f"{codec} with {optimizer}: no {steps} steps in a row went by it in {MOST_STEPS} steps")
        return window.begin, readings.between(window.begin, steps)


def compare(lab: Lab, given: argparse.Namespace) -> list[Row]:
    rows = []
    for optimizer in given.optimizers:
        print(f"\n{optimizer}, {given.steps} steps, {given.workers} workers")
        print(f"  {'codec':<20}{'from step':>10}{'MB per step':>14}{'times none':>12}{'limit':>8}", flush=True)
        plain = 0.0
        for codec in [PLAIN, *(codec for codec in given.codecs if codec != PLAIN)]:
            begin, sent = measure(lab, given.workers, optimizer, codec, given.steps)
            plain = plain or sent
            limit = LIMITS.get(codec) if given.workers == LIMITED else None
            rows.append(Row(given.workers, optimizer, codec, begin, given.steps, sent, sent / plain, limit))
            show(rows[-1])
    return rows


def show(row: Row) -> None:
    limit = "" if row.limit is None else f"{row.limit:g}"
    verdict = "  MISSED" if row.missed else ""
    print(f"  {row.codec:<20}{row.begin:>10}{row.sent / 1e6:>14.4f}{row.ratio:>12.4f}{limit:>8}{verdict}", flush=True)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--workers", type=int, default=LIMITED, help=f"as many lab hosts with one each (default {LIMITED})")
    add("--codecs", nargs="+", default=CODECS, metavar="CODEC", help=f"default: {' '.join(CODECS)}")
    add("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS, help="default: both")
    add("--steps", type=int, default=50, help="that are counted (default 50)")
    add("--rate", default="1gbit", help="of each host's link (default 1gbit); it does not change the bytes")
    add("--json", type=Path, metavar="FILE", help="also write all that was measured there")
    add("--check", action="store_true", help="exit with code 1 if a codec sends more than its limit")
    return parser.parse_args(argv)


def main() -> int:
    given = arguments()
    with Lab(hosts=given.workers, rate=given.rate) as lab:
        print(f"{given.workers} lab hosts with a worker each at {given.rate}; MB are 10^6 bytes, those of a host")
        rows = compare(lab, given)
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    missed = [f"{row.codec} with {row.optimizer}: {row.ratio:.4f} instead of {row.limit}" for row in rows if row.missed]
    if missed:
        print(f"\nmissed: {'; '.join(missed)}")
    elif any(row.limit is not None for row in rows):
        print("\nall limits are kept")
    return 1 if missed and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
