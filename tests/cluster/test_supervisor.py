"""The supervisor of elastic runs, between real processes that play the coordinator and the workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from shoal.cluster import messages as said
from shoal.cluster.board import Board, Phase, Place
from shoal.cluster.channel.channel import PREEMPTED, STOPPED, StopSignals
from shoal.cluster.channel.elastic import ElasticChannel
from shoal.cluster.channel.messages import Departed, Returned
from shoal.cluster.elasticity import Acts, Faults
from shoal.cluster.logs import Tail
from shoal.cluster.supervisor.failure import describe
from shoal.cluster.supervisor.supervisor import COORDINATOR_SEAT, Supervisor
from shoal.core.errors import WorkerError
from shoal.core.events import AnyEvent, EvalDone, Notice, Regrouped, Scale, StepDone, Stop
from shoal.data.parcel import seal, unseal
from shoal.engines.local import LocalEngine
from shoal.engines.stacks import Stacks
from shoal.trainer.workers.elastic import Elasticity, EverythingLost
from shoal.wire.link import Link

pytestmark = pytest.mark.timeout(60)
DEADLINE = 15.0


class Engine:
    """The coordinator's view: it orders and hears."""

    def __init__(self, link: Link, folder: Path) -> None:
        self._link = link
        self.folder = folder

    def order(self, *orders: said.ToEngine) -> None:
        for order in orders:
            self._link.send(said.encode(order))

    def hear(self) -> said.FromEngine:
        assert self._link.poll(DEADLINE), "the supervisor said nothing"
        report: said.FromEngine = said.decode_from_engine(self._link.recv()[0])
        return report

    def first_time(self) -> bool:
        """Whether no process was the coordinator before this one."""
        mark = self.folder / "coordinator"
        new = not mark.exists()
        mark.touch()
        return new

    def until_closed(self) -> list[said.FromEngine]:
        heard = [self.hear()]
        while not isinstance(heard[-1], said.Closing):
            heard.append(self.hear())
        return heard


class Worker:
    def __init__(self, seat: int, link: Link, place: Place, folder: Path) -> None:
        self.seat = seat
        self.link = link
        self.place = place
        self.folder = folder
        self.channel = ElasticChannel(link)
        place.begin(os.getpid())
        mark = folder / f"life-{seat}"
        self.life = len(mark.read_bytes()) if mark.exists() else 0
        mark.write_bytes(bytes(self.life + 1))

    def give(self, value: Any) -> None:
        parcel, buffers = seal(value)
        self.channel.give(Returned(complete=True), [parcel, *buffers])
        self.channel.await_end()

    def await_file(self, name: str) -> None:
        deadline = time.monotonic() + DEADLINE
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def await_stop(self) -> str:
        deadline = time.monotonic() + DEADLINE
        while (reason := self.channel.stop_asked()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return reason


class Watching:
    def __init__(self, answer: Callable[[AnyEvent], Stop | Scale | None] = lambda event: None) -> None:
        self.events: list[AnyEvent] = []
        self._answer = answer
        self.printed: list[tuple[int, str]] = []

    def __call__(self, event: AnyEvent) -> Stop | Scale | None:
        self.events.append(event)
        return self._answer(event)

    def tick(self) -> None: ...

    def output(self, worker: int, stream: str, text: str) -> None:
        self.printed.append((worker, text))

    def texts(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Notice)]


def supervised(
    folder: Path,
    coordinator: Callable[[Engine], Any],
    worker: Callable[[Worker], Any],
    *,
    watch: Watching | None = None,
    signals: StopSignals | None = None,
    faults: Faults | None = None,
) -> list[Any]:
    board = Board(16)

    def main(seat: int, link: Link, scratch: Path) -> None:
        if seat == COORDINATOR_SEAT:
            coordinator(Engine(link, folder))
        else:
            worker(Worker(seat, link, board.place(seat), folder))

    watching = watch or Watching()
    with closing(Stacks()) as stacks, Tail(None, 0, watching.output) as tail, LocalEngine().open(main) as crew:
        values = Supervisor(crew, board, Elasticity(2, 1, 4, 0, faults), watching, signals, tail, stacks).watch()
        return [unseal(bytes(parcel), buffers) for parcel, *buffers in values]


