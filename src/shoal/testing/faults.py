"""Faults on purpose: a plan of what goes wrong at which step of a training, for tests of one's own runs too.

    plan = FaultPlan().kill("worker-1", step=7).stop("worker-2", step=9, seconds=3)
    Trainer(..., workers=4, min_workers=2, faults=plan).fit()
    assert len(plan.fired()) == 2

Steps count from 0, as `step.number` does. A fault of a worker happens in that worker, on its main thread, at a point
inside the step (`POINTS`); one of a server ("server-0", with `sync="server"`) in that server (`SERVER_POINTS`). A fault
of the coordinator, the supervisor, a link, or the number of workers happens in the supervisor, once it has heard that
so many steps are done. Each happens once, however often its step is redone and however many processes have had the
name.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

from shoal.cluster.messages import COORDINATOR, seat_of
from shoal.core.errors import ConfigError
from shoal.core.events import AnyEvent, Regrouped, RunEnded, RunFailed, RunStarted, StepDone
from shoal.testing.lab import Lab
from shoal.testing.ledger import Ledger
from shoal.testing.servers import ServerFaults, ServerLedger, server_of
from shoal.testing.timer import signal_at

POINTS = ("compute", "exchange", "bucket", "decide", "commit", "recover", "copy", "checkpoint", "evaluate")
"""Where inside a step: before the first forward; before the exchange; as a bucket leaves; once all gradients are
summed; once they are applied; when a broken term has been left; while state is copied; as a checkpoint begins; as an
evaluation does."""
RARE = ("recover", "copy", "checkpoint", "evaluate")
"""Points that not every step has: a fault there waits for the first time at its step or later."""
SERVER_POINTS = ("push", "pushed", "close", "closed", "apply", "applied")
"""Where in a server: before a gradient is counted, and after; as a step is closed, and once its copies are made; before
it is applied, and after. A fault happens there the first time at its step or later."""
SUPERVISOR = "supervisor"

_BYTES = 65536
_MOST = _BYTES // 8
_PROGRESS = (RunStarted, StepDone, Regrouped)


class Act(Protocol):
    """What the supervisor lets a plan do. Called on its own thread, inside `FaultPlan.heard`."""

    def kill_coordinator(self) -> None: ...
    def stop_coordinator(self) -> None: ...
    def kill_supervisor(self) -> None: ...
    def scale(self, workers: int) -> None: ...


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    kind: str
    """kill, stop, slow, cut or scale."""
    target: str
    """A name, hosts with a space between, or a number of workers."""
    step: int
    point: str = ""
    """Empty for what the supervisor does."""
    nth: int = 1
    seconds: float | None = None
    hold: bool = False
    lab: str = ""
    one_way: bool = False

    def __str__(self) -> str:
        where = f" at {self.point}" if self.point else ""
        lasting = f" for {self.seconds:g} s" if self.seconds is not None else ""
        return f"{self.kind} {self.target} in step {self.step}{where}{lasting}"


class Fired(NamedTuple):
    fault: Fault
    moment: float
    """By `time.monotonic`, just before it happened."""


class FaultPlan:
    """What goes wrong in one run. Every method that adds a fault returns the plan itself, so calls can be chained.

    Give it to `Trainer(faults=...)`, and make a new one for each run: a fault that has happened does not happen again.
    Faults are added before `fit()`; `seed` is that of choices left to the plan. Wrong arguments raise ConfigError.
    """

    def __init__(self, *, seed: int | None = None) -> None:
        self._seed = seed
        self._memory = mmap.mmap(-1, _BYTES)  # shared by all processes that are forked later
        self._moments = memoryview(self._memory).cast("q")
        self._faults: list[Fault] = []
        self._at_step: dict[tuple[str, int, int], list[int]] = {}
        self._at_rare: dict[tuple[str, int], list[int]] = {}
        self._at_server: dict[tuple[str, int], list[int]] = {}
        self._by_supervisor: list[int] = []
        self._bucket = (-1, 0)
        self._ledger: Ledger | None = None
        self._attempts = 0
        self._healing: list[_Healing] = []

    def __repr__(self) -> str:
        shown = "; ".join(map(str, self._faults[:8])) + ("; …" if len(self._faults) > 8 else "")
        return f"<FaultPlan: {shown or 'no faults'}>"

    # -- making a plan -------------------------------------------------------------------------------------------------

    def kill(
        self,
        name: str | None = None,
        *,
        step: int | None = None,
        at: str | None = None,
        nth: int = 1,
        every: int | None = None,
        times: int = 1000,
        workers: int | None = None,
    ) -> Self:
        """SIGKILL to "worker-N", "server-N", "coordinator" or "supervisor".

        `at` is one of `POINTS` ("compute") for workers, and one of `SERVER_POINTS` ("apply") for servers; at "bucket"
        the `nth` one of the step. With `every`
        instead of `step` it happens at each such step, so many `times`; then, without a name, to `workers` in turn, or
        as drawn by the plan's seed.
        """
        if every is None:
            return self._add("kill", _named(name), _whole("step", step), at, nth=nth)
        if step is not None:
            raise ConfigError(f"kill: step={step} and every={every} were given; give one of them")
        _whole("every", every, least=1)
        for turn in range(_whole("times", times, least=1)):
            self._add("kill", name or self._drawn(turn, workers), every * (turn + 1), at, nth=nth)
        return self

    def stop(self, name: str, *, step: int, seconds: float | None = None, at: str | None = None, nth: int = 1) -> Self:
        """SIGSTOP to "worker-N", "server-N" or "coordinator"; then, after so many `seconds`, SIGCONT, if it still
        lives."""
        if name == SUPERVISOR:
            raise ConfigError('stop: the supervisor cannot be stopped by itself; use "worker-N" or "coordinator"')
        if name == COORDINATOR and seconds is not None:
            raise ConfigError(
                f"stop: seconds={seconds} is for workers and servers; a coordinator that is stopped is replaced"
            )
        return self._add("stop", _named(name), _whole("step", step), at, nth=nth, seconds=_seconds(seconds))

    def slow(
        self, name: str, *, step: int, seconds: float, hold: bool = False, at: str | None = None, nth: int = 1
    ) -> Self:
        """A worker takes so many `seconds` longer; with `hold` it keeps the interpreter's lock all the while."""
        if seat_of(str(name)) is None:
            raise ConfigError(f'slow: got {name!r}; only workers can be slow: "worker-0", "worker-1", …')
        return self._add("slow", name, _whole("step", step), at, nth=nth, seconds=_seconds(seconds), hold=hold)

    def cut(
        self, a: str, b: str | None = None, *, step: int, lab: str, seconds: float | None = None, one_way: bool = False
    ) -> Self:
        """Let nothing through between two hosts of the lab of this name, or pull the cable of one (as `Lab.cut`).

        Healed after so many `seconds`, or when the run ends.
        """
        if not lab or not isinstance(lab, str):
            raise ConfigError(f"cut: lab={lab!r}; it must be the name of a lab that is up, as in lab=lab.name")
        hosts = a if b is None else f"{a} {b}"
        return self._append(
            Fault("cut", hosts, _whole("step", step), seconds=_seconds(seconds), lab=lab, one_way=one_way)
        )

    def scale(self, workers: int, *, step: int) -> Self:
        """Ask for so many workers, as a callback that returns `shoal.Scale` does."""
        return self._append(Fault("scale", str(_whole("workers", workers, least=1)), _whole("step", step)))

    def ledger(self, folder: str | os.PathLike[str], *, digests: bool = True) -> Self:
        """From now on every worker writes a line for each step that it commits, for `shoal.testing.audit`.

        With `sync="server"` every server does so for each shard, for `shoal.testing.servers.audit_servers`.
        Without `digests` parameters are not compared, which a large model takes long for.
        """
        self._ledger = Ledger(folder, digests=digests)
        return self

    def fired(self) -> list[Fired]:
        """What has happened so far, in whichever process, in order of time."""
        done = [Fired(fault, self._moments[slot] * 1e-9) for slot, fault in enumerate(self._faults)]
        return sorted((each for each in done if each.moment), key=lambda each: each.moment)

    @property
    def faults(self) -> list[Fault]:
        """All of the plan, in the order in which they were added."""
        return list(self._faults)

    def _drawn(self, turn: int, workers: int | None) -> str:
        count = _whole("workers", workers, least=1)
        seat = turn % count if self._seed is None else random.Random(f"{self._seed} {turn}").randrange(count)
        return f"worker-{seat}"

    def _add(
        self,
        kind: str,
        name: str,
        step: int,
        point: str | None,
        *,
        nth: int,
        seconds: float | None = None,
        hold: bool = False,
    ) -> Self:
        if server_of(name) is not None:
            point = "apply" if point is None else point
            if point not in SERVER_POINTS or nth != 1:
                raise ConfigError(f"{kind}: at={point!r}; for a server it must be one of {', '.join(SERVER_POINTS)}")
            return self._append(Fault(kind, name, step, point, seconds=seconds))
        if seat_of(name) is None:
            if point is not None:
                raise ConfigError(f"{kind}: at={point!r} is a point inside a worker's step; leave it out for {name}")
            return self._append(Fault(kind, name, step, seconds=seconds))
        point = "compute" if point is None else point
        if point not in POINTS:
            raise ConfigError(f"{kind}: at={point!r} is no point of a step; it must be one of {', '.join(POINTS)}")
        if nth != 1 and point != "bucket":
            raise ConfigError(f'{kind}: nth={nth} counts buckets; it goes with at="bucket" alone')
        return self._append(Fault(kind, name, step, point, _whole("nth", nth, least=1), seconds, hold))

    def _append(self, fault: Fault) -> Self:
        slot = len(self._faults)
        if slot == _MOST:
            raise ConfigError(f"a plan holds {_MOST} faults at most; make another one, or give kill() fewer times=")
        self._faults.append(fault)
        seat = seat_of(fault.target) if fault.point else None
        server = server_of(fault.target)
        if server is not None:
            self._at_server.setdefault((fault.point, server), []).append(slot)
        elif seat is None:
            self._by_supervisor.append(slot)
        elif fault.point in RARE:
            self._at_rare.setdefault((fault.point, seat), []).append(slot)
        else:
            self._at_step.setdefault((fault.point, seat, fault.step), []).append(slot)
        return self

    # -- in a worker ---------------------------------------------------------------------------------------------------

    def at(self, point: str, *, worker: int, step: int) -> None:
        """The worker's main thread is at this point. Whatever the plan has for it happens now."""
        if point == "bucket":
            self._bucket = (step, self._bucket[1] + 1 if self._bucket[0] == step else 1)
        elif point == "compute":
            self._bucket = (step, 0)
        if point in RARE:
            slots = [slot for slot in self._at_rare.get((point, worker), ()) if step >= self._faults[slot].step]
        else:
            slots = self._at_step.get((point, worker, step), [])
        for slot in slots:
            fault = self._faults[slot]
            if (fault.point != "bucket" or fault.nth == self._bucket[1]) and self._claim(slot):
                _happen(fault)

    @property
    def records(self) -> bool:
        """Whether there is a ledger, so that `committed` does something."""
        return self._ledger is not None

    def committed(
        self,
        *,
        worker: int,
        term: int,
        step: int,
        spans: Mapping[int, Sequence[tuple[int, int]]],
        digest: Callable[[], bytes | str],
    ) -> None:
        """The worker has applied a step: for the ledger, if there is one.

        `spans` are the positions (start, stop) that each member of the term computed, by seat; empty where the step's
        result was copied. `digest` is called once, and returns one of all parameters.
        """
        if self._ledger is not None:
            self._ledger.write(worker=worker, term=term, step=step, spans=spans, digest=digest)

    def _claim(self, slot: int) -> bool:
        """True for the first one. Only one process at a time has a worker's name, so nobody races for a slot."""
        if self._moments[slot]:
            return False
        self._moments[slot] = time.monotonic_ns()
        return True

    # -- in a server ---------------------------------------------------------------------------------------------------

    def for_servers(self) -> ServerFaults:
        """What the servers of a run are given before they are started; called again if it begins again."""
        self._attempts += 1
        ledger = None if self._ledger is None else ServerLedger(self._ledger.folder, self._attempts)
        return ServerFaults(self.at_server, ledger)

    def at_server(self, point: str, *, server: int, step: int) -> None:
        """This server is at this point. Whatever the plan has for it happens now."""
        for slot in self._at_server.get((point, server), ()):
            if step >= self._faults[slot].step and self._claim(slot):
                _happen(self._faults[slot])

    # -- in the supervisor ---------------------------------------------------------------------------------------------

    def heard(self, event: AnyEvent, act: Act) -> None:
        """The supervisor has heard of an event. Does not block, but for the last one: see `finish`."""
        if isinstance(event, RunEnded | RunFailed):
            self.finish()
        elif isinstance(event, _PROGRESS):
            for slot in self._by_supervisor:
                if event.step >= self._faults[slot].step and self._claim(slot):
                    self._do(self._faults[slot], act)

    def finish(self) -> None:
        """Heal what the plan has cut, now, and wait until that is done: afterwards nothing of it is under way."""
        for healing in self._healing:
            healing.now()
        self._healing.clear()

    def _do(self, fault: Fault, act: Act) -> None:
        if fault.kind == "cut":
            a, _, b = fault.target.partition(" ")
            Lab.attach(fault.lab).cut(a, b or None, one_way=fault.one_way)
            self._healing.append(_Healing(fault.lab, a, b or None, fault.one_way, fault.seconds))
        elif fault.kind == "scale":
            act.scale(int(fault.target))
        elif fault.target == SUPERVISOR:
            act.kill_supervisor()
        elif fault.kind == "kill":
            act.kill_coordinator()
        else:
            act.stop_coordinator()


