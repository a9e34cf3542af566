"""Many members: what meeting costs in messages, and that no letter costs more the more of them there are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from shoal.cluster.board import Phase
from shoal.cluster.messages import (
    Beat,
    Changed,
    Ended,
    Fail,
    Formed,
    Hello,
    Kill,
    Look,
    Ready,
    Regroup,
    Say,
    Start,
    Term,
    name_of,
)
from shoal.cluster.roster.membership import Membership, Plan, Tell
from shoal.testing.crowd import PER_HOST, QUESTIONS, Crowd

MEMBERS = 2000
A_TERM = 2 * QUESTIONS + 4
"""Messages of a member for a term: questions and answers, to leave the last one, Ready, Term, Formed."""
SECONDS = 60.0
"""A bound that only what grows with the square of the members can miss: it takes a few."""


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[Crowd]:
    with closing(Crowd(tmp_path, MEMBERS)) as crowd:
        yield crowd


def turns(crowd: Crowd, condition: Callable[[], bool]) -> int:
    """Turns until then; how many messages were sent."""
    before, until = crowd.server.messages, time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until, f"{crowd.server.messages - before} messages, {crowd.changes[-1:]}"
        crowd.turn()
    return crowd.server.messages - before


def test_meeting_takes_a_few_messages_of_each_member(crowd: Crowd) -> None:
    """Including a death, and a replacement that joins when the others have gone on without it."""
    began = time.monotonic()
    doors = 2 * MEMBERS // PER_HOST
    turns(crowd, lambda: len(crowd.starts) == MEMBERS)
    crowd.start_all()
    first = turns(crowd, lambda: len(crowd.changes) == 1)
    crowd.kill(777)
    second = turns(crowd, lambda: len(crowd.changes) == 2)
    assert list(crowd.starts) == [777]
    crowd.start_all()
    third = turns(crowd, lambda: len(crowd.changes) == 3)
    took = time.monotonic() - began
    sent = [first, second, third]
    print(f"{MEMBERS} members: {[round(count / MEMBERS, 2) for count in sent]} messages each, {took:.1f} s in all")
    assert [len(change.members) for change in crowd.changes] == [MEMBERS, MEMBERS - 1, MEMBERS]
    assert [change.term for change in crowd.changes] == [1, 2, 3], "no term was in vain"
    assert crowd.changes[1].lost == crowd.changes[2].joined == [name_of(777)]
    assert all(member.standing == 3 for member in crowd.members.values())
    assert not any(crowd.said[kind] for kind in (Say, Fail, Kill, Look)), crowd.said
    for count in sent:
        assert A_TERM * (MEMBERS - 1) <= count <= A_TERM * MEMBERS + doors + 4, sent


def test_a_coordinator_without_a_turn_suspects_nobody(tmp_path: Path) -> None:
    with closing(Crowd(tmp_path, 3)) as crowd:
        turns(crowd, lambda: len(crowd.starts) == 3)
        crowd.start_all()
        turns(crowd, lambda: len(crowd.changes) == 1)

        def all_beat() -> None:
            for member in crowd.members.values():
                member.say(Beat(1, 0, Phase.COMPUTE, 0.0, 1.0))

        for _ in range(12):
            all_beat()
            crowd.turn()
        time.sleep(0.8)  # others had the cores
        crowd.turn()
        assert crowd.said[Look] == 0
        until = time.monotonic() + 5.0
        while not crowd.said[Look]:
            assert time.monotonic() < until, "silence is noticed by one who listens"
            crowd.turn()


def test_no_letter_costs_more_the_more_workers_there_are() -> None:
    """The pure part alone, with beats: 2,000 workers send 20,000 of them in a second."""
    began = time.perf_counter()
    membership = Membership(Plan(MEMBERS, 1, MEMBERS, "1.0", "a-run"))
    now, names = 0.0, [name_of(seat) for seat in range(MEMBERS)]
    assert membership.begin(now) == [Start(seat) for seat in range(MEMBERS)]

    def all_say(body: Hello | Ready | Formed | Beat, seats: range | list[int]) -> list[object]:
        return [order for seat in seats for order in membership.hear(names[seat], seat + 1, body, now)]

    everybody, survivors = range(MEMBERS), [seat for seat in range(MEMBERS) if seat != 5]
    assert len(all_say(Hello("1.0", b"", 1), everybody)) == MEMBERS
    assert all_say(Ready(0, 0, False), everybody) == [Tell(name, Term(1, names)) for name in names]
    assert [type(order) for order in all_say(Formed(1), everybody)] == [Changed]
    for _ in range(20):
        now += 0.05
        assert all_say(Beat(1, 3, Phase.COMPUTE, 0.0, 1.0), everybody[::2]) == []
        assert all_say(Beat(1, 3, Phase.EXCHANGE, 0.0, 1.0), everybody[1::2]) == []
        assert membership.tick(now) == []
    orders = membership.engine(Ended(5, "was killed"), now)
    assert orders == [*(Tell(names[seat], Regroup(1, now=True)) for seat in survivors), Start(5)]
    again = all_say(Ready(1, 6, True), survivors)
    assert len(again) == MEMBERS - 1
    assert [type(order) for order in all_say(Formed(2), survivors)] == [Changed]
    took = time.perf_counter() - began
    print(f"{MEMBERS} workers, 48,000 letters: {took:.2f} s")
    assert took < SECONDS / 10
