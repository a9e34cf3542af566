"""The rules of membership, one by one."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest

from shoal.cluster import messages as ms
from shoal.cluster.board import Phase
from shoal.cluster.roster.membership import Membership, Order, Plan, Tell

Kind = TypeVar("Kind")


class Play:
    """A membership with a clock, and the orders that it gave, in order."""

    def __init__(self, workers: int = 3, least: int = 1, most: int = 6) -> None:
        self.plan = Plan(workers, least, most, "1.0", "run")
        self.now = 100.0
        self.it = Membership(self.plan)
        self.orders: list[Order] = []
        self.lives: dict[int, int] = {}
        self._do(self.it.begin(self.now))

    def _do(self, orders: list[Order]) -> list[Order]:
        self.orders += orders
        return orders

    def hear(self, seat: int, body: Any) -> list[Order]:
        return self._do(self.it.hear(ms.name_of(seat), self.lives.get(seat, seat + 1), body, self.now))

    def tell(self, report: Any) -> list[Order]:
        return self._do(self.it.engine(report, self.now))

    def ask(self, workers: int) -> list[Order]:
        return self._do(self.it.hear(ms.OPERATOR, 1, ms.Scale(workers), self.now))

    def after(self, seconds: float) -> list[Order]:
        self.now += seconds
        return self._do(self.it.tick(self.now))

    def hello(self, seat: int, *, life: int | None = None, version: str = "1.0", model: bytes = b"m") -> list[Order]:
        if life is not None:
            self.lives[seat] = life
        return self.hear(seat, ms.Hello(version, model, 1))

    def ready(self, seat: int, position: int = 0, *, holds: bool = False, term: int | None = None) -> list[Order]:
        return self.hear(seat, ms.Ready(self.it.term if term is None else term, position, holds))

    def come(self, *seats: int, life: int | None = None) -> None:
        for seat in seats:
            self.hello(seat, life=life)
            self.ready(seat, term=0)

    def form(self) -> list[Order]:
        orders: list[Order] = []
        for name in list(self.it.members):
            orders += self.hear(int(name[7:]), ms.Formed(self.it.term))
        return orders

    def beat(self, seat: int, phase: Phase = Phase.COMPUTE, step: int = 4, seconds: float = 0.0, **more: Any) -> None:
        patience = more.pop("patience", 1.0)
        self.hear(seat, ms.Beat(self.it.term, step, int(phase), seconds, patience, **more))

    def silent(self, seat: int) -> list[Order]:
        """It has beaten for a while, and then no longer."""
        for _ in range(20):
            self.now += 0.1
            self.beat(seat)
        return self.after(0.6)

    def restart(self) -> Membership:
        self.it = Membership.restored(self.plan, self.it.record(), self.now)
        return self.it


def running(workers: int = 3, **plan: int) -> Play:
    play = Play(workers, **plan)
    play.come(*range(workers))
    play.form()
    play.orders.clear()
    return play


def of(kind: type[Kind], orders: list[Order]) -> list[Kind]:
    """Orders, or bodies of what is told, of that kind."""
    return [body for body in (o.body if isinstance(o, Tell) else o for o in orders) if isinstance(body, kind)]


def told(kind: type[Any], orders: list[Order]) -> list[str]:
    return [order.name for order in orders if isinstance(order, Tell) and isinstance(order.body, kind)]


# -- the beginning -----------------------------------------------------------------------------------------------------


def test_a_run_starts_its_workers_and_declares_when_all_are_ready() -> None:
    play = Play(3)
    assert play.orders == [ms.Start(0), ms.Start(1), ms.Start(2)]
    play.come(2, 0)
    assert of(ms.Term, play.orders) == []
    play.come(1)
    assert of(ms.Term, play.orders) == [ms.Term(1, ["worker-0", "worker-1", "worker-2"])] * 3
    assert play.form()[-1] == ms.Changed(1, play.it.members, joined=play.it.members, lost=[])


def test_it_goes_on_with_fewer_after_thirty_seconds_and_says_so() -> None:
    play = Play(3, least=2)
    play.come(0, 1)
    assert of(ms.Term, play.after(29.0)) == []
    orders = play.after(1.5)
    assert told(ms.Term, orders) == ["worker-0", "worker-1"]
    assert "2 of 3 workers are ready after 30 s: the run begins with those" in of(ms.Say, orders)[0].text


def test_it_waits_for_the_least_number_and_says_so_once() -> None:
    play = Play(3, least=2)
    play.come(0)
    assert "waits until there are 2 (min_workers)" in of(ms.Say, play.after(31.0))[0].text
    assert play.after(1.0) == []


# -- letting in --------------------------------------------------------------------------------------------------------


def test_another_version_is_refused_and_the_run_goes_on() -> None:
    play = Play(2)
    play.hello(0)
    orders = play.hello(1, version="0.9")
    [why] = [body.why for body in of(ms.Refused, orders)]
    assert "shoal 0.9" in why and "the run has 1.0" in why and "install shoal==1.0" in why
    assert play.tell(ms.Ended(1, "ended"))[-1:] == [ms.Start(1)]


def test_another_model_is_refused_also_after_a_restart() -> None:
    play = running(2)
    play.tell(ms.Ended(1, "was killed"))
    play.restart()
    play.tell(ms.Present([0, 1]))
    [why] = [body.why for body in of(ms.Refused, play.hello(1, life=50, model=b"other"))]
    assert b"other".hex() in why and b"m".hex() in why and "same script" in why


@pytest.mark.parametrize("refused", [True, False])
def test_three_that_end_before_they_are_ready_are_not_replaced(refused: bool) -> None:
    play = Play(2, least=1)
    play.come(0)
    for life in (11, 12):
        play.hello(1, life=life, version="0.9" if refused else "1.0")
        assert of(ms.Start, play.tell(ms.Ended(1, "ended with 1"))) == [ms.Start(1)]
    orders = play.tell(ms.Ended(1, "ended with 1"))
    assert of(ms.Start, orders) == []
    assert "worker-1 ended 3 times before it was ready" in of(ms.Say, orders)[0].text
    assert told(ms.Term, orders) == ["worker-0"]


def test_below_the_least_number_that_is_a_failure() -> None:
    play = Play(2, least=2)
    play.come(0)
    for _ in range(3):
        orders = play.tell(ms.Ended(1, "ended with 1"))
    assert "1 workers are left, and the run needs 2 (min_workers)" in of(ms.Fail, orders)[0].text


def test_unknown_names_are_refused() -> None:
    play = running(2)
    for name in ("worker-7", "stranger"):
        orders = play.it.hear(name, 9, ms.Hello("1.0", b"m", 1), play.now)
        assert told(ms.Refused, orders) == [name]
        assert "not a worker that this run has started" in of(ms.Refused, orders)[0].why


def test_a_hello_is_answered_again() -> None:
    play = Play(2)
    assert told(ms.Welcome, play.hello(0)) == told(ms.Welcome, play.hello(0)) == ["worker-0"]


def test_a_new_life_means_that_the_old_one_is_lost_and_ignored() -> None:
    play = running(3)
    orders = play.hello(1, life=77)
    assert told(ms.Welcome, orders) == ["worker-1"]
    assert told(ms.Regroup, orders) == ["worker-0", "worker-2"]
    assert play.it.hear("worker-1", 2, ms.Ready(1, 8, True), play.now) == []
    assert play.it.hear("worker-1", 2, ms.Hello("1.0", b"m", 1), play.now) == []


# -- breaking ----------------------------------------------------------------------------------------------------------


def test_a_death_breaks_the_term_and_survivors_go_on_at_once() -> None:
    play = running(3)
    orders = play.tell(ms.Ended(1, "was killed"))
    assert of(ms.Regroup, orders) == [ms.Regroup(1, now=True)] * 2
    assert of(ms.Start, orders) == [ms.Start(1)]
    play.ready(0, 8, holds=True)
    orders = play.ready(2, 10, holds=True)
    assert of(ms.Term, orders) == [ms.Term(2, ["worker-2", "worker-0"])] * 2
    assert play.form()[-1] == ms.Changed(2, ["worker-2", "worker-0"], joined=[], lost=["worker-1"])


def test_an_unexpected_ready_breaks_it_for_the_others() -> None:
    play = running(3)
    assert told(ms.Regroup, play.ready(1, 8, holds=True)) == ["worker-0", "worker-2"]
    assert play.ready(1, 8, holds=True) == []


def test_the_order_to_leave_is_repeated_to_those_that_have_not() -> None:
    play = running(3)
    play.ready(1, 8, holds=True)
    assert told(ms.Regroup, play.after(1.1)) == ["worker-0", "worker-2"]
    play.ready(0, 8, holds=True)
    assert told(ms.Regroup, play.after(1.1)) == ["worker-2"]


def test_people_hear_who_is_waited_for() -> None:
    play = running(2)
    play.beat(1, Phase.COMPUTE, step=7, seconds=3.0)
    play.ready(0, 14, holds=True)
    says = of(ms.Say, play.after(5.5))
    assert "waited" in says[0].text and "worker-1 computes in step 8" in says[0].text
    assert of(ms.Say, play.after(5.5)) == []


def test_a_term_that_was_not_heard_is_told_again() -> None:
    play = Play(2)
    play.come(0, 1)
    play.hear(0, ms.Formed(1))
    assert of(ms.Term, play.ready(1, term=0)) == [ms.Term(1, ["worker-0", "worker-1"])]
    assert play.it.term == 1


def test_an_old_ready_does_not_count_for_a_later_gathering() -> None:
    play = Play(3)
    play.come(0, 1, 2)
    play.tell(ms.Ended(2, "was killed"))
    orders = play.ready(0, term=0)
    assert [type(body) for body in of(object, orders)] == [ms.Term, ms.Regroup]
    assert told(ms.Term, play.ready(1, term=1)) == []
    assert told(ms.Term, play.ready(0, term=1)) == ["worker-0", "worker-1"]


# -- joining and leaving -----------------------------------------------------------------------------------------------


def lose_one(play: Play, seat: int) -> None:
    play.tell(ms.Ended(seat, "was killed"))
    for name in play.it.members:
        if name != ms.name_of(seat):
            play.ready(int(name[7:]), 8, holds=True)
    play.form()


def test_candidates_join_by_one_soft_regroup() -> None:
    play = running(2)
    play.ask(4)
    play.come(2)
    assert told(ms.Regroup, play.after(0.02)) == []
    play.come(3)
    orders = play.after(0.04)
    assert of(ms.Regroup, orders) == [ms.Regroup(1, now=False)] * 2
    assert told(ms.Regroup, play.ready(0, 8, holds=True)) == []
    orders = play.ready(1, 8, holds=True)
    assert of(ms.Term, orders)[0].members == ["worker-0", "worker-1", "worker-2", "worker-3"]


def test_a_soft_regroup_that_hangs_becomes_a_hard_one() -> None:
    play = running(2)
    play.ask(3)
    play.come(2)
    play.after(0.1)
    play.ready(0, 8, holds=True)
    assert told(ms.Regroup, play.after(1.9)) == []
    orders = play.after(0.2)
    assert [(o.name, o.body) for o in orders if isinstance(o, Tell)] == [("worker-1", ms.Regroup(1, now=True))]


def test_a_replacement_joins_under_its_old_name() -> None:
    play = running(3)
    lose_one(play, 1)
    play.come(1, life=40)
    play.after(0.1)
    play.ready(0, 8, holds=True)
    play.ready(2, 8, holds=True)
    assert play.it.members == ["worker-0", "worker-2", "worker-1"]
    assert play.form()[-1] == ms.Changed(3, play.it.members, joined=["worker-1"], lost=[])


def test_those_with_the_state_come_before_joiners_that_started_as_far() -> None:
    play = running(2)
    lose_one(play, 0)
    play.hello(0, life=40)
    play.ready(0, 8, term=0)
    play.after(0.1)
    play.ready(1, 8, holds=True)
    assert play.it.members == ["worker-1", "worker-0"]


def test_drained_workers_leave_once_a_term_without_them_is_declared() -> None:
    play = running(3)
    assert told(ms.Welcome, play.ask(1)) == [ms.OPERATOR]
    assert told(ms.Regroup, play.after(0.1)) == ["worker-0", "worker-1", "worker-2"]
    for seat in (0, 1):
        assert told(ms.Leave, play.ready(seat, 8, holds=True)) == []
    orders = play.ready(2, 8, holds=True)
    assert told(ms.Term, orders) == ["worker-0"]
    assert told(ms.Leave, orders) == ["worker-1", "worker-2"]
    assert told(ms.Leave, play.ready(2, 8, holds=True, term=1)) == ["worker-2"]
    assert play.tell(ms.Ended(2, "ended")) == []


@pytest.mark.parametrize("workers", [1, 7])
def test_numbers_beyond_the_bounds_are_refused(workers: int) -> None:
    play = running(3, least=2)
    [why] = [body.why for body in of(ms.Refused, play.ask(workers))]
    assert f"asked for {workers} workers" in why and "2 (min_workers) to 6 (max_workers)" in why
    assert of(ms.Say, play.tell(ms.Rescale(workers)))[0].text == why
    assert of(ms.Start, play.tell(ms.Rescale(4))) == [ms.Start(3)]


def test_below_the_least_number_it_holds_and_one_saves() -> None:
    play = running(3, least=3)
    play.tell(ms.Ended(1, "was killed"))
    play.ready(0, 8, holds=True)
    assert of(ms.Hold, play.ready(2, 10, holds=True)) == []  # most often a replacement comes within a moment
    orders = play.after(1.1)
    holds = {order.name: order.body for order in orders if isinstance(order, Tell)}
    assert {name: body.checkpoint for name, body in holds.items()} == {"worker-2": True, "worker-0": False}
    assert "the run needs 3 (min_workers)" in of(ms.Say, orders)[0].text
    assert play.ready(2, 10, holds=True) == []
    play.come(1, life=40)
    assert play.it.members == ["worker-2", "worker-0", "worker-1"]


def test_without_anybody_who_has_the_state_everything_fails() -> None:
    play = running(2)
    play.tell(ms.Ended(0, "was killed"))
    [fail] = of(ms.Fail, play.tell(ms.Ended(1, "was killed")))
    assert fail.everything and "no worker is left that has the state" in fail.text
    assert play.tell(ms.Ended(1, "was killed")) == []


# -- deaths ------------------------------------------------------------------------------------------------------------


def dies(seat: int, step: int, first: int, last: int) -> ms.Ended:
    return ms.Ended(seat, "was killed by SIGSEGV", computing=True, step=step, positions=(first, last))


def test_two_deaths_on_the_same_samples_end_the_run_also_after_a_restart() -> None:
    play = running(4)
    assert of(ms.Fail, play.tell(dies(1, 7, 16, 31))) == []
    play.restart()
    play.tell(ms.Present([0, 2, 3]))
    [fail] = of(ms.Fail, play.tell(dies(2, 7, 24, 40)))
    assert (fail.step, fail.positions, fail.everything) == (7, (24, 31), False)
    assert "in step 8" in fail.text and "positions 24–31" in fail.text and "worker-2" in fail.text


@pytest.mark.parametrize("second", [(7, 32, 40), (8, 16, 31)])
def test_deaths_on_other_samples_or_steps_do_not(second: tuple[int, int, int]) -> None:
    play = running(4)
    play.tell(dies(1, 7, 16, 31))
    assert of(ms.Fail, play.tell(dies(2, *second))) == []


def test_kills_of_our_own_do_not_count() -> None:
    play = running(4)
    play.tell(dies(1, 4, 0, 9))
    play.silent(2)
    assert of(ms.Kill, play.tell(ms.Looked(2, ms.STOPPED)))
    assert of(ms.Fail, play.tell(dies(2, 4, 0, 9))) == []


# -- silence and waiting -----------------------------------------------------------------------------------------------


def test_only_those_that_have_beaten_can_be_overdue() -> None:
    assert of(ms.Look, running(2).after(60.0)) == []


@pytest.mark.parametrize("verdict", [ms.STOPPED, ms.CUT])
def test_a_silent_worker_is_looked_at_and_killed(verdict: str) -> None:
    play = running(3)
    assert of(ms.Look, play.silent(1)) == [ms.Look(1)]
    orders = play.tell(ms.Looked(1, verdict, "state T"))
    [kill] = of(ms.Kill, orders)
    assert kill.seat == 1 and "worker-1" in kill.why and "state T" in kill.why
    assert told(ms.Regroup, orders) == ["worker-0", "worker-2"]
    assert of(ms.Start, orders) == []
    started = of(ms.Start, play.tell(ms.Ended(1, "was killed")))
    if verdict == ms.CUT:  # its place is out of reach: another process there would be, too
        assert started == []
        started = of(ms.Start, play.after(5.0))
    assert started == [ms.Start(1)]


def test_silence_does_not_count_while_the_coordinator_was_absent() -> None:
    play = running(2)
    for _ in range(20):
        for seat in range(2):
            play.hear(seat, ms.Beat(1, 1, Phase.COMPUTE, 0.0, 1.0))
        play.after(0.1)
    play.now += 3.0
    play.it.was_absent(play.now)
    assert of(ms.Look, play.after(0.0)) == []
    assert of(ms.Look, play.after(0.4)) == []
    assert of(ms.Look, play.after(0.2)) == [ms.Look(0), ms.Look(1)], "it has listened for long enough again"
    play.it.was_absent(play.now)
    assert of(ms.Kill, play.tell(ms.Looked(0, ms.CUT))) == []


def test_without_an_engine_long_silence_is_a_loss() -> None:
    play = running(3)
    play.it.orphaned(play.now)
    assert play.silent(1) == []
    orders: list[Order] = []
    for _ in range(50):
        play.beat(0)
        play.beat(2)
        orders += play.after(0.1)
    assert set(told(ms.Regroup, orders)) == {"worker-0", "worker-2"}
    assert of(ms.Look, orders) == of(ms.Kill, orders) == of(ms.Start, orders) == []


def test_one_that_is_gone_is_lost_without_a_kill() -> None:
    play = running(3)
    play.silent(1)
    orders = play.tell(ms.Looked(1, ms.GONE))
    assert of(ms.Kill, orders) == [] and told(ms.Regroup, orders) == ["worker-0", "worker-2"]


def test_a_slow_one_is_left_alone_and_that_is_said_once() -> None:
    play = running(2)
    play.silent(1)
    [say] = of(ms.Say, play.tell(ms.Looked(1, ms.SLOW, "100% of a core")))
    assert "worker-1 has been silent for 0.6 s, but works (100% of a core)" in say.text
    assert of(ms.Look, play.after(0.3)) == []
    assert of(ms.Look, play.after(0.3)) == [ms.Look(1)]
    assert play.tell(ms.Looked(1, ms.SLOW)) == []


def test_a_verdict_does_not_count_once_it_beats_again() -> None:
    play = running(2)
    play.silent(1)
    play.beat(1)
    assert play.tell(ms.Looked(1, ms.CUT)) == []


def stall(play: Play, step: int = 4, seconds: float = 1.5) -> list[Order]:
    for name in play.it.members:
        play.beat(int(name[7:]), Phase.EXCHANGE, step, seconds=seconds)
    return play.after(0.05)


def regroup(play: Play, position: int = 8) -> None:
    for name in list(play.it.members):
        play.ready(int(name[7:]), position, holds=True)
    play.form()


def test_when_all_wait_for_each_other_they_regroup() -> None:
    play = running(2)
    orders = stall(play)
    assert of(ms.Regroup, orders) == [ms.Regroup(1, now=True)] * 2
    assert "worker-0, worker-1" in of(ms.Say, orders)[0].text and "in step 5" in of(ms.Say, orders)[0].text


@pytest.mark.parametrize(("steps", "fails"), [([4] * 8, True), ([4] * 4 + [5] * 4, False)])
def test_eight_stalls_without_progress_end_the_run(steps: list[int], fails: bool) -> None:
    play = running(2)
    for step in steps:
        orders = stall(play, step, seconds=1000.0)
        regroup(play)
    assert bool(of(ms.Fail, orders)) is fails


def test_after_a_stall_they_wait_twice_as_long() -> None:
    """What only takes long, such as copying a large model, gets there."""
    play = running(2)
    for seconds in (1.1, 2.1, 4.1):
        assert of(ms.Regroup, stall(play, seconds=seconds * 0.9)) == []
        assert of(ms.Regroup, stall(play, seconds=seconds)) != []
        regroup(play)
    assert of(ms.Regroup, stall(play, step=5, seconds=1.1)) != []


def test_waiting_for_a_slow_worker_is_said_once_for_each_step() -> None:
    play = running(2)
    play.beat(1, Phase.COMPUTE, 4, seconds=3.0)
    play.beat(0, Phase.EXCHANGE, 4, seconds=2.5, stack="loss.py line 3")
    [say] = of(ms.Say, play.after(0.05))
    for part in ("worker-0 has waited 2.5 s for worker-1 in step 5", "worker-1 computes in step 5 (for 3.0 s)"):
        assert part in say.text
    assert "Nobody is stopped for being slow" in say.text and "loss.py line 3" in say.text
    assert play.after(0.05) == []


# -- terms that do not come to stand -----------------------------------------------------------------------------------


def forming(workers: int = 3) -> Play:
    play = running(workers)
    for seat in range(workers):
        play.ready(seat, 8, holds=True)
    play.orders.clear()
    return play


def test_the_member_with_most_broken_pairs_is_expelled() -> None:
    play = forming()
    play.hear(0, ms.Unreached(2, ["worker-1"]))
    play.hear(2, ms.Unreached(2, ["worker-1"]))
    orders = play.hear(1, ms.Unreached(2, ["worker-0", "worker-2"]))
    assert of(ms.Kill, orders) == [ms.Kill(1, "worker-1 has no connection with worker-0, worker-2")]
    assert told(ms.Regroup, orders) == ["worker-0", "worker-2"]


def test_one_that_only_lost_the_meeting_does_not_hide_who_is_apart() -> None:
    play = forming()
    assert play.hear(0, ms.Unreached(2, [])) == []
    assert play.ready(0, 8, holds=True) == []
    assert play.hear(1, ms.Unreached(2, ["worker-2"])) == []
    orders = play.hear(2, ms.Unreached(2, ["worker-1"]))
    assert of(ms.Kill, orders) == [ms.Kill(2, "worker-2 has no connection with worker-1")]


def test_a_seat_that_was_out_of_reach_rests_longer_each_time() -> None:
    play = forming()
    waits = []
    for life in range(50, 53):
        play.hear(0, ms.Unreached(play.it.term, ["worker-2"]))
        play.hear(1, ms.Unreached(play.it.term, ["worker-2"]))
        play.hear(2, ms.Unreached(play.it.term, ["worker-0", "worker-1"]))
        assert of(ms.Start, play.tell(ms.Ended(2, "was killed"))) == []
        play.ready(0, 8, holds=True)
        play.ready(1, 8, holds=True)
        play.form()
        begun = play.now
        while not of(ms.Start, play.after(0.5)):
            assert play.now - begun < 100
        waits.append(play.now - begun)
        play.come(2, life=life)
        play.after(0.1)
        play.ready(0, 8, holds=True)
        play.ready(1, 8, holds=True)
        assert "worker-2" in play.it.members
    assert waits == [5.0, 10.0, 20.0]
    play.form()
    assert of(ms.Start, play.tell(ms.Ended(2, "was killed"))) == [ms.Start(2)]


def test_a_seat_does_not_rest_where_the_run_needs_it() -> None:
    play = running(2, least=2)
    for seat in range(2):
        play.ready(seat, 8, holds=True)
    play.hear(0, ms.Unreached(play.it.term, ["worker-1"]))
    play.hear(1, ms.Unreached(play.it.term, ["worker-0"]))
    assert of(ms.Start, play.tell(ms.Ended(1, "was killed"))) == [ms.Start(1)]


def test_of_two_the_higher_rank_is_expelled_after_three_seconds() -> None:
    play = forming()
    play.hear(0, ms.Unreached(2, ["worker-1"]))
    assert of(ms.Kill, play.after(2.9)) == []
    assert [kill.seat for kill in of(ms.Kill, play.after(0.2))] == [1]


def test_ten_terms_that_never_stood_end_the_run() -> None:
    play = forming(2)
    for _ in range(9):
        assert of(ms.Fail, play.hear(0, ms.Unreached(play.it.term, []))) == []
        play.ready(0, 8, holds=True)
        play.ready(1, 8, holds=True)
    play.hear(0, ms.Unreached(play.it.term, []))
    play.ready(0, 8, holds=True)
    [fail] = of(ms.Fail, play.ready(1, 8, holds=True))
    assert "10 groups of workers in a row did not come to stand" in fail.text


def test_one_that_formed_a_failed_term_is_told_to_leave_it() -> None:
    play = forming(2)
    play.ready(1, 8, holds=True)
    assert of(ms.Regroup, play.hear(0, ms.Formed(2))) == [ms.Regroup(2, now=True)]


# -- the end, and restarts ---------------------------------------------------------------------------------------------


def test_done_completes_the_run_for_all() -> None:
    play = running(3)
    play.hear(0, ms.Done())
    assert play.it.complete
    assert told(ms.Finish, play.ready(1, 20, holds=True)) == ["worker-1"]
    assert play.tell(ms.Ended(2, "was killed")) == [] and play.after(60.0) == []
    assert told(ms.Refused, play.ask(2)) == [ms.OPERATOR]
    assert play.restart().complete


def test_a_term_that_stood_goes_on_after_a_restart() -> None:
    play = running(3)
    play.restart()
    assert [order for order in play.after(0.1) if not isinstance(order, ms.Changed)] == []
    assert (play.it.term, len(play.it.members)) == (1, 3)
    assert play.tell(ms.Present([0, 1, 2])) == []
    assert told(ms.Regroup, play.tell(ms.Ended(0, "was killed"))) == ["worker-1", "worker-2"]


def test_a_term_that_did_not_stand_is_left_after_a_restart() -> None:
    play = forming(2)
    play.restart()
    assert of(ms.Regroup, play.after(0.1)) == [ms.Regroup(2, now=True)] * 2
    play.ready(0, 8, holds=True)
    assert of(ms.Term, play.ready(1, 8, holds=True))[0].number == 3


def test_those_not_present_after_a_restart_are_lost_and_replaced() -> None:
    play = running(3)
    play.restart()
    assert of(ms.Start, play.after(1.0)) == []
    orders = play.tell(ms.Present([0, 2]))
    assert told(ms.Regroup, orders) == ["worker-0", "worker-2"] and of(ms.Start, orders) == [ms.Start(1)]


def test_a_kill_that_may_not_have_left_is_ordered_again() -> None:
    play = running(3)
    play.silent(1)
    play.tell(ms.Looked(1, ms.STOPPED))
    play.restart()
    assert [kill.seat for kill in of(ms.Kill, play.tell(ms.Present([0, 1, 2])))] == [1]


def test_a_number_that_somebody_has_heard_of_is_not_used_again() -> None:
    play = running(2)
    play.ready(0, 8, holds=True, term=9)
    play.ready(1, 8, holds=True, term=9)
    assert play.it.term == 10


def test_without_a_supervisor_nobody_is_started_or_killed() -> None:
    play = running(3)
    play.it.orphaned(play.now)
    assert of(ms.Look, play.silent(1)) == []
    orders = play.tell(ms.Ended(1, "was killed"))
    assert of(ms.Start, orders) == [] and told(ms.Regroup, orders) == ["worker-0", "worker-2"]
