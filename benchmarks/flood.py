"""What strangers at the coordinator's port cost a training: step times under a flood, and under one of a closed port.

A training whose members may change goes on all the time, while a process beside it begins connections that say nothing,
nonsense, too much, or the right words with the wrong key (hostile.py): in turns to the coordinator's port, and at the
same rate to a port at which nobody listens. Every second connection comes from the address that the run's own workers
come from, as seen in the machine's list of connections.

examples
  python benchmarks/flood.py                        4 workers, 1000 connections a second
  python benchmarks/flood.py --rate 4000 --rounds 20
  python benchmarks/flood.py --check                ends with 1 if a step takes more than 1.02 times as long
"""

from __future__ import annotations

import argparse
import math
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from ratios import FEWEST, Interval, median_interval
from torch import nn
from torch.utils.data import TensorDataset

from shoal import Stop, Trainer
from shoal.core.events import StepDone

HERE = Path(__file__).parent
LOOPBACK = "127.0.0.1"
MOST = 1.02
SETTLE = 0.7
"""Seconds at the beginning of a turn that do not count."""
FEWEST_STEPS = 8
"""That count, in a turn."""
WARM = 20  # steps
BATCH = 512
OPEN, CLOSED = "flood", "closed port"


@dataclass
class Turn:
    """Steps while the flood went one way."""

    arm: str
    began: float
    cpu: float
    """Seconds that the coordinator had used; in the end, those of this turn."""
    seconds: float = 0.0
    steps: list[float] = field(default_factory=list)

    def end(self, now: float, cpu: float) -> None:
        self.seconds, self.cpu = now - self.began, cpu - self.cpu

    def step_time(self) -> float:
        """Seconds, the mean: what strangers take from a few steps counts."""
        counted = self.counted()
        return (counted[-1] - counted[0]) / (len(counted) - 1)

    def counted(self) -> list[float]:
        return [at for at in self.steps if at >= self.began + SETTLE]

    def is_over(self, now: float, seconds: float) -> bool:
        """On a busy machine it goes on until there are steps enough."""
        return now - self.began > seconds and len(self.counted()) >= FEWEST_STEPS


class Flood:
    """The process that begins connections."""

    def __init__(self, rate: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "hostile.py"), str(rate)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.counted: dict[str, list[int]] = {OPEN: [0, 0], CLOSED: [0, 0]}
        self._arm = ""

    def aim(self, arm: str, port: int, source: str) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(port, source, file=self._process.stdin, flush=True)
        begun, stood = map(int, self._process.stdout.readline().split())
        if self._arm:
            self.counted[self._arm][0] += begun
            self.counted[self._arm][1] += stood
        self._arm = arm

    def close(self) -> None:
        self._process.communicate()


class Course:
    """Directs the flood as the training goes on: a callback of the training."""

    def __init__(self, folder: Path, flood: Flood, rounds: int, seconds: float) -> None:
        arms = [(OPEN, CLOSED) if number % 2 else (CLOSED, OPEN) for number in range(rounds)]
        self._order = [arm for pair in arms for arm in pair]
        self._folder, self._flood, self._seconds = folder, flood, seconds
        self._closed = socket.socket()  # bound, so that nobody else gets the port, and not listening
        self._closed.bind((LOOPBACK, 0))
        self._port, self._source = 0, LOOPBACK
        self._coordinator: psutil.Process | None = None
        self.turns: list[Turn] = []

    def __call__(self, event: Any) -> Stop | None:
        if not isinstance(event, StepDone) or event.step < WARM:
            return None
        if not self._port:
            self._port = int((self._folder / "control" / "endpoint").read_text().strip().rpartition(":")[2])
            self._source, self._coordinator = seen_source(self._port), listener(self._port)
        now = time.time()
        if self.turns:
            self.turns[-1].steps.append(event.time)
        if not self.turns or self.turns[-1].is_over(now, self._seconds):
            if self.turns:
                self.turns[-1].end(now, self._cpu())
            if len(self.turns) == len(self._order):
                return Stop("all turns are done")
            self._turn(self._order[len(self.turns)])
        return None

    def _turn(self, arm: str) -> None:
        port = self._port if arm == OPEN else self._closed.getsockname()[1]
        self._flood.aim(arm, port, self._source)
        self.turns.append(Turn(arm, time.time(), self._cpu()))

    def _cpu(self) -> float:
        if self._coordinator is None:
            return 0.0
        used = self._coordinator.cpu_times()
        return float(used.user + used.system)

    def ratios(self) -> list[float]:
        """For each round, a step under the flood over one while it goes to the closed port."""
        rounds = zip(self.turns[::2], self.turns[1::2], strict=True)
        return [math.prod(turn.step_time() ** (1 if turn.arm == OPEN else -1) for turn in pair) for pair in rounds]

    def close(self) -> None:
        self._closed.close()


def seen_source(port: int) -> str:
    """Where clients of that port come from, as every user of the machine can see."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, remote = (part.split(":") for part in line.split()[1:3])
        if int(remote[1], 16) == port:
            return socket.inet_ntoa(bytes.fromhex(local[0])[::-1])
    return LOOPBACK


def listener(port: int) -> psutil.Process | None:
    """The process of this run that listens there."""
    for process in psutil.Process().children(recursive=True):
        if any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in process.net_connections("tcp")):
            return process
    return None


def train(course: Course, workers: int, folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(BATCH * 8, 512, generator=generator), torch.randint(0, 10, (BATCH * 8,), generator=generator)
    )
    Trainer(
        model=lambda: nn.Sequential(
            nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        ),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        data=data,
        batch_size=BATCH,
        epochs=1_000_000,
        workers=workers,
        min_workers=1,
        run_dir=folder,
        callbacks=[course],
    ).fit()  # fmt: skip


def tell(course: Course, flood: Flood, given: argparse.Namespace) -> Interval:
    found = median_interval(course.ratios())
    print(f"{given.workers} workers, {given.rounds} rounds of 2 turns of {given.seconds:g} s or more")
    for arm in (OPEN, CLOSED):
        turns = [turn for turn in course.turns if turn.arm == arm]
        times = [turn.step_time() * 1e3 for turn in turns]
        cpu, seconds = sum(turn.cpu for turn in turns), sum(turn.seconds for turn in turns)
        begun, stood = flood.counted[arm]
        print(
            f"  {arm:<12} {median(times):.2f} ms per step ({min(times):.2f} to {max(times):.2f}); "
            f"{begun / seconds:,.0f} connections begun per second, {stood / seconds:,.0f} came to stand; "
            f"the coordinator took {cpu / seconds:.2%} of a core"
        )
    print(
        f"  flood / closed port: {found.median:.4f}, 95% interval {found.low:.4f} to {found.high:.4f} (at most {MOST})"
    )
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4, help="default 4")
    parser.add_argument("--rate", type=float, default=1000.0, help="connections begun in a second (default 1000)")
    parser.add_argument("--rounds", type=int, default=24, help=f"at least {FEWEST} (default 24)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn (default 2)")
    parser.add_argument("--check", action="store_true", help=f"end with 1 if the median ratio is above {MOST}")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    with tempfile.TemporaryDirectory(prefix="flood-") as name:
        flood = Flood(given.rate)
        course = Course(Path(name) / "run", flood, given.rounds, given.seconds)
        try:
            train(course, given.workers, Path(name) / "run")
            flood.aim("", 0, LOOPBACK)
        finally:
            flood.close()
            course.close()
        found = tell(course, flood, given)
    return 1 if given.check and found.median > MOST else 0


if __name__ == "__main__":
    sys.exit(main())