def started(*seats: int) -> Callable[[Engine], Any]:
    """A coordinator that starts these and then does nothing."""

    def coordinator(engine: Engine) -> None:
        assert engine.hear() == said.Present([])
        engine.order(*map(said.Start, seats))
        engine.until_closed()
        (engine.folder / "closed").touch()

    return coordinator


def changed(term: int, members: Sequence[int], joined: Sequence[int] = (), lost: Sequence[int] = ()) -> said.Changed:
    return said.Changed(term, *([said.name_of(seat) for seat in seats] for seats in (members, joined, lost)))


def done(step: int) -> StepDone:
    return StepDone(step=step, epoch=0, loss=1.0, samples=4, rates=[])


def test_values_come_in_order_of_seat_and_the_coordinator_hears_the_end(tmp_path: Path) -> None:
    values = supervised(tmp_path, started(2, 0, 1), lambda worker: worker.give({"seat": worker.seat}))
    assert values == [{"seat": 0}, {"seat": 1}, {"seat": 2}]
    assert (tmp_path / "closed").exists()


def test_a_death_is_reported_with_its_place_replaced_and_told_in_words(tmp_path: Path) -> None:
    def coordinator(engine: Engine) -> None:
        engine.hear()
        engine.order(said.Start(0), said.Start(1), changed(1, [0, 1], [0, 1]))
        end = engine.hear()
        assert end == said.Ended(1, "was killed by SIGKILL", computing=True, step=12, positions=(64, 95), signal=9)
        engine.order(said.Start(1), changed(2, [0], lost=[1]), changed(3, [0, 1], joined=[1]), said.Say("go"))
        engine.until_closed()

    def worker(self: Worker) -> None:
        if self.seat == 1 and self.life == 0:
            self.place.term(1)
            self.place.redoable(True)
            self.place.computes(64, 96)
            self.place.enter(Phase.COMPUTE, 12)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.seat == 0:
            self.await_file("go")
        self.give(self.life)

    def answer(event: AnyEvent) -> None:
        if isinstance(event, Notice) and event.text == "go":
            (tmp_path / "go").touch()

    watch = Watching(answer)
    assert supervised(tmp_path, coordinator, worker, watch=watch) == [0, 1]
    assert watch.texts() == [
        "worker 1 was killed by SIGKILL in step 13; 1 worker goes on",
        "worker 1 is back (2 workers)",
        "go",
    ]
    regrouped = [event for event in watch.events if isinstance(event, Regrouped)]
    assert [(event.term, event.workers, event.joined, event.lost) for event in regrouped] == [
        (2, [0], [], [1]),
        (3, [0, 1], [1], []),
    ]


def test_an_exit_by_code_is_a_death_like_any_other(tmp_path: Path) -> None:
    def coordinator(engine: Engine) -> None:
        engine.hear()
        engine.order(said.Start(0), said.Start(1))
        assert engine.hear() == said.Ended(1, "left with exit code 3")
        (engine.folder / "go").touch()
        engine.until_closed()

    def worker(self: Worker) -> None:
        if self.seat == 1:
            os._exit(3)
        self.await_file("go")
        self.give("fine")

    assert supervised(tmp_path, coordinator, worker) == ["fine"]


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_coordinator_that_dies_or_stops_is_started_again_and_told_who_lives(tmp_path: Path, how: str) -> None:
    def coordinator(engine: Engine) -> None:
        present = engine.hear()
        if engine.first_time():
            engine.order(said.Start(0), said.Start(3))
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        assert present == said.Present([0, 3])
        (engine.folder / "go").touch()
        engine.until_closed()

    def worker(self: Worker) -> None:
        self.await_file("go")
        self.give(self.life)

    assert supervised(tmp_path, coordinator, worker) == [0, 0]


