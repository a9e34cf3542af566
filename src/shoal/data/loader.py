"""Loads the batches of one worker: in the worker itself, or in loader processes beside it when that pays.

Who decides: an explicit number of processes, or a measurement of the first steps (`choose`, a pure rule).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from shoal.core.errors import DataError
from shoal.data.fetch import Fetcher, Positions, Request
from shoal.data.tree import Unpackable
from shoal.engines.activity import Activity

__all__ = ["Choice", "Loader", "Positions", "Request", "Stream", "choose"]

if TYPE_CHECKING:
    from shoal.data.background import LoaderProcess, Ticket

_DEPTH = 2
"""Requests asked ahead, for each loader process."""
_SKIPPED_TAKES = 2
_MEASURED_TAKES = 8
_MOST_PROCESSES = 8
_SMALL_SHARE = 0.05
_HANDOVER_SECONDS = 0.0005
"""What a batch from another process costs the worker at least: asking, a context switch, receiving."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How to load, and one sentence that says why."""

    processes: int
    why: str


def choose(*, wait: float, ran: float, busy: float, spare_cores: float) -> Choice:
    """How many loader processes pay, from what one step took while loading inline. All times in seconds.

    `wait`: to load; `ran`: the part of it in which the thread computed or wanted to (the rest it slept, or waited
    for a disk or the network); `busy`: everything else in the step. `spare_cores`: this worker's share of the cores
    that no worker computes on.
    """
    share = wait / (wait + busy) if wait > 0 else 0.0
    takes = f"loading takes {share:.1%} of the step"
    if share < _SMALL_SHARE:
        return Choice(0, f"inline: {takes}")
    if wait < _HANDOVER_SECONDS:
        return Choice(0, f"inline: {takes}, but {wait * 1e3:.2g} ms is no more than handing it over would cost")
    needed = ceil(min(wait / max(busy, 1e-9), _MOST_PROCESSES))
    if ran < 0.5 * wait:
        return _in_background(needed + 1, f"{takes} and mostly waits (disk, network, sleep)")
    if spare_cores >= 1:
        return _in_background(min(int(spare_cores), needed), f"{takes} and computes; {spare_cores:.3g} cores are spare")
    return Choice(
        0, f"inline: {takes} and computes, but no core is spare ({spare_cores:.3g}); set data_workers= to force it"
    )


def _in_background(processes: int, reason: str) -> Choice:
    processes = max(1, min(processes, _MOST_PROCESSES))
    return Choice(processes, f"{_counted(processes)}: {reason}")


