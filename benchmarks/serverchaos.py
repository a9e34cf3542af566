"""Random SIGKILLs of workers and servers in short trainings with `sync="server"`, until so many have happened.

examples
  python benchmarks/serverchaos.py --kills 200 --seed 1 --check
  python benchmarks/serverchaos.py --only 1003                    repeat one training, by the seed that was printed
  python benchmarks/serverchaos.py --kills 50 --both              both copies of a shard may go: the run begins again

Every training has three workers and three servers, `mode=ssp` and `durability=peer`. At moments that are drawn, a
process that is drawn is killed. Never both copies of a shard: after the death of a server no other one is killed before
every shard has been applied by two living servers again (`--both` lifts that; then a training may go back to its last
checkpoint, which else it may not). Nor two workers on the same samples, which ends a run on purpose.

After each training: it has ended; on every shard each atom of each step was applied once, and holder and mirror had the
same bits; the weights that the trainer has are those of the last step; each update that was told is there (no step was
applied again after that); the loss is sane; and nothing is left behind. With --check the exit code is 1 if not.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal
from shoal.core.atoms import Course
from shoal.core.errors import ShoalError
from shoal.syncs.server.cutting import cut
from shoal.testing import FaultPlan
from shoal.testing.leaks import LeakCheck, LeakError, mark_descendants
from shoal.testing.servers import audit_servers, read_server_ledgers

WORKERS, SERVERS, STALENESS = 3, 3, 4
SAMPLES, BATCH = 512, 32
PER_RUN = 12
"""Kills in one training; of these at most `MOST_SERVERS` of servers: a run in which more die in a short time ends."""
MOST_SERVERS = 8
PAUSE = 0.02, 0.5
"""Seconds from one kill to the next, at least and at most."""
QUIET_STEPS = 10
"""At the end, without a kill."""
SECONDS = 90.0
"""A training that takes longer hangs."""


def data() -> TensorDataset:
    x = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x[:, :4].sum(1) > 0).long())


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 2))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    time.sleep(4e-4 * len(batch[0]))
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@dataclass
class Seen:
    """What was told of a training, and when."""

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    moments: dict[int, float] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    over: bool = False
    """All that was to be killed is."""
    last: int = 0

    def __call__(self, event: Any) -> shoal.Stop | None:
        if isinstance(event, shoal.Notice):
            self.texts.append(f"{time.monotonic():.3f} step {event.step}: {event.text}")
        if not isinstance(event, shoal.StepDone):
            return None
        self.steps.append(event.step)
        self.losses.append(event.loss)
        self.moments[event.step] = time.monotonic()
        if not self.over:
            self.last = event.step
        return shoal.Stop("all kills are done") if event.step >= self.last + QUIET_STEPS else None


class Killer(threading.Thread):
    """Kills processes of the training that this process supervises."""

    def __init__(self, seed: int, seen: Seen, folder: Path, kills: int, both: bool) -> None:
        super().__init__(daemon=True)
        self._draw = random.Random(f"server chaos {seed}")
        self._seen, self._folder, self._kills, self._both = seen, folder, kills, both
        self._ended = threading.Event()
        self._safe_step = 0
        """A worker may be killed again once this step is told."""
        self._since: float | None = None
        """When a server was killed whose shards may have no copies yet."""
        self.done: list[tuple[float, str]] = []

    def end(self) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        servers = 0
        while len(self.done) < self._kills and not self._ended.wait(self._draw.uniform(*PAUSE)):
            kind = self._draw.choice(["worker", "server"])
            if kind == "server" and (servers == MOST_SERVERS or not self._may_kill_server()):
                kind = "worker"
            if kind == "worker" and self._told() < self._safe_step:
                continue
            names = {name: pid for name, pid in processes().items() if name.startswith(kind)}
            if not names or not self._seen.steps:
                continue
            name = self._draw.choice(sorted(names))
            now = time.monotonic()
            with suppress(ProcessLookupError):
                os.kill(names[name], signal.SIGKILL)
                self.done.append((now, name))
                if kind == "server":
                    servers += 1
                    self._since = now
                else:
                    # whatever it computed is applied by then, unless somebody else has died with it
                    self._safe_step = self._told() + STALENESS + 3
        self._seen.over = True

    def _told(self) -> int:
        return self._seen.steps[-1] if self._seen.steps else 0

    def _may_kill_server(self) -> bool:
        if self._both or self._since is None:
            return True
        living = set(processes().values())
        shards: dict[tuple[int, int], set[int]] = {}
        for records in read_server_ledgers(self._folder).values():
            for record in records:
                if record.time > self._since and record.pid in living:
                    shards.setdefault((record.step, record.shard), set()).add(record.pid)
        whole = Counter(step for (step, _), pids in shards.items() if len(pids) >= 2)
        everything = len({shard for _, shard in shards})
        if everything and any(count == everything for count in whole.values()):
            self._since = None
            return True
        return False


def processes() -> dict[str, int]:
    """Workers and servers of the run in progress, by what their logs are called."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(OSError):
            name = Path(os.readlink(f"/proc/{process.pid}/fd/1")).stem
            if name.startswith(("worker-", "server-")):
                found[name] = process.pid
    return found


