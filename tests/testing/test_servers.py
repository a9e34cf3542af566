"""Ledgers of servers: what their audit must find."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.core.atoms import Course
from shoal.core.errors import ConfigError
from shoal.testing import FaultPlan
from shoal.testing.servers import ServerLedger, audit_servers, server_of

COURSE = Course(16, 8)
SAMPLES = COURSE.step(0).samples
WHOLE = [(0, 3), (3, SAMPLES)]


def write(
    folder: Path, server: int, step: int, *, ranges: list[tuple[int, int]], digest: str = "a", attempt: int = 1
) -> None:
    shards = {shard: (server == shard, digest, ranges) for shard in range(2)}
    ServerLedger(folder, attempt).write(server=server, term=1, step=step, shards=shards)


def problems(folder: Path, steps: int = 2) -> str:
    return "\n".join(audit_servers(folder, COURSE, steps).problems)


def test_a_run_in_which_all_is_well(tmp_path: Path) -> None:
    for step in range(2):
        for server in range(2):
            write(tmp_path, server, step, ranges=WHOLE, digest=str(step))
    found = audit_servers(tmp_path, COURSE, 2)
    assert not found.problems
    assert (found.records, found.processes, found.shards, found.attempts) == (8, 2, 2, 1)
    assert found.digests == {0: "1", 1: "1"}


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ([(0, 3)], f"positions 3 to {SAMPLES - 1} are missing"),
        ([(1, SAMPLES)], "positions 0 to 0 are missing"),
        ([(0, 3), (2, SAMPLES)], "positions 2 to 2 count twice"),
        ([(0, SAMPLES + 1)], f"positions up to {SAMPLES} count"),
    ],
)
def test_positions_that_do_not_count_once(ranges: list[tuple[int, int]], words: str, tmp_path: Path) -> None:
    write(tmp_path, 0, 0, ranges=WHOLE)
    write(tmp_path, 0, 1, ranges=ranges)
    assert f"shard 1, step 1, server 0: {words}" in problems(tmp_path)


def test_steps_that_are_missing_or_done_again(tmp_path: Path) -> None:
    write(tmp_path, 0, 0, ranges=WHOLE)
    assert "shard 0, step 1: no server has applied it" in problems(tmp_path)
    write(tmp_path, 0, 1, ranges=WHOLE)
    assert not problems(tmp_path)
    write(tmp_path, 0, 0, ranges=WHOLE)
    assert "applied step 0 after step 1: versions only grow" in problems(tmp_path)
    assert "it was applied, and the run has 1 steps" in problems(tmp_path, 1)


def test_copies_that_differ(tmp_path: Path) -> None:
    write(tmp_path, 0, 0, ranges=WHOLE)
    write(tmp_path, 1, 0, ranges=WHOLE, digest="b")
    assert "shard 0, step 0: the weights differ: server 0 (holder) a, server 1 (mirror) b" in problems(tmp_path, 1)
    assert not audit_servers(tmp_path, COURSE, 1, digests=False).problems


def test_another_attempt_may_end_elsewhere(tmp_path: Path) -> None:
    write(tmp_path, 0, 0, ranges=WHOLE)
    write(tmp_path, 1, 0, ranges=WHOLE, digest="b", attempt=2)
    found = audit_servers(tmp_path, COURSE, 1)
    assert not found.problems and found.attempts == 2


def test_names_and_points_of_servers(tmp_path: Path) -> None:
    assert [server_of(name) for name in ("server-0", "server-12", "server-01", "server-", "worker-1")] == [
        0,
        12,
        None,
        None,
        None,
    ]
    with pytest.raises(ConfigError, match="one of push, pushed, close, closed, apply, applied"):
        FaultPlan().kill("server-0", step=1, at="compute")
    plan = FaultPlan().stop("server-1", step=3, seconds=1.0, at="closed")
    assert [str(fault) for fault in plan.faults] == ["stop server-1 in step 3 at closed for 1 s"]
    with pytest.raises(ConfigError, match="holds no ledgers of servers"):
        audit_servers(tmp_path, COURSE, 1)
