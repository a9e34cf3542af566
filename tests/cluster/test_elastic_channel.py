"""What a worker of an elastic run tells, when, and that the supervisor's death does not hinder it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import count

import pytest

from shoal.cluster.channel.channel import INTERRUPTED, PREEMPTED, STOPPED
from shoal.cluster.channel.elastic import ElasticChannel
from shoal.cluster.channel.messages import Decided, Departed, Happened, Returned, StopAsked, decode_up, encode
from shoal.core.events import AnyEvent, CheckpointSaved, EpochDone, EvalDone, Notice, RunStarted, StepDone, WorkerSeen
from shoal.wire.link import Link

pytestmark = pytest.mark.timeout(30)


class Ends:
    """A channel, and the supervisor's end of its link."""

    def __init__(self) -> None:
        self.link, theirs = Link.pair()
        self._theirs = theirs
        self.channel = ElasticChannel(theirs)

    def heard(self) -> list[AnyEvent]:
        """What has been told since the last time."""
        events: list[AnyEvent] = []
        self.channel.flush()
        while self.link.poll(0):
            message = decode_up(self.link.recv()[0])
            assert isinstance(message, Happened)
            events += message.events
        return events

    def steps(self) -> list[int]:
        return [event.step for event in self.heard()]

    def close(self) -> None:
        self.link.close()
        self._theirs.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def done(step: int) -> StepDone:
    return StepDone(step=step, epoch=0, loss=1.0, samples=4, rates=[])


def seen() -> WorkerSeen:
    return WorkerSeen(step=3, worker=2, samples=1, seconds={})


def test_a_step_is_told_once_it_is_confirmed(ends: Ends) -> None:
    ends.channel.speak(True)
    ends.channel.emit(done(1))
    ends.channel.emit(done(2))
    assert ends.steps() == []
    ends.channel.confirm(1)
    assert ends.steps() == [1]
    ends.channel.confirm(2)
    ends.channel.confirm(1)  # never goes back
    ends.channel.emit(done(2))
    assert ends.steps() == [2, 2]


def test_what_is_confirmed_goes_out_by_itself_after_a_while(ends: Ends) -> None:
    ends.channel.speak(True)
    for step in count(1):
        ends.channel.confirm(step)
        ends.channel.emit(done(step))
        if ends.link.poll(0):
            break
        time.sleep(0.01)
        assert step < 500


def test_what_is_for_people_or_of_itself_does_not_wait(ends: Ends) -> None:
    ends.channel.speak(True)
    started = RunStarted(
        step=9, run_id="", run_dir=None, workers=1, total_steps=1, steps_per_epoch=1, samples_per_epoch=1
    )
    told: list[AnyEvent] = [done(5), Notice(step=9, text="n"), started, seen()]
    for event in told:
        ends.channel.emit(event)
    assert {type(event) for event in ends.heard()} == {Notice, RunStarted, WorkerSeen}


def test_a_checkpoint_of_an_earlier_step_does_not_wait_for_later_steps(ends: Ends) -> None:
    ends.channel.speak(True)
    ends.channel.confirm(5)
    ends.channel.emit(done(6))
    ends.channel.emit(CheckpointSaved(step=5, path="p", best=False))
    assert ends.steps() == [5]


def test_others_tell_only_of_themselves_until_they_speak_then_all_that_is_confirmed(ends: Ends) -> None:
    ends.channel.speak(False)
    for step in (1, 2, 3):
        ends.channel.emit(done(step))
    ends.channel.emit(Notice(step=1, text="everyone has this"))
    ends.channel.emit(seen())
    assert [type(event) for event in ends.heard()] == [WorkerSeen]
    ends.channel.confirm(2)
    ends.channel.decide(EvalDone(step=2, epoch=0, metrics={}))  # does not wait: it does not speak
    assert ends.steps() == []
    ends.channel.speak(True)
    assert ends.steps() == [1, 2, 2]
    ends.channel.speak(True)  # again, in the next term: nothing is repeated
    ends.channel.confirm(3)
    assert ends.steps() == [3]
    ends.channel.speak(False)
    ends.channel.emit(done(4))
    ends.channel.confirm(4)
    assert ends.steps() == []


def test_at_most_a_thousand_are_kept(ends: Ends) -> None:
    ends.channel.speak(False)
    for step in range(1, 2501):
        ends.channel.emit(done(step))
    ends.channel.confirm(2500)
    ends.channel.speak(True)
    assert ends.steps() == list(range(1501, 2501))


def test_notices_from_before_anybody_speaks_are_told_by_who_does(ends: Ends) -> None:
    ends.channel.emit(Notice(step=0, text="early"))
    assert ends.heard() == []
    ends.channel.speak(True)
    assert [type(event) for event in ends.heard()] == [Notice]
    other = Ends()
    other.channel.emit(Notice(step=0, text="early"))
    other.channel.speak(False)
    other.channel.speak(True)
    assert other.heard() == []
    other.close()


