from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch

from shoal.comm.group import Group
from shoal.testing.ranks import RanksFailed, die, run_ranks


def test_values_come_back_in_order_of_rank() -> None:
    def fn(group: Group) -> dict[str, Any]:
        return {"rank": group.rank, "tensor": torch.full((2,), float(group.rank)), "pid": os.getpid()}

    values = run_ranks(3, fn)
    assert [value["rank"] for value in values] == [0, 1, 2]
    assert [value["tensor"].tolist() for value in values] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    assert len({value["pid"] for value in values} | {os.getpid()}) == 4


def test_the_traceback_of_every_rank_is_shown() -> None:
    def fn(group: Group) -> int:
        if group.rank != 1:
            raise LookupError(f"nothing on {group.rank}")
        return 5

    with pytest.raises(RanksFailed) as error:
        run_ranks(3, fn)
    text = str(error.value)
    assert "rank 0: Traceback" in text and "LookupError: nothing on 0" in text and "LookupError: nothing on 2" in text
    assert "rank 1: returned" in text


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(RanksFailed, match="rank 1: was killed by SIGKILL"):
        run_ranks(2, lambda group: die() if group.rank == 1 else None)
    with pytest.raises(RanksFailed, match="rank 0: left with exit code 3"):
        run_ranks(2, lambda group: os._exit(3) if group.rank == 0 else None)


def test_a_rank_that_may_die_has_no_value() -> None:
    assert run_ranks(2, lambda group: die() if group.rank == 1 else "here", mortal=[1]) == ["here", None]


def test_a_rank_that_hangs_is_ended_and_shows_where() -> None:
    def wait_forever_and_ever(group: Group) -> None:
        if group.rank == 1:
            time.sleep(1000)

    begun = time.monotonic()
    with pytest.raises(RanksFailed) as error:
        run_ranks(2, wait_forever_and_ever, deadline=1.0)
    assert time.monotonic() - begun < 5
    assert "rank 1: not done after 1 s" in str(error.value)
    assert "wait_forever_and_ever" in str(error.value)


def test_a_value_that_cannot_travel_is_an_error() -> None:
    with pytest.raises(RanksFailed, match="object"):
        run_ranks(1, lambda group: object())
