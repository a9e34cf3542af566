"""Trainings in which much goes wrong, drawn by a seed, and what must hold of them in the end.

    trial = Trial.drawn(seed=7, faults=10)
    outcome = trial.run(folder)
    assert not outcome.problems

Each trial trains twice, calm and with its faults, and compares: the same weights, every position of every committed
step computed once, equal replicas, steps that only grow, and nothing left behind.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.core.atoms import Course
from shoal.core.errors import ShoalError
from shoal.core.events import AnyEvent, Notice, StepDone
from shoal.testing.audit import audit
from shoal.testing.faults import FaultPlan, Fired
from shoal.testing.lab import Lab
from shoal.testing.leaks import LeakCheck, LeakError
from shoal.testing.ledger import Record, read_ledgers
from shoal.testing.reference import relative_difference
from shoal.trainer.trainer import Trainer

WORKERS, LEAST, MOST = 4, 1, 6
BATCH = 64
TOLERANCE = 1e-5
"""Largest difference of weights from those of the calm run, relative to the largest value of each tensor."""
GAP = (10, 30)
"""Steps from one fault to the next."""
QUIET_END = 12
"""Steps at the end without a new fault, so that those at points which not every step has can still happen."""
SLEEP_PER_SAMPLE = 1.2e-3
"""Seconds: a step of four workers takes about 20 ms, whatever the machine."""

INSIDE = ("compute", "exchange", "bucket", "decide", "commit")
PLAIN_KINDS = (
    *("kill",) * 4,
    "kill two",
    "kill in recovery",
    "kill the source of a copy",
    "kill in a copy",
    "kill in a checkpoint",
    "kill in evaluation",
    "stop",
    "stop shortly",
    "hold the lock",
    "kill the coordinator",
    "stop the coordinator",
    "scale",
    "scale",
)
"""What may go wrong anywhere; what is here twice does so twice as often."""
LAB_KINDS = (*PLAIN_KINDS, "cut", "cut", "cut one way")


@dataclass(frozen=True)
class Outcome:
    """What came of one trial."""

    problems: list[str]
    fired: list[tuple[str, Fired, float | None]]
    """The kind, what happened, and the seconds until a step was committed by others (None: never)."""
    planned: int
    seconds: float
    difference: float


@dataclass
class Trial:
    """One training and its faults."""

    seed: int
    work: str = "mlp"
    deterministic: bool = False
    lab: Lab | None = None
    data_workers: int = 0
    steps: int = 0
    restarts: int = 0
    """How often it has lost everything, and begun again at a checkpoint."""
    plan: FaultPlan = field(default_factory=FaultPlan)
    kinds: list[str] = field(default_factory=list)
    """Of each fault of the plan."""

    @classmethod
    def drawn(cls, seed: int, faults: int, *, deterministic: bool = False, lab: Lab | None = None) -> Trial:
        """About so many faults, and as many steps as they need."""
        draw = random.Random(f"chaos {seed}")
        work, loaders = draw.choice(list(WORKS)), draw.choice([0, 0, 1])
        trial = cls(seed, work, deterministic, lab, data_workers=loaders)
        step, workers = draw.randint(3, 10), WORKERS
        while len(trial.kinds) < faults:
            kind = draw.choice(LAB_KINDS if lab is not None else PLAIN_KINDS)
            workers = trial._add(kind, step, workers, draw)
            step += draw.randint(*GAP)
        trial.steps = step + QUIET_END
        return trial

    def _add(self, kind: str, step: int, workers: int, draw: random.Random) -> int:
        """Plan a fault; the number of workers from then on. Nobody is killed twice with the same samples."""
        plan, (one, two) = self.plan, [f"worker-{seat}" for seat in draw.sample(range(workers), 2)]
        match kind:
            case "kill":
                plan.kill(one, step=step, at=draw.choice(INSIDE))
            case "kill two":
                point = draw.choice(["decide", "commit"])  # where neither computes any longer
                plan.kill(one, step=step, at=point).kill(two, step=step, at=point)
            case "kill in recovery":
                plan.kill(one, step=step, at="compute").kill(two, step=step, at="recover")
            case "kill the source of a copy":
                # the lowest seat among those who have the state is the first member, whom others copy from
                plan.kill(f"worker-{draw.randrange(1, workers)}", step=step).kill("worker-0", step=step, at="copy")
            case "kill in a copy":
                plan.kill(one, step=step, at="exchange").kill(one, step=0, at="copy")
            case "kill in a checkpoint":
                plan.kill("worker-0", step=step, at="checkpoint")
            case "kill in evaluation":
                plan.kill(one, step=step, at="evaluate")
            case "stop":
                plan.stop(one, step=step, at=draw.choice(INSIDE))
            case "stop shortly":
                plan.stop(one, step=step, at=draw.choice(INSIDE), seconds=draw.uniform(0.05, 0.4))
            case "hold the lock":
                plan.slow(one, step=step, seconds=draw.uniform(0.5, 3.0), hold=True)
            case "kill the coordinator":
                plan.kill("coordinator", step=step)
            case "stop the coordinator":
                plan.stop("coordinator", step=step)
            case "scale":
                workers = draw.choice([count for count in range(3, MOST + 1) if count != workers])
                plan.scale(workers, step=step)
            case "cut" | "cut one way":
                assert self.lab is not None
                seconds = draw.uniform(0.3, 4.0)
                plan.cut("a", "b", step=step, lab=self.lab.name, seconds=seconds, one_way=kind != "cut")
        self.kinds += [kind] * (len(plan.faults) - len(self.kinds))
        return workers

    def run(self, folder: Path) -> Outcome:
        """Train, calm and with the faults, in a folder that is empty. Never raises for what the training did."""
        begun = time.monotonic()
        problems: list[str] = []
        calm, _ = self._train(folder / "calm", None, problems)
        troubled, told = self._train(folder / "troubled", self.plan.ledger(folder / "ledger"), problems)
        difference = relative_difference(troubled, calm)
        limit = 0.0 if self.deterministic else TOLERANCE
        if not difference <= limit:
            problems.append(f"the weights differ from the calm run's by {difference:.3g}; it must be {limit:g} at most")
        if not _in_order(told, self.steps, self.restarts):
            problems.append(f"steps were told as {_told(told)}; they must be 1 to {self.steps}, in order")
        problems += self._audited(folder / "ledger")
        return Outcome(problems, self._fired(folder / "ledger"), len(self.kinds), time.monotonic() - begun, difference)

    def _train(self, folder: Path, plan: FaultPlan | None, problems: list[str]) -> tuple[nn.Module, list[int]]:
        work, told = WORKS[self.work], []

        def note(event: AnyEvent) -> None:
            if isinstance(event, StepDone):
                told.append(event.step)
            elif isinstance(event, Notice) and "; going on from " in event.text:
                self.restarts += 1

        torch.manual_seed(self.seed)
        model, data = work.model(), work.data(self.seed)
        try:
            with LeakCheck(grace=5.0):
                Trainer(
                    model,
                    work.loss,
                    lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.5),
                    data,
                    eval_data=TensorDataset(*data[:96]),
                    data_workers=self.data_workers,
                    batch_size=BATCH,
                    steps=self.steps,
                    workers=WORKERS,
                    min_workers=LEAST,
                    max_workers=MOST,
                    restarts=50,
                    faults=plan,
                    seed=self.seed,
                    deterministic=self.deterministic,
                    run_dir=folder,
                    checkpoint_every=5,
                    eval_every=10,
                    engine="local" if self.lab is None else f"local:lab={self.lab.name}",
                    callbacks=[note],
                ).fit()
        except LeakError as error:
            problems.append(f"the {folder.name} run left behind: {error}")
        except ShoalError as error:
            problems.append(f"the {folder.name} run ended with {type(error).__name__}: {error}")
        finally:
            if plan is not None:
                plan.finish()
        return model, told

    def _audited(self, ledger: Path) -> list[str]:
        course = Course(WORKS[self.work].samples, BATCH)
        try:
            return audit(ledger, course, self.steps, deterministic=self.deterministic).problems
        except ShoalError as error:
            return [str(error)]

    def _fired(self, ledger: Path) -> list[tuple[str, Fired, float | None]]:
        kinds = dict(zip(self.plan.faults, self.kinds, strict=True))
        try:
            records = [record for ledger in read_ledgers(ledger).values() for record in ledger]
        except ShoalError:
            records = []
        records.sort(key=lambda record: record.time)
        return [(kinds[fired.fault], fired, _next_commit(fired, records)) for fired in self.plan.fired()]


def _next_commit(fired: Fired, records: Sequence[Record]) -> float | None:
    """Seconds to the next commit; after the death of a worker, to the next in a newer term, or else to any."""
    later = [record for record in records if record.time > fired.moment]
    if not later:
        return None
    fault = fired.fault
    dies = bool(fault.point) and (fault.kind == "kill" or (fault.kind == "stop" and fault.seconds is None))
    before = max((record.term for record in records if record.time <= fired.moment), default=0)
    newer = [record for record in later if record.term > before] if dies or fault.kind == "cut" else []
    return (newer or later)[0].time - fired.moment


def _in_order(told: list[int], steps: int, restarts: int) -> bool:
    """1, 2, … steps, each once; only after a restart from a checkpoint the steps since then again."""
    back = [after for before, after in pairwise(told) if after != before + 1]
    ahead = [after for before, after in pairwise(told) if after > before + 1]
    return told[:1] == [1] and told[-1:] == [steps] and not ahead and len(back) <= restarts


def _told(steps: Sequence[int]) -> str:
    return f"{len(steps)} from {steps[0]} to {steps[-1]}" if steps else "none"


# -- what is trained ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """Something small, smooth and slow enough that a fault meets it at work."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    samples: int = 1200

    def data(self, seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(self.samples, *self.shape, generator=generator)
        return TensorDataset(inputs, (inputs.flatten(1)[:, :4].sum(1) > 0).long())

    @staticmethod
    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = batch
        if model.training:
            time.sleep(len(inputs) * SLEEP_PER_SAMPLE)
        return F.cross_entropy(model(inputs), labels)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Dropout(0.2), nn.Conv2d(8, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(128, 2)
    )


WORKS = {"mlp": Work(_mlp, (16,)), "cnn with dropout": Work(_cnn, (1, 8, 8))}
