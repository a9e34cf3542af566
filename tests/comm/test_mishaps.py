"""What members do wrong, or what happens to them: an error on all of them, never a wrong sum or an endless wait."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from socket import create_connection, create_server
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.comm import backend
from shoal.comm.connections import Connections
from shoal.comm.group import Group
from shoal.comm.shm import shared
from shoal.core.errors import ConfigError, GroupError
from shoal.testing.lab import Lab, why_no_lab
from shoal.testing.ranks import die, run_ranks

needs_lab = pytest.mark.skipif(why_no_lab() is not None, reason=f"no lab: {why_no_lab()}")


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(hosts=2) as made:
        yield made


def said(act: Callable[[], Any]) -> str:
    """The message of the `GroupError` that `act` raises; empty if it raises none."""
    try:
        act()
    except GroupError as error:
        return str(error)
    return ""


# -- out of step -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [0, 64, 70])
def test_a_member_that_sums_while_another_gathers(before: int) -> None:
    """Also where the place of its note still holds an equal one from 64 operations ago."""

    def fn(group: Group) -> str:
        buffer = group.buffer(100_000, torch.float32)
        for _ in range(before):
            group.sum(buffer).wait()
        if group.rank == 0:
            return said(lambda: group.sum(buffer).wait())
        return said(lambda: group.gather(torch.zeros(8)))

    first, second = run_ranks(2, fn)
    assert "broke" in first and "broke" in second
    assert "all workers must call the same operations in the same order" in first + second
    assert "a sum of 400000 bytes of float32" in first + second


def test_members_that_sum_different_sizes_are_told_both() -> None:
    def fn(group: Group) -> str:
        buffer = group.buffer(1000, torch.float32)
        return said(lambda: group.sum(buffer[: 100 * (group.rank + 1)]).wait())

    told = " ".join(run_ranks(2, fn))
    assert "a sum of 400 bytes of float32" in told and "a sum of 800 bytes of float32" in told


@pytest.mark.parametrize("other", ["broadcast", "barrier", "scatter_sum", "swap"])
def test_members_in_different_operations(other: str) -> None:
    def fn(group: Group) -> str:
        if group.rank == 0:
            return said(lambda: group.gather(torch.zeros(2)))
        operations: dict[str, Callable[[], Any]] = {
            "broadcast": lambda: group.broadcast(torch.zeros(2)),
            "barrier": group.barrier,
            "scatter_sum": lambda: group.scatter_sum(torch.zeros(2, 2)),
            "swap": lambda: group.swap(torch.zeros(2, 2)),
        }
        return said(operations[other])

    assert all("broke" in text for text in run_ranks(2, fn))


OPERATIONS: dict[str, Callable[[Group], Any]] = {
    "a sum of 8 bytes": lambda group: group.sum(torch.zeros(2)).wait(),
    "a gather of 8 bytes": lambda group: group.gather(torch.zeros(1, dtype=torch.float64)),
    "a swap of 254 bytes": lambda group: group.gather_bytes(b"some"),
    "a broadcast of 8 bytes": lambda group: group.broadcast(torch.zeros(2)),
}


@pytest.mark.parametrize("collective", ["shm", "gloo"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a broadcast of 8 bytes", "a sum of 8 bytes"),
        ("a swap of 254 bytes", "a gather of 8 bytes"),
        ("a gather of 8 bytes", "a swap of 254 bytes"),
        ("a sum of 8 bytes", "a swap of 254 bytes"),
    ],
)
def test_members_out_of_step_are_told_both_operations(
    collective: str, first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where neither hears the other, and each would wait for the timeout."""
    monkeypatch.setattr(shared, "_STRAY_SECONDS", 0.1)
    monkeypatch.setattr(backend, "_STRAY_SECONDS", 0.1)

    def fn(group: Group) -> str:
        group.barrier()
        return said(lambda: OPERATIONS[second if group.rank else first](group))

    for text in run_ranks(2, fn, collective=collective):
        assert first in text and second in text and "the same operations in the same order" in text, text


@pytest.mark.parametrize("collective", ["shm", "gloo"])
def test_byte_strings_for_different_purposes_are_not_mixed(collective: str) -> None:
    def fn(group: Group) -> list[str]:
        purpose = "an evaluation" if group.rank else "session.gather"
        return [said(lambda: group.gather_bytes(b"own", purpose=purpose)), said(group.barrier)]

    first, second = run_ranks(2, fn, collective=collective)
    assert first[0].startswith("worker 0 is in session.gather and worker 1 in an evaluation; all workers must call")
    assert second[0].startswith("worker 1 is in an evaluation and worker 0 in session.gather; all workers must call")
    assert first[1] and second[1], "the group is whole after that"