def test_a_coordinator_that_always_dies_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"coordinator .* ended 11 times within 10 s.*exit code 4"):
        supervised(tmp_path, lambda engine: os._exit(4), lambda worker: None)


def test_what_the_coordinator_gives_up_on_is_raised(tmp_path: Path) -> None:
    def coordinator(engine: Engine) -> None:
        engine.hear()
        engine.order(said.Fail("two deaths", positions=(3, 9), step=7))
        engine.until_closed()

    with pytest.raises(WorkerError, match="two deaths") as error:
        supervised(tmp_path, coordinator, lambda worker: None)
    assert (error.value.positions, error.value.step) == ((3, 9), 7)
    assert not isinstance(error.value, EverythingLost)


def test_everything_lost_is_an_error_of_its_own(tmp_path: Path) -> None:
    def coordinator(engine: Engine) -> None:
        engine.hear()
        engine.order(said.Fail("nobody is left", everything=True))
        engine.until_closed()

    with pytest.raises(EverythingLost, match="nobody is left"):
        supervised(tmp_path, coordinator, lambda worker: None)


def test_without_the_process_that_forks_everything_is_lost(tmp_path: Path) -> None:
    with pytest.raises(EverythingLost):
        supervised(tmp_path, started(0), lambda worker: os.kill(os.getppid(), signal.SIGKILL))


def test_an_exception_of_users_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    def worker(self: Worker) -> None:
        if self.seat == 1:
            try:
                raise LookupError("no such sample")
            except LookupError as error:
                self.channel.give(describe(error))
        self.channel.speak(True)
        self.channel.confirm(1)
        self.channel.emit(done(1))
        self.channel.flush()
        self.channel.await_end()

    watch = Watching()
    with pytest.raises(WorkerError, match=r"worker 1 raised LookupError: no such sample") as error:
        supervised(tmp_path, started(0, 1), worker, watch=watch)
    assert "no such sample" in (error.value.worker_traceback or "")
    assert [event.step for event in watch.events] == [1]


def test_one_that_was_told_to_leave_has_no_value_and_is_no_death(tmp_path: Path) -> None:
    def coordinator(engine: Engine) -> None:
        engine.hear()
        engine.order(said.Start(0), said.Start(1), changed(1, [0, 1]))
        assert isinstance(engine.hear(), said.Ended)
        engine.order(changed(2, [0], lost=[1]), said.Say("go"))
        engine.until_closed()

    def worker(self: Worker) -> None:
        if self.seat == 1:
            self.channel.give(Departed("fewer are needed"))
            return
        self.await_file("go")
        self.give("value")

    def answer(event: AnyEvent) -> None:
        if isinstance(event, Notice) and event.text == "go":
            (tmp_path / "go").touch()

    watch = Watching(answer)
    assert supervised(tmp_path, coordinator, worker, watch=watch) == ["value"]
    assert watch.texts() == ["worker 1 has left, as it was told to (1 worker)", "go"]


def test_one_that_has_returned_counts_whatever_happens_to_it(tmp_path: Path) -> None:
    def worker(self: Worker) -> None:
        if self.seat == 1:
            parcel, buffers = seal("early")
            self.channel.give(Returned(complete=True), [parcel, *buffers])
            (self.folder / "returned").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.await_file("returned")
        self.give("late")

    assert supervised(tmp_path, started(0, 1), worker) == ["late", "early"]


def test_who_speaks_next_repeats_and_nothing_is_told_twice(tmp_path: Path) -> None:
    def worker(self: Worker) -> None:
        steps = {0: 3, 1: 5}[self.seat]
        for step in range(1, steps + 1):
            self.channel.emit(done(step))
            self.channel.emit(EvalDone(step=step, epoch=step, metrics={"loss": 1.0}))
        if self.seat == 1:
            self.await_file("told")
        self.channel.speak(True)
        self.channel.confirm(steps)
        self.channel.flush()
        if self.seat == 0:
            (self.folder / "told").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.give("value")

    watch = Watching()
    assert supervised(tmp_path, started(0, 1), worker, watch=watch) == ["value"]
    for kind in (StepDone, EvalDone):
        assert [event.step for event in watch.events if isinstance(event, kind)] == [1, 2, 3, 4, 5]