def test_a_notice_of_the_step_under_way_is_told_by_who_speaks_next(ends: Ends) -> None:
    """The one who spoke may have died before it told the same."""
    ends.channel.speak(False)
    ends.channel.emit(Notice(step=0, text="of a step that all have done"))
    ends.channel.emit(Notice(step=1, text="of the step under way"))
    ends.channel.confirm(1)
    assert ends.heard() == []
    ends.channel.speak(True)
    ends.channel.speak(True)
    assert [event.text for event in ends.heard() if isinstance(event, Notice)] == ["of the step under way"]


def test_a_complete_run_is_told_to_its_end(ends: Ends) -> None:
    ends.channel.speak(True)
    ends.channel.emit(done(1))
    ends.channel.emit(EpochDone(step=1, epoch=0, loss=1.0))
    ends.channel.complete()
    assert ends.steps() == [1, 1]


def test_a_decision_confirms_what_was_before_it_and_is_waited_for(ends: Ends) -> None:
    asked: list[Happened] = []

    def supervise() -> None:
        message = decode_up(ends.link.recv()[0])
        assert isinstance(message, Happened)
        asked.append(message)
        ends.link.send(encode(Decided(STOPPED)))

    ends.channel.speak(True)
    ends.channel.emit(done(4))
    ends.channel.emit(done(5))
    thread = threading.Thread(target=supervise)
    thread.start()
    ends.channel.decide(EvalDone(step=4, epoch=0, metrics={"loss": 1.0}))
    thread.join(10)
    (message,) = asked
    assert message.ask
    assert [(type(event), event.step) for event in message.events] == [(StepDone, 4), (EvalDone, 4)]
    assert ends.channel.stop_asked() == STOPPED


@pytest.mark.parametrize("speaks", [True, False])
def test_every_worker_hears_that_it_should_stop(ends: Ends, speaks: bool) -> None:
    ends.channel.speak(speaks)
    assert ends.channel.stop_asked() is None
    ends.link.send(encode(StopAsked(INTERRUPTED)))
    time.sleep(0.03)  # it does not look more often
    assert ends.channel.stop_asked() == INTERRUPTED
    ends.link.close()
    assert ends.channel.stop_asked() == INTERRUPTED


def test_a_supervisor_that_is_gone_is_a_reason_to_stop_and_hinders_nothing(ends: Ends) -> None:
    ends.channel.speak(True)
    ends.link.close()
    assert not ends.channel.orphaned
    ends.channel.confirm(9)
    ends.channel.emit(done(1))
    ends.channel.flush()
    assert ends.channel.orphaned
    assert ends.channel.stop_asked() == PREEMPTED
    ends.channel.decide(EvalDone(step=1, epoch=0, metrics={}))
    ends.channel.emit(seen())
    ends.channel.complete()
    ends.channel.give(Returned(), [b"value"])
    ends.channel.give(Departed("enough"))
    ends.channel.await_end()


def test_a_supervisor_that_goes_while_it_is_waited_for(ends: Ends) -> None:
    def leave() -> None:
        ends.link.recv()
        ends.link.close()

    ends.channel.speak(True)
    thread = threading.Thread(target=leave)
    thread.start()
    ends.channel.decide(EvalDone(step=1, epoch=0, metrics={}))
    thread.join(10)
    assert ends.channel.stop_asked() == PREEMPTED


def test_that_it_is_gone_is_seen_by_looking_alone(ends: Ends) -> None:
    ends.channel.speak(False)
    assert ends.channel.stop_asked() is None
    ends.link.close()
    time.sleep(0.03)
    assert ends.channel.stop_asked() == PREEMPTED


def test_a_step_that_takes_long_does_not_wait_for_the_next_one(ends: Ends) -> None:
    ends.channel.speak(True)
    ends.channel.emit(done(1))
    ends.channel.emit(EvalDone(step=1, epoch=0, metrics={}))
    ends.channel.flush()
    assert ends.steps() == []
    time.sleep(0.25)
    ends.channel.flush()
    assert [type(event) for event in ends.heard()] == [StepDone], "what else there is of it waits"
    ends.channel.confirm(1)
    ends.channel.flush()
    assert [type(event) for event in ends.heard()] == [EvalDone]


def test_one_that_copies_knows_what_its_source_knew(ends: Ends) -> None:
    """The one that spoke died before it told steps 2 and 3; then the source of the copy dies, and this one speaks."""
    source = Ends()
    for channel, last in ((source.channel, 4), (ends.channel, 3)):
        channel.speak(False)
        for step in range(1, last + 1):
            channel.emit(done(step))
    ends.channel.confirm(2)
    source.channel.confirm(3)
    ends.channel.adopt(source.channel.kept())
    source.close()
    ends.channel.speak(True)
    ends.channel.confirm(4)
    ends.channel.flush()
    assert ends.steps() == [1, 2, 3, 4]
