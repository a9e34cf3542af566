"""A journal: what was told to be on the disk is there again, wherever the process was killed."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.core.errors import RunDirError
from shoal.data.parcel import to_bytes
from shoal.syncs.server import journal as journal_module
from shoal.syncs.server.journal import Journal, Replayed, recover
from shoal.syncs.server.messages import Apply, Lease, Record
from shoal.syncs.server.setup import Setup
from shoal.syncs.server.shard import Holding
from shoal.syncs.server.used import pack_used

from .setups import gradient, hold, make_setup, part, samples

ALL = pack_used([True] * 4)
SHARDS = (0, 2)


def order(step: int, **more: Any) -> Apply:
    return Apply(step=step, scale=0.5, loss=math.nan, **more)


def close_step(setup: Setup, holdings: dict[int, Holding], step: int) -> list[tuple[int, Record, Tensor]]:
    lease = Lease(step, 0, samples(setup, step))
    closed = []
    for shard, holding in holdings.items():
        holding.take(lease, part(setup, gradient(setup, lease), shard), ALL, 1.0, torch.empty_like(holding.weights))
        closed.append((shard, holding.close(step), holding.sum_of(step)))
    return closed


def run_step(setup: Setup, holdings: dict[int, Holding], journal: Journal, step: int, **more: Any) -> None:
    journal.closed(step, close_step(setup, holdings, step))
    for holding in holdings.values():
        holding.apply(order(step, **more))
    journal.applied(order(step, **more))


def start(setup: Setup) -> dict[int, Holding]:
    return {shard: hold(setup, shard) for shard in SHARDS}


def states(holdings: dict[int, Holding]) -> dict[int, dict[str, Any]]:
    return {shard: holding.state() for shard, holding in holdings.items()}


def again(setup: Setup, folder: Path) -> tuple[dict[int, Holding], Replayed]:
    """What a new process makes of the folder."""
    journal = Journal(folder)
    try:
        replayed = journal.replay()
        assert replayed is not None
        holdings = start(setup)
        recover(replayed, holdings)
        return holdings, replayed
    finally:
        journal.close()


def same(one: dict[int, Holding], other: dict[int, Holding]) -> bool:
    return all(
        one[shard].version == other[shard].version
        and one[shard].ledger() == other[shard].ledger()
        and torch.equal(one[shard].weights, other[shard].weights)
        for shard in SHARDS
    )


def log_of(folder: Path) -> Path:
    (log,) = folder.glob("log-*")
    return log


def test_a_new_process_is_where_the_old_one_was(tmp_path: Path) -> None:
    setup = make_setup(durability="disk")
    holdings = start(setup)
    journal = Journal(tmp_path / "deep" / "server-0")
    journal.begin(states(holdings))
    for step in range(3):
        run_step(setup, holdings, journal, step)
    closed = close_step(setup, holdings, 3)
    journal.closed(3, closed)
    journal.close()

    new, replayed = again(setup, tmp_path / "deep" / "server-0")
    assert same(new, holdings)
    assert sorted(replayed.states) == list(SHARDS)
    assert [one.record.step for one in replayed.closed] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [one.step for one in replayed.orders] == [0, 1, 2]
    assert all(one.is_closed(3) for one in new.values())
    for one in (*new.values(), *holdings.values()):
        one.apply(order(3))
    assert same(new, holdings)


def test_what_follows_a_replay_is_added(tmp_path: Path) -> None:
    setup = make_setup(durability="disk")
    holdings = start(setup)
    journal = Journal(tmp_path)
    journal.begin(states(holdings))
    for step in range(4):
        run_step(setup, holdings, journal, step)
        journal.close()
        with log_of(tmp_path).open("ab") as file:
            file.write(b"SHJOURN1 torn")
        journal = Journal(tmp_path)
        replayed = journal.replay()
        assert replayed is not None
        holdings = start(setup)
        recover(replayed, holdings)
        assert {one.version for one in holdings.values()} == {step + 1}
    journal.close()


def test_wherever_the_log_is_torn_what_is_whole_counts(tmp_path: Path) -> None:
    setup = make_setup(durability="disk")
    holdings = start(setup)
    journal = Journal(tmp_path)
    journal.begin(states(holdings))
    ends = []
    for step in range(2):
        run_step(setup, holdings, journal, step)
        ends.append(log_of(tmp_path).stat().st_size)
    journal.close()
    content = log_of(tmp_path).read_bytes()
    places = sorted({*range(0, len(content), 997), *(end + more for end in ends for more in (-64, -1, 0, 1))})
    for place in places:
        log_of(tmp_path).write_bytes(content[:place])
        new, _ = again(setup, tmp_path)
        expected = sum(place >= end for end in ends)
        assert {one.version for one in new.values()} == {expected}


@pytest.mark.parametrize("where", ["magic", "length", "check", "head", "body", "last"])
def test_a_bit_that_flipped_ends_the_log(tmp_path: Path, where: str) -> None:
    setup = make_setup(durability="disk")
    holdings = start(setup)
    journal = Journal(tmp_path)
    journal.begin(states(holdings))
    run_step(setup, holdings, journal, 0)
    end = log_of(tmp_path).stat().st_size
    run_step(setup, holdings, journal, 1)
    journal.close()
    content = bytearray(log_of(tmp_path).read_bytes())
    place = end + {"magic": 0, "length": 23, "check": 24, "head": 64, "body": 1000}.get(where, len(content) - end - 70)
    content[place] ^= 0x80
    log_of(tmp_path).write_bytes(content)
    new, replayed = again(setup, tmp_path)
    last = where == "last"  # the padded head of the last record: the closed sum before it is whole
    assert {one.version for one in new.values()} == {1}
    assert [one.record.step for one in replayed.closed] == ([0, 0, 1, 1] if last else [0, 0])


def test_it_is_begun_anew_when_it_has_grown(tmp_path: Path) -> None:
    setup = make_setup(durability="disk", total=200)
    holdings = start(setup)
    journal = Journal(tmp_path)
    journal.begin(states(holdings))
    snapshot = next(tmp_path.glob("snapshot-*")).stat().st_size
    step = 0
    while not journal.grown:
        assert log_of(tmp_path).stat().st_size <= 4 * snapshot
        run_step(setup, holdings, journal, step)
        step += 1
    journal.closed(step, close_step(setup, holdings, step))
    journal.compact(states(holdings))
    assert not journal.grown
    assert log_of(tmp_path).stat().st_size == 0
    assert len(list(tmp_path.glob("snapshot-*"))) == 1
    for holding in holdings.values():
        holding.apply(order(step))
    journal.applied(order(step))
    journal.close()
    new, _ = again(setup, tmp_path)
    assert same(new, holdings)


def test_killed_while_it_is_begun_anew_it_has_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = make_setup(durability="disk")

    class Killed(BaseException):
        pass

    for number in range(100):
        folder = tmp_path / str(number)
        holdings = start(setup)
        journal = Journal(folder)
        journal.begin(states(holdings))
        run_step(setup, holdings, journal, 0)
        left = number
        with monkeypatch.context() as patch:

            def dies(call: Any) -> Any:
                def instead(*args: Any, **kwargs: Any) -> Any:
                    nonlocal left
                    left -= 1
                    if left < 0:
                        raise Killed
                    return call(*args, **kwargs)

                return instead

            for name in ("open", "pwrite", "fsync", "replace"):
                patch.setattr(journal_module.os, name, dies(getattr(os, name)))
            patch.setattr(Path, "unlink", dies(Path.unlink))
            try:
                journal.compact(states(holdings))
                finished = True
            except Killed:
                finished = False
        journal.close()
        new, _ = again(setup, folder)
        assert same(new, holdings)
        if finished:
            break
    assert finished and number > 10


def test_gradients_that_were_applied_when_they_came_are_replayed_in_order(tmp_path: Path) -> None:
    def make_schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    setup = make_setup(durability="disk", apply="arrival", make_schedule=make_schedule)
    holdings = start(setup)
    journal = Journal(tmp_path)
    journal.begin(states(holdings))
    for lease in (Lease(0, 0, 3), Lease(1, 4, 8), Lease(0, 3, 8), None, Lease(1, 0, 4), Lease(2, 0, 2)):
        if lease is None:
            for holding in holdings.values():
                holding.apply(order(0))
            journal.applied(order(0))
            continue
        for shard, holding in holdings.items():
            into = torch.empty_like(holding.weights)
            record = holding.arrive(lease, part(setup, gradient(setup, lease), shard), ALL, 0.7, 0.5, into)
            assert record is not None
            journal.closed(lease.step, [(shard, record, into)])
    journal.close()
    new, _ = again(setup, tmp_path)
    assert same(new, holdings)
    assert all(one.has(Lease(2, 0, 2)) for one in new.values())


def test_of_kept_versions_the_last_ones_are_kept_again(tmp_path: Path) -> None:
    """Also those from before it was compacted."""
    setup = make_setup(durability="disk")
    holdings = start(setup)
    journal = Journal(tmp_path)
    journal.begin(states(holdings))
    for step in range(4):
        run_step(setup, holdings, journal, step, keep=step in (0, 1, 2), state=True)
        if step == 1:
            journal.compact(states(holdings))
    journal.close()
    new, _ = again(setup, tmp_path)
    for shard in SHARDS:
        assert [new[shard].keeps(version) for version in range(5)] == [False, False, True, True, False]
        for version in (2, 3):
            assert to_bytes(new[shard].kept(version)) == to_bytes(holdings[shard].kept(version))


def test_one_server_at_a_time(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    try:
        with pytest.raises(RunDirError, match="in use by another server"):
            Journal(tmp_path)
    finally:
        journal.close()
    Journal(tmp_path).close()


def test_an_empty_folder_has_nothing_to_replay(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.replay() is None
    with pytest.raises(ValueError, match="before begin"):
        journal.applied(order(0))
    journal.close()


def test_a_full_disk_is_told_and_what_was_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = make_setup(durability="disk")
    holdings = start(setup)
    journal = Journal(tmp_path)
    journal.begin(states(holdings))
    run_step(setup, holdings, journal, 0)
    size = log_of(tmp_path).stat().st_size
    closed = close_step(setup, holdings, 1)
    real, left = os.pwrite, 3

    def pwrite(file: int, data: memoryview, at: int) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data[: max(1, len(data) // 2)], at)

    with monkeypatch.context() as patch:
        patch.setattr(journal_module.os, "pwrite", pwrite)
        with pytest.raises(RunDirError, match="No space left"):
            journal.closed(1, closed)
    assert log_of(tmp_path).stat().st_size == size
    journal.closed(1, closed)
    journal.close()
    new, _ = again(setup, tmp_path)
    assert all(one.is_closed(1) and one.version == 1 for one in new.values())


def test_a_snapshot_that_is_damaged_is_not_used(tmp_path: Path) -> None:
    setup = make_setup(durability="disk")
    journal = Journal(tmp_path)
    journal.begin(states(start(setup)))
    journal.close()
    (snapshot,) = tmp_path.glob("snapshot-*")
    content = bytearray(snapshot.read_bytes())
    content[len(content) // 2] ^= 1
    snapshot.write_bytes(content)
    journal = Journal(tmp_path)
    assert journal.replay() is None
    journal.close()


def test_a_record_of_another_step_is_refused(tmp_path: Path) -> None:
    setup = make_setup(durability="disk")
    holdings = start(setup)
    journal = Journal(tmp_path)
    journal.begin(states(holdings))
    with pytest.raises(ValueError, match="not of step 1"):
        journal.closed(1, close_step(setup, holdings, 0))
    journal.close()


def test_what_stood_behind_a_damaged_record_does_not_come_back(tmp_path: Path) -> None:
    """Records have equal sizes: one that replaces the damaged one would end where the next old one begins."""
    setup = make_setup(durability="disk")
    holdings = start(setup)
    journal = Journal(tmp_path)
    journal.begin(states(holdings))
    ends = []
    for step in range(3):
        run_step(setup, holdings, journal, step)
        ends.append(log_of(tmp_path).stat().st_size)
    journal.close()
    content = bytearray(log_of(tmp_path).read_bytes())
    content[ends[0] + 1000] ^= 1
    log_of(tmp_path).write_bytes(content)

    holdings, _ = again(setup, tmp_path)
    assert log_of(tmp_path).stat().st_size == ends[0]
    journal = Journal(tmp_path)
    journal.replay()
    run_step(setup, holdings, journal, 1)
    journal.close()
    assert log_of(tmp_path).stat().st_size == ends[1]
    new, replayed = again(setup, tmp_path)
    assert same(new, holdings)
    assert [one.record.step for one in replayed.closed] == [0, 0, 1, 1]
