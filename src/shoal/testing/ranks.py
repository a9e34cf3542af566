"""Runs a function on a few ranks that share a group, each in a process of its own.

    values = run_ranks(3, lambda group: float(summed(group)))

The ranks are forked, so the function may be a lambda or a closure. What goes wrong on any of them is in the error.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
import traceback
from collections.abc import Callable, Container
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import torch

from shoal.comm.choose import make_group
from shoal.comm.group import Group
from shoal.comm.shm.segment import sweep
from shoal.data.parcel import seal, unseal
from shoal.engines.local import Crew, Ended, LocalEngine, Message
from shoal.engines.places import enter, spread
from shoal.testing.lab import Lab
from shoal.wire.link import Link, LinkClosed

_SHOW_STACKS = signal.SIGUSR1
_LOOK_AGAIN_SECONDS = 0.5
"""How long the other ranks have to say what they met, once one has failed."""


class RanksFailed(AssertionError):
    """Some ranks raised, died or did not finish; the message has what is known of each."""


class _Answer(msgspec.Struct, array_like=True):
    returned: bool
    content: bytes


def run_ranks(
    ranks: int,
    fn: Callable[[Group], Any],
    deadline: float = 30.0,
    *,
    mortal: Container[int] = (),
    lab: Lab | None = None,
    collective: str = "auto",
) -> list[Any]:
    """`fn(group)` on every rank; what each returned, in order of rank.

    With `lab` the ranks run in its hosts, in blocks: the first ones in the first host. `collective` says how they sum,
    as for the Trainer.

    Values are made of tensors, arrays, numbers, strings, lists and dicts. Ranks in `mortal` may die: their value is
    None then. Raises `RanksFailed` if another rank raises or dies, or if one is not done after `deadline` seconds; all
    of them are ended then, and nothing is left behind.
    """
    distributed: Any = import_module("torch.distributed")  # once here, not in every rank

    places = [None] * ranks if lab is None else spread(lab.hosts, ranks)

    def meet(store: Any, rank: int) -> Group:
        place = places[rank]
        if place is None:
            return _meet(store, rank, ranks, deadline, None, collective)
        enter(place)
        return _meet(store, rank, ranks, deadline, place.address, collective)

    def body(rank: int, link: Link, scratch: Path) -> None:
        torch.set_num_threads(1)
        with open(_stacks(scratch, rank), "w") as stacks:
            # by a signal: the watchdog thread of faulthandler, if the parent has one, does not survive a fork
            faulthandler.register(_SHOW_STACKS, file=stacks)
            store = distributed.FileStore(str(scratch / "store"), ranks)
            _answer(link, fn, lambda: meet(store, rank))
            # a rank that left now could break the last operation of its peers
            with suppress(LinkClosed):
                link.recv()

    try:
        with LocalEngine().start(ranks, body) as crew:
            return _Watch(crew, mortal).values(time.monotonic() + deadline, deadline)
    except RanksFailed:
        # All were ended at once, perhaps while they made a segment. Where some survive, they leave nothing themselves.
        sweep()
        raise


def _meet(store: Any, rank: int, ranks: int, deadline: float, host: str | None, collective: str) -> Group:
    """The group, once every rank has it: one that dies at once must not break the meeting of the others."""
    timeout = timedelta(seconds=2 * deadline)
    group = make_group(store, rank, ranks, torch.device("cpu"), timeout=timeout, host=host, collective=collective)
    store.set(f"met/{rank}", b"")
    store.wait([f"met/{other}" for other in range(ranks)], timeout)
    return group


def _answer(link: Link, fn: Callable[[Group], Any], meet: Callable[[], Group]) -> None:
    try:
        header, buffers = seal(fn(meet()))
        answer = _Answer(True, header)
    except BaseException:
        answer, buffers = _Answer(False, traceback.format_exc().encode()), []
    with suppress(LinkClosed):
        link.send(msgspec.msgpack.encode(answer), buffers)


def _stacks(scratch: Path, rank: int) -> Path:
    """Where a rank that hangs leaves the stacks of its threads."""
    return scratch / f"stacks-{rank}"


class _Watch:
    """Collects the answers of a crew."""

    def __init__(self, crew: Crew, mortal: Container[int]) -> None:
        self._crew = crew
        self._mortal = mortal
        self._values: dict[int, Any] = {}
        self._troubles: dict[int, str] = {}

    def values(self, until: float, deadline: float) -> list[Any]:
        ranks = self._crew.workers
        while len(self._values) + len(self._troubles) < ranks:
            arrival = self._crew.next(max(0.0, until - time.monotonic()))
            if arrival is None:
                break
            self._take(arrival)
            if self._troubles:
                until = min(until, time.monotonic() + _LOOK_AGAIN_SECONDS)
        if len(self._values) < ranks:
            self._ask_for_stacks()
            raise RanksFailed("\n\n".join(self._said(rank, deadline) for rank in range(ranks)))
        return [self._values[rank] for rank in range(ranks)]

    def _take(self, arrival: Message | Ended) -> None:
        if isinstance(arrival, Ended):
            if arrival.worker in self._mortal:
                self._values.setdefault(arrival.worker, None)
            elif arrival.worker not in self._troubles:
                self._values.pop(arrival.worker, None)
                self._troubles[arrival.worker] = _end(arrival)
            return
        answer = msgspec.msgpack.decode(arrival.header, type=_Answer)
        if answer.returned:
            self._values[arrival.worker] = unseal(answer.content, arrival.buffers)
        else:
            self._troubles[arrival.worker] = answer.content.decode().rstrip()

    def _ask_for_stacks(self) -> None:
        silent = self._crew.pids().keys() - self._values.keys() - self._troubles.keys()
        for rank in silent:
            with suppress(OSError):
                os.kill(self._crew.pids()[rank], _SHOW_STACKS)
        until = time.monotonic() + _LOOK_AGAIN_SECONDS
        while time.monotonic() < until and not all(self._shown(rank) for rank in silent):
            time.sleep(0.01)

    def _shown(self, rank: int) -> str:
        with suppress(OSError):
            return _stacks(self._crew.scratch, rank).read_text().rstrip()
        return ""

    def _said(self, rank: int, deadline: float) -> str:
        if rank in self._troubles:
            return f"rank {rank}: {self._troubles[rank]}"
        if rank in self._values:
            return f"rank {rank}: returned"
        when = "when another failed" if self._troubles else f"after {deadline:g} s"
        return f"rank {rank}: not done {when}. {self._shown(rank)}"


def _end(end: Ended) -> str:
    return f"was killed by {signal.Signals(end.signal).name}" if end.signal else f"left with exit code {end.code}"


def die() -> None:
    """End this process at once, as the out-of-memory killer would."""
    os.kill(os.getpid(), signal.SIGKILL)
