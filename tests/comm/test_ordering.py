"""What groups synchronise, under load: nothing is read too early or too late."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shoal.comm.group import Done, Group, SoloGroup, Work
from shoal.testing.ordering import Board, Ordering, busy_cores
from shoal.testing.ranks import RanksFailed, run_ranks


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("collective", ["shm", "gloo"])
def test_nothing_is_read_too_early_or_too_late(collective: str, size: int) -> None:
    board = Board(size, 512)
    with busy_cores():
        seconds = 1.0 if collective == "shm" else 0.2
        rounds = run_ranks(
            size, lambda group: Ordering(group, board, 100_003, seed=4).run(seconds), collective=collective
        )
    assert len(set(rounds)) == 1 and rounds[0] >= 10


class Hasty:
    """A group that passes everything on but one operation, which it does not wait for."""

    def __init__(self, group: Group, skipped: str) -> None:
        self._group = group
        self._skipped = skipped

    def __getattr__(self, name: str) -> object:
        return getattr(self._group, name)

    def barrier(self) -> None:
        if self._skipped != "barrier":
            self._group.barrier()

    def sum(self, buffer: torch.Tensor, kind: str = "gradient") -> Work:
        return Done() if self._skipped == "sum" else self._group.sum(buffer, kind)


@pytest.mark.parametrize("skipped", ["barrier", "sum"])
def test_a_group_that_does_not_wait_is_caught(skipped: str) -> None:
    board = Board(2, 512)
    hasty: Callable[[Group], int] = lambda group: Ordering(Hasty(group, skipped), board, 1003, seed=4).run(1.0)  # type: ignore[arg-type]  # noqa: E731
    with pytest.raises(RanksFailed, match=r"(board|sum)[^\n]*, round \d+.* elements are wrong"):
        run_ranks(2, hasty, collective="shm")


def test_a_group_of_one_is_always_in_order() -> None:
    assert Ordering(SoloGroup(), Board(1, 8), 1003, seed=4).run(0.02) >= 10
