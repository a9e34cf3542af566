"""The clerk's book of leases: single rules, and a world of workers of any speed that join, stall, die and come back."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from shoal.core.atoms import Course
from shoal.core.pace import Estimate, deal, level, nearest
from shoal.syncs.server.leases import Book, Grant
from shoal.syncs.server.messages import Lease


@dataclass
class Hand:
    """A worker: computes when the servers have the version, then takes the newest work that it was told."""

    pace: float
    told: Grant | None = None
    lease: Lease | None = None
    begun: float = 0.0
    end: float = inf
    read: int = 0
    stalled: bool = False


@dataclass
class Sim:
    """Workers, servers and a clerk around a book, with a clock of their own."""

    book: Book
    apply_seconds: float = 0.01
    tell_seconds: float = 0.0
    now: float = 0.0
    hands: dict[int, Hand] = field(default_factory=dict)
    version: int = 0
    """Of the servers; the clerk hears of it later."""
    sums: dict[int, set[Lease]] = field(default_factory=dict)
    applying: float = inf
    telling: float = inf
    starts: list[tuple[int, Lease, float]] = field(default_factory=list)
    stale: list[int] = field(default_factory=list)
    """Of each lease that was begun: steps that its weights lacked."""
    ends: list[tuple[int, Lease, float]] = field(default_factory=list)
    repeated: int = 0

    def join(self, number: int, pace: float) -> None:
        self.hands[number] = Hand(pace)
        self.book.joined(number)

    def kill(self, number: int, pushed: bool = False) -> None:
        hand = self.hands.pop(number)
        if pushed and hand.lease is not None and hand.lease.step >= self.version:
            self.sums.setdefault(hand.lease.step, set()).add(hand.lease)
        self.book.left(number)

    def lose_server(self) -> None:
        """What is summed is gone, except of a step that is closed already."""
        first = self.version + (self.applying < inf)
        for step in [step for step in self.sums if step >= first]:
            del self.sums[step]
        self.book.undo(first)

    def clerk(self) -> None:
        for number, hand in self.hands.items():
            if hand.told is None and hand.lease is None:
                hand.told = self.book.ask(number, self.now)
            elif self.book.idle(number):
                grant = self.book.reassign(number, self.now) or self.book.refresh(number, self.now)
                hand.told = grant or hand.told
            self.begin(number)
        if self.applying == inf and self.telling == inf and (step := self.book.complete()) is not None:
            assert step == self.version
            self.applying = self.now + self.apply_seconds

    def begin(self, number: int) -> None:
        hand = self.hands[number]
        if hand.lease is not None or hand.told is None or hand.told.version > self.version or hand.stalled:
            return
        hand.lease, hand.told = hand.told.lease, None
        step = hand.lease.step
        assert step <= self.version + self.book.bound, "too far ahead of what is applied"
        assert self.version >= hand.read, "an older version than before"
        hand.read = self.version
        samples = hand.lease.stop - hand.lease.start
        hand.begun, hand.end = self.now, self.now + hand.pace * samples
        self.starts.append((number, hand.lease, self.now))
        self.stale.append(step - hand.read)

    def move(self) -> None:
        """The next thing happens."""
        self.clerk()
        ends = [hand.end for hand in self.hands.values() if not hand.stalled]
        look = self.book.next_look(self.now)
        assert look is None or look > self.now
        moment = min([self.applying, self.telling, inf if look is None else look, *ends])
        assert moment < inf, "nothing will ever happen again"
        self.now = max(self.now, moment)
        for number, hand in self.hands.items():
            if not hand.stalled and hand.lease is not None and hand.end <= self.now:
                lease, hand.lease, hand.end = hand.lease, None, inf
                if lease.step >= self.version:
                    self.sums.setdefault(lease.step, set()).add(lease)
                if not self.book.done(number, lease, self.now - hand.begun, self.now):
                    self.repeated += 1
                self.ends.append((number, lease, self.now))
        if self.applying <= self.now:
            self.apply()
        if self.telling <= self.now:
            self.telling = inf
            self.book.applied(self.version, self.now)

    def apply(self) -> None:
        samples = self.book.course.step(self.version).samples
        covered = sorted(each for lease in self.sums.pop(self.version) for each in range(lease.start, lease.stop))
        assert covered == list(range(samples)), "each position once"
        self.version += 1
        self.applying, self.telling = inf, self.now + self.tell_seconds
        for number in self.hands:
            self.begin(number)

    def run(self, moves: int = 3_000) -> None:
        for _ in range(moves):
            if self.version == self.book.total and self.telling == inf:
                return
            self.move()
        raise AssertionError(f"no end: at version {self.version} of {self.book.total} after {self.now} s")


def sim(
    paces: list[float], *, bound: int | None = 0, total: int = 12, batch: int = 96, calm: int = 0, **more: float
) -> Sim:
    book = Book(Course(batch * 5, batch), bound=bound, version=0, total=total, open_steps=4, calm=calm)
    world = Sim(book, **more)
    for number, pace in enumerate(paces):
        world.join(number, pace)
    return world


def sizes(world: Sim, step: int) -> dict[int, int]:
    counts: dict[int, int] = {}
    for number, lease, _ in world.starts:
        if lease.step == step:
            counts[number] = counts.get(number, 0) + lease.stop - lease.start
    return counts


@pytest.mark.parametrize("bound", [0, 2, None])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 7])
def test_equal_workers_get_one_equal_lease_a_step(workers: int, bound: int | None) -> None:
    world = sim([0.01] * workers, bound=bound)
    world.run()
    assert len(world.starts) == workers * 12
    for step in range(12):
        got = sizes(world, step)
        assert len(got) == workers
        assert max(got.values()) - min(got.values()) <= 1


def test_two_equal_workers_get_halves_at_once() -> None:
    world = sim([0.01, 0.01])
    assert world.book.ask(0, 0.0) == Grant(Lease(0, 0, 48), 0)
    assert world.book.ask(1, 0.0) == Grant(Lease(0, 48, 96), 0)
    assert world.book.ask(1, 0.0) is None


@pytest.mark.parametrize("bound", [0, 2])
def test_sizes_go_by_speed_and_all_end_together(bound: int) -> None:
    world = sim([0.01, 0.03], bound=bound, total=20)
    world.run()
    for step in range(8, 20):
        got = sizes(world, step)
        assert got == {0: 72, 1: 24} if bound == 0 else 20 <= got[1] <= 28
    assert len(world.starts) <= 20 * 2 + 2
    assert world.now < 20 * 96 * 0.0075 + 20 * 0.01 + 3.0


def test_a_change_of_speed_is_learned_in_a_few_steps() -> None:
    world = sim([0.01, 0.01], total=40)
    while world.version < 10:
        world.move()
    world.hands[1].pace = 0.03
    while world.version < 15:
        world.move()
    assert 24 <= sizes(world, 14)[1] <= 28
    world.hands[1].pace = 0.01
    while world.version < 22:
        world.move()
    assert 44 <= sizes(world, 21)[1] <= 52


def test_one_odd_measurement_changes_nothing_and_two_do() -> None:
    estimate = Estimate()
    for measured in (1.0, 1.0, 1.0, 9.0, 1.0):
        estimate.add(measured)
    assert estimate.value == 1.0
    estimate.add(9.0)
    estimate.add(0.1)
    assert estimate.value == 1.0
    estimate.add(0.1)
    assert estimate.value == pytest.approx(0.1)


def test_level_ends_together() -> None:
    end, parts = level(12, [(0.0, 2.0), (1.0, 1.0), (inf, 5.0), (100.0, 1.0)])
    assert end == pytest.approx(13 / 3)
    assert parts == pytest.approx([26 / 3, 10 / 3, 0, 0])


def test_parts_are_rounded_so_that_the_slow_one_is_not_the_last() -> None:
    assert nearest(1.5, 24, [(0.0, 5.0), (0.0, 25.0), (0.0, 25.0), (0.0, 25.0)]) == 1
    assert nearest(12.0, 24, [(0.0, 1.0), (0.0, 1.0)]) == 12


def test_whole_things_are_dealt_so_that_the_last_is_done_first() -> None:
    end, counts = deal(8, [(0.0, 1.0), (0.0, 1.0), (0.0, 1.0), (0.0, 0.2), (inf, 9.0)])
    assert end == 3.0 and sorted(counts) == [0, 0, 2, 3, 3] and counts[3:] == [0, 0]
    assert deal(3, [(10.0, 1.0), (0.0, 0.25)]) == (11.0, [1, 2])
    assert deal(0, [(5.0, 1.0), (4.0, 1.0)]) == (4.0, [0, 0])


@pytest.mark.parametrize("bound", [0, 2, None])
def test_small_differences_of_time_do_not_grow(bound: int | None) -> None:
    """Workers that are done at slightly different times still share the next step equally."""
    world = sim([0.01, 0.0102, 0.0104, 0.0106], bound=bound, total=40, tell_seconds=0.002)
    world.run()
    for step in range(4, 40):
        assert set(sizes(world, step).values()) <= set(range(20, 29))
    assert len(world.starts) == 160 and world.repeated == 0
    assert world.now < 40 * (96 * 0.0106 / 4 + 0.012) * 1.2


def test_a_very_slow_worker_sits_out_and_is_measured_again() -> None:
    world = sim([0.001, 0.2], total=400)
    world.run()
    first = next(end for number, _, end in world.ends if number == 1)
    probes = [(lease, start) for number, lease, start in world.starts if number == 1 and start >= first]
    assert 1 <= len(probes) <= 5
    assert all(lease.stop - lease.start == 4 for lease, _ in probes), "a grain"
    assert world.now < 400 * (0.096 + 0.01) * 1.15 + 2.0


@pytest.mark.parametrize("bound", [0, 2, None])
def test_who_would_hold_up_steps_sits_out_and_nothing_is_stale_for_it(bound: int | None) -> None:
    """Three workers need 0.6 s for a step, and the fourth 1.2 s for a grain of one sample."""
    world = sim([0.05, 0.05, 0.05, 1.2], bound=bound, batch=32, total=150, calm=5)
    world.run()
    first = next(end for number, _, end in world.ends if number == 3)
    probes = [lease for number, lease, start in world.starts if number == 3 and start >= first]
    assert 2 <= len(probes) <= 6, "measured again every 24 s"
    assert world.now < 150 * (0.6 + 0.01) + len(probes) * 1.3 + 5.0
    assert sum(stale > 0 for stale in world.stale) <= 4 * len(probes)


@pytest.mark.parametrize("bound", [2, None])
def test_who_is_only_a_little_slow_does_not_sit_out(bound: int | None) -> None:
    """A grain takes it 5% longer than the three others need for all of them: that may be a slow moment."""
    world = sim([0.05, 0.05, 0.05, 0.58], bound=bound, batch=32, total=50)
    world.run()
    # its first range is an equal share, and takes as long as several steps
    assert all(sizes(world, step).get(3) == 1 for step in range(10, 50))


@pytest.mark.parametrize("bound", [1, 2, None])
def test_in_the_first_steps_nothing_is_stale_whoever_stalls(bound: int | None) -> None:
    world = sim([0.01, 0.03, 0.2], bound=bound, total=40, calm=8)
    while world.version < 3:
        world.move()
    world.clerk()
    world.hands[0].stalled = True
    while world.version < 40:
        world.move()
    began = [lease.step for _, lease, _ in world.starts]
    assert not any(stale for step, stale in zip(began, world.stale, strict=True) if step < 8)


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 8, 20])
@pytest.mark.parametrize("paces", [[0.01], [0.01, 0.011], [0.01, 0.1], [0.01] * 5, [0.01, 0.02, 0.2]], ids=str)
def test_leases_have_enough_samples_where_there_are_enough(paces: list[float], batch: int) -> None:
    """BatchNorm cannot compute a single one."""
    book = Book(Course(batch * 5 + batch // 2, batch), bound=2, version=0, total=24, open_steps=4, least=2)
    world = Sim(book)
    for number, pace in enumerate(paces):
        world.join(number, pace)
    world.run()
    for _, lease, _ in world.starts:
        assert lease.stop - lease.start >= min(2, book.course.step(lease.step).samples)


@pytest.mark.parametrize(
    ("batch", "workers", "shares"), [(64, 3, [22, 21, 21]), (10, 4, [3, 3, 2, 2]), (500, 60, None)]
)
def test_equal_shares_are_to_the_sample(batch: int, workers: int, shares: list[int] | None) -> None:
    world = sim([0.01] * workers, batch=batch, total=6)
    world.run()
    for step in range(6):
        got = sorted(sizes(world, step).values(), reverse=True)
        assert len(got) == workers and max(got) - min(got) <= 1
        assert shares is None or got == shares


def test_a_range_repeats_until_another_one_is_worth_it() -> None:
    """Times vary by 2% from step to step; what is read ahead is then right all the same."""
    world = sim([0.01, 0.0133], total=60)
    for step in range(60):
        while world.version <= step:
            world.move()
        world.hands[0].pace = 0.01 * (1.0 + 0.02 * (step % 3 - 1))
    ranges = [lease for number, lease, _ in world.starts if number == 0 and lease.step >= 5]
    assert len({(lease.start, lease.stop) for lease in ranges}) == 1
    assert 52 <= ranges[-1].stop - ranges[-1].start <= 60


def test_without_pace_shares_are_equal_whatever_the_speeds() -> None:
    world = sim([0.01, 0.1, 0.03], total=12)
    world.book.paced = False
    world.run()
    assert {(lease.start, lease.stop) for _, lease, _ in world.starts} == {(0, 32), (32, 64), (64, 96)}
    assert len(sizes(world, 11)) == 3 or world.repeated == 0


def test_leases_of_the_dead_are_given_again_unchanged() -> None:
    world = sim([0.01, 0.02])
    world.move()
    world.kill(1)
    assert world.book.ask(0, world.now) == Grant(Lease(0, 48, 96), 0)


def test_a_worker_that_waits_ahead_takes_over_what_a_dead_one_leaves() -> None:
    book = Book(Course(960, 96), bound=0, version=0, total=5, open_steps=1)
    book.joined(0)
    book.joined(1)
    assert book.ask(0, 0.0) and book.ask(1, 0.0)
    assert book.done(0, Lease(0, 0, 48), 1.0, 1.0)
    assert book.ask(0, 1.0) == Grant(Lease(1, 0, 48), 1)
    assert book.idle(0) and book.reassign(0, 1.0) is None
    book.left(1)
    assert book.reassign(0, 1.1) == Grant(Lease(0, 48, 96), 0)
    assert not book.idle(0)
    assert book.done(0, Lease(0, 48, 96), 1.0, 2.1)
    assert book.complete() == 0
    book.applied(1, 2.2)
    assert book.ask(0, 2.2) == Grant(Lease(1, 0, 48), 1)


def test_without_ahead_nothing_is_granted_early() -> None:
    book = Book(Course(960, 96), bound=0, version=0, total=5, open_steps=1, ahead=False)
    book.joined(0)
    book.joined(1)
    assert book.ask(0, 0.0) and book.ask(1, 0.0)
    book.done(0, Lease(0, 0, 48), 1.0, 1.0)
    assert book.ask(0, 1.0) is None


def test_an_overdue_lease_is_given_a_second_time_and_counts_once() -> None:
    world = sim([0.01, 0.01], total=8)
    while world.version < 3:
        world.move()
    world.clerk()
    world.hands[1].stalled = True
    while world.version < 6:
        world.move()
    assert world.now < 3 * 0.5 + 3 * 0.48 + 5 * 1.0
    world.hands[1].stalled = False
    world.run()
    assert world.repeated == 1


def test_fresh_weights_are_waited_for_only_as_long_as_they_are_expected() -> None:
    book = Book(Course(960, 96), bound=2, version=0, total=9, open_steps=4)
    book.joined(0)
    book.joined(1)
    assert book.ask(0, 0.0) and book.ask(1, 0.0)
    book.done(0, Lease(0, 0, 48), 1.0, 1.0)
    grant = book.ask(0, 1.0)
    assert grant is not None and grant.version == 1 and grant.lease.step == 1
    assert book.refresh(0, 1.0) is None
    look = book.next_look(1.0)
    assert look is not None and 1.0 < look <= 1.5
    assert book.refresh(0, 1.6) == Grant(grant.lease, 0)
    assert not book.idle(0)


def test_weights_that_only_have_to_be_applied_are_waited_for_however_long() -> None:
    """Servers that are behind do not catch up by more gradients."""
    book = Book(Course(960, 96), bound=2, version=0, total=9, open_steps=4)
    book.joined(0)
    book.joined(1)
    assert book.ask(0, 0.0) and book.ask(1, 0.0)
    book.done(0, Lease(0, 0, 48), 1.0, 1.0)
    book.done(1, Lease(0, 48, 96), 1.0, 1.0)
    grant = book.ask(0, 1.0)
    assert grant is not None and grant.version == 1 and grant.lease.step == 1
    assert book.refresh(0, 9.0) is None and book.idle(0)
    book.undo(0)
    assert book.reassign(0, 9.0) == Grant(Lease(0, 0, 48), 0)


def test_weights_that_will_not_come_soon_are_not_waited_for() -> None:
    world = sim([0.01, 0.01], bound=3, total=9)
    while world.version < 2:
        world.move()
    world.hands[1].stalled = True
    while all(lease.step < 3 for _, lease, _ in world.starts):
        world.move()
    assert world.version < 3


def test_undo_makes_all_ranges_count_again() -> None:
    book = Book(Course(960, 96), bound=1, version=0, total=5, open_steps=2)
    book.joined(0)
    assert book.ask(0, 0.0) == Grant(Lease(0, 0, 96), 0)
    assert book.done(0, Lease(0, 0, 96), 1.0, 1.0)
    assert book.complete() == 0
    book.undo(0)
    assert book.complete() is None
    assert book.ask(0, 1.0) == Grant(Lease(0, 0, 96), 0)
    assert book.done(0, Lease(0, 0, 96), 1.0, 2.0)
    assert not book.done(0, Lease(0, 0, 96), 1.0, 2.0)


def test_what_nobody_was_given_is_refused() -> None:
    world = sim([0.01])
    with pytest.raises(ValueError, match="nobody was given"):
        world.book.done(0, Lease(0, 0, 12), 1.0, 1.0)
    with pytest.raises(ValueError, match="not all of it is done"):
        world.book.applied(1)


PACES = st.sampled_from([0.0001, 0.001, 0.01, 0.011, 0.03, 0.3])
SEATS = st.integers(0, 5)


class Rules(RuleBasedStateMachine):
    """Anything that can happen to workers and servers, between any two events; `Sim` checks what must always hold."""

    @initialize(
        bound=st.sampled_from([0, 0, 1, 3, None]),
        open_steps=st.integers(1, 5),
        batch=st.sampled_from([1, 3, 10, 96, 200]),
        ahead=st.booleans(),
        calm=st.sampled_from([0, 0, 4]),
        paced=st.booleans(),
        paces=st.lists(PACES, min_size=1, max_size=5),
        apply_seconds=st.sampled_from([0.0, 0.01, 1.0]),
        tell_seconds=st.sampled_from([0.0, 0.01, 0.3]),
    )
    def start(
        self,
        bound: int | None,
        open_steps: int,
        batch: int,
        ahead: bool,
        calm: int,
        paced: bool,
        paces: list[float],
        apply_seconds: float,
        tell_seconds: float,
    ) -> None:
        course = Course(batch * 3 + batch // 2, batch)
        book = Book(course, bound=bound, version=0, total=14, open_steps=open_steps, ahead=ahead, calm=calm)
        book.paced = paced
        assert book.bound < open_steps and (bound is None or book.bound <= bound)
        self.sim = Sim(book, apply_seconds, tell_seconds)
        for number, pace in enumerate(paces):
            self.sim.join(number, pace)

    def ended(self) -> bool:
        return self.sim.version == self.sim.book.total

    @rule(moves=st.integers(1, 30))
    def goes_on(self, moves: int) -> None:
        for _ in range(moves):
            if not self.ended() and any(not hand.stalled for hand in self.sim.hands.values()):
                self.sim.move()

    @rule(number=SEATS, pace=PACES)
    def joins_or_changes_speed(self, number: int, pace: float) -> None:
        if number in self.sim.hands:
            self.sim.hands[number].pace = pace
        else:
            self.sim.join(number, pace)

    @rule(number=SEATS, pushed=st.booleans())
    def dies(self, number: int, pushed: bool) -> None:
        if number in self.sim.hands:
            self.sim.kill(number, pushed)

    @rule(number=SEATS)
    def stalls_or_comes_back(self, number: int) -> None:
        if number in self.sim.hands:
            self.sim.hands[number].stalled ^= True

    @rule()
    def loses_a_server(self) -> None:
        if not self.ended() and self.sim.telling == inf:
            self.sim.lose_server()

    @rule(seconds=st.sampled_from([0.0, 0.01, 2.0]))
    def applies_take(self, seconds: float) -> None:
        self.sim.apply_seconds = seconds

    def teardown(self) -> None:
        """As long as one worker lives and computes, the run ends."""
        if not hasattr(self, "sim"):
            return
        if all(hand.stalled for hand in self.sim.hands.values()):
            self.sim.join(9, 0.01)
        self.sim.run()


FAST = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],  # Making a failure small takes minutes here.
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


def test_any_world() -> None:
    run_state_machine_as_test(Rules, settings=FAST)


@pytest.mark.slow
def test_many_worlds() -> None:
    run_state_machine_as_test(Rules, settings=settings(FAST, max_examples=2000, derandomize=False))