class _Healing:
    """Undoes one cut after a time, in a thread: while a link is cut there may be no event to wake by."""

    def __init__(self, lab: str, a: str, b: str | None, one_way: bool, seconds: float | None) -> None:
        self._cut = lab, a, b, one_way
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(seconds,), name="shoal-heal", daemon=True)
        self._thread.start()

    def now(self) -> None:
        self._hurry.set()
        self._thread.join()

    def _run(self, seconds: float | None) -> None:
        self._hurry.wait(seconds)
        lab, a, b, one_way = self._cut
        try:
            Lab.attach(lab).heal(a, b, one_way=one_way)
        except ConfigError:
            return  # the lab is down, and its cuts with it


def _happen(fault: Fault) -> None:
    """In this process, a worker or a server."""
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        if fault.seconds is not None:
            signal_at(time.monotonic() + fault.seconds, signal.SIGCONT)
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.hold:
        _hold_the_lock(fault.seconds or 0.0)
    else:
        time.sleep(fault.seconds or 0.0)


def _hold_the_lock(seconds: float) -> None:
    libc, until = ctypes.PyDLL(None), time.monotonic() + seconds  # PyDLL keeps the lock during a call
    while (left := until - time.monotonic()) > 0:  # a signal ends a usleep early
        libc.usleep(max(1, int(left * 1e6)))


def _named(name: str | None) -> str:
    known = isinstance(name, str) and (
        name in (COORDINATOR, SUPERVISOR) or seat_of(name) is not None or server_of(name) is not None
    )
    if not known or name is None:
        raise ConfigError(
            f'got the name {name!r}; it must be "worker-0", "worker-1", …, "server-0", …, "coordinator" or "supervisor"'
        )
    return name


def _whole(what: str, value: int | None, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{what}={value!r}; it must be a whole number of at least {least}")
    return value


def _seconds(value: float | None) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 3600:
        raise ConfigError(f"seconds={value!r}; it must be a number above 0 and at most 3600")
    return float(value)
