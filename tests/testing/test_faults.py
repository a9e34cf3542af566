"""A fault plan lets happen what it says, once, where it says; and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import ConfigError
from shoal.core.events import AnyEvent, Notice, Regrouped, RunEnded, StepDone
from shoal.testing import FaultPlan
from shoal.testing.faults import POINTS, RARE
from shoal.testing.lab import Lab, why_no_lab
from shoal.testing.ledger import read_ledgers

needs_lab = pytest.mark.skipif(why_no_lab() is not None, reason=str(why_no_lab()))

Live = Callable[[Callable[[], object]], int]


@pytest.fixture
def live() -> Iterator[Live]:
    """Runs a function in a forked process; returns how that ended, as the negative signal or the exit code."""
    born: list[int] = []

    def run(body: Callable[[], object]) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                body()
                os._exit(0)
            except BaseException:
                os._exit(99)
        born.append(pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        born.remove(pid)
        return code

    yield run
    for pid in born:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def work(plan: FaultPlan, worker: int, steps: int, first: int = 0) -> None:
    """The points of a worker's life, as a session passes them."""
    for step in range(first, steps):
        for point in ("compute", "exchange", "bucket", "bucket", "bucket", "decide", "commit"):
            plan.at(point, worker=worker, step=step)


class Acted:
    """Notes what a plan asks of the supervisor."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def kill_coordinator(self) -> None:
        self.done.append("kill coordinator")

    def stop_coordinator(self) -> None:
        self.done.append("stop coordinator")

    def kill_supervisor(self) -> None:
        self.done.append("kill supervisor")

    def scale(self, workers: int) -> None:
        self.done.append(f"scale {workers}")


def step_done(step: int) -> StepDone:
    return StepDone(step=step, epoch=0, loss=1.0, samples=8, rates=[0.1])


ENDED = RunEnded(step=9, loss=0.0, metrics={}, reason="complete")


# -- in workers --------------------------------------------------------------------------------------------------------


def test_a_kill_happens_to_its_worker_at_its_step_once(live: Live) -> None:
    plan = FaultPlan().kill("worker-1", step=3)
    assert live(lambda: work(plan, worker=0, steps=6)) == 0
    assert live(lambda: work(plan, worker=1, steps=3)) == 0
    assert plan.fired() == []
    before = time.monotonic()
    assert live(lambda: work(plan, worker=1, steps=6)) == -signal.SIGKILL
    ((fault, moment),) = plan.fired()
    assert str(fault) == "kill worker-1 in step 3 at compute"
    assert before <= moment <= time.monotonic()
    assert live(lambda: work(plan, worker=1, steps=6, first=3)) == 0  # its replacement, which redoes the step


@pytest.mark.parametrize("point", [point for point in POINTS if point not in RARE])
def test_a_kill_happens_at_its_point(live: Live, point: str) -> None:
    plan, passed = FaultPlan().kill("worker-0", step=1, at=point), POINTS.index(point)

    def up_to(points: tuple[str, ...]) -> int:
        return live(lambda: [plan.at(each, worker=0, step=1) for each in points])

    assert up_to(POINTS[:passed]) == 0
    assert up_to(POINTS[passed : passed + 1]) == -signal.SIGKILL


@pytest.mark.parametrize("point", RARE)
def test_a_fault_at_a_rare_point_waits_for_it(live: Live, point: str) -> None:
    plan = FaultPlan().kill("worker-0", step=4, at=point)
    assert live(lambda: [plan.at(point, worker=0, step=step) for step in (0, 2)]) == 0
    assert live(lambda: plan.at(point, worker=0, step=6)) == -signal.SIGKILL
    assert live(lambda: plan.at(point, worker=0, step=6)) == 0


def test_the_nth_bucket_is_counted_anew_in_each_step_and_each_attempt(live: Live) -> None:
    plan = FaultPlan().slow("worker-0", step=2, at="bucket", nth=3, seconds=0.01)
    for attempt in range(2):  # a redo begins at "compute" again
        plan.at("compute", worker=0, step=2)
        plan.at("bucket", worker=0, step=2)
        plan.at("bucket", worker=0, step=2)
        assert not plan.fired(), attempt
    plan.at("bucket", worker=0, step=2)
    assert len(plan.fired()) == 1


def test_a_stop_ends_after_its_seconds_without_help(live: Live) -> None:
    plan = FaultPlan().stop("worker-2", step=0, seconds=0.3)
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    pid = os.fork()
    if pid == 0:
        begun = time.monotonic()
        work(plan, worker=2, steps=1)
        os._exit(0 if time.monotonic() - begun >= 0.3 else 99)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    assert children.read_text().split() == [str(pid)]
    assert not Path(f"/proc/{pid}/task/{pid}/children").read_text()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_stop_without_seconds_lasts(live: Live) -> None:
    plan = FaultPlan().stop("worker-0", step=0)
    pid = os.fork()
    if pid == 0:
        work(plan, worker=0, steps=1)
        os._exit(99)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("hold", [False, True])
def test_slow_lets_other_threads_run_unless_it_holds_the_lock(hold: bool) -> None:
    plan = FaultPlan().slow("worker-0", step=1, seconds=0.3, hold=hold)
    turns, done = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not done.wait(0.005):
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    begun = time.monotonic()
    plan.at("compute", worker=0, step=1)
    lasted, seen = time.monotonic() - begun, turns
    done.set()
    thread.join()
    assert 0.3 <= lasted < 3
    assert seen <= 5 if hold else seen >= 10


def test_kills_at_every_so_many_steps_go_round(live: Live) -> None:
    plan = FaultPlan().kill(every=60, workers=3, times=4)
    assert [(fault.target, fault.step) for fault in plan.faults] == [
        ("worker-0", 60),
        ("worker-1", 120),
        ("worker-2", 180),
        ("worker-0", 240),
    ]
    assert live(lambda: work(plan, worker=0, steps=62, first=59)) == -signal.SIGKILL
    assert live(lambda: work(plan, worker=0, steps=239, first=60)) == 0
    assert live(lambda: work(plan, worker=0, steps=241, first=239)) == -signal.SIGKILL


def test_kills_are_drawn_by_the_seed() -> None:
    def drawn(seed: int) -> list[str]:
        return [fault.target for fault in FaultPlan(seed=seed).kill(every=5, workers=4, times=40).faults]

    assert drawn(1) == drawn(1) != drawn(2)
    assert set(drawn(1)) == {"worker-0", "worker-1", "worker-2", "worker-3"}
    assert {fault.target for fault in FaultPlan(seed=1).kill("worker-2", every=5, times=9).faults} == {"worker-2"}


def test_workers_keep_ledgers(live: Live, tmp_path: Path) -> None:
    silent, plan = FaultPlan(), FaultPlan().ledger(tmp_path)
    assert (silent.records, plan.records) == (False, True)

    def commit() -> None:
        silent.committed(worker=1, term=1, step=0, spans={}, digest=lambda: 1 / 0)  # type: ignore[arg-type,return-value]
        plan.committed(worker=1, term=1, step=0, spans={1: [(0, 8)]}, digest=lambda: b"\xab")
        plan.committed(worker=1, term=1, step=1, spans={1: [(8, 16)]}, digest=lambda: b"\xcd")
        os.kill(os.getpid(), signal.SIGKILL)

    assert live(commit) == live(commit) == -signal.SIGKILL
    books = read_ledgers(tmp_path)
    assert [[record.digest for record in records] for records in books.values()] == [["ab", "cd"]] * 2


# -- in the supervisor -------------------------------------------------------------------------------------------------


def test_the_supervisor_does_its_part_when_a_step_is_heard_of() -> None:
    plan, act = FaultPlan().kill("coordinator", step=3).scale(5, step=4).stop("coordinator", step=7), Acted()
    plan.kill("supervisor", step=8)
    events: list[AnyEvent] = [step_done(1), step_done(2), Notice(step=9, text="not progress")]
    for event in events:
        plan.heard(event, act)
    assert act.done == []
    plan.heard(step_done(3), act)
    plan.heard(step_done(3), act)
    assert act.done == ["kill coordinator"]
    plan.heard(Regrouped(step=6, term=2, workers=[0], joined=[], lost=[1]), act)
    assert act.done == ["kill coordinator", "scale 5"]
    plan.heard(step_done(9), act)
    plan.heard(ENDED, act)
    assert act.done == ["kill coordinator", "scale 5", "stop coordinator", "kill supervisor"]
    assert [fired.fault.step for fired in plan.fired()] == [3, 4, 7, 8]


@needs_lab
def test_a_cut_heals_by_itself() -> None:
    with Lab(hosts=3) as lab:
        plan = FaultPlan().cut("a", "b", step=1, lab=lab.name, seconds=0.2).cut("c", step=2, lab=lab.name)
        plan.heard(step_done(1), Acted())
        assert len(lab.check()) == 2
        deadline = time.monotonic() + 10
        while lab.check():
            assert time.monotonic() < deadline
        plan.heard(step_done(2), Acted())
        assert len(lab.check()) == 4
        plan.heard(ENDED, Acted())  # heals what has no time of its own
        assert lab.check() == []


def test_a_lab_that_went_down_needs_no_healing(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.testing.faults import _Healing

    attach, refused = Lab.attach, []

    def attached(name: str) -> Lab:
        try:
            return attach(name)
        except ConfigError:
            refused.append(name)
            raise

    raised: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    monkeypatch.setattr(Lab, "attach", attached)
    healing = _Healing("no-such-lab", "a", "b", False, 1000)
    healing.now()
    assert refused == ["no-such-lab"] and raised == []


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda plan: plan.kill("worker-1", step=-1), "step=-1; it must be a whole number of at least 0"),
        (lambda plan: plan.kill("worker-1"), "step=None; it must be"),
        (lambda plan: plan.kill("worker-1", step=True), "step=True; it must be"),
        (lambda plan: plan.kill("worker1", step=1), "got the name 'worker1'"),
        (lambda plan: plan.kill("worker-01", step=1), "got the name 'worker-01'"),
        (lambda plan: plan.kill(1, step=1), "got the name 1"),
        (lambda plan: plan.kill("worker-1", step=1, at="lunch"), "at='lunch' is no point of a step; it must be one of"),
        (lambda plan: plan.kill("coordinator", step=1, at="commit"), "leave it out for coordinator"),
        (lambda plan: plan.kill("worker-1", step=1, nth=2), "nth=2 counts buckets"),
        (lambda plan: plan.kill("worker-1", step=1, at="bucket", nth=0), "nth=0; it must be"),
        (lambda plan: plan.kill("worker-1", step=1, every=2), "give one of them"),
        (lambda plan: plan.kill("worker-1", every=0), "every=0; it must be a whole number of at least 1"),
        (lambda plan: plan.kill(every=5), "workers=None; it must be"),
        (lambda plan: plan.kill(every=5, workers=2, times=9000), "8192 faults at most"),
        (lambda plan: plan.stop("supervisor", step=1), "cannot be stopped by itself"),
        (lambda plan: plan.stop("worker-1", step=1, seconds=0), "seconds=0; it must be a number above 0"),
        (lambda plan: plan.stop("coordinator", step=1, seconds=1), "a coordinator that is stopped is replaced"),
        (lambda plan: plan.slow("coordinator", step=1, seconds=1), "only workers can be slow"),
        (lambda plan: plan.cut("a", "b", step=1, lab=""), "the name of a lab that is up"),
        (lambda plan: plan.scale(0, step=1), "workers=0; it must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_is_refused(add: Callable[[Any], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        add(FaultPlan())


def test_a_plan_can_be_read() -> None:
    assert repr(FaultPlan()) == "<FaultPlan: no faults>"
    plan = FaultPlan().stop("worker-2", step=9, seconds=3).cut("a", "b", step=4, lab="two", seconds=1).scale(4, step=2)
    assert repr(plan) == (
        "<FaultPlan: stop worker-2 in step 9 at compute for 3 s; cut a b in step 4 for 1 s; scale 4 in step 2>"
    )