def test_a_stopped_worker_is_seen_and_ends_for_the_reason_given(tmp_path: Path) -> None:
    def coordinator(engine: Engine) -> None:
        engine.hear()
        engine.order(said.Start(0), said.Start(1), changed(1, [0, 1]))
        deadline = time.monotonic() + DEADLINE
        while True:
            engine.order(said.Look(1))
            looked = engine.hear()
            assert isinstance(looked, said.Looked) and looked.seat == 1
            if looked.verdict == said.STOPPED:
                break
            assert looked.verdict == said.SLOW and time.monotonic() < deadline
        engine.order(said.Kill(1, "worker-1 does not beat"))
        end = engine.hear()
        assert end == said.Ended(1, "was killed, because it does not beat", signal=9)
        engine.order(said.Look(1))
        gone = engine.hear()
        assert isinstance(gone, said.Looked) and gone.verdict == said.GONE
        engine.order(changed(2, [0], lost=[1]), said.Say("go"))
        engine.until_closed()

    def worker(self: Worker) -> None:
        if self.seat == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        self.await_file("go")
        self.give("value")

    def answer(event: AnyEvent) -> None:
        if isinstance(event, Notice) and event.text == "go":
            (tmp_path / "go").touch()

    watch = Watching(answer)
    assert supervised(tmp_path, coordinator, worker, watch=watch) == ["value"]
    assert watch.texts()[0] == "worker 1 was killed, because it does not beat; 1 worker goes on"


def test_one_that_ticks_while_it_is_looked_at_is_cut(tmp_path: Path) -> None:
    def coordinator(engine: Engine) -> None:
        engine.hear()
        engine.order(said.Start(0))
        while not (engine.folder / "ticking").exists():
            time.sleep(0.005)
        engine.order(said.Look(0))
        looked = engine.hear()
        assert isinstance(looked, said.Looked) and looked.verdict == said.CUT
        (engine.folder / "go").touch()
        engine.until_closed()

    def worker(self: Worker) -> None:
        while not (self.folder / "go").exists():
            self.place.tick()
            (self.folder / "ticking").touch()
            time.sleep(0.1)
        self.give("value")

    assert supervised(tmp_path, coordinator, worker) == ["value"]


def test_a_callback_scales_within_the_bounds_and_hears_if_it_is_beyond(tmp_path: Path) -> None:
    def coordinator(engine: Engine) -> None:
        engine.hear()
        engine.order(said.Start(0))
        assert engine.hear() == said.Rescale(3)
        assert engine.hear() == said.Rescale(1)
        (engine.folder / "go").touch()
        engine.until_closed()

    def worker(self: Worker) -> None:
        self.channel.speak(True)
        for step in range(1, 6):
            self.channel.emit(done(step))
        self.channel.confirm(9)
        self.channel.flush()
        self.await_file("go")
        self.give("value")

    def answer(event: AnyEvent) -> Scale | None:
        return Scale({1: 3, 2: 3, 3: 9, 4: 9, 5: 1}[event.step]) if isinstance(event, StepDone) else None

    watch = Watching(answer)
    assert supervised(tmp_path, coordinator, worker, watch=watch) == ["value"]
    (text,) = watch.texts()
    assert "Scale(9)" in text and "1 to 4 workers" in text


def test_a_stop_reaches_every_worker_also_later_ones(tmp_path: Path) -> None:
    def coordinator(engine: Engine) -> None:
        engine.hear()
        engine.order(said.Start(0), said.Start(1))
        while not (engine.folder / "stopped").exists():
            time.sleep(0.005)
        engine.order(said.Start(2))
        engine.until_closed()

    def worker(self: Worker) -> None:
        if self.seat == 0:
            self.channel.speak(True)
            self.channel.decide(EvalDone(step=1, epoch=1, metrics={}))
            assert self.channel.stop_asked() == STOPPED  # the answer has it
        reason = self.await_stop()
        (self.folder / "stopped").touch()
        if self.seat < 2:
            self.await_file("life-2")
        self.give(reason)

    watch = Watching(lambda event: Stop() if isinstance(event, EvalDone) else None)
    assert supervised(tmp_path, coordinator, worker, watch=watch) == [STOPPED] * 3


