"""What a display knows of a run: its last figures and its pace, from events, in bounded memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shoal.core.events import (
    AnyEvent,
    EvalDone,
    ExchangeSettled,
    Preparing,
    RunEnded,
    RunFailed,
    RunStarted,
    ServersSeen,
    StepDone,
    WorkerSeen,
)

_WINDOW_SECONDS = 10.0
_MARK_SECONDS = 0.25
_SMOOTHING = 0.05
_STALL_SECONDS = 10.0


class Shares(NamedTuple):
    """Where a worker's time went, as fractions that sum to 1. `rest` is evaluation, checkpoints and waiting."""

    compute: float
    exchange: float
    data: float
    rest: float


class _Mark(NamedTuple):
    time: float
    step: int
    samples: int


class _Seen(NamedTuple):
    time: float
    samples: int
    seconds: Shares


_NOTHING_SEEN = _Seen(0.0, 0, Shares(0.0, 0.0, 0.0, 0.0))


class WorkerTally:
    """The pace of one worker over the last seconds, and over the whole run once `whole` is set."""

    def __init__(self, began: float) -> None:
        self.memory = 0
        self.whole = False
        self._began = _NOTHING_SEEN._replace(time=began)
        # told about once a second; the bound is for a worker that tells more often
        self._seen: deque[_Seen] = deque(maxlen=64)

    def see(self, event: WorkerSeen, now: float) -> None:
        told = event.seconds
        compute, exchange, data = (max(0.0, told.get(name, 0.0)) for name in ("compute", "exchange", "data"))
        rest = max(0.0, sum(told.values()) - compute - exchange - data)
        seen = _Seen(now, event.samples, Shares(compute, exchange, data, rest))
        if self._seen and seen.samples < self._seen[-1].samples:
            # counted anew: the process was replaced
            self._seen.clear()
            self._began = _NOTHING_SEEN._replace(time=now)
        self._seen.append(seen)
        while len(self._seen) > 2 and now - self._seen[1].time >= _WINDOW_SECONDS:
            self._seen.popleft()
        self.memory = event.memory

    @property
    def rate(self) -> float | None:
        """Samples per second."""
        first, last = self._ends()
        passed = last.time - first.time
        return (last.samples - first.samples) / passed if passed > 0 else None

    @property
    def shares(self) -> Shares | None:
        first, last = self._ends()
        spent = [max(0.0, after - before) for after, before in zip(last.seconds, first.seconds, strict=True)]
        total = sum(spent)
        return Shares(*(part / total for part in spent)) if total > 0 else None

    def _ends(self) -> tuple[_Seen, _Seen]:
        if not self._seen:
            return self._began, self._began
        from_start = self.whole or len(self._seen) == 1
        return self._began if from_start else self._seen[0], self._seen[-1]