@dataclass
class Outcome:
    problems: list[str]
    kills: list[tuple[float, str]]
    recovered: list[float]
    """Seconds from each kill to the next step that was told."""
    steps: int
    seconds: float
    restarts: int
    texts: list[str]


def train(seed: int, folder: Path, kills: int, both: bool, sync: str) -> Outcome:
    seen = Seen()
    began = time.monotonic()
    plan = FaultPlan().ledger(folder / "kept")
    killer = Killer(seed, seen, folder / "kept", kills, both)
    hung = threading.Event()

    def hangs() -> None:
        hung.set()
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                process.kill()

    timer = threading.Timer(SECONDS, hangs)
    problems: list[str] = []
    trainer = shoal.Trainer(
        net,
        loss,
        lambda params: torch.optim.AdamW(params, lr=3e-3),
        data(),
        batch_size=BATCH,
        seed=seed,
        steps=100_000,
        workers=WORKERS,
        min_workers=1,
        max_workers=WORKERS,
        sync=sync,
        faults=plan,
        checkpoint_every=25,
        run_dir=folder / "run",
        callbacks=[seen],
    )
    steps = 0
    try:
        with LeakCheck():
            timer.start()
            killer.start()
            try:
                steps = trainer.fit().steps
            finally:
                killer.end()
                timer.cancel()
                timer.join()
    except LeakError as error:
        problems.append(f"something is left: {error}")
    except ShoalError as error:
        problems.append(f"it did not end: {type(error).__name__}: {error}")
    if hung.is_set():
        problems.append(f"it hung at step {seen.steps[-1:]}: {'; '.join(seen.texts[-3:])}")
    restarts = 0
    if steps:
        found = checks(trainer, folder / "kept", seen, steps, both, arrival="apply=arrival" in sync)
        problems += found[0]
        restarts = found[1]
    moments = sorted(seen.moments.values())
    after = [next((moment - at for moment in moments if moment > at), None) for at, _ in killer.done]
    recovered = [seconds for seconds in after if seconds is not None]
    return Outcome(problems, killer.done, recovered, steps, time.monotonic() - began, restarts, seen.texts)