def test_a_signal_reaches_every_worker_and_is_told(tmp_path: Path) -> None:
    signals = StopSignals()
    signals.asked = PREEMPTED
    watch = Watching()
    values = supervised(
        tmp_path, started(0, 1), lambda worker: worker.give(worker.await_stop()), watch=watch, signals=signals
    )
    assert values == [PREEMPTED] * 2
    assert any("SIGTERM" in text for text in watch.texts())


def test_a_plan_of_faults_acts_through_the_supervisor(tmp_path: Path) -> None:
    class Plan:
        def finish(self) -> None: ...

        def heard(self, event: AnyEvent, act: Acts) -> None:
            if isinstance(event, Notice) and event.text == "first":
                act.kill_worker(1)
                act.kill_worker(7)  # nobody
            if isinstance(event, Notice) and event.text == "second":
                act.scale(3)
                act.kill_coordinator()

    def coordinator(engine: Engine) -> None:
        present = engine.hear()
        if engine.first_time():
            engine.order(said.Start(0), said.Start(1), said.Say("first"))
            assert engine.hear() == said.Ended(1, "was killed by SIGKILL", signal=9)
            engine.order(said.Say("second"))
            engine.until_closed()
        assert present == said.Present([0])
        assert engine.hear() == said.Rescale(3)  # its predecessor may have missed it
        (engine.folder / "go").touch()
        engine.until_closed()

    def worker(self: Worker) -> None:
        self.await_file("go")
        self.give(self.seat)

    assert supervised(tmp_path, coordinator, worker, faults=Plan()) == [0]


ORPHANS = """
    import os, sys, time
    from pathlib import Path
    from shoal.cluster import messages as said
    from shoal.cluster.board import Board
    from shoal.engines.local import LocalEngine
    from shoal.engines.stacks import Stacks
    from shoal.trainer.workers.elastic import Elasticity
    from shoal.cluster.channel.elastic import ElasticChannel
    from shoal.cluster.supervisor.supervisor import COORDINATOR_SEAT, Supervisor
    from shoal.cluster.logs import Tail
    from shoal.cluster.supervisor.watch import Unwatched

    folder = Path(sys.argv[1])

    class Plan:
        def finish(self): ...

        def heard(self, event, act):
            act.kill_supervisor()

    def main(seat, link, scratch):
        if seat == COORDINATOR_SEAT:
            link.recv()
            link.send(said.encode(said.Start(0)))
            link.send(said.encode(said.Start(1)))
            while not all((folder / f"born-{seat}").exists() for seat in (0, 1)):
                time.sleep(0.005)
            link.send(said.encode(said.Say("strike")))
            try:
                link.recv()
            except Exception:
                return
        channel = ElasticChannel(link)
        (folder / f"born-{seat}").write_text(str(os.getpid()))
        while (reason := channel.stop_asked()) is None:
            time.sleep(0.01)
        channel.flush()
        time.sleep(0.2)
        (folder / f"saved-{seat}").write_text(reason)

    with LocalEngine().open(main, grace=30.0) as crew, Tail(None, 0, print) as tail:
        Supervisor(crew, Board(8), Elasticity(2, 1, 2, 0, Plan()), Unwatched(), None, tail, Stacks()).watch()
"""


def test_workers_outlive_a_killed_supervisor_until_they_have_saved(tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    script = textwrap.dedent(ORPHANS)
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=env, timeout=30)
    assert ended.returncode == -signal.SIGKILL
    pids = [int((tmp_path / f"born-{seat}").read_text()) for seat in (0, 1)]
    deadline = time.monotonic() + DEADLINE
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [(tmp_path / f"saved-{seat}").read_text() for seat in (0, 1)] == [PREEMPTED] * 2
