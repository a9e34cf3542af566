"""Arms that take turns: all their processes are alive at once, and only one arm computes at any moment.

    with Table(arms, share=16, workers=2, folder=folder) as table:
        seconds = table.turn("hand", lead=2, steps=30)

A rank that has no turn is blocked in a read of its socket and uses no CPU, so what the machine does to one arm it does,
a second later, to the next. The harness sleeps while a turn runs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from select import select
from types import TracebackType

import psutil
import turn

HERE = Path(__file__).parent


class ArmFailed(Exception):
    """An arm ended, kept silent past the deadline, or did other work than it was given."""


@dataclass(frozen=True)
class Arm:
    """How to start an arm: one process that makes its own workers, one process for each rank, or one process `alone`,
    which has the whole batch and as many threads as the other arms have ranks."""

    name: str
    command: tuple[str, ...]
    per_rank: bool
    alone: bool = False
    tree: Path | None = None
    """Whose Shoal it imports, if not the table's."""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Seat:
    """An arm at the table: its processes, the sockets of its ranks, and the CPU it used in and out of its turns."""

    arm: Arm
    log: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    ranks: dict[int, socket.socket] = field(default_factory=dict)  # by process id
    cpu_waiting: float = 0.0


class Table:
    """Starts the arms, gives them turns, ends them. Use as a context manager, from one thread."""

    def __init__(
        self,
        arms: Sequence[Arm],
        *,
        share: int,
        workers: int,
        folder: Path,
        deadline: float = 120.0,
        tree: Path = HERE.parent,
    ) -> None:
        """`share` is a rank's part of the global batch; an arm silent for `deadline` seconds has failed. Arms import
        Shoal from `tree`, whichever the interpreter has."""
        self.share, self.workers, self.folder, self.deadline = share, workers, folder, deadline
        self.tree, self.source = tree, tree.resolve() / "src"
        self.seats = {arm.name: Seat(arm, folder / f"{arm.name}.log") for arm in arms}
        self.torch: set[str] = set()
        self.cpu_elsewhere = self.cpu_available = 0.0

    def __enter__(self) -> Table:
        # A shell that starts us in the background has SIGINT ignored, which the arms would inherit; _end needs it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with socket.socket(socket.AF_UNIX) as door:
                door.bind(str(self.folder / "door"))
                door.listen(64)
                for seat in self.seats.values():
                    self._start(seat)
                self._seat_ranks(door)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def turn(self, name: str, *, lead: int, steps: int) -> float:
        """Let one arm run `lead` steps and then `steps` more; returns the seconds of the latter on its slowest rank."""
        seat = self.seats[name]
        cpu, machine, began = self._cpu(), _machine_cpu(), time.monotonic()
        for line in seat.ranks.values():
            line.sendall(turn.GRANT.pack(lead, steps))
        seconds = max(self._reports(seat, (lead + steps) * self.share * self.workers))
        self._account(name, cpu, machine, time.monotonic() - began)
        return seconds

    def _ranks(self, seat: Seat) -> int:
        return 1 if seat.arm.alone else self.workers

    def _threads(self, seat: Seat) -> int:
        return self.workers if seat.arm.alone else 1

    def _start(self, seat: Seat) -> None:
        shared = {
            **os.environ,
            "PYTHONPATH": python_path(seat.arm.tree or self.tree),
            "OMP_NUM_THREADS": str(self._threads(seat)),
            "MKL_NUM_THREADS": str(self._threads(seat)),
            turn.SOCKET: str(self.folder / "door"),
            turn.ARM: seat.arm.name,
            **seat.arm.environment,
        }
        for environment in rank_environments(self._ranks(seat)) if seat.arm.per_rank else [{}]:
            with seat.log.open("ab") as log:
                seat.processes.append(
                    subprocess.Popen(
                        seat.arm.command,
                        env={**shared, **environment},
                        cwd=self.folder,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # Ctrl-C reaches the harness alone, which then ends the arms
                    )
                )

    def _seat_ranks(self, door: socket.socket) -> None:
        until = time.monotonic() + self.deadline
        while waiting := [seat for seat in self.seats.values() if len(seat.ranks) < self._ranks(seat)]:
            for seat in waiting:
                if any(process.poll() is not None for process in seat.processes):
                    raise _failure(seat, "ended before its second step")
            if time.monotonic() > until:
                raise _failure(waiting[0], f"did not reach its second step in {self.deadline:.0f} s")
            if select([door], [], [], 0.2)[0]:
                self._seat_rank(door.accept()[0])

    def _seat_rank(self, line: socket.socket) -> None:
        with line.makefile("rb") as stream:
            about = json.loads(stream.readline())
        seat = self.seats[about["arm"]]
        seat.ranks[about["pid"]] = line
        self.torch.add(about["torch"])
        threads = self._threads(seat)
        if about["threads"] != threads or len(self.torch) > 1:
            raise _failure(seat, f"has a rank with {about}: it must have {threads} threads, and the same torch as all")
        source = (seat.arm.tree or self.tree).resolve() / "src"
        if about["shoal"] and not Path(about["shoal"]).resolve().is_relative_to(source):
            raise _failure(seat, f"has a rank with {about}: it must have the Shoal in {source}")

    def _reports(self, seat: Seat, samples: int) -> list[float]:
        """Seconds of each rank. All ranks together must have computed so many samples, however they share them."""
        until, seconds, silent, computed = time.monotonic() + self.deadline, [], set(seat.ranks.values()), 0
        while silent:
            ready = select(silent, [], [], max(0.0, until - time.monotonic()))[0]
            if not ready:
                raise _failure(seat, f"has {len(silent)} ranks that kept silent for {self.deadline:.0f} s")
            for line in ready:
                report = line.recv(turn.REPORT.size, socket.MSG_WAITALL)
                if len(report) < turn.REPORT.size:
                    raise _failure(seat, "lost a rank during its turn")
                elapsed, seen = turn.REPORT.unpack(report)
                computed += seen
                seconds.append(elapsed)
                silent.remove(line)
        if computed != samples:
            raise _failure(seat, f"computed {computed} samples in a turn in which every arm computes {samples}")
        return seconds

    def _cpu(self) -> dict[str, float]:
        return {name: sum(map(_cpu_seconds, tree(seat))) for name, seat in self.seats.items()}

    def _account(self, name: str, before: dict[str, float], machine_before: float, seconds: float) -> None:
        after, machine = self._cpu(), _machine_cpu() - machine_before
        used = {other: max(0.0, after[other] - before[other]) for other in after}
        for other, seat in self.seats.items():
            if other != name:
                seat.cpu_waiting += used[other]
        self.cpu_elsewhere += max(0.0, machine - sum(used.values()))
        self.cpu_available += seconds * (psutil.cpu_count() or 1)

    def _end(self) -> None:
        """Wake every rank for good, interrupt, and kill what is still there after a moment."""
        everyone = [process for seat in self.seats.values() for process in tree(seat)]
        for seat in self.seats.values():
            for line in seat.ranks.values():
                _wake(line)
            for started in seat.processes:
                if started.poll() is None:
                    started.send_signal(signal.SIGINT)
        _, left = psutil.wait_procs(everyone, timeout=5)
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=5)
        for seat in self.seats.values():
            for line in seat.ranks.values():
                line.close()
            for started in seat.processes:
                started.wait()


