"""A worker that waits for one which has finished: its wait is ended, and no other."""

from __future__ import annotations

from shoal.elastic.board import Board, Phase
from shoal.trainer.vigil import Vigil


class Seen:
    """Worker 1 of three, and what its vigil says. No thread: each look is a call."""

    def __init__(self) -> None:
        board = Board(3)
        self.places = [board.place(worker) for worker in range(3)]
        for place in self.places:
            place.begin(1)
            place.enter(Phase.EXCHANGE, 4)  # all have this one in common
        self.told: list[str] = []
        self.ended: list[str] = []
        self.vigil = Vigil(board, 1, 3, 60.0, self.told.append, self.ended.append, lambda: "session.gather")

    def look(self, times: int) -> None:
        for _ in range(times):
            self.vigil.look(self.places[1].sight().since + 1000.0)


def test_a_wait_for_a_worker_that_has_finished_is_ended_once() -> None:
    seen = Seen()
    seen.places[0].done()
    seen.places[1].enter(Phase.EXCHANGE, 4)
    seen.look(2)
    assert seen.ended == []
    seen.look(5)
    assert seen.ended == [
        "worker 1 waits in session.gather for worker 0, which has finished; all workers must call the same operations "
        "in the same order"
    ]
    assert seen.told == []  # advice on slow workers would be beside the point


def test_several_that_have_finished_are_all_named() -> None:
    seen = Seen()
    seen.places[1].enter(Phase.EXCHANGE, 4)
    for worker in (0, 2):
        seen.places[worker].done()
    seen.look(3)
    assert "for worker 0 and worker 2, which have finished" in seen.ended[0]


def test_who_has_finished_the_same_exchange_is_not_waited_for_in_vain() -> None:
    seen = Seen()
    seen.places[0].done()
    seen.look(10)
    assert seen.ended == []


def test_another_wait_is_counted_anew() -> None:
    seen = Seen()
    seen.places[0].done()
    for _ in range(4):
        seen.places[1].enter(Phase.EXCHANGE, 4)
        seen.look(2)
    seen.places[1].enter(Phase.COMPUTE, 4)
    seen.look(10)
    assert seen.ended == []