def test_a_member_that_comes_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it noted before, or never noted, is not taken for another operation."""
    monkeypatch.setattr(shared, "_STRAY_SECONDS", 0.02)
    monkeypatch.setattr(backend, "_STRAY_SECONDS", 0.02)

    def fn(group: Group) -> float:
        total = torch.ones(2)
        for late in (0, 1):
            if group.rank == late:
                time.sleep(0.15)
            group.sum(total).wait()
            group.broadcast(total)
        return float(total[0])

    assert run_ranks(2, fn, collective="shm") == run_ranks(2, fn, collective="gloo") == [4.0, 4.0]


def test_a_dtype_that_cannot_be_summed_leaves_the_group_whole() -> None:
    def fn(group: Group) -> float:
        with pytest.raises(ConfigError, match=r"torch.bool cannot be summed; use one of float32"):
            group.sum(torch.ones(3, dtype=torch.bool))
        total = torch.ones(3)
        group.sum(total).wait()
        return float(total.sum())

    assert run_ranks(2, fn, collective="shm") == [6.0, 6.0]


# -- interrupted -------------------------------------------------------------------------------------------------------


class Interruption(Exception):
    pass


class Waiting:
    """Whether an alarm would fall into a wait; one that comes earlier or later means nothing."""

    now = False


def interrupt(number: int, frame: object) -> None:
    if Waiting.now:
        raise Interruption


@pytest.mark.parametrize("collective", ["shm", "gloo"])
def test_a_handler_that_raises_in_the_middle_of_a_sum_breaks_the_group(collective: str) -> None:
    """The sum is half done: what had been added would be added again."""

    def summed(group: Group, buffer: Tensor, alarm: float) -> None:
        buffer.fill_(1.0)
        group.barrier()
        work = group.sum(buffer)
        if group.rank == 0:
            signal.setitimer(signal.ITIMER_REAL, alarm)
        try:
            Waiting.now = True
            work.wait()
            Waiting.now = False
        except Interruption:
            assert said(work.wait), "a sum that was interrupted can be waited for again"
            raise
        finally:
            Waiting.now = False

    def fn(group: Group) -> list[str]:
        buffer = group.buffer(16 << 20, torch.float32)
        signal.signal(signal.SIGALRM, interrupt)
        for number in range(200):
            try:
                summed(group, buffer, 0.0005 * (1 + number % 10))
            except (Interruption, GroupError) as error:
                return [type(error).__name__, said(lambda: group.sum(buffer).wait()), said(group.barrier)]
            assert bool((buffer == 2.0).all()), "a wrong sum"
        return ["never interrupted"]

    first, second = run_ranks(2, fn, collective=collective)
    assert first[0] == "Interruption" and second[0] == "GroupError", (first, second)
    assert all(first) and all(second), "the group goes on after half a sum"


# -- deaths that others hear of late -----------------------------------------------------------------------------------


@needs_lab
def test_a_death_that_the_first_member_of_a_host_meets_outside_of_wait(lab: Lab) -> None:
    """It starts sums and gathers, and does not wait: its host must hear of it all the same."""

    def fn(group: Group) -> float:
        buffer = group.buffer(1 << 16, torch.float32)
        group.sum(buffer).wait()
        group.barrier()
        if group.rank == 2:
            die()
        begun = time.monotonic()

        def act() -> None:
            group.sum(buffer)
            if group.rank == 0:
                time.sleep(0.3)  # gloo has noticed by then, and nobody waits for it
            group.gather(torch.zeros(1))

        assert said(act)
        return time.monotonic() - begun

    seconds = run_ranks(4, fn, lab=lab, mortal={2})
    assert max(seconds[0], seconds[1], seconds[3]) < 1.3


def test_in_a_cascade_the_one_that_died_is_named() -> None:
    def fn(group: Group) -> str:
        group.barrier()
        if group.rank == 1:
            die()
        return said(lambda: group.sum(torch.zeros(50_000)).wait())

    for _ in range(5):
        told = run_ranks(4, fn, mortal={1})
        assert all("worker 1 has ended or left" in told[rank] for rank in (0, 2, 3)), told


# -- what the contract allows ------------------------------------------------------------------------------------------


@needs_lab
def test_members_may_wait_in_different_orders_across_hosts(lab: Lab) -> None:
    def fn(group: Group) -> list[float]:
        first, second = group.buffer(1 << 18, torch.float32), group.buffer(1 << 18, torch.float32)
        first.fill_(1.0)
        second.fill_(2.0)
        if group.rank == 0:
            works = [group.sum(first), group.sum(second)]
            works[1].wait()
            works[0].wait()
        else:
            group.sum(first).wait()
            group.sum(second).wait()
        return [float(first[0]), float(second[-1])]

    assert run_ranks(4, fn, lab=lab) == [[4.0, 8.0]] * 4


@needs_lab
def test_bits_do_not_depend_on_where_a_tensor_lies() -> None:
    def fn(group: Group) -> int:
        generator = torch.Generator().manual_seed(group.rank)
        anywhere = torch.randn(1 << 20, generator=generator)
        shared = group.buffer(1 << 20, torch.float32)
        shared.copy_(anywhere)
        group.sum(shared).wait()
        group.sum(anywhere).wait()
        return int((shared != anywhere).sum())

    with Lab(hosts=3) as three:
        assert run_ranks(4, fn, lab=three, collective="hierarchical") == [0] * 4


# -- sockets of others -------------------------------------------------------------------------------------------------


def test_sockets_that_others_open_meanwhile_are_not_the_groups() -> None:
    """A metrics server may be asked while workers meet; its connection ends soon, and means nothing."""
    theirs = create_server(("127.0.0.1", 0))
    opened: list[Any] = []

    def meet() -> None:
        listener = create_server(("127.0.0.1", 0))
        link = create_connection(listener.getsockname())
        stranger = create_connection(theirs.getsockname())
        opened.extend([listener, link, listener.accept()[0], stranger])

    thread = threading.Thread(target=lambda: theirs.accept()[0].close())
    thread.start()
    try:
        found = Connections.opened_by(meet)
        thread.join()
        listener, link, accepted, _ = opened
        mine = {listener.getsockname()[1]}
        kept = found.between(mine, mine)
        assert set(kept.descriptors()) == {listener.fileno(), link.fileno(), accepted.fileno()}
        assert found.any_ended() and not kept.any_ended()
        link.close()
        assert kept.any_ended()
    finally:
        for each in [*opened, theirs]:
            each.close()
