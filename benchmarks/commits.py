"""Watching a training from outside: who committed which step when, and how long it took after something happened.

A training writes ledgers (`shoal.testing.ledger`), a line for each worker and step, with the time by a clock that all
processes of this machine share. `Training` starts one as a process, reads them as they grow, and can harm its workers.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import psutil

from shoal.testing.ledger import Record, decode

HERE = Path(__file__).parent
WIDTH = 2201  # of wide.WideMLP: 10.0 million parameters, 40 MB
BATCH_NAME = "BENCH_BATCH"
BATCH = int(os.environ.get(BATCH_NAME, "96"))  # about 100 ms for a step of four workers on two cores
WORKERS = 4
POLL = 0.02  # seconds
START_WITHIN = 180.0


class TrainingFailed(Exception):
    """A training ended, or did not go on."""


class Ledgers:
    """The lines in a folder of ledgers, read as they come."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: list[Record] = []
        """In the order in which they were read."""
        self._read: dict[Path, int] = {}

    def read(self) -> None:
        for file in sorted(self.folder.glob("*.jsonl")):
            begin = self._read.get(file, 0)
            with file.open("rb") as opened:
                opened.seek(begin)
                text = opened.read()
            whole = text.rfind(b"\n") + 1
            self.records += [decode(line) for line in text[:whole].splitlines()]
            self._read[file] = begin + whole

    def step_seconds(self, members: int, since: float = 0.0) -> list[float]:
        """From commit to commit of each worker, in terms with so many members."""
        by_process: dict[int, list[Record]] = defaultdict(list)
        for record in self.records:
            if record.time >= since and len(record.shares) == members:
                by_process[record.pid].append(record)
        return [
            after.time - before.time
            for records in by_process.values()
            for before, after in pairwise(records)
            if (after.term, after.step) == (before.term, before.step + 1)
        ]

    def crew(self) -> dict[int, str]:
        """The processes, by id, that have committed the newest step that all its members have; empty if none has."""
        found: dict[int, str] = {}
        by_step: dict[tuple[int, int], dict[int, str]] = defaultdict(dict)
        for record in self.records[-400:]:
            at = by_step[record.term, record.step]
            at[record.pid] = record.worker
            if len(at) == len(record.shares):
                found = at
        return found

    def term(self) -> int:
        return max((record.term for record in self.records), default=0)


class Training:
    """A training as a process of its own, in a folder. Used as a context manager, from one thread."""

    def __init__(self, command: Sequence[str], folder: Path, **environment: str) -> None:
        self.folder = folder
        self.log = folder / "log.txt"
        folder.mkdir(parents=True)
        self.ledgers = Ledgers(folder / "ledger")
        self.ledgers.folder.mkdir()
        paths = [str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
        whole = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
            "SHOAL_PROGRESS": "quiet",
            "SHOAL_HOME": str(folder / "home"),
            **environment,
        }
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=whole, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        """End it, and whatever it started."""
        tree = self._tree()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for process in psutil.wait_procs(tree, timeout=5)[1]:
            process.kill()

    def _tree(self) -> list[psutil.Process]:
        try:
            return list(psutil.Process(self._process.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return []

    def await_that(self, holds: Callable[[], bool], what: str, seconds: float) -> None:
        """Read ledgers until `holds()`. Raises TrainingFailed if the training ends, or after so many seconds."""
        deadline = time.monotonic() + seconds
        while True:
            self.ledgers.read()
            if holds():
                return
            if self._process.poll() is not None:
                raise TrainingFailed(
                    f"the training ended with {self._process.returncode} before {what}\n{self._tail()}"
                )
            if time.monotonic() > deadline:
                raise TrainingFailed(f"after {seconds:.0f} s still not {what}\n{self._tail()}")
            time.sleep(POLL)

    def await_end(self, seconds: float) -> None:
        """Until it has ended by itself, with 0."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TrainingFailed(f"the training did not end within {seconds:.0f} s\n{self._tail()}") from None
        self.ledgers.read()
        if code:
            raise TrainingFailed(f"the training ended with {code}\n{self._tail()}")

    def await_crew(self, workers: int = WORKERS, steps: int = 5, seconds: float = START_WITHIN) -> None:
        """Until so many workers have committed so many steps in the same term."""
        begun = len(self.ledgers.records)

        def steady() -> bool:
            term = self.ledgers.term()
            found = [record for record in self.ledgers.records[begun:] if record.term == term]
            full = {record.step for record in found if len(record.shares) == workers}
            return len(full) >= steps and len(self.ledgers.crew()) == workers

        self.await_that(steady, f"{workers} workers trained", seconds)

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-25:]
        return "\n".join(f"  | {line}" for line in lines)


def shoal_command(folder: Path, *options: str) -> list[str]:
    """The elastic Trainer; options are those of arms/elastic.py."""
    return [sys.executable, str(HERE / "arms" / "elastic.py"), str(folder), *options]


def torchrun_command(folder: Path) -> list[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"]
    return [*run, "--max-restarts=100", str(HERE / "arms" / "torchrun_ddp.py"), str(folder)]


def shown(seconds: Sequence[float]) -> str:
    if not seconds:
        return "not measured"
    middle, worst = statistics.median(seconds), max(seconds)
    return f"median {middle:.3f} s, worst {worst:.3f} s of {len(seconds)}"