def checks(
    trainer: shoal.Trainer, folder: Path, seen: Seen, steps: int, both: bool, arrival: bool
) -> tuple[list[str], int]:
    """What must hold after a training, and how often it began again."""
    found = audit_servers(folder, Course(SAMPLES, BATCH), steps, digests=not arrival)
    problems = found.problems[:5]
    restarts = found.attempts - 1
    if restarts and not both:
        problems.append(f"it began again {restarts} times")
    if not restarts and seen.steps != list(range(1, steps + 1)):
        problems.append("steps were not told one after the other")
    late = [step for step, moment in found.last.items() if moment > seen.moments.get(step + 1, moment)]
    if late:
        problems.append(f"steps {late[:5]} were applied again after they were told")
    if not arrival and found.digests != digests(trainer.model):
        problems.append("the trainer's weights are not those of the last step")
    ends = seen.losses[-QUIET_STEPS:]
    if not sum(ends) / len(ends) < min(0.5, seen.losses[0]):
        problems.append(f"the loss went from {seen.losses[0]:.3f} to {ends}")
    return problems, restarts


def digests(model: nn.Module) -> dict[int, str]:
    params = [(name, param.detach()) for name, param in model.named_parameters()]
    layout = cut(params)
    area = torch.zeros(layout.size, dtype=torch.uint8)
    for number, (_, param) in enumerate(params):
        layout.view(area, number).copy_(param)
    return {
        shard.number: blake2b(area[shard.start : shard.stop].numpy().data, digest_size=16).hexdigest()
        for shard in layout.shards
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--kills", type=int, default=200, help="how many must have happened (default 200)")
    add("--per-run", type=int, default=PER_RUN, help=f"how many in one training (default {PER_RUN})")
    add("--seed", type=int, default=1, help="of everything that is drawn (default 1)")
    add("--only", type=int, metavar="SEED", help="one training, with the seed that was printed for it")
    add("--both", action="store_true", help="both copies of a shard may be killed")
    add("--mode", default=f"ssp,staleness={STALENESS}", help="(default %(default)s)")
    add("--check", action="store_true", help="exit with 1 if anything did not hold")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    os.environ["SHOAL_PROGRESS"] = "quiet"
    mark_descendants()
    torch.set_num_threads(1)
    sync = f"server:mode={given.mode},servers={SERVERS},durability=peer"
    tally: Counter[str] = Counter()
    recovered: list[float] = []
    problems: list[str] = []
    home = tempfile.mkdtemp(prefix="serverchaos-")
    os.environ["SHOAL_HOME"] = home
    seed, runs, began = given.seed * 1000, 0, time.monotonic()
    while sum(tally.values()) < given.kills and (given.only is None or not runs):
        seed = given.only if given.only is not None else seed + 1
        runs += 1
        folder = Path(home) / f"seed-{seed}"
        outcome = train(seed, folder, given.per_run, given.both, sync)
        tally.update(name.partition("-")[0] for _, name in outcome.kills)
        recovered += outcome.recovered
        problems += [f"seed {seed}: {problem}" for problem in outcome.problems]
        killed = ", ".join(name for _, name in outcome.kills)
        print(
            f"seed {seed}: {outcome.steps} steps in {outcome.seconds:.1f} s, {len(outcome.kills)} kills ({killed})"
            + (f", began again {outcome.restarts} times" if outcome.restarts else "")
            + (f", {len(outcome.problems)} PROBLEMS in {folder}" if outcome.problems else ""),
            flush=True,
        )
        for problem in outcome.problems:
            print(f"    {problem}", flush=True)
        if outcome.problems:
            print("\n".join(f"      {text}" for text in outcome.texts[-12:]), flush=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    kills = sum(tally.values())
    each = ", ".join(f"{count} {kind}s" for kind, count in sorted(tally.items()))
    print(f"\n{kills} kills ({each}) in {runs} trainings, {time.monotonic() - began:.0f} s")
    if recovered:
        recovered.sort()
        middle, most = recovered[len(recovered) // 2], recovered[-1]
        print(f"the next step was told after {middle:.3f} s in the median, {most:.3f} s at most")
    print(f"{len(problems)} problems" if problems else "every training ended, and all that must hold did")
    if not problems:
        shutil.rmtree(home, ignore_errors=True)
    return 1 if given.check and (problems or kills < (0 if given.only is not None else given.kills)) else 0


if __name__ == "__main__":
    sys.exit(main())