class Tally:
    """Follows one run after the other; `RunStarted` begins anew. Used by one thread. A step costs about 1 µs."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reset(None)

    def _reset(self, run: RunStarted | None) -> None:
        now = self._clock()
        self.run = run
        self.preparing: Preparing | None = None
        self._preparing_since = now
        self.last: StepDone | None = None
        self.evaluation: EvalDone | None = None
        self.settled: ExchangeSettled | None = None
        self.servers: ServersSeen | None = None
        self.end: RunEnded | RunFailed | None = None
        self.workers: dict[int, WorkerTally] = {}
        self.began = now
        self._ended: float | None = None
        self._samples = 0
        self._smooth = 0.0
        self._smooth_weight = 0.0
        self._moved = now
        self._marks: deque[_Mark] = deque([_Mark(now, run.step if run else 0, 0)])

    def see(self, event: AnyEvent) -> None:
        if isinstance(event, StepDone):
            self._on_step(event)
        elif isinstance(event, WorkerSeen):
            if event.worker not in self.workers:
                self.workers[event.worker] = WorkerTally(self.began)
            self.workers[event.worker].see(event, self._clock())
        elif isinstance(event, RunStarted):
            self._reset(event)
        elif isinstance(event, Preparing):
            self._on_preparing(event)
        elif isinstance(event, EvalDone):
            self.evaluation = event
        elif isinstance(event, ExchangeSettled):
            self.settled = event
        elif isinstance(event, ServersSeen):
            self.servers = event
        elif isinstance(event, RunEnded | RunFailed):
            self._on_end(event)

    def _on_preparing(self, event: Preparing) -> None:
        if self.end is not None:
            self._reset(None)
        if self.preparing is None or self.preparing.what != event.what:
            self._preparing_since = self._clock()
        complete = 0 < event.total <= event.done
        # before the run it stays in sight: there is nothing else to see
        self.preparing = None if complete and self.run is not None else event

    def _on_step(self, event: StepDone) -> None:
        now = self._clock()
        if self.last is not None and len(self._marks) == 2 and self._marks[0].samples == 0:
            # what came before the first step was no step
            self._marks.popleft()
        first = self.last is None
        self.last = event
        self.preparing = None
        self._samples += event.samples
        self._moved = now
        if math.isfinite(event.loss):
            self._smooth += _SMOOTHING * (event.loss - self._smooth)
            self._smooth_weight += _SMOOTHING * (1.0 - self._smooth_weight)
        if first or now - self._marks[-1].time >= _MARK_SECONDS:
            self._marks.append(_Mark(now, event.step, self._samples))
            while len(self._marks) > 2 and now - self._marks[1].time >= _WINDOW_SECONDS:
                self._marks.popleft()

    def _on_end(self, event: RunEnded | RunFailed) -> None:
        self.end, self._ended = event, self._clock()
        self.preparing = None
        for worker in self.workers.values():
            worker.whole = isinstance(event, RunEnded)

    @property
    def step(self) -> int:
        if isinstance(self.end, RunEnded):
            return self.end.step
        if self.last is not None:
            return self.last.step
        return self.run.step if self.run else 0

    @property
    def total(self) -> int:
        """Steps of the run; 0 if that is not known."""
        return self.run.total_steps if self.run else 0

    @property
    def epochs(self) -> int:
        """How many epochs the steps make; 0 if that is not known."""
        if self.run is None or self.run.steps_per_epoch <= 0:
            return 0
        return -(-self.run.total_steps // self.run.steps_per_epoch)

    @property
    def loss(self) -> float | None:
        """Smoothed over about the last twenty steps."""
        return self._smooth / self._smooth_weight if self._smooth_weight else None

    @property
    def elapsed(self) -> float:
        return (self._clock() if self._ended is None else self._ended) - self.began

    @property
    def elapsed_preparing(self) -> float:
        return self._clock() - self._preparing_since

    @property
    def rate(self) -> float | None:
        """Samples per second: over the last seconds, or over the whole run once it has ended."""
        if isinstance(self.end, RunEnded):
            return self._samples / self.elapsed if self.elapsed > 0 and self._samples else None
        passed = self._moved - self._marks[0].time
        return (self._samples - self._marks[0].samples) / passed if passed > 0 and self.last else None

    @property
    def seconds_left(self) -> float | None:
        """At the pace of the last seconds; None where there is no pace yet or no known end."""
        first = self._marks[0]
        if self.last is None or self.end is not None or self.total <= 0 or self.last.step <= first.step:
            return None
        pace = (self._moved - first.time) / (self.last.step - first.step)
        return max(0.0, (self.total - self.last.step) * pace - (self._clock() - self._moved))

    @property
    def stalled(self) -> float | None:
        """Seconds since the last step, if they are far more than a step takes."""
        if self.last is None or self.end is not None or self.last.step >= self.total > 0:
            return None
        since, first = self._clock() - self._moved, self._marks[0]
        pace = (self._moved - first.time) / max(1, self.last.step - first.step)
        return since if since > max(_STALL_SECONDS, 5.0 * pace) else None

    @property
    def shares(self) -> Shares | None:
        """The mean over workers."""
        known = [shares for worker in self.workers.values() if (shares := worker.shares) is not None]
        return Shares(*map(_mean, zip(*known, strict=True))) if known else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
