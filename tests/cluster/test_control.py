"""The worker's end of the coordinator, against a real coordinator."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.cluster.access import Access
from shoal.cluster.board import Board, Phase, Place, Sight
from shoal.cluster.member import control as control_module
from shoal.cluster.member.control import Control, Finished, Left
from shoal.cluster.member.pace import FIRST_PATIENCE, LEAST_PATIENCE, MOST_PATIENCE, Pace
from shoal.cluster.messages import (
    Beat,
    Ended,
    Formed,
    Heard,
    Hello,
    Hold,
    Rescale,
    Start,
    Welcome,
    decode_letter,
    encode,
)
from shoal.comm.term_store import store_of
from shoal.core.errors import ConfigError
from shoal.wire.curve import Keys, Server

Stages = Callable[..., Any]
VERSION, SIGNATURE = "1.0", b"the model"


class Revoked:
    """A group that only knows whether it was revoked."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.calls: list[tuple[str, str]] = []
        self.at = 0.0

    def __call__(self, why: str) -> None:
        self.at = time.monotonic()
        self.calls.append((why, threading.current_thread().name))
        self.event.set()


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.002)


# -- terms -------------------------------------------------------------------------------------------------------------


def test_workers_get_one_term(stage: Stages) -> None:
    run = stage(3)
    term = run.formed(run.entered(0, 1, 2))
    assert term.number >= 1
    assert sorted(term.members) == ["worker-0", "worker-1", "worker-2"]


def test_a_death_revokes_the_term_of_the_others(stage: Stages) -> None:
    run = stage(2)
    survivor, victim = controls = run.entered(0, 1)
    term = run.formed(controls)
    group = Revoked()
    survivor.watch(term.number, group)
    victim.close()
    before = time.monotonic()
    run.report(Ended(1, "was killed by SIGKILL"))
    assert group.event.wait(5)
    print(f"revoked after {(group.at - before) * 1e3:.2f} ms")
    assert group.calls[0][1] == "shoal-control"
    assert "regroup" in group.calls[0][0]
    again = run.formed([survivor], 4, True)
    assert again.number > term.number
    assert again.members == ["worker-0"]
    assert len(group.calls) == 1


def test_a_watch_that_comes_late_revokes_at_once(stage: Stages) -> None:
    run = stage(2)
    survivor, victim = controls = run.entered(0, 1)
    term = run.formed(controls)
    victim.close()
    run.report(Ended(1, "left"))
    until(lambda: survivor.why_over(term.number) is not None)
    group = Revoked()
    survivor.watch(term.number, group)
    assert [name for _, name in group.calls] == [threading.current_thread().name]
    unwatched = Revoked()
    survivor.watch(term.number + 1, unwatched)
    survivor.watch(term.number + 1, None)
    assert not unwatched.calls


def test_a_joiner_is_let_in_softly(stage: Stages) -> None:
    run = stage(2)
    first, second = run.entered(0, 1)
    term = run.formed([first, second])
    assert not first.leaving
    run.report(Rescale(3))
    assert run.expect(Start).seat == 2
    joiner = run.control(2)
    joiner.enter(VERSION, SIGNATURE)
    joined: list[Any] = []
    thread = threading.Thread(target=lambda: joined.append(joiner.await_term(0, False)))
    thread.start()
    until(lambda: first.leaving and second.leaving)
    assert first.why_over(term.number) is None, "a soft regroup does not break the term"
    terms = run.all_terms([first, second], 6, True)
    thread.join(5)
    assert joined[0] == terms[0] == terms[1]
    assert terms[0].members == ["worker-0", "worker-1", "worker-2"], "holders come first"
    assert not first.leaving


def test_the_surplus_leave_and_cannot_be_kept(stage: Stages) -> None:
    run = stage(2)
    first, second = controls = run.entered(0, 1)
    run.formed(controls)
    run.report(Rescale(1))
    until(lambda: first.leaving and second.leaving)
    ends: list[BaseException] = []

    def leave() -> None:
        try:
            second.await_term(2, True)
        except Exception as error:
            ends.append(error)
        except BaseException as end:
            ends.append(end)

    thread = threading.Thread(target=leave)
    thread.start()
    assert run.all_terms([first], 2, True)[0].members == ["worker-0"]
    thread.join(5)
    assert isinstance(ends[0], Left)
    assert not isinstance(ends[0], Exception)
    assert ends[0].why


def test_who_comes_late_to_the_end_is_told(stage: Stages) -> None:
    run = stage(2)
    first, second = controls = run.entered(0, 1)
    run.formed(controls)
    first.done()
    with pytest.raises(Finished):
        second.await_term(8, True)


def test_a_hold_is_told_on_the_callers_thread(stage: Stages) -> None:
    run = stage(2, least=2)
    survivor, victim = controls = run.entered(0, 1)
    run.formed(controls)
    victim.close()
    run.report(Ended(1, "was killed"))
    held: list[tuple[Hold, str]] = []

    class Enough(BaseException):
        pass

    def on_hold(hold: Hold) -> None:
        held.append((hold, threading.current_thread().name))
        raise Enough

    with pytest.raises(Enough):
        survivor.await_term(4, True, on_hold)
    assert held[0][0].why
    assert held[0][1] == threading.current_thread().name


