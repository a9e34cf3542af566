"""Counting what a member of a group sends."""

from __future__ import annotations

import time
from typing import Protocol

from shoal.core.traffic import Flow, Traffic


class Strikes(Protocol):
    """A plan of faults, as far as groups know of it."""

    def at(self, point: str, *, worker: int, step: int) -> None:
        """A worker is at this point of this step."""


class Departing:
    """Passed on the member's thread whenever a part of its gradients is about to leave: a plan may strike there."""

    def __init__(self) -> None:
        self.strikes: Strikes | None = None
        self.worker = 0
        self.step = 0

    def passed(self) -> None:
        if self.strikes is not None:
            self.strikes.at("bucket", worker=self.worker, step=self.step)


class Account:
    """One member's account. One thread."""

    def __init__(self) -> None:
        self.codec = "none"
        """By which codec what is sent from now on is encoded; whoever sets it puts "none" back."""
        self.departing = Departing()
        self._flows: dict[tuple[str, str, str], list[int]] = {}
        self._operations = 0
        self._exchange = 0.0
        self._exposed = 0.0
        self._under_way = 0
        self._since = 0.0
        self._inside = 0
        self._entered = 0.0

    def sent(self, kind: str, link: str, size: int, messages: int, codec: str | None = None) -> None:
        """So many bytes of payload leave over `link`, encoded by `codec`, or by the account's if None."""
        key = kind, self.codec if codec is None else codec, link
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = [0, 0]
        flow[0] += size
        flow[1] += messages

    def begun(self, operations: int = 1) -> None:
        """An operation starts, or (with 0) a further part of one."""
        self._operations += operations
        self._open(time.perf_counter())

    def counted(self) -> None:
        """An operation that consists of others, which do not count."""
        self._operations += 1

    def done(self) -> None:
        """An operation has ended, well or not."""
        self._shut(time.perf_counter())

    def enter(self) -> None:
        """From now on the member waits for an operation, or works on it, and can do nothing else. May be nested."""
        now = time.perf_counter()
        if self._inside == 0:
            self._entered = now
        self._inside += 1
        self._open(now)

    def leave(self) -> None:
        """It can again."""
        now = time.perf_counter()
        self._inside -= 1
        if self._inside == 0:
            self._exposed += now - self._entered
        self._shut(now)

    def _open(self, now: float) -> None:
        """What is exposed is exchange too: each moment of either counts once."""
        if self._under_way == 0:
            self._since = now
        self._under_way += 1

    def _shut(self, now: float) -> None:
        self._under_way -= 1
        if self._under_way == 0:
            self._exchange += now - self._since

    @property
    def exposed(self) -> float:
        """Seconds so far in which the member could do nothing else."""
        return self._exposed

    def now(self) -> Traffic:
        """The account so far."""
        flows = [Flow(*key, *counts) for key, counts in self._flows.items()]
        exchange = self._exchange
        if self._under_way:
            exchange += time.perf_counter() - self._since
        return Traffic(flows, self._operations, exchange, self._exposed)
