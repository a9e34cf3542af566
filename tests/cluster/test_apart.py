"""The roster of workers that need not meet: who is ready takes part at once, who is lost no longer does."""

from __future__ import annotations

from typing import Any

import msgspec

from shoal.cluster import messages as ms
from shoal.cluster.roster.membership import Membership, Order, Plan, Tell

PLAN = Plan(workers=2, least=1, most=3, version="1.0", run="r", meets=False, seats=5, servers=8)


class Play:
    """A roster, and what a run would say to it."""

    def __init__(self, **plan: Any) -> None:
        self.plan = msgspec.structs.replace(PLAN, **plan)
        self.it, self.now = Membership(self.plan), 10.0
        self.orders: list[Order] = self.it.begin(self.now)

    def do(self, orders: list[Order]) -> list[Order]:
        self.now += 0.01
        self.orders = orders
        return orders

    def come(self, *seats: int, life: int = 1) -> list[Order]:
        for seat in seats:
            self.do(self.it.hear(ms.name_of(seat), 100 * life + seat, ms.Hello("1.0", b"", 7), self.now))
            self.do(self.it.hear(ms.name_of(seat), 100 * life + seat, ms.Ready(0, 0, holds=False), self.now))
        return self.orders

    def dies(self, seat: int, **more: Any) -> list[Order]:
        return self.do(self.it.engine(ms.Ended(seat, "was killed by SIGKILL", signal=9, **more), self.now))

    def ask(self, **numbers: int) -> list[Order]:
        return self.do(self.it.hear(ms.OPERATOR, 1, ms.Scale(**numbers), self.now))

    def started(self) -> list[int]:
        return [order.seat for order in self.orders if isinstance(order, ms.Start)]

    def changed(self) -> list[ms.Changed]:
        return [order for order in self.orders if isinstance(order, ms.Changed)]

    def answer(self) -> Any:
        return next(order.body for order in self.orders if isinstance(order, Tell) and order.name == ms.OPERATOR)


def running(**plan: Any) -> Play:
    play = Play(**plan)
    assert play.started() == [0, 1]
    play.come(0)
    assert not play.changed()
    play.come(1)
    assert [change.members for change in play.changed()] == [["worker-0", "worker-1"]]
    return play


def test_a_death_changes_the_term_without_a_word_of_the_others() -> None:
    play = running()
    play.dies(1)
    (change,) = play.changed()
    assert (change.members, change.lost, change.joined) == (["worker-0"], ["worker-1"], [])
    assert play.started() == [2], "another seat: what the last one of this seat left may be in use"
    play.come(2)
    (change,) = play.changed()
    assert (change.term, change.members, change.joined) == (3, ["worker-0", "worker-2"], ["worker-2"])


def test_seats_are_given_in_turn() -> None:
    play, given = running(deaths=0), []
    for life in range(2, 10):
        play.dies(([1, *given])[-1])
        given += play.started()
        play.come(given[-1], life=life)
    assert given == [2, 3, 4, 1, 2, 3, 4, 1], "and never that of worker 0, which lives"


def test_below_the_least_number_it_is_told_once_there_are_enough_again() -> None:
    play = running(least=2)
    assert play.dies(1) == [ms.Start(2)]
    (change,) = [order for order in play.come(2) if isinstance(order, ms.Changed)]
    assert (change.joined, change.lost) == (["worker-2"], ["worker-1"])


def test_a_word_that_was_lost_is_said_again() -> None:
    play = running()
    orders = play.do(play.it.hear("worker-0", 100, ms.Ready(1, 0, holds=False), play.now))
    assert orders == [Tell("worker-0", ms.Term(1, ["worker-0", "worker-1"]))], "it is no reason to leave the term"


def test_one_that_is_too_many_is_told_to_leave() -> None:
    play = running()
    play.ask(workers=1)
    (change,) = play.changed()
    assert (change.members, change.left) == (["worker-0"], ["worker-1"])
    assert Tell("worker-1", ms.Leave("the run goes on with 1 workers")) in play.orders
    play.dies(1)
    assert not play.started()


def test_a_loss_ends_a_run_that_does_not_replace() -> None:
    play = running(replaces=False)
    (fail,) = [order for order in play.dies(1) if isinstance(order, ms.Fail)]
    assert fail.seat == 1


def test_two_deaths_of_the_same_samples_end_the_run() -> None:
    play = running()
    play.dies(1, computing=True, step=4, positions=(10, 19))
    (fail,) = [o for o in play.dies(0, computing=True, step=4, positions=(15, 30)) if isinstance(o, ms.Fail)]
    assert (fail.step, fail.positions) == (4, (15, 19))


def test_those_that_end_before_they_are_ready_are_not_replaced_for_ever() -> None:
    play, started = Play(least=2), 0
    while play.started():
        started += 1
        play.dies(play.started()[-1])
        assert started < 10
    assert [order for order in play.orders if isinstance(order, ms.Fail)]


def test_servers_are_the_engines_matter() -> None:
    play = running()
    assert play.ask(workers=3, servers=4) == [ms.Servers(4)]
    play.do(play.it.engine(ms.Answered("its servers are just being started"), play.now))
    assert play.answer() == ms.Refused("its servers are just being started") and not play.started()
    play.ask(workers=3, servers=4)
    play.do(play.it.engine(ms.Answered(), play.now))
    assert play.answer() == ms.Welcome() and play.started() == [2]
    play.ask(workers=9, servers=4)
    assert isinstance(play.answer(), ms.Refused)


def test_a_new_coordinator_goes_on_where_the_last_one_was() -> None:
    play = running()
    play.dies(1)
    it = Membership.restored(play.plan, play.it.record(), play.now)
    orders = it.engine(ms.Present([0, 2]), play.now)
    assert not [order for order in orders if isinstance(order, ms.Start)]
    it.hear("worker-2", 302, ms.Hello("1.0", b"", 7), play.now)
    orders = it.hear("worker-2", 302, ms.Ready(0, 0, holds=False), play.now)
    (change,) = [order for order in orders if isinstance(order, ms.Changed)]
    assert change.members == ["worker-0", "worker-2"] and change.term == 3