def test_a_signal_interrupts_waiting(stage: Stages) -> None:
    run = stage(2)
    (control,) = run.entered(0)

    class Alarm(BaseException):
        pass

    def ring(*_: object) -> None:
        assert not control.leaving  # handlers may look at the control
        raise Alarm

    before = signal.signal(signal.SIGUSR2, ring)
    try:
        threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGUSR2)).start()
        with pytest.raises(Alarm):
            control.await_term(0, False)
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_worker_that_holds_the_interpreter_goes_on(stage: Stages) -> None:
    run = stage(1)
    (control,) = run.entered(0)
    term = run.formed([control])
    group = Revoked()
    control.watch(term.number, group)
    ctypes.PyDLL(None).usleep(900_000)  # unlike CDLL, this keeps the lock
    store = store_of(control, term.number)
    store.set("still", b"here")
    assert store.get("still") == b"here"
    assert not group.calls
    run.report(Rescale(2))
    assert run.expect(Start).seat == 1
    run.entered(1)


# -- entering ----------------------------------------------------------------------------------------------------------


def test_strangers_are_refused_with_a_reason(stage: Stages) -> None:
    run = stage(2)
    run.entered(0)
    with pytest.raises(ConfigError, match=r"shoal 0\.9"):
        run.control(1).enter("0.9", SIGNATURE)
    with pytest.raises(ConfigError, match="signature"):
        run.control(1).enter(VERSION, b"another model")
    with pytest.raises(ConfigError, match="not a worker"):
        run.control(5).enter(VERSION, SIGNATURE)
    run.control(1).enter(VERSION, SIGNATURE)


@pytest.mark.parametrize("wrong", ["key", "run", "nobody", "nowhere"])
def test_no_answer_is_an_error(stage: Stages, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: str) -> None:
    monkeypatch.setattr(control_module, "ENTER_SECONDS", 0.4)
    run = stage(1)
    run.expect(Start)
    access = run.access
    if wrong == "key":
        access = dataclasses.replace(access, keys=Keys.make())
    elif wrong == "run":
        access = dataclasses.replace(access, run="another")
    elif wrong == "nobody":
        run.kill()
    else:
        access = dataclasses.replace(access, folder=tmp_path)
    with pytest.raises(ConfigError, match=r"no answer from the coordinator.*this run's key") as caught:
        run.control(0, access).enter(VERSION, SIGNATURE)
    assert access.keys.client_secret.decode() not in str(caught.value) + repr(access)


def test_a_control_may_be_there_before_the_coordinator(stage: Stages) -> None:
    run = stage(1, start=False)
    control = run.control(0)
    threading.Timer(0.1, run.start).start()
    control.enter(VERSION, SIGNATURE)


def test_the_end_of_the_supervisor_is_seen(stage: Stages) -> None:
    run = stage(1)
    (control,) = run.entered(0)
    ours, theirs = run.lifelines[0]
    theirs.send(b"a message that is not for the control thread")
    turns = run.board.see(0).ticks
    until(lambda: run.board.see(0).ticks > turns + 3)
    assert not control.orphaned
    theirs.close()
    until(lambda: control.orphaned, 1.0)
    assert ours.recv(100), "what was on the way must still be there"


def test_without_supervisor_waiting_has_an_end(stage: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "_ORPHAN_SECONDS", 0.3)
    run = stage(2)
    (control,) = run.entered(0)
    run.lifelines[0][1].close()
    with pytest.raises(Left, match="supervisor is gone"):
        control.await_term(0, False)


def test_closing_is_quick_and_leaves_nothing(stage: Stages) -> None:
    run = stage(1)
    (control,) = run.entered(0)
    store_of(control, 1)
    descriptors = len(os.listdir("/proc/self/fd"))
    began = time.monotonic()
    control.close()
    assert time.monotonic() - began < 0.2
    control.close()
    assert len(os.listdir("/proc/self/fd")) < descriptors - 4
    assert "shoal-control" not in {thread.name for thread in threading.enumerate()}


# -- beats, against a coordinator that the test plays ------------------------------------------------------------------


class Played:
    """A server, and the letters that came."""

    def __init__(self, folder: Path) -> None:
        self.access = Access("a-run", folder, Keys.make())
        self.server = Server(self.access.keys, "127.0.0.1", limit=1 << 20)
        self.access.publish(self.server.endpoint)
        self.peer = b""
        self.bodies: list[Any] = []

    def hear(self, kind: type[Any], seconds: float = 5.0) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.server.wait(0.05)
            while (arrival := self.server.receive()) is not None:
                self.peer = arrival[0]
                self.bodies.append(decode_letter(arrival[1]).body)
                if isinstance(self.bodies[-1], kind):
                    return self.bodies[-1]
        raise AssertionError(f"no {kind.__name__}; heard {self.bodies}")

    def say(self, *bodies: Any) -> None:
        for body in bodies:
            self.server.send(self.peer, encode(body))


