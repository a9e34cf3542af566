"""Whether `codec="auto"` chooses well: its choice against every codec that it could have chosen. Needs root.

examples
  python benchmarks/autocodec.py                                all 12 cases (about 12 minutes)
  python benchmarks/autocodec.py --check --json found.json      run again, it goes on where it was stopped
  python benchmarks/autocodec.py --cases 100mbit/gpt            one case
  python benchmarks/autocodec.py --cases host 1gbit/cnn         all cases on one host, and another one
  python benchmarks/autocodec.py --rounds 5 --seconds 3         narrower

A case is a link and a model. `host` is 2 workers on this host, which meet in shared memory; the others are 4 lab hosts
with a worker each, whose links have this rate. In each round every arm trains the model anew: one for each codec, and
one with `auto`, in another order each round. What is settled at first is not timed: the sizes of buckets and, with
`auto`, which codec it will be. An arm's time is the median of the times between steps after that, and over rounds the
median of those medians.

A choice is right if the arm that was chosen takes at most 1.05 times as long as the fastest one. A case is right if the
choice of `auto` is in every round. With --check the exit code is 1 if less than 9 of 10 cases are. Nothing else should
run meanwhile; the share of the CPU that others used just before a round, at most, is shown.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from run import order
from torch import Tensor, nn
from wide import CLASSES, INPUTS, WideMLP
from work import SYMBOLS, Pool, TinyGPT, Windows, class_loss, gpt_loss

import shoal
from shoal.core.events import AnyEvent
from shoal.testing.lab import Lab, why_no_lab

AUTO = "auto"
CODECS = ("none", "fp16", "int8", "powersgd")
HOST = "host"
LINKS = (HOST, "10gbit", "1gbit", "100mbit")
WORKERS = {HOST: 2}
LAB_WORKERS = 4
WITHIN = 1.05
"""Times the seconds of the fastest arm: a choice that takes no longer is right."""
WANTED = 0.9
"""Of the cases."""
ROUNDS, STEPS, SECONDS = 2, 10, 2.0
SETTLING = 3
"""Steps that are not timed after it is settled how gradients are exchanged."""
GIVE_UP = 120.0
"""Seconds of training after which a run that has not settled, or not enough steps, will not do any more."""
MOST_STEPS = 5000
WIDTH = 768
PIXELS = 16


# ---- what is trained


class Images:
    """`count` random pictures with a class, of which few are stored."""

    def __init__(self, count: int) -> None:
        self._pool = Pool(3 * PIXELS * PIXELS, CLASSES, count, stored=256)

    def __len__(self) -> int:
        return len(self._pool)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        picture, target = self._pool[index]
        return picture.view(3, PIXELS, PIXELS), target


class TinyCNN(nn.Module):
    """Five convolutions, about a million parameters."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 32, 64, 128, 256, 256]
        self.layers = nn.ModuleList(nn.Conv2d(before, after, 3, padding=1) for before, after in pairwise(widths))
        self.out = nn.Linear(widths[-1], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = F.relu(layer(x))
            if 0 < number < 4:
                x = F.max_pool2d(x, 2)
        out: Tensor = self.out(x.mean((2, 3)))
        return out


def random_text(count: int) -> Windows:
    return Windows(torch.randint(SYMBOLS, (count + 1000,), generator=torch.Generator().manual_seed(0)), count)


def sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def adamw(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


@dataclass(frozen=True)
class Task:
    """One model with all that it takes to train it. A worker has `share` samples of each step's."""

    model: Callable[[], nn.Module]
    data: Callable[[int], Any]
    loss: Callable[[nn.Module, Sequence[Tensor]], Tensor]
    optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer]
    share: int


TASKS = {
    "mlp": Task(lambda: WideMLP(WIDTH), lambda count: Pool(INPUTS, CLASSES, count), class_loss, sgd, 128),
    "cnn": Task(TinyCNN, Images, class_loss, sgd, 6),
    "gpt": Task(TinyGPT, random_text, gpt_loss, adamw, 2),
}
CASES = [f"{link}/{model}" for link in LINKS for model in TASKS]


# ---- one run


class NotMeasured(Exception):
    """A run ended, or went on for too long, before enough of its steps were timed."""


class Watch:
    """Times the steps of a run after it is settled how they are exchanged, and ends it when there are enough."""

    def __init__(self, steps: int, seconds: float) -> None:
        self._steps, self._seconds = steps, seconds
        self._begun = time.monotonic()
        self._settled: shoal.ExchangeSettled | None = None
        self._times: list[float] = []
        """When steps were done, from the first one that counts on."""

    def __call__(self, event: AnyEvent) -> shoal.Stop | None:
        if isinstance(event, shoal.ExchangeSettled):
            self._settled, self._times = event, []
        if not isinstance(event, shoal.StepDone):
            return None
        if self._settled is not None and event.step >= self._settled.step + SETTLING:
            self._times.append(event.time)
        if self.complete or time.monotonic() > self._begun + GIVE_UP:
            return shoal.Stop("enough steps were timed" if self.complete else "it takes too long")
        return None

    @property
    def complete(self) -> bool:
        return len(self._times) > self._steps and self._times[-1] - self._times[0] >= self._seconds

    def timed(self) -> Timed:
        """What was measured. Raises NotMeasured."""
        if self._settled is None or not self.complete:
            what = "not settled" if self._settled is None else f"{len(self._times)} steps timed"
            raise NotMeasured(f"{what} after {time.monotonic() - self._begun:.0f} s")
        seconds = median(after - before for before, after in pairwise(self._times))
        return Timed(seconds, len(self._times) - 1, self._settled.step, self._settled.codec, self._settled.note)


@dataclass(frozen=True)
class Timed:
    """One run: median seconds of so many steps, from after step `settled` on."""

    seconds: float
    steps: int
    settled: int
    codec: str
    note: str


def run_once(task: Task, codec: str, engine: str, workers: int, given: argparse.Namespace) -> Timed:
    """Train with this codec until enough steps were timed. Raises NotMeasured."""
    watch, batch = Watch(given.steps, given.seconds), task.share * workers
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        shoal.Trainer(
            model=task.model,
            loss=task.loss,
            optimizer=task.optimizer,
            data=task.data(batch * MOST_STEPS),
            batch_size=batch,
            steps=MOST_STEPS,
            workers=workers,
            engine=engine,
            codec=codec,
            data_workers=0,
            run_dir=Path(folder) / "run",
            callbacks=[watch],
        ).fit()
    return watch.timed()


# ---- one case


@dataclass
class Case:
    """All runs of a case, by arm in the order of rounds."""

    name: str
    elsewhere: list[float] = field(default_factory=list)
    """Share of the CPU that others used just before each round."""
    runs: dict[str, list[Timed]] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        return len(self.runs.get(AUTO, []))

    def seconds(self, arm: str) -> float:
        return median(run.seconds for run in self.runs[arm])

    def spread(self, arm: str) -> float:
        """How far the rounds are apart, as a share of their median."""
        seconds = [run.seconds for run in self.runs[arm]]
        return (max(seconds) - min(seconds)) / median(seconds)

    @property
    def best(self) -> str:
        return min(CODECS, key=self.seconds)

    @property
    def choices(self) -> list[str]:
        return [run.codec for run in self.runs[AUTO]]

    def times_best(self, codec: str) -> float:
        return self.seconds(codec) / self.seconds(self.best) if codec in self.runs else math.inf

    @property
    def right_choices(self) -> int:
        return sum(self.times_best(codec) <= WITHIN for codec in self.choices)

    @property
    def right(self) -> bool:
        return self.right_choices == self.rounds


@contextmanager
def engine_for(link: str, workers: int) -> Iterator[str]:
    """The engine whose workers meet over this link."""
    if link == HOST:
        yield "local"
        return
    with Lab(hosts=workers, rate=link) as lab:
        yield f"local:lab={lab.name}"


def measure(name: str, given: argparse.Namespace) -> Case:
    link, model = name.split("/")
    workers = WORKERS.get(link, LAB_WORKERS)
    case = Case(name)
    begun = time.monotonic()
    with engine_for(link, workers) as engine:
        for number in range(given.rounds):
            case.elsewhere.append(psutil.cpu_percent(0.5) / 100)
            for arm in order([*CODECS, AUTO], number):
                try:
                    run = run_once(TASKS[model], arm, engine, workers, given)
                except NotMeasured as reason:
                    raise NotMeasured(f"{name}, {arm}, round {number + 1}: {reason}") from None
                case.runs.setdefault(arm, []).append(run)
                told = f", {run.codec} from step {run.settled} on" if arm == AUTO else ""
                say(f"{name} round {number + 1}: {arm} {run.seconds * 1e3:.1f} ms over {run.steps} steps{told}")
    say(f"{name}: {time.monotonic() - begun:.0f} s")
    return case


# ---- the file


def read(file: Path | None) -> dict[str, Case]:
    """The cases that were measured before, by name."""
    if file is None or not file.exists():
        return {}
    return {
        one["name"]: Case(
            one["name"],
            one["elsewhere"],
            {arm: [Timed(**run) for run in runs] for arm, runs in one["runs"].items()},
        )
        for one in json.loads(file.read_text())
    }


def write(file: Path, found: Mapping[str, Case]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(json.dumps([asdict(case) for case in found.values()], indent=1) + "\n")
    new.replace(file)


# ---- what people see


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def show(cases: Sequence[Case]) -> None:
    arms = [*CODECS, AUTO]
    print("\nms of a step (and how far rounds are apart); * is the fastest codec")
    print(f"{'case':<14}{''.join(f'{arm:>16}' for arm in arms)}  {'others':>6}  choice")
    for case in cases:
        times = "".join(f"{_time(case, arm):>16}" for arm in arms)
        choices = ", ".join(f"{codec} ({case.times_best(codec):.2f}x)" for codec in dict.fromkeys(case.choices))
        verdict = "right" if case.right else f"WRONG in {case.rounds - case.right_choices} of {case.rounds}"
        print(f"{case.name:<14}{times}  {max(case.elsewhere):>6.0%}  {choices}: {verdict}")
    print("\nwhy, in the words of each round")
    for case in cases:
        for run in case.runs[AUTO]:
            print(f"{case.name:<14}step {run.settled}: {run.note}")
    made, right = sum(case.rounds for case in cases), sum(case.right_choices for case in cases)
    print(f"\n{sum(case.right for case in cases)} of {len(cases)} cases, {right} of {made} choices are right")


def _time(case: Case, arm: str) -> str:
    mark = "*" if arm == case.best else ""
    return f"{mark}{case.seconds(arm) * 1e3:.1f} ({case.spread(arm):.0%})"


# ---- command line


def chosen(wanted: Sequence[str]) -> list[str]:
    """The cases that `wanted` names, whole or by link or model."""
    return [name for name in CASES if any(one in (name, *name.split("/")) for one in wanted)]


def case_name(text: str) -> str:
    if not chosen([text]):
        raise argparse.ArgumentTypeError(f"{text!r} is no case: give LINK/MODEL, LINK ({', '.join(LINKS)}) or MODEL")
    return text


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--cases", nargs="+", type=case_name, default=CASES, metavar="CASE", help="LINK/MODEL, or one of both")
    add("--rounds", type=int, default=ROUNDS, help=f"a run of every arm in each (default {ROUNDS})")
    add("--steps", type=int, default=STEPS, help=f"of a run that are timed, at least (default {STEPS})")
    add("--seconds", type=float, default=SECONDS, help=f"of a run that are timed, at least (default {SECONDS:g})")
    add("--json", type=Path, metavar="FILE", help="write each case there when it is measured; those in it are kept")
    add("--check", action="store_true", help=f"exit with code 1 if less than {WANTED:.0%} of the cases are right")
    given = parser.parse_args(argv)
    if given.rounds < 1 or given.steps < 1:
        parser.error("--rounds and --steps must be 1 or more")
    return given


def main() -> int:
    given = arguments()
    names, found = chosen(given.cases), read(given.json)
    missing = [name for name in names if name not in found or found[name].rounds < given.rounds]
    if any(not name.startswith(HOST) for name in missing) and (reason := why_no_lab()):
        say(f"no lab, so only `--cases {HOST}` can be measured: {reason}")
        return 1
    with tempfile.TemporaryDirectory(prefix="bench-") as home:
        os.environ |= {"SHOAL_HOME": home, "SHOAL_PROGRESS": "quiet", "SHOAL_STORE": "none"}
        try:
            for name in missing:
                found[name] = measure(name, given)
                if given.json is not None:
                    write(given.json, found)
        except NotMeasured as failure:
            say(f"\n{failure}")
            return 1
        except (KeyboardInterrupt, shoal.Interrupted):
            say("\nstopped; the cases that were complete are kept" if given.json else "\nstopped")
            return 130
    cases = [found[name] for name in names]
    show(cases)
    return 1 if given.check and sum(case.right for case in cases) < WANTED * len(cases) else 0


if __name__ == "__main__":
    sys.exit(main())