def python_path(tree: Path) -> str:
    """For a process that imports these scripts, and the Shoal of `tree`, whichever the interpreter has."""
    paths = [str(HERE), str(tree.resolve() / "src"), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, paths))


def rank_environments(workers: int) -> list[dict[str, str]]:
    """What torchrun would set for each rank on this machine, with a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    world = str(workers)
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    return [{**here, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(workers)]


def tree(seat: Seat) -> list[psutil.Process]:
    """Every process of an arm that is alive now, those it started itself included."""
    found: dict[int, psutil.Process] = {}
    for started in seat.processes:
        try:
            top = psutil.Process(started.pid)
            found.update({process.pid: process for process in [top, *top.children(recursive=True)]})
        except psutil.NoSuchProcess:
            continue
    return list(found.values())


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _machine_cpu() -> float:
    """Seconds in which a core was busy or taken by the hypervisor."""
    busy = ("user", "nice", "system", "irq", "softirq", "steal")
    times = psutil.cpu_times()
    return float(sum(getattr(times, kind, 0.0) for kind in busy))


def _wake(line: socket.socket) -> None:
    try:
        line.sendall(turn.GRANT.pack(0, turn.FOREVER))
    except OSError:
        return  # that rank has ended


def _failure(seat: Seat, what: str) -> ArmFailed:
    lines = seat.log.read_text(errors="replace").splitlines()[-25:] if seat.log.exists() else []
    return ArmFailed(f"arm {seat.arm.name} {what}. Its last lines:\n" + "\n".join(f"  | {line}" for line in lines))