@pytest.fixture
def played(tmp_path: Path) -> Any:
    folder = tmp_path / "played"
    folder.mkdir(mode=0o700)
    one = Played(folder)
    yield one
    one.server.close()


def begun(played: Played, place: Place) -> Control:
    control = Control(played.access, 0, place, -1)
    thread = threading.Thread(target=lambda: control.enter(VERSION, SIGNATURE))
    thread.start()
    played.hear(Hello)
    played.say(Welcome(), Heard(1))
    thread.join(5)
    return control


def test_beats_tell_where_the_worker_is(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Board(1).place(0)
    place.begin(os.getpid())
    control = begun(played, place)
    try:
        place.term(3)
        place.enter(Phase.EXCHANGE, 17)
        until(lambda: (beat := played.hear(Beat)).step == 17 and beat.phase == Phase.EXCHANGE and beat.term == 3)
        beat = played.hear(Beat)
        assert beat.patience == FIRST_PATIENCE
        assert beat.stack == ""
        monkeypatch.setattr(Pace, "patience", 0.2)
        until(lambda: played.hear(Beat).stack != "")
        stack = played.hear(Beat).stack
        assert "test_beats_tell_where_the_worker_is" in stack, "the stack of the thread that made the control"
        place.enter(Phase.COMPUTE, 18)
        until(lambda: played.hear(Beat).stack == "")
    finally:
        control.close()


def test_a_new_coordinator_is_told_all_again(played: Played) -> None:
    place = Board(1).place(0)
    place.begin(os.getpid())
    control = begun(played, place)
    try:
        control.formed(4)
        until(lambda: played.hear(Beat) is not None and len(played.bodies) > 12)
        played.bodies.clear()
        played.say(Heard(2))
        assert played.hear(Formed).term == 4
        assert any(isinstance(body, Hello) for body in played.bodies)
        played.say(Welcome())
    finally:
        control.close()


def test_a_coordinator_that_moved_is_found(played: Played) -> None:
    place = Board(1).place(0)
    place.begin(os.getpid())
    control = begun(played, place)
    old = played.server
    try:
        played.server = Server(played.access.keys, "127.0.0.1", limit=1 << 20)
        played.access.publish(played.server.endpoint)
        assert isinstance(played.hear(Beat), Beat)
    finally:
        control.close()
        old.close()


def test_what_makes_no_sense_is_dropped(played: Played) -> None:
    place = Board(1).place(0)
    place.begin(os.getpid())
    control = begun(played, place)
    try:
        for junk in (b"", b"\xc1", b"\xff" * 1000, encode(["Term", -1, []]), encode(["Nothing"])):
            played.server.send(played.peer, junk)
        played.bodies.clear()
        played.hear(Beat)
        played.hear(Beat)
    finally:
        control.close()


# -- patience ----------------------------------------------------------------------------------------------------------


def sight(phase: Phase, step: int, since: float, term: int = 1) -> Sight:
    return Sight(pid=1, term=term, step=step, phase=phase, since=since, positions=None, ticks=0)


def test_patience_follows_the_runs_own_times() -> None:
    pace = Pace()
    assert pace.patience == FIRST_PATIENCE
    for step in range(10):
        pace.look(sight(Phase.COMPUTE, step, step * 0.5), step * 0.5)
    assert pace.patience == pytest.approx(10 * 0.5)
    pace.look(sight(Phase.EXCHANGE, 9, 5.0), 5.1)
    pace.look(sight(Phase.APPLY, 9, 9.0), 9.1)
    assert pace.patience == pytest.approx(10 * 4.0)


def test_patience_has_bounds() -> None:
    pace = Pace()
    for step in range(3):
        pace.look(sight(Phase.COMPUTE, step, step * 0.01), step * 0.01)
    assert pace.patience == LEAST_PATIENCE
    pace.look(sight(Phase.EXCHANGE, 3, 1.0), 1.0)
    pace.look(sight(Phase.APPLY, 3, 1000.0), 1000.0)
    assert pace.patience == MOST_PATIENCE


def test_a_wait_that_broke_is_no_measure() -> None:
    pace = Pace()
    for step in range(3):
        pace.look(sight(Phase.COMPUTE, step, step * 0.01), step * 0.01)
    pace.look(sight(Phase.EXCHANGE, 3, 1.0), 1.0)
    pace.look(sight(Phase.RECOVER, 3, 100.0), 100.0)
    pace.look(sight(Phase.EXCHANGE, 3, 101.0), 101.0)
    pace.look(sight(Phase.COMPUTE, 3, 200.0, term=2), 200.0)
    assert pace.patience == LEAST_PATIENCE


def test_a_joiners_leap_is_no_step() -> None:
    pace = Pace()
    pace.look(sight(Phase.STARTING, 0, 0.0), 0.0)
    pace.look(sight(Phase.COPY, 0, 1.0), 1.0)
    pace.look(sight(Phase.COMPUTE, 500, 2.0), 2.0)
    assert pace.patience == FIRST_PATIENCE
