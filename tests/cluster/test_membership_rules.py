"""The membership state machine in a world of its own: any fault, at any moment, in any order.

After each, what must always hold is checked; at the end, that the run gets on once all faults are healed.
"""

from __future__ import annotations

from collections import deque
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shoal.cluster import messages as ms
from shoal.testing.membership_world import END, Worker, World, following

SEEDS = st.integers(0, 1 << 16)
SECONDS = st.sampled_from([0.0, 0.1, 0.3, 1.0, 4.0])
FAULTS = [
    "kill",
    "kill_the_one_others_copy_from",
    "stop_or_continue",
    "cut_from_coordinator_or_heal",
    "cut_two_apart",
    "lose_beats",
    "notice",
    "coordinator_dies",
    "coordinator_dies_before_it_orders",
    "scale",
    "install_another_version",
]


class Rules(RuleBasedStateMachine):
    """Any fault at any moment, between single deliveries and moves of single workers."""

    @initialize(
        shape=st.sampled_from([(3, 2, 5), (3, 1, 4), (4, 2, 4), (2, 1, 3), (1, 1, 4), (2, 2, 2)]),
        seconds=st.sampled_from([1.0, 0.5, 0.0]),
    )
    def start(self, shape: tuple[int, int, int], seconds: float) -> None:
        self.world = World(*shape)
        self.world.run(seconds)

    @rule(seconds=SECONDS)
    def goes_on(self, seconds: float) -> None:
        self.world.run(seconds)

    @rule(seed=SEEDS, count=st.integers(1, 80))
    def interleaves(self, seed: int, count: int) -> None:
        """Single deliveries and moves, in an order of its own."""
        world, random = self.world, Random(seed)
        for _ in range(count):
            if random.random() < 0.03:
                world.pass_time(0.05)
            elif random.random() < 0.2:
                random.choice([world.serve_engine, world.deliver_report])()
            elif world.workers:
                worker = random.choice(world.workers)
                random.choice([world.deliver_up, world.deliver_down, world.progress])(worker)

    @rule(faults=st.lists(st.tuples(st.sampled_from(FAULTS), SEEDS), min_size=1, max_size=3), then=SECONDS)
    def fails(self, faults: list[tuple[str, int]], then: float) -> None:
        """One fault, or several in the same moment; then time goes on with them."""
        for fault, seed in faults:
            getattr(self, fault)(Random(seed))
        if then:
            self.world.run(then)

    @rule()
    def heals(self) -> None:
        self.world.heal()

    # -- faults --------------------------------------------------------------------------------------------------------

    def some(self, random: Random) -> list[Worker]:
        """One living worker, if there is any."""
        alive = [worker for worker in self.world.workers if worker.alive]
        return random.sample(alive, min(1, len(alive)))

    def lose_beats(self, random: Random) -> None:
        for worker in self.some(random):
            worker.up = deque(body for body in worker.up if not isinstance(body, ms.Beat))

    def kill(self, random: Random) -> None:
        for worker in self.some(random):
            self.world.end(worker, computing=random.random() < 0.3)

    def kill_the_one_others_copy_from(self, random: Random) -> None:
        copying = [worker for worker in self.world.workers if worker.alive and worker.copying]
        for worker in copying[:1]:
            for first in self.world.living(self.world.groups[worker.taken].names[0]):
                self.world.end(first)

    def stop_or_continue(self, random: Random) -> None:
        for worker in self.some(random):
            worker.stopped = not worker.stopped

    def cut_from_coordinator_or_heal(self, random: Random) -> None:
        for worker in self.some(random):
            worker.deaf = not worker.deaf

    def cut_two_apart(self, random: Random) -> None:
        for one in self.some(random):
            for other in self.some(random):
                if one is not other:
                    self.world.cuts.add(frozenset((one.life, other.life)))

    def notice(self, random: Random) -> None:
        for worker in self.some(random):
            self.world.notice(worker)

    def coordinator_dies(self, random: Random) -> None:
        self.world.crash(letters_too=random.random() < 0.5)

    def coordinator_dies_before_it_orders(self, random: Random) -> None:
        self.world.crash_next = True

    def scale(self, random: Random) -> None:
        world, workers = self.world, random.randint(1, 6)
        if random.random() < 0.5:
            world.act(world.membership.hear(ms.OPERATOR, 1, ms.Scale(workers), world.now))
        else:
            world.from_engine.append(ms.Rescale(workers))

    def install_another_version(self, random: Random) -> None:
        self.world.wrong_versions = random.randint(1, 4)

    # -- what must hold ------------------------------------------------------------------------------------------------

    @precondition(lambda self: hasattr(self, "world"))
    @invariant()
    def positions_are_a_row(self) -> None:
        """Committed moves have no gap, and the term of each is not lower than that of the one before."""
        position, term = 0, 0
        for _ in self.world.committed:
            assert position in self.world.committed, f"position {position} was lost"
            assert self.world.committed[position] >= term
            term, position = self.world.committed[position], following(position)

    def teardown(self) -> None:
        """Once faults are healed the run gets on, or it has said why it cannot."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.heal()
        goal = min(world.furthest + 6, END - 1)
        assert world.run(120.0, enough=goal), f"no progress beyond {world.furthest}: {world.membership.record()!r}"


FAST = settings(
    max_examples=110,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def test_any_interleaving_of_faults_keeps_the_invariants() -> None:
    run_state_machine_as_test(Rules, settings=FAST)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_times_as_many_interleavings() -> None:
    run_state_machine_as_test(Rules, settings=settings(FAST, max_examples=1500, derandomize=False))