def _counted(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"


@dataclass(slots=True)
class _Probe:
    """What loading one source inline took, over all streams of it, until there is enough to choose."""

    waits: list[float] = field(default_factory=list)
    rans: list[float] = field(default_factory=list)
    busies: list[float] = field(default_factory=list)

    def loaded(self, wait: float, ran: float) -> None:
        self.waits.append(wait)
        self.rans.append(ran)

    def enough(self) -> bool:
        return min(len(self.waits), len(self.busies)) >= _SKIPPED_TAKES + _MEASURED_TAKES

    def choose(self, spare_cores: float) -> Choice:
        wait, ran = fmean(self.waits[_SKIPPED_TAKES:]), fmean(self.rans[_SKIPPED_TAKES:])
        # a median: an evaluation or a checkpoint in between is not a part of the step
        return choose(wait=wait, ran=ran, busy=median(self.busies[_SKIPPED_TAKES:]), spare_cores=spare_cores)


class Loader:
    """Loads for one worker.

    `sources`: by name, what to fetch from; the loader processes inherit them when they are forked, so data sets are
    never sent anywhere. `processes`: 0 loads inline, N in N processes, None measures each source and chooses.
    `spare_cores`: see `choose`. `close_fds`: asked before each fork for descriptors that a loader process must
    not keep open (sockets whose closing tells peers that the worker died). In `activity` is what it is at, also where
    that is done by a loader process that it waits for.

    One thread uses the loader and its streams; it must live as long as they do.
    """

    def __init__(
        self,
        sources: Mapping[str, Fetcher],
        *,
        processes: int | None,
        spare_cores: float,
        close_fds: Callable[[], Iterable[int]] = tuple,
        activity: Activity | None = None,
    ) -> None:
        self.sources = dict(sources)
        self._spare_cores = spare_cores
        self._close_fds = close_fds
        self._activity = activity or Activity()
        for fetcher in self.sources.values():
            fetcher.activity = self._activity
        self._pool: list[LoaderProcess] = []
        self._closed = False
        self._measures = processes is None
        self._probes = {name: _Probe() for name in self.sources}
        self._choices: dict[str, Choice] = {}
        if processes is not None:
            how = _counted(processes) if processes else "inline"
            self._choices = dict.fromkeys(self.sources, Choice(processes, f"{how}: data_workers={processes}"))

    def open(self, source: str, make_request: Callable[[int], Request | None], start: int = 0) -> Stream:
        """Begin a stream. `make_request(i)` is called in order i = start, start + 1, ... from within `Stream.take`,
        ahead of what is taken when processes load; None ends the stream. Nothing is started before the first take."""
        return Stream(self, source, make_request, start)

    def close(self) -> None:
        """End the loader processes and reap them. Streams can still load inline afterwards."""
        self._closed = True
        pool, self._pool = self._pool, []
        if pool:
            from shoal.data.background import end_all

            end_all(pool)

    def _process(self, place: int) -> LoaderProcess:
        """The process at `place` of the pool, forked at first need; in place of one that died, a new one."""
        if self._closed:
            raise DataError("the loader was closed; open a new one to load in the background")
        while len(self._pool) <= place:
            self._pool.append(self._start())
        if not self._pool[place].alive:
            self._pool[place] = self._start()
        return self._pool[place]

    def _start(self) -> LoaderProcess:
        from shoal.data.background import LoaderProcess

        siblings = [process for process in self._pool if process.alive]
        try:
            return LoaderProcess(self.sources, siblings, self._close_fds(), self._activity)
        except OSError as error:
            raise DataError(
                f"a loader process could not be started: {error}; set data_workers=0 to load in the worker itself"
            ) from error

    def _choice(self, source: str) -> Choice | None:
        """None as long as the source is measured."""
        return self._choices.get(source)

    def _settle(self, source: str) -> Choice | None:
        """Choose for a measured source, once enough was seen."""
        probe = self._probes[source]
        if source not in self._choices and probe.enough():
            self._choices[source] = probe.choose(self._spare_cores)
        return self._choices.get(source)

    def _keep_inline(self, source: str, why: str) -> bool:
        """Take back a measured choice of processes. False if the user set their number."""
        if self._measures:
            self._choices[source] = Choice(0, f"inline: {why}")
        return self._measures


class Stream:
    """The requests of one source in order. Made by `Loader.open`; `take` may raise `DataError` for the request whose
    turn it is, after which the next one can be taken."""

    def __init__(self, loader: Loader, source: str, make_request: Callable[[int], Request | None], start: int) -> None:
        self.wait_seconds = 0.0
        self._loader = loader
        self._source = source
        self._fetch = loader.sources[source].fetch
        self._make_request = make_request
        self._tickets: deque[Ticket] = deque()
        self._asked = 0
        self._handed_back: deque[Request] = deque()
        self._start_at(start)

    @property
    def choice(self) -> str:
        """One sentence: how data is loaded, and why."""
        choice = self._loader._choice(self._source)
        return choice.why if choice else "inline: measuring how long loading takes"

    def take(self) -> list[Any] | None:
        """The batches of the next request; None at the end of the stream and after `close`."""
        begin = time.perf_counter()
        try:
            choice = self._loader._choice(self._source)
            if choice is None:
                choice = self._measure_busy(begin)
            if choice is None:
                return self._take_measured(begin)
            return self._take_background(choice.processes) if choice.processes else self._take_inline()
        finally:
            self.wait_seconds += time.perf_counter() - begin

    def reset(self, start: int) -> None:
        """Forget what was asked ahead, and go on with `make_request(start)`."""
        self._tickets.clear()
        self._handed_back.clear()
        self._start_at(start)

    def close(self) -> None:
        """Forget what was asked ahead. The loader processes stay for other streams: `Loader.close` ends them."""
        self.reset(self._next)
        self._ended = True

    def _start_at(self, start: int) -> None:
        self._next = start
        self._ended = False
        self._left: float | None = None

    def _request(self) -> Request | None:
        if self._handed_back:
            return self._handed_back.popleft()
        if self._ended:
            return None
        request = self._make_request(self._next)
        self._next += 1
        self._ended = request is None
        return request

    def _take_inline(self) -> list[Any] | None:
        if self._tickets:
            # another stream of this source found that its batches cannot leave a process
            self._hand_back()
        request = self._request()
        return None if request is None else self._fetch(request)

    def _measure_busy(self, begin: float) -> Choice | None:
        if self._left is not None:
            self._loader._probes[self._source].busies.append(begin - self._left)
        return self._loader._settle(self._source)

    def _take_measured(self, begin: float) -> list[Any] | None:
        self._left = None
        ran = _thread_ran()
        batches = self._take_inline()
        self._left = time.perf_counter()
        if batches is not None:
            self._loader._probes[self._source].loaded(self._left - begin, _thread_ran() - ran)
        return batches

    def _take_background(self, processes: int) -> list[Any] | None:
        self._ask_ahead(processes)
        if not self._tickets:
            return None
        ticket = self._tickets.popleft()
        try:
            return ticket.wait()
        except Unpackable as error:
            return self._unpackable(ticket, error)

    def _ask_ahead(self, processes: int) -> None:
        while len(self._tickets) < _DEPTH * processes:
            request = self._request()
            if request is None:
                return
            try:
                process = self._loader._process(self._asked % processes)
            except DataError:
                self._handed_back.appendleft(request)
                raise
            self._asked += 1
            self._tickets.append(process.ask(self._source, request))

    def _unpackable(self, ticket: Ticket, error: Unpackable) -> list[Any]:
        if not self._loader._keep_inline(self._source, f"batches cannot leave a loader process ({error})"):
            raise DataError(
                f"a batch of {self._source!r} cannot leave its loader process: {error}. "
                "Let collate return these, or set data_workers=0 to load in the worker itself"
            ) from error
        self._hand_back()
        return self._fetch(ticket.request)

    def _hand_back(self) -> None:
        """What was asked ahead will be loaded inline, in its order."""
        self._handed_back.extendleft(ticket.request for ticket in reversed(self._tickets))
        self._tickets.clear()


def _thread_ran() -> float:
    """Seconds in which this thread computed or waited for a core; without the latter where the kernel does not say."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as stat:
            return time.thread_time() + int(stat.read().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return time.thread_time()
